"""The scoring worker: a child process of `ScorerPool`, with a protocol of JSON lines.

    in    {"specs", "memory_limit_mb"}, then {"items": [{"id", "prompt", "ask", "said"}]}; "ask" is
          "score" (a response or a conversation), "together" (a list of them) or "respond"
    out   {"ready": true, "overtaxed": scores by environment, "together": environments} or
          {"failed": why}, then a line an item, in order: {"id", "reward", "metrics"},
          {"id", "scores": [...]}, {"id", "messages"} (null: done) or {"id", "error", "message"};
          {"id", "doing"} may precede it, for a timeout's message

Replies use a private file descriptor, so a scorer may print. Only the pool and this loop know an
item's id, so that lines of other writers do not count, and a forked copy of this process ends here.
The worker dies with its parent: the kernel signals its reaper (`reaper`, Linux), or its input ends.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from lowroll.envs import child, user_errors
from lowroll.envs.base import Environment, judge
from lowroll.envs.reaper import fork_worker
from lowroll.envs.return_values import (
    Inapplicable,
    InvalidScore,
    ScorerFailed,
    as_messages,
    as_score,
    awaited,
)
from lowroll.envs.table import construct, own_file
from lowroll.types import Prompt, Score

MAX_FILE_MB = 64  # protects the disk from a scorer
MAX_MESSAGE = 100_000  # characters of an error, which the pool shortens


def limit_resources(memory_mb: int) -> None:
    """Limit address space and file size; write no core files."""
    for kind, limit in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, MAX_FILE_MB << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = min(limit, sys.maxsize if hard == resource.RLIM_INFINITY else hard)
        resource.setrlimit(kind, (limit, limit))


def ask(env: Environment, prompt: Prompt, what: str, said: Any) -> dict[str, Any]:
    """Score or respond; an environment's failure becomes an error of a named kind."""
    try:
        if what == "respond":
            return {"messages": as_messages(awaited(env.respond(prompt, said)))}
        if what == "together":
            return {"scores": [_score_reply(score) for score in env.score_together(prompt, said)]}
        return vars(judge(env, prompt, said))
    except MemoryError:
        return {"error": "memory", "message": "the scorer ran out of memory"}
    except InvalidScore as error:
        return _score_reply(error)
    except ScorerFailed as error:
        return {"error": "exception", "message": str(error)[:MAX_MESSAGE]}
    except (Exception, SystemExit) as error:
        file = own_file(type(env))
        where = f" ({user_errors.place(error, file)})" if file else ""
        return {
            "error": "exception",
            "message": f"{type(error).__name__}: {error}"[:MAX_MESSAGE] + where,
        }


def _score_reply(one: Score | InvalidScore) -> dict[str, Any]:
    if isinstance(one, Inapplicable):
        details = {"metrics": one.metrics, "extra": one.extra}
        return {"error": "inapplicable", "message": str(one)[:MAX_MESSAGE], **details}
    if isinstance(one, InvalidScore):
        return {"error": "invalid", "message": str(one)[:MAX_MESSAGE]}
    return vars(as_score(one))


def _report_progress(reply: Callable[[dict[str, Any]], None], id: str, doing: str) -> None:
    reply({"id": id, "doing": doing})


def serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """Answer requests until their end; return the exit status."""

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    setup = json.loads(requests.readline())
    try:
        envs = _build(setup)
    except Exception as error:
        reply({"failed": user_errors.describe(error)})
        return 1
    reply(
        {
            "ready": True,
            "overtaxed": {name: vars(env.overtaxed) for name, env in envs.items() if env.overtaxed},
            "together": [name for name, env in envs.items() if env.together],
        }
    )
    process = os.getpid()
    for line in requests:
        for item in json.loads(line)["items"]:
            prompt = Prompt(**item["prompt"])
            env = envs[prompt.env]
            env.tell = partial(_report_progress, reply, item["id"])
            result = ask(env, prompt, item["ask"], item["said"])
            if os.getpid() != process:
                os._exit(0)  # the scorer forked, and this is the copy
            reply({"id": item["id"]} | result)
            if result.get("error") == "memory":
                return 1  # this process is no longer reliable
    return 0


def _build(setup: dict[str, Any]) -> dict[str, Environment]:
    limit_resources(setup["memory_limit_mb"])
    envs = {
        name: construct(id, name=name, args=args, seed=seed)
        for name, (id, args, seed) in setup["specs"].items()
    }
    for env in envs.values():
        env.prepare()
    return envs


def main() -> int:
    fork_worker(int(sys.argv[1]))
    return serve(*child.private_streams())


if __name__ == "__main__":
    sys.exit(main())
