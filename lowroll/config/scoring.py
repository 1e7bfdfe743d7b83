"""The `score:` and `filters:` sections: how responses are scored, and which are set aside."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lowroll.config.section import Count, NotNegative, Positive, Probability, Section


class ScoreConfig(Section):
    """The scoring workers. `time_limit` in seconds a response; more than `max_error_rate` failures
    stop the run, once there are 50 scores."""

    workers: Count = 2  # processes that score
    time_limit: Positive = 10.0  # seconds a response
    memory_limit_mb: Count = 2048  # of a worker
    # share of failed scores that stops the run, judged from 50 scores on
    max_error_rate: Annotated[float, Field(ge=0, lt=1)] = 0.05


class FilterConfig(Section):
    """Flags odd rollouts in the metrics; `enforce` also takes them out of the loss (their reward
    stays)."""

    type: Literal["gibberish", "repetition"]  # what is odd: rare tokens, or a loop
    enforce: bool = False  # take what is flagged out of the loss
    # gibberish: ids above it are rare tokens
    token_id_threshold: Annotated[int, Field(ge=0)] = 100_000
    logprob_offset: NotNegative = 2.0  # gibberish: nats below the uniform log-prob
    window: Count = 3000  # repetition: consecutive near-certain tokens
    prob_threshold: Probability = 0.99  # repetition: what near-certain means
