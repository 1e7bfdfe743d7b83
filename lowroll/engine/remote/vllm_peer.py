"""A vLLM as an engine of a pool, without torch: it serves from a model folder that is readable here,
and reads broadcasts under the same path on its machine.

    adapter     a new name for each broadcast, loaded from its folder. Requests in flight keep the
                adapter that they were sent to
    full        vLLM is paused when what is in flight has ended, and reads the folder

vLLM does not say what it draws from. An adapter is asked for by name, and the answer must name it; of
a full reload nothing but its "done" is known. No log-prob is compared here: the learner that could
is in another process (`vllm.VllmEngine` compares one).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowroll.engine.base import Capabilities
from lowroll.engine.remote.client import Client
from lowroll.engine.remote.dialect import HEEDED, VllmDialect
from lowroll.engine.remote.engine import Dialect
from lowroll.engine.remote.peers import CONTROL_S, Held, Progress, Published
from lowroll.engine.remote.probe import ADAPTERS, RELOAD, Vllm, probe
from lowroll.engine.remote.wire import Call, ServerError, Wire
from lowroll.types import BehaviorTag, PolicySpan, printable

NAME = "pol-v"  # adapters of ours begin with it
MOST_CONFIG = 64 << 20  # bytes of a model's small files
DENSE = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
BITS = {"bf16": 16.0, "fp16": 16.0, "fp32": 32.0}


class VllmPeer:
    """Made by `meet`. in_flight: whether requests go on while it takes weights."""

    def __init__(self, wire: Wire, found: Vllm, dialect: VllmDialect, tied: bool) -> None:
        self.wire = wire
        self.found = found
        self.dialect: Dialect = dialect
        self.in_flight = True
        self.scores = True
        self.held: Held | None = None
        self._dialect = dialect
        self._tied = tied

    @classmethod
    async def meet(
        cls, wire: Wire, model: str | None, folder: Path | None, deadline_s: float
    ) -> VllmPeer:
        """Probe it. ValueError names what it lacks, or what of its model cannot be read here."""
        with Client(wire.url, token=wire.token) as client:
            found = await asyncio.to_thread(probe, client)
        if model not in (None, found.model):
            raise ValueError(f"model: {wire.url} serves {found.model}, and not {model}")
        place = folder or Path(found.root)
        config = _json(place / "config.json", wire.url)
        return cls(wire, found, _dialect(found, config, place), bool(_tied(config)))

    async def health(self, deadline_s: float) -> str:
        await self._ask("GET", "/health", "its health", deadline_s)
        return "running"

    async def progress(self, deadline_s: float) -> Progress:
        stats = self._dialect.stats(await self._ask("GET", "/metrics", "its metrics", deadline_s))
        return Progress(stats.running + stats.waiting, stats.tokens)

    async def take(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> Held:
        noise = getattr(broadcast, "noise", None)
        if noise and noise.get("sigma"):
            raise ServerError(f"{broadcast.path.name}: noise: vLLM puts none on its norms")
        self.in_flight = broadcast.kind == "adapter"
        if self.in_flight:
            await self._load(broadcast, deadline_s, in_use)
        elif broadcast.kind == "full":
            await self._reload(broadcast, deadline_s)
        else:
            raise ServerError(f"{broadcast.path.name}: vLLM takes no broadcast of {broadcast.kind}")
        held = Held(broadcast.version, frozenset({broadcast.digest}))
        span = PolicySpan(broadcast.version, broadcast.digest)
        self._dialect.behavior = BehaviorTag((span,), weights=self._dialect.behavior.weights)
        return held

    async def resume(self) -> None:
        await self._ask("POST", "/resume", "the end of its pause", CONTROL_S)

    # -- inside ------------------------------------------------------------------------------------

    async def _load(self, broadcast: Published, deadline_s: float, in_use: Set[str]) -> None:
        self._needs("updates of an adapter", *ADAPTERS)
        if not self.found.lora:
            raise ServerError(f"{self.wire.url}: {self.found.shown} runs without --enable-lora")
        name = f"{NAME}{broadcast.version}-{broadcast.digest[:12]}"
        loaded = await self._loaded()
        if name not in loaded:
            body = {"lora_name": name, "lora_path": str(broadcast.path.resolve())}
            await self._ask("POST", ADAPTERS[0], f"loading adapter {name}", deadline_s, body)
        self._dialect.model = name
        for old in loaded - in_use - {name}:
            with suppress(ServerError):  # it may be gone
                body = {"lora_name": old}
                await self._ask("POST", ADAPTERS[1], f"unloading {old}", deadline_s, body)

    async def _loaded(self) -> set[str]:
        """Adapters of ours that it holds."""
        call = Call("GET", "/v1/models", "the list of models", deadline_s=CONTROL_S)
        answer = await self.wire.answer(call)
        try:
            names = {str(one["id"]) for one in answer["data"]}
        except (KeyError, TypeError):
            raise ServerError(f"{call.what}: {printable(repr(answer), 200)}") from None
        return {name for name in names if name.startswith(NAME)}

    async def _reload(self, broadcast: Published, deadline_s: float) -> None:
        self._needs("updates of all weights", *RELOAD)
        if self._tied and self.found.cpu is not False:
            raise ServerError(
                f"{self.wire.url}: on a CPU {self.found.shown} keeps the old head of a model with "
                f"tied embeddings; roll out an adapter"
            )
        what = f"reading {broadcast.path.name}"
        path = str(broadcast.path.resolve())
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._ask("POST", "/pause?mode=wait", "the end of what it draws", deadline_s)
        await self._ask("POST", "/collective_rpc", what, deadline_s, body)
        await self._ask("POST", "/reset_prefix_cache", "reset_prefix_cache", deadline_s)
        await self.resume()
        self._dialect.model = self.found.model

    def _needs(self, what: str, *paths: str) -> None:
        try:
            self.found.needs(what, *paths)
        except ValueError as error:
            raise ServerError(f"{self.wire.url}: {error}") from None

    async def _ask(
        self, method: str, path: str, what: str, deadline_s: float, body: Any = None
    ) -> str:
        call = Call(method, path, what, body, deadline_s, text=True)
        return str(await self.wire.answer(call))


def _dialect(found: Vllm, config: dict[str, Any], place: Path) -> VllmDialect:
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int:
        raise ValueError(f"{printable(place / 'config.json')}: vocab_size: expected a number")
    weights = _weights(config)
    able = Capabilities(
        context_length=found.context_length,
        updates=frozenset({"adapter", "full"}),
        updates_in_flight=found.lora,
        noise=False,
        scores=False,
        exact_logprobs=found.processed,
        sampler=HEEDED,
        vocab_size=vocab_size,
    )
    behavior = BehaviorTag((PolicySpan(0, ""),), weights=weights)
    eos_ids = _eos_ids(config, place)
    return VllmDialect(able, behavior, found.model, vocab_size, eos_ids, BITS.get(weights, 0.0))


def _weights(config: dict[str, Any]) -> str:
    stored = config.get("quantization_config")
    if isinstance(stored, dict):
        return printable(stored.get("format") or stored.get("quant_method") or "quantized", 80)
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return DENSE.get(name.removeprefix("torch."), printable(name, 80))


def _eos_ids(config: dict[str, Any], place: Path) -> frozenset[int]:
    """Of the config, of generation_config.json, which vLLM reads too, and of the tokenizer where its
    files say one."""
    ids: set[int] = set()
    for said in (config, _json_or_nothing(place / "generation_config.json")):
        stated = said.get("eos_token_id")
        ids |= {
            one for one in (stated if isinstance(stated, list) else [stated]) if type(one) is int
        }
    try:
        token = _json(place / "tokenizer_config.json", "")["eos_token"]
        token = token["content"] if isinstance(token, dict) else token
        added = _json(place / "tokenizer.json", "")["added_tokens"]
        ids |= {one["id"] for one in added if one["content"] == token and type(one["id"]) is int}
    except (ValueError, KeyError, TypeError):
        pass  # a folder without a tokenizer, or one whose end is not told there
    return frozenset(ids)


def _tied(config: dict[str, Any]) -> Any:
    return config.get("tie_word_embeddings", False)


def _json_or_nothing(path: Path) -> dict[str, Any]:
    """A file that may be missing or broken: the server has read it, and tells what it made of it."""
    try:
        return _json(path, "")
    except ValueError:
        return {}


def _json(path: Path, url: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_CONFIG))
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"folder: {printable(path)} of the model that vLLM at {url} serves is not readable "
            f"here; name the model's folder on this machine"
        )
    return found
