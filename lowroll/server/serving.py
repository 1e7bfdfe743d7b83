"""What the handlers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from aiohttp import web

from lowroll.engine.base import Capabilities
from lowroll.server.loop import EngineLoop

if TYPE_CHECKING:
    from lowroll.model.tokenizer import ChatTokenizer
    from lowroll.server.text import Vocabulary

P = ParamSpec("P")
R = TypeVar("R")
WORKERS = 2  # threads that encode texts and write long answers


@dataclass(frozen=True)
class Limits:
    """What one client, or all together, may take. Sizes in bytes, times in seconds."""

    body: int = 8 << 20
    bodies: int = 512 << 20  # of all open requests together
    text: int = 1 << 20  # characters of a text that is only encoded
    told: int = 1 << 18  # log-probs of prompts in one answer
    told_streamed: int = 1 << 13  # where it is a stream
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
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(WORKERS, thread_name_prefix="clients")
    )

    async def work(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What fn returns or raises, in one of a few threads, so that the event loop stays free and
        memory is bounded whatever is asked at a time."""
        call = partial(fn, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.workers, call)


SERVING: web.AppKey[Serving] = web.AppKey("serving", Serving)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)  # of every request
