"""Continuous batching over a paged KV cache: what to run in this step, and what came of it.

The engine's step is

    plan = scheduler.plan()                  # admit, choose prompt chunks and decode rows, give out pages
    ... copy plan.copies, run the model over plan.prefills and plan.decodes, sample ...
    scheduler.commit(sequence, token, logprob)        # for every decode row, and for all n samples of a last chunk

A request is a *group* of n samples. Its prompt runs once; the final hidden state of the last chunk
gives the distribution of the first token of all n samples, whether or not they are admitted yet.
Full prompt pages are shared by reference count. The partial last page (the tail) has one writer at
a time, which appends behind the prompt; every other sample gets a copy of it when it forks. What a
writer appends lies behind the prompt, so the tail can be copied, or handed to a next writer, for as
long as the group holds it: until its last sample has forked.

Admission is first in, first out, sample by sample, and by worst case (no preemption, hence no
recomputation): a sample enters when a row is free and when the pages it could ever need,

    ceil((prompt + max_tokens - 1) / page_size) - (pages it shares)        (the last sampled token is never stored)

are free and reserved_pages to nobody else. They are given out as it grows, and the promise lapses
when it ends. Only the oldest group can have samples outside; it holds nothing but its prompt, which
they need anyway. So when all others have ended, one more sample always fits: no deadlock. A group
larger than the cache or than `max_batch` simply enters in waves.

Concurrency: one thread calls everything. `abort` may come between `plan` and `commit`; the commits
that follow for an ended sequence are ignored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import replace

from lowroll.engine.request import noise_key, sampler_settings
from lowroll.engine.sequence import LiveGroup, Plan, PrefillChunk, Sequence
from lowroll.kv.pages import PagePool, page_keys
from lowroll.types import BehaviorTag, FinishReason, Group, Request, Rollout


class Scheduler:
    """See the top of the file.

    max_batch: rows, i.e. samples admitted at once. max_prefill_tokens: prompt tokens of one step (a
    single chunk may exceed it, so that every prompt can run). prefill_chunk: longest chunk of a
    prompt in one step, None for whole prompts. lookahead: most steps that decode rows take between
    two plans, when no prompt waits for its turn. behavior: how tokens are drawn now; its last
    policy span names the weights. decode: token ids to text, needed for stop strings only.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        behavior: BehaviorTag,
        max_batch: int,
        max_prefill_tokens: int,
        prefill_chunk: int | None = None,
        lookahead: int = 1,
        eos_ids: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_prefill_tokens", max_prefill_tokens),
            ("prefill_chunk", 1 if prefill_chunk is None else prefill_chunk),
            ("lookahead", lookahead),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.pool = pool
        self.max_batch = max_batch
        self.max_prefill_tokens = max_prefill_tokens
        self.prefill_chunk = prefill_chunk
        self.lookahead = lookahead
        self.eos_ids = frozenset(eos_ids)
        self.decode = decode
        self.reserved_pages = 0  # sum of the sequences' promises; never over pool.num_free
        self._groups: dict[int, LiveGroup] = {}  # by handle, in order of arrival
        self._waiting: deque[LiveGroup] = deque()  # groups with samples outside, oldest first
        self._prefilling: deque[LiveGroup] = deque()
        self._running: dict[Sequence, None] = {}  # admitted samples, in order of admission
        self._finished: list[tuple[int, Group]] = []
        self._next_handle = 0
        self.set_behavior(behavior)

    @property
    def has_work(self) -> bool:
        return bool(self._groups)

    @property
    def has_finished(self) -> bool:
        """Whether `finished` has something to return."""
        return bool(self._finished)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples that are not admitted yet."""
        return sum(len(group.waiting) for group in self._waiting)

    def set_behavior(self, behavior: BehaviorTag) -> None:
        """From now on tokens are drawn as `behavior` says. Pages of another behaviour are never
        served again."""
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
                group.salt = b""  # a prompt of two behaviours, also if the first returns

    def add(self, request: Request) -> int:
        """Queue a request that `validate` accepted. Returns the handle that `finished` and `abort`
        use."""
        most = _num_pages(len(request.prompt_ids) + request.max_tokens - 1, self.pool.page_size)
        assert most <= self.pool.num_pages, "request larger than the cache: it was not validated"
        assert self.decode or not request.stop_strings, (
            "stop strings without a tokenizer: it was not validated"
        )
        stop_ids = set(request.stop_ids) | (set() if request.ignore_eos else self.eos_ids)
        group = LiveGroup(self._next_handle, request, tuple(sorted(stop_ids)))
        group.sequences = [Sequence(group, i, noise_key(request, i)) for i in range(request.n)]
        group.waiting.extend(group.sequences)
        group.num_open = group.num_unforked = request.n
        self._next_handle += 1
        self._groups[group.handle] = group
        self._waiting.append(group)
        return group.handle

    def abort(self, handle: int) -> bool:
        """End a request's open samples with "abort"; its group is finished. False if it had ended
        already."""
        group = self._groups.get(handle)
        if group is None:
            return False
        for sequence in group.sequences:
            self._finish(sequence, "abort")
        return True

    def abort_all(self) -> None:
        """End everything in flight with "abort"."""
        for handle in list(self._groups):
            self.abort(handle)

    def finished(self, handles: Container[int] | None = None) -> list[tuple[int, Group]]:
        """(handle, group) of the completed requests not returned yet, in order of completion; only
        those of `handles` when given."""
        groups = [
            (handle, group)
            for handle, group in self._finished
            if handles is None or handle in handles
        ]
        self._finished = [
            (handle, group)
            for handle, group in self._finished
            if handles is not None and handle not in handles
        ]
        return groups

    def plan(self) -> Plan:
        """Admit what fits, then give every decode row the page that its token's K/V go to."""
        self._admit()
        prefills = self._plan_prefills()
        rows = [
            sequence for sequence in self._running if sequence.token_ids
        ]  # of the others the prompt is running
        most = (
            max(1, self.lookahead // 2) if self._waiting else self.lookahead
        )  # others wait for rows that end
        steps = 1 if prefills else min(most, max((s.num_left for s in rows), default=1))
        copies = [copy for sequence in rows if not sequence.pages for copy in self._fork(sequence)]
        for sequence in rows:
            last = (
                sequence.position + min(steps, sequence.num_left) - 1
            )  # whose K/V this plan's steps store
            missing = last // self.pool.page_size + 1 - len(sequence.pages)
            if missing > 0:
                sequence.pages += self.pool.allocate(missing)
                self._reserve(sequence, sequence.reserved_pages - missing)
        return Plan(prefills, rows, copies, steps)

    def commit(self, sequence: Sequence, token_id: int, logprob: float) -> None:
        """Append a sampled token; end the sample if it stops here. Raises ValueError for a
        non-finite log-prob."""
        if sequence.finish_reason is not None:
            return
        if not math.isfinite(logprob):
            raise ValueError(
                f"logprob of sample {sequence.sample}, token {len(sequence.token_ids)} is {logprob}"
            )
        sequence.num_cached = sequence.length  # whatever the token was drawn from is stored by now
        if sequence is sequence.group.leader and not sequence.token_ids:
            self._publish_prompt(sequence.group)
        if (
            not sequence.spans
            or sequence.spans[-1].version != self.policy.version
            or sequence.spans[-1].digest != self.policy.digest
        ):
            sequence.spans.append(replace(self.policy, start=len(sequence.token_ids)))
        sequence.behavior = self.behavior
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
        stop = self._stop_reason(sequence)
        if stop is not None:
            self._finish(sequence, "stop", stop)
        elif len(sequence.token_ids) == sequence.request.max_tokens:
            self._finish(sequence, "length")

    def commit_run(self, sequence: Sequence, token_ids: list[int], logprobs: list[float]) -> None:
        """`commit` of several tokens; those behind the end of the sample are dropped."""
        group = sequence.group
        may_end = (
            sequence.finish_reason is not None
            or group.request.stop_strings
            or len(token_ids) >= sequence.num_left
            or not set(token_ids).isdisjoint(group.stop_ids)
        )
        self.commit(sequence, token_ids[0], logprobs[0])
        if may_end:
            for token_id, logprob in zip(token_ids[1:], logprobs[1:], strict=True):
                self.commit(sequence, token_id, logprob)
            return
        sequence.token_ids += token_ids[1:]
        sequence.logprobs += logprobs[1:]
        sequence.num_cached = sequence.length - 1

    # -- admission ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting:
            group = self._waiting[0]
            if not group.waiting:
                self._waiting.popleft()
                continue
            sequence = group.waiting[0]
            if len(self._running) == self.max_batch:
                return
            if not (
                self._admit_leader(group)
                if sequence is group.leader
                else self._admit_sibling(sequence)
            ):
                return
            group.waiting.popleft()
            self._running[sequence] = None

    def _admit_leader(self, group: LiveGroup) -> bool:
        """Take the prompt's pages (from the prefix cache where it can) and promise the leader's
        others."""
        prompt_ids, page_size = group.request.prompt_ids, self.pool.page_size
        # the last prompt token always runs, for its logits: its page is never taken from the cache
        keys = page_keys(prompt_ids[:-1], page_size, self.salt)
        hits = self.pool.match(keys)
        most = self._most_pages(group)
        if most - sum(self.pool.refcount(page) > 0 for page in hits) > self._available():
            return False
        self.pool.reuse(hits)
        group.prompt_pages = hits + self.pool.allocate(
            _num_pages(len(prompt_ids), page_size) - len(hits)
        )
        group.salt = self.salt
        group.num_prefilled = len(hits) * page_size
        group.tail_writer = group.leader
        group.leader.pages = list(group.prompt_pages)
        group.leader.num_cached = group.num_prefilled
        self.pool.share(group.prompt_pages)
        self._reserve(group.leader, most - len(group.prompt_pages))
        self._forked(group)
        self._prefilling.append(group)
        return True

    def _admit_sibling(self, sequence: Sequence) -> bool:
        group = sequence.group
        writes_tail = group.tail_writer is None  # the former one has ended
        shared = len(group.prompt_pages) if writes_tail else self._num_shared(group)
        if self._most_pages(group) - shared > self._available():
            return False
        if writes_tail:
            group.tail_writer = sequence
        self._reserve(sequence, self._most_pages(group) - shared)
        return True

    def _fork(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Give an admitted sample its page table. Returns the page copy that it needs, if any."""
        group = sequence.group
        if group.tail_writer is None:
            group.tail_writer = sequence  # the former one has ended
        num_shared = (
            len(group.prompt_pages) if group.tail_writer is sequence else self._num_shared(group)
        )
        shared, tail = group.prompt_pages[:num_shared], group.prompt_pages[num_shared:]
        own = self.pool.allocate(len(tail))
        self.pool.share(shared)
        sequence.pages = shared + own
        self._reserve(sequence, self._most_pages(group) - len(sequence.pages))
        self._forked(group)
        return list(zip(tail, own, strict=True))

    def _forked(self, group: LiveGroup) -> None:
        group.num_unforked -= 1
        if group.num_unforked == 0:
            self.pool.free(group.prompt_pages)
            group.prompt_pages = []

    def _most_pages(self, group: LiveGroup) -> int:
        return _num_pages(
            len(group.request.prompt_ids) + group.request.max_tokens - 1, self.pool.page_size
        )

    def _num_shared(self, group: LiveGroup) -> int:
        return len(group.request.prompt_ids) // self.pool.page_size

    def _available(self) -> int:
        return self.pool.num_free - self.reserved_pages

    def _reserve(self, sequence: Sequence, pages: int) -> None:
        assert pages >= 0, "a sample needs more pages than its worst case"
        self.reserved_pages += pages - sequence.reserved_pages
        sequence.reserved_pages = pages

    # -- prefill -----------------------------------------------------------------------------------

    def _plan_prefills(self) -> list[PrefillChunk]:
        chunks: list[PrefillChunk] = []
        budget = self.max_prefill_tokens
        unfinished: list[LiveGroup] = []
        while self._prefilling:
            group = self._prefilling[0]
            start, length = group.num_prefilled, len(group.request.prompt_ids)
            stop = min(length, start + (self.prefill_chunk or length))
            if chunks and stop - start > budget:
                break
            self._prefilling.popleft()
            is_last = stop == length
            chunks.append(
                PrefillChunk(
                    group.leader, start, stop, is_last, tuple(group.sequences) if is_last else ()
                )
            )
            budget -= stop - start
            group.leader.num_cached = start
            group.num_prefilled = stop
            if not is_last:
                unfinished.append(group)
        self._prefilling.extendleft(reversed(unfinished))
        return chunks

    def _publish_prompt(self, group: LiveGroup) -> None:
        """Offer the full prompt pages to later requests, unless other weights were adopted while
        the prompt ran."""
        if group.salt == self.salt:
            keys = page_keys(group.request.prompt_ids, self.pool.page_size, group.salt)
            self.pool.publish(group.leader.pages[: len(keys)], keys)

    # -- the end of a sample -----------------------------------------------------------------------

    def _stop_reason(self, sequence: Sequence) -> int | str | None:
        """The stop id or stop string that the last token completed, if it may stop here.

        No stop lies within the first `min_tokens` tokens: ids are banned there, and text is matched
        behind them.
        """
        request = sequence.request
        if len(sequence.token_ids) <= request.min_tokens:
            return None
        if sequence.last_token in sequence.group.stop_ids:
            return sequence.last_token
        if request.stop_strings:
            assert self.decode is not None
            num_chars = max(len(text) for text in request.stop_strings)
            tail = _decode_tail(self.decode, sequence.token_ids, request.min_tokens, num_chars)
            return next((text for text in request.stop_strings if text in tail), None)
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, stop: int | str | None = None
    ) -> None:
        if sequence.finish_reason is not None:
            return
        group = sequence.group
        sequence.finish_reason, sequence.stop_reason = reason, stop
        if sequence.pages:
            self.pool.free(sequence.pages)
            sequence.pages = []
        else:
            self._forked(group)  # it never will: one sample fewer needs the prompt's pages
        self._reserve(sequence, 0)
        if sequence in self._running:
            del self._running[sequence]
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
        sampler = sampler_settings(group.request)
        rollouts = []
        for s in group.sequences:
            assert s.finish_reason is not None
            policy = tuple(s.spans) or (replace(self.policy, start=0),)
            behavior = replace(
                s.behavior or self.behavior,
                policy=policy,
                sampler=sampler,
                seed=group.request.seed,
                request_id=group.request.id,
                sample=s.sample,
            )
            rollouts.append(
                Rollout(s.token_ids, s.logprobs, s.finish_reason, behavior, s.stop_reason)
            )
        self._finished.append((group.handle, Group(group.request, rollouts)))


def behavior_salt(behavior: BehaviorTag) -> bytes:
    """Names everything that K/V depend on: two behaviours share prefix pages only if all of it is
    equal."""
    policy = behavior.policy[-1]
    return repr(
        (
            policy.version,
            policy.digest,
            behavior.weights,
            behavior.kv_policy,
            behavior.kv_budget,
            behavior.noise_seed,
            behavior.noise_sigma,
        )
    ).encode()


def _num_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _decode_tail(
    decode: Callable[[list[int]], str], token_ids: list[int], start: int, num_chars: int
) -> str:
    """The end of the text of token_ids[start:], its last `num_chars` characters as if all of it had
    been decoded.

    Decoding from the middle can spoil the first characters (a split UTF-8 sequence, a stripped
    space): hence the 4.
    """
    window = num_chars + 4
    while True:
        first = max(start, len(token_ids) - window)
        text = decode(token_ids[first:])
        if len(text) >= num_chars + 4 or first == start:
            return text
        window *= 2
