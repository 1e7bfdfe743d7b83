"""Settings with which a run would fit, each verified by a plan.

A single setting comes first, in its mildest value that fits; otherwise several, the cheapest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lowroll.config import RunConfig
from lowroll.config.document import dotted
from lowroll.model.lora import NOT_IN_VLLM, attention_targets
from lowroll.runs.assembly import engines
from lowroll.runs.memory.plan import MemoryPlan, Planner, shown

NAMED = 4  # most alternatives offered
Change = Mapping[tuple[str, ...], Any]  # values by sections and key
RELEASE_CACHE: Change = {("rollout", "release_cache"): True}


def check(planner: Planner, cfg: RunConfig, cached: int | None = None) -> MemoryPlan:
    """Return the plan of a run. ValueError names the missing bytes and settings that would fit.
    cached: a resumed run's cache tokens, which it keeps."""
    if cached is not None:
        cfg = engines.with_rollout(cfg, cache_tokens=cached)
    plan = planner.plan(cfg)
    if not plan.missing:
        return plan
    if cached is None:
        raise ValueError(f"{plan.problem}; {advice(planner, cfg)}")
    hint = ""  # no other setting that saves memory may change at a resumption
    if _fits(planner, cfg, RELEASE_CACHE):
        hint = f"; it would fit with {_describe(RELEASE_CACHE)}"
    raise ValueError(f"resume: a run keeps the KV cache that it began with: {plan.problem}{hint}")


def advice(planner: Planner, cfg: RunConfig) -> str:
    single_changes = list(fitting_alone(planner, cfg))
    if single_changes:
        return "it would fit with " + ", or with ".join(map(_describe, single_changes[:NAMED]))
    changes, smallest_plan = fitting_together(planner, cfg)
    if smallest_plan.missing:
        return f"no setting of the run is enough: with {_describe(changes)} it needs {shown(smallest_plan.peak)}"
    return f"it would fit with {_describe(changes)} together"


def fitting_alone(planner: Planner, cfg: RunConfig) -> Iterator[Change]:
    """Yield, for each setting, the mildest value with which the run fits."""
    for knob in _knobs(planner, cfg):
        for change in knob:
            if _fits(planner, cfg, change):
                yield change
                break


def _fits(planner: Planner, cfg: RunConfig, change: Change) -> bool:
    planned = changed(planner, cfg, change)
    return planned is not None and not planned.missing


def fitting_together(planner: Planner, cfg: RunConfig) -> tuple[Change, MemoryPlan]:
    """Return a minimal set of changes with which the run fits, else all that save anything, and the
    plan."""
    changes, plan = _add_changes(planner, cfg)
    if not plan.missing:
        for change in list(changes):  # a later, stronger change may make this one unneeded
            fewer = [other_change for other_change in changes if other_change is not change]
            smaller_plan = changed(planner, cfg, *fewer)
            if smaller_plan is not None and not smaller_plan.missing:
                changes, plan = fewer, smaller_plan
    return {key: value for change in changes for key, value in change.items()}, plan


def _add_changes(planner: Planner, cfg: RunConfig) -> tuple[list[Change], MemoryPlan]:
    changes: list[Change] = []
    plan = planner.plan(cfg)
    for knob in _knobs(planner, cfg):
        savings: list[tuple[Change, MemoryPlan]] = []
        for change in knob:
            new_plan = changed(planner, cfg, *changes, change)
            if new_plan is not None and new_plan.peak < plan.peak:
                savings.append((change, new_plan))
        if not savings:
            continue
        fitting = [(change, new_plan) for change, new_plan in savings if not new_plan.missing]
        change, plan = fitting[0] if fitting else min(savings, key=lambda saving: saving[1].peak)
        changes.append(change)
        if fitting:
            break
    return changes, plan


def changed(planner: Planner, cfg: RunConfig, *changes: Change) -> MemoryPlan | None:
    """Return the plan of the changed run; None for an invalid one."""
    tree = cfg.model_dump()
    for change in changes:
        for (*section_names, key), value in change.items():
            section = tree
            for name in section_names:
                section = section[name]
            section[key] = value
    try:
        return planner.plan(RunConfig.model_validate(tree))
    except ValueError:  # includes pydantic's
        return None


def _describe(change: Change) -> str:
    return ", ".join(f"{dotted(key)}: {_yaml(value)}" for key, value in change.items())


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return "null" if value is None else str(value)


def _knobs(planner: Planner, cfg: RunConfig) -> list[list[Change]]:
    """Return the changes of each setting, the cheapest setting and mildest value first."""
    rollout, train = cfg.rollout, cfg.train.sized()
    longest = max((work.prompt + work.response for work in planner.workloads), default=1)
    recomputed = train.activation_checkpointing or 0
    values: dict[tuple[str, ...], Sequence[Any]] = {
        ("rollout", "cache_tokens"): [None],
        ("rollout", "vllm", "gpu_memory_utilization"): [0.4, 0.3, 0.2],
        ("rollout", "release_cache"): [True],
        ("train", "weight_metrics"): [False],
        ("rollout", "keep_dense"): [False],
        ("train", "logprob_chunk"): _halves(train.logprob_chunk or 0, 128),
        ("train", "activation_checkpointing"): [
            *(share for share in (0.25, 0.5, 0.75, 1.0) if share > recomputed),
            True,
        ],
        ("train", "tokens_per_microbatch"): _halves(train.together, longest),
        ("rollout", "max_batch"): _halves(rollout.max_batch, 8),
        ("train", "optimizer"): ["adamw8bit"],
    }
    knobs: list[list[Change]] = [[{key: value} for value in values[key]] for key in values]
    return knobs if train.lora else [*knobs, [_train_adapter(planner, cfg)]]


def _halves(first: int, least: int) -> list[int]:
    halves = (first >> times for times in range(1, first.bit_length()))
    return [value for value in halves if value >= least]


def _train_adapter(planner: Planner, cfg: RunConfig) -> Change:
    change: dict[tuple[str, ...], Any] = {("train", "lora"): True}
    if planner.model.spec.mixture.num_experts:  # its matrices take no adapter
        targets = attention_targets(planner.model.spec)
        if cfg.rollout.engine == "vllm":
            targets = tuple(target for target in targets if target != NOT_IN_VLLM)
        change["train", "lora_target_modules"] = targets
    return change
