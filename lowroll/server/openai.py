"""The routes of OpenAI's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from aiohttp import web

from lowroll.engine.remote.protocol import pack
from lowroll.server.engine_loop import Delta
from lowroll.server.limits import STATE, ServerState, read_body
from lowroll.server.prompts import (
    EncodedPrompt,
    PromptScores,
    TopTokens,
    encode_conversation,
    encode_prompts,
    prompt_logprobs,
    score_prompts,
)
from lowroll.server.protocol import (
    CHAT_ENGINE_FIELDS,
    DEFAULT_MAX_TOKENS,
    ENGINE_FIELDS,
    ChatRequest,
    CompletionRequest,
    wrong_field,
)
from lowroll.server.streaming import (
    Answer,
    Tree,
    json_response,
    json_response_in_worker,
    logprob_objects,
    openai_head,
    origin,
    respond,
)
from lowroll.server.structured_outputs import OfferedTools, grammar_of, offered_tools
from lowroll.server.text import ResponseText, TokenNames, Vocabulary, finite_logprob
from lowroll.tool_calls import UNTYPED, Speech, ToolInvocation, texts, typed
from lowroll.types import Group, Rollout


async def list_models(request: web.Request) -> web.StreamResponse:
    return json_response({"object": "list", "data": [await _model_card(request.app[STATE])]})


async def one_model(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.check_model(request.match_info["name"])
    return json_response(await _model_card(state))


async def _model_card(state: ServerState) -> Tree:
    can, health = state.capabilities, await state.engine.health(state.limits.health_s)
    return {
        "id": state.name,
        "object": "model",
        "created": state.created,
        "owned_by": "lowroll",
        "root": state.name,
        "parent": None,
        "permission": [],
        "max_model_len": can.context_length,
        "lowroll": {
            "capabilities": vars(can)
            | {
                "updates": sorted(can.updates),
                "sampler": sorted(can.sampler),
                "kv": {"policy": can.kv.name, "options": vars(can.kv)},
            },
            "behavior": asdict(health.behavior),
            "engine": {
                "weight_bits": health.stats.weight_bits,
                "cache_tokens": health.stats.cache_tokens,
            },
            "packs": True,
        },
    }


class ChoiceText:
    """The text of one choice as it comes; empty without a vocabulary. start: characters before it.
    marks: show special tokens of tool calls."""

    def __init__(
        self,
        vocabulary: Vocabulary | None,
        prompt_ids: list[int],
        stop: Sequence[str],
        start: int = 0,
        marks: bool = False,
    ) -> None:
        self.text = None
        if vocabulary is not None:
            self.text = ResponseText(vocabulary.decoder(prompt_ids, marks), stop)
        self.start = start
        self.begun = False

    def take(self, delta: Delta, offsets: list[int] | None = None) -> str:
        """Return the text that new tokens make final. offsets: receives the start of each."""
        self.begun = True
        if self.text is None:
            return ""
        ids, is_last = delta.token_ids, delta.finish_reason is not None
        if offsets is None:
            return self.text.end(ids, delta.stop_reason) if is_last else self.text.feed(ids)
        text = ""
        for token in ids[:-1] if is_last else ids:  # one by one, for the length before each
            offsets.append(self.start + self.text.decoded)
            text += self.text.feed([token])
        if not is_last:
            return text
        if not ids:
            return self.text.end([], None)
        offsets.append(self.start + self.text.decoded)
        return text + self.text.end(ids[-1:], delta.stop_reason)


# -- /v1/completions ---------------------------------------------------------------------------------


async def completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/completions`: continue prompts, and score given texts."""
    state = request.app[STATE]
    body = await read_body(request, CompletionRequest)
    state.check_n(body.n)
    prompts = await encode_prompts(state, body.prompt, body.add_special_tokens)
    if body.request_id and len(prompts) > 1:
        reason = f"it names one request, and there are {len(prompts)} prompts"
        raise wrong_field("request_id", reason)
    grammar, grammar_names = await grammar_of(state, body)
    scores = await _prompt_scores(state, body, prompts)
    answer = CompletionAnswer(request, body, prompts, scores)
    if body.max_tokens == 0:
        return await json_response_in_worker(state, answer.scored, sum(map(len, answer.prompts)))
    requests = [
        body.to_engine_request(
            ids,
            max_tokens=_completion_length(state, body, ids),
            top_logprobs=body.logprobs or 0,
            request_id=body.request_id,
            grammar=grammar,
        )
        for ids in answer.prompts
    ]
    return await respond(request, answer, requests, ENGINE_FIELDS | grammar_names)


def _completion_length(state: ServerState, body: CompletionRequest, prompt_ids: list[int]) -> int:
    if body.max_tokens is not None:
        return body.max_tokens
    return max(min(DEFAULT_MAX_TOKENS, state.tokens_left(prompt_ids)), body.min_tokens)


