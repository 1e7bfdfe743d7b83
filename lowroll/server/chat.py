"""POST /v1/chat/completions: the assistant's next turn, in the model's chat template."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lowroll.server.answer import ends, groups, size, stream, to_json_beside, wants_usage
from lowroll.server.asks import (
    NAMES,
    Offer,
    Prompt,
    conversation,
    engine_request,
    offered,
    read,
    room,
)
from lowroll.server.body import Chat, stops
from lowroll.server.errors import Refused
from lowroll.server.grammars import grammar_of
from lowroll.server.parts import (
    ChatChoice,
    Names,
    drawn,
    now,
    origin,
    prompt_logprobs,
    usage,
    whole,
)
from lowroll.server.scoring import Scores, check_told, score
from lowroll.server.serving import REQUEST_ID, SERVING, Serving
from lowroll.server.ticket import Delta
from lowroll.types import Group, Request

_NAMES = NAMES | {"prompt_ids": "messages", "top_logprobs": "top_logprobs"}


async def handle(request: web.Request) -> web.StreamResponse:
    """n answers to one conversation."""
    serving = request.app[SERVING]
    body = await read(request, Chat)
    if body.top_logprobs is not None and not body.logprobs:
        raise Refused("top_logprobs: it goes with logprobs: true", "top_logprobs")
    offer = offered(serving, body)
    tools = offer.tools if offer is not None else ()
    prompt = await conversation(
        serving, body.messages, body.add_generation_prompt, tools, body.chat_template_kwargs
    )
    grammar, named = await grammar_of(serving, body, offer)
    asked, names = _request(serving, prompt, body, grammar)
    names |= named
    scores = None
    if body.prompt_logprobs is not None:
        check_told(serving, [prompt.token_ids], body.prompt_logprobs, body.stream)
        scores = await score(
            serving,
            prompt.token_ids,
            body.prompt_logprobs,
            body.score_temperature,
            field=names["prompt_ids"],
        )
    answer = _Answer(request, body, prompt, scores, offer)
    if body.stream:
        first = answer.first()
        return await stream(request, [asked], names, answer.chunk, first=first, last=answer.last)
    (group,) = await groups(serving, [asked], names)
    return await to_json_beside(serving, lambda: answer.whole(group), size([prompt], [group]))


def _request(
    serving: Serving, prompt: Prompt, body: Chat, grammar: str | None
) -> tuple[Request, dict[str, str]]:
    """What the engine is asked, and the client's names of its fields."""
    most, names = body.max_tokens, dict(_NAMES)
    if body.max_completion_tokens is not None:
        if most not in (None, body.max_completion_tokens):
            raise Refused(
                f"max_tokens: {most}, and max_completion_tokens is {body.max_completion_tokens}",
                "max_tokens",
            )
        most, names = body.max_completion_tokens, names | {"max_tokens": "max_completion_tokens"}
    asked = engine_request(
        serving,
        prompt,
        body,
        max_tokens=room(serving, prompt) if most is None else most,
        top_logprobs=body.top_logprobs or 0,
        request_id=body.request_id,
        grammar=grammar,
    )
    return asked, names


def _message(content: str, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


class _Answer:
    """The answer to one conversation as JSON."""

    def __init__(
        self,
        request: web.Request,
        body: Chat,
        prompt: Prompt,
        scores: Scores | None,
        offer: Offer | None,
    ) -> None:
        serving = request.app[SERVING]
        self.body = body
        self.prompt = prompt
        self.scores = scores
        self.names = Names(serving.vocabulary, body.return_tokens_as_token_ids)
        self.choices = [
            ChatChoice(
                sample,
                prompt,
                self.names,
                stops(body),
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                token_ids=body.return_token_ids,
                offer=offer,
            )
            for sample in range(body.n)
        ]
        self.head: dict[str, Any] = {
            "id": f"chatcmpl-{request[REQUEST_ID]}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": now(),
            "model": serving.name,
        }

    def whole(self, group: Group) -> dict[str, Any]:
        """All of it."""
        choices = []
        for sample, rollout in enumerate(group.rollouts):
            choice = self.choices[sample].part(whole(sample, rollout))
            choice["message"] = _message(choice.pop("content"), choice.pop("tool_calls", None))
            if self.body.return_token_ids:
                choice["lowroll"] = origin(rollout)
            choices.append(choice)
        used = usage([self.prompt], drawn([group]))
        return self.head | {"choices": choices, "usage": used} | self._prompt()

    def first(self) -> list[dict[str, Any]]:
        """What begins the stream: who speaks."""
        turn = {"role": "assistant", "content": ""}
        events = [
            self._event({"index": i, "delta": turn, "logprobs": None, "finish_reason": None})
            for i in range(self.body.n)
        ]
        events[0] |= self._prompt()
        return events

    def chunk(self, _: int, delta: Delta) -> dict[str, Any] | None:
        """A part of the stream; None when it would say nothing."""
        choice = self.choices[delta.sample].part(delta)
        content, calls = choice.pop("content"), choice.pop("tool_calls", None)
        if not content and delta.finish_reason is None:
            if not self.body.logprobs and not self.body.return_token_ids:
                return None
        said: dict[str, Any] = {"content": content} if content else {}
        if calls:
            said["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        return self._event(choice | {"delta": said})

    def last(self, ended: list[Group]) -> list[dict[str, Any]]:
        """What ends the stream."""
        return ends(self.head, self.body, ended, usage([self.prompt], drawn(ended)))

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        used = {"usage": None} if wants_usage(self.body) else {}
        return self.head | {"choices": [choice]} | used

    def _prompt(self) -> dict[str, Any]:
        """What is told of the prompt."""
        told: dict[str, Any] = {}
        if self.body.return_token_ids:
            told["prompt_token_ids"] = self.prompt.token_ids
        if self.scores is not None:
            told["prompt_logprobs"] = prompt_logprobs(
                self.names, self.prompt.token_ids, self.scores
            )
        return told
