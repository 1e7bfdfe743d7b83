"""Tool calls in what a model writes: each format by its own examples, and whatever else it writes."""

from __future__ import annotations

import json

import pytest

from lowroll.tool_calls import FORMATS, MOST_CALLS, format_of, read, typed

ADD = {"a": 1, "b": [2, {"c": "d"}]}
TEXT = json.dumps(ADD)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {TEXT}}}\n</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {TEXT}}}<|im_end|>'),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {json.dumps(TEXT)}}}</tool_call>'),
        ("llama3_json", f'{{"name": "add", "parameters": {TEXT}}}<|eot_id|>'),
        ("llama3_json", f'<|python_tag|>{{"name": "add", "parameters": {TEXT}}}<|eom_id|>'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {TEXT}, "id": "x1"}}]</s>'),
        ("mistral", f"[TOOL_CALLS]add{TEXT}</s>"),
        ("mistral", f"[TOOL_CALLS]add[CALL_ID]x1[ARGS]{TEXT}"),
    ],
)
def test_a_call_in_each_format(format: str, text: str) -> None:
    spoken = read(format, text)
    assert [(call.name, call.arguments) for call in spoken.calls] == [("add", ADD)]
    assert spoken.errors == () and spoken.content == ""
    assert spoken.calls[0].id == ("x1" if "x1" in text else "")


def test_qwen3_coder_writes_values_as_text() -> None:
    text = (
        "Let me.<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\ntwo\nlines\n</parameter>\n<parameter=c>\n7\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    spoken = read("qwen3_coder", text)
    (call,) = spoken.calls
    assert spoken.content == "Let me."
    assert call.arguments == {"a": "1", "b": "two\nlines", "c": "7"}
    assert typed(call.arguments, {"c"}) == {"a": 1, "b": "two\nlines", "c": "7"}


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            "hermes",
            'So: <tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g"}</tool_call>',
        ),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'),
        ("mistral", "So:[TOOL_CALLS]f{}[TOOL_CALLS]g{}"),
        ("mistral", 'So:[TOOL_CALLS][{"name": "f"}, {"name": "g"}]'),
    ],
)
def test_several_calls_in_one_turn(format: str, text: str) -> None:
    spoken = read(format, text)
    assert [call.name for call in spoken.calls] == ["f", "g"]
    assert spoken.content in ("So:", "")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "text", ["", "42", "{}", "[1, 2]", '{"a": 1}', "<tool", "no call", "\ud800"]
)
def test_a_turn_without_a_call(format: str, text: str) -> None:
    spoken = read(format, text)
    assert spoken.content == text and not spoken.calls and not spoken.errors
    assert spoken.message(text) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("inside", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"name": "f", "arguments": {}}}', "more follows"),
        ('{"name": "f", "arguments": {}} {"name": "g"}', "more follows"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"name": 3}', '"name"'),
        ('{"name": ""}', '"name"'),
        ('{"name": "a\\u0000b"}', '"name"'),
        ('{"name": "' + "f" * 200 + '"}', '"name"'),
        ('{"name": "f", "arguments": 3}', "must be a JSON object"),
        ('{"name": "f", "arguments": "x"}', "not JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "Infinity is no JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "1e999 is no JSON"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "number is too long"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}", "64 deep"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 20000, "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_sentence(inside: str, why: str) -> None:
    spoken = read("hermes", f"<tool_call>{inside}</tool_call>")
    assert spoken.calls == () and len(spoken.errors) == 1
    assert why in spoken.errors[0] and len(spoken.errors[0]) < 200
    assert spoken.message("x")["ill_formed"] == list(spoken.errors)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a</function></tool_call>"),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", '{"name": "f", "parameters": {'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]f"),
        ("mistral", '[TOOL_CALLS][{"name": "f"'),
        ("mistral", "[TOOL_CALLS]{}"),
    ],
)
def test_a_broken_call_of_the_other_formats(format: str, text: str) -> None:
    spoken = read(format, text)
    assert spoken.calls == () and len(spoken.errors) == 1


@pytest.mark.timeout(20)  # all of them take a tenth of a second
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<tool_call><function=",
        "<tool_call><function=f><parameter=",
        '<tool_call>{"name": "f"}</tool_call>',
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f{",
        "[",
        '{"a":',
        '{"name": "f", "parameters": {}};',
        "<|python_tag|>{",
        "\\",
        '"',
        " ",
        "\u202e\U0001f600",
    ],
)
def test_a_long_hostile_turn_is_little_work(format: str, piece: str) -> None:
    spoken = read(format, piece * (200_000 // len(piece)))
    assert len(spoken.calls) + len(spoken.errors) <= MOST_CALLS


def test_the_same_call_twice_is_two_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>'
    said = read("hermes", call * 2).message("x")
    assert [one["function"]["arguments"] for one in said["tool_calls"]] == [{"a": 2}, {"a": 2}]
    assert [one["id"] for one in said["tool_calls"]] == ["call00000", "call00001"]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '<tool_call>' }}{{ tool_call.name }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("""{{ '{"name": "' }}{{ '"parameters": ' }}{{ 'ipython' }}""", "llama3_json"),
        ("{{ message.content }}", None),
    ],
)
def test_the_format_is_the_templates(template: str, format: str | None) -> None:
    assert format_of(template) == format


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match="unknown format 'xml'; known: hermes"):
        read("xml", "")
