"""The settings of a step, which the configuration has checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowroll.advantages import Estimator
from lowroll.orchestrator.filters import Filter
from lowroll.orchestrator.temperature import TemperatureSchedule

SOLVED = 1.0 - 1e-6  # least reward of a solved task


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling fields of `lowroll.types.Request`."""

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The orchestrator's settings (docs/configuration.md)."""

    batch_size: int
    rollouts_per_example: int
    sampling: SamplingSettings = SamplingSettings()
    temperature_schedule: TemperatureSchedule | None = None  # replaces sampling.temperature
    seed: int = 0
    # relative shares of the draws by environment; 1 if absent
    env_weights: Mapping[str, float] = field(default_factory=dict)
    advantage: str = "grpo"  # a name of `lowroll.advantages.TABLE`, or custom
    estimator: Estimator | None = None  # the user's function of one group, for `custom`
    max_prompt_tokens: int | None = None  # longer prompts are skipped and counted
    max_sequence_tokens: int | None = None
    dynamic_sampling: bool = False
    max_rounds: int = 8
    no_signal: str = "end"
    overlong_max: int | None = None
    overlong_cache: int | None = None
    filters: tuple[Filter, ...] = ()
    max_error_rate: float = 0.05
    error_window: int = 50  # scores before the error rate is judged
    canary_interval: int | None = 20  # steps between checks of the scorer on known answers
    max_async_level: int = 0
    strict_async_level: bool = False
    max_off_policy_steps: int = 8
    oversampling_factor: float = 1.0
    partial: str = "none"
    stall_s: float = 3600.0  # seconds in which a group in flight must end
    sampling_seed: int | None = None  # None: `seed`
    buffer_seed: int | None = None  # of the mix of environments; None: `seed`
    online_difficulty_filtering: bool = False
    easy_threshold: float | None = None
    hard_threshold: float | None = None
    easy_fraction: float = 0.0
    hard_fraction: float = 0.0
    hash_keys: tuple[str, ...] = ()
    max_steps: int = 0  # 0: unknown
    skip_verification: bool = False

    @property
    def streams(self) -> bool:
        """True if groups are taken as they end instead of in rounds."""
        return self.max_async_level > 0 or self.oversampling_factor > 1 or self.partial != "none"

    @property
    def carries(self) -> bool:
        """True if unfinished groups continue into later batches."""
        return self.max_async_level > 0 or self.partial != "none"

    @property
    def filters_groups(self) -> bool:
        return self.dynamic_sampling or self.online_difficulty_filtering

    @property
    def uses_pools(self) -> bool:
        return self.easy_threshold is not None or self.hard_threshold is not None

    @property
    def num_open(self) -> int:
        return math.ceil(self.oversampling_factor * self.num_groups)

    @property
    def num_groups(self) -> int:
        return self.batch_size // self.rollouts_per_example

    def temperature(self, step: int) -> float:
        """Return the temperature of a step, counted from 1."""
        if self.temperature_schedule is None:
            return self.sampling.temperature
        return self.temperature_schedule(max(0, step - 1))
