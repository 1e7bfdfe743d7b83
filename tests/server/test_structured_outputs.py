"""Answers held to a form over HTTP: whatever an untrained model would say, they are of that form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from lowroll import Engine
from lowroll.model.tokenizer import load_tokenizer
from lowroll.server.protocol import ChatRequest, Refused, parse_request
from tests.fixtures import hermes
from tests.fixtures.http import NAME, events, post, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22, 333]}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add", a={"enum": [1, 2]}, b={"$ref": "#/$defs/digit"}), tool('say "hi"')]
TOOLS[0]["function"]["parameters"]["$defs"] = {"digit": {"enum": [3, 4]}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = hermes.model(tmp_path_factory.mktemp("grammars") / "model")
    return Engine(folder, weights="fp32", device="cpu", cache_tokens=8192, max_batch=8)


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    assert engine.folder is not None
    with serving(engine, tokenizer=load_tokenizer(engine.folder)) as found:
        yield found


def said(url: str, **more: Any) -> list[dict[str, Any]]:
    status, tree = post(url + CHAT, {"messages": HI, "n": 4, "max_tokens": 400, **more})
    assert status == 200, tree
    found: list[dict[str, Any]] = tree["choices"]
    return found


def refused(url: str, path: str = CHAT, **more: Any) -> dict[str, Any]:
    about = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    status, tree = post(url + path, {**about, "max_tokens": 20, **more})
    assert status == 400, tree
    error: dict[str, Any] = tree["error"]
    return error


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "point", "schema": schema}}


def test_an_answer_follows_its_json_schema(url: str) -> None:
    for choice in said(url, response_format=schema_of(POINT), logprobs=True):
        found = json.loads(choice["message"]["content"])
        assert set(found) == {"x", "on"} and found["x"] in (1, 22, 333)
        assert choice["finish_reason"] == "stop"
        # the only token that could come has log-prob 0
        assert any(token["logprob"] == 0 for token in choice["logprobs"]["content"])


def test_the_client_of_openai_reads_it(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=30, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=NAME,
            messages=HI,
            max_tokens=400,
            response_format=schema_of(POINT),  # type: ignore[arg-type]
        )
    assert json.loads(answer.choices[0].message.content or "")["x"] in (1, 22, 333)


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"structured_outputs": {"json": POINT}}, lambda text: json.loads(text)["x"]),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, lambda text: json.loads(text)["x"]),
        ({"structured_outputs": {"regex": "[ab]{3}c?"}}, lambda text: set(text) <= set("abc")),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, "xy".__eq__),
        ({"guided_json": POINT}, lambda text: json.loads(text)["x"]),
        ({"guided_regex": "[0-9]{4}"}, lambda text: len(text) == 4 and text.isdigit()),
        ({"guided_choice": ['a "b"', "é\n1"]}, ['a "b"', "é\n1"].__contains__),
        ({"guided_grammar": 'start: "x" | "yz"'}, ["x", "yz"].__contains__),
    ],
)
def test_other_forms(url: str, asked: dict[str, Any], fits: Any) -> None:
    body = {"prompt": "hi", "n": 3, "max_tokens": 400, "seed": 1, **asked}
    status, tree = post(url + COMPLETION, body)
    assert status == 200, tree
    for choice in tree["choices"]:
        assert fits(choice["text"]), choice["text"]
        assert choice["finish_reason"] == "stop"


def test_a_json_object_is_one_as_far_as_it_goes(url: str) -> None:
    for choice in said(url, response_format={"type": "json_object"}, max_tokens=30):
        assert choice["message"]["content"].startswith("{")


def test_a_stream_says_what_the_whole_says(url: str) -> None:
    asked = {"messages": HI, "seed": 5, "max_tokens": 400, "response_format": schema_of(POINT)}
    _, tree = post(url + CHAT, asked)
    parts = events(url + CHAT, asked | {"stream": True})
    text = "".join(
        part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"]
    )
    assert text == tree["choices"][0]["message"]["content"]


def test_text_is_no_form(url: str) -> None:
    asked = {"messages": HI, "seed": 5, "max_tokens": 8}
    _, plain = post(url + CHAT, asked)
    _, text = post(url + CHAT, asked | {"response_format": {"type": "text"}})
    assert text["choices"][0]["message"] == plain["choices"][0]["message"]


def test_a_call_is_required(url: str) -> None:
    for choice in said(url, tools=TOOLS, tool_choice="required", parallel_tool_calls=False):
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "add":
            assert arguments["a"] in (1, 2) and arguments["b"] in (3, 4)
        else:
            assert call["function"]["name"] == 'say "hi"' and arguments == {}
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"]["content"]


def test_several_calls_may_be_made(url: str) -> None:
    counts = set()
    for choice in said(url, tools=TOOLS, tool_choice="required", n=16, max_tokens=1000):
        counts.add(len(choice["message"]["tool_calls"]))
    assert min(counts) >= 1 and max(counts) > 1


def test_a_tool_is_named(url: str) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    for found in said(url, tools=TOOLS, tool_choice=choice):
        assert {call["function"]["name"] for call in found["message"]["tool_calls"]} == {"add"}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": schema_of({"type": "nothing"})}, "response_format"),
        ({"response_format": schema_of({"$ref": "http://x.example/y"})}, "response_format"),
        ({"guided_regex": "a(b"}, "guided_regex"),
        ({"guided_grammar": "start: nobody"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "no schema"}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"shape": 1}}, "structured_outputs.shape"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(url: str, asked: dict[str, Any], param: str) -> None:
    assert refused(url, **asked)["param"] == param


def test_xml_calls_cannot_be_required() -> None:
    from lowroll.server.structured_outputs import OfferedTools, _call_grammar

    body = parse_request({"messages": HI, "tools": TOOLS, "tool_choice": "required"}, ChatRequest)
    with pytest.raises(ValueError, match="qwen3_coder"):
        _call_grammar(None, OfferedTools(body.tools, "qwen3_coder", True, body.tools))  # type: ignore[arg-type]


def test_a_grammar_too_large_is_refused(url: str) -> None:
    error = refused(url, COMPLETION, guided_choice=["x" * 1000] * 300)
    assert error["param"] == "guided_choice" and "at most" in error["message"]


def test_token_ids_alone_have_no_grammar(engine: Engine) -> None:
    with serving(engine) as url:
        status, _ = post(url + "/inference/v1/generate", {"token_ids": [5, 6], "guided_regex": "a"})
        assert status == 400


def test_a_body_that_is_wrong_says_where() -> None:
    with pytest.raises(Refused) as refusal:
        parse_request({"messages": HI, "response_format": "json"}, ChatRequest)
    assert refusal.value.param == "response_format"
