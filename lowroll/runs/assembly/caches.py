"""The KV cache of a run's engine. Torch is imported only by a policy's device side."""

from __future__ import annotations

from bisect import bisect_right

from lowroll.config import RunConfig
from lowroll.kv import support
from lowroll.kv.policy.base import CachePolicy, footprint
from lowroll.kv.policy.table import make
from lowroll.model.spec import ModelSpec


def policy(cfg: RunConfig) -> CachePolicy:
    kv = cfg.rollout.cache
    return make(kv.policy, **kv.options)


def refuse(cfg: RunConfig, spec: ModelSpec) -> None:
    if cfg.rollout.engine == "native":
        kv = cfg.rollout.cache
        support.refuse(spec, policy(cfg), kv.kv_dtype, "rollout.kv.policy", "rollout.kv.dtype")


def longest_prompt(cfg: RunConfig, cache_tokens: int) -> int:
    """Return the longest prompt up to which every prompt with a whole response fits; at most 0 if
    none.

    Compacted samples need more pages than those of a longer prompt, so whole and compacted prompts
    are searched separately.
    """
    rollout = cfg.rollout
    if not rollout.cache.evicts:
        return cache_tokens - rollout.max_tokens
    kv, page_size = policy(cfg), rollout.page_size
    num_pages = cache_tokens // page_size

    def pages(prompt: int) -> int:
        return footprint(kv, prompt, rollout.max_tokens, page_size).alone

    # The number of fitting prompts 1, 2, ... is the longest length.
    prompts = range(1, cache_tokens + 1)
    longest_whole = min(kv.room(0), cache_tokens + 1) - 1
    longest = bisect_right(prompts, num_pages, hi=longest_whole, key=pages)
    if longest < longest_whole:
        return longest
    return bisect_right(prompts, num_pages, lo=longest_whole, key=pages)
