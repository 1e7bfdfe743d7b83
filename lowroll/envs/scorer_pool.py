"""The scorer pool: worker processes, replaced when a scorer hangs, bloats or crashes.

A failed item gets an error, not a reward of 0, unless the environment scores timeouts
(`overtaxed`):

    kind          what happened to the item                            the worker
    exception     the scorer raised                                    goes on
    invalid       it returned no number, or one that is not finite     goes on
    inapplicable  no reward function applies to it                     goes on
    timeout       it took longer than `time_limit` seconds             is replaced
    memory        it went over `memory_limit_mb` of address space      is replaced
    crash         the process ended under it                           is replaced

Only the current item gets the error; other workers get the rest. Responses scored together
(`Environment.together`) are one item with their summed limit. The clock restarts with every item.
Workers see only `machine.KEEP_ENV` and the passed variables, whose values are masked in their
output. A scorer's processes end with its worker (`reaper`).

A reply must have its item's random id; any other line, as from a scorer that writes to all
descriptors, ends the worker.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from lowroll.envs import child
from lowroll.envs.base import bounded
from lowroll.envs.return_values import InvalidReply, as_messages
from lowroll.envs.worker_output import Output, readable
from lowroll.types import Message, Prompt, RunFailed, Score, ScoreError

START_LIMIT = 60.0  # seconds for a worker's imports
KILL_LIMIT = 5.0  # seconds
MAX_CHUNK = 32  # items
MAX_REPLY = 1 << 20  # bytes of a reply; a longer one is a crash
MAX_MESSAGE = 500  # characters
Spec = tuple[str, dict[str, Any], int]


@dataclass(frozen=True)
class EnvironmentReply:
    """An environment's messages for a conversation; None: it is done."""

    messages: list[Message] | None


Result = Score | ScoreError | EnvironmentReply


@dataclass(frozen=True)
class _Item:
    """A unit of work. size: the number of its results."""

    prompt: Prompt
    encoded: bytes
    size: int = 1

    def named(self, result: Result) -> Result:
        if not isinstance(result, ScoreError):
            return result
        owner = f"env {self.prompt.env!r}, {self.prompt.id}"
        return replace(result, message=f"{owner}: {result.message}")


@dataclass(frozen=True)
class _HeldItem:
    index: int
    reply_id: str


@dataclass
class _Job:
    items: list[_Item]
    pending: deque[int]
    responds: bool = False
    results: dict[int, list[Result]] = field(default_factory=dict)

    def settle(self, index: int, results: Sequence[Result]) -> None:
        self.results[index] = [self.items[index].named(result) for result in results]

    def take_back(self, held: deque[_HeldItem]) -> None:
        self.pending.extendleft(item.index for item in reversed(held))
        held.clear()


