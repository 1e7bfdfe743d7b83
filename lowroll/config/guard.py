"""The `guard:` section: numbers that say that the rollouts are leaving the learner, and what to do
about it.

Defaults: verl's guide wants an effective sample size above 0.3; QuRL (Fig. 3) saw the KL of its
rollouts grow twelvefold, from 0.002 to 0.025, and single weights of 1e5 before a collapse. Growth says
nothing of a run that starts too far away, so `kl_above` is a level: the formats that a pretrained model
keeps near (SmolLM2-135M: int8 0.05 nats at an ESS of 0.92, fp8 0.04) are below it, and those that it does
not are above (nvfp4 0.33 at 0.41, w4a8 0.70 at 0.12: docs/results.md). A sampler that cuts (top_p 0.9 alone is worth
up to 0.1 nats) and noise are far away by design, and have no level. No model of ours comes near it.
`lowroll.trainer.guard` has the actions.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lowroll.config.section import Count, Positive, Probability, Section


class GuardConfig(Section):
    """Alarms on the mismatch (null: off), and what they do after `patience` steps in a row."""

    # what happens then: a warning, tighter bounds, or wider rollouts
    action: Literal["warn", "tighten", "fallback"] = "warn"
    patience: Count = 3  # steps in a row with an alarm before the action
    ess_below: Probability | None = 0.3  # mismatch/ess
    # moving average of mismatch/kl_k3 over its first steps
    kl_growth: Annotated[float, Field(gt=1)] | None = 10.0
    kl_floor: Positive = 2e-3  # nats; growth below this level is no alarm
    # nats; the same average, from the first step on; off for a sampler that cuts, and with noise
    kl_above: Positive | None = 0.1
    rejected_above: Probability | None = 0.5  # correction/rejected_fraction, or of sequences
    ratio_above: Positive | None = 1e3  # mismatch/weight_max
    nonfinite: bool = True  # a mismatch or an update that is not finite
    # tighten: the power on bounds, on a log scale
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    fallback: Literal["next", "dense"] = "next"  # next: 4 bits -> int8_rotated -> dense
