"""Prompts as token ids, /tokenize and /detokenize, and the log-probs of prompts."""

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
from lowroll.server.streaming import json_response_in_worker, prompt_fields
from lowroll.server.text import TokenNames, Vocabulary, finite_logprob

TopTokens = list[tuple[int, float]]


@dataclass(frozen=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True)
class PromptScores:
    """The log-prob in nats of each prompt token but the first, and the likeliest tokens at its
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
    # [] is one prompt without tokens
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [await _encode_prompt(state, given, special, "prompt")]
    if len(given) > state.limits.prompts:
        raise wrong_field("prompt", f"{len(given)} prompts; {state.limits.prompts} at most")
    return [
        await _encode_prompt(state, prompt, special, f"prompt[{i}]")
        for i, prompt in enumerate(given)
    ]


async def _encode_prompt(
    state: ServerState, prompt: Any, special: bool, field: str
) -> EncodedPrompt:
    if not isinstance(prompt, str):
        return EncodedPrompt(prompt)
    vocabulary = state.require_vocabulary(field)
    _check_length(state, vocabulary, prompt, field)
    return EncodedPrompt(await state.run_in_worker(vocabulary.encode, prompt, special), prompt)


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
        try:
            text = vocabulary.render_chat(
                chat,
                [_template_message(one, f"messages[{i}]") for i, one in enumerate(messages)],
                body.add_generation_prompt,
                [tool.schema_shown for tool in tools],
                kwargs,
            )
            _check_length(state, vocabulary, text, "messages")
            return vocabulary.encode(text, False)
        except Refused:
            raise
        except ValueError as error:
            raise wrong_field("messages", str(error)) from None

    return EncodedPrompt(await state.run_in_worker(encode))


def _check_length(state: ServerState, vocabulary: Vocabulary, text: str, field: str) -> None:
    context, min_tokens = state.capabilities.context_length, vocabulary.fewest_tokens(text)
    if min_tokens > context:
        raise too_long(
            field,
            f"{len(text):,} characters are {min_tokens:,} tokens or more, over the model's "
            f"context of {context} tokens",
        )


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    calls = [
        _template_tool_call(call, f"{where}.tool_calls[{i}].function.arguments")
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


def _template_tool_call(call: ToolCall, field: str) -> dict[str, Any]:
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
    """`POST /tokenize`: return the ids of a prompt, or of messages in the chat template."""
    state = request.app[STATE]
    body = await read_body(request, TokenizeRequest)
    if body.messages is not None:
        ids = (await encode_conversation(state, body.messages, body, body.tools)).token_ids
    else:
        assert body.prompt is not None
        encode, max_chars = state.require_vocabulary("prompt").encode, state.limits.text
        if len(body.prompt) > max_chars:
            raise too_long("prompt", f"{len(body.prompt):,} characters; {max_chars:,} at most")
        ids = await state.run_in_worker(encode, body.prompt, body.add_special_tokens is not False)
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
    text = await state.run_in_worker(decode, body.tokens, skip_special_tokens=False)
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
    requesting_field: str = "prompt_logprobs",
) -> list[PromptScores]:
    """Return the log-probs of prompts' tokens, with the `top` likeliest tokens of each position.
    The engine draws between prompts. Refused names `requesting_field`, which requests too much, or
    `prompt_field`."""
    max_logprobs = state.limits.told_streamed if stream else state.limits.told
    count = sum(len(prompt.token_ids) for prompt in prompts) * (top + 1)
    if count > max_logprobs:
        note = " in a stream" if stream else ""
        reason = f"{count:,} log-probs of prompts in one answer; {max_logprobs:,} at most{note}"
        raise wrong_field(requesting_field, reason)
    if not state.capabilities.scores:
        raise wrong_field("prompt_logprobs", "this engine does not score")
    fields = prompt_fields(prompt_field, len(prompts))
    return [
        await _score_one(state, prompt.token_ids, top, temperature, field)
        for prompt, field in zip(prompts, fields, strict=True)
    ]


async def _score_one(
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
        positions = zip(ranked.top_ids_TK.tolist(), ranked.top_logprobs_TK.tolist(), strict=True)
        tops = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in positions]
        return PromptScores(ranked.logprobs_T.tolist(), tops)

    try:
        return await state.engine.call(score, "score")
    except ValueError as error:  # "sequences[0]: reason"
        raise wrong_field(field, str(error).partition(": ")[2]) from None


def prompt_logprobs(
    names: TokenNames, token_ids: list[int], scores: PromptScores
) -> list[dict[str, dict[str, Any]] | None]:
    """Return scores in vLLM's format: by token id, None for the first token."""

    def ranked(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        name = names.name(token_id)
        return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": name}

    entries: list[dict[str, dict[str, Any]] | None] = [None]
    for token, logprob, top_tokens in zip(token_ids[1:], scores.logprobs, scores.tops, strict=True):
        entry = {
            str(other_id): ranked(other_id, value, i)
            for i, (other_id, value) in enumerate(top_tokens, 1)
        }
        entry.setdefault(str(token), ranked(token, logprob, None))
        entries.append(entry)
    return entries