class _Worker:
    def __init__(self, setup: bytes, pass_env: Mapping[str, str]) -> None:
        self.process = child.start("lowroll.envs.worker", subprocess.PIPE, pass_env)
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.output = Output(self.process.stderr, pass_env)
        os.set_blocking(self.stdin.fileno(), False)
        os.set_blocking(self.stdout.fileno(), False)
        self.held: deque[_HeldItem] = deque()
        self.overtaxed: dict[str, Score] = {}
        self.doing = ""
        self.ready = self.ended = self.killed = False
        self.outbox, self.inbox = setup, b""
        self.deadline = time.monotonic() + START_LIMIT

    @property
    def late(self) -> bool:
        return (not self.ready or bool(self.held)) and time.monotonic() > self.deadline

    def is_idle(self) -> bool:
        """Return whether it can take a chunk. Output that was not asked for is lost."""
        return self.ready and not self.held and not self.read() and not self.ended

    def hand(self, chunk: dict[int, bytes], time_limit: float) -> None:
        lines = []
        for index, encoded in chunk.items():
            reply_id = secrets.token_hex(8)
            self.held.append(_HeldItem(index, reply_id))
            lines.append(b'{"id": "%s", %s' % (reply_id.encode(), encoded[1:]))
        self.outbox += b'{"items": [' + b", ".join(lines) + b"]}\n"
        self.deadline = time.monotonic() + time_limit

    def write(self) -> None:
        try:
            self.outbox = self.outbox[os.write(self.stdin.fileno(), self.outbox) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.outbox = b""  # `read` sees the end of the worker

    def read(self) -> list[bytes]:
        try:
            data = os.read(self.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        self.ended = not data or len(self.inbox) > MAX_REPLY
        return lines

    def kill(self) -> str:
        """Kill the worker and its processes; return how it ended, "" the second time."""
        if self.killed:
            return ""
        self.killed = True
        has_exited = self.ended and self._wait(0.5)  # lets it exit with its own status
        if not has_exited:
            self.ask_to_end()
            if not self._wait(KILL_LIMIT):
                self.process.kill()  # the reaper did not end in time
        status = self.process.wait(KILL_LIMIT)
        self.stdin.close()
        self.stdout.close()
        last_output = self.output.close()
        ending = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{ending}: {last_output}" if last_output else ending

    def ask_to_end(self) -> None:
        """Send SIGTERM to its reaper, and SIGCONT in case a scorer stopped it."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self.process.send_signal(number)

    def _wait(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


class ScorerPool:
    """A pool of `num_workers` scoring processes; a context manager.

    `env_specs` maps an environment's name to (id, args, seed) for `lowroll.envs.make`. Every worker
    has all environments. ValueError for an unset variable of `pass_env` or too many workers;
    RunFailed when a worker cannot build its environments.
    """

    def __init__(
        self,
        env_specs: Mapping[str, Spec],
        num_workers: int = 2,
        time_limit: float = 10.0,
        memory_limit_mb: int = 2048,
        pass_env: Sequence[str] = (),
    ) -> None:
        for setting, value in (
            ("num_workers", num_workers),
            ("time_limit", time_limit),
            ("memory_limit_mb", memory_limit_mb),
        ):
            if not value > 0:
                raise ValueError(f"{setting} must be positive, got {value}")
        child.check_count(num_workers)
        self._pass_env = child.named(pass_env)
        self.names = frozenset(env_specs)
        self.time_limit, self.memory_limit_mb = time_limit, memory_limit_mb
        self.replaced = 0
        self._together: frozenset[str] = frozenset()
        setup = {
            "specs": {name: list(spec) for name, spec in env_specs.items()},
            "memory_limit_mb": memory_limit_mb,
        }
        self._setup = json.dumps(setup).encode() + b"\n"
        self._lock = threading.Lock()
        # Linux kills a worker with the thread that started it, so this thread lives as long as the
        # pool.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="scorer-starter")
        self._workers: list[_Worker] = []
        try:
            self._workers = [self._start() for _ in range(num_workers)]
            while not all(worker.ready for worker in self._workers):
                self._exchange(_Job([], deque()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers; bounded and idempotent."""
        for worker in self._workers:
            if not worker.killed:
                worker.ask_to_end()
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._starter.shutdown(wait=False)

    def score(
        self,
        items: Sequence[tuple[Prompt, str | list[Message]]],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Score | ScoreError]:
        """Score (prompt, response) and (prompt, messages) pairs in order.

        ValueError, before any scoring, for a prompt of an unknown environment, or with `info` that
        is not JSON. Only the last `base.MAX_TEXT` characters of each text count.
        """
        results = self._run(self._joined(items), responds=False, on_progress=on_progress)
        return [result for result in results if isinstance(result, Score | ScoreError)]

    def respond(
        self, items: Sequence[tuple[Prompt, list[Message]]]
    ) -> list[list[Message] | None | ScoreError]:
        encoded = [
            _Item(prompt, self._encode(prompt, "respond", messages)) for prompt, messages in items
        ]
        results = self._run(encoded, responds=True)
        return [
            result.messages if isinstance(result, EnvironmentReply) else result
            for result in results
            if isinstance(result, EnvironmentReply | ScoreError)
        ]

    def _joined(self, items: Sequence[tuple[Prompt, str | list[Message]]]) -> list[_Item]:
        """Join neighbours with the same prompt object where their environment scores responses
        together."""
        work_items: list[_Item] = []
        for _, consecutive in groupby(items, key=lambda item: id(item[0])):
            (prompt, *_), responses = zip(*consecutive, strict=True)
            if prompt.env in self._together:
                encoded = self._encode(prompt, "together", responses)
                work_items.append(_Item(prompt, encoded, size=len(responses)))
                continue
            for response in responses:
                work_items.append(_Item(prompt, self._encode(prompt, "score", response)))
        return work_items

    def _run(
        self,
        items: list[_Item],
        responds: bool,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Result]:
        with self._lock:
            if not self._workers:
                raise RuntimeError("the scorer pool is closed")
            pending = deque(range(len(items)))
            job = _Job(items, pending, responds)
            try:
                while (done := len(job.results)) < len(items):
                    self._exchange(job)
                    if on_progress is not None and len(job.results) > done:
                        on_progress(len(job.results), len(items))
            finally:  # an interrupted call leaves no chunks behind
                for i, worker in enumerate(self._workers):
                    if worker.held:
                        self._replace(i)
        return [result for index in range(len(items)) for result in job.results[index]]

    def _encode(self, prompt: Prompt, ask: str, said: Any) -> bytes:
        if prompt.env not in self.names:
            raise ValueError(
                f"prompt {prompt.id!r} is of environment {prompt.env!r}; the pool has: "
                f"{', '.join(sorted(self.names))}"
            )
        item = {"prompt": vars(prompt), "ask": ask, "said": _bounded_texts(said)}
        try:
            return json.dumps(item, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"prompt {prompt.id!r} of environment {prompt.env!r} is not JSON data: {error}"
            ) from error

    def _exchange(self, job: _Job) -> None:
        for worker in self._workers:
            if job.pending and worker.is_idle():
                self._hand_chunk(worker, job)
        self._wait()
        for i, worker in enumerate(self._workers):
            lines = [] if worker.ended else worker.read()
            for line in lines:
                if not self._take(worker, line, job):
                    break
            if worker.ended or worker.late:
                self._give_up(worker, job)
                self._replace(i)

    def _hand_chunk(self, worker: _Worker, job: _Job) -> None:
        """Give a worker at most half its share of what is pending, so that none waits for
        the last."""
        size = min(MAX_CHUNK, max(1, len(job.pending) // (2 * len(self._workers))))
        chunk = [job.pending.popleft() for _ in range(size)]
        items = {index: job.items[index].encoded for index in chunk}
        worker.hand(items, self._limit(job.items[chunk[0]]))

    def _limit(self, item: _Item) -> float:
        return self.time_limit * item.size

    def _wait(self) -> None:
        if any(worker.ended for worker in self._workers):
            return
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.stdout, selectors.EVENT_READ)
                if worker.outbox:
                    selector.register(worker.stdin, selectors.EVENT_WRITE, worker.write)
                if not worker.output.ended:
                    selector.register(worker.output.pipe, selectors.EVENT_READ, worker.output.read)
            deadline = min(
                (w.deadline for w in self._workers if w.held or not w.ready), default=0.0
            )
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.data is not None:
                    key.data()

    def _take(self, worker: _Worker, line: bytes, job: _Job) -> bool:
        """Process a reply line. Return False to drop the worker's later lines: it counts as
        crashed."""
        reply = _decode(line)
        if not worker.ready:
            self._take_start(worker, reply)
            return True
        if not worker.held or reply.get("id") != worker.held[0].reply_id:
            worker.ended = True
            return False
        if "doing" in reply:
            worker.doing = self._said(reply["doing"])
            return True
        item = job.items[worker.held[0].index]
        results = _parse_results(reply, item.size, job.responds)
        if not results:
            worker.ended = True
            return False
        self._take_results(worker, list(map(self._readable, results)), job)
        return True

    def _take_results(self, worker: _Worker, results: list[Result], job: _Job) -> None:
        job.settle(worker.held.popleft().index, results)
        worker.doing = ""
        if worker.held:
            next_item = job.items[worker.held[0].index]
            worker.deadline = time.monotonic() + self._limit(next_item)
        if isinstance(results[0], ScoreError) and results[0].kind == "memory":
            job.take_back(worker.held)  # the worker ends itself
            worker.ended = True

    def _take_start(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if reply.get("ready") is True:
            worker.ready = True
            worker.overtaxed = {env: Score(**score) for env, score in reply["overtaxed"].items()}
            self._together = frozenset(reply["together"])
            return
        if "failed" not in reply:
            raise RunFailed(f"a scoring worker could not start: {worker.kill()}")
        raise RunFailed(
            f"a scoring worker could not start: {self._said(reply['failed'])} (its memory is "
            f"limited to {self.memory_limit_mb} MB by score.memory_limit_mb)"
        )

    def _give_up(self, worker: _Worker, job: _Job) -> None:
        """Kill an ended or late worker. Only its current item fails."""
        is_late = not worker.ended
        ending = worker.kill()
        if not worker.ready:
            why = f"not ready after {START_LIMIT:g} s ({ending})" if is_late else ending
            raise RunFailed(f"a scoring worker could not start: {why}")
        if worker.held:
            index = worker.held.popleft().index
            item = job.items[index]
            work = f", in {worker.doing}" if worker.doing else ""
            result: Result = ScoreError("crash", f"the scorer's process ended{work}: {ending}")
            if is_late:
                result = self._timeout(worker, job, item, work)
            job.settle(index, [result] * item.size)
        job.take_back(worker.held)

    def _timeout(self, worker: _Worker, job: _Job, item: _Item, work: str) -> Score | ScoreError:
        if not job.responds and item.prompt.env in worker.overtaxed:
            return worker.overtaxed[item.prompt.env]
        missing_reply = "answer" if job.responds else "score"
        return ScoreError("timeout", f"no {missing_reply} after {self._limit(item):g} s{work}")

    def _readable(self, result: Result) -> Result:
        if not isinstance(result, ScoreError):
            return result
        return replace(result, message=self._said(result.message))

    def _said(self, text: object) -> str:
        return readable(str(text), self._pass_env)[:MAX_MESSAGE]

    def _start(self) -> _Worker:
        return self._starter.submit(_Worker, self._setup, self._pass_env).result(START_LIMIT)

    def _replace(self, i: int) -> None:
        self._workers[i].kill()
        self._workers[i] = self._start()
        self.replaced += 1


def _decode(line: bytes) -> dict[str, Any]:
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return reply if isinstance(reply, dict) else {}


def _parse_results(reply: dict[str, Any], size: int, responds: bool) -> list[Result]:
    if responds and reply.get("error") not in ("exception", "memory", "invalid"):
        return _parse_messages(reply)
    replies = reply.get("scores", [reply] * size)
    if not isinstance(replies, list) or len(replies) != size:
        return []
    scores = [_parse_score(one) for one in replies if isinstance(one, dict)]
    results: list[Result] = [score for score in scores if score is not None]
    return results if len(results) == size else []


def _parse_score(reply: dict[str, Any]) -> Score | ScoreError | None:
    reward, metrics, kind = reply.get("reward"), reply.get("metrics"), reply.get("error")
    extra = reply.get("extra")
    if not isinstance(extra, dict | None):
        return None
    if kind == "exception" or kind == "memory" or kind == "invalid":
        return ScoreError(kind, str(reply.get("message")))
    if kind == "inapplicable" and isinstance(metrics, dict):
        return ScoreError(kind, str(reply.get("message")), metrics, extra)
    if isinstance(reward, float) and isinstance(metrics, dict):
        return Score(reward, metrics, extra)
    return None


def _bounded_texts(said: Any) -> Any:
    if isinstance(said, str):
        return bounded(said)
    if isinstance(said, dict):
        return {key: bounded(v) if isinstance(v, str) else v for key, v in said.items()}
    return list(map(_bounded_texts, said))


def _parse_messages(reply: dict[str, Any]) -> list[Result]:
    try:
        return [EnvironmentReply(as_messages(reply["messages"]))]
    except (InvalidReply, KeyError):
        return []
