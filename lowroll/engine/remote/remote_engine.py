"""An engine at the end of a wire: `engine.base.Engine` over HTTP.

    engine = connect("http://127.0.0.1:8000")          # lowroll's own server, or a vLLM
    groups = engine.generate([Request(prompt_ids=[...], n=8, max_tokens=64, seed=7)])

`RemoteEngine` has what all servers share: requests in flight, their answers, aborts. Which body a
server wants and which policy it draws from is said by a `Dialect`; `engine.remote.vllm_engine` adds a
vLLM's process, probe and updates.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowroll.engine.base import Capabilities, EngineStats, InFlight, PartialSample, Ranked
from lowroll.engine.remote.http_client import BlockingHttpClient, HttpCall, ServerError, parse_json
from lowroll.engine.remote.protocol import (
    PATH,
    Origin,
    ResponseAssembler,
    most_bytes,
    prompt_logprobs,
)
from lowroll.engine.remote.server_base import Dialect
from lowroll.engine.request import validate
from lowroll.types import BehaviorTag, Group, Request

if TYPE_CHECKING:
    from torch import Tensor

    from lowroll.quant.formats import QTensor
    from lowroll.weights.update import WeightUpdate

TURN = 0.25  # seconds that a step waits for an answer before it returns without one

SCORE_BYTES = 256  # of a token's log-prob in an answer, and of each of its likeliest


@dataclass(frozen=True)
class ServedName:
    """The model behind an address: its name there, and the folder or hub id that it is told to
    be."""

    name: str
    root: str


@dataclass
class OpenRequest:
    """A request under way."""

    request: Request
    arrivals: ResponseAssembler
    behavior: BehaviorTag
    model: str
    answer: Future[None]


class RemoteEngine:
    """Requests in, rollouts with their own log-probs out, over HTTP. One thread calls everything.

    request_s: until the answer of one request that was sent, or of an update, in seconds; what
    waits for a turn (`HttpClient.concurrency`) has not begun. stream: tokens are read as they are
    drawn, so that `so_far` and aborted requests have them; it costs the server and this process an
    event a token. ServerError (a RunFailed) says which request failed and why; then every request
    in flight is given up. `EngineLost` is one whose engine has ended.
    """

    def __init__(
        self,
        client: BlockingHttpClient,
        dialect: Dialect,
        served: ServedName,
        *,
        request_s: float = 1200.0,
        stream: bool = False,
    ) -> None:
        self.client = client
        self.dialect = dialect
        self.served = served
        self.request_s = request_s
        self.stream = stream
        self._flights: dict[int, OpenRequest] = {}
        self._answered: queue.SimpleQueue[int] = queue.SimpleQueue()  # handles, as answers come
        self._ended: dict[int, Group] = {}
        self._next = 0

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what is in flight and close the connections. The server goes on."""
        self._give_up()
        self.client.close()

    # -- requests ----------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """Return the supported features, known from the probe at the start."""
        return self.dialect.capabilities

    @property
    def behavior(self) -> BehaviorTag:
        """The policy that the next request is drawn from."""
        return self.dialect.behavior

    def add(self, request: Request) -> int:
        """Send a request; returns its handle. ValueError names the wrong field."""
        self._validate(request, "")
        return self._send(request)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        """Wait a moment for answers. Returns the requests that have ended, by handle."""
        meanwhile()
        if not self._ended:
            self._turn()
        ended = list(self._ended.items())
        self._ended.clear()
        return ended

    def abort(self, handle: int) -> bool:
        """Give a request up now: its connection is closed, upon which the server ends it. Its group
        comes back with finish reason "abort" and what has been read of it. False if it had
        ended."""
        flight = self._flights.get(handle)
        if flight is None or flight.answer.done():
            return False
        flight.answer.cancel()
        del self._flights[handle]
        self._ended[handle] = flight.arrivals.aborted(self._origin(flight))
        return True

    def so_far(self, handle: int) -> list[PartialSample]:
        """Return what each sample of a request has drawn, as far as it was read: nothing before the
        end without `stream`. [] after its group was returned."""
        flight = self._flights.get(handle)
        if flight is None:
            return []
        drawn = []
        for one in flight.arrivals.samples:
            ids, logprobs, top = one.read()
            shown = top if flight.request.top_logprobs else None
            drawn.append(PartialSample(ids, logprobs, one.finish_reason, shown, one.stop_reason))
        return drawn

    def generate(
        self, requests: list[Request], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Group]:
        """The groups of all requests, in their order; as many run together as the client may open.
        Checks every request before it sends any."""
        for i, request in enumerate(requests):
            self._validate(request, f"requests[{i}].")
        handles = [self._send(request) for request in requests]
        mine = set(handles)
        done: dict[int, Group] = {}
        try:
            while len(done) < len(handles):
                self._turn()
                done |= {handle: self._ended.pop(handle) for handle in self._ended.keys() & mine}
                if on_progress is not None:
                    on_progress(len(done), len(handles))
        except BaseException:
            for handle in handles:
                self.abort(handle)
                self._ended.pop(handle, None)
            raise
        return [done[handle] for handle in handles]

    @property
    def has_work(self) -> bool:
        """Return whether `step` has something to wait for or to return."""
        return bool(self._flights or self._ended)

    def _validate(self, request: Request, where: str) -> None:
        length = self.capabilities.context_length
        try:
            validate(
                request,
                vocab_size=self.dialect.vocab_size,
                context_length=length,
                cache_tokens=length,
                has_tokenizer="stop_strings" in self.capabilities.sampler,
            )
            self.dialect.check(request)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def _send(self, request: Request) -> int:
        handle = self._next
        self._next += 1
        what = f"request {request.id or handle}"
        model = self.dialect.model
        stop_ids = self.dialect.stop_ids(request)
        arrivals = ResponseAssembler(request, what, self.dialect.vocab_size, model, stop_ids)
        body = self.dialect.body(request) | ({"stream": True} if self.stream else {})
        # a second try repeats id, seed and model; of a stream the first may have been read
        call = HttpCall(
            "POST", PATH, what, body, self.request_s, most_bytes(request), again=not self.stream
        )
        answer = self.client.begin(self._answer(call, arrivals))
        self._flights[handle] = OpenRequest(request, arrivals, self.behavior, model, answer)
        answer.add_done_callback(lambda _: self._answered.put(handle))
        return handle

    async def _answer(self, call: HttpCall, arrivals: ResponseAssembler) -> None:
        if self.stream:
            await self.client.body(call, arrivals.on_line)
        else:
            arrivals.take(parse_json(await self.client.body(call), call.what))

    def _turn(self) -> None:
        """Wait for an answer, and take those that have come. An error gives up all in flight."""
        try:
            handle = self._answered.get(timeout=TURN if self._flights else 0.0)
            while True:
                self._land(handle)
                handle = self._answered.get_nowait()
        except queue.Empty:
            return
        except BaseException:
            self._give_up()
            raise

    def _land(self, handle: int) -> None:
        flight = self._flights.pop(handle, None)
        if flight is None:
            return  # it was given up
        try:
            flight.answer.result(timeout=0)
        except CancelledError:
            raise ServerError(f"{flight.arrivals.what}: the client was closed") from None
        self._ended[handle] = flight.arrivals.group(self._origin(flight))

    def _origin(self, flight: OpenRequest) -> Origin:
        dialect = self.dialect
        return lambda i, one: (
            dialect.tag(flight.request, flight.behavior, i, one),
            dialect.evictions(one),
        )

    def _give_up(self) -> None:
        for flight in self._flights.values():
            flight.answer.cancel()
        self._flights.clear()

    # -- scores ------------------------------------------------------------------------------------

    def score(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        """Log-probs of each sequence's response, as the server computes them for a prompt."""
        return [one.logprobs_T for one in self.score_top(sequences, prompt_lens, 0, temperature)]

    def score_top(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        top: int,
        temperature: float = 1.0,
    ) -> list[Ranked]:
        """The same, with the `top` likeliest tokens at each place. ValueError for a temperature that
        the server does not score at, and for a sequence that does not fit."""
        self._check_sequences(sequences, prompt_lens)
        asked = [self._scoring(i, ids, top, temperature) for i, ids in enumerate(sequences)]
        answers = [self.client.begin(self.client.answer(call)) for call in asked]
        try:
            return [
                _ranked(answer.result(self._patience(len(asked))), call, n, top)
                for answer, call, n in zip(answers, asked, prompt_lens, strict=True)
            ]
        finally:
            for answer in answers:
                answer.cancel()

    def _patience(self, count: int) -> float:
        """Seconds in which all of `count` requests have had their turn and their deadline."""
        return self.request_s * (count + 1)

    def _scoring(self, i: int, ids: list[int], top: int, temperature: float) -> HttpCall:
        body = self.dialect.scoring(ids, top, temperature)
        most = (1 << 16) + SCORE_BYTES * (top + 1) * len(ids)
        return HttpCall("POST", PATH, f"score of sequences[{i}]", body, self.request_s, most, True)

    def _check_sequences(self, sequences: Sequence[list[int]], prompt_lens: Sequence[int]) -> None:
        longest = self.capabilities.context_length
        for i, (ids, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True)):
            if not 1 <= prompt_len < len(ids) or len(ids) > longest:
                raise ValueError(
                    f"sequences[{i}]: {len(ids)} tokens with a prompt of {prompt_len} cannot be "
                    f"scored in a context of {longest}"
                )
            if min(ids) < 0 or max(ids) >= self.dialect.vocab_size:
                raise ValueError(
                    f"sequences[{i}]: an id is outside the vocabulary of {self.dialect.vocab_size}"
                )

    # -- weights, and the rest ---------------------------------------------------------------------

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """ValueError: the server's weights are its own."""
        raise ValueError(f"update: the engine at {self.client.url} takes no weights from here")

    def stats(self) -> EngineStats:
        """Return the statistics that the server's /metrics state."""
        text = self.client.ask(HttpCall("GET", "/metrics", "the metrics", text=True, again=True))
        return self.dialect.stats(text)

    def linear_weights(self) -> Mapping[str, QTensor]:
        """None here: they lie in another process."""
        return {}

    def reset_prefix_cache(self) -> None:
        """Have the server forget the pages of shared prompts."""
        self.client.post("/reset_prefix_cache", {}, "reset_prefix_cache")

    def release(self, in_flight: InFlight = "keep") -> None:
        """Do nothing: the memory of the cache is the server's, which keeps it. RuntimeError while
        requests are in flight."""
        if self._flights:
            raise RuntimeError("release: requests are in flight; finish or abort them first")


def _ranked(answer: Any, call: HttpCall, prompt_len: int, top: int) -> Ranked:
    import torch

    ids = call.body["prompt"]
    rows = prompt_logprobs(answer, ids, call.what)[prompt_len - 1 :]
    response = ids[prompt_len:]
    likeliest = [
        sorted((rank, token, logprob) for token, (logprob, rank) in row.items() if rank <= top)
        for row in rows
    ]
    if any(len(row) < top for row in likeliest):
        raise ServerError(f"{call.what}: {top} likeliest tokens a place were asked for")
    likeliest = [row[:top] for row in likeliest]
    return Ranked(
        torch.tensor([row[t][0] for row, t in zip(rows, response, strict=True)]),
        torch.tensor([[token for _, token, _ in row] for row in likeliest], dtype=torch.int64),
        torch.tensor([[p for _, _, p in row] for row in likeliest], dtype=torch.float32),
    )
