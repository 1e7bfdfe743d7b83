"""lowroll: reinforcement learning of language models with cheap rollouts.

The public names load on first use, so that `import lowroll` stays light.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from lowroll.types import BehaviorTag, Group, Request, Rollout

if TYPE_CHECKING:
    from lowroll.engine.native import NativeEngine as Engine
    from lowroll.model.scoring import score as score
    from lowroll.quant.formats import QTensor as QTensor
    from lowroll.quant.formats import formats as formats
    from lowroll.quant.formats import quantize as quantize
    from lowroll.runs.grpo import run as run
    from lowroll.runs.python_api import train as train
    from lowroll.weights.sync.update import WeightUpdate as WeightUpdate

__version__ = "0.1.0"
__all__ = [
    "BehaviorTag",
    "Engine",
    "Group",
    "QTensor",
    "Request",
    "Rollout",
    "WeightUpdate",
    "formats",
    "quantize",
    "run",
    "score",
    "train",
]

# Between two parallel loops OpenMP's threads spin for a millisecond, which beside a busy process is
# 40 times slower (docs/LOG.md, 2026-11-22). A short spin costs nothing on an idle machine. Torch
# reads the variable when it is loaded; a user's own policy stays.
if "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOMES = {
    "Engine": "engine.native.NativeEngine",
    "score": "model.scoring.score",
    "QTensor": "quant.formats.QTensor",
    "WeightUpdate": "weights.sync.update.WeightUpdate",
    "formats": "quant.formats.formats",
    "quantize": "quant.formats.quantize",
    "run": "runs.grpo.run",
    "train": "runs.python_api.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home, _, there = _HOMES[name].rpartition(".")
        return getattr(importlib.import_module(f"lowroll.{home}"), there)
    raise AttributeError(f"module 'lowroll' has no attribute {name!r}")
