"""The `noise:` section: QeRL's noise on the norms of the rollout engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from lowroll.config.section import Count, NotNegative, Problem, Section


class NoiseConfig(Section):
    """QeRL's noise on the norms of the rollout engine: sigma falls from start to end over the run,
    in stages."""

    sigma_start: NotNegative = 1e-2  # standard deviation of the first stage with noise
    sigma_end: NotNegative = 1e-4  # and of the last
    num_stages: Count = 10  # stages of the run
    # its course between them
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    # num_stages counts the silent first stage, or does not
    variant: Literal["code", "paper"] = "code"
    # shared: the learner's norms carry the same noise
    learner: Literal["clean", "shared"] = "clean"


def noise_problems(noise: NoiseConfig | None) -> Iterator[Problem]:
    """Yield the problem of a schedule that cannot begin or end where it should."""
    if (
        noise is not None
        and noise.schedule == "exponential"
        and ((noise.sigma_start > 0) != (noise.sigma_end > 0))
    ):
        yield (
            (("noise", "sigma_end"), ("noise", "sigma_start")),
            "an exponential never reaches or leaves 0; set both sigmas above 0, or another noise.schedule",
        )
