"""Prompts as token ids, /tokenize and /detokenize, and the log-probs of a prompt's own tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from lowroll.engine.base import Engine
from lowroll.model.template import check_template_kwargs
from lowroll.server.limits import STATE, ServerState, read_body
from lowroll.server.protocol import (
    ChatMessage,
    ConversationFields,
    DetokenizeRequest,
    Refused,
    TokenizeRequest,
    Tool,
    ToolCall,
    too_long,
    wrong_field,
)
from lowroll.server.streaming import json_response_in_worker
from lowroll.server.text import TokenNames, Vocabulary, finite_logprob

TopTokens = list[tuple[int, float]]  # the likeliest tokens of a position and their log-probs


@dataclass(frozen=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True)
class PromptScores:
    """The log-prob in nats of each token of a prompt but the first, and the likeliest tokens at its
    position, likeliest first."""

    logprobs: list[float]
    tops: list[TopTokens]

    def cut(self, top: int) -> PromptScores:
        return PromptScores(self.logprobs, [likeliest[:top] for likeliest in self.tops])


# -- texts and conversations -------------------------------------------------------------------------


async def encode_prompts(
    state: ServerState, given: str | list[int] | list[str] | list[list[int]], special: bool
) -> list[EncodedPrompt]:
    """Return the prompts of a completion. special: add the tokenizer's special tokens."""
    prompts: Sequence[Any] = given
    if isinstance(given, str) or not given or isinstance(given[0], int):
        prompts = [given]  # one; an empty list is a prompt without tokens
    most = state.limits.prompts
    if len(prompts) > most:
        raise wrong_field("prompt", f"{len(prompts)} prompts; {most} at most")
    encoded = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            field = "prompt" if prompt is given else f"prompt[{i}]"
            vocabulary = state.require_vocabulary(field)
            _check_length(state, vocabulary, prompt, field)
            ids = await state.in_worker(vocabulary.encode, prompt, special)
            encoded.append(EncodedPrompt(ids, prompt))
        else:
            encoded.append(EncodedPrompt(prompt))
    return encoded


async def encode_conversation(
    state: ServerState,
    messages: list[ChatMessage],
    body: ConversationFields,
    tools: Sequence[Tool],
) -> EncodedPrompt:
    """Return a conversation in the model's chat template, with the tools."""
    vocabulary = state.require_vocabulary("messages")
    chat, kwargs = state.chat, body.chat_template_kwargs
    if chat is None:
        raise wrong_field(
            "messages", "the model has no chat template; use /v1/completions with a prompt"
        )
    try:
        check_template_kwargs(kwargs or {}, chat.tokenizer.special_tokens_map)
    except ValueError as error:
        raise Refused(str(error), "chat_template_kwargs") from None

    def encode() -> list[int]:
        turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
        shown = [tool.schema_shown for tool in tools]
        try:
            text = vocabulary.render_chat(chat, turns, body.add_generation_prompt, shown, kwargs)
            _check_length(state, vocabulary, text, "messages")
            return vocabulary.encode(text, False)
        except Refused:
            raise
        except ValueError as error:
            raise wrong_field("messages", str(error)) from None

    return EncodedPrompt(await state.in_worker(encode))


def _check_length(state: ServerState, vocabulary: Vocabulary, text: str, field: str) -> None:
    context, fewest = state.capabilities.context_length, vocabulary.fewest_tokens(text)
    if fewest > context:
        raise too_long(
            field,
            f"{len(text):,} characters are {fewest:,} tokens or more, over the model's "
            f"context of {context} tokens",
        )


