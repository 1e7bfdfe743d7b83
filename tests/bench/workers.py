"""A child that speaks the protocol of `bench.vllm_worker` without vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# {mode} is how it goes wrong, after so many calls
FAKE = """
import json, sys, time
sys.path.insert(0, {root!r})
from bench.vllm_worker import serve
def load(settings):
    calls = []
    def generate(prompts, new_tokens, asked):
        calls.append(prompts)
        print("call", len(calls), file=sys.stderr)
        if {mode!r} == "dies" and len(calls) > {after}: sys.exit(3)
        if {mode!r} == "hangs" and len(calls) > {after}: time.sleep(60)
        return len(prompts) * new_tokens - ({mode!r} == "short")
    if {mode!r} == "refuses": raise ValueError("no kernel for " + settings["format"])
    return generate, {{"ready": True, "seconds": 2.5, "vllm": "0.24.0"}}
serve(sys.stdin, lambda answer: print(json.dumps(answer), flush=True), load)
"""


def fake(folder: Path, mode: str = "", after: int = 0) -> list[str]:
    """The command that starts it."""
    script = folder / "worker.py"
    script.write_text(FAKE.format(root=str(ROOT), mode=mode, after=after))
    return [sys.executable, str(script)]