async def _prompt_scores(
    state: ServerState, body: CompletionRequest, prompts: Sequence[EncodedPrompt]
) -> Sequence[PromptScores | None]:
    echo_logprobs = body.logprobs if body.echo else None
    if body.prompt_logprobs is None and echo_logprobs is None:
        return [None] * len(prompts)
    return await score_prompts(
        state,
        prompts,
        max(body.prompt_logprobs or 0, echo_logprobs or 0),
        body.score_temperature,
        stream=body.stream,
        prompt_field="prompt",
        requesting_field="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
    )


class CompletionAnswer(Answer):
    body: CompletionRequest

    def __init__(
        self,
        request: web.Request,
        body: CompletionRequest,
        prompts: Sequence[EncodedPrompt],
        scores: Sequence[PromptScores | None],
    ) -> None:
        head = openai_head(request, "cmpl", "text_completion")
        super().__init__(body, [prompt.token_ids for prompt in prompts], head)
        self.packed = body.packed
        self.scores = scores
        vocabulary = request.app[STATE].vocabulary
        self.names = TokenNames(vocabulary, body.return_tokens_as_token_ids)
        self.echoes = [self._echo(prompt) for prompt in prompts]
        self.texts = [
            ChoiceText(vocabulary, ids, body.stop_strings, len(echo))
            for ids, echo in zip(self.prompts, self.echoes, strict=True)
            for _ in range(body.n)
        ]

    def whole_choice(self, prompt: int, delta: Delta, rollout: Rollout) -> Tree:
        choice = self._choice(prompt, delta)
        if self.body.return_token_ids:
            choice["lowroll"] = origin(rollout, self.packed)
        return choice

    def scored(self) -> Tree:
        nothing = Delta(0, [], [], None, "length", None)
        choices = [self._choice(i, nothing) for i in range(len(self.prompts))]
        return self.head | {"choices": choices, "usage": self.usage([])}

    def chunk(self, prompt: int, delta: Delta) -> Tree | None:
        choice = self._choice(prompt, delta)
        shows_tokens = self.body.logprobs is not None or self.body.return_token_ids
        if not (choice["text"] or delta.finish_reason or shows_tokens):
            return None
        return self.event(choice)

    def _echo(self, prompt: EncodedPrompt) -> str:
        if not self.body.echo:
            return ""
        if prompt.text is not None:
            return prompt.text
        vocabulary = self.names.vocabulary
        return "" if vocabulary is None else vocabulary.decode(prompt.token_ids)

    def _choice(self, i: int, delta: Delta) -> Tree:
        body, scores = self.body, self.scores[i]
        index = i * body.n + delta.sample
        end_fields = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        if self.packed:
            packed = pack(delta.token_ids, delta.logprobs)
            return {"index": index, "text": "", "packed": packed} | end_fields
        is_first = not self.texts[index].begun
        lists = self._logprob_lists(i, delta, is_first)
        text = self.texts[index].take(delta, None if lists is None else lists.text_offset)
        choice: Tree = {
            "index": index,
            "text": self.echoes[i] + text if is_first else text,
            "logprobs": None if lists is None else lists.tree(),
        }
        choice |= end_fields
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self.prompts[i]
        if is_first and body.prompt_logprobs is not None and scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.names, self.prompts[i], scores.cut(body.prompt_logprobs)
            )
        return choice

    def _logprob_lists(self, i: int, delta: Delta, is_first: bool) -> _LogprobLists | None:
        num_top, scores = self.body.logprobs, self.scores[i]
        if num_top is None:
            return None
        lists = _LogprobLists(self.names)
        if is_first and self.body.echo:
            assert scores is not None
            lists.add_prompt(self.prompts[i], scores.cut(num_top))
        lists.add(delta.token_ids, delta.logprobs, delta.top_logprobs)
        return lists


class _LogprobLists:
    def __init__(self, names: TokenNames) -> None:
        self.names = names
        self.text_offset: list[int] = []
        self.token_logprobs: list[float | None] = []
        self.tokens: list[str] = []
        self.top_logprobs: list[dict[str, float] | None] = []

    def add(self, ids: list[int], logprobs: list[float], tops: list[TopTokens] | None) -> None:
        name = self.names.name
        tokens = [name(token) for token in ids]
        values = list(map(finite_logprob, logprobs))
        self.tokens += tokens
        self.token_logprobs += values
        if not tops:
            self.top_logprobs += [{t: v} for t, v in zip(tokens, values, strict=True)]
            return
        for token, value, top in zip(tokens, values, tops, strict=True):
            logprobs_by_name: dict[str, float] = {}
            for other_id, logprob in top:  # the likelier of equal texts stays
                logprobs_by_name.setdefault(name(other_id), finite_logprob(logprob))
            logprobs_by_name.setdefault(token, value)
            self.top_logprobs.append(logprobs_by_name)

    def add_prompt(self, ids: list[int], scores: PromptScores) -> None:
        self.tokens.append(self.names.name(ids[0]))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.add(ids[1:], scores.logprobs, scores.tops)
        text = ChoiceText(self.names.vocabulary, [], ())
        text.take(Delta(0, ids, [], None, None, None), self.text_offset)

    def tree(self) -> Tree:
        return {
            "text_offset": self.text_offset,
            "token_logprobs": self.token_logprobs,
            "tokens": self.tokens,
            "top_logprobs": self.top_logprobs,
        }


