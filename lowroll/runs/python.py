"""A run in one call: `lowroll.train`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lowroll.config.document import ConfigError
from lowroll.config.foreign import explain
from lowroll.config.schema import RolloutConfig, RunConfig, TrainConfig
from lowroll.config.section import Section
from lowroll.runs.attempt import RunResult
from lowroll.runs.grpo import run

# settings that may be given without the section that they stand in
SECTIONS: dict[str, type[Section]] = {"rollout": RolloutConfig, "train": TrainConfig}


def train(
    model: str | Path,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] = (),
    reward_weights: Sequence[float] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> RunResult:
    """Train a model on a data set by reward functions; returns what `lowroll.run` does.

    data: a file, folder or hub id, the `data:` section as a mapping, a list of rows, or a data set
    of `datasets`. reward_funcs: functions, or `file.py:function`; none: `answer`. settings: keys of
    the YAML file (`output_dir="outputs/first"`, `eval={"interval": 10}`), and those of `rollout`
    and `train` by their own names (`weights="int8"`, `max_steps=40`). ConfigError names one that is
    unknown, with the nearest that is known.
    """
    single = callable(reward_funcs) or isinstance(reward_funcs, str)
    given = {
        "data": data,
        "reward_funcs": [reward_funcs] if single else list(reward_funcs),  # type: ignore[arg-type]
        "reward_weights": None if reward_weights is None else list(reward_weights),
    }
    tree = {"model": str(model), **{key: given[key] for key in given if given[key] is not None}}
    return run(tree | _placed(settings), resume=resume, overwrite=overwrite)


def _placed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a tree. ConfigError for one that is unknown, or given twice."""
    tree: dict[str, Any] = {k: v for k, v in settings.items() if k in RunConfig.model_fields}
    for name, value in settings.items():
        if name in RunConfig.model_fields:
            continue
        section = _section(name)
        inside = dict(tree.get(section) or {})
        if name in inside:
            raise ConfigError(f"{name}: it is given twice, also as {section}.{name}")
        tree[section] = inside | {name: value}
    return tree


def _section(name: str) -> str:
    for section, model in SECTIONS.items():
        if name in model.model_fields:
            return section
    known = [*RunConfig.model_fields, *(k for m in SECTIONS.values() for k in m.model_fields)]
    near = get_close_matches(name, known, n=1)
    hint = explain((name,)) or (f"did you mean {near[0]}?" if near else "docs/configuration.md")
    raise ConfigError(f"{name}: unknown setting ({hint})")
