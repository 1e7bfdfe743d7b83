"""From what a client says to what the engine is asked."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from aiohttp import web

from lowroll.model.template import check_template_kwargs
from lowroll.server.body import Answered, Chat, Message, Sampling, Tool, ToolCall, stops
from lowroll.server.errors import Refused
from lowroll.server.guard import read_body
from lowroll.server.serving import SERVING, Serving
from lowroll.server.text import Vocabulary
from lowroll.types import Request

A = TypeVar("A", bound=Answered)

# fields of a Request by the names that clients use
NAMES = {
    "prompt_ids": "prompt",
    "stop_ids": "stop_token_ids",
    "stop_strings": "stop",
    "id": "request_id",
    "top_logprobs": "logprobs",
}
_SEED_BITS = 53  # what every reader of JSON keeps


@dataclass(frozen=True)
class Prompt:
    """A prompt as the client gave it, and its token ids."""

    token_ids: list[int]
    text: str | None = None  # None where ids were given


@dataclass(frozen=True)
class Offer:
    """Tools that the model may call, and how it writes that (`lowroll.tool_calls`); several: more
    than one call in a turn; calls: tools of which the answer must call one, and says nothing else."""

    tools: Sequence[Tool]
    format: str
    several: bool
    calls: Sequence[Tool] = ()


async def read(request: web.Request, kind: type[A]) -> A:
    """The body of a request that draws text, which asks for this model."""
    body = await read_body(request, kind)
    check_model(request.app[SERVING], body.model)
    if body.stream_options is not None and not body.stream:
        raise Refused("stream_options: stream is not asked for", "stream_options")
    return body


def check_model(serving: Serving, model: str | None) -> None:
    """Refused when another model is asked for than the one that is served."""
    if model is not None and model != serving.name:
        raise Refused(
            f"model: {model!r} is not served here, {serving.name!r} is",
            "model",
            404,
            "model_not_found",
        )


def vocabulary(serving: Serving, param: str) -> Vocabulary:
    """The model's. Refused names the field that wants text, where the model has no tokenizer."""
    if serving.vocabulary is None:
        raise Refused(f"{param}: the model has no tokenizer; use token ids", param)
    return serving.vocabulary


async def prompts(
    serving: Serving, given: str | list[int] | list[str] | list[list[int]], special: bool
) -> list[Prompt]:
    """The prompts of a completion; special: texts begin as the tokenizer lets one begin."""
    many = _several(given)
    if len(many) > serving.limits.prompts:
        raise Refused(f"prompt: {len(many)} prompts; {serving.limits.prompts} at most", "prompt")
    found = []
    for i, one in enumerate(many):
        if isinstance(one, str):
            field = "prompt" if one is given else f"prompt[{i}]"
            known = vocabulary(serving, field)
            check_fits(serving, known, one, field)
            found.append(Prompt(await serving.work(known.encode, one, special), one))
        else:
            found.append(Prompt(one))
    return found


def _several(given: str | list[int] | list[str] | list[list[int]]) -> Sequence[Any]:
    """One prompt or many as many. An empty list is a prompt without tokens."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [given]
    return given


def check_fits(serving: Serving, known: Vocabulary, text: str, field: str) -> None:
    """Refused, before it is encoded, for a text that cannot fit into the model's context."""
    context, fewest = serving.capabilities.context_length, known.fewest_tokens(text)
    if fewest > context:
        raise Refused(
            f"{field}: {len(text):,} characters are {fewest:,} tokens or more, over the model's "
            f"context of {context} tokens",
            field,
            code="context_length_exceeded",
        )


