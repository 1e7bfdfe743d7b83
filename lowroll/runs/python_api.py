"""A run in one call: `lowroll.train`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lowroll.config.document import ConfigError
from lowroll.config.foreign import explain
from lowroll.config.resolve import RunConfig
from lowroll.config.rollout import RolloutConfig
from lowroll.config.section import Section
from lowroll.config.train import TrainConfig
from lowroll.runs.grpo import run
from lowroll.runs.session import RunResult

# Their settings may be given without the section's name.
SECTIONS: dict[str, type[Section]] = {"rollout": RolloutConfig, "train": TrainConfig}


def train(
    model: str | Path,
    data: str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
    reward_weights: Sequence[float] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    **settings: Any,
) -> RunResult:
    """Train a model on a data set by reward functions; return the result of `lowroll.run`.

    data: a file, folder or hub id, the `data:` section as a mapping, a list of rows, or a data set
    of `datasets`. reward_funcs: functions, or `file.py:function`; none: `answer`. settings: keys of
    the YAML file (`output_dir="outputs/first"`), and those of `rollout` and `train` by their own
    names (`weights="int8"`). ConfigError names an unknown one with the nearest known.
    """
    data_settings = {
        "data": data,
        "reward_funcs": _as_functions(reward_funcs),
        "reward_weights": _as_weights(reward_weights),
    }
    tree = {
        "model": str(model),
        **{key: data_settings[key] for key in data_settings if data_settings[key] is not None},
    }
    return run(tree | _placed(settings), resume=resume, overwrite=overwrite)


def _as_functions(given: Any) -> list[str | Callable[..., Any]]:
    if given is None:
        return []
    if callable(given) or isinstance(given, str):
        functions = [given]
    elif isinstance(given, Iterable):
        functions = list(given)
    else:
        raise ConfigError(f"reward_funcs: must be a function or a list of some, got {given!r}")
    for i, function in enumerate(functions):
        if isinstance(function, type) or not (callable(function) or isinstance(function, str)):
            raise ConfigError(
                f"reward_funcs[{i}]: must be a function or file.py:function, got {function!r}"
            )
    return functions


def _as_weights(given: Any) -> list[Any] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"reward_weights: must be a list of numbers, got {given!r}")
    return list(given)


def _placed(settings: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {k: v for k, v in settings.items() if k in RunConfig.model_fields}
    for name, value in settings.items():
        if name in RunConfig.model_fields:
            continue
        section = _section_of(name)
        section_values = dict(tree.get(section) or {})
        if name in section_values:
            raise ConfigError(f"{name}: it is given twice, also as {section}.{name}")
        tree[section] = section_values | {name: value}
    return tree


def _section_of(name: str) -> str:
    for section, model in SECTIONS.items():
        if name in model.model_fields:
            return section
    known_names = [*RunConfig.model_fields, *(k for m in SECTIONS.values() for k in m.model_fields)]
    nearest = get_close_matches(name, known_names, n=1)
    hint = f"did you mean {nearest[0]}?" if nearest else "docs/configuration.md"
    hint = explain((name,)) or hint
    raise ConfigError(f"{name}: unknown setting ({hint})")
