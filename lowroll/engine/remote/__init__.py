"""Engines at the end of a wire: lowroll's own server, or a vLLM. Importable without torch."""

from __future__ import annotations

from pathlib import Path

from lowroll.engine.remote import lowroll_server
from lowroll.engine.remote.http_client import BlockingHttpClient, EngineLost, ServerError
from lowroll.engine.remote.remote_engine import RemoteEngine, ServedName
from lowroll.engine.remote.verify import NotArrived
from lowroll.engine.remote.vllm_engine import VllmEngine
from lowroll.engine.remote.vllm_probe import is_vllm

__all__ = ["EngineLost", "NotArrived", "RemoteEngine", "ServerError", "VllmEngine", "connect"]


def connect(
    url: str,
    *,
    model: str | None = None,
    token: str | None = None,
    folder: str | Path | None = None,
    concurrency: int = 64,
    request_s: float = 1200.0,
    stream: bool = False,
) -> RemoteEngine:
    """The engine at an address, a server of lowroll's or a vLLM, for rollouts and scores; it takes
    no weights.

    model: a name that it serves; default its first. token: its bearer token. folder: of a vLLM's
    model, where it is not readable under the name that the server tells. concurrency, request_s,
    stream: as `RemoteEngine`'s. ValueError names what does not fit; ServerError when nothing that
    is known answers.
    """
    client = BlockingHttpClient(url, token=token, concurrency=concurrency)
    try:
        if not is_vllm(client):
            dialect = lowroll_server.ask(client, model)
            named = ServedName(dialect.model, dialect.model)
            return RemoteEngine(client, dialect, named, request_s=request_s, stream=stream)
    except BaseException:
        client.close()
        raise
    client.close()
    engine = VllmEngine.attach(
        url,
        folder,
        token=token,
        way=None,
        concurrency=concurrency,
        request_s=request_s,
        stream=stream,
    )
    if model not in (None, engine.served.name):
        engine.close()
        raise ValueError(f"model: {url} serves {engine.served.name}, and not {model}")
    return engine
