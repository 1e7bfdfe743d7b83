"""Programs that users bring, as they are: the `openai` package here, verifiers and lm-eval in an
environment of their own (`make test-clients`), whose requests are also written out here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from lowroll import Engine, Request
from lowroll.runs.demo import build_tokenizer
from tests.fixtures import engines
from tests.fixtures.hermes import TEMPLATE
from tests.fixtures.http import NAME, events, post, serving
from tests.fixtures.processes import eventually
from tests.fixtures.scripted import Scripted
from tests.fixtures.serving import Moody

CLIENTS = Path(__file__).parents[1] / "fixtures" / "clients"
PYTHON = os.environ.get("LOWROLL_CLIENTS_PYTHON")
CLASSIC = os.environ.get("LOWROLL_CLASSIC_PYTHON")
HI: list[Any] = [{"role": "user", "content": "hi"}]


engine_of = partial(engines.engine_of, cache_tokens=8192, max_batch=32, exact=True)


@pytest.fixture(scope="module")
def engine(model: Path) -> Moody:
    return Moody(engine_of(model))


@pytest.fixture(scope="module")
def reference(model: Path) -> Engine:
    return engine_of(model)


@pytest.fixture(scope="module")
def url(engine: Moody) -> Iterator[str]:
    with serving(engine, tokenizer=engine.tokenizer) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0) as made:
        yield made


# -- the openai package ----------------------------------------------------------------------------


def test_openai_lists_the_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME


def test_openai_completes(client: openai.OpenAI, reference: Engine) -> None:
    said = client.completions.create(
        model=NAME, prompt=["one", "two"], max_tokens=9, n=2, logprobs=2, seed=3, user="me"
    )
    groups = reference.generate(
        [
            Request(reference.tokenizer.encode(text), n=2, max_tokens=9, seed=3, top_logprobs=2)
            for text in ("one", "two")
        ]
    )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [choice.text for choice in said.choices] == [reference.text(one) for one in rollouts]
    for choice, rollout in zip(said.choices, rollouts, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == rollout.logprobs
        assert choice.finish_reason == rollout.finish_reason
    assert said.usage is not None and said.usage.prompt_tokens == 6


def test_openai_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(
            model=NAME, messages=HI, max_completion_tokens=12, seed=4, n=2, logprobs=True, **more
        )

    whole = ask(top_logprobs=2)
    texts, ends, logprobs = ["", ""], ["", ""], [[], []]
    used = None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        used = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
            if choice.logprobs is not None:
                logprobs[choice.index] += [one.logprob for one in choice.logprobs.content]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    for one, choice in zip(logprobs, whole.choices, strict=True):
        # the prompt's first pages come from the cache now, and the rest of it rounds otherwise
        assert one == pytest.approx([c.logprob for c in choice.logprobs.content], abs=1e-5)
    assert used == whole.usage
    assert all(len(one.top_logprobs) == 2 for c in whole.choices for one in c.logprobs.content)


def test_openai_streams_a_completion(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": "once", "max_tokens": 20, "seed": 8}
    whole = client.completions.create(**asked)
    parts = list(client.completions.create(**asked, stream=True))
    assert len(parts) > 3
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_openai_knows_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        client.chat.completions.create(
            model=NAME,
            messages=HI,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert tools.value.param == "tools"


def quiet(engine: Moody) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0


def bounded(body: Coroutine[Any, Any, None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_that_openai_leaves_is_aborted(
    url: str, engine: Moody, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes leaves nothing in the engine, and who stays is answered as ever."""
    aborted, abort = [], engine.abort
    monkeypatch.setattr(
        engine, "abort", lambda one: (aborted.append(one), abort(one))[1], raising=False
    )
    monkeypatch.setattr(engine, "slow_s", 0.05)  # a stream would take ten seconds

    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            long: dict[str, Any] = {
                "model": NAME,
                "max_tokens": 200,
                "extra_body": {"ignore_eos": True},
            }
            stays = asyncio.create_task(client.completions.create(prompt="b", seed=1, **long))
            streams: list[AsyncIterator[Any]] = [
                await client.completions.create(prompt="c", n=4, stream=True, **long)
                for _ in range(4)
            ]
            for stream in streams:
                for _ in range(after):
                    await anext(stream)
                await stream.close()  # type: ignore[attr-defined]
            while len(aborted) < 4:
                await asyncio.sleep(0.005)
            drawn, engine.slow_s = engine.stats().tokens, 0.0
            alone = await stays
            assert alone.usage is not None and alone.usage.completion_tokens == 200
            # sixteen samples of 200 tokens would have been 3,200 more
            assert engine.stats().tokens - drawn < 300

    bounded(body())
    assert eventually(lambda: quiet(engine))


