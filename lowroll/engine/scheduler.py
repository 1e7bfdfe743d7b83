"""Continuous batching over a paged KV cache.

    plan = scheduler.plan()                         # admissions, prompt chunks, decode rows, pages
    ... run the plan in its order ...
    scheduler.commit(sequence, token, logprob)      # for decode rows and samples of a last chunk

A request is a *group* of n samples. Its prompt runs once; its last hidden state gives the
distribution of the first token of all samples, admitted or not. Full prompt pages are shared by
reference count. The partial last page (the tail) has one writer at a time; every other sample
copies it when it forks.

A sample at the limit of its cache policy (`kv.policy.base`) waits for the next plan, which begins
with compactions: the keys that stay move to pages of its own, since prompt pages are shared. A
prompt over the limit is compacted once, after its last chunk, and its samples fork from the result.

Admission is first in, first out, sample by sample, without preemption: a sample is admitted when a
slot is free and the pages of its worst case, beyond the shared ones (`kv.policy.base.footprint`),
are free and not reserved. Only the oldest group can have both admitted and waiting samples, and it
holds nothing but its prompt. So one more sample always fits when all others have ended: there is no
deadlock. A group larger than the cache or than `max_batch` is admitted in waves.

Rows that decode wait while a prompt runs, and one short prompt takes as long as several. So with
`gather`, prompts run together, after that many decode steps, or when they fill a pass.

One thread uses it. An `abort` between run and commits makes the commits do nothing. Do not abort
between plan and run: that frees the pages that the plan lists.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lowroll.engine.base import PartialSample
from lowroll.engine.chunked_prefill import plan_passes
from lowroll.engine.draft_replay import Replays, agreed, begin, drawn, plan_checks
from lowroll.engine.logit_bias import needs_host
from lowroll.engine.outputs import behavior_salt, drawn_by, give_up, rollouts_of
from lowroll.engine.sequence import LiveGroup, Sequence, StepPlan
from lowroll.engine.stops import stop_reason
from lowroll.kv.pages import PagePool, page_keys
from lowroll.kv.policy.base import CachePolicy, Compaction, footprint, num_pages, prompt_slot
from lowroll.kv.policy.dense import DENSE
from lowroll.types import BehaviorTag, Evictions, FinishReason, Group, PolicySpan, Request, Rollout

if TYPE_CHECKING:
    from lowroll.engine.grammar import Grammar


class Scheduler:
    """Admission, planning and commits.

    max_prefill_tokens: of a pass; a single chunk may exceed it. passes: most passes over prompts
    between two plans, in which decode rows take one step. lookahead: most decode steps between two
    plans, when no prompt waits. decode: token ids to text, for stop strings. evictions: the dropped
    keys of a slot's sample (slot None: none yet); None if not recorded. Others as of
    `NativeEngine`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        behavior: BehaviorTag,
        kv: CachePolicy = DENSE,
        max_batch: int,
        max_prefill_tokens: int,
        prefill_chunk: int | None = None,
        lookahead: int = 1,
        gather: int = 0,
        passes: int = 1,
        eos_ids: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        evictions: Callable[[int | None], Evictions] | None = None,
        compile_grammar: Callable[[str], Grammar] | None = None,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_prefill_tokens", max_prefill_tokens),
            ("prefill_chunk", 1 if prefill_chunk is None else prefill_chunk),
            ("lookahead", lookahead),
            ("passes", passes),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.pool = pool
        self.kv = kv
        self.max_batch = max_batch
        self.max_prefill_tokens = max_prefill_tokens
        self.prefill_chunk = prefill_chunk
        self.lookahead = lookahead
        self.gather = gather
        self.passes = passes
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.evictions = evictions
        self.compile_grammar = compile_grammar
        self.reserved_pages = 0  # never over pool.num_free
        self._groups: dict[int, LiveGroup] = {}
        self._waiting: deque[LiveGroup] = deque()  # with waiting samples, oldest first
        self._prefilling: deque[LiveGroup] = deque()
        self._running: dict[Sequence, None] = {}
        self._free_slots = list(reversed(range(max_batch)))
        self._begun: list[int] = []  # slots of leaders admitted since the last plan
        self._steps = 0  # decode steps since prompts ran
        self._through: list[LiveGroup] = []  # groups whose prompt ended since the last plan
        self._finished: dict[int, Group] = {}  # by handle, in order of completion
        self._next_handle = 0
        self.replays = Replays()
        self.set_behavior(behavior)

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def has_finished(self) -> bool:
        return bool(self._finished)

    @property
    def in_flight(self) -> Mapping[int, LiveGroup]:
        return self._groups

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(len(group.waiting) for group in self._waiting)

    def set_behavior(self, behavior: BehaviorTag) -> None:
        """Draw under `behavior` from now on, and serve no pages of another one. ValueError for an
        empty `behavior.policy`."""
        if not behavior.policy:
            raise ValueError(
                "behavior.policy: empty; its last span must name the version and digest of the "
                "weights"
            )
        self.behavior = behavior
        self.policy = behavior.policy[-1]
        self.salt = behavior_salt(behavior)
        for group in self._groups.values():
            if group.salt != self.salt:
                group.salt = b""  # its pages mix two behaviors

    def add(self, request: Request) -> int:
        pages_needed = footprint(
            self.kv, len(request.prompt_ids), request.max_tokens, self.pool.page_size
        )
        assert pages_needed.alone <= self.pool.num_pages, (
            "request larger than the cache: it was not validated"
        )
        assert self.decode or not request.stop_strings, (
            "stop strings without a tokenizer: it was not validated"
        )
        stop_ids = set(request.stop_ids) | (set() if request.ignore_eos else self.eos_ids)
        grammar = None
        if request.grammar is not None:
            assert self.compile_grammar, "a grammar without a tokenizer: it was not validated"
            grammar = self.compile_grammar(request.grammar)
        group = LiveGroup(
            self._next_handle, request, tuple(sorted(stop_ids)), pages_needed, grammar
        )
        self._next_handle += 1
        self._enqueue(group, [[]] * request.n)
        return group.handle

    def _enqueue(self, group: LiveGroup, drafts: list[list[int]]) -> None:
        begin(group, drafts)
        self._groups[group.handle] = group
        self._waiting.append(group)

    def rewind(self) -> None:
        """Begin everything in flight again, with its tokens as drafts. For the dense policy."""
        assert self.kv.budget is None, f"{self.kv.name}: a draft's pieces would see other keys"
        groups = list(self._groups.values())
        for group in groups:
            for sequence in group.sequences:
                self.pool.free(sequence.pages)
            self.pool.free(group.prompt_pages)
        self.reserved_pages = 0
        for queue in (self._waiting, self._prefilling, self._begun, self._through):
            queue.clear()
        self._groups.clear()
        self._running.clear()
        self._free_slots = list(reversed(range(self.max_batch)))
        for old_group in groups:
            restarted = LiveGroup(
                old_group.handle,
                old_group.request,
                old_group.stop_ids,
                old_group.footprint,
                old_group.grammar,
            )
            self._enqueue(restarted, [drawn(sequence) for sequence in old_group.sequences])

    def abort(self, handle: int) -> bool:
        group = self._groups.get(handle)
        if group is None:
            return False
        for sequence in group.sequences:
            self._finish(sequence, "abort")
        return True

    def abort_all(self) -> None:
        for handle in list(self._groups):
            self.abort(handle)

    def so_far(self, handle: int) -> list[PartialSample]:
        if not 0 <= handle < self._next_handle:
            raise ValueError(f"handle: {handle} is of no request")
        samples: list[Sequence] | list[Rollout] = []
        if handle in self._groups:
            samples = self._groups[handle].sequences
        elif handle in self._finished:
            samples = self._finished[handle].rollouts
        return drawn_by(samples)

    def finished(self, handles: Container[int] | None = None) -> list[tuple[int, Group]]:
        """Return (handle, group) of completed requests, of `handles` if given, once each, in order
        of completion."""
        done_handles = [handle for handle in self._finished if handles is None or handle in handles]
        return [(handle, self._finished.pop(handle)) for handle in done_handles]

    def plan(self) -> StepPlan:
        """Compact full caches, admit samples, choose what runs, and allocate its pages."""
        compactions = self._compact_all()
        self._admit()
        drawing = [sequence for sequence in self._running if sequence.token_ids]
        forks, copies = self._fork_all(drawing)
        decodes = [sequence for sequence in drawing if not sequence.draft]
        max_tokens, max_chunk = self.max_prefill_tokens, self.prefill_chunk
        checks, num_checked = plan_checks(drawing, max_tokens, max_chunk)
        prompts_are_due = checks or not decodes or self._prompts_are_due()
        num_passes = self.passes if prompts_are_due else 0
        passes = plan_passes(self._prefilling, num_passes, max_tokens, max_chunk, num_checked)
        steps, limits = self._plan_steps(decodes, is_single_step=bool(passes))
        for sequence, limit in zip(decodes, limits, strict=True):
            self._grow(sequence, limit)
        for check in checks:
            self._grow(check.sequence, len(check.ids))
        self._steps = 0 if any(passes) else self._steps + steps
        begun, self._begun = self._begun, []
        return StepPlan(compactions, forks, copies, decodes, steps, limits, begun, passes, checks)

    def _plan_steps(self, decodes: list[Sequence], is_single_step: bool) -> tuple[int, list[int]]:
        steps_left = [sequence.until - sequence.position for sequence in decodes]
        steps = 1
        if not is_single_step and not any(map(needs_host, decodes)):
            # read tokens more often while others wait for rows to end
            max_steps = max(1, self.lookahead // 2) if self._waiting else self.lookahead
            steps = min(max_steps, max(steps_left, default=1))
        return steps, [min(steps, left) for left in steps_left]

    def _grow(self, sequence: Sequence, num_keys: int) -> None:
        num_needed = num_pages(sequence.cached_len + num_keys, self.pool.page_size)
        num_missing = num_needed - len(sequence.pages)
        if num_missing > 0:
            sequence.pages += self.pool.allocate(num_missing)
            self._reserve(sequence, sequence.reserved_pages - num_missing)

    def commit(
        self,
        sequence: Sequence,
        token_id: int,
        logprob: float,
        top: list[tuple[int, float]] | None = None,
    ) -> None:
        """Append a drawn token, and end the sample if it stops. ValueError for a non-finite
        log-prob."""
        if sequence.finish_reason is not None:
            return
        if not math.isfinite(logprob):
            raise ValueError(
                f"logprob of sample {sequence.sample}, token {len(sequence.token_ids)} is {logprob}"
            )
        if not sequence.spans or not _same_weights(sequence.spans[-1], self.policy):
            sequence.spans.append(replace(self.policy, start=len(sequence.token_ids)))
        sequence.behavior = self.behavior
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
        if sequence.top_logprobs is not None:
            assert top is not None
            sequence.top_logprobs.append(top)
        if len(sequence.token_ids) == 1:
            self._start(sequence)
        else:
            sequence.cached_len += 1  # the key of the token before
        if sequence.draft:
            self.replays.follow(sequence)
        stop = stop_reason(sequence, self.decode)
        if stop is not None:
            self._finish(sequence, "stop", stop)
        elif len(sequence.token_ids) == sequence.request.max_tokens:
            self._finish(sequence, "length")

    def commit_run(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[float],
        tops: list[list[tuple[int, float]]] | None = None,
    ) -> None:
        """Commit drawn tokens, up to the sample's end or its first difference from the draft."""
        group = sequence.group
        if sequence.draft:
            token_ids = token_ids[: agreed(sequence, token_ids)]
        count = len(token_ids)
        may_end = (
            sequence.finish_reason is not None
            or group.request.stop_strings
            or count >= sequence.num_left
            or not set(token_ids).isdisjoint(group.stop_ids)
        )
        # only the first token can begin a policy span, or be the sample's first
        num_single = count if may_end else 1
        for i in range(num_single):
            self.commit(sequence, token_ids[i], logprobs[i], None if tops is None else tops[i])
        if may_end:
            return
        sequence.token_ids += token_ids[1:]
        sequence.logprobs += logprobs[1:count]
        if tops is not None and sequence.top_logprobs is not None:
            sequence.top_logprobs += tops[1:count]
        sequence.cached_len += count - 1
        if sequence.draft:
            self.replays.follow(sequence)

    def _start(self, sequence: Sequence) -> None:
        group = sequence.group
        if sequence is group.leader:
            self._publish_prompt(group)
            self._through.append(group)
        sequence.cached_len = group.footprint.base
        self._look_ahead(sequence)

    def _look_ahead(self, sequence: Sequence) -> None:
        num_free_keys = self.kv.room(sequence.cached_len)
        assert num_free_keys > 0, (
            f"{self.kv.name}: a cache of {sequence.cached_len} keys takes no other"
        )
        sequence.until = sequence.position + min(sequence.num_left, num_free_keys)

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting:
            group = self._waiting[0]
            if not group.waiting:
                self._waiting.popleft()
                continue
            if not self._free_slots:
                return
            sequence = group.waiting[0]
            is_leader = sequence is group.leader
            fits = self._admit_leader(group) if is_leader else self._admit_sibling(sequence)
            if not fits:
                return
            group.waiting.popleft()
            self._running[sequence] = None

    def _admit_leader(self, group: LiveGroup) -> bool:
        prompt_ids, page_size = group.request.prompt_ids, self.pool.page_size
        page_needs = group.footprint
        # the last tokens always run, for their logits and the policy's state
        max_cached = max(0, len(prompt_ids) - self.kv.window)
        if group.page_keys is None or group.salt != self.salt:
            group.page_keys = page_keys(prompt_ids, page_size, self.salt)
            group.salt = self.salt
        hits = self.pool.match(group.page_keys[: max_cached // page_size])
        # a hit that nobody holds counts as free until it is taken
        num_held_hits = sum(self.pool.refcount(page) > 0 for page in hits)
        pages_needed = page_needs.prompt - num_held_hits + page_needs.compacted + page_needs.writer
        if pages_needed > self._available():
            return False
        self.pool.reuse(hits)
        group.prompt_pages = hits + self.pool.allocate(page_needs.prompt - len(hits))
        group.compacted_pages = self.pool.allocate(page_needs.compacted)
        group.num_prefilled = len(hits) * page_size
        leader = group.tail_writer = group.leader
        leader.slot = group.state_slot = self._free_slots.pop()
        leader.cached_len = group.num_prefilled
        if page_needs.compacted:
            # it forks from what the compaction leaves, and holds the prompt until then
            self.pool.share(group.prompt_pages)
            leader.pages = list(group.prompt_pages)
            self._reserve(leader, page_needs.writer)
        else:
            self._fork(leader)
        self._begun.append(leader.slot)
        self._prefilling.append(group)
        return True

    def _admit_sibling(self, sequence: Sequence) -> bool:
        group = sequence.group
        writes_tail = group.tail_writer is None
        pages_needed = group.footprint.writer if writes_tail else group.footprint.sibling
        if pages_needed > self._available():
            return False
        if writes_tail:
            group.tail_writer = sequence
        sequence.slot = self._free_slots.pop()
        self._reserve(sequence, pages_needed)
        return True

    def _fork_all(
        self, rows: list[Sequence]
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Give admitted samples their page tables. Return the copies (source, target) of slots and
        of pages. Samples admitted later need a copy of the prompt's state, since the leader's slot
        changes."""
        slot_copies: list[tuple[int, int]] = []
        page_copies: list[tuple[int, int]] = []
        for sequence in rows:
            if sequence.forked:
                continue
            page_copies += self._fork(sequence)
            if sequence.slot != sequence.group.state_slot:
                slot_copies.append((sequence.group.state_slot, sequence.slot))
        kept_slot = prompt_slot(self.max_batch)  # only one group can have waiting samples here
        for group in self._through:
            if group.waiting:
                slot_copies.append((group.state_slot, kept_slot))
                group.state_slot = kept_slot
        self._through.clear()
        return slot_copies, page_copies

    def _fork(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Give a sample its pages: the group's first sample takes all of the prompt's and writes on
        in the last one, the others share the full ones. Return the copies of the rest, (source,
        target)."""
        group = sequence.group
        if group.tail_writer is None:
            group.tail_writer = sequence
        if group.tail_writer is sequence:
            num_shared = len(group.prompt_pages)
            max_own_pages = group.footprint.writer
        else:
            num_shared = group.footprint.base // self.pool.page_size
            max_own_pages = group.footprint.sibling
        shared_pages = group.prompt_pages[:num_shared]
        copied_pages = group.prompt_pages[num_shared:]
        own_pages = self.pool.allocate(len(copied_pages))
        self.pool.share(shared_pages)
        sequence.num_shared = num_shared
        sequence.pages = shared_pages + own_pages
        self._reserve(sequence, max_own_pages - len(own_pages))
        self._forked(sequence)
        return list(zip(copied_pages, own_pages, strict=True))

    def _forked(self, sequence: Sequence) -> None:
        group = sequence.group
        sequence.forked = True
        group.num_unforked -= 1
        if group.num_unforked == 0:
            self.pool.free(group.prompt_pages + group.compacted_pages)
            group.prompt_pages = []
            group.compacted_pages = []

    def _available(self) -> int:
        return self.pool.num_free - self.reserved_pages

    def _reserve(self, sequence: Sequence, pages: int) -> None:
        assert pages >= 0, "a sample needs more pages than its worst case"
        self.reserved_pages += pages - sequence.reserved_pages
        sequence.reserved_pages = pages

    # -- compaction --------------------------------------------------------------------------------

    def _compact_all(self) -> list[Compaction]:
        """Compact finished prompts and full samples. Pages are freed after all allocations, so no
        target is another one's source."""
        if self.kv.budget is None:
            return []
        compactions: list[Compaction] = []
        unused_pages: list[int] = []
        for group in self._through:
            if group.num_open and group.compacted_pages:
                compactions.append(self._compact_prompt(group, unused_pages))
        for sequence in self._running:
            if sequence.forked and sequence.token_ids and sequence.until == sequence.position:
                compactions.append(self._compact(sequence, unused_pages))
        self.pool.free(unused_pages)
        return compactions

    def _compact_prompt(self, group: LiveGroup, unused_pages: list[int]) -> Compaction:
        """Compact a prompt before any sample has forked. unused_pages: receives its pages twice,
        for group and leader."""
        length = len(group.request.prompt_ids)
        compaction = Compaction(
            group.state_slot,
            pages=group.prompt_pages,
            targets=group.compacted_pages,
            cached=length,
            kept=group.footprint.base,
            position=length - 1,
        )
        unused_pages += group.leader.pages + group.prompt_pages
        group.leader.pages = []
        group.prompt_pages, group.compacted_pages = group.compacted_pages, []
        return compaction

    def _compact(self, sequence: Sequence, unused_pages: list[int]) -> Compaction:
        num_cached = sequence.cached_len
        pages = sequence.pages
        num_kept = self.kv.kept(num_cached)
        num_needed = num_pages(num_kept, self.pool.page_size)
        shared_pages = pages[: sequence.num_shared]
        own_pages = pages[sequence.num_shared :]
        new_pages = self.pool.allocate(max(0, num_needed - len(own_pages)))
        targets = own_pages[:num_needed] + new_pages
        unused_pages += shared_pages + own_pages[num_needed:]
        if sequence.group.tail_writer is sequence:
            sequence.group.tail_writer = None
        sequence.pages = list(targets)
        sequence.num_shared = 0
        sequence.num_compactions += 1
        sequence.cached_len = num_kept
        self._look_ahead(sequence)
        max_pages = num_pages(self.kv.peak(num_kept, sequence.num_left), self.pool.page_size)
        self._reserve(sequence, max_pages - num_needed)
        return Compaction(
            sequence.slot, pages, targets, num_cached, num_kept, position=sequence.position - 1
        )

    # -- prefill -----------------------------------------------------------------------------------

    def _prompts_are_due(self) -> bool:
        if self._steps >= self.gather or any(group.num_prefilled for group in self._prefilling):
            return True
        tokens = sum(len(group.request.prompt_ids) for group in self._prefilling)
        return tokens >= self.max_prefill_tokens

    def _publish_prompt(self, group: LiveGroup) -> None:
        if group.salt == self.salt and group.page_keys is not None:
            self.pool.publish(group.leader.pages[: len(group.page_keys)], group.page_keys)

    # -- the end of a sample -----------------------------------------------------------------------

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: int | str | None = None
    ) -> None:
        if sequence.finish_reason is not None:
            return
        group = sequence.group
        sequence.finish_reason = reason
        sequence.stop_reason = stop
        if self.evictions is not None:
            # before its second token the slot may hold an earlier sample's evictions
            has_decoded = len(sequence.token_ids) > 1
            sequence.evictions = self.evictions(sequence.slot if has_decoded else None)
        give_up(self.pool, sequence, self.salt)
        if not sequence.forked:
            self._forked(sequence)
        self._reserve(sequence, 0)
        if sequence in self._running:
            del self._running[sequence]
            self._free_slots.append(sequence.slot)
        else:
            group.waiting.remove(sequence)
        if group.tail_writer is sequence:
            group.tail_writer = None
        group.num_open -= 1
        if group.num_open == 0:
            self._close(group)

    def _close(self, group: LiveGroup) -> None:
        del self._groups[group.handle]
        for queue in (self._waiting, self._prefilling):
            if group in queue:
                queue.remove(group)
        rollouts = rollouts_of(group, self.behavior, self.policy)
        self._finished[group.handle] = Group(group.request, rollouts)


def _same_weights(span: PolicySpan, other: PolicySpan) -> bool:
    return (span.version, span.digest) == (other.version, other.digest)
