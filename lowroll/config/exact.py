"""What `rollout.exact` cannot be beside. The model and the machine are looked at when a run starts
(`model.exact`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowroll.config.section import Problem

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig


def exact_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Settings under which rollouts and learner cannot have the same bits."""
    rollout, train = cfg.rollout, cfg.train
    if not rollout.exact:
        return
    bounded = rollout.cache.policy != "dense" or rollout.cache.kv_dtype is not None
    clean = cfg.noise is not None and cfg.noise.learner == "clean"
    others = (
        ("rollout.engine", rollout.engine != "native", "native: vLLM's kernels are others"),
        ("rollout.kv", bounded, "null: every key, unrounded"),
        (
            "rollout.large_batch_weights",
            rollout.large_batch_weights is not None,
            "null: one format",
        ),
        ("train.forward", train.forward not in ("dense", "aligned"), "aligned, as it will be"),
        ("train.replay_kv", train.replay_kv, "false: no key is dropped"),
        ("noise", clean, "null, or noise.learner: shared"),
        ("dtype", cfg.dtype == "bfloat16" and cfg.device == "cpu", "float32 on a CPU"),
    )
    for key, asked, instead in others:
        if asked:
            yield (("rollout", "exact"), tuple(key.split("."))), f"it needs {key} {instead}"
