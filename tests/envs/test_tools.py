"""Functions that a model may call: their schemas, their answers, and every way in which a call can go
wrong."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from lowroll import envs
from lowroll.envs.tools import Toolbox, ToolEnvironment, counts
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.runs.demo import build_tokenizer
from lowroll.tool_calls import read
from lowroll.types import Prompt, Score

ROOT = Path(__file__).parents[2]
CALCULATOR = str(ROOT / "examples" / "calculator.py")


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first
        b: The second
    """
    return a + b


async def later(text: str, kind: Literal["x", "y"] | None = None) -> dict[str, Any]:
    """Wait, and say it.

    Args:
        text: What to say
        kind: Of what kind
    """
    return {"text": text, "kind": kind}


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long
    """
    try:
        time.sleep(seconds)
    except Exception:
        return "swallowed"
    return "awake"


async def doze(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long
    """
    import asyncio

    await asyncio.sleep(seconds)
    return "awake"


def odd(what: str) -> Any:
    """What is no answer.

    Args:
        what: Which
    """
    if what == "raise":
        raise KeyError("no\nsuch")
    if what == "exit":
        raise SystemExit(3)
    return {"long": "x" * 10_000, "object": object(), "half": "\ud800", "none": None}[what]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    text = json.dumps({"name": name, "arguments": arguments})
    return read("hermes", f"<tool_call>{text}</tool_call>").message("x")


@pytest.fixture(scope="module")
def box() -> Toolbox:
    return Toolbox([add, later, sleep, doze, odd], most_output=80)


@pytest.fixture(scope="module")
def short() -> Toolbox:
    """Its calls take long: those of the other may have to wait for the processor."""
    return Toolbox([sleep, doze], call_seconds=0.1)


def test_schemas_are_those_of_transformers(box: Toolbox) -> None:
    from transformers.utils import get_json_schema

    assert box.schemas[0] == get_json_schema(add)
    assert box.schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first"},
            "b": {"type": "integer", "description": "The second"},
        },
        "required": ["a"],
    }


@pytest.mark.parametrize(
    ("said", "content", "failed"),
    [
        (call("add", a=2, b=3), "5", None),
        (call("add", a=2), "3", None),
        (call("add", a="2", b="3"), "5", None),  # numbers written as text
        (call("later", text="7"), '{"text": "7", "kind": null}', None),  # a text stays one
        (call("odd", what="none"), "null", None),
        (call("odd", what="long"), "x" * 80 + "... (9920 more characters)", None),
        (call("odd", what="half"), "?", None),
        (call("subtract", a=1), "error: there is no tool 'subtract'; there are: add, la", "call"),
        (call("add"), "error: add: missing a required argument: 'a'", "call"),
        (call("add", a=1, c=1), "error: add: got an unexpected keyword argument 'c'", "call"),
        (call("odd", what="raise"), r"error: KeyError: 'no\nsuch'", "call"),
        (call("odd", what="object"), "error: TypeError: Object of type object is not JSO", "call"),
        (call("odd", what="exit"), "error: SystemExit: 3", "call"),
    ],
)
def test_answers(box: Toolbox, said: dict[str, Any], content: str, failed: str | None) -> None:
    (answer,) = box.answer(said)
    assert answer["content"].startswith(content)
    assert len(answer["content"]) <= 80 + len("... (9920 more characters)")
    assert answer.get("failed") == failed
    assert answer["role"] == "tool" and answer["tool_call_id"] == "call00000"
    assert answer["name"] == said["tool_calls"][0]["function"]["name"]


@pytest.mark.parametrize("name", ["sleep", "doze"])
def test_a_call_has_an_end(short: Toolbox, name: str) -> None:
    (answer,) = short.answer(call(name, seconds=99))
    assert answer["content"] == f"error: {name} took longer than 0.1 s"
    assert answer["failed"] == "call"


def test_calls_are_answered_in_order_and_those_that_are_none_after_them(box: Toolbox) -> None:
    text = "<tool_call>{</tool_call>" + "".join(
        f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2)
    )
    answers = box.answer(read("hermes", text).message(text))
    assert [one["content"] for one in answers[:2]] == ["2", "3"]
    assert answers[2]["failed"] == "form" and "cannot be read: not JSON" in answers[2]["content"]
    assert box.answer({"role": "assistant", "content": "42"}) == []


