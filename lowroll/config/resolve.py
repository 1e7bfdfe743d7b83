"""A run's configuration, checked and resolved.

`RunConfig` checks the settings against each other and reports all problems at once.
"""

from __future__ import annotations

from typing import Any, Self

import yaml
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from lowroll.config.auto import correction_of, thresholds_of
from lowroll.config.checks import problems, warnings
from lowroll.config.data import EnvConfig, named
from lowroll.config.document import ConfigDumper, dotted
from lowroll.config.schema import RunSettings
from lowroll.config.section import CUSTOM
from lowroll.objectives.table import ALGORITHMS, BOUNDS, CAP, pair


class RunConfig(RunSettings):
    """One run. Load it with `lowroll.config.load`."""

    _notes: tuple[str, ...] = ()
    _given: str | None = None
    _source: str = "settings"
    _chosen: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        conflicts = list(problems(self))
        if conflicts:
            text = "; ".join(f"{dotted(keys[0])}: {message}" for keys, message in conflicts)
            raise PydanticCustomError(
                "combination", "{text}", {"text": text, "problems": conflicts}
            )
        return self

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on automatic choices and doubtful settings."""
        return self._notes

    @property
    def chosen_options(self) -> tuple[str, ...]:
        """Return the objective's options of `correction: auto`, which the measured mismatch may
        widen."""
        return self._chosen

    @property
    def given(self) -> str | None:
        """Return the YAML text that an orchestrator leaves for a trainer (`surogate.roles`)."""
        return self._given

    @property
    def source(self) -> str:
        return self._source

    @property
    def objective_options(self) -> dict[str, Any]:
        """Return the options of `objectives.objective.select(cfg.algorithm, cfg.correction)`."""
        cfg = self.resolved()
        return cfg.loss.options(cfg.algorithm, cfg.correction, cfg.rollout.max_tokens)

    def with_notes(self, *lines: str) -> RunConfig:
        copy = self.model_copy()
        copy._notes = self._notes + tuple(line for line in lines if line not in self._notes)
        return copy

    def with_origin(self, source: str | None = None, given: str | None = None) -> RunConfig:
        """Return a copy with this source file, or this text for a trainer."""
        copy = self.model_copy()
        copy._source = source or self._source
        copy._given = given or self._given
        return copy

    def sized(self) -> RunConfig:
        """Return a copy whose null sizes are those of a large device."""
        return self.model_copy(update={"train": self.train.sized()})

    def resolved(self) -> RunConfig:
        """Return the run with every `auto` and null filled in, except the machine's: device, dtype
        and pass sizes. Idempotent."""
        default_advantage = ALGORITHMS[self.algorithm].advantage
        if self.advantage_function is not None:
            default_advantage = CUSTOM
        correction, reason = correction_of(self)
        options = pair(self.algorithm, correction).options
        # a correction that does not clip has none
        defaults = {"cap": CAP, **dict.fromkeys(BOUNDS), **options}
        loss_update = {
            name: defaults[name]
            for name in ("cap", *BOUNDS, "reduce")
            if getattr(self.loss, name) is None
        }
        chosen_thresholds = thresholds_of(self)
        if chosen_thresholds:
            loss_update[correction] = getattr(self.loss, correction).model_copy(
                update=chosen_thresholds
            )
        kv = self.rollout.kv and self.rollout.kv.resolved()
        held_out_envs = self.eval.env and tuple(map(named, self.eval.env))
        copy = self.model_copy(
            update={
                "advantage": self.advantage or default_advantage,
                "correction": correction,
                "loss": self.loss.model_copy(update=loss_update),
                "train": self.train.model_copy(update={"forward": self.forward}),
                "rollout": self.rollout.with_kv(kv),
                "dapo": self.dapo.model_copy(update={"dynamic_sampling": self.samples_dynamically}),
                "env": tuple(named(env) for env in _all_environments(self)),
                "data": None,
                "reward_funcs": (),
                "reward_weights": None,
                "eval": self.eval.model_copy(update={"env": held_out_envs}),
            }
        )
        copy._chosen = self._chosen or tuple(chosen_thresholds)
        reason_notes = (f"correction: {correction}, because {reason}",) if reason else ()
        return copy.with_notes(*reason_notes, *warnings(copy))

    def tree(self) -> dict[str, Any]:
        """Return the resolved settings as plain values, equal to loading `dump()`."""
        return self.resolved().model_dump(mode="json")

    def dump(self) -> str:
        """Return the resolved tree as YAML that loads to the same tree."""
        return yaml.dump(
            self.tree(), Dumper=ConfigDumper, sort_keys=False, allow_unicode=True, width=10**6
        )


def _all_environments(cfg: RunSettings) -> tuple[EnvConfig, ...]:
    if cfg.data is None:
        return cfg.env
    args = cfg.data.model_dump(mode="json", exclude_defaults=True)
    if cfg.reward_funcs:
        args["reward_funcs"] = list(cfg.reward_funcs)
    if cfg.reward_weights is not None:
        args["reward_weights"] = list(cfg.reward_weights)
    return (EnvConfig(id="data", args=args),)
