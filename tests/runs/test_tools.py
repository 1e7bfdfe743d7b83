"""Tools within a run: the prompt shows them, calls are made in the scoring workers, their results
come back as messages, and the numbers say what was called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs import make
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.orchestrator.conversations import Conversations
from lowroll.orchestrator.prompt_source import draw_at
from lowroll.orchestrator.settings import SamplingSettings
from lowroll.types import BehaviorTag, Group, PolicySpan, Request, Rollout
from tests.fixtures import hermes
from tests.fixtures.runs import settings, train

CALCULATOR = str(Path(__file__).parents[2] / "examples" / "calculator.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hermes.model(tmp_path_factory.mktemp("tools") / "model")


class Scripted:
    """An engine that draws what a function of the prompt's text says."""

    def __init__(self, chat: ChatTokenizer, say: Any) -> None:
        self.chat, self.say, self.seen = chat, say, []

    def generate(self, requests: list[Request], on_progress: Any = None) -> list[Group]:
        return [Group(one, [self.draw(one, i) for i in range(one.n)]) for one in requests]

    def draw(self, request: Request, sample: int) -> Rollout:
        asked = self.chat.tokenizer.decode(request.prompt_ids)
        self.seen.append(asked)
        ids = self.chat.encode_response(self.say(asked, sample))
        tag = BehaviorTag((PolicySpan(0, ""),), "fp32")
        return Rollout(ids, [-1.0] * len(ids), "stop", tag, stop_reason=ids[-1])


def call(**arguments: Any) -> str:
    text = json.dumps({"name": "calculate", "arguments": arguments})
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.slow
def test_a_conversation_with_a_tool(folder: Path) -> None:
    chat = ChatTokenizer(load_tokenizer(folder))
    env = make(CALCULATOR, name="calc", args={"digits": 2})
    draw = draw_at(env, "calc", 0, "train", chat, SamplingSettings(max_tokens=200), 4, 1)
    question = draw.prompt.messages[0]["content"]
    a, operation, b = question.removeprefix("What is ")[:-1].split()
    right = call(a=int(a), operation=operation, b=int(b))

    def say(asked: str, sample: int) -> str:
        if "result: " in asked:
            return asked.rpartition("result: ")[2].partition("<|end|>")[0]
        return [right, "<tool_call>{", call(a=10**13, operation="+", b=1), "7"][sample]

    engine = Scripted(chat, say)
    spec = {"calc": (CALCULATOR, {"digits": 2}, 0)}
    with ScorerPool(spec, num_workers=1, time_limit=30, memory_limit_mb=8192) as pool:
        talks = Conversations(engine, pool, chat)
        (group,) = talks.generate([draw.request])
        assert group.conversations is not None
        said = [[*draw.prompt.messages, *one.messages] for one in group.conversations]
        scores = pool.score([(draw.prompt, one) for one in said])
    assert '"name": "calculate"' in engine.seen[0] and question in engine.seen[0]
    assert [one.ended for one in group.conversations] == ["done"] * 4
    answer = str(draw.prompt.info["answer"])
    assert [one["role"] for one in said[0]] == ["user", "assistant", "tool", "assistant"]
    assert said[0][2]["content"] == said[0][3]["content"] == answer
    assert "cannot be read" in said[1][2]["content"] and "too large" in said[2][2]["content"]
    assert len(said[3]) == 2  # a turn that calls nothing is the last
    found = [(one.reward, *one.metrics.values()) for one in scores]
    assert found[0] == (1.0, 1.0, 0.0, 0.0)
    assert [one[1:] for one in found[1:]] == [(0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
    # what was drawn stays as it was drawn, and the result stands between
    rollout = group.rollouts[0]
    assert rollout.turns is not None and len(rollout.turns) == 2
    first, second = rollout.turns
    assert chat.decode(rollout.token_ids[first.start : first.end]) == right
    between = chat.tokenizer.decode(rollout.token_ids[first.end : second.start])
    assert between == f"<|user|>result: {answer}<|end|><|assistant|>"


@pytest.mark.slow
def test_a_run_with_tools_and_its_resumption(folder: Path, tmp_path: Path) -> None:
    def tree(out: str, steps: int) -> dict[str, Any]:
        return settings(
            folder,
            tmp_path / out,
            env=[{"id": CALCULATOR, "name": "calc", "args": {"max_turns": 2}}],
            rollout={"weights": "int8", "max_tokens": 8, "cache_tokens": 16384},
            train={"max_steps": steps, "warmup_steps": 0, "lr_scheduler_type": "constant"},
            score={"memory_limit_mb": 8192},
        )

    whole = train(tree("whole", 2))
    (record, _) = map(json.loads, (tmp_path / "whole" / "metrics.jsonl").open())
    for name in ("tool_calls", "failed_tool_calls", "ill_formed_tool_calls"):
        assert record[f"reward/calc/{name}"] == 0.0  # it has learned nothing yet
    assert record["reward/error_rate"] == 0.0
    train(tree("parts", 1))
    train(tree("parts", 2), resume=True)
    files = [tmp_path / out / "final" / "model.safetensors" for out in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert whole is not None


@pytest.mark.slow
def test_a_template_without_tools_is_refused_before_anything(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", env=[{"id": CALCULATOR, "name": "calc"}])
    with pytest.raises(ValueError, match="environment 'calc': chat template: it says nothing of"):
        train(tree)
