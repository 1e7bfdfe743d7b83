"""The ledger of drawn groups: the part of a run's state that decides which prompts come next.

    planned == consumed + dropped + open

An open group's rollouts are not saved: after a restart it is drawn again, with the same id and
noise. Difficulty pools apply to data sets of finite size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from lowroll.envs.curriculum import LevelProgress
from lowroll.orchestrator.errors import ErrorWindow
from lowroll.orchestrator.settings import Settings

COUNTS = ("draws", "planned", "consumed", "dropped", "passed_over", "duplicates", "pooled")
POOLS = ("easy", "hard")
STATE_FORMAT = 2
STATE = ("format", "step", "plan", "ledger", "errors")


@dataclass(frozen=True)
class GroupPlan:
    """The values from which to draw an open group again."""

    env: str
    position: int  # in its environment
    step: int  # for which it was planned
    temperature: float

    @classmethod
    def of(cls, state: Any, env_names: set[str]) -> GroupPlan:
        """Parse a group. ValueError names the field."""
        if not isinstance(state, Mapping) or set(state) != set(cls.__dataclass_fields__):
            raise ValueError(f"ledger.open: expected {sorted(cls.__dataclass_fields__)}")
        if state["env"] not in env_names:
            raise ValueError(f"ledger.open: no environment named {state['env']!r}")
        for name in ("position", "step"):
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"ledger.open.{name}: expected a count, got {state[name]!r}")
        temperature = state["temperature"]
        if type(temperature) not in (int, float) or not 0 < temperature < math.inf:
            raise ValueError(f"ledger.open.temperature: expected one above 0, got {temperature!r}")
        return cls(**{**state, "temperature": float(temperature)})


class Pools:
    """Prompts that are not drawn again, by difficulty and environment."""

    def __init__(self, held: Mapping[str, Mapping[str, list[str]]] | None = None) -> None:
        self._held = {
            pool: {env: dict.fromkeys(ids) for env, ids in (held or {}).get(pool, {}).items()}
            for pool in POOLS
        }

    def holds(self, env: str, prompt_id: str) -> bool:
        return any(prompt_id in self._held[pool].get(env, {}) for pool in POOLS)

    def count(self, pool: str) -> int:
        return sum(len(ids) for ids in self._held[pool].values())

    def place(self, env: str, prompt_id: str, rewards: list[float], settings: Settings) -> None:
        """Put a prompt into the pool for its group's mean reward, if any."""
        mean = fmean(rewards)
        if settings.easy_threshold is not None and mean >= settings.easy_threshold:
            self._held["easy"].setdefault(env, {})[prompt_id] = None
        elif settings.hard_threshold is not None and mean <= settings.hard_threshold:
            self._held["hard"].setdefault(env, {})[prompt_id] = None

    def take_back(self, pool: str, share: float, order: Any) -> int:
        """Release a share of a pool, at least one prompt, by the smallest `order(env, id)`. Return
        their number."""
        pooled = [(env, prompt_id) for env, ids in self._held[pool].items() for prompt_id in ids]
        if not pooled or share <= 0:
            return 0
        num_released = max(1, round(share * len(pooled)))
        released = sorted(pooled, key=lambda prompt: order(*prompt))[:num_released]
        for env, prompt_id in released:
            del self._held[pool][env][prompt_id]
        return len(released)

    def state(self) -> dict[str, dict[str, list[str]]]:
        """Return JSON data: pool, environment, ids."""
        return {
            pool: {env: list(ids) for env, ids in sorted(envs.items()) if ids}
            for pool, envs in self._held.items()
        }

    def copy(self) -> Pools:
        return Pools(self.state())

    @classmethod
    def of(cls, state: Any) -> Pools:
        """Parse the pools. ValueError for an invalid state."""
        has_all_pools = isinstance(state, Mapping) and set(state) == set(POOLS)
        if not has_all_pools or not all(map(_are_id_lists, state.values())):
            raise ValueError(f"ledger.pools: expected lists of prompt ids by {' and '.join(POOLS)}")
        return cls(state)


