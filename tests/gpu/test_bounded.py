"""On a CUDA device: caches that a policy bounds, through captured decode steps, against attention
on the CPU over exactly the keys that stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowroll import Engine, Request
from lowroll.engine.runner import Runner
from lowroll.engine.sequence import StepPlan
from lowroll.model import hf
from lowroll.types import Group
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import prompt
from tests.fixtures.masters import nudge
from tests.fixtures.policies import (
    Bounded,
    ChosenH2O,
    ChosenRKV,
    ChosenSnapKV,
    ChosenStreaming,
    Liked,
    Parity,
    Recent,
    check_group,
    distributions,
)
from tests.fixtures.tiny import hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

LARGE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
STEM = prompt(40, 1)
REQUESTS = [
    Request(STEM + prompt(9, 2), n=8, max_tokens=60, seed=1),
    Request(prompt(5, 3), n=1, max_tokens=90, seed=2, temperature=0.8, ignore_eos=True),
    Request(STEM + prompt(3, 4), n=2, max_tokens=50, seed=3, stop_ids=(9, 17)),
    Request(prompt(30, 5), n=8, max_tokens=70, seed=4, ignore_eos=True),
]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The orders that the runners of a test got."""
    counted: Counter[str] = Counter()
    run = Runner.run

    def watched(runner: Runner, plan: StepPlan, *more: Any) -> Any:
        counted["steps"] += plan.steps * bool(plan.decodes)
        counted["compactions"] += len(plan.compactions)
        counted["forks"] += len(plan.forks)
        counted["waits"] += bool(plan.limits) and min(plan.limits) < plan.steps
        return run(runner, plan, *more)

    monkeypatch.setattr(Runner, "run", watched)
    return counted


def numbers(groups: list[Group]) -> list[tuple[list[int], list[float]]]:
    return [(r.token_ids, r.logprobs) for group in groups for r in group.rollouts]


def snapkv(budget: int, buffer: int) -> ChosenSnapKV:
    return ChosenSnapKV(budget, buffer, window=3, kernel=3)


def rkv(budget: int, buffer: int) -> ChosenRKV:
    return ChosenRKV(budget, buffer, window=3, kernel=3)


@pytest.mark.parametrize("max_batch", [6, 32])
@pytest.mark.parametrize("kind", [Recent, Parity, Liked, ChosenStreaming, ChosenH2O, snapkv, rkv])
def test_captured_steps_over_bounded_caches_are_the_cpus(
    kind: Callable[[int, int], Bounded],
    max_batch: int,
    tmp_path: Path,
    counts: Counter[str],
) -> None:
    """float32: shared prompts over and under the budget, samples in waves, rows that wait for their
    compaction within a run of steps. Steps one by one give the same bits."""
    folder, kv = hf_folder(tmp_path / "m"), kind(20, 11)
    options = {"weights": "fp32", "kv": kv, "cache_tokens": 4096, "max_batch": max_batch}
    engine = Engine(folder, device="cuda", **options)
    groups = engine.generate(REQUESTS)
    assert engine.scheduler.lookahead == 16
    assert engine.runner.decoder.replays == counts["steps"] > 0
    assert counts["compactions"] > 30 and counts["forks"] >= 8 and counts["waits"] > 0
    assert engine.pool.num_used == engine.scheduler.reserved_pages == 0

    host = hf.load(folder)
    assert sum(check_group(kv, group, [host], 2e-3) for group in groups) > 30
    on_cpu = Engine(folder, device="cpu", **options).generate(REQUESTS)
    assert [ids for ids, _ in numbers(groups)] == [ids for ids, _ in numbers(on_cpu)]
    assert max(gaps(groups, on_cpu)) < 2e-3

    engine.reset_prefix_cache()
    assert numbers(engine.generate(REQUESTS)) == numbers(groups)  # with state that others left
    eager = Engine(folder, device="cuda", cuda_graphs=False, **options)
    assert numbers(eager.generate(REQUESTS)) == numbers(groups)
    assert eager.runner.decoder.replays == 0


def gaps(groups: list[Group], others: list[Group]) -> list[float]:
    pairs = zip(numbers(groups), numbers(others), strict=True)
    return [
        abs(a - b) for (_, mine), (_, theirs) in pairs for a, b in zip(mine, theirs, strict=True)
    ]


@pytest.mark.parametrize("kind", [Recent, Parity])
@pytest.mark.parametrize("weights", ["bf16", "nvfp4"])
def test_many_rows_in_half_precision_keep_the_same_keys(
    weights: str,
    kind: Callable[[int, int], Bounded],
    tmp_path: Path,
    counts: Counter[str],
) -> None:
    """48 rows, whose attention reads shared pages once for several. The engine's log-probs are
    those of the keys that stay, and not those of all keys."""
    master, kv = hf.load(hf_folder(tmp_path / "m", **LARGE), "cuda", torch.bfloat16), kind(32, 16)
    options = {"weights": weights, "kv": kv, "cache_tokens": 8192, "max_batch": 64}
    engine = Engine(master, **options)
    many = [Request(prompt(60, i), n=8, max_tokens=90, seed=i, ignore_eos=True) for i in range(6)]
    groups = engine.generate(many)
    assert engine.runner.decoder.replays == counts["steps"] > 0 and counts["compactions"] > 48
    bounded, dense = (mean_gap(engine, groups[0], policy) for policy in (kv, None))
    assert bounded < 0.1 and bounded < dense / 3
    eager = Engine(master, cuda_graphs=False, **options)
    assert numbers(eager.generate(many)) == numbers(groups)


def mean_gap(engine: Engine, group: Group, policy: Bounded | None) -> float:
    """Nats between the recorded log-probs and the oracle's, over the engine's own weights."""
    prompt_ids, differences = group.request.prompt_ids, list[Tensor]()
    for rollout in group.rollouts:
        ids = prompt_ids + rollout.token_ids
        logits_TV, _ = distributions(policy, ids, len(prompt_ids), [engine.model] * len(ids))
        logp_TV = logits_TV.float().cpu().log_softmax(-1)
        want_T = logp_TV.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        differences.append((want_T - torch.tensor(rollout.logprobs)).abs())
    return torch.cat(differences).mean().item()


def test_weights_change_between_captured_steps_of_bounded_caches(tmp_path: Path) -> None:
    folder, kv = hf_folder(tmp_path / "m"), Parity(20, 11)
    later = nudge(hf.load(folder, "cuda", torch.float32), 5, size=0.05)
    engine = Engine(folder, weights="fp32", device="cuda", kv=kv, cache_tokens=4096, max_batch=32)
    handles = [engine.add(request) for request in REQUESTS]
    done = dict(group for _ in range(3) for group in engine.step())
    engine.update_weights(WeightUpdate.local(later, 1))
    doomed = engine.add(REQUESTS[3])
    while engine.has_work:
        done |= dict(engine.step())
        engine.abort(doomed)
    groups = [done[handle] for handle in handles]
    assert any(len(r.behavior.policy) == 2 for group in groups for r in group.rollouts)
    models = [hf.load(folder), later.to("cpu")]
    assert sum(check_group(kv, group, models, 2e-3) for group in groups) > 20
