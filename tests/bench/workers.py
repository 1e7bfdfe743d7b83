"""A child that answers as `bench.vllm_worker` does, without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

# {mode} is how it goes wrong
FAKE = """
import sys, time
from bench.vllm_worker import serve
def load(settings):
    calls = []
    def generate(prompts, new_tokens, asked):
        calls.append(prompts)
        print("call", len(calls), file=sys.stderr)
        if {mode!r} == "dies": sys.exit(3)
        if {mode!r} == "hangs": time.sleep(60)
        return len(prompts) * new_tokens - ({mode!r} == "short")
    if {mode!r} == "refuses": raise ValueError("no kernel for " + settings["format"])
    return generate, {{"ready": True, "seconds": 2.5, "vllm": "0.24.0"}}
serve(load)
"""


def fake(folder: Path, mode: str = "") -> list[str]:
    """Return the command that starts it."""
    script = folder / "worker.py"
    script.write_text(FAKE.format(mode=mode))
    return [sys.executable, str(script)]