@pytest.mark.slow
def test_a_request_that_openai_cancels_is_aborted(
    url: str, engine: Moody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "slow_s", 0.05)  # it may not end before it is seen

    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            more: Any = {"ignore_eos": True}
            asked = client.completions.create(
                model=NAME, prompt="a", n=8, max_tokens=240, extra_body=more
            )
            task = asyncio.create_task(asked)
            while engine.stats().running == 0:
                await asyncio.sleep(0.005)
            task.cancel()

    bounded(body())
    assert eventually(lambda: quiet(engine))


# -- lm-eval's requests ----------------------------------------------------------------------------


def likelihood(reference: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """Log-prob of a continuation and whether greedy decoding would have given it."""
    before = reference.tokenizer.encode(context)
    ids = reference.tokenizer.encode(context + continuation)
    (ranked,) = reference.score_top([ids], [len(before)], 1)
    greedy = ranked.top_ids_TK[:, 0].tolist() == ids[len(before) :]
    return sum(ranked.logprobs_T.tolist()), greedy


def test_the_requests_of_lm_eval(url: str, reference: Engine) -> None:
    """What its local-completions client sends and how it reads the answer (lm-eval 0.4.13)."""
    pairs = [("The sky is", " blue"), ("a", "b")]
    ids = [reference.tokenizer.encode("".join(pair)) for pair in pairs]
    status, tree = post(
        f"{url}/v1/completions",
        {
            "model": NAME,
            "prompt": ids,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
    )
    assert status == 200
    for choice, (context, continuation) in zip(tree["choices"], pairs, strict=True):
        start = len(reference.tokenizer.encode(context))
        logprobs = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        greedy = all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))
        assert (sum(logprobs), greedy) == likelihood(reference, context, continuation)
    status, tree = post(
        f"{url}/v1/completions",
        {
            "prompt": ["Q: hi\nA:"],
            "model": NAME,
            "max_tokens": 20,
            "temperature": 0.0,
            "stop": ["\n", "Q:", "<|end|>"],
            "seed": 1234,
        },
    )
    assert status == 200 and "\n" not in tree["choices"][0]["text"]


def outside(script: str, url: str, model: Path, python: str | None = PYTHON) -> Any:
    """What a program of another environment prints."""
    assert python is not None
    done = subprocess.run(
        [python, str(CLIENTS / script), url, str(model), NAME],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


own_environment = pytest.mark.skipif(
    PYTHON is None,
    reason="verifiers and lm-eval have an environment of their own: make test-clients",
)


@own_environment
@pytest.mark.slow
def test_lm_eval(url: str, model: Path, reference: Engine) -> None:
    found = outside("lm_eval_client.py", url, model)
    for batch in (1, 4):
        for (context, continuation), (logprob, greedy) in zip(
            found["pairs"], found[f"likelihood {batch}"], strict=True
        ):
            want = likelihood(reference, context, continuation)
            assert (pytest.approx(logprob, abs=1e-4), greedy) == want
        assert found[f"rolling {batch}"][0] < -1000
    assert found["until 1"] == found["until 4"] and len(found["until 1"]) == 3
    assert len(found["chat"]) == 1


@own_environment
@pytest.mark.slow
def test_verifiers(url: str, model: Path, reference: Engine) -> None:
    """Its client for training renders and counts itself; the one for evaluation sends the chat."""
    found = outside("verifiers_client.py", url, model)
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.95, "seed": 5}
    request = Request(found["prompt_ids"], min_p=0.01, **sampling)
    (rollout,) = reference.generate([request])[0].rollouts
    assert found["ids"] == found["again"] == rollout.token_ids
    assert found["logprobs"] == rollout.logprobs
    assert found["finish"] == rollout.finish_reason
    assert found["refusal"].startswith("ProviderError: Prompt length (403) exceeds")
    _, tree = post(f"{url}/tokenize", {"messages": [{"role": "user", "content": "say hi"}]})
    (plain,) = reference.generate([Request(tree["tokens"], **sampling)])[0].rollouts
    assert found["content"] == reference.text(plain)
    assert found["usage"] == [tree["count"], len(plain.token_ids)]


