"""The settings that `rollout.exact` cannot be combined with. The model and the machine are looked
at when a run starts (`model.exact`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowroll.config.section import Problem

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig

Bar = tuple[str, bool, str]  # a setting, whether it is in the way, what it would have to be


def exact_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Settings under which rollouts and learner cannot have the same bits, where they are to."""
    if not cfg.rollout.exact:
        return
    for key, asked, instead in (*bars_engine(cfg), *_bars_learner(cfg)):
        if asked:
            yield (("rollout", "exact"), tuple(key.split("."))), f"it needs {key} {instead}"


def bars_engine(cfg: RunConfig) -> tuple[Bar, ...]:
    """Return the settings an engine needs to give a request the same bits in any batch."""
    rollout = cfg.rollout
    bounded = rollout.cache.policy != "dense" or rollout.cache.kv_dtype is not None
    second = rollout.large_batch_weights is not None
    return (
        ("rollout.engine", rollout.engine != "native", "native: vLLM's kernels are others"),
        ("rollout.kv", bounded, "null: every key, unrounded"),
        ("rollout.large_batch_weights", second, "null: one format"),
    )


def _bars_learner(cfg: RunConfig) -> tuple[Bar, ...]:
    train = cfg.train
    clean = cfg.noise is not None and cfg.noise.learner == "clean"
    return (
        ("train.forward", train.forward not in ("dense", "aligned"), "aligned, as it will be"),
        ("train.replay_kv", train.replay_kv, "false: no key is dropped"),
        ("noise", clean, "null, or noise.learner: shared"),
        ("dtype", cfg.dtype == "bfloat16" and cfg.device == "cpu", "float32 on a CPU"),
    )
