"""`engine.base.Engine` for engines at the end of wires, one or several, without torch.

    engine = connect("http://127.0.0.1:8000")          # a pool of one
    pool = EnginePool(["http://a:8000", "http://b:8000/v1"], token=..., admin_token=...)
    pool.update(broadcast)                             # all draw from it, or are evicted
    groups = pool.generate(requests)

A `replica` is one engine and its health, and a `replica_set` all of them. The `router` sends requests to
replicas, the `weight_broadcaster` weights, and `versions` remembers which weights all replicas acknowledged;
`discovery` finds engines by DNS. All of it runs on one event loop in a thread of its own. Callers are plain
threads, one at a time.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lowroll.engine.base import Capabilities, EngineStats, InFlight, PartialSample, Ranked
from lowroll.engine.remote.discovery import Discovery, Elastic, Resolver, resolve
from lowroll.engine.remote.event_loop import MARGIN, LoopStalled, LoopThread
from lowroll.engine.remote.http_client import HttpCall, ServerError
from lowroll.engine.remote.protocol import check_sequences, ranked, scoring_call
from lowroll.engine.remote.replica import Connect, PoolTerms, QueuedRequest
from lowroll.engine.remote.replica_set import PoolReport, ReplicaSet
from lowroll.engine.remote.server_base import (
    CONTROL_S,
    HeldPolicy,
    Published,
    ServedName,
    check_request,
)
from lowroll.types import BehaviorTag, Group, PolicySpan, Request

if TYPE_CHECKING:
    from torch import Tensor

    from lowroll.quant.formats import QTensor
    from lowroll.weights.sync.update import WeightUpdate

TURNS = 10  # of its loop that an engine has at least to answer a heartbeat
TURN = 0.25  # seconds that a step waits for an answer before it returns without one


class OpenRequests:
    """The requests that a pool's caller waits for, and the outcomes that have come."""

    def __init__(self) -> None:
        self.ended: dict[int, Group] = {}
        self._open: dict[int, QueuedRequest] = {}
        self._outcomes: queue.SimpleQueue[tuple[int, Group | Exception]] = queue.SimpleQueue()
        self._next = 0

    def __bool__(self) -> bool:
        """Return whether an outcome is waited for."""
        return bool(self._open)

    def add(self, request: Request) -> QueuedRequest:
        """Open a request under a new handle."""
        entry = QueuedRequest(self._next, request)
        self._next += 1
        self._open[entry.handle] = entry
        return entry

    def get(self, handle: int) -> QueuedRequest | None:
        """Return an open request."""
        return self._open.get(handle)

    def put(self, handle: int, outcome: Group | Exception) -> None:
        """Take an outcome, on the pool's loop. Handle -1 is an error of no request."""
        self._outcomes.put((handle, outcome))

    def has_outcome(self) -> bool:
        """Return whether an outcome has come."""
        return not self._outcomes.empty()

    def wait(self, seconds: float) -> None:
        """Wait for an outcome, and take all that have come. Raises the first error."""
        try:
            handle, outcome = self._outcomes.get(timeout=seconds)
            while True:
                self._land(handle, outcome)
                handle, outcome = self._outcomes.get_nowait()
        except queue.Empty:
            return

    def forget(self, handles: Iterable[int]) -> None:
        """Forget requests, and their groups if they have ended."""
        for handle in handles:
            self._open.pop(handle, None)
            self.ended.pop(handle, None)

    def clear(self) -> None:
        """Forget all open requests."""
        self._open.clear()

    def _land(self, handle: int, outcome: Group | Exception) -> None:
        if isinstance(outcome, Exception) and (handle < 0 or handle in self._open):
            raise outcome
        if self._open.pop(handle, None) is not None and isinstance(outcome, Group):
            self.ended[handle] = outcome


