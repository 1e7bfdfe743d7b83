"""vLLM behind lowroll's protocol of engines: started here, or attached to.

    with VllmEngine.start("path/to/model", lora_rank=16) as engine:
        groups = engine.generate([Request(prompt_ids=[...], n=8, max_tokens=64, seed=7)])
        engine.update_weights(WeightUpdate.local(learner, version=1))

Weights reach it in one of three ways, by what the update is and how vLLM was started:

    adapter     a new folder and a new name, `pol-v{version}`, for each version. Requests in flight
                keep the adapter that they began with; the old one is unloaded after their end
    folder      the whole model, in the format of the folder that vLLM was started with, is laid
                beside it and read by `reload_weights`. vLLM is paused, after what is in flight has
                ended, and the cache of prompts is forgotten
    nccl        the whole dense model by vLLM's own transfer, between GPUs (`transfer`)

After each, log-probs of a short text are held against the learner's (`verify`).
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowroll.engine.base import Capabilities, InFlight
from lowroll.engine.remote.http_client import BlockingHttpClient, EngineLost, HttpCall, ServerError
from lowroll.engine.remote.remote_engine import RemoteEngine, ServedName
from lowroll.engine.remote.verify import Learner, NotArrived, Verifier
from lowroll.engine.remote.vllm_probe import ADAPTERS, RELOAD, TRANSFER, ProbedVllm, probe
from lowroll.engine.remote.vllm_process import VllmProcess
from lowroll.engine.remote.vllm_server import HEEDED, VllmDialect
from lowroll.model.folder import resolve
from lowroll.types import BehaviorTag, PolicySpan, printable

if TYPE_CHECKING:
    from lowroll.engine.remote.served_model import ServedModel
    from lowroll.engine.remote.vllm_nccl import NcclTransfer
    from lowroll.weights.update import Kind, WeightUpdate

_log = logging.getLogger(__name__).info

Way = Literal["folder", "nccl"]
BASE = "policy"  # the name of the model that vLLM is started with
BOUND = 0.5  # nats a token that a format may be away from the learner
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS_TOGETHER = 2  # of two versions, while the older one's requests end


class VllmEngine(RemoteEngine):
    """Made by `start` or `attach`. One thread calls everything.

    verify: log-probs of ids[1:] under the learner, for the check after an update; by default those
    of the update's own model, where it is in this process (`WeightUpdate.master`), else nothing is
    compared. bound: how far vLLM may be from them (`verify.Verifier`), in nats.
    """

    def __init__(
        self,
        client: BlockingHttpClient,
        folder: Path,
        *,
        exchange: Path | None = None,
        lora_rank: int | None = None,
        way: Way | None = "folder",
        process: VllmProcess | None = None,
        dtype: str | None = None,
        verify: Learner | None = None,
        bound: float = BOUND,
        request_s: float = 1200.0,
        stream: bool = False,
    ) -> None:
        from lowroll.engine.remote.served_model import served

        self.folder = folder
        self.found = probe(client)
        self.process = process
        self.facts = served(folder, dtype)
        self._way = way
        self._verify = verify
        kind = _kind(self.found, self.facts, lora_rank, way)
        self._transfer: NcclTransfer | None = None
        if kind == "full" and way == "nccl":
            from lowroll.engine.remote.vllm_nccl import NcclTransfer

            self._transfer = NcclTransfer(client, self.found, request_s, process is not None)
        self._loaded: dict[str, Path] = {}  # adapters that vLLM holds, with their folders
        self._versions: Counter[int] = Counter()
        self.dialect: VllmDialect = _dialect(self.found, self.facts, kind)
        named = ServedName(self.found.model, self.found.root)
        super().__init__(client, self.dialect, named, request_s=request_s, stream=stream)
        self._exchange = Path(tempfile.mkdtemp(prefix="lowroll-weights-", dir=exchange))
        self._verifier = Verifier(self.dialect.vocab_size, self.capabilities.context_length, bound)

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
        concurrency: int = 256,
        start_s: float = 600.0,
        exchange: Path | None = None,
        verify: Learner | None = None,
        bound: float = BOUND,
        request_s: float = 1200.0,
        stream: bool = False,
        socket: Path | None = None,
        tell: Callable[[str], object] = _log,
    ) -> VllmEngine:
        """A vLLM of our own for a model folder; it ends with this engine, or with this process.

        log: what vLLM writes; default a temporary file, whose name errors tell. python, site,
        devices: `process.VllmProcess`. dtype: that vLLM
        computes in; default the folder's. gpu_memory: share of each GPU that it
        takes. lora_rank: the policy is an adapter of at most this rank. way: of full updates; None
        for an engine that takes none.
        arguments: more options of `vllm serve`. exchange: where weights are laid; default the
        temporary folder of the machine. socket: the folder of its socket
        (`process.lasting_folder`); default a temporary one. tell: takes a line now and then about how the start goes.
        EngineLost, with the last error of its log, when it is not ready within start_s.
        """
        from lowroll.engine.remote.served_model import served

        folder = Path(folder).resolve()
        if not (folder / "config.json").is_file():
            raise ValueError(f"folder: {folder} holds no model (no config.json)")
        log = log or Path(tempfile.mkdtemp(prefix="lowroll-vllm-log-")) / "vllm.log"
        dtype = dtype or served(folder).dtype_name
        options = _options(
            folder, dtype, tensor_parallel, gpu_memory, context_length, max_batch, lora_rank, way
        )
        process = VllmProcess(
            [*options, *arguments],
            log=log,
            python=python,
            site=site,
            devices=devices,
            folder=socket,
        )
        client: BlockingHttpClient | None = None
        try:
            process.wait_ready(start_s, tell)
            client = BlockingHttpClient(process.url, concurrency=concurrency, lost=process.lost)
            return cls(
                client,
                folder,
                exchange=exchange,
                lora_rank=lora_rank,
                way=way,
                process=process,
                dtype=dtype,
                verify=verify,
                bound=bound,
                request_s=request_s,
                stream=stream,
            )
        except BaseException:
            if client is not None:
                client.close()
            process.close()
            raise

    @classmethod
    def attach(
        cls,
        url: str,
        folder: str | Path | None = None,
        *,
        token: str | None = None,
        lora_rank: int | None = None,
        way: Way | None = "folder",
        concurrency: int = 256,
        exchange: Path | None = None,
        verify: Learner | None = None,
        bound: float = BOUND,
        request_s: float = 1200.0,
        stream: bool = False,
    ) -> VllmEngine:
        """A vLLM that runs already, at a URL or a Unix socket (`unix:/path`), and goes on when this
        engine is closed.

        folder: of the model that it serves, readable here; default what it says of itself. token:
        its bearer token. exchange: where weights are laid, under the same path on its machine; vLLM
        must have been started with the options of docs/vllm.md. ValueError names what it lacks.
        """
        client = BlockingHttpClient(url, token=token, concurrency=concurrency)
        try:
            place = _folder(url, folder or probe(client).root)
            return cls(
                client,
                place,
                exchange=exchange,
                lora_rank=lora_rank,
                way=way,
                verify=verify,
                bound=bound,
                request_s=request_s,
                stream=stream,
            )
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        """Give up what is in flight; unload what was loaded into a server that goes on, end one
        that was started here. Idempotent."""
        self._give_up()
        if self._transfer is not None:
            self._transfer.close()
        if self.process is None:
            with suppress(ServerError):
                self._unload(keep=None)
        self.client.close()
        if self.process is not None:
            self.process.close()
        shutil.rmtree(self._exchange, ignore_errors=True)

    # -- pause -------------------------------------------------------------------------------------

    def pause(self, mode: Literal["keep", "wait", "abort"] = "keep") -> None:
        """Stop drawing: freeze what is in flight, wait for its end, or end it with finish reason
        "abort". New requests wait for `resume`."""
        self.found.needs("pause", "/pause", "/resume")
        self._order(f"/pause?mode={mode}", None, f"pause ({mode})")

    def resume(self) -> None:
        """Go on after `pause`."""
        self._order("/resume", None, "resume")

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Take new weights as policy `update.version`, and hold vLLM's log-probs against the
        learner's.

        Requests in flight keep the adapter that they were sent with; a full update waits for their
        end. Returns the tag of the next request. ValueError, before anything is sent, names what
        does not fit. NotArrived when vLLM does not draw from these weights. After a
        failed update no request may follow; one of all weights leaves vLLM paused.
        """
        if in_flight == "replay":
            raise ValueError("in_flight: a vLLM replays nothing")
        self._check_update(update)
        digest = update.digest or update.content_digest()
        if update.kind == "adapter":
            self._load_adapter(update)
        elif self._way == "nccl":
            self._transfer_all(update)
        else:
            self._reload(update)
        self.dialect.behavior = replace(self.behavior, policy=(PolicySpan(update.version, digest),))
        self._check_arrival(update)
        return self.behavior

    def _check_update(self, update: WeightUpdate) -> None:
        if update.kind not in self.capabilities.updates:
            able = " or ".join(sorted(self.capabilities.updates)) or "none"
            raise ValueError(
                f"update: kind {update.kind!r}: this vLLM takes updates of kind {able}"
            )
        if update.noise is not None and update.noise.sigma != 0:
            raise ValueError("update: noise: vLLM puts none on its norms")
        if update.kind == "full" and update.input_scale != 1.0:
            raise ValueError(
                f"update: input_scale: the weights carry s = {update.input_scale}, which vLLM's "
                f"model does not"
            )

    def _load_adapter(self, update: WeightUpdate) -> None:
        from lowroll.engine.remote.vllm_folders import write_adapter

        count = self._versions[update.version]
        name = f"pol-v{update.version}" + (f".{count}" if count else "")
        self._versions[update.version] += 1
        folder = write_adapter(update, self._exchange / name, self.folder)
        body = {"lora_name": name, "lora_path": str(folder)}
        self._order(ADAPTERS[0], body, f"loading adapter {name}")
        self._loaded[name] = folder
        self.dialect.model = name
        self._unload(keep=name)

    def _unload(self, keep: str | None) -> None:
        """Unload the adapters that no request in flight was sent to."""
        held = {flight.model for flight in self._flights.values()} | {keep}
        for name in [name for name in self._loaded if name not in held]:
            self._order(ADAPTERS[1], {"lora_name": name}, f"unloading adapter {name}")
            shutil.rmtree(self._loaded.pop(name), ignore_errors=True)

    def _reload(self, update: WeightUpdate) -> None:
        from lowroll.engine.remote.vllm_folders import write_model

        self._versions[update.version] += 1
        name = f"v{update.version}-{self._versions[update.version]}"
        folder = write_model(update, self._exchange / name, self.folder, self.facts.dtype)
        try:
            self.pause("wait")
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self._order("/collective_rpc", body, f"reloading the weights of version {name}")
            self._order("/reset_prefix_cache", None, "reset_prefix_cache")
            self.resume()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _transfer_all(self, update: WeightUpdate) -> None:
        assert self._transfer is not None
        tensors = self._transfer.check(update)
        self.pause("wait")
        self._transfer.send(tensors, self.facts.dtype)
        self._order("/reset_prefix_cache", None, "reset_prefix_cache")
        self.resume()

    def _check_arrival(self, update: WeightUpdate) -> None:
        ids = self._verifier.ids
        if self._verify is not None:
            learner: Sequence[float] = self._verify(ids)
        elif update.master is not None:
            from lowroll.model.scoring import score

            learner = score(update.master, [ids], [1])[0].tolist()
        else:
            return
        try:
            held = self.score([ids], [1])[0].tolist()
        except EngineLost:
            raise
        except ServerError as error:  # of log-probs that are no numbers, for one
            raise NotArrived(f"update to version {update.version}: {error}") from None
        self._verifier.check(learner, held, update.version)

    def _order(self, path: str, body: object, what: str) -> None:
        """Call a control route, whose answer is empty when it has done its work."""
        self.found.needs(what, path.partition("?")[0])
        self.client.ask(HttpCall("POST", path, what, body, self.request_s))


