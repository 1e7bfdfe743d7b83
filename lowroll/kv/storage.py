"""The storages of a KV cache, by the name that an engine takes."""

from __future__ import annotations

from lowroll.kv.cache import KVCache
from lowroll.kv.fp8 import Float8Cache

STORAGES: dict[str, type[KVCache]] = {"fp8": Float8Cache}


def storage(kv_dtype: str | None) -> type[KVCache]:
    """Return the cache class. None: keys and values as the model computes them. ValueError names
    the argument."""
    if kv_dtype is None:
        return KVCache
    if kv_dtype not in STORAGES:
        raise ValueError(
            f"kv_dtype: expected None, the model's own, or one of {', '.join(STORAGES)}, got "
            f"{kv_dtype!r}"
        )
    return STORAGES[kv_dtype]