class EnginePool:
    """Requests in, rollouts with their own log-probs out, over HTTP.

    urls: with or without /v1. token: of clients; admin_token: of control routes, for weights.
    timeout_s: of one request at one engine. model: that all must serve, unless `check_model` is off. elastic:
    engines by a name in DNS, beside `urls`. start_s: until the first engine answers, and until one
    does when none is left. silent_s: the longest that a silent engine holds its requests. update_s:
    until the first engine has taken new weights; the others have `silent_s` more before they are
    evicted. concurrency: requests open at one engine. folder: of the model, where a vLLM's name of
    it does not lead there. in_flight: whether what is in flight at an update goes on or is replayed
    by the engines, which must be lowroll's own then. stream: tokens are read as they are drawn, so
    that `so_far` and aborted requests have them; it costs the server and this process an event a
    token. fail_fast: the first error is raised and gives up all that is in flight, instead of asking
    another engine; engines are neither watched nor held against the versions that the pool knows.
    alive: called while the first engine is waited for, or an update; what it raises ends the wait.
    connect: to the server of an engine (`replica.connect_server`). lost: says why the process of the
    engine has ended, where one can know.

    ValueError for engines that do not fit together, ServerError when none answers; either names the
    address and what it said last.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        admin_token: str | None = None,
        timeout_s: float = 1200.0,
        model: str | None = None,
        check_model: bool = True,
        elastic: Elastic | None = None,
        start_s: float = 600.0,
        silent_s: float = 30.0,
        update_s: float = 600.0,
        concurrency: int = 256,
        folder: Path | None = None,
        in_flight: InFlight = "keep",
        stream: bool = False,
        fail_fast: bool = False,
        resolver: Resolver = resolve,
        alive: Callable[[], None] = lambda: None,
        connect: Connect | None = None,
        lost: Callable[[], str | None] | None = None,
    ) -> None:
        if not urls and elastic is None:
            raise ValueError("client.base_url: no engine is named, and no client.elastic.hostname")
        self._terms = PoolTerms(
            token, admin_token, model, check_model, folder, concurrency, timeout_s, silent_s,
            update_s, start_s, in_flight, stream, fail_fast, connect, lost,
        )  # fmt: skip
        self._alive = alive
        self._closed = False
        self._discovery: Discovery | None = None
        self._requests = OpenRequests()
        self._set = ReplicaSet(self._terms, self._requests.put)
        self._thread = LoopThread("engine-pool", self._terms.heartbeat_s / TURNS)
        try:
            self._do(self._set.begin(urls), start_s if fail_fast else MARGIN)
            if elastic is not None:
                self._discovery = found = Discovery(elastic, self._found, resolver)
                self._set.discovery_error = lambda: found.last_error
            until_ready = self._set.until_ready(self._requests.has_outcome)
            self._do(until_ready, start_s + MARGIN, alive)
            self._requests.wait(0.0)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is in flight and close the connections. The engines go on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._discovery is not None:
            self._discovery.close()
        try:
            self._do(self._set.end(), MARGIN)
        finally:
            self._thread.close()

    @property
    def capabilities(self) -> Capabilities:
        """Return the features that every engine supports."""
        able: Capabilities = self.dialect.capabilities
        return able

    @property
    def behavior(self) -> BehaviorTag:
        """Return the policy that the next request is drawn from."""
        versions, told = self._set.versions, self.dialect.behavior
        if versions.newest is None:
            return told
        held = versions.held or HeldPolicy(0, frozenset({""}))
        spans = tuple(PolicySpan(held.version, digest) for digest in sorted(held.digests))
        return BehaviorTag(spans, told.weights, told.kv_policy, told.kv_budget, told.kv_dtype)

    @property
    def dialect(self) -> Any:
        """Return the dialect of the first engine that was met."""
        return self._set.router.dialect

    @property
    def served(self) -> ServedName:
        """Return the names of the model that the first engine serves."""
        return self._set.ready()[1].served

    # -- requests ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to wait for or to return."""
        return bool(self._requests or self._requests.ended)

    def add(self, request: Request) -> int:
        """Send a request; returns its handle. ValueError names the wrong field."""
        check_request(request, self.dialect)
        entry = self._requests.add(request)
        self._thread.call(self._set.router.add, [entry])
        return entry.handle

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        """Wait a moment for answers. Returns the requests that have ended, by handle; [] at once
        when nothing is in flight."""
        meanwhile()
        ended = self._requests.ended
        if self._requests and not ended:
            self._turn()
        found = list(ended.items())
        ended.clear()
        return found

    def abort(self, handle: int) -> bool:
        """Give a request up: its connection is closed, upon which the engine ends it, and its group
        comes back with finish reason "abort". False if it had ended."""
        entry = self._requests.get(handle)
        if entry is None or entry.ended or entry.aborted:
            return False
        entry.aborted = True
        self._thread.call(self._set.router.abort, entry)
        return True

    def so_far(self, handle: int) -> list[PartialSample]:
        """Return what each sample of a request has drawn, as far as it was read: nothing before the
        end without `stream`. [] after its group was returned."""
        entry = self._requests.get(handle)
        return [] if entry is None else self._set.router.so_far(entry)

    def generate(
        self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        """Return the groups of all requests, in their order. Checks every request before it sends any."""
        for i, request in enumerate(requests):
            check_request(request, self.dialect, f"requests[{i}].")
        entries = [self._requests.add(request) for request in requests]
        mine = {entry.handle for entry in entries}
        if entries:
            self._thread.call(self._set.router.add, entries)
        ended = self._requests.ended
        done: dict[int, Group] = {}
        try:
            while len(done) < len(entries):
                self._turn()
                done |= {handle: ended.pop(handle) for handle in ended.keys() & mine}
                if on_progress is not None:
                    on_progress(len(done), len(entries))
        except BaseException:
            for entry in entries:
                self._thread.call(self._set.router.abort, entry)
            self._requests.forget(mine)
            raise
        return [done[entry.handle] for entry in entries]

    # -- scores ------------------------------------------------------------------------------------

    def score(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Return the log-probs of each sequence's response, as an engine computes them for a prompt."""
        return [one.logprobs_T for one in self.score_top(sequences, prompt_lens, 0, temperature)]

    def score_top(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        top: int,
        temperature: float = 1.0,
    ) -> list[Ranked]:
        """Return the same, with the `top` likeliest tokens at each place. ValueError for a temperature
        that the server does not score at, and for a sequence that does not fit."""
        replica, server = self._set.ready()
        dialect, seconds = server.dialect, self._terms.timeout_s
        length = dialect.capabilities.context_length
        check_sequences(sequences, prompt_lens, length, dialect.vocab_size)
        calls = [
            scoring_call(i, dialect.scoring(ids, top, temperature), top, seconds)
            for i, ids in enumerate(sequences)
        ]
        # each has had its turn and its deadline by then
        answers = self._do(self._set.ask(replica, calls), seconds * (len(calls) + 1))
        return [
            ranked(answer, call, prompt_len, top)
            for answer, call, prompt_len in zip(answers, calls, prompt_lens, strict=True)
        ]

    # -- weights -----------------------------------------------------------------------------------

    def update(
        self, broadcast: Published, superseded: Callable[[], bool] = lambda: False
    ) -> BehaviorTag:
        """Have every engine draw from a broadcast; what is in flight goes on, and its spans say so.

        All are told at once. Returns when they have acknowledged the same version and digest, or when
        one has and the others have had as long again: those draw nothing new before they have it,
        too, and are evicted when they are silent. A version that is not newer than the last one
        takes its place: what is in flight is then drawn again. superseded: whether another version
        is to be told instead by now; asked when an engine does not find this one, and while none has
        taken it. `versions.Superseded` when it is. ServerError when no engine takes it, or when they
        hold different weights afterwards.
        """
        terms = self._terms
        longest = terms.update_s + terms.silent_s + terms.start_s
        self._do(self._set.update(broadcast, superseded), longest, self._alive)
        return self.behavior

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Raise ValueError: an engine at the end of a wire takes a broadcast (`update`), and no stream."""
        raise ValueError(f"update: {self._set.ready()[0].url} takes no weights from here")

    def stats(self) -> EngineStats:
        """Add up the statistics that the engines state in their metrics."""
        found: EngineStats = self._do(self._set.stats(), self._terms.silent_s)
        return found

    def report(self) -> PoolReport:
        """Report every engine that is there or expected."""
        found: PoolReport = self._do(self._set.report(), MARGIN)
        return found

    def linear_weights(self) -> Mapping[str, QTensor]:
        """Return none: they lie in other processes."""
        return {}

    def reset_prefix_cache(self) -> None:
        """Have the engines forget the pages of shared prompts."""
        what, admin = "reset_prefix_cache", self._terms.admin
        call = HttpCall("POST", f"/{what}", what, {}, 3 * CONTROL_S, token=admin)
        self.ask(call)

    def release(self, in_flight: InFlight = "keep") -> None:
        """Do nothing: the memory of a cache is its server's, which keeps it. RuntimeError while
        requests are in flight."""
        if self._requests:
            raise RuntimeError("release: requests are in flight; finish or abort them first")

    def ask(self, call: HttpCall) -> list[Any]:
        """Return what each engine that works answers to a call."""
        return self._do(self._set.ask_all(call), call.deadline_s)

    # -- inside ------------------------------------------------------------------------------------

    def _do(
        self,
        work: Coroutine[Any, Any, Any],
        deadline_s: float,
        alive: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a coroutine on the loop and return its result."""
        try:
            return self._thread.run(work, deadline_s, alive)
        except LoopStalled:
            told = self._set.describe()
            raise ServerError(f"the pool's loop did not answer; {told}") from None

    def _turn(self) -> None:
        """Wait for an answer, and take those that have come. An error gives up all in flight."""
        try:
            self._requests.wait(TURN)
            since, seconds = self._set.none_since, self._terms.start_s
            if since is not None and time.monotonic() - since > seconds:
                told = self._set.describe()
                raise ServerError(f"no engine has answered for {seconds:g} s: {told}")
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._requests.clear()
        self._thread.call(self._set.router.drop_all)

    def _found(self, urls: list[str]) -> None:
        """Take the addresses that discovery found, on its thread."""
        self._thread.call(self._set.meet, urls)
