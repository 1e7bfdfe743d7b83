"""The validated settings of a step; `runs.assembly` makes them from the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lowroll.advantages import TABLE, Estimator
from lowroll.orchestrator.filters import Filter
from lowroll.orchestrator.temperature import TemperatureSchedule

SOLVED = 1.0 - 1e-6  # the least reward of a solved task


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
    """The orchestrator's settings; docs/configuration.md has those of the same name. ValueError names
    the invalid field."""

    batch_size: int  # rollouts per step
    rollouts_per_example: int  # the group size G
    sampling: SamplingSettings = SamplingSettings()
    temperature_schedule: TemperatureSchedule | None = None  # replaces sampling.temperature
    seed: int = 0
    # relative shares of the draws by environment; 1 if absent
    env_weights: Mapping[str, float] = field(default_factory=dict)
    advantage: str = "grpo"  # a name of lowroll.advantages.TABLE (gae: with a critic), or custom
    estimator: Estimator | None = None  # the user's function of one group, for custom
    max_prompt_tokens: int | None = None  # longer prompts are skipped and counted
    max_sequence_tokens: int | None = None  # of a conversation with its prompt
    dynamic_sampling: bool = False
    max_rounds: int = 8
    no_signal: str = "end"  # end (NoSignal) or go_on
    overlong_max: int | None = None  # tokens
    overlong_cache: int | None = None  # tokens
    filters: tuple[Filter, ...] = ()
    max_error_rate: float = 0.05
    error_window: int = 50  # scores before the error rate is judged
    canary_interval: int | None = 20  # steps between checks of the scorer on known answers
    # asynchrony: see lowroll.orchestrator.rollout_buffer
    max_async_level: int = 0  # batches that may be drawn ahead of the learner
    strict_async_level: bool = False
    max_off_policy_steps: int = 8  # versions, and weight updates in flight
    oversampling_factor: float = 1.0  # open groups, as a multiple of a batch
    partial: str = "none"  # none, keep or replay
    stall_s: float = 3600.0  # seconds in which a group in flight must end
    # which prompts are drawn: see lowroll.orchestrator.prompt_source
    sampling_seed: int | None = None  # seed of sampling from the policy; None: `seed`
    buffer_seed: int | None = None  # seed of the mix of environments; None: `seed`
    online_difficulty_filtering: bool = False
    easy_threshold: float | None = None
    hard_threshold: float | None = None
    easy_fraction: float = 0.0
    hard_fraction: float = 0.0
    hash_keys: tuple[str, ...] = ()
    max_steps: int = 0  # 0: unknown
    skip_verification: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_rounds", "error_window"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        interval, group_size = self.canary_interval, self.rollouts_per_example
        self._require("canary_interval", interval is None or interval >= 1, "at least 1")
        self._require(
            "rollouts_per_example",
            group_size >= (1 if self.advantage == "gae" else 2),
            "at least 2 (a group of one has no baseline)",
        )
        multiple = f"a multiple of rollouts_per_example={group_size}"
        self._require("batch_size", self.batch_size % group_size == 0, multiple)
        advantages = sorted([*TABLE, "custom"])
        self._require("advantage", self.advantage in advantages, f"one of {advantages}")
        self._require(
            "estimator",
            (self.estimator is not None) == (self.advantage == "custom"),
            "a function with the advantage custom, and with no other",
        )
        temperature = self.sampling.temperature
        if self.temperature_schedule is None and not 0 < temperature < math.inf:
            raise ValueError(
                "sampling.temperature: expected above 0 (greedy rollouts of a group are all the "
                f"same), got {temperature}"
            )
        self._require("no_signal", self.no_signal in ("end", "go_on"), "end or go_on")
        self._require("max_error_rate", 0.0 <= self.max_error_rate < 1.0, "in [0, 1)")
        for name, weight in self.env_weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"env_weights[{name!r}]: expected a positive number, got {weight}")
        limit, ramp = self.overlong_max, self.overlong_cache
        if (limit is None) != (ramp is None):
            missing = "overlong_cache" if ramp is None else "overlong_max"
            raise ValueError(f"{missing}: overlong_max and overlong_cache go together")
        if limit is not None and ramp is not None:
            self._require("overlong_cache", 0 < ramp <= limit, f"in 1..overlong_max={limit}")
        self._check_asynchrony()
        self._check_buffer()

    def _check_asynchrony(self) -> None:
        level = self.max_async_level
        self._require("max_async_level", level >= 0, "at least 0")
        bound = f"at least max_async_level, which is {level}"
        self._require("max_off_policy_steps", self.max_off_policy_steps >= level, bound)
        is_factor = 1 <= self.oversampling_factor < math.inf
        self._require("oversampling_factor", is_factor, "a number of at least 1")
        is_known = self.partial in ("none", "keep", "replay")
        self._require("partial", is_known, "none, keep or replay")
        self._require("stall_s", 0 < self.stall_s < math.inf, "seconds above 0")

    def _check_buffer(self) -> None:
        easy, hard = self.easy_threshold, self.hard_threshold
        for name, value in (("easy_threshold", easy), ("hard_threshold", hard)):
            self._require(name, value is None or math.isfinite(value), "a finite number")
        if easy is not None and hard is not None:
            self._require("hard_threshold", hard < easy, f"below easy_threshold={easy}")
        for name in ("easy_fraction", "hard_fraction"):
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "in 0..1")
        self._require(
            "skip_verification",
            not (self.skip_verification and self.filters_groups),
            "no dynamic_sampling and no online_difficulty_filtering beside it: they would drop "
            "every group, since all rewards are 0",
        )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def streams(self) -> bool:
        """Whether groups are taken as they end instead of in rounds."""
        return self.max_async_level > 0 or self.oversampling_factor > 1 or self.partial != "none"

    @property
    def carries(self) -> bool:
        """Whether unfinished groups continue into later batches."""
        return self.max_async_level > 0 or self.partial != "none"

    @property
    def filters_groups(self) -> bool:
        """Whether groups may be dropped for their rewards."""
        return self.dynamic_sampling or self.online_difficulty_filtering

    @property
    def uses_pools(self) -> bool:
        """Whether prompts that are too easy or too hard are not drawn again."""
        return self.easy_threshold is not None or self.hard_threshold is not None

    @property
    def num_open(self) -> int:
        """The number of groups in flight, or returned and waiting for a batch."""
        return math.ceil(self.oversampling_factor * self.num_groups)

    @property
    def num_groups(self) -> int:
        return self.batch_size // self.rollouts_per_example

    def temperature(self, step: int) -> float:
        """Return the temperature of a step, counted from 1."""
        if self.temperature_schedule is None:
            return self.sampling.temperature
        return self.temperature_schedule(max(0, step - 1))