def _are_id_lists(envs: Any) -> bool:
    return isinstance(envs, Mapping) and all(
        isinstance(ids, list) and all(isinstance(prompt_id, str) for prompt_id in ids)
        for ids in envs.values()
    )


@dataclass
class Ledger:
    """Counts of drawn groups by outcome."""

    draws: int = 0  # including passed-over prompts
    cursors: dict[str, int] = field(default_factory=dict)  # next position of each environment
    planned: int = 0
    consumed: int = 0
    dropped: int = 0
    passed_over: int = 0  # too long prompts: never planned, like the next two
    duplicates: int = 0
    pooled: int = 0
    open: list[GroupPlan] = field(default_factory=list)
    pools: Pools = field(default_factory=Pools)
    levels: dict[str, LevelProgress] = field(
        default_factory=dict
    )  # of environments with a curriculum

    def copy(self) -> Ledger:
        return replace(
            self,
            cursors=dict(self.cursors),
            open=list(self.open),
            pools=self.pools.copy(),
            levels=dict(self.levels),
        )

    def state(self) -> dict[str, Any]:
        accounted_for = self.consumed + self.dropped + len(self.open)
        assert self.planned == accounted_for, "ledger: planned != consumed + dropped + open"
        state: dict[str, Any] = {
            **{name: getattr(self, name) for name in COUNTS},
            "cursors": dict(self.cursors),
            "open": [vars(planned) for planned in self.open],
            "pools": self.pools.state(),
        }
        if self.levels:
            state["levels"] = {
                name: vars(progress) for name, progress in sorted(self.levels.items())
            }
        return state

    @classmethod
    def of(cls, state: Mapping[str, Any], env_names: set[str]) -> Ledger:
        """Parse the ledger. ValueError names the invalid field."""
        names = set(cls.__dataclass_fields__) - {"levels"}  # only in runs with a curriculum
        if set(state) - {"levels"} != names:
            raise ValueError(f"ledger: expected the fields {sorted(names)}, got {sorted(state)}")
        cursors, open_groups = state["cursors"], state["open"]
        if not isinstance(cursors, Mapping) or set(cursors) != env_names:
            raise ValueError(
                f"ledger.cursors: expected the environments {sorted(env_names)}, got {cursors!r}"
            )
        counts = {name: state[name] for name in COUNTS}
        for name, count in (counts | {f"cursors.{env}": n for env, n in cursors.items()}).items():
            if type(count) is not int or count < 0:
                raise ValueError(f"ledger.{name}: expected a count, got {count!r}")
        levels = state.get("levels", {})
        if not isinstance(levels, Mapping) or not set(levels) <= env_names:
            raise ValueError(f"ledger.levels: expected environments, got {levels!r}")
        if not isinstance(open_groups, list):
            raise ValueError(f"ledger.open: expected a list, got {open_groups!r}")
        if state["planned"] != state["consumed"] + state["dropped"] + len(open_groups):
            raise ValueError("ledger.planned: expected consumed + dropped + open")
        return cls(
            **counts,
            cursors=dict(cursors),
            open=[GroupPlan.of(group_state, env_names) for group_state in open_groups],
            pools=Pools.of(state["pools"]),
            levels={name: LevelProgress.of(level_state) for name, level_state in levels.items()},
        )


def state_of(
    step: int, plan: dict[str, Any], ledger: Ledger, errors: ErrorWindow
) -> dict[str, Any]:
    """Return the orchestrator's state after a step as JSON data."""
    return {
        "format": STATE_FORMAT,
        "step": step,
        "plan": plan,
        "ledger": ledger.state(),
        "errors": errors.state(),
    }


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid state; `Ledger.of` checks its ledger."""
    if set(state) != set(STATE) or state["format"] != STATE_FORMAT:
        raise ValueError(
            f"orchestrator state: expected format {STATE_FORMAT} with {', '.join(STATE[1:])}"
        )
    if not isinstance(state["plan"], Mapping):
        raise ValueError(f"orchestrator state: plan: expected a mapping, got {state['plan']!r}")
    if type(state["step"]) is not int or state["step"] < 0:
        raise ValueError(f"orchestrator state: step: expected a count, got {state['step']!r}")
