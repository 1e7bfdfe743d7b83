"""A sample of the differential fuzz, and that it sees what it is there for (`python -m tests.fuzz`
runs it in full)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lowroll.engine.runner import Runner
from lowroll.engine.sequence import StepPlan
from tests import fuzz
from tests.fixtures.policies import ChosenH2O, ChosenRKV, ChosenSnapKV, ChosenStreaming


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_mixes_give_every_request_what_it_would_get_alone(seed: int) -> None:
    verdict = fuzz.run_block(seed, mixes=10)
    assert verdict.differences == [] and verdict.tokens > 100 and verdict.borderline <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("mistral-window", "qwen2-window", "olmo3", "gemma3", "smollm3", "olmo2", "granite"),
        "gpt-oss",
    ],
)
def test_mixes_of_families(family: str) -> None:
    """Windows; and layers without positions, norms after attention and constants under policies
    that drop keys."""
    for seed in (1, 2):
        verdict = fuzz.run_block(seed, mixes=5, family=family)
        assert verdict.differences == [] and verdict.tokens > 50


POLICIES = [
    ChosenStreaming(7, 3, 2),
    ChosenH2O(8, 3),
    ChosenSnapKV(7, 3, 3, 3),
    ChosenRKV(7, 3, 3, 3, 0.3),
]
FP32 = fuzz.Family("qwen3", "fp32", False, None, torch.float32, "cpu")
NVFP4 = replace(FP32, weights="nvfp4")
JOINTS = [
    *((replace(FP32, weights=name), i) for i, name in enumerate((*fuzz.EXACT, *fuzz.ACTIVATIONS))),
    *((replace(FP32, weights="bf16", dtype=torch.bfloat16), i) for i in range(4)),
    *((replace(NVFP4, name="qwen3-moe"), i) for i in range(4)),
    *((replace(NVFP4, name="qwen2-tied", adapted=True), i) for i in range(4)),
    *((replace(NVFP4, large_batch="nf4"), i) for i in range(4)),
]


@pytest.mark.parametrize(
    "case", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(JOINTS)))]
)
def test_every_policy_meets_every_kind_of_weights(case: int) -> None:
    """Each format, experts, adapters, a second format for many rows; and in the mixes shared
    prompts, chunks, samplers, stops, aborts, and weights with noise that come in flight."""
    family, policy = JOINTS[case]
    block = fuzz.Block(10 + case % 8, "cpu", family, POLICIES[policy % len(POLICIES)])
    verdict = block.verdict
    while verdict.compactions < 8:
        block.mix()
    assert verdict.differences == [] and verdict.borderline <= verdict.tokens // 50


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(10))
def test_mixes_on_a_device(seed: int) -> None:
    verdict = fuzz.run_block(seed, mixes=10, device="cuda")
    assert verdict.differences == [] and verdict.tokens > 100


SOUND = Runner.run


def swapped(runner: Runner, plan: StepPlan, *more: Any) -> Any:
    """The first tokens of two prompts that end in one step are each other's."""
    drawn = SOUND(runner, plan, *more)
    first = [i for i, row in enumerate(drawn) if not row.sequence.token_ids]
    if len(first) > 1:
        a, b = drawn[first[0]], drawn[first[-1]]
        drawn[first[0]] = replace(a, token_ids=b.token_ids, logprobs=b.logprobs)
        drawn[first[-1]] = replace(b, token_ids=a.token_ids, logprobs=a.logprobs)
    return drawn


def stale(runner: Runner, plan: StepPlan, *more: Any) -> Any:
    """A key of every layer is lost."""
    drawn = SOUND(runner, plan, *more)
    for chunk in plan.prefills:
        for keys in runner.cache.keys:
            keys[chunk.sequence.pages[0], 0].zero_()
    return drawn


def repeated(runner: Runner, plan: StepPlan, *more: Any) -> Any:
    """The first of two steps' log-probs stands for both."""
    return [
        replace(row, logprobs=row.logprobs[:1] * len(row.logprobs))
        for row in SOUND(runner, plan, *more)
    ]


def lower(runner: Runner, plan: StepPlan, *more: Any) -> Any:
    """The neighbour of the token that the noise draws, with the log-prob of that one."""
    drawn = SOUND(runner, plan, *more)
    return [replace(row, token_ids=[max(2, t - 1) for t in row.token_ids]) for row in drawn]


def reversed_ranks(runner: Runner, plan: StepPlan, *more: Any) -> Any:
    """The likeliest tokens in the wrong order."""
    drawn = SOUND(runner, plan, *more)
    return [replace(row, tops=row.tops and [told[::-1] for told in row.tops]) for row in drawn]


@pytest.mark.parametrize("fault", [swapped, stale, repeated, lower, reversed_ranks])
def test_the_fuzz_sees_a_fault(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", torch.inference_mode()(fault))
    assert any(fuzz.run_block(seed, mixes=3).differences for seed in range(20))
