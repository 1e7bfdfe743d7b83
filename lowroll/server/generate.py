"""POST /inference/v1/generate: token ids in, token ids out, as vLLM has it for trainers."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lowroll.server.answer import ends, groups, size, stream, to_json_beside
from lowroll.server.asks import NAMES, Prompt, engine_request, read, room
from lowroll.server.body import Generate
from lowroll.server.parts import Names, contents, drawn, origin, prompt_logprobs, usage, whole
from lowroll.server.scoring import Scores, check_told, score
from lowroll.server.serving import REQUEST_ID, SERVING
from lowroll.server.ticket import Delta
from lowroll.types import Group, Rollout

_SAMPLING = (
    "n max_tokens min_tokens temperature top_p top_k min_p repetition_penalty presence_penalty "
    "frequency_penalty logit_bias ignore_eos seed"
).split()
_NAMES = {"prompt_ids": "token_ids", "id": "request_id"} | {
    name: f"sampling_params.{NAMES.get(name, name)}"
    for name in [*_SAMPLING, "stop_ids", "stop_strings", "top_logprobs"]
}


async def handle(request: web.Request) -> web.StreamResponse:
    """n continuations of one prompt."""
    serving = request.app[SERVING]
    body = await read(request, Generate)
    params, prompt = body.sampling_params, Prompt(body.token_ids)
    scores = None
    if params.prompt_logprobs is not None:
        check_told(
            serving,
            [prompt.token_ids],
            params.prompt_logprobs,
            body.stream,
            "sampling_params.prompt_logprobs",
        )
        scores = await score(
            serving, prompt.token_ids, params.prompt_logprobs, field=_NAMES["prompt_ids"]
        )
    asked = engine_request(
        serving,
        prompt,
        params,
        max_tokens=room(serving, prompt) if params.max_tokens is None else params.max_tokens,
        top_logprobs=params.logprobs or 0,
        request_id=body.request_id,
    )
    answer = await serving.work(_Answer, request, body, prompt, scores)
    if body.stream:
        return await stream(request, [asked], _NAMES, answer.chunk, last=answer.last)
    (group,) = await groups(serving, [asked], _NAMES)
    return await to_json_beside(serving, lambda: answer.whole(group), size([prompt], [group]))


class _Answer:
    """The answer to one prompt as JSON."""

    def __init__(
        self, request: web.Request, body: Generate, prompt: Prompt, scores: Scores | None
    ) -> None:
        serving = request.app[SERVING]
        self.body = body
        self.prompt = prompt
        self.names = Names(serving.vocabulary, as_ids=True)
        self.head: dict[str, Any] = {
            "request_id": body.request_id or request[REQUEST_ID],
            "model": serving.name,
            "prompt_token_ids": prompt.token_ids,
            "prompt_logprobs": None
            if scores is None
            else prompt_logprobs(self.names, prompt.token_ids, scores),
        }

    def whole(self, group: Group) -> dict[str, Any]:
        """All of it."""
        choices = [
            self._choice(whole(sample, rollout))
            | {"weight_versions": weight_versions(rollout), "lowroll": origin(rollout)}
            for sample, rollout in enumerate(group.rollouts)
        ]
        return self.head | {"choices": choices, "usage": usage([self.prompt], drawn([group]))}

    def chunk(self, _: int, delta: Delta) -> dict[str, Any]:
        """A part of the stream."""
        return {"request_id": self.head["request_id"], "choices": [self._choice(delta)]}

    def last(self, ended: list[Group]) -> list[dict[str, Any]]:
        """What ends the stream."""
        head = {"request_id": self.head["request_id"]}
        return ends(head, self.body, ended, usage([self.prompt], drawn(ended)))

    def _choice(self, delta: Delta) -> dict[str, Any]:
        asked = self.body.sampling_params.logprobs
        return {
            "index": delta.sample,
            "token_ids": delta.token_ids,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "logprobs": None if asked is None else {"content": self._contents(delta, asked)},
        }

    def _contents(self, delta: Delta, top: int) -> list[dict[str, Any]]:
        """vLLM has called the id "token" in one version and "token_id" in the next: both."""
        told = contents(self.names, delta, top)
        return [one | {"token_id": i} for one, i in zip(told, delta.token_ids, strict=True)]


def weight_versions(rollout: Rollout) -> list[dict[str, Any]]:
    """Which weights drew which tokens, as vLLM has it."""
    spans = rollout.behavior.policy
    ends = [span.start for span in spans[1:]] + [len(rollout.token_ids)]
    return [
        {"version": str(span.version), "start": span.start, "end": end}
        for span, end in zip(spans, ends, strict=True)
    ]
