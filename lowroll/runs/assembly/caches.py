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
    """Return the longest prompt up to which a cache of this size holds every prompt with a whole
    response; 0 or less when there is none.

    Pages grow with a prompt's length, except at the limit where prompts are compacted: samples that
    are compacted while they decode need more pages than those of a longer prompt.
    """
    rollout = cfg.rollout
    if not rollout.cache.evicts:
        return cache_tokens - rollout.max_tokens
    kv, size = policy(cfg), rollout.page_size

    def pages(prompt: int) -> int:
        return footprint(kv, prompt, rollout.max_tokens, size).alone

    lengths, num_pages = range(1, cache_tokens + 1), cache_tokens // size
    limit = min(kv.room(0), cache_tokens + 1) - 1  # index of the first compacted prompt
    length = bisect_right(lengths, num_pages, hi=limit, key=pages)
    return length if length < limit else bisect_right(lengths, num_pages, lo=limit, key=pages)
