"""A client of a vLLM server. It adapts, or refuses by name, where vLLM differs from lowroll's
engine (docs/vllm.md)."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowroll.engine.base import Capabilities, EngineStats
from lowroll.engine.remote.http_client import HttpCall, HttpClient, ServerError, excerpt
from lowroll.engine.remote.protocol import body_of
from lowroll.engine.remote.server_base import CONTROL_S, EngineServer, HeldPolicy, ServerProgress
from lowroll.engine.remote.vllm.probe import ADAPTERS, HOTTEST, ProbedVllm, probe
from lowroll.engine.request import noise_key
from lowroll.model.config_values import token_ids
from lowroll.model.files import MOST_TOKENIZER, read_json
from lowroll.model.folder import resolve
from lowroll.model.spec import generation_eos_ids, read_config
from lowroll.types import BehaviorTag, PolicySpan, Request, printable
from lowroll.weights.sync.base import Broadcast, Kind

HEEDED = frozenset(
    {
        "prompt_ids",
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "stop_ids",
        "ignore_eos",
        "seed",
        "id",
        "top_logprobs",
    }
)
COLDEST = 0.01  # of temperatures that are not 0
ADAPTER_PREFIX = "pol-v"
DENSE = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
BITS = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0}
SEEDS = 2**62  # vLLM adds the number of the sample to the seed
_METRIC_LINE = re.compile(r"^vllm:(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class ServedModel:
    """The facts about a model that a vLLM does not state. dtype: of its dense weights. weights,
    weight_bits: of the linear ones."""

    vocab_size: int
    eos_ids: frozenset[int]
    tied: bool  # the head is the embedding
    dtype: str
    weights: str
    weight_bits: float


class VllmServer(EngineServer):
    """A vLLM. kind: of streamed updates. updates_in_flight: requests continue meanwhile."""

    def __init__(
        self,
        http: HttpClient,
        found: ProbedVllm,
        served: ServedModel,
        kind: Kind | None,
        updates_in_flight: bool,
    ) -> None:
        super().__init__(http)
        self.found = found
        self.served = served
        self.model = found.model
        self.root = found.root
        self.vocab_size = served.vocab_size
        self.weight_bits = served.weight_bits
        self.behavior = BehaviorTag((PolicySpan(0, ""),), weights=served.weights)
        self.capabilities = Capabilities(
            context_length=found.context_length,
            updates=frozenset(() if kind is None else (kind,)),
            updates_in_flight=updates_in_flight,
            noise=False,
            scores=True,
            exact_logprobs=found.processed,
            sampler=HEEDED,
            vocab_size=served.vocab_size,
        )

    @classmethod
    async def meet(cls, http: HttpClient, model: str | None, folder: Path | None) -> VllmServer:
        """Probe a vLLM of a pool. ValueError as of `probe`, `model_folder` and `read_served`."""
        probed = await probe(http)
        if model not in (None, probed.model):
            raise ValueError(f"model: {http.url} serves {probed.model}, and not {model}")
        served = read_served(model_folder(http.url, folder or probed.root))
        return cls(http, probed, served, None, probed.lora)

    def check_fields(self, request: Request) -> None:
        if request.stop_strings:
            raise ValueError("stop_strings: vLLM runs without a tokenizer here; use stop_ids")
        if request.grammar is not None:
            raise ValueError("grammar: vLLM's grammars are not those of lowroll")
        if request.temperature == 0 and request.n > 1:
            raise ValueError(
                f"n: vLLM draws one greedy sample, and {request.n} were asked for; all are equal"
            )
        if 0 < request.temperature < COLDEST:
            raise ValueError(
                f"temperature: vLLM draws at {COLDEST} what is asked for at "
                f"{request.temperature:g}; write 0 for greedy"
            )
        if request.temperature > HOTTEST:
            raise ValueError(f"temperature: vLLM takes {HOTTEST:g} at most")
        if request.min_p > 0 and request.top_p < 1:
            raise ValueError("min_p: vLLM cuts by it before top_p, and lowroll after; use one")

    def stop_ids(self, request: Request) -> list[int]:
        model_eos_ids = set() if request.ignore_eos else self.served.eos_ids
        return sorted({*request.stop_ids, *model_eos_ids})

    def body(self, request: Request) -> dict[str, Any]:
        seed = noise_key(request, 0) % SEEDS
        return body_of(request, self.model, seed=seed, stop_ids=self.stop_ids(request))

    def scoring(self, ids: Sequence[int], top: int, temperature: float) -> dict[str, Any]:
        if temperature != 1:
            raise ValueError(f"temperature: vLLM scores at 1 alone, not at {temperature:g}")
        if len(ids) >= self.capabilities.context_length:
            raise ValueError(
                f"sequences: {len(ids)} tokens leave no room in a context of "
                f"{self.capabilities.context_length} for the one that vLLM draws beyond"
            )
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
            "return_token_ids": True,
        }

    def stats(self, metrics: str) -> EngineStats:
        values: dict[str, float] = {}
        cache_labels: dict[str, str] = {}  # the size of the cache is in labels of a metric
        for name, label_text, value in _METRIC_LINE.findall(metrics):
            values[name] = values.get(name, 0.0) + float(value)
            if name == "cache_config_info":
                cache_labels = dict(_LABEL.findall(label_text))
        num_blocks = _int_or_zero(cache_labels.get("num_gpu_blocks"))
        block_size = _int_or_zero(cache_labels.get("block_size"))
        return EngineStats(
            weights=self.behavior.weights,
            weight_bits=self.weight_bits,
            cache_tokens=num_blocks * block_size,
            prefix_hits=int(values.get("prefix_cache_hits_total", 0)) // max(block_size, 1),
            running=int(values.get("num_requests_running", 0)),
            waiting=int(values.get("num_requests_waiting", 0)),
            tokens=int(values.get("generation_tokens_total", 0)),
        )

    async def health(self, deadline_s: float) -> str:
        await self.ask("GET", "/health", "its health", deadline_s)
        return "running"

    async def progress(self, deadline_s: float) -> ServerProgress:
        stats = self.stats(await self.metrics(deadline_s))
        return ServerProgress(stats.running + stats.waiting, stats.tokens)

    async def take(self, broadcast: Broadcast, deadline_s: float, in_use: Set[str]) -> HeldPolicy:
        name = broadcast.path.name
        if broadcast.noise is not None and broadcast.noise["sigma"]:
            raise ServerError(f"{name}: noise: vLLM puts none on its norms")
        if broadcast.kind == "codes":
            raise ServerError(f"{name}: vLLM takes no broadcast of codes")
        self.in_flight = broadcast.kind == "adapter"
        try:
            if self.in_flight:
                self.found.check_adapters()
            else:
                self.found.check_models(self.served.tied)
        except ValueError as error:
            raise ServerError(f"{self.http.url}: {error}") from None
        if self.in_flight:
            await self._take_adapter(broadcast, deadline_s, in_use)
        else:
            await self.reload(broadcast.path.resolve(), f"reading {name}", deadline_s)
            self.model = self.found.model
        span = PolicySpan(broadcast.version, broadcast.digest)
        self.behavior = BehaviorTag((span,), weights=self.behavior.weights)
        return HeldPolicy.newest_of([span])

    async def pause(self, mode: str, deadline_s: float) -> None:
        await self.ask("POST", f"/pause?mode={mode}", f"pause ({mode})", deadline_s)

    async def resume(self, deadline_s: float = CONTROL_S) -> None:
        await self.ask("POST", "/resume", "resume", deadline_s)

    async def load_adapter(self, name: str, folder: Path, deadline_s: float) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self.ask("POST", ADAPTERS[0], f"loading adapter {name}", deadline_s, body)
        self.model = name

    async def unload_adapter(self, name: str, deadline_s: float) -> None:
        body = {"lora_name": name}
        await self.ask("POST", ADAPTERS[1], f"unloading adapter {name}", deadline_s, body)

    async def reload(self, folder: Path, what: str, deadline_s: float) -> None:
        """Load all weights from a folder after the requests in flight, and forget the prefix cache.
        After a failure it stays paused."""
        await self.pause("wait", deadline_s)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.ask("POST", "/collective_rpc", what, deadline_s, body)
        await self.ask("POST", "/reset_prefix_cache", "reset_prefix_cache", deadline_s)
        await self.resume(deadline_s)

    async def ask(
        self, method: str, path: str, what: str, deadline_s: float, body: Any = None
    ) -> str:
        """Call a control route, which answers in text."""
        call = HttpCall(method, path, what, body, deadline_s, text=True)
        return str(await self.http.answer(call))

    # -- inside ------------------------------------------------------------------------------------

    async def _take_adapter(
        self, broadcast: Broadcast, deadline_s: float, in_use: Set[str]
    ) -> None:
        name = f"{ADAPTER_PREFIX}{broadcast.version}-{broadcast.digest[:12]}"
        loaded_names = await self._loaded_adapters()
        if name not in loaded_names:
            await self.load_adapter(name, broadcast.path.resolve(), deadline_s)
        self.model = name
        for old_name in loaded_names - in_use - {name}:
            with suppress(ServerError):
                await self.unload_adapter(old_name, deadline_s)

    async def _loaded_adapters(self) -> set[str]:
        label = "the list of models"
        answer = await self.http.answer(HttpCall("GET", "/v1/models", label, deadline_s=CONTROL_S))
        try:
            names = {str(model_card["id"]) for model_card in answer["data"]}
        except (KeyError, TypeError):
            raise ServerError(f"{label}: {excerpt(answer)}") from None
        return {name for name in names if name.startswith(ADAPTER_PREFIX)}


def _int_or_zero(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def model_folder(url: str, named: str | Path) -> Path:
    """Return the folder of a server's model. ValueError when it is not readable here."""
    try:
        folder = resolve(named, weights=False, connect=False).resolve()
    except ValueError:
        folder = Path(named)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"folder: {printable(named)}, which vLLM at {printable(url)} serves, is not readable "
            f"here; name the model's folder on this machine"
        )
    return folder


