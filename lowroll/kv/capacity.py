"""The number of tokens that a KV cache should hold: what its requests can use, and no more than a
share of the free memory.

The scheduler admits a sample when the pages of its worst case are free (`engine.scheduler`). In a
group whose prompt has p tokens, with responses of up to m, on pages of s,

    shared by all samples    h = floor(p / s)
    of each one's own        o = ceil((p mod s + m - 1) / s)      the last token is never stored

so R samples of g prompts never wait for a page when the cache has g h + R o + 1; the last one is
the tail that a group holds while none of its samples writes it. A shorter prompt may share less and
leave more to each sample, hence the largest p mod s. R is `max_batch` at most. Where all samples fit
into R, a cache of this size never gives a page to a second one. Where groups take turns, each of the
R samples can be the last of another prompt, and another g h are for pages that nobody holds any more:
a later prompt with the same head finds them.

Under a policy that bounds a sample's cache (`kv.policy.base.footprint`) a sample that can be
compacted needs w pages of its own, those of its longest cache: nothing is shared in the end. A
shorter prompt, whose samples need not be compacted, has o at most, and less than w + 2 because its
samples fit below the limit. A prompt that is compacted needs the pages of what is left beside its
own, and its tail belongs to no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy, footprint, num_pages
from lowroll.kv.policy.dense import DENSE

SHARE = 4  # of the free memory a cache takes one part in so many, unless it is told its size
UNKNOWN_ROW = 4096  # tokens of a sample, where nothing is known about the requests,
UNKNOWN_FREE = 4 << 30  # bytes that are free, where the system does not say
UNKNOWN_BYTES = 16 << 30  # and the most that is taken for them


class NoRoom(ValueError):
    """A KV cache of the size that was asked for does not fit into the memory that is free."""


@dataclass(frozen=True)
class Workload:
    """Requests that are in the engine together: `groups` prompts of up to `prompt` tokens, `n`
    samples of each of up to `response` tokens. `longest`: tokens of a single request that must fit
    in, however seldom it comes."""

    groups: int
    n: int
    prompt: int
    response: int
    longest: int = 0

    def rows(self, max_batch: int) -> int:
        """Samples that are drawn together."""
        return min(max_batch, self.groups * self.n)

    def tokens(self, page_size: int, max_batch: int, kv: CachePolicy = DENSE) -> int:
        """Slots of the pages with which no sample waits for any, if no prompt is longer than
        said."""
        rows = self.rows(max_batch)
        groups = min(self.groups, rows)
        later = groups if self.groups * self.n > rows else 0
        shared = self.prompt // page_size
        tail = min(self.prompt, page_size - 1)
        own = num_pages(tail + self.response - 1, page_size)
        pages = (groups + later) * shared + 1
        longest = num_pages(self.longest, page_size)
        need = footprint(kv, self.prompt, self.response, page_size)
        if need.compacted:
            pages += groups * (need.compacted + 1)
        if need.evicts:
            own = max(need.writer, min(own, need.writer + 1))
            pages += groups
            longest += need.writer + need.compacted
        return max(pages + rows * own, longest) * page_size


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
    """Tokens for a cache that holds these workloads one after the other.

    None known: `max_batch` samples of moderate length, and one as long as the model's `context`
    (tokens). free: bytes. kv: the policy that may bound what a sample holds. most: bytes that it
    may have, in the place of a share of `free`; then samples of unknown length may be long ones.
    """
    room = (free // SHARE if most is None else most) // bytes_per_token
    if workloads:
        return min(max(work.tokens(page_size, max_batch, kv) for work in workloads), room)
    if most is not None:
        return min(max_batch * kv.peak(0, context), room)
    row = kv.peak(0, min(context, UNKNOWN_ROW))
    return min(max(context, max_batch * row), UNKNOWN_BYTES // bytes_per_token, room)
