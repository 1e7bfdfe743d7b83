"""Engines on servers: lowroll's own, or a vLLM. Importable without torch."""

from __future__ import annotations

from pathlib import Path

from lowroll.engine.remote.http_client import EngineLost, ServerError
from lowroll.engine.remote.pool import EnginePool
from lowroll.engine.remote.replica import PoolOptions
from lowroll.engine.remote.verify import NotArrived
from lowroll.engine.remote.vllm.engine import SILENT_S, VllmEngine

__all__ = ["EngineLost", "EnginePool", "NotArrived", "ServerError", "VllmEngine", "connect"]


def connect(
    url: str,
    *,
    model: str | None = None,
    token: str | None = None,
    folder: str | Path | None = None,
    concurrency: int = 64,
    request_s: float = 1200.0,
    stream: bool = False,
) -> EnginePool:
    """Connect to a server of lowroll's or a vLLM for rollouts and scores; it takes no weights.

    model: default the first that it serves. token: its bearer token. request_s: timeout of one
    request. Others as of `PoolOptions`. ValueError names what does not fit; ServerError when no
    known server answers.
    """
    pool_options = PoolOptions(
        model=model,
        token=token,
        folder=None if folder is None else Path(folder),
        concurrency=concurrency,
        timeout_s=request_s,
        silent_s=SILENT_S,
        stream=stream,
        fail_fast=True,
    )
    return EnginePool([url], pool_options)
