"""What the handlers share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from lowroll.engine.base import Capabilities
from lowroll.server.loop import EngineLoop

if TYPE_CHECKING:
    from lowroll.model.tokenizer import ChatTokenizer
    from lowroll.server.text import Vocabulary


@dataclass(frozen=True)
class Limits:
    """What one client, or all together, may take. Sizes in bytes, times in seconds."""

    body: int = 8 << 20
    headers: int = 16 << 10
    depth: int = 32  # of nested lists and objects in a body
    n: int = 64  # samples of one prompt
    prompts: int = 256  # of one request
    requests: int = 1024  # open at a time
    connections: int = 4096
    head_s: float = 10.0  # until a new connection has asked for something
    body_s: float = 30.0  # until its body has come
    health_s: float = 10.0  # until the engine's thread must have answered
    write_s: float = 60.0  # until a client has read a part of its answers
    update_s: float = 300.0  # until the engine has taken new weights


@dataclass
class Serving:
    """`request.app[SERVING]`.

    chat: the model's tokenizer with its chat template, vocabulary: without; None where the model
    has none. Without either only token ids go in and out. name: what clients call the model.
    """

    loop: EngineLoop
    chat: ChatTokenizer | None
    name: str
    capabilities: Capabilities
    vocabulary: Vocabulary | None = None
    limits: Limits = field(default_factory=Limits)
    version: str = ""  # of lowroll
    created: int = field(default_factory=lambda: time.time_ns() // 10**9)  # since 1970


SERVING: web.AppKey[Serving] = web.AppKey("serving", Serving)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)  # of every request
