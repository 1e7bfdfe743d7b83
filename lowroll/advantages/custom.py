"""Advantages by a user's function.

    # my_advantage.py
    def centred(rewards, lengths, scale=1.0):
        scored = [r for r in rewards if r is not None]
        mean = sum(scored) / len(scored) if scored else 0.0
        return [0.0 if r is None else scale * (r - mean) for r in rewards]

It gets one group's shaped rewards (None where the scorer failed) and response lengths in tokens,
and returns as many finite numbers. It runs with the rights of the run.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lowroll.advantages.group import Estimator, Rewards


def load(import_path: str, kwargs: Mapping[str, Any] | None = None) -> Estimator:
    """Load the function of "path/to/file.py:function" with its keyword arguments. ValueError for an
    unusable path, file or argument; a call raises it unless the function returns one finite number
    for each rollout."""
    path, colon, name = import_path.partition(".py:")
    file = Path(path + ".py").resolve()
    if not colon or not name.isidentifier():
        raise ValueError(f"advantage: expected path/to/file.py:function, got {import_path!r}")
    if not file.is_file():
        raise ValueError(f"advantage: the file {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"lowroll_advantage_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"advantage: {file} cannot be imported: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"advantage: {file} has no function {name!r}")
    try:
        inspect.signature(function).bind([], [], **(kwargs or {}))
    except TypeError as error:
        raise ValueError(f"advantage: {import_path} and its kwargs: {error}") from None
    return partial(_checked_advantages, f"{file.name}:{name}", partial(function, **(kwargs or {})))


def _checked_advantages(
    name: str, function: Estimator, rewards: Rewards, lengths: Sequence[int] | None = None
) -> list[float]:
    try:
        advantages = list(function(list(rewards), None if lengths is None else list(lengths)))
    except Exception as error:
        raise ValueError(f"advantage {name}: {error!r} for rewards {list(rewards)}") from error
    if len(advantages) != len(rewards):
        raise ValueError(f"advantage {name}: {len(advantages)} numbers for {len(rewards)} rollouts")
    for index, value in enumerate(advantages):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise ValueError(f"advantage {name}: [{index}] is {value!r}, not a number")
        if not math.isfinite(value):
            raise ValueError(f"advantage {name}: [{index}] is {value}, not a finite number")
    return [float(value) for value in advantages]
