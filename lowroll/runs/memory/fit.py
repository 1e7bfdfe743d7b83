"""The search for settings with which a run fits: each change is planned before it is suggested.

A single setting comes first, in its mildest value that fits. Otherwise several together: they are
added in order, the cheapest first, and unneeded ones are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lowroll.config import RunConfig
from lowroll.config.document import dotted
from lowroll.runs.assembly import engines
from lowroll.runs.memory.plan import MemoryPlan, Planner, shown

NAMED = 4  # most settings offered, each enough by itself
Change = Mapping[tuple[str, ...], Any]  # values by sections and key


def check(planner: Planner, cfg: RunConfig, cached: int | None = None) -> MemoryPlan:
    """Return the plan of a run. ValueError when it does not fit: by how much, and which settings
    would. cached: cache tokens of a resumed run, which keeps them; of the settings that save memory
    it may only change rollout.release_cache."""
    if cached is None:
        plan = planner.plan(cfg)
        if plan.missing:
            raise ValueError(f"{plan.problem}; {advice(planner, cfg)}")
        return plan
    kept = engines.with_cache(cfg, cached)
    plan = planner.plan(kept)
    if plan.missing:
        enough = [one for one in _release(planner, kept) if _fits(planner, kept, one)]
        offer = "; it would fit with " + _said(enough[0]) if enough else ""
        raise ValueError(
            f"resume: a run keeps the KV cache that it began with: {plan.problem}{offer}"
        )
    return plan


def advice(planner: Planner, cfg: RunConfig) -> str:
    """Name the settings that would fit, as text."""
    alone = list(fitting_alone(planner, cfg))
    if alone:
        return "it would fit with " + ", or with ".join(map(_said, alone[:NAMED]))
    together, least = fitting_together(planner, cfg)
    if least.missing:
        return (
            f"no setting of the run is enough: with {_said(together)} it needs {shown(least.peak)}"
        )
    return f"it would fit with {_said(together)} together"


def fitting_alone(planner: Planner, cfg: RunConfig) -> Iterator[Change]:
    """Yield, for each setting, the mildest value with which the run fits."""
    for values in KNOBS:
        for change in values(planner, cfg):
            if _fits(planner, cfg, change):
                yield change
                break


def _fits(planner: Planner, cfg: RunConfig, change: Change) -> bool:
    planned = changed(planner, cfg, change)
    return planned is not None and not planned.missing


def fitting_together(planner: Planner, cfg: RunConfig) -> tuple[Change, MemoryPlan]:
    """Return a minimal set of changes with which the run fits, and their plan; if it never fits,
    all that save anything."""
    chosen: list[Change] = []
    best = planner.plan(cfg)
    for values in KNOBS:
        found = [
            (change, changed(planner, cfg, *chosen, change)) for change in values(planner, cfg)
        ]
        saving = [(change, plan) for change, plan in found if plan and plan.peak < best.peak]
        if not saving:
            continue
        enough = [pair for pair in saving if not pair[1].missing]
        change, best = enough[0] if enough else min(saving, key=lambda pair: pair[1].peak)
        chosen.append(change)
        if enough:
            break
    for change in list(chosen):
        fewer = [one for one in chosen if one is not change]
        planned = changed(planner, cfg, *fewer)
        if planned is not None and planned.missing <= best.missing and not best.missing:
            chosen, best = fewer, planned
    return {key: value for change in chosen for key, value in change.items()}, best


def changed(planner: Planner, cfg: RunConfig, *changes: Change) -> MemoryPlan | None:
    """Return the plan of the changed run; None for an invalid one."""
    tree = cfg.model_dump()
    for change in changes:
        for (*sections, key), value in change.items():
            section = tree
            for name in sections:
                section = section[name]
            section[key] = value
    try:
        return planner.plan(RunConfig.model_validate(tree))
    except ValueError:  # includes pydantic's
        return None


def _said(change: Change) -> str:
    return ", ".join(f"{dotted(key)}: {_yaml(value)}" for key, value in change.items())


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _halves(first: int, least: int) -> list[int]:
    found, now = [], first // 2
    while now >= max(1, least):
        found.append(now)
        now //= 2
    return found


def _cache(planner: Planner, cfg: RunConfig) -> list[Change]:
    if cfg.rollout.cache_tokens is None:
        return []
    return [{("rollout", "cache_tokens"): None}]


def _vllm(planner: Planner, cfg: RunConfig) -> list[Change]:
    if cfg.rollout.engine == "native":
        return []
    key, now = ("rollout", "vllm", "gpu_memory_utilization"), cfg.rollout.vllm
    return [{key: x} for x in (0.4, 0.3, 0.2) if x < now.gpu_memory_utilization]


def _release(planner: Planner, cfg: RunConfig) -> list[Change]:
    return [] if cfg.rollout.release_cache else [{("rollout", "release_cache"): True}]


def _metrics(planner: Planner, cfg: RunConfig) -> list[Change]:
    return [{("train", "weight_metrics"): False}] if cfg.train.weight_metrics else []


def _keep_dense(planner: Planner, cfg: RunConfig) -> list[Change]:
    return [{("rollout", "keep_dense"): False}] if cfg.rollout.keep_dense else []


def _chunk(planner: Planner, cfg: RunConfig) -> list[Change]:
    return [
        {("train", "logprob_chunk"): n} for n in _halves(cfg.train.sized().logprob_chunk or 0, 128)
    ]


def _checkpointing(planner: Planner, cfg: RunConfig) -> list[Change]:
    now = cfg.train.sized().activation_checkpointing or False
    shares = [] if now is True else [x for x in (0.25, 0.5, 0.75, 1.0) if x > now] + [True]
    return [{("train", "activation_checkpointing"): x} for x in shares]


def _microbatch(planner: Planner, cfg: RunConfig) -> list[Change]:
    shortest = max((w.prompt + w.response for w in planner.workloads), default=1)
    sizes = _halves(cfg.train.together, shortest)
    return [{("train", "tokens_per_microbatch"): n} for n in sizes]


def _batch(planner: Planner, cfg: RunConfig) -> list[Change]:
    return [{("rollout", "max_batch"): n} for n in _halves(cfg.rollout.max_batch, 8)]


def _optimizer(planner: Planner, cfg: RunConfig) -> list[Change]:
    return [] if cfg.train.optimizer == "adamw8bit" else [{("train", "optimizer"): "adamw8bit"}]


def _lora(planner: Planner, cfg: RunConfig) -> list[Change]:
    if cfg.train.lora:
        return []
    change: dict[tuple[str, ...], Any] = {("train", "lora"): True}
    if planner.model.spec.num_experts:  # its matrices take no adapter
        change["train", "lora_target_modules"] = ("q_proj", "k_proj", "v_proj", "o_proj")
    return [change]


# the cheapest first
KNOBS: tuple[Callable[[Planner, RunConfig], list[Change]], ...] = (
    _cache,
    _vllm,
    _release,
    _metrics,
    _keep_dense,
    _chunk,
    _checkpointing,
    _microbatch,
    _batch,
    _optimizer,
    _lora,
)
