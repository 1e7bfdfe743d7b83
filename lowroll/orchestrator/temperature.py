"""Sampling temperature over the run.

    p = min(step, T - 1) / (T - 1)          progress; 1 when T <= 1
    factor = p                              linear
    factor = (1 - cos(pi p)) / 2            cosine
    temperature = start + (end - start) * factor

(the Surogate GRPO document, `sampling.temp_scheduler`; step counts from 0.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TemperatureSchedule:
    """The temperature of a step."""

    start: float
    end: float
    num_steps: int
    shape: Literal["linear", "cosine"] = "linear"

    def __call__(self, step: int) -> float:
        last_step = self.num_steps - 1
        progress = min(step, last_step) / last_step if last_step > 0 else 1.0
        factor = progress if self.shape == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
        return self.start + (self.end - self.start) * factor
