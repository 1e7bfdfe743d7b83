"""How many tokens a KV cache should hold: what its requests can use, and no more than a share of
the free memory.

The scheduler admits a sample when the pages of its worst case are free (`engine.scheduler`). In a
group whose prompt has p tokens, with responses of up to m, on pages of s,

    shared by all samples    h = floor(p / s)
    of each one's own        o = ceil((p mod s + m - 1) / s)      the last token is never stored

so R samples of g prompts never wait for a page when the cache has g h + R o + 1; the last one is
the tail that a group holds while none of its samples writes it. A shorter prompt may share less and
leave more to each sample, hence the largest p mod s. Another g h are for pages that nobody holds
any more: a later prompt with the same head finds them. R is `max_batch` at most, and when many
groups take turns, each of the R samples can be the last of another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def tokens(self, page_size: int, max_batch: int) -> int:
        """Slots of the pages with which no sample waits for any, if no prompt is longer than
        said."""
        rows = min(max_batch, self.groups * self.n)
        shared, tail = self.prompt // page_size, min(self.prompt, page_size - 1)
        own = -(-(tail + self.response - 1) // page_size)
        pages = 2 * min(self.groups, rows) * shared + rows * own + 1
        return max(pages, -(-self.longest // page_size)) * page_size


def capacity(
    workloads: Sequence[Workload],
    *,
    page_size: int,
    max_batch: int,
    context: int,
    bytes_per_token: int,
    free: int,
) -> int:
    """Tokens for a cache that holds these workloads one after the other.

    None known: `max_batch` samples of moderate length, and one as long as the model's `context`
    (tokens). free: bytes.
    """
    room = free // SHARE // bytes_per_token
    if workloads:
        return min(max(work.tokens(page_size, max_batch) for work in workloads), room)
    return min(
        max(context, max_batch * min(context, UNKNOWN_ROW)), UNKNOWN_BYTES // bytes_per_token, room
    )