def _folder(url: str, named: str | Path) -> Path:
    """Return the folder on this machine that holds the model of a server. ValueError when it is not
    readable here."""
    try:
        place = resolve(named, weights=False, connect=False).resolve()
    except ValueError:
        place = Path(named)
    if not (place / "config.json").is_file():
        raise ValueError(
            f"folder: {printable(named)}, which vLLM at {printable(url)} serves, is not readable "
            f"here; name the model's folder on this machine"
        )
    return place


def _options(
    folder: Path,
    dtype: str,
    tensor_parallel: int,
    gpu_memory: float | None,
    context_length: int | None,
    max_batch: int,
    lora_rank: int | None,
    way: Way | None,
) -> list[str]:
    """Arguments of `vllm serve`. The linear layers are named, because a wrapped head ends vLLM at
    the first score on a CPU."""
    options = ["--model", str(folder), "--served-model-name", BASE, "--dtype", dtype]
    options += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    options += ["--skip-tokenizer-init", "--max-num-seqs", str(max_batch)]
    options += ["--tensor-parallel-size", str(tensor_parallel)]
    if gpu_memory is not None:
        options += ["--gpu-memory-utilization", str(gpu_memory)]
    if context_length is not None:
        options += ["--max-model-len", str(context_length)]
    if lora_rank is not None:
        options += ["--enable-lora", "--max-lora-rank", str(_rank(lora_rank))]
        options += ["--max-loras", str(ADAPTERS_TOGETHER)]
        options += ["--lora-target-modules", *LINEARS]
    elif way == "nccl":
        options += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    return options


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.20 and newer take