async def conversation(
    serving: Serving,
    messages: list[Message],
    open_turn: bool,
    tools: Sequence[Tool] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """A conversation in the model's template; open_turn: with the header of the answer; tools: what
    it shows of them; template_kwargs: further variables of the template."""
    known = vocabulary(serving, "messages")
    if serving.chat is None:
        raise Refused(
            "messages: the model has no chat template; use /v1/completions with a prompt",
            "messages",
        )
    try:
        check_template_kwargs(template_kwargs or {}, serving.chat.tokenizer.special_tokens_map)
    except ValueError as error:
        raise Refused(str(error), "chat_template_kwargs") from None
    chat = serving.chat

    def encode() -> list[int]:
        turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
        shown = [tool.schema_shown for tool in tools]
        try:
            text = known.render_chat(chat, turns, open_turn, shown, template_kwargs)
            check_fits(serving, known, text, "messages")
            return known.encode(text, False)
        except Refused:
            raise
        except ValueError as error:
            raise Refused(f"messages: {error}", "messages") from None

    return Prompt(await serving.work(encode))


def _turn(message: Message, where: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    calls = [
        _call(one, f"{where}.tool_calls[{i}].function.arguments")
        for i, one in enumerate(message.tool_calls or ())
    ]
    if calls and content is None:
        content = ""  # some templates read it whatever else there is
    return {
        "role": message.role,
        "content": content,
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    """A call as chat templates take it, its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}: expected a JSON object as a text", where)
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def offered(serving: Serving, body: Chat) -> Offer | None:
    """What the model may call, and must; with tool_choice "none" it is shown nothing. Refused when
    tools cannot be shown, or calls not be read, or one is asked for that there is not."""
    calls = _asked_for(body)
    if not body.tools or body.tool_choice == "none" or serving.chat is None:
        check_tool_names(body.tools)
        return None
    try:
        serving.chat.check_tools()
        format = serving.chat.tool_format
    except ValueError as error:
        raise Refused(f"tools: {error}", "tools") from None
    check_tool_names(body.tools)
    return Offer(body.tools, format, body.parallel_tool_calls, calls)


def _asked_for(body: Chat) -> Sequence[Tool]:
    """The tools of which tool_choice wants one called, none where the model may say."""
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not body.tools:
            raise Refused("tool_choice: required, and there are no tools", "tool_choice")
        return body.tools
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict) or choice.get("type") != "function":  # type: ignore[union-attr]
        raise Refused(
            'tool_choice: auto, none, required or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    named = [tool for tool in body.tools if tool.function.name == function.get("name")]
    if not named:
        raise Refused("tool_choice: no tool has this name", "tool_choice.function.name")
    return named


def check_tool_names(tools: Sequence[Tool]) -> None:
    """Refused when two tools have one name."""
    known = set[str]()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in known:
            where = f"tools[{i}].function.name"
            raise Refused(f"{where}: two tools are called {name!r}", where)
        known.add(name)


def engine_request(
    serving: Serving,
    prompt: Prompt,
    body: Sampling,
    *,
    max_tokens: int,
    top_logprobs: int = 0,
    request_id: str = "",
    grammar: str | None = None,
) -> Request:
    """What the engine is asked for one prompt. Without a seed the noise is another each time."""
    if body.n > serving.limits.n:
        raise Refused(f"n: {body.n} answers; {serving.limits.n} at most", "n")
    return Request(
        prompt_ids=prompt.token_ids,
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty or None,
        frequency_penalty=body.frequency_penalty or None,
        logit_bias=_bias(body.logit_bias),
        stop_ids=tuple(body.stop_token_ids),
        stop_strings=stops(body),
        ignore_eos=body.ignore_eos,
        seed=secrets.randbits(_SEED_BITS) if body.seed is None else body.seed,
        id=request_id,
        top_logprobs=top_logprobs,
        grammar=grammar,
    )


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...] | None:
    """By token id, as JSON has no other keys than texts."""
    for name in given:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", name):
            raise Refused(f"logit_bias: {name!r} is no token id", "logit_bias")
    return tuple((int(name), bias) for name, bias in given.items()) or None


def room(serving: Serving, prompt: Prompt) -> int:
    """Tokens that the context leaves for an answer; 1 at least, which the engine then refuses."""
    return max(1, serving.capabilities.context_length - len(prompt.token_ids))


def check_id(body: Answered, count: int) -> None:
    """Refused when several prompts would draw with the noise of one request."""
    if body.request_id and count > 1:
        raise Refused(
            f"request_id: it names one request, and there are {count} prompts", "request_id"
        )


def refuse(error: ValueError, names: Mapping[str, str]) -> NoReturn:
    """The engine's own refusal, "field: reason", in the client's words.

    names: the client's, of fields that are not called as the engine calls them."""
    text = str(error)
    match = re.match(r"(\w+)((?:\[\d+\])*): ", text)
    if match is None:
        raise Refused(text) from None
    param = names.get(match[1], match[1]) + match[2]
    code = "context_length_exceeded" if "over the model's context" in text else None
    raise Refused(f"{param}: {text[match.end() :]}", param, code=code) from None
