"""The run folder as its roles share it.

config.yaml, metrics.jsonl, checkpoints/, final/, broadcasts/    the trainer's
rollouts/, orchestrator/{ledger.jsonl, spool/, evaluations.jsonl}   the orchestrator's
roles/<role>.json     a role's heartbeat      roles/<role>/.lock   its holder
roles/rollouts.json   the orchestrator's address (zmq)
roles/weights.json    the trainer's address (nccl, cuda_ipc)
roles/tokens.json     the tokens of the engines' clients; for the user alone
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from lowroll.checkpoint.atomic_files import read_file
from lowroll.config import RunConfig

TRAINER, ORCHESTRATOR, ENGINE, LAUNCHER = "trainer", "orchestrator", "engine", "launcher"
ENGINE_ROLE = "LOWROLL_ENGINE_ROLE"  # names the engine that a process is
TOKEN, ADMIN = "LOWROLL_TOKEN", "LOWROLL_ADMIN_TOKEN"
SHORTEST = 16  # characters of a token


def engine_roles(cfg: RunConfig) -> list[str]:
    """Return the engines that a launcher starts; none if the settings name running ones."""
    if cfg.client.base_url or cfg.client.elastic.hostname is not None:
        return []
    return [f"{ENGINE}-{i}" for i in range(cfg.rollout.engines)]


def rank_role(rank: int) -> str:
    """Return the name of a learner rank; rank 0 is the trainer."""
    return f"{TRAINER}-rank{rank}" if rank else TRAINER


def new_tokens() -> dict[str, str]:
    """Return new tokens of clients and admin, as environment variables."""
    return {TOKEN: secrets.token_hex(16), ADMIN: secrets.token_hex(16)}


class RunPaths:
    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.roles = self.run / "roles"
        self.broadcasts = self.run / "broadcasts"
        self.spool = self.run / "orchestrator" / "spool"
        self.address = self.roles / "rollouts.json"
        self.direct = self.roles / "weights.json"
        self.ledger = self.run / "orchestrator" / "ledger.jsonl"

    def heartbeat(self, role: str) -> Path:
        return self.roles / f"{role}.json"

    def log(self, role: str) -> Path:
        return self.run / "logs" / f"{role}.log"

    def lock(self, role: str) -> Path:
        return self.run if role == TRAINER else self.roles / role

    def engines(self) -> list[str]:
        """Return all engines registered here, in order."""
        names = (path.stem for path in self.roles.glob(f"{ENGINE}-*.json"))
        numbers = (name.removeprefix(f"{ENGINE}-") for name in names)
        return [f"{ENGINE}-{n}" for n in sorted(int(n) for n in numbers if n.isdigit())]

    def tokens(self) -> tuple[str, str]:
        """Return the tokens of clients and admin: the environment's, else a file's, which the first
        call makes. ValueError for one token alone, or a short one."""
        env_tokens = [os.environ.get(name, "") for name in (TOKEN, ADMIN)]
        if any(env_tokens):
            for name, token in zip((TOKEN, ADMIN), env_tokens, strict=True):
                if len(token) < SHORTEST:
                    raise ValueError(
                        f"{name}: expected at least {SHORTEST} characters, as of the other of "
                        f"{TOKEN} and {ADMIN}: every role needs both, or has those of "
                        f"{self.roles / 'tokens.json'}"
                    )
            return env_tokens[0], env_tokens[1]
        path = self.roles / "tokens.json"
        self.roles.mkdir(parents=True, exist_ok=True)
        temporary = self.roles / f".tokens-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"token": secrets.token_hex(16), "admin": secrets.token_hex(16)}, file)
        try:
            os.link(temporary, path)  # atomically, and only if there is none
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        saved_tokens = json.loads(read_file(path))
        return str(saved_tokens["token"]), str(saved_tokens["admin"])
