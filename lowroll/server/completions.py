"""POST /v1/completions: text that goes on from prompts, and log-probs of given text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from lowroll.server.answer import ends, groups, size, stream, to_json_beside, wants_usage
from lowroll.server.asks import (
    NAMES,
    Prompt,
    check_id,
    engine_request,
    prompts,
    read,
    room,
)
from lowroll.server.body import DEFAULT_MAX_TOKENS, Completion, stops
from lowroll.server.errors import Refused
from lowroll.server.grammars import grammar_of
from lowroll.server.parts import (
    CompletionChoice,
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


async def handle(request: web.Request) -> web.StreamResponse:
    """One answer for each sample of each prompt, those of the first prompt first."""
    serving = request.app[SERVING]
    body = await read(request, Completion)
    _check(body)
    given = await prompts(serving, body.prompt, body.add_special_tokens)
    check_id(body, len(given))
    grammar, named = await grammar_of(serving, body)
    names = NAMES | named
    requests = []
    if body.max_tokens != 0:
        requests = [_request(serving, prompt, body, grammar) for prompt in given]
    answers = _Answers(request, body, given, await _scores(serving, body, given))
    if not requests:
        return await to_json_beside(serving, answers.scored, size(given, []))
    if body.stream:
        return await stream(request, requests, names, answers.chunk, last=answers.last)
    drawn_groups = await groups(serving, requests, names)
    return await to_json_beside(
        serving, lambda: answers.whole(drawn_groups), size(given, drawn_groups)
    )


def _check(body: Completion) -> None:
    """What fields ask for together."""
    if body.best_of not in (None, body.n):
        raise Refused(f"best_of: {body.best_of} with n {body.n} is not supported", "best_of")
    if body.packed:
        _check_packed(body)
    if body.max_tokens != 0:
        return
    if not body.echo and body.prompt_logprobs is None:
        raise Refused(
            "max_tokens: 0 draws nothing; it goes with echo or prompt_logprobs", "max_tokens"
        )
    if body.n != 1:
        raise Refused(f"n: a prompt that is scored alone has one answer, not {body.n}", "n")
    if body.stream:
        raise Refused("stream: with max_tokens 0 there is nothing to stream", "stream")


def _check_packed(body: Completion) -> None:
    if not body.return_token_ids:
        raise Refused("packed: it goes with return_token_ids: true", "packed")
    for field in ("echo", "logprobs", "prompt_logprobs"):
        value = getattr(body, field)
        if value is not None and value is not False:  # 0 log-probs are asked for too
            raise Refused(f"packed: it does not go with {field}", "packed")


def _request(serving: Serving, prompt: Prompt, body: Completion, grammar: str | None) -> Request:
    most = body.max_tokens
    if most is None:
        most = max(min(DEFAULT_MAX_TOKENS, room(serving, prompt)), body.min_tokens)
    return engine_request(
        serving,
        prompt,
        body,
        max_tokens=most,
        top_logprobs=body.logprobs or 0,
        request_id=body.request_id,
        grammar=grammar,
    )


async def _scores(
    serving: Serving, body: Completion, given: Sequence[Prompt]
) -> Sequence[Scores | None]:
    """Of each prompt, where log-probs of prompts are told: one after the other, so that the engine
    draws between two."""
    if body.prompt_logprobs is None and not (body.echo and body.logprobs is not None):
        return [None] * len(given)
    top = max(body.prompt_logprobs or 0, body.logprobs or 0 if body.echo else 0)
    asked = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
    check_told(serving, [prompt.token_ids for prompt in given], top, body.stream, asked)
    found = []
    for i, prompt in enumerate(given):
        field = NAMES["prompt_ids"] + (f"[{i}]" if len(given) > 1 else "")
        found.append(
            await score(serving, prompt.token_ids, top, body.score_temperature, field=field)
        )
    return found


class _Answers:
    """The answers of one request as JSON."""

    def __init__(
        self,
        request: web.Request,
        body: Completion,
        given: Sequence[Prompt],
        scores: Sequence[Scores | None],
    ) -> None:
        serving = request.app[SERVING]
        self.body = body
        self.given = given
        self.scores = scores
        self.names = Names(serving.vocabulary, body.return_tokens_as_token_ids)
        self.choices = [
            self._choice(i, sample) for i in range(len(given)) for sample in range(body.n)
        ]
        self.head: dict[str, Any] = {
            "id": f"cmpl-{request[REQUEST_ID]}",
            "object": "text_completion",
            "created": now(),
            "model": serving.name,
        }

    def whole(self, ended: list[Group]) -> dict[str, Any]:
        """All of it."""
        choices = []
        for i, group in enumerate(ended):
            for sample, rollout in enumerate(group.rollouts):
                choice = self._part(i, whole(sample, rollout))
                if self.body.return_token_ids:
                    choice["lowroll"] = origin(rollout, packed=self.body.packed)
                choices.append(choice)
        return self.head | {"choices": choices, "usage": self._usage(ended)}

    def scored(self) -> dict[str, Any]:
        """The prompts alone, with their log-probs."""
        nothing = Delta(0, [], [], None, "length", None)
        choices = [self._part(i, nothing) for i in range(len(self.given))]
        return self.head | {"choices": choices, "usage": usage(self.given, 0)}

    def chunk(self, i: int, delta: Delta) -> dict[str, Any] | None:
        """A part of the stream; None when it would say nothing."""
        choice = self._part(i, delta)
        silent = not choice["text"] and delta.finish_reason is None
        if silent and self.body.logprobs is None and not self.body.return_token_ids:
            return None
        return self.head | {"choices": [choice]} | self._no_usage()

    def last(self, ended: list[Group]) -> list[dict[str, Any]]:
        """What ends the stream."""
        return ends(self.head, self.body, ended, self._usage(ended), self.body.packed)

    def _choice(self, i: int, sample: int) -> CompletionChoice:
        body, prompt = self.body, self.given[i]
        echo = None
        if body.echo:
            echo = prompt.text if prompt.text is not None else self._decoded(prompt)
        return CompletionChoice(
            i * body.n + sample,
            prompt,
            self.names,
            stops(body),
            logprobs=body.logprobs,
            echo=echo,
            scores=self.scores[i],
            token_ids=body.return_token_ids,
            packed=body.packed,
        )

    def _decoded(self, prompt: Prompt) -> str:
        known = self.names.vocabulary
        return "" if known is None else known.decode(prompt.token_ids)

    def _part(self, i: int, delta: Delta) -> dict[str, Any]:
        writer = self.choices[i * self.body.n + delta.sample]
        first = not writer.begun
        choice = writer.part(delta)
        asked, scores = self.body.prompt_logprobs, self.scores[i]
        if asked is not None and first and scores is not None:
            ids = self.given[i].token_ids
            choice["prompt_logprobs"] = prompt_logprobs(self.names, ids, scores.cut(asked))
        return choice

    def _usage(self, ended: list[Group]) -> dict[str, int]:
        return usage(self.given, drawn(ended))

    def _no_usage(self) -> dict[str, None]:
        return {"usage": None} if wants_usage(self.body) else {}
