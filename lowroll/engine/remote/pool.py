"""`engine.base.Engine` over one or several servers, without torch.

    engine = connect("http://127.0.0.1:8000")          # a pool of one
    pool = EnginePool(["http://a:8000", "http://b:8000/v1"], PoolOptions(admin_token=...))

The pool (docs/architecture.md) runs on one event loop in a thread of its own. One thread calls it
at a time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from lowroll.engine.base import Capabilities, EngineStats, InFlight, PartialSample, Ranked
from lowroll.engine.remote.discovery import Discovery, Elastic, Resolver, resolve
from lowroll.engine.remote.event_loop import MARGIN, LoopStalled, LoopThread
from lowroll.engine.remote.http_client import HttpCall, ServerError
from lowroll.engine.remote.protocol import ranked, scoring_call
from lowroll.engine.remote.replica import PoolOptions, QueuedRequest
from lowroll.engine.remote.replica_set import PoolReport, ReplicaSet
from lowroll.engine.remote.server_base import CONTROL_S, EngineServer, HeldPolicy
from lowroll.engine.request import check_sequences
from lowroll.types import BehaviorTag, Group, PolicySpan, Request
from lowroll.weights.sync.base import Broadcast

if TYPE_CHECKING:
    from torch import Tensor

    from lowroll.model.transformer import Transformer
    from lowroll.quant.formats import QTensor
    from lowroll.weights.sync.update import WeightUpdate

TURNS = 10  # least iterations of its loop for an engine to answer a heartbeat
TURN = 0.25  # seconds that a step waits for an answer


class OpenRequests:
    def __init__(self) -> None:
        self.ended: dict[int, Group] = {}
        self._open: dict[int, QueuedRequest] = {}
        self._outcomes: queue.SimpleQueue[tuple[int, Group | Exception]] = queue.SimpleQueue()
        self._next = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, request: Request) -> QueuedRequest:
        entry = QueuedRequest(self._next, request)
        self._next += 1
        self._open[entry.handle] = entry
        return entry

    def get(self, handle: int) -> QueuedRequest | None:
        return self._open.get(handle)

    def put(self, handle: int, outcome: Group | Exception) -> None:
        """Take an outcome, on the pool's loop. Handle -1 is an error of no request."""
        self._outcomes.put((handle, outcome))

    def has_outcome(self) -> bool:
        return not self._outcomes.empty()

    def wait(self, seconds: float) -> None:
        """Take all outcomes that have come, or wait for one. Raise the first error."""
        try:
            handle, outcome = self._outcomes.get(timeout=seconds)
            while True:
                if isinstance(outcome, Exception) and (handle < 0 or handle in self._open):
                    raise outcome
                if self._open.pop(handle, None) is not None and isinstance(outcome, Group):
                    self.ended[handle] = outcome
                handle, outcome = self._outcomes.get_nowait()
        except queue.Empty:
            return

    def forget(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self._open.pop(handle, None)
            self.ended.pop(handle, None)

    def clear(self) -> None:
        self._open.clear()


class EnginePool:
    """An `Engine` over HTTP.

    urls: with or without /v1. elastic: engines by a DNS name, added to `urls`. alive: called during
    the start and updates, which an exception in it ends. ValueError for engines that do not fit
    together, ServerError when none answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        options: PoolOptions | None = None,
        *,
        elastic: Elastic | None = None,
        resolver: Resolver = resolve,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        if not urls and elastic is None:
            raise ValueError("client.base_url: no engine is named, and no client.elastic.hostname")
        self.options = options or PoolOptions()
        self.closed = False
        self._alive = alive
        self._discovery: Discovery | None = None
        self._requests = OpenRequests()
        self._replicas = ReplicaSet(self.options, self._requests.put)
        self._thread = LoopThread("engine-pool", self.options.heartbeat_s / TURNS)
        start_s = self.options.start_s
        # without fail_fast `begin` only starts tasks that connect
        begin_s = start_s if self.options.fail_fast else MARGIN
        try:
            self.run(self._replicas.begin(urls), begin_s)
            if elastic is not None:
                on_urls = self._replicas.meet
                self._discovery = discovery = Discovery(
                    elastic, lambda urls: self._thread.call(on_urls, urls), resolver
                )
                self._replicas.discovery_error = lambda: discovery.last_error
            until_ready = self._replicas.until_ready(self._requests.has_outcome)
            self.run(until_ready, start_s + MARGIN, alive)
            self._requests.wait(0.0)  # raises the error of an engine that does not fit
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._discovery is not None:
            self._discovery.close()
        try:
            self.run(self._replicas.end(), MARGIN)
        finally:
            self._thread.close()

    @property
    def capabilities(self) -> Capabilities:
        return self.server.capabilities

    @property
    def behavior(self) -> BehaviorTag:
        versions, server_tag = self._replicas.versions, self.server.behavior
        if versions.newest is None:
            return server_tag
        held_policy = versions.held or HeldPolicy(0, frozenset({""}))
        spans = tuple(
            PolicySpan(held_policy.version, digest) for digest in sorted(held_policy.digests)
        )
        return BehaviorTag(
            spans,
            server_tag.weights,
            server_tag.kv_policy,
            server_tag.kv_budget,
            server_tag.kv_dtype,
        )

    @property
    def server(self) -> EngineServer:
        return self._replicas.router.server

    @property
    def models_in_use(self) -> set[str]:
        return {name for replica in self._replicas.replicas for name in replica.models}

    # -- requests ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._requests.ended)

    def add(self, request: Request) -> int:
        self.server.check(request)
        entry = self._requests.add(request)
        self._thread.call(self._replicas.router.add, [entry])
        return entry.handle

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        meanwhile()
        ended_groups = self._requests.ended
        if self._requests and not ended_groups:
            self._turn()
        groups = list(ended_groups.items())
        ended_groups.clear()
        return groups

    def abort(self, handle: int) -> bool:
        entry = self._requests.get(handle)
        if entry is None or entry.ended or entry.aborted:
            return False
        entry.aborted = True
        self._thread.call(self._replicas.router.abort, entry)
        return True

    def so_far(self, handle: int) -> list[PartialSample]:
        entry = self._requests.get(handle)
        return [] if entry is None else self._replicas.router.so_far(entry)

    def generate(
        self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        for i, request in enumerate(requests):
            self.server.check(request, f"requests[{i}].")
        entries = [self._requests.add(request) for request in requests]
        own_handles = {entry.handle for entry in entries}
        if entries:
            self._thread.call(self._replicas.router.add, entries)
        ended_groups = self._requests.ended
        done_groups: dict[int, Group] = {}
        try:
            while len(done_groups) < len(entries):
                self._turn()
                for handle in ended_groups.keys() & own_handles:
                    done_groups[handle] = ended_groups.pop(handle)
                if on_progress is not None:
                    on_progress(len(done_groups), len(entries))
        except BaseException:
            for entry in entries:
                self._thread.call(self._replicas.router.abort, entry)
            self._requests.forget(own_handles)
            raise
        return [done_groups[entry.handle] for entry in entries]

    # -- scores ------------------------------------------------------------------------------------

    def score(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        return [
            scored.logprobs_T for scored in self.score_top(sequences, prompt_lens, 0, temperature)
        ]

    def score_top(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        top: int,
        temperature: float = 1.0,
    ) -> list[Ranked]:
        """Return the log-probs of each response with the `top` likeliest tokens. ValueError for
        what the server does not score."""
        server, seconds = self._replicas.ready(), self.options.timeout_s
        length = server.capabilities.context_length
        check_sequences(sequences, prompt_lens, length, server.vocab_size)
        calls = [
            scoring_call(i, server.scoring(ids, top, temperature), top, seconds)
            for i, ids in enumerate(sequences)
        ]
        # the calls may run one after the other
        answers = self.run(server.http.answers(calls), seconds * (len(calls) + 1))
        return [
            ranked(answer, call, prompt_len, top)
            for answer, call, prompt_len in zip(answers, calls, prompt_lens, strict=True)
        ]

    # -- weights -----------------------------------------------------------------------------------

    def update(
        self, broadcast: Broadcast, superseded: Callable[[], bool] = lambda: False
    ) -> BehaviorTag:
        """Have every engine draw from a broadcast; what is in flight continues.

        Return when all have acknowledged the same version and digest, or when one has and the
        others had as long again: those get no new requests before they have it. If the version is
        not newer than the last one, what is in flight is drawn again.

        superseded: returns whether a newer version exists. Raises `versions.Superseded` when it
        does and an engine no longer finds this one; ServerError when no engine takes it, or their
        weights differ.
        """
        options = self.options
        deadline_s = options.update_s + options.silent_s + options.start_s
        self.run(self._replicas.update(broadcast, superseded), deadline_s, self._alive)
        return self.behavior

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Raise ValueError: a server takes a broadcast (`update`), and no stream."""
        raise ValueError(f"update: {self._replicas.ready().http.url} takes no weights from here")

    def stats(self) -> EngineStats:
        stats: EngineStats = self.run(self._replicas.stats(), self.options.silent_s)
        return stats

    def report(self) -> PoolReport:
        report: PoolReport = self.run(self._replicas.report(), MARGIN)
        return report

    def linear_weights(self) -> Mapping[str, QTensor]:
        return {}

    def first_difference(self, master: Transformer, block: int) -> str | None:
        return None

    def reset_prefix_cache(self) -> None:
        name, token = "reset_prefix_cache", self.options.admin_token
        call = HttpCall("POST", f"/{name}", name, {}, 3 * CONTROL_S, token=token)
        self.run(self._replicas.ask_all(call), call.deadline_s)

    def warm_up(self) -> None:
        """Do nothing: a server warms up before it listens."""

    def release(self, in_flight: InFlight = "keep") -> None:
        """Do nothing: the server keeps its cache. RuntimeError while requests are in flight."""
        if self._requests:
            raise RuntimeError("release: requests are in flight; finish or abort them first")

    def give_up(self) -> None:
        self._requests.clear()
        self._thread.call(self._replicas.router.drop_all)

    def begin(self, call: HttpCall) -> Future[Any]:
        return self._thread.begin(self._replicas.ready().http.answer(call))

    def run(
        self,
        work: Coroutine[Any, Any, Any],
        deadline_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a coroutine on the pool's loop. ServerError when the loop does not answer."""
        try:
            return self._thread.run(work, deadline_s, alive)
        except LoopStalled:
            states = self._replicas.describe()
            raise ServerError(f"the pool's loop did not answer; {states}") from None

    def _turn(self) -> None:
        try:
            self._requests.wait(TURN)
            since, seconds = self._replicas.none_since, self.options.start_s
            if since is not None and time.monotonic() - since > seconds:
                states = self._replicas.describe()
                raise ServerError(f"no engine has answered for {seconds:g} s: {states}")
        except BaseException:
            self.give_up()
            raise