@pytest.fixture(scope="module")
def calculating() -> Iterator[str]:
    """A model that calls `add` where it is asked for a sum, and then says what came back."""

    def say(prompt: str, _: int) -> str:
        _, seen, behind = prompt.rpartition("result: ")
        if seen:
            return f"{behind.partition('<|end|>')[0]}<|end|>"
        a, b = re.findall(r"(\d+) \+ (\d+)\?", prompt)[-1]
        call = {"name": "add", "arguments": {"a": int(a), "b": int(b)}}
        return f"So: <tool_call>{json.dumps(call)}</tool_call><|end|>"

    known = build_tokenizer()
    known.chat_template = TEMPLATE
    with serving(Scripted(known, say), tokenizer=known) as found:
        yield found


@own_environment
@pytest.mark.slow
def test_verifiers_relays_tools(calculating: str, tmp_path: Path) -> None:
    turns = outside("verifiers_tools.py", calculating, tmp_path)
    assert turns == [["tool_calls", "So:", 1], ["stop", "5", 0]]


@pytest.mark.skipif(CLASSIC is None, reason="verifiers 0.1: make test-clients")
@pytest.mark.slow
def test_verifiers_rolls_out_with_tools(calculating: str, tmp_path: Path) -> None:
    """Its ToolEnv, whole: the call, its result, the answer and the reward."""
    found = outside("verifiers_rollouts.py", calculating, tmp_path, CLASSIC)
    for i, one in enumerate(found):
        assert (one["reward"], one["error"]) == (pytest.approx(1.1), None)
        assert [said["role"] for said in one["completion"]] == ["assistant", "tool", "assistant"]
        assert [said["content"] for said in one["completion"]] == ["So:", str(i + 2), str(i + 2)]


def test_the_requests_of_a_trainer(url: str, reference: Engine) -> None:
    """What verifiers' client for training sends (renderers 0.1.12, verifiers 0.4.0)."""
    status, tree = post(
        f"{url}/inference/v1/generate",
        {
            "model": NAME,
            "token_ids": [70, 71, 72],
            "sampling_params": {
                "temperature": 1.0,
                "max_tokens": 6,
                "seed": 2,
                "stop_token_ids": [1],
                "logprobs": 1,
                "skip_special_tokens": False,
                "routed_experts_prompt_start": 2,
            },
            "cache_salt": "v3",
            "priority": 0,
        },
    )
    assert status == 200
    (rollout,) = reference.generate(
        [Request([70, 71, 72], max_tokens=6, seed=2, stop_ids=(1,), top_logprobs=1)]
    )[0].rollouts
    (choice,) = tree["choices"]
    assert choice["token_ids"] == rollout.token_ids
    contents = choice["logprobs"]["content"]
    assert [one["token"] for one in contents] == [f"token_id:{i}" for i in rollout.token_ids]
    assert [one["token_id"] for one in contents] == rollout.token_ids
    assert [one["logprob"] for one in contents] == rollout.logprobs
    assert choice["weight_versions"] == [
        {"version": "0", "start": 0, "end": len(rollout.token_ids)}
    ]
    parts = events(
        f"{url}/inference/v1/generate",
        {"token_ids": [70, 71, 73], "sampling_params": {"max_tokens": 6, "ignore_eos": True}},
    )
    assert sum(len(part["choices"][0]["token_ids"]) for part in parts) == 6
