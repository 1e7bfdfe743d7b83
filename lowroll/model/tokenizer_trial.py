"""A trial of an untrusted tokenizer.json in a bounded child process (`model.tokenizer_child`).

Its patterns and normalizers may loop, fill the memory, or panic in the library, which `except
Exception` misses.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from lowroll import machine
from lowroll.model.files import MOST_TOKENIZER, regular
from lowroll.types import printable

# 150,000 tokens take 0.4 s and 170 MB
SECONDS = 60  # of processor time
WALL_SECONDS = 300.0  # wall clock
MEMORY_MB = 2048
_CHILD_SCRIPT = Path(__file__).with_name("tokenizer_child.py")
_accepted_digests: set[bytes] = set()


def attempt(path: Path) -> None:
    """Encode texts with the file in a child. ValueError names the file and the problem."""
    regular(path, MOST_TOKENIZER)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if digest in _accepted_digests:
        return
    problem = _try(path)
    if problem:
        raise ValueError(f"{printable(path)}: {printable(problem)}")
    _accepted_digests.add(digest)


def _try(path: Path) -> str:
    command = [sys.executable, "-P", str(_CHILD_SCRIPT), str(path), str(MEMORY_MB), str(SECONDS)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=machine.kept_env("PYTHONPATH"),
            timeout=WALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"a tokenizer that is not loaded after {WALL_SECONDS:g} s"
    if result.returncode == 0:
        return result.stdout.decode(errors="replace").strip()
    return (
        f"its process ended while it was tried (status {result.returncode}); a tokenizer may not take "
        f"more than {SECONDS} s of processor time and {MEMORY_MB:,} MB of memory"
    )
