"""POST /inference/v1/generate: token ids in, token ids out, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from lowroll.server.engine_loop import Delta
from lowroll.server.limits import REQUEST_ID, STATE, read_body
from lowroll.server.prompts import EncodedPrompt, PromptScores, prompt_logprobs, score_prompts
from lowroll.server.protocol import GENERATE_ENGINE_FIELDS, GenerateRequest
from lowroll.server.streaming import Answer, Tree, logprob_objects, origin, respond
from lowroll.server.text import TokenNames
from lowroll.types import Group, Rollout


async def generate(request: web.Request) -> web.StreamResponse:
    """`POST /inference/v1/generate`: continue a prompt of token ids, in vLLM's format. For
    `prompt_logprobs` the engine first scores the prompt."""
    state = request.app[STATE]
    body = await read_body(request, GenerateRequest)
    params, prompt_ids = body.sampling_params, body.token_ids
    state.check_n(params.n)
    prompt_scores = None
    if params.prompt_logprobs is not None:
        (prompt_scores,) = await score_prompts(
            state,
            [EncodedPrompt(prompt_ids)],
            params.prompt_logprobs,
            stream=body.stream,
            prompt_field="token_ids",
            requesting_field="sampling_params.prompt_logprobs",
        )
    max_tokens = params.max_tokens
    engine_request = params.to_engine_request(
        prompt_ids,
        max_tokens=state.tokens_left(prompt_ids) if max_tokens is None else max_tokens,
        top_logprobs=params.logprobs or 0,
        request_id=body.request_id,
    )
    answer = await state.run_in_worker(GenerateAnswer, request, body, prompt_scores)
    return await respond(request, answer, [engine_request], GENERATE_ENGINE_FIELDS)


class GenerateAnswer(Answer):
    body: GenerateRequest

    def __init__(
        self, request: web.Request, body: GenerateRequest, prompt_scores: PromptScores | None
    ) -> None:
        state = request.app[STATE]
        self.names = TokenNames(state.vocabulary, as_ids=True)
        super().__init__(
            body, [body.token_ids], {"request_id": body.request_id or request[REQUEST_ID]}
        )
        scores = None
        if prompt_scores is not None:
            scores = prompt_logprobs(self.names, body.token_ids, prompt_scores)
        self.prompt_fields = {
            "model": state.name,
            "prompt_token_ids": body.token_ids,
            "prompt_logprobs": scores,
        }

    def whole(self, groups: Sequence[Group]) -> Tree:
        return self.head | self.prompt_fields | super().whole(groups)

    def whole_choice(self, prompt: int, delta: Delta, rollout: Rollout) -> Tree:
        return self._choice(delta) | {
            "weight_versions": weight_versions(rollout),
            "lowroll": origin(rollout),
        }

    def chunk(self, prompt: int, delta: Delta) -> Tree:
        return self.head | {"choices": [self._choice(delta)]}

    def _choice(self, delta: Delta) -> Tree:
        num_top = self.body.sampling_params.logprobs
        content = None
        if num_top is not None:
            # "token" in one version of vLLM, "token_id" in the next
            objects = logprob_objects(self.names, delta, num_top)
            content = [
                one | {"token_id": i} for one, i in zip(objects, delta.token_ids, strict=True)
            ]
        return {
            "index": delta.sample,
            "token_ids": delta.token_ids,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "logprobs": None if content is None else {"content": content},
        }


def weight_versions(rollout: Rollout) -> list[dict[str, Any]]:
    """Return which weights drew which tokens, in vLLM's format."""
    spans = rollout.behavior.policy
    ends = [span.start for span in spans[1:]] + [len(rollout.token_ids)]
    return [
        {"version": str(span.version), "start": span.start, "end": end}
        for span, end in zip(spans, ends, strict=True)
    ]
