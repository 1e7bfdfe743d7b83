"""A probe of the vLLM (0.20 or newer) at an address. Its features are read from /openapi.json and
its answers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from lowroll.engine.remote.http_client import HttpCall, HttpClient, ServerError, excerpt
from lowroll.engine.remote.protocol import PATH

OLDEST = (0, 20)
FIELDS = (  # of a /v1/completions body, needed for rollouts
    "prompt",
    "seed",
    "logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stop_token_ids",
    "ignore_eos",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "prompt_logprobs",
)
HOTTEST = 2.0
RELOAD = ("/collective_rpc", "/pause", "/resume", "/reset_prefix_cache")
TRANSFER = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


@dataclass(frozen=True)
class ProbedVllm:
    version: tuple[int, ...]
    model: str
    root: str
    context_length: int
    paths: frozenset[str]
    processed: bool  # log-probs are of the distribution that it draws from
    cpu: bool | None  # None: unknown
    lora: bool  # adapters may be loaded while it runs

    @property
    def shown(self) -> str:
        return "vLLM " + ".".join(map(str, self.version))

    def needs(self, what: str, *paths: str) -> None:
        if missing := [path for path in paths if path not in self.paths]:
            raise ValueError(
                f"{what}: {self.shown} does not serve {', '.join(missing)}; it must be started "
                f"with VLLM_SERVER_DEV_MODE=1 (weights, pause) and "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 with --enable-lora (adapters)"
            )

    def check_adapters(self) -> None:
        """Raise ValueError when it takes no adapters."""
        self.needs("updates of an adapter", *ADAPTERS)
        if not self.lora:
            raise ValueError(f"lora_rank: {self.shown} was started without --enable-lora")

    def check_models(self, tied: bool, *paths: str) -> None:
        """Raise ValueError when it takes no whole models, or does not serve `paths`. tied: the head
        is the embedding."""
        self.needs("updates of all weights", *RELOAD, *paths)
        if tied and self.cpu is not False:
            raise ValueError(
                f"updates of all weights: on a CPU {self.shown} keeps the old head of a model with "
                f"tied embeddings, without a word; roll out an adapter (lora_rank), or use "
                f"lowroll's own engine"
            )


async def probe(http: HttpClient) -> ProbedVllm:
    """Probe a vLLM. ValueError names what it lacks; ServerError when it does not answer."""
    version = _parse_version(await http.get("/version", "the version of vLLM"))
    openapi = await http.get("/openapi.json", "vLLM's description of its routes")
    paths = _keys_at(openapi, "paths")
    fields = _keys_at(openapi, "components", "schemas", "CompletionRequest", "properties")
    name = "vLLM " + ".".join(map(str, version))
    if missing_fields := [field for field in FIELDS if field not in fields]:
        raise ValueError(f"{name}: {PATH} does not take {', '.join(missing_fields)}")
    model, root, length = _base_model(await http.get("/v1/models", "the list of models"))
    return ProbedVllm(
        version=version,
        model=model,
        root=root,
        context_length=length,
        paths=frozenset(paths),
        processed=await _is_processed(http, model),
        cpu=await _on_cpu(http) if "/server_info" in paths else None,
        lora=not set(ADAPTERS) - paths and await _takes_adapters(http),
    )


def _parse_version(answer: Any) -> tuple[int, ...]:
    fields = answer if isinstance(answer, dict) else {}
    if fields.get("server") == "lowroll":
        raise ValueError("url: a lowroll server answers there, and no vLLM")
    text = fields.get("version")
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"version: {excerpt(answer)} is no version of vLLM")
    version = tuple(int(part) for part in match.groups() if part is not None)
    if version < OLDEST:
        raise ValueError(f"version: vLLM {text} is older than {'.'.join(map(str, OLDEST))}")
    return version


def _keys_at(described: Any, *names: str) -> set[str]:
    for name in names:
        described = described.get(name, {}) if isinstance(described, dict) else {}
    return set(described) if isinstance(described, dict) else set()


def _base_model(answer: Any) -> tuple[str, str, int]:
    try:
        base_card = next(
            model_card for model_card in answer["data"] if model_card.get("parent") is None
        )
        model, root, length = base_card["id"], base_card["root"], base_card["max_model_len"]
    except (KeyError, TypeError, AttributeError, StopIteration):
        raise ServerError(f"the list of models: {excerpt(answer)}") from None
    if type(model) is not str or type(root) is not str or type(length) is not int or length < 2:
        raise ServerError(f"the list of models: {excerpt(base_card)}")
    return model, root, length


async def _is_processed(http: HttpClient, model: str) -> bool:
    """Return whether log-probs are those after temperature and top-k: then two tokens have all the
    mass, and half the distance at temperature 2."""
    plain = await _two_likeliest(http, model, temperature=1.0, top_k=0)
    hot = await _two_likeliest(http, model, temperature=HOTTEST, top_k=2)
    mass = math.exp(hot[0]) + math.exp(hot[1])
    plain_gap, hot_gap = plain[1] - plain[0], hot[1] - hot[0]
    return abs(mass - 1) < 1e-3 and hot_gap < 0.75 * plain_gap + 1e-3


async def _two_likeliest(
    http: HttpClient, model: str, *, temperature: float, top_k: int
) -> tuple[float, float]:
    body = {
        "model": model,
        "prompt": [1, 2, 3],
        "max_tokens": 1,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": 1.0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
    }
    label = "the probe of log-probs"
    answer = await http.answer(HttpCall("POST", PATH, label, body, 120.0, again=True))
    try:
        logprobs_by_token = answer["choices"][0]["logprobs"]["top_logprobs"][0]
        ascending = sorted(float(logprob) for logprob in logprobs_by_token.values())
        second_largest, largest = ascending[-2:]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ServerError(f"{label}: {excerpt(answer)}") from None
    return second_largest, largest


async def _on_cpu(http: HttpClient) -> bool | None:
    info = await http.get("/server_info?config_format=text", "vLLM's settings")
    text = str(info.get("vllm_config", "")) if isinstance(info, dict) else ""
    match = re.search(r"device_config=(\w+)", text)
    return None if match is None else match[1] == "cpu"


async def _takes_adapters(http: HttpClient) -> bool:
    """Return whether it was started with LoRA: else it refuses an adapter for more than
    its folder."""
    body = {"lora_name": "lowroll-probe", "lora_path": "/nonexistent/lowroll-probe"}
    try:
        await http.answer(HttpCall("POST", ADAPTERS[0], "the probe of adapters", body))
    except ServerError as error:
        return error.status in (400, 404) and "nonexistent" in str(error)
    return True
