"""The KV cache of a run's engine, by its policy's arithmetic. No torch before a policy is asked
for that has a device's side."""

from __future__ import annotations

from bisect import bisect_right

from lowroll.config import RunConfig
from lowroll.kv.policy.base import CachePolicy, footprint
from lowroll.kv.policy.table import make


def policy(cfg: RunConfig) -> CachePolicy:
    """Which keys the rollouts' cache keeps."""
    kv = cfg.rollout.cache
    return make(kv.policy, **kv.options)


def longest_prompt(cfg: RunConfig, cache_tokens: int) -> int:
    """Tokens of the longest prompt that a cache of this size holds with a whole response beside
    it; 0 or less when there is none."""
    rollout = cfg.rollout
    if not rollout.cache.evicts:
        return cache_tokens - rollout.max_tokens
    kv, size = policy(cfg), rollout.page_size

    def pages(prompt: int) -> int:
        return footprint(kv, prompt, rollout.max_tokens, size).alone

    return bisect_right(range(1, cache_tokens + 1), cache_tokens // size, key=pages)
