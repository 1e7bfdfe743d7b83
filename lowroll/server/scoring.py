"""Log-probs of a prompt's own tokens, under the engine's weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowroll.engine.base import Engine
from lowroll.server.errors import Refused
from lowroll.server.serving import Serving

Top = list[tuple[int, float]]


@dataclass(frozen=True)
class Scores:
    """Of each token but the first, before which nothing stands: its log-prob in nats, and the
    likeliest tokens of its place, likeliest first."""

    logprobs: list[float]
    tops: list[Top]

    def cut(self, top: int) -> Scores:
        """With fewer of the likeliest."""
        return Scores(self.logprobs, [likeliest[:top] for likeliest in self.tops])


def check_told(
    serving: Serving,
    prompts: Sequence[Sequence[int]],
    top: int,
    stream: bool = False,
    field: str = "prompt_logprobs",
) -> None:
    """Refused when the log-probs of the prompts are more than one answer may hold, all places and
    all tokens told at each together. field: the client's that asks for them."""
    most = serving.limits.told_streamed if stream else serving.limits.told
    count = sum(map(len, prompts)) * (top + 1)
    if count > most:
        raise Refused(
            f"{field}: {count:,} log-probs of prompts in one answer; {most:,} at most"
            + (" in a stream" if stream else ""),
            field,
        )


async def score(
    serving: Serving, token_ids: list[int], top: int, temperature: float = 1.0, *, field: str
) -> Scores:
    """Scores of a prompt, with `top` tokens a place. field: the client's name of it. Refused for ids
    that cannot be scored."""
    if not serving.capabilities.scores:
        raise Refused("prompt_logprobs: this engine does not score", "prompt_logprobs")
    if not token_ids:
        raise Refused(f"{field}: the prompt is empty", field)
    context = serving.capabilities.context_length
    if len(token_ids) > context:
        raise Refused(
            f"{field}: {len(token_ids)} tokens are over the model's context of {context} tokens",
            field,
            code="context_length_exceeded",
        )
    if len(token_ids) == 1:
        return Scores([], [])
    try:
        return await serving.loop.call(
            lambda engine: _score(engine, token_ids, top, temperature), "score"
        )
    except ValueError as error:  # "sequences[0]: ..."
        raise Refused(f"{field}: {str(error).partition(': ')[2]}", field) from None


def _score(engine: Engine, token_ids: list[int], top: int, temperature: float) -> Scores:
    (ranked,) = engine.score_top([token_ids], [1], top, temperature)
    ids, logprobs = ranked.top_ids_TK.tolist(), ranked.top_logprobs_TK.tolist()
    tops = [list(zip(*place, strict=True)) for place in zip(ids, logprobs, strict=True)]
    return Scores(ranked.logprobs_T.tolist(), tops)