# -- /v1/chat/completions ----------------------------------------------------------------------------


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """`POST /v1/chat/completions`: answer a conversation, perhaps with tool calls."""
    state = request.app[STATE]
    body = await read_body(request, ChatRequest)
    state.check_n(body.n)
    offered = offered_tools(state, body)
    tools = offered.tools if offered is not None else ()
    prompt = await encode_conversation(state, body.messages, body, tools)
    grammar, grammar_names = await grammar_of(state, body, offered)
    field_names = CHAT_ENGINE_FIELDS | grammar_names  # for errors
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        field_names["max_tokens"] = "max_completion_tokens"
    if max_tokens is None:
        max_tokens = state.tokens_left(prompt.token_ids)
    engine_request = body.to_engine_request(
        prompt.token_ids,
        max_tokens=max_tokens,
        top_logprobs=body.top_logprobs or 0,
        request_id=body.request_id,
        grammar=grammar,
    )
    scores = None
    if body.prompt_logprobs is not None:
        (scores,) = await score_prompts(
            state,
            [prompt],
            body.prompt_logprobs,
            body.score_temperature,
            stream=body.stream,
            prompt_field="messages",
        )
    answer = ChatAnswer(request, body, prompt.token_ids, scores, offered)
    return await respond(request, answer, [engine_request], field_names)


class ChatAnswer(Answer):
    body: ChatRequest

    def __init__(
        self,
        request: web.Request,
        body: ChatRequest,
        prompt_ids: list[int],
        scores: PromptScores | None,
        offered: OfferedTools | None,
    ) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(body, [prompt_ids], openai_head(request, "chatcmpl", kind))
        self.scores = scores
        self.offered = offered
        vocabulary = request.app[STATE].vocabulary
        self.names = TokenNames(vocabulary, body.return_tokens_as_token_ids)
        samples = range(body.n)
        self.texts = [
            ChoiceText(vocabulary, prompt_ids, body.stop_strings, marks=offered is not None)
            for _ in samples
        ]
        self.speeches = None if offered is None else [Speech(offered.format) for _ in samples]

    def whole(self, groups: Sequence[Group]) -> Tree:
        return super().whole(groups) | self._prompt()

    def whole_choice(self, prompt: int, delta: Delta, rollout: Rollout) -> Tree:
        content, calls = self._said(delta)
        message: Tree = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        choice = self._choice(delta, bool(calls)) | {"message": message}
        if self.body.return_token_ids:
            choice["lowroll"] = origin(rollout)
        return choice

    def first(self) -> list[Tree]:
        choice = {
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        events = [self.event({"index": i} | choice) for i in range(self.body.n)]
        events[0] |= self._prompt()
        return events

    def chunk(self, prompt: int, delta: Delta) -> Tree | None:
        content, calls = self._said(delta)
        shows_tokens = self.body.logprobs or self.body.return_token_ids
        if not (content or delta.finish_reason or shows_tokens):
            return None
        message: Tree = {"content": content} if content else {}
        if calls:
            message["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        return self.event(self._choice(delta, bool(calls)) | {"delta": message})

    def _said(self, delta: Delta) -> tuple[str, list[Tree]]:
        content = self.texts[delta.sample].take(delta)
        if self.speeches is None:
            return content, []
        speech = self.speeches[delta.sample]
        content = speech.feed(content)
        if delta.finish_reason is None:
            return content, []
        rest, calls = speech.end()
        return content + rest, self._calls(calls, delta.sample)

    def _calls(self, calls: Sequence[ToolInvocation], sample: int) -> list[Tree]:
        assert self.offered is not None
        return [
            {
                "id": call.id or self._call_id(sample, number),
                "type": "function",
                "function": {"name": call.name, "arguments": _json_arguments(call, self.offered)},
            }
            for number, call in enumerate(calls if self.offered.several else calls[:1])
        ]

    def _call_id(self, sample: int, number: int) -> str:
        """Return a reproducible id of nine characters, as some templates require."""
        identity = repr((self.prompts[0], sample, number))
        return hashlib.sha256(identity.encode()).hexdigest()[:9]

    def _choice(self, delta: Delta, calls: bool) -> Tree:
        reason = delta.finish_reason
        logprobs = None
        if self.body.logprobs:
            top = self.body.top_logprobs or 0
            logprobs = {"content": logprob_objects(self.names, delta, top)}
        choice: Tree = {
            "index": delta.sample,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls and reason == "stop" else reason,
            "stop_reason": delta.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _prompt(self) -> Tree:
        fields: Tree = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.prompts[0]
        if self.scores is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self.names, self.prompts[0], self.scores)
        return fields


def _json_arguments(call: ToolInvocation, offered: OfferedTools) -> str:
    arguments = call.arguments
    if offered.format in UNTYPED:
        schemas = {tool.function.name: tool.function.parameters for tool in offered.tools}
        arguments = typed(arguments, texts(schemas.get(call.name) or {}, arguments))
    return json.dumps(arguments, ensure_ascii=False)
