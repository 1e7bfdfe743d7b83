"""The choice of exact computation for a run's engine and learner (`model.exact`).

`rollout.exact` decides. By default it is on where it costs almost nothing (`python -m
bench.exact`): engines on a CPU and their learners in the rollouts' low-bit format (dense ones take
a seventh longer), and on a GPU an engine with a LoRA learner of the same INT8 codes (that engine
is an eighth slower at 256 rows).
"""

from __future__ import annotations

from lowroll.config import RunConfig
from lowroll.config.engine_checks import bars_engine
from lowroll.model import exact
from lowroll.model.spec import ModelSpec
from lowroll.quant.formats import get_format
from lowroll.quant.table import is_dense
from lowroll.runs.assembly.compute import Compute

AS_FAST_ON_A_GPU = ("int8", "int8_rotated")


def of_engine(cfg: RunConfig, compute: Compute, spec: ModelSpec, format: str) -> bool:
    """Return whether an engine with weights in `format` computes exactly."""
    if cfg.rollout.exact is not None:
        return cfg.rollout.exact
    if compute.device.type != "cpu" and not _is_as_fast_on_gpu(cfg):
        return False
    if any(is_set for _, is_set, _ in bars_engine(cfg)):
        return False
    if get_format(format).dtype not in (None, compute.dtype):
        return False
    return exact.why_not(spec, compute.device, compute.dtype) is None


def _is_as_fast_on_gpu(cfg: RunConfig) -> bool:
    weights = cfg.rollout.weights
    return cfg.train.lora and weights in AS_FAST_ON_A_GPU and cfg.forward_weights == weights


def of_learner(cfg: RunConfig, compute: Compute, spec: ModelSpec) -> bool:
    """Return whether the learner computes exactly."""
    if cfg.rollout.exact is not None:
        return cfg.rollout.exact
    weights = cfg.rollout.weights
    aligned = cfg.forward_weights == weights and not is_dense(weights)
    return aligned and of_engine(cfg, compute, spec, weights)
