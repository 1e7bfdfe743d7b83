"""Checked values of a config.json. Every ValueError names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 2**31 - 1  # of any integer
LARGE = 1e30  # of any other number: must fit float32


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"{key}: expected a positive integer of at most {MOST:,}, got {value!r}")
    return value


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer, 0 or positive."""
    value = config.get(key, default)
    return 0 if type(value) is int and value == 0 else integer(config, key, default)


def expert_count_key(config: Mapping[str, Any]) -> str:
    names = ("num_local_experts", "n_routed_experts")
    return next((name for name in names if name in config), "num_experts")


def positive(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a positive number."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGE:
        raise ValueError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Return a boolean, False where there is none."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return bool(value)


def token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return token ids, of which a config names none, one or a list."""
    value = config.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(
        isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0
        for token_id in ids
    ):
        raise ValueError(f"{key}: expected token ids, got {value!r}")
    return tuple(ids)


def layer_list(config: Mapping[str, Any], key: str, kinds: set[Any], layers: int) -> list[Any]:
    """Return a list with one of these kinds for each layer."""
    values = config.get(key)
    if not isinstance(values, list) or len(values) != layers:
        raise ValueError(f"{key}: expected a list of {layers} values, one for each layer")
    unknown = sorted({str(value) for value in values if value not in kinds})
    if unknown:
        raise ValueError(
            f"{key}: {', '.join(unknown)} is not supported; supported: "
            f"{', '.join(sorted(map(str, kinds)))}"
        )
    return values