def test_beside_the_main_thread_a_call_has_no_clock_of_its_own(short: Toolbox) -> None:
    answers: list[Any] = []
    asked = threading.Thread(
        target=lambda: answers.extend(short.answer(call("sleep", seconds=0.2)))
    )
    asked.start()
    asked.join(60)
    assert answers[0]["content"] == "awake"


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """Bare."""
    return a


def bare(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ([add, add], "two functions are called 'add'"),
        ([lambda a: a], "expected functions with a name"),
        (["add"], "expected functions with a name, got 'add'"),
        ([untyped], "tool 'untyped': Argument a is missing a type hint"),
        ([bare], "tool 'bare': .*docstring"),
    ],
)
def test_what_is_no_tool_is_refused(functions: list[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _ = Toolbox(functions).schemas


@pytest.mark.parametrize("key", ["call_seconds", "most_output"])
@pytest.mark.parametrize("value", [0, -1, "5", True])
def test_limits_are_numbers(key: str, value: Any) -> None:
    class Env(ToolEnvironment):
        def prompt(self, index: int, split: str = "train") -> Prompt: ...
        def score(self, prompt: Prompt, text: str) -> float: ...
        def gold(self, prompt: Prompt) -> str: ...
        def perturbed(self, prompt: Prompt) -> str: ...

    with pytest.raises(ValueError, match=f"'e': {key}"):
        Env(name="e", functions=[add], **{key: value})


def test_the_example() -> None:
    env = envs.make(CALCULATOR, name="calc", args={"digits": 2})
    assert env.validate().ok
    assert env.max_turns == 4 and [one["function"]["name"] for one in env.tools] == ["calculate"]
    prompt = env.prompt(0)
    a, operation, b = prompt.messages[0]["content"].removeprefix("What is ")[:-1].split()
    said = call("calculate", a=int(a), operation=operation, b=int(b))
    (answer,) = env.respond(prompt, [*prompt.messages, said])
    assert answer["content"] == str(prompt.info["answer"])
    last = {"role": "assistant", "content": f"It is {answer['content']}"}
    talk = [*prompt.messages, said, answer, last]
    assert env.respond(prompt, talk) is None
    score = env.score_conversation(prompt, talk)
    assert score == Score(
        1.0, {"tool_calls": 1.0, "failed_tool_calls": 0.0, "ill_formed_tool_calls": 0.0}
    )


def test_counts() -> None:
    wrong = {"role": "tool", "content": "error", "failed": "call"}
    broken = read("hermes", "<tool_call>{</tool_call>").message("x")
    form = {"role": "tool", "content": "error", "failed": "form"}
    assert counts([call("f"), wrong, broken, form, call("f"), {"role": "tool"}]) == {
        "tool_calls": 2.0,
        "failed_tool_calls": 1.0,
        "ill_formed_tool_calls": 1.0,
    }


HERMES = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '<tool_call>{"name": ...}</tool_call><|end|>{% endif %}{% for message in messages %}'
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_template_shows_tools_and_says_how_calls_are_written() -> None:
    tokenizer = build_tokenizer()
    chat = ChatTokenizer(tokenizer)
    hi = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="says nothing of `tools`"):
        chat.encode_chat(hi, tools=Toolbox([add]).schemas)
    with pytest.raises(ValueError, match="rollout.tool_call_parser: hermes, qwen3_coder"):
        chat.turn([5], tools=True)
    without = chat.encode_chat(hi)
    tokenizer.chat_template = HERMES
    assert chat.encode_chat(hi) == without
    shown = tokenizer.decode(chat.encode_chat(hi, tools=Toolbox([add]).schemas))
    assert '"name": "add"' in shown and shown.endswith("<|user|>hi<|end|><|assistant|>")
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    ids = chat.encode_response(text)
    assert chat.turn(ids) == {"role": "assistant", "content": text}
    assert chat.turn(ids, tools=True) == read("hermes", text).message(text)
    assert ChatTokenizer(tokenizer, "mistral").turn(ids, tools=True) == chat.turn(ids)
