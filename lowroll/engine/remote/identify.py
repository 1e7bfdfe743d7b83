"""Identify the server at an address, and hold what it says of itself against the others of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowroll.engine.base import InFlight
from lowroll.engine.remote import lowroll_server
from lowroll.engine.remote.http_client import HttpCall, HttpClient
from lowroll.engine.remote.lowroll_server import LowrollServer
from lowroll.engine.remote.server_base import EngineServer


async def connect_server(
    http: HttpClient,
    *,
    admin: str | None,
    model: str | None,
    check_model: bool,
    deadline_s: float,
    folder: Path | None = None,
    in_flight: InFlight = "keep",
) -> EngineServer:
    """Return the client of whatever server answers there.

    model: that it must serve, unless `check_model` is off: then whatever it serves is taken.
    folder: of a vLLM's model, where its own name of it does not lead there. ServerError; ValueError
    names what does not fit.
    """
    call = HttpCall("GET", "/v1/models", lowroll_server.WHAT, deadline_s=deadline_s)
    answer = await http.answer(call)
    wanted = model if check_model else None
    if _is_vllm(answer):
        from lowroll.engine.remote.vllm_server import VllmServer

        return await VllmServer.meet(http, wanted, folder, deadline_s)
    return LowrollServer(http, lowroll_server.read(answer, http.url, wanted), admin, in_flight)


def facts(server: EngineServer) -> Mapping[str, Any]:
    """Return the facts on which all engines of a pool must agree, by the name that an error
    uses."""
    able, behavior = server.dialect.capabilities, server.dialect.behavior
    return {
        "kind of server": type(server).__name__.removesuffix("Server").lower(),
        "vocabulary": able.vocab_size or server.dialect.vocab_size,
        "context length": able.context_length,
        "weights": behavior.weights,
        "KV policy": able.kv,
        "KV dtype": able.kv_dtype,
        "sampler": sorted(able.sampler),
        "exact log-probs": able.exact_logprobs,
        "recorded evictions": able.records_evictions,
    }


def _is_vllm(answer: Any) -> bool:
    try:
        return bool(answer["data"][0]["owned_by"] == "vllm")
    except (KeyError, IndexError, TypeError):
        return False
