"""The storages of a KV cache by name."""

from __future__ import annotations

from lowroll.kv.cache import KVCache
from lowroll.kv.fp8 import Float8Cache

STORAGES: dict[str, type[KVCache]] = {"fp8": Float8Cache}


def storage(kv_dtype: str | None) -> type[KVCache]:
    """Return the cache class; None: for the model's own dtype. ValueError names the argument."""
    if kv_dtype is None:
        return KVCache
    if kv_dtype not in STORAGES:
        raise ValueError(
            f"kv_dtype: expected None, the model's own, or one of {', '.join(STORAGES)}, got "
            f"{kv_dtype!r}"
        )
    return STORAGES[kv_dtype]
