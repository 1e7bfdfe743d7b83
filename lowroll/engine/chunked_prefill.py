"""The choice of prompt chunks that run together."""

from __future__ import annotations

from collections import deque

from lowroll.engine.sequence import LiveGroup, PrefillChunk


def plan_passes(
    prompts: deque[LiveGroup], most: int, budget: int, longest: int | None, taken: int
) -> list[list[PrefillChunk]]:
    """Plan up to `most` passes over these prompts, in order, and remove what was planned.

    budget: tokens of a pass, which a single chunk may exceed. longest: of a chunk; None: no limit.
    taken: tokens of drafts in the first pass.
    """
    passes: list[list[PrefillChunk]] = []
    while len(passes) < most and (taken or prompts):
        passes.append(_plan_pass(prompts, budget - taken, longest, not taken))
        taken = 0
    return passes


def _plan_pass(
    prompts: deque[LiveGroup], budget: int, longest: int | None, may_exceed: bool
) -> list[PrefillChunk]:
    chunks: list[PrefillChunk] = []
    unfinished: list[LiveGroup] = []
    while prompts:
        group = prompts[0]
        start = group.num_prefilled
        length = len(group.request.prompt_ids)
        stop = min(length, start + (longest or length))
        if stop - start > budget and (chunks or not may_exceed):
            break
        prompts.popleft()
        samples = tuple(group.sequences) if stop == length else ()
        chunks.append(PrefillChunk(group.leader, start, stop, samples))
        budget -= stop - start
        group.leader.cached_len = start
        group.num_prefilled = stop
        if not samples:
            unfinished.append(group)
    prompts.extendleft(reversed(unfinished))
    return chunks
