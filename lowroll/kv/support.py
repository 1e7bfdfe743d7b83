"""The check that a model's attention works with a bounded or an 8-bit cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowroll.kv.policy.base import CachePolicy

if TYPE_CHECKING:
    from lowroll.model.spec import ModelSpec


def why_not(spec: ModelSpec) -> str | None:
    """Return why a model's cache must be dense and unrounded, or None."""
    features = {
        "sliding windows": bool(spec.windows),
        "states in place of keys": spec.delta is not None,
        "attention sinks": spec.attention_sinks,
    }
    found = [feature for feature, is_present in features.items() if is_present]
    return f"{spec.architecture} has layers with {' and '.join(found)}" if found else None


def refuse(
    spec: ModelSpec,
    policy: CachePolicy,
    kv_dtype: str | None,
    policy_key: str = "kv",
    dtype_key: str = "kv_dtype",
) -> None:
    """Raise ValueError for a bounded or an 8-bit cache of a model that cannot have one (`why_not`).
    policy_key, dtype_key: settings to name.

    Compacted keys lie at other positions, recurrent layers have no keys, policies score without
    sinks, and the kernels of 8-bit keys read all keys of a row.
    """
    layers = why_not(spec)
    if layers is None:
        return
    if policy.budget is not None:
        raise ValueError(
            f"{policy_key}: {policy.name} chooses among all keys of a row, and {layers}; write "
            "dense, which keeps every key"
        )
    if kv_dtype is not None:
        raise ValueError(
            f"{dtype_key}: the kernels of keys in {kv_dtype} know no such layers, and {layers}; leave "
            "it out, for keys in the model's own dtype"
        )
