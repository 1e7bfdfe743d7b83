"""What a client may say: each wrong field is named, and nothing is ignored that changes an
answer."""

from __future__ import annotations

from typing import Any

import pytest

from lowroll.server.protocol import (
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refused,
    RequestBody,
    TokenizeRequest,
    parse_request,
)

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def refused(kind: type[RequestBody], tree: dict[str, Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        parse_request(tree, kind)
    assert caught.value.status == 400
    assert caught.value.param is None or str(caught.value).startswith(f"{caught.value.param}: ")
    return caught.value


@pytest.mark.parametrize(
    "prompt", ["", "a", [1, 2], [[1], [2, 3]], ["a", "b"], [], [2**70]], ids=str
)
def test_prompts_of_every_kind(prompt: object) -> None:
    assert parse_request({"prompt": prompt}, CompletionRequest).prompt == prompt


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1, 2], [True]]}, "prompt[1][0]"),
        ({"prompt": [[1, [2]]]}, "prompt[0][1]"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "temperature": float("inf")}, "temperature"),
        ({"prompt": "a", "max_tokens": 1.0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "stop": ["a", 3]}, "stop[1]"),
        ({"prompt": "a", "stop": 3}, "stop"),
        ({"prompt": "a", "stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "score_temperature": 0}, "score_temperature"),
        ({"prompt": "a", "request_id": "x" * 257}, "request_id"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "a", "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
    ids=str,
)
def test_a_wrong_field_of_a_completion_is_named(said: dict[str, Any], param: str) -> None:
    assert refused(CompletionRequest, said).param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            "messages[0].content[0].text",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}],
                }
            ],
            "messages[0].content[0].type",
        ),
        (
            [*HI, {"role": "assistant", "tool_calls": [{"id": "a"}]}],
            "messages[1].tool_calls[0].function",
        ),
        ([{"role": "user", "content": "hi", "colour": 1}], "messages[0].colour"),
        ([*HI, {"role": "user"}], "messages[1].content"),
        ([*HI, {"role": "user", "content": None}], "messages[1].content"),
        ([*HI, {"role": "assistant"}], "messages[1].content"),
        ([*HI, {"role": "assistant", "content": None}], "messages[1].content"),
        ([*HI, {"role": "assistant", "tool_calls": []}], "messages[1].content"),
        ([*HI, {"role": "tool", "tool_call_id": "a"}], "messages[1].content"),
        ([*HI, {"role": "user", "tool_calls": [CALL]}], "messages[1].content"),
    ],
    ids=str,
)
def test_a_wrong_message_is_named(messages: object, param: str) -> None:
    assert refused(ChatRequest, {"messages": messages}).param == param
    assert refused(TokenizeRequest, {"messages": messages}).param == param


def test_a_message_without_content_is_an_assistants_with_calls() -> None:
    for said in ({}, {"content": None}, {"content": ""}):
        messages = [*HI, {"role": "assistant", "tool_calls": [CALL], **said}]
        assert not parse_request({"messages": messages}, ChatRequest).messages[1].content
    empty = {"messages": [{"role": "user", "content": ""}]}
    assert parse_request(empty, ChatRequest).messages[0].content == ""
    told = str(refused(ChatRequest, {"messages": [*HI, {"role": "user"}]}))
    assert told.startswith("messages[1].content: ") and "tool_calls" in told


def test_what_must_be_an_object_is_said_without_our_names() -> None:
    for said in ({"stream_options": [1]}, {"messages": [3]}):
        message = str(refused(ChatRequest, {"messages": HI} | said))
        assert message.endswith(": an object is expected"), message


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_what_would_change_an_answer_is_refused(name: str) -> None:
    if name in CompletionRequest.model_fields:
        return
    asked = {"prompt": "a", name: {"type": "json_object"}}
    assert refused(CompletionRequest, asked).code == "unsupported"
    assert refused(CompletionRequest, {"prompt": "a", name: 0.25}).param == name
    for idle in NEUTRAL_VALUES[name]:
        assert parse_request({"prompt": "a", name: idle}, CompletionRequest).prompt == "a"


