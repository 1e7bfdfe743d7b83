"""The scoring worker: a child process that scores and answers in JSON lines. `ScorerPool` starts and kills it.

Protocol, one JSON object a line. In: first {"specs", "memory_limit_mb"}, then {"items": [{"id", "prompt", "text"}]}.
Out: {"ready": true, "overtaxed": scores by environment} or {"failed": why}, then one line an item, in order: {"id",
"reward", "metrics"} or {"id", "error", "message"}. Replies leave through a private file descriptor, so a scorer that
prints does not disturb them. The id is a secret of the pool and this loop: who writes to that descriptor without it is
not heard. A copy of this process that a scorer forked and let go on ends here.

The worker dies with the process that started it: the kernel kills it (Linux), or it reads the end of its input.
"""
from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from lowroll.envs import child
from lowroll.envs.base import Environment
from lowroll.envs.table import construct
from lowroll.types import Prompt, Score

MAX_REWARD = 1e6           # a reward beyond it is a bug of the scorer
MAX_FILE_MB = 64           # a scorer may not fill the disk
PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even while a scorer hangs in C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:         # it died before we asked
        os._exit(1)


def limit_resources(memory_mb: int) -> None:
    """Bound address space and file size; write no core files."""
    for kind, limit in ((resource.RLIMIT_AS, memory_mb << 20), (resource.RLIMIT_FSIZE, MAX_FILE_MB << 20),
                        (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def score_item(env: Environment, prompt: Prompt, text: str) -> dict[str, Any]:
    """Score one response; every way in which a scorer can fail becomes an error of a named kind."""
    try:
        score = env.score(prompt, text)
    except MemoryError:
        return {"error": "memory", "message": "the scorer ran out of memory"}
    except (Exception, SystemExit) as error:
        return {"error": "exception", "message": f"{type(error).__name__}: {error}"[:500]}
    fault = _fault(score)
    return {"error": "invalid", "message": fault} if fault else {
        "reward": float(score.reward), "metrics": {key: float(value) for key, value in score.metrics.items()}}


def _fault(score: object) -> str | None:
    """Why a scorer's return value is not a score; None when it is one."""
    if not isinstance(score, Score):
        return f"the scorer must return a Score, not {type(score).__name__}"
    if not isinstance(score.metrics, dict):
        return f"metrics must be a dict, not {type(score.metrics).__name__}"
    for key, value in [("reward", score.reward), *score.metrics.items()]:
        if not isinstance(key, str):
            return f"a metric's name must be a string, not {type(key).__name__}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{key} must be a number, not {type(value).__name__}"
        if not math.isfinite(value):
            return f"{key} is not finite"
    return f"reward is beyond {MAX_REWARD:g}" if abs(score.reward) > MAX_REWARD else None


def serve(requests: BinaryIO, replies: BinaryIO) -> int:
    """Answer requests until their end; the return value is the exit status."""
    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")

    setup = json.loads(requests.readline())
    try:
        limit_resources(setup["memory_limit_mb"])
        envs = {name: construct(id, name=name, args=args, seed=seed)
                for name, (id, args, seed) in setup["specs"].items()}
    except Exception as error:         # reported to the pool, which raises it
        reply({"failed": f"{type(error).__name__}: {error}"})
        return 1
    reply({"ready": True, "overtaxed": {name: vars(env.overtaxed) for name, env in envs.items() if env.overtaxed}})
    process = os.getpid()
    for line in requests:
        for item in json.loads(line)["items"]:
            prompt = Prompt(**item["prompt"])
            answer = score_item(envs[prompt.env], prompt, item["text"])
            if os.getpid() != process:
                os._exit(0)
            reply({"id": item["id"]} | answer)
            if answer.get("error") == "memory":
                return 1               # what is left of this process is not to be trusted
    return 0


def main() -> int:
    """Serve until the end of the input."""
    die_with(int(sys.argv[1]))
    return serve(*child.private_streams())


if __name__ == "__main__":
    sys.exit(main())
