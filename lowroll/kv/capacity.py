"""The size of a KV cache: what its requests can use, within a share of the free memory.

The scheduler admits a sample when the pages of its worst case are free (`engine.scheduler`). In a
group whose prompt has p tokens, with responses of up to m, on pages of s,

    shared by all samples    h = floor(p / s)
    of each one's own        o = ceil((p mod s + m - 1) / s)      the last token is never stored

so R samples of g prompts never wait for a page when the cache has g h + R o + 1; the last is a tail
without a writer. A shorter prompt may leave more to each sample, hence the largest p mod s. If
groups take turns, another g h keep freed pages for later prompts with the same prefix.

Under a bounded policy (`kv.policy.base.footprint`) a sample that can be compacted needs w pages;
others have at most o, and less than w + 2. A compacted prompt needs more pages for the keys that
are left, and no sample owns its tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy, footprint, num_pages
from lowroll.kv.policy.dense import DENSE

SHARE = 4  # the default cache takes 1 / SHARE of free memory
UNKNOWN_ROW = 4096  # tokens a sample, for unknown requests
UNKNOWN_FREE = 4 << 30  # free bytes, if the system does not say
UNKNOWN_BYTES = 16 << 30  # the most bytes for unknown requests


class NoRoom(ValueError):
    """An error for too little free memory."""


@dataclass(frozen=True)
class Workload:
    """Requests that run together: `groups` prompts of up to `prompt` tokens, `n` samples of each of
    up to `response` tokens. longest: tokens of a rare request that must fit."""

    groups: int
    n: int
    prompt: int
    response: int
    longest: int = 0

    def rows(self, max_batch: int) -> int:
        return min(max_batch, self.groups * self.n)

    def tokens(self, page_size: int, max_batch: int, kv: CachePolicy = DENSE) -> int:
        """Return the slots, in whole pages, with which no sample waits for a page."""
        rows = self.rows(max_batch)
        groups = min(self.groups, rows)
        # if groups take turns
        cached_groups = groups if self.groups * self.n > rows else 0
        full_prompt_pages = self.prompt // page_size
        max_tail_tokens = min(self.prompt, page_size - 1)
        own_pages = num_pages(max_tail_tokens + self.response - 1, page_size)
        group_pages = (groups + cached_groups) * full_prompt_pages + 1  # 1: a tail without a writer
        longest_pages = num_pages(self.longest, page_size)
        needs = footprint(kv, self.prompt, self.response, page_size)
        if needs.compacted:
            group_pages += groups * (needs.compacted + 1)
        if needs.evicts:
            own_pages = max(needs.writer, min(own_pages, needs.writer + 1))
            group_pages += groups  # a tail that no sample owns
            longest_pages += needs.writer + needs.compacted
        return max(group_pages + rows * own_pages, longest_pages) * page_size


def capacity(
    workloads: Sequence[Workload],
    *,
    page_size: int,
    max_batch: int,
    context: int,
    bytes_per_token: int,
    free: int,
    kv: CachePolicy = DENSE,
    most: int | None = None,
) -> int:
    """Return the tokens of a cache that holds these workloads one after the other.

    free: in bytes. most: a limit in bytes instead of a share of `free`. Without workloads,
    `max_batch` samples are assumed, of `context` tokens with `most`, else shorter beside one of
    `context` tokens.
    """
    max_bytes = free // SHARE if most is None else most
    max_tokens = max_bytes // bytes_per_token
    if workloads:
        wanted = max(workload.tokens(page_size, max_batch, kv) for workload in workloads)
        return min(wanted, max_tokens)
    if most is not None:
        return min(max_batch * kv.peak(0, context), max_tokens)
    tokens_per_row = kv.peak(0, min(context, UNKNOWN_ROW))
    wanted = max(context, max_batch * tokens_per_row)
    return min(wanted, UNKNOWN_BYTES // bytes_per_token, max_tokens)
