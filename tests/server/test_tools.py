"""Tools over HTTP: what the template shows, and calls as clients know them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from lowroll.runs.demo import build_tokenizer
from lowroll.server.text import Vocabulary
from lowroll.tool_calls import Speech
from tests.fixtures.hermes import TEMPLATE
from tests.fixtures.http import NAME, events, post, serving
from tests.fixtures.scripted import Scripted

CHAT = "/v1/chat/completions"
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
SAID = {
    0: f"Let me see. {CALL}\n{CALL}<|end|>",
    1: "1 < 2 <tool_cal none<|end|>",
    2: f"{CALL}<|end|>",
    3: "<tool_call>{broken</tool_call> and so on<|end|>",
    4: f"so {CALL}",  # cut at its length
}


def tokenizer(template: str = TEMPLATE) -> Any:
    made = build_tokenizer()
    made.chat_template = template
    return made


def result(prompt: str) -> str:
    """What a model that calls a tool once says to a prompt."""
    _, seen, behind = prompt.rpartition("result: ")
    return f"It is {behind.partition('<|end|>')[0]}.<|end|>" if seen else SAID[0]


@pytest.fixture(scope="module")
def engine() -> Scripted:
    return Scripted(tokenizer(), lambda prompt, n: SAID[n] if "hi" in prompt else result(prompt))


@pytest.fixture(scope="module")
def url(engine: Scripted) -> Iterator[str]:
    with serving(engine, tokenizer=engine.tokenizer) as found:  # type: ignore[arg-type]
        yield found


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0) as made:
        yield made


def choices(url: str, **more: Any) -> list[dict[str, Any]]:
    status, tree = post(url + CHAT, {"messages": HI, "tools": [ADD], **more})
    assert status == 200, tree
    return list(tree["choices"])


def test_calls_are_told_and_all_else_is_text(url: str, engine: Scripted) -> None:
    found = choices(url, n=5)
    calls = [choice["message"].get("tool_calls", []) for choice in found]
    assert [len(some) for some in calls] == [2, 0, 1, 0, 1]
    assert [choice["message"]["content"] for choice in found] == [
        "Let me see.",
        "1 < 2 <tool_cal none",
        None,
        "<tool_call>{broken</tool_call> and so on",
        "so",
    ]
    ends = [choice["finish_reason"] for choice in found]
    assert ends == ["tool_calls", "stop", "tool_calls", "stop", "length"]
    for call in sum(calls, []):
        assert call["type"] == "function" and call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}
    ids = [call["id"] for call in sum(calls, [])]
    assert len(set(ids)) == 4 and all(len(id) == 9 and id.isalnum() for id in ids)
    assert ids == [
        call["id"] for c in choices(url, n=5) for call in c["message"].get("tool_calls", [])
    ]
    shown = engine.tokenizer.decode(engine.requests[-1].prompt_ids)
    assert json.dumps(ADD) in shown


@pytest.mark.parametrize("pace", [1, 3, 500])
def test_a_stream_says_the_same(url: str, engine: Scripted, pace: int) -> None:
    engine.pace = pace
    whole = choices(url, n=5)
    parts = events(url + CHAT, {"messages": HI, "tools": [ADD], "n": 5, "logprobs": True})
    for i, choice in enumerate(whole):
        mine = [c for part in parts for c in part["choices"] if c["index"] == i]
        said = "".join(c["delta"].get("content") or "" for c in mine)
        calls = [call for c in mine for call in c["delta"].get("tool_calls", [])]
        assert said == (choice["message"]["content"] or "")
        assert [call.pop("index") for call in calls] == list(range(len(calls)))
        assert calls == choice["message"].get("tool_calls", [])
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert not calls or "tool_calls" in mine[-1]["delta"]
        told = [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]]
        assert len(told) == len(engine.tokenizer.encode(SAID[i]))


@pytest.mark.parametrize("streamed", [False, True])
def test_the_loop_of_an_openai_client(
    client: openai.OpenAI, engine: Scripted, streamed: bool
) -> None:
    """The turn goes back as the package has it, the result behind it, and the model sees both."""
    engine.pace = 4
    messages: list[Any] = [{"role": "user", "content": "one and one?"}]
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "tools": [ADD]}
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            said = stream.get_final_completion().choices[0].message
    else:
        said = client.chat.completions.create(**asked).choices[0].message
    assert said.content == "Let me see." and said.tool_calls is not None
    dumped = said.model_dump()
    for call in dumped["tool_calls"]:
        call["function"].pop("parsed_arguments", None)
    dumped.pop("parsed", None)
    messages.append(dumped)
    for call in said.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    answer = client.chat.completions.create(**asked).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("stop", "It is 2.")
    assert "result: 2" in engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_one_call_at_most_where_that_is_asked(url: str) -> None:
    (choice, *_) = choices(url, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


def test_tool_choice_none_shows_and_reads_nothing(url: str, engine: Scripted) -> None:
    (choice,) = choices(url, tool_choice="none")
    assert choice["message"] == {"role": "assistant", "content": SAID[0].removesuffix("<|end|>")}
    assert '"add"' not in engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_tokenize_shows_tools_too(url: str, engine: Scripted) -> None:
    choices(url)
    _, tree = post(url + "/tokenize", {"messages": HI, "tools": [ADD]})
    assert tree["tokens"] == engine.requests[-1].prompt_ids


def called(arguments: str) -> list[Any]:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]


PLACE = "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"messages": called("[1]")}, PLACE),
        ({"messages": called("{")}, PLACE),
        ({"messages": called("[" * 5000)}, PLACE),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=str,
)
def test_what_is_wrong_with_tools_is_named(url: str, said: dict[str, Any], param: str) -> None:
    status, tree = post(url + CHAT, {"messages": HI, "tools": [ADD], **said})
    assert (status, tree["error"]["param"]) == (400, param), tree
    assert tree["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (build_tokenizer().chat_template, "says nothing of `tools`"),
        ("{{ tools }}", "known formats"),
    ],
)
def test_a_template_without_tools_is_said(template: str, why: str) -> None:
    known = tokenizer(template)
    with serving(Scripted(known, lambda *_: "x"), tokenizer=known) as url:  # type: ignore[arg-type]
        status, tree = post(url + CHAT, {"messages": HI, "tools": [ADD]})
    assert (status, tree["error"]["param"]) == (400, "tools") and why in tree["error"]["message"]


def test_marks_that_are_special_tokens_are_seen() -> None:
    known = tokenizer("{{ tools }}[TOOL_CALLS]")
    known.add_special_tokens(
        {"additional_special_tokens": [AddedToken("[TOOL_CALLS]", special=True)]}
    )
    words = 'Yes é [TOOL_CALLS][{"name": "add", "arguments": {}, "id": "123456789"}]'
    ids = known.encode(words + "<|end|>", add_special_tokens=False)
    vocabulary = Vocabulary(known)
    for marks, want in ((True, words), (False, words.replace("[TOOL_CALLS]", ""))):
        decoder = vocabulary.decoder([], marks)
        assert "".join(decoder.feed([i]) for i in ids) + decoder.end() == want
    with serving(Scripted(known, lambda *_: words + "<|end|>"), tokenizer=known) as url:  # type: ignore[arg-type]
        (choice,) = choices(url)
    assert choice["message"]["content"] == "Yes é"
    assert choice["message"]["tool_calls"][0]["id"] == "123456789"


def test_values_that_are_written_as_text_get_the_type_of_the_schema() -> None:
    body = "<tool_call><function=add><parameter=a>1</parameter><parameter=c>2</parameter></function></tool_call>"
    known = tokenizer("{{ tools }}<tool_call><function=")
    with serving(Scripted(known, lambda *_: body + "<|end|>"), tokenizer=known) as url:  # type: ignore[arg-type]
        (choice,) = choices(url)
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "c": "2"}


@pytest.mark.parametrize(
    ("format", "text", "content", "count"),
    [
        ("llama3_json", '{"name": "f", "parameters": {}}', "", 1),
        ("llama3_json", '  {"a": 1} is JSON', '  {"a": 1} is JSON', 0),
        ("llama3_json", 'Now <|python_tag|>{"name": "f", "parameters": {}}', "Now", 1),
        ("mistral", "[TOOL_ a [TOOL_CALLS]f{}", "[TOOL_ a", 1),
        ("hermes", " \n ", " \n ", 0),
        ("hermes", "", "", 0),
        ("hermes", "a <tool_call", "a <tool_call", 0),
    ],
)
def test_what_is_held_back_comes_in_the_end(
    format: str, text: str, content: str, count: int
) -> None:
    for pace in (1, 2, 7, 100):
        speech = Speech(format)
        said = "".join(speech.feed(text[i : i + pace]) for i in range(0, len(text), pace))
        rest, calls = speech.end()
        assert (said + rest, len(calls)) == (content, count)
