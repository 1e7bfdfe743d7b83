"""The modules that a run loads: those that it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.fixtures.runs import settings

UNUSED = (
    "ray",
    "vllm",
    "aiohttp",
    "lowroll.engine.remote",
    "lowroll.server",
    "lowroll.runs.roles",
    "lowroll.runs.hub",
    "lowroll.runs.format_search",
    "lowroll.trainer.sharded_checkpoint",
    "lowroll.advantages.custom",
    "lowroll.runs.assembly.vllm",
    "lowroll.config.surogate",
    "lowroll.metrics.report",
    "lowroll.metrics.plots",
)
IMPORT = """
import json, sys
import lowroll.runs.grpo

assert not {"lowroll.engine.native", "lowroll.engine.scheduler"} & sys.modules.keys()
"""
RUN = """
lowroll.runs.grpo.run(json.loads(sys.argv[1]))
assert {"lowroll.engine.native", "lowroll.engine.scheduler"} <= sys.modules.keys()
"""
CHECK = f"""
unused = {UNUSED}
loaded = [m for m in sys.modules if any(m == name or m.startswith(name + ".") for name in unused)]
assert not loaded, ", ".join(loaded)
"""


def test_a_run_in_one_process_loads_what_it_uses(model: Path, tmp_path: Path) -> None:
    """The engine is loaded when it is made; roles, Ray, remote engines, vLLM, Surogate's files, the
    hub and the report never are."""
    tree = settings(model, tmp_path / "run", rollout={"weights": "dense"}, train={"max_steps": 2})
    done = subprocess.run(
        [sys.executable, "-c", IMPORT + CHECK + RUN + CHECK, json.dumps(tree)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
