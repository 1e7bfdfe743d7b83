"""From master to rollout weights at the edges: AWQ's floors and grid, alignment that ends, a second
model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowroll.model import hf
from lowroll.weights import aligned_forward, awq
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.publish import beside, digest, publish, quantize_base, rollout_copy
from tests.fixtures.sequences import IDS, logits
from tests.fixtures.tiny import hf_folder

FAMILY = "qwen3-tied-bias"


@pytest.mark.slow
def test_awq_searches_twenty_ratios_and_counts_its_blocks(folder: Path) -> None:
    assert awq.RATIOS == pytest.approx([0.05 * i for i in range(20)])
    told: list[tuple[int, int]] = []
    awq.calibrate(
        hf.load(folder), "int4", [IDS.tolist()], lambda done, total: told.append((done, total))
    )
    assert told == [(1, 2), (2, 2)]


def test_a_silent_channels_factor_is_the_floor() -> None:
    """loudness 0: s = 1e-4 before the scale; a weight of 0: 1e-4 below the line."""
    w = torch.tensor([[1.0, 2.0, 0.0, 2.0]])
    s = torch.tensor([1 / (0.5**0.5 + 1e-4), 1e-4, 1 / 1e-4, 1 / (1 + 1e-4)], dtype=torch.float64)
    got = awq.factors(w, torch.tensor([1.0, 0.0, 1.0, 1.0]), 0.5, None)
    torch.testing.assert_close(got, (s / (s.max() * s.min()).sqrt()).float(), rtol=1e-6, atol=0)


def test_alignment_ends_over_a_quantized_base_and_in_plain_floating_point(folder: Path) -> None:
    full = aligned_forward.align(hf.load(folder), "int8")
    lora_base = aligned_forward.align(quantize_base(hf.load(folder), "int8"), "int8")
    aligned_forward.realign(full, "int4")
    assert {linear.aligned.format for _, linear in full.linears()} == {"int4"}
    for model, format in ((full, "fp32"), (lora_base, "int8"), (lora_base, "fp32")):
        aligned_forward.realign(model, format)
        assert all(linear.aligned is None for _, linear in model.linears())
    assert torch.equal(logits(full), logits(hf.load(folder)))


def test_an_aligned_learner_publishes_into_another_format_as_any_other(folder: Path) -> None:
    learner, plain = aligned_forward.align(hf.load(folder), "int8"), hf.load(folder)
    for format in ("int8", "int4"):
        rollout = rollout_copy(hf.load(folder), format, torch.float32)
        with torch.no_grad():
            for model in (learner, plain):
                for _, linear in model.linears():
                    linear.weight.mul_(1.25)
        aligned_forward.refresh(learner)
        publish(learner, rollout)
        assert digest(rollout) == digest(rollout_copy(plain, format, torch.float32))


def test_the_second_model_multiplies_in_its_own_format(folder: Path) -> None:
    master = hf.load(folder)
    rollout = rollout_copy(master, "int4", torch.float32)
    second = beside(master, rollout, "int8")
    assert torch.equal(logits(second), logits(rollout_copy(master, "int8", torch.float32)))
    assert not torch.equal(logits(second), logits(rollout)) and not second.training


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied-bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_made_of_the_head_before_a_publication_is_made_anew(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A product's own copy of a matrix that learns, where a processor has one, must not outlive
    it."""
    master = hf.load(hf_folder(tmp_path / "m", family), dtype=dtype)
    rollout = rollout_copy(master, "int8", dtype)
    before = logits(rollout)
    with torch.no_grad():
        master.lm_head_weight.mul_(1.5).add_(0.1)
    publish(master, rollout)
    assert torch.equal(logits(rollout), logits(rollout_copy(master, "int8", dtype)))
    assert not torch.equal(logits(rollout), before)


@pytest.mark.parametrize(
    ("noise", "moved"), [(None, False), (Noise(3, 0.0), False), (Noise(3, 1e-3), True)]
)
def test_noise_is_on_the_norms_when_there_is_some(
    folder: Path, noise: Noise | None, moved: bool
) -> None:
    master = hf.load(folder)
    rollout = rollout_copy(master, "int8", torch.float32, noisy=True)
    clean = logits(rollout)
    publish(master, rollout, noise)
    assert torch.equal(logits(rollout), clean) != moved
    publish(master, rollout)
    assert torch.equal(logits(rollout), clean)


def test_a_frozen_base_is_shared_and_another_ones_is_refused(folder: Path) -> None:
    base, other = quantize_base(hf.load(folder), "int8"), quantize_base(hf.load(folder), "int8")
    rollout = rollout_copy(base.requires_grad_(False), "int8", torch.float32)
    assert rollout.shared >= {f"{name}.weight" for name, _ in rollout.linears()}
    assert all(
        a.weight is b.weight
        for (_, a), (_, b) in zip(rollout.linears(), base.linears(), strict=True)
    )
    publish(base, rollout)
    with pytest.raises(ValueError, match="belongs to another model, whose base the engine shares"):
        publish(other, rollout)
    assert not rollout_copy(hf.load(folder).requires_grad_(True), "int8", torch.float32).shared