def read_served(folder: Path) -> ServedModel:
    """Read the facts about a served model from its folder, without torch, also for models that
    lowroll does not compute. ValueError names the folder and the fault."""
    try:
        return _read_served(folder)
    except ValueError as error:
        raise ValueError(
            f"folder: {printable(folder)}, which vLLM serves: {error}; name the model's folder on this "
            "machine"
        ) from None


def _read_served(folder: Path) -> ServedModel:
    config = read_config(folder)
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise ValueError(f"{printable(folder / 'config.json')}: vocab_size: expected a number")
    weights = _weight_format(config)
    return ServedModel(
        vocab_size=vocab_size,
        eos_ids=_eos_ids(config, folder),
        tied=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype_name(config),
        weights=weights,
        weight_bits=BITS.get(weights, 0.0),
    )


def _dtype_name(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return name.removeprefix("torch.")


def _weight_format(config: dict[str, Any]) -> str:
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        return printable(
            quantization.get("format") or quantization.get("quant_method") or "quantized", 80
        )
    name = _dtype_name(config)
    return DENSE.get(name, printable(name, 80))


def _eos_ids(config: dict[str, Any], folder: Path) -> frozenset[int]:
    ids = {*token_ids(config, "eos_token_id")}
    with suppress(ValueError):  # vLLM itself reports a broken file
        ids |= {*generation_eos_ids(folder)}
    with suppress(ValueError, KeyError, TypeError):
        eos_token = read_json(folder / "tokenizer_config.json")["eos_token"]
        eos_text = eos_token["content"] if isinstance(eos_token, dict) else eos_token
        added_tokens = read_json(folder / "tokenizer.json", MOST_TOKENIZER)["added_tokens"]
        ids |= {int(token["id"]) for token in added_tokens if token["content"] == eos_text}
    return frozenset(ids)
