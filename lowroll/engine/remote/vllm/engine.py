"""One vLLM that takes weights as a stream, started here or attached to (docs/vllm.md)."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowroll.engine.base import InFlight
from lowroll.engine.remote.http_client import EngineLost, HttpClient, ServerError
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions
from lowroll.engine.remote.verify import Learner, NotArrived, Verifier
from lowroll.engine.remote.vllm.probe import ProbedVllm, probe
from lowroll.engine.remote.vllm.process import VllmProcess
from lowroll.engine.remote.vllm.server import VllmServer, model_folder
from lowroll.engine.remote.vllm.weights import PauseMode, VllmWeights, Way, update_kind
from lowroll.types import BehaviorTag, PolicySpan

if TYPE_CHECKING:
    from lowroll.weights.sync.update import WeightUpdate

_log = logging.getLogger(__name__).info

BASE = "policy"
SILENT_S = 180.0  # six heartbeats; also bounds the first calls
BOUND = 0.5  # nats a token between a format and the learner
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters in vLLM 0.20 and newer
ADAPTERS_TOGETHER = 2  # an older version's requests may still run


class VllmEngine(EnginePool):
    """A pool of one vLLM, made by `start` or `attach`.

    verify: returns the log-probs of ids[1:] under the learner; default those of the update's own
    model, if it is in this process. bound: the engine's largest accepted distance from them, in
    nats a token. lora_rank, way: as of `start`.
    """

    def __init__(
        self,
        url: str,
        folder: str | Path | None,
        *,
        token: str | None = None,
        exchange: Path | None = None,
        lora_rank: int | None = None,
        way: Way | None = "folder",
        process: VllmProcess | None = None,
        dtype: str | None = None,
        verify: Learner | None = None,
        bound: float = BOUND,
        concurrency: int = 256,
        request_s: float = 1200.0,
        stream: bool = False,
    ) -> None:
        self.url = url
        self.process = process
        self.request_s = request_s
        self._verify = verify
        self._weights: VllmWeights | None = None

        async def meet(http: HttpClient, options: PoolOptions) -> VllmServer:
            from lowroll.engine.remote.vllm.folders import served

            probed = await probe(http)
            self.folder = model_folder(url, folder or probed.root)
            facts = served(self.folder, dtype)
            kind = update_kind(probed, facts, lora_rank, way)
            self._server = VllmServer(http, probed, facts, kind, kind == "adapter")
            return self._server

        try:
            options = PoolOptions(
                token=token,
                timeout_s=request_s,
                silent_s=SILENT_S,
                concurrency=concurrency,
                stream=stream,
                fail_fast=True,
                connect=meet,
                lost=None if process is None else process.lost,
            )
            super().__init__([url], options)
            self._weights = VllmWeights(
                self, self._server, self.folder, exchange, way, request_s, process is not None
            )
        except BaseException:
            self.close()
            raise
        length = self.capabilities.context_length
        self._verifier = Verifier(self.server.vocab_size, length, bound)

    @classmethod
    def start(
        cls,
        folder: str | Path,
        *,
        log: Path | None = None,
        python: str | None = None,
        site: str | None = None,
        devices: str | None = None,
        dtype: str | None = None,
        tensor_parallel: int = 1,
        gpu_memory: float | None = None,
        context_length: int | None = None,
        max_batch: int = 256,
        lora_rank: int | None = None,
        way: Way | None = "folder",
        arguments: Sequence[str] = (),
        start_s: float = 600.0,
        socket: Path | None = None,
        tell: Callable[[str], object] = _log,
        **options: Any,
    ) -> VllmEngine:
        """Start a vLLM for a model folder; it ends with this engine, or with this process.

        log, python, site, devices, socket (its folder): as of `VllmProcess`. dtype: default the
        folder's. gpu_memory: share of each GPU. lora_rank: the policy is an adapter of at most this
        rank. way: of full updates; None takes none. arguments: more options of `vllm serve`. tell:
        receives lines about the start. options: as of the class; exchange: the folder of weights.
        Log, socket and exchange are temporary by default. EngineLost, with the last error of its
        log, when it is not ready within start_s.
        """
        from lowroll.engine.remote.vllm.folders import linear_names, served

        folder = Path(folder).resolve()
        if not (folder / "config.json").is_file():
            raise ValueError(f"folder: {folder} holds no model (no config.json)")
        log = log or Path(tempfile.mkdtemp(prefix="lowroll-vllm-log-")) / "vllm.log"
        dtype = dtype or served(folder).dtype
        serve_options = _serve_arguments(
            folder, dtype, tensor_parallel, gpu_memory, context_length, max_batch, lora_rank, way
        )
        if lora_rank is not None:  # a wrapped head ends vLLM at the first score on a CPU
            serve_options += ["--lora-target-modules", *linear_names(folder)]
        process = VllmProcess(
            [*serve_options, *arguments],
            log=log,
            python=python,
            site=site,
            devices=devices,
            folder=socket,
        )
        try:
            process.wait_ready(start_s, tell)
            return cls(
                process.url,
                folder,
                lora_rank=lora_rank,
                way=way,
                process=process,
                dtype=dtype,
                **options,
            )
        except BaseException:
            process.close()
            raise

    @classmethod
    def attach(cls, url: str, folder: str | Path | None = None, **options: Any) -> VllmEngine:
        """Attach to a running vLLM, at a URL or a Unix socket (`unix:/path`), which outlives this
        engine.

        folder: of its model, readable here; default what it states. options: as of the class;
        exchange has the same path on its machine. ValueError names what it lacks (docs/vllm.md).
        """
        return cls(url, folder, **options)

    def close(self) -> None:
        """End a server that was started here, or unload the adapters of another. Idempotent."""
        if self.closed:
            return
        self.give_up()
        if self._weights is not None:
            self._weights.close(unload=self.process is None)
        super().close()
        if self.process is not None:
            self.process.close()

    @property
    def found(self) -> ProbedVllm:
        return self._server.found

    @property
    def weights(self) -> VllmWeights:
        """The sender of updates."""
        assert self._weights is not None, "it exists once the engine is connected"
        return self._weights

    # -- pause -------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop drawing: freeze the requests in flight, wait for their end, or abort them. New
        requests wait for `resume`."""
        self.weights.pause(mode)

    def resume(self) -> None:
        self.weights.resume()

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Take new weights as policy `update.version`, check them, and return the tag of the next
        request.

        Requests in flight keep their adapter; a full update waits for their end. Raises ValueError
        for an update that this vLLM cannot take, before anything is sent, and NotArrived if its
        log-probs are not those of the new weights. After a failed update send no request; a full
        one leaves vLLM paused.
        """
        if in_flight == "replay":
            raise ValueError("in_flight: replay is for lowroll's own engine; a vLLM has none")
        self.weights.check(update)
        digest = update.digest or update.content_digest()
        self.weights.send(update)
        self.server.behavior = replace(self.behavior, policy=(PolicySpan(update.version, digest),))
        self._check_arrival(update)
        return self.behavior

    def _check_arrival(self, update: WeightUpdate) -> None:
        ids = self._verifier.ids
        if self._verify is not None:
            learner_logprobs: Sequence[float] = self._verify(ids)
        elif update.master is not None:
            from lowroll.model.scoring import score

            learner_logprobs = score(update.master, [ids], [1])[0].tolist()
        else:
            return
        try:
            engine_logprobs = self.score([ids], [1])[0].tolist()
        except EngineLost:
            raise
        except ServerError as error:  # for example, log-probs that are no numbers
            raise NotArrived(f"update to version {update.version}: {error}") from None
        self._verifier.check(learner_logprobs, engine_logprobs, update.version)


def _serve_arguments(
    folder: Path,
    dtype: str,
    tensor_parallel: int,
    gpu_memory: float | None,
    context_length: int | None,
    max_batch: int,
    lora_rank: int | None,
    way: Way | None,
) -> list[str]:
    arguments = ["--model", str(folder), "--served-model-name", BASE, "--dtype", dtype]
    arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--skip-tokenizer-init", "--max-num-seqs", str(max_batch)]
    arguments += ["--tensor-parallel-size", str(tensor_parallel)]
    if gpu_memory is not None:
        arguments += ["--gpu-memory-utilization", str(gpu_memory)]
    if context_length is not None:
        arguments += ["--max-model-len", str(context_length)]
    if lora_rank is not None:
        arguments += ["--enable-lora", "--max-lora-rank", str(_supported_rank(lora_rank))]
        arguments += ["--max-loras", str(ADAPTERS_TOGETHER)]
    elif way == "nccl":
        arguments += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return arguments


def _supported_rank(wanted: int) -> int:
    for rank in RANKS:
        if rank >= wanted:
            return rank
    raise ValueError(f"lora_rank: vLLM holds adapters of rank {RANKS[-1]} at most, not {wanted}")