def _turn(message: ChatMessage, where: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    calls = [
        _tool_call(call, f"{where}.tool_calls[{i}].function.arguments")
        for i, call in enumerate(message.tool_calls or ())
    ]
    if calls and content is None:
        content = ""  # some templates always read it
    return {
        "role": message.role,
        "content": content,
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }


def _tool_call(call: ToolCall, field: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong_field(field, "expected a JSON object as a text")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


# -- /tokenize and /detokenize -----------------------------------------------------------------------


async def tokenize(request: web.Request) -> web.StreamResponse:
    """`POST /tokenize`: return the ids of a prompt, or of messages in the model's chat template."""
    state = request.app[STATE]
    body = await read_body(request, TokenizeRequest)
    if body.messages is not None:
        ids = (await encode_conversation(state, body.messages, body, body.tools)).token_ids
    else:
        assert body.prompt is not None
        encode, most = state.require_vocabulary("prompt").encode, state.limits.text
        if len(body.prompt) > most:
            raise too_long("prompt", f"{len(body.prompt):,} characters; {most:,} at most")
        ids = await state.in_worker(encode, body.prompt, body.add_special_tokens is not False)
    vocabulary = state.require_vocabulary("prompt")

    def answer() -> dict[str, Any]:
        return {
            "count": len(ids),
            "max_model_len": state.capabilities.context_length,
            "tokens": ids,
            "token_strs": [vocabulary.name(i) for i in ids] if body.return_token_strs else None,
        }

    return await json_response_in_worker(state, answer, len(ids))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """`POST /detokenize`: return the text of ids, with special tokens."""
    state = request.app[STATE]
    body = await read_body(request, DetokenizeRequest)
    decode = state.require_vocabulary("tokens").decode
    text = await state.in_worker(decode, body.tokens, skip_special_tokens=False)
    return await json_response_in_worker(state, lambda: {"prompt": text}, len(body.tokens))


# -- log-probs of prompts ----------------------------------------------------------------------------


async def score_prompts(
    state: ServerState,
    prompts: Sequence[EncodedPrompt],
    top: int,
    temperature: float = 1.0,
    *,
    stream: bool,
    prompt_field: str,
    asked_by: str = "prompt_logprobs",
) -> list[PromptScores]:
    """Return the scores of prompts, with the `top` likeliest tokens. They are scored one by one, so
    that the engine draws in between. asked_by: the field for them. Raises Refused for prompts that
    cannot be scored, or that are more than one answer may hold."""
    most = state.limits.told_streamed if stream else state.limits.told
    count = sum(len(prompt.token_ids) for prompt in prompts) * (top + 1)
    if count > most:
        where = " in a stream" if stream else ""
        reason = f"{count:,} log-probs of prompts in one answer; {most:,} at most{where}"
        raise wrong_field(asked_by, reason)
    if not state.capabilities.scores:
        raise wrong_field("prompt_logprobs", "this engine does not score")
    scores = []
    for i, prompt in enumerate(prompts):
        field = f"{prompt_field}[{i}]" if len(prompts) > 1 else prompt_field
        scores.append(await _score(state, prompt.token_ids, top, temperature, field))
    return scores


async def _score(
    state: ServerState, token_ids: list[int], top: int, temperature: float, field: str
) -> PromptScores:
    context = state.capabilities.context_length
    if not token_ids:
        raise wrong_field(field, "the prompt is empty")
    if len(token_ids) > context:
        raise too_long(
            field, f"{len(token_ids)} tokens are over the model's context of {context} tokens"
        )
    if len(token_ids) == 1:
        return PromptScores([], [])

    def score(engine: Engine) -> PromptScores:
        (ranked,) = engine.score_top([token_ids], [1], top, temperature)
        ids, logprobs = ranked.top_ids_TK.tolist(), ranked.top_logprobs_TK.tolist()
        tops = [list(zip(*place, strict=True)) for place in zip(ids, logprobs, strict=True)]
        return PromptScores(ranked.logprobs_T.tolist(), tops)

    try:
        return await state.engine.call(score, "score")
    except ValueError as error:  # "sequences[0]: ..."
        raise wrong_field(field, str(error).partition(": ")[2]) from None


def prompt_logprobs(
    names: TokenNames, token_ids: list[int], scores: PromptScores
) -> list[dict[str, dict[str, Any]] | None]:
    """Return scores in vLLM's format: by token id, None for the first token. The rank of a token
    that is not among the likeliest is unknown."""

    def ranked(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        name = names.name(token_id)
        return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": name}

    places: list[dict[str, dict[str, Any]] | None] = [None]
    for token, logprob, top in zip(token_ids[1:], scores.logprobs, scores.tops, strict=True):
        place = {str(other): ranked(other, value, i) for i, (other, value) in enumerate(top, 1)}
        place.setdefault(str(token), ranked(token, logprob, None))
        places.append(place)
    return places
