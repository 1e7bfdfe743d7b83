"""The table of cache policies: a row each, readable without torch.

A policy is one file of this folder and one row here; its options, their defaults and their bounds
stand on the class.
"""

from __future__ import annotations

import importlib
from dataclasses import fields, is_dataclass
from typing import Any

from lowroll.kv.policy.base import CachePolicy

POLICIES: dict[str, str] = {  # name: module:class
    "dense": "lowroll.kv.policy.dense:Dense",
    "streaming": "lowroll.kv.policy.streaming:Streaming",
    "h2o": "lowroll.kv.policy.h2o:H2O",
    "snapkv": "lowroll.kv.policy.snapkv:SnapKV",
    "rkv": "lowroll.kv.policy.rkv:RKV",
}


def make(name: str, **options: Any) -> CachePolicy:
    """The policy of this name; what is not given has its default.

    ValueError names the option that is wrong.
    """
    if name not in POLICIES:
        raise ValueError(f"kv.policy: unknown policy {name!r}; known: {', '.join(POLICIES)}")
    module, _, kind = POLICIES[name].partition(":")
    policy = getattr(importlib.import_module(module), kind)
    known = [field.name for field in fields(policy)] if is_dataclass(policy) else []
    for option in options:
        if option not in known:
            takes = f"its options: {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"kv.{option}: {name} has no such option; {takes}")
    return policy(**options)