@pytest.mark.parametrize(
    ("name", "value", "ok"),
    [
        ("presence_penalty", 0.0, True),
        ("presence_penalty", False, False),
        ("tools", [], True),
        ("functions", [{}], False),
        ("function_call", "add", False),
        ("response_format", {"type": "text"}, True),
        ("response_format", "json", False),
        ("logit_bias", {}, True),
        ("logit_bias", {"5": "1"}, False),
        ("chat_template", "{{ 1 }}", False),
        ("continue_final_message", True, False),
        ("skip_special_tokens", False, False),
    ],
)
def test_fields_that_ask_for_nothing_are_taken(name: str, value: object, ok: bool) -> None:
    if ok:
        parse_request({"messages": HI, name: value}, ChatRequest)
    else:
        assert refused(ChatRequest, {"messages": HI, name: value}).param == name


@pytest.mark.parametrize("name", sorted(IGNORED_FIELDS))
def test_fields_that_change_nothing_are_taken(name: str) -> None:
    parse_request({"messages": HI, name: {"any": ["thing"]}}, ChatRequest)
    parse_request({"prompt": "a", name: 3}, CompletionRequest)


def test_an_unknown_field_is_told_its_nearest_name() -> None:
    assert "did you mean temperature?" in str(
        refused(CompletionRequest, {"prompt": "", "temprature": 1})
    )
    assert "did you mean" not in str(refused(CompletionRequest, {"prompt": "", "zzzz": None}))
    name = refused(CompletionRequest, {"prompt": "", "\x1b[31m" * 100: 1}).param
    assert name is not None and name.isprintable() and len(name) < 70
    params = {"token_ids": [1], "sampling_params": {"top": 1}}
    assert refused(GenerateRequest, params).param == "sampling_params.top"


def test_a_field_that_must_be_there_under_another_name_is_told_by_that() -> None:
    assert "did you mean messages?" in str(refused(ChatRequest, {"message": HI}))
    assert str(refused(ChatRequest, {})).startswith("messages: field required")


def test_a_field_of_another_route_is_told_its_route() -> None:
    limit = {"prompt": "a", "max_completion_tokens": 8}
    assert "it is one of /v1/chat/completions" in str(refused(CompletionRequest, limit))
    assert "it is one of /v1/completions" in str(refused(ChatRequest, {"prompt": "a"}))


def test_null_is_not_said() -> None:
    body = parse_request(
        {"prompt": "a", "temperature": None, "stop": None, "n": None}, CompletionRequest
    )
    assert body == parse_request({"prompt": "a"}, CompletionRequest)
    asked = {"token_ids": [1], "sampling_params": {"top_p": None, "skip_special_tokens": False}}
    assert parse_request(asked, GenerateRequest).sampling_params.top_p == 1


def test_stop_is_a_string_or_several() -> None:
    for said, strings in (({}, ()), ({"stop": "a"}, ("a",)), ({"stop": ["a", "b"]}, ("a", "b"))):
        assert parse_request({"prompt": ""} | said, CompletionRequest).stop_strings == strings
    with pytest.raises(Refused, match="stop: 65 strings; 64 at most"):
        parse_request({"prompt": "", "stop": ["a"] * 65}, CompletionRequest)


def test_many_wrong_ids_are_refused_at_once() -> None:
    assert refused(CompletionRequest, {"prompt": [0.5] * 200_000}).param == "prompt[0]"


def test_names_come_before_the_model_and_that_before_values() -> None:
    """A misspelt field keeps its hint, and another model is a 404, whatever else is wrong."""
    bad = {"logit_bias": {"x": 1}}
    said = refused(CompletionRequest, {"promt": "a", **bad})
    assert said.param == "promt" and "did you mean prompt" in str(said)

    def unknown(name: str | None) -> None:
        raise Refused("model: not served", "model", 404)

    with pytest.raises(Refused) as caught:
        parse_request({"prompt": "a", "model": "other", **bad}, CompletionRequest, unknown)
    assert caught.value.status == 404
    said = refused(GenerateRequest, {"token_ids": [5], "sampling_params": bad})
    assert said.param == "sampling_params.logit_bias"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([-5], "prompt[0]"), ([5, 2**70], "prompt[1]"), ([[5], [7, 2**40]], "prompt[1][1]")],
)
def test_ids_of_a_prompt_that_is_echoed_are_token_ids(prompt: list[Any], param: str) -> None:
    assert refused(CompletionRequest, {"prompt": prompt, "echo": True}).param == param
    texts = {"prompt": ["a"], "echo": True, "best_of": 2}
    assert refused(CompletionRequest, texts).param == "best_of"
