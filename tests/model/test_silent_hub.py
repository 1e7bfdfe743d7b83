"""A hub that does not answer is one line soon, and the cache is used."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from lowroll.model.folder import resolve
for _ in range(2):
    try:
        print(resolve("owner/name", weights=False))
    except ValueError as error:
        print(error)
"""


def resolved(cache: Path) -> list[str]:
    """Return what a process prints whose hub takes connections and never answers; the hub's client
    alone would try for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        env = {
            **os.environ,
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HOME": str(cache),
        }
        env.pop("HF_HUB_OFFLINE", None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_hub_that_is_silent_is_one_line_soon(tmp_path: Path) -> None:
    first, second = resolved(tmp_path)
    assert first == second and first.startswith(
        "model: 'owner/name' is no local folder, and the hub"
    )
    assert "does not answer within 3 s" in first and "not in the hub's cache" in first


def test_what_is_in_the_cache_needs_no_hub(tmp_path: Path) -> None:
    home = tmp_path / "hub/models--owner--name"
    (home / "snapshots/0123").mkdir(parents=True)
    (home / "snapshots/0123/config.json").write_text("{}")
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0123")
    assert resolved(tmp_path) == [str(home / "snapshots/0123")] * 2