def _rank(wanted: int) -> int:
    for rank in RANKS:
        if rank >= wanted:
            return rank
    raise ValueError(f"lora_rank: vLLM holds adapters of rank {RANKS[-1]} at most, not {wanted}")


def _kind(
    found: ProbedVllm, model: ServedModel, lora_rank: int | None, way: Way | None
) -> Kind | None:
    """Return the kind of update that this engine will be given. ValueError names what one would need and this
    vLLM lacks."""
    if lora_rank is not None:
        found.needs("updates of an adapter", *ADAPTERS)
        if not found.lora:
            raise ValueError(f"lora_rank: {found.shown} was started without --enable-lora")
        return "adapter"
    if way is None:
        return None
    found.needs("updates of all weights", *RELOAD, *(TRANSFER if way == "nccl" else ()))
    if way == "nccl" and found.cpu:
        raise ValueError(f"way: nccl moves weights between GPUs, and {found.shown} is on a CPU")
    if model.tied and found.cpu is not False:
        raise ValueError(
            f"updates of all weights: on a CPU {found.shown} keeps the old head of a model with "
            f"tied embeddings, without a word; roll out an adapter (lora_rank), or use lowroll's "
            f"own engine"
        )
    return "full"


def _dialect(found: ProbedVllm, model: ServedModel, kind: Kind | None) -> VllmDialect:
    able = Capabilities(
        context_length=found.context_length,
        updates=frozenset(() if kind is None else (kind,)),
        updates_in_flight=kind == "adapter",
        noise=False,
        scores=True,
        exact_logprobs=found.processed,
        sampler=HEEDED,
    )
    return VllmDialect(
        capabilities=able,
        behavior=BehaviorTag((PolicySpan(0, ""),), weights=model.weights),
        model=found.model,
        vocab_size=model.vocab_size,
        eos_ids=model.eos_ids,
        weight_bits=model.weight_bits,
    )
