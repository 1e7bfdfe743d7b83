"""Quantization noise: the published schedules, draws that depend on the tag alone, clean norms at
sigma 0, sharing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowroll
from lowroll import Engine, Request
from lowroll.model import hf, lora
from lowroll.model.scaling import scale
from lowroll.model.transformer import Transformer
from lowroll.weights.exploration_noise import Noise, NoiseSchedule, muted, noisy_norms, share
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.formats import FEW
from tests.fixtures.sequences import IDS, logits

REQUEST = Request(IDS[:9].tolist(), n=3, max_tokens=12, seed=5, ignore_eos=True)
NOISE = Noise(seed=11, sigma=0.1)
NOISY = ("input_norm.weight", "post_attention_norm.weight")
FAMILY = "qwen3-tied-bias"


def weights_of(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# -- schedules -------------------------------------------------------------------------------------

# algorithms C1, K = 10, 1e-2 -> 1e-4: interval or k -> (paper, code)
TABLE = [
    (0, 0),
    (1e-2, 1e-2),
    (5.99484e-3, 5.62341e-3),
    (3.59381e-3, 3.16228e-3),
    (2.15443e-3, 1.77828e-3),
    (1.29155e-3, 1e-3),
    (7.74264e-4, 5.62341e-4),
    (4.64159e-4, 3.16228e-4),
    (2.78256e-4, 1.77828e-4),
    (1.66810e-4, 1e-4),
    (1e-4, None),
]


def test_both_exponential_variants() -> None:
    paper, code = (NoiseSchedule(variant=variant).sigmas for variant in ("paper", "code"))
    assert paper == pytest.approx([row[0] for row in TABLE], rel=1e-5)
    assert code == pytest.approx([row[1] for row in TABLE[:-1]], rel=1e-5)
    five = NoiseSchedule(sigma_start=5e-2, sigma_end=5e-4).sigmas
    assert five == pytest.approx([5 * sigma for sigma in code])


@pytest.mark.parametrize(
    ("total", "rows"),
    [
        (
            40,
            {
                0: 0,
                3: 0,
                4: 1e-2,
                7: 1e-2,
                8: 5.62341e-3,
                12: 3.16228e-3,
                16: 1.77828e-3,
                20: 1e-3,
                36: 1e-4,
                39: 1e-4,
                40: 1e-4,
                99: 1e-4,
            },
        ),
        (25, {0: 0, 2: 0, 3: 1e-2, 4: 1e-2, 5: 5.62341e-3, 22: 1.77828e-4, 23: 1e-4, 25: 1e-4}),
        (5, {0: 0, 1: 5.62341e-3, 5: 1e-4}),
    ],
)
def test_steps_of_the_code_variant(total: int, rows: dict[int, float]) -> None:
    schedule = NoiseSchedule(total_steps=total)
    assert [schedule.sigma(step) for step in rows] == pytest.approx(list(rows.values()), rel=1e-5)


def test_steps_of_the_paper_variant() -> None:
    schedule = NoiseSchedule(variant="paper", total_steps=44)  # 11 intervals of 4 steps
    assert [schedule.sigma(4 * k + i) for k in range(11) for i in (0, 3)] == pytest.approx(
        [row[0] for row in TABLE for _ in range(2)], rel=1e-5
    )


def test_other_shapes_by_hand() -> None:
    """n = 4 values from 0.4 to 0.1 after the silent stage."""
    values = {
        name: NoiseSchedule(0.4, 0.1, 5, name).sigmas
        for name in ("linear", "cosine", "logarithmic")
    }
    assert values["linear"] == pytest.approx([0, 0.4, 0.3, 0.2, 0.1])
    assert values["cosine"] == pytest.approx([0, 0.4, 0.325, 0.175, 0.1])  # cos 60 degrees is 1/2
    assert values["logarithmic"] == pytest.approx(
        [0, 0.4, 0.25, 0.4 - 0.3 * math.log(3) / math.log(4), 0.1]
    )  # ln 2 / ln 4 is 1/2


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("name", ["exponential", "linear", "cosine", "logarithmic"])
def test_few_stages(name: str, variant: str) -> None:
    for stages in (1, 2, 3):
        sigmas = NoiseSchedule(0.4, 0.1, stages, name, variant).sigmas
        count = stages if variant == "paper" else max(1, stages - 1)
        assert len(sigmas) == 1 + count and sigmas[:2] == [0, 0.4]
        assert count == 1 or sigmas[-1] == pytest.approx(0.1)
    assert (
        NoiseSchedule(0.4, 0.1, 1, name, "code", total_steps=10).sigma(9) == 0
    )  # QeRL's K = 1: silent to the end
    assert NoiseSchedule(0.4, 0.1, 2, name, "code", total_steps=10).sigma(5) == 0.4


@pytest.mark.parametrize("sigma", [math.nan, math.inf, -0.1])
def test_no_noise_has_such_a_sigma(sigma: float) -> None:
    """It would reach the engine's norms: nothing that it drew afterwards would be a number."""
    with pytest.raises(ValueError, match="sigma"):
        Noise(1, sigma)


# -- draws -----------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_version_and_norm_alone() -> None:
    schedule = NoiseSchedule(total_steps=10, seed=3)
    draws = [
        schedule.at(4).draw("a", 8),
        schedule.at(5).draw("a", 8),
        schedule.at(4).draw("b", 8),
        replace(schedule, seed=4).at(4).draw("a", 8),
    ]
    again = NoiseSchedule(total_steps=10, seed=3).at(4)
    assert torch.equal(draws[0], again.draw("a", 8)) and 0 <= again.seed < 2**63
    assert all(
        not torch.equal(a / a.norm(), b / b.norm()) for i, a in enumerate(draws) for b in draws[:i]
    )
    torch.testing.assert_close(Noise(again.seed, 2 * again.sigma).draw("a", 8), 2 * draws[0])
    long = Noise(1, 0.05).draw("a", 100_000)
    assert float(long.std()) == pytest.approx(0.05, rel=0.01) and abs(float(long.mean())) < 5e-4


@pytest.mark.parametrize(
    ("sigma", "changed"),
    [
        (1e-2, 0.77),
        (5.62341e-3, 0.605),
        (3.16228e-3, 0.375),
        (1.77828e-3, 0.149),
        (1e-3, 0.024),
        (5e-4, 0),
        (1e-4, 0),
    ],
)
def test_bfloat16_norms_of_size_one_would_lose_small_noise(sigma: float, changed: float) -> None:
    """algorithms C2, the reason for float32 norms: the share of channels that change, beside 1 in
    float32."""
    noisy = 1 + Noise(3, sigma).draw("norm", 400_000)
    assert float((noisy.bfloat16() != 1).float().mean()) == pytest.approx(changed, abs=0.005)
    assert float((noisy != 1).float().mean()) > 0.99


# -- publication -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["bf16", *FEW])
def test_noise_lands_on_the_norms_and_goes_without_a_trace(folder: Path, format: str) -> None:
    master, dtype = hf.load(folder), torch.bfloat16 if format == "bf16" else torch.float32
    clean, noisy = (rollout_copy(master, format, dtype, noisy=flag) for flag in (False, True))
    assert torch.equal(logits(noisy), logits(clean))  # made for noise, without noise
    places = {name: p.data_ptr() for name, p in noisy.named_parameters()}
    names = [name for name, _ in noisy_norms(noisy)]
    assert len(names) == 4 and not any("q_norm" in name for name in names) and "norm" not in names
    for sigma in (0.1, 1e-6, 0.1):
        publish(master, noisy, Noise(11, sigma))
        for name, p in noisy.named_parameters():
            mine = clean.get_parameter(name)
            if not name.endswith(NOISY):
                assert torch.equal(p, mine) and p.dtype == dtype, name
            else:
                drawn = Noise(11, sigma).draw(name.removesuffix(".weight"), p.numel())
                assert p.dtype == torch.float32 and torch.equal(p, mine.float() + drawn), name
                assert (
                    sigma > 1e-3 or (p != mine.float()).float().mean() > 0.5
                )  # bfloat16 would drop them all
        assert not torch.equal(logits(noisy), logits(clean)) or sigma < 1e-3
    for silent in (None, Noise(11, 0.0)):
        publish(master, noisy, NOISE)
        publish(master, noisy, silent)
        assert torch.equal(logits(noisy), logits(clean))
        assert dtype != torch.float32 or digest(noisy) == digest(clean)
    assert places == {name: p.data_ptr() for name, p in noisy.named_parameters()}


def test_publication_is_a_function_of_master_and_noise(folder: Path) -> None:
    master = hf.load(folder)
    rollout = rollout_copy(master, "int8", torch.float32, noisy=True)
    stamps: dict[Noise | None, str] = {}
    for noise in (
        None,
        NOISE,
        Noise(12, 0.1),
        Noise(11, 0.2),
        NOISE,
        None,
        Noise(12, 0.1),
        Noise(11, 0.2),
    ):
        publish(master, rollout, noise)
        assert stamps.setdefault(noise, digest(rollout)) == digest(rollout)
    assert len(set(stamps.values())) == 4


def scaled(folder: Path, s: float, format: str, adapted: bool) -> Transformer:
    """The same policy at every s, its adapter too: what is behind a norm reads s x."""
    model = hf.load(folder)
    if s != 1:
        scale(model, s)
    if not adapted:
        return model
    lora.attach(quantize_base(model, format), 3, 6.0, seed=1)
    generator = torch.Generator().manual_seed(7)
    for name, linear in model.linears():
        for part, b in linear.adapter.b.items():
            b.data.normal_(0, 0.2, generator=generator)
            linear.adapter.a[part].data.div_(s if name.endswith(("qkv", "gate_up")) else 1.0)
    return model


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_noise_has_the_same_effect_at_every_scale(folder: Path, format: str, adapted: bool) -> None:
    """Engine and sharing learner are the same noisy policy at s = 1, 1.5, 3 and, after saving, from
    a folder. A power of two changes no bit, and where there are codes, others change those of
    activations that lie near a tie."""
    policies: dict[float, tuple[Tensor, Tensor]] = {}
    moved: dict[float, float] = {}  # the KL of clean to noisy rollouts
    for s in (1.0, 1.5, 2.0, 3.0):
        learner = scaled(folder, s, format, adapted)
        engine = Engine(
            learner,
            weights=format,
            device="cpu",
            dtype=torch.float32,
            cache_tokens=1024,
            noisy=True,
        )
        clean = logits(engine.model)
        engine.update_weights(WeightUpdate.local(learner, 1, NOISE))
        share(learner, NOISE)
        policies[s] = logits(engine.model), logits(learner)
        moved[s] = float(
            F.kl_div(
                policies[s][0].log_softmax(-1),
                clean.log_softmax(-1),
                log_target=True,
                reduction="batchmean",
            )
        )
    assert list(moved.values()) == pytest.approx(
        [moved[1.0]] * 4, rel=1e-3 if format == "fp32" else 0.1
    )
    for s, mine in policies.items():
        for got, want in zip(mine, policies[1.0], strict=True):
            assert (format == "int8" and s != 2) or (got - want).abs().max() <= (
                0 if s == 2 else 1e-4
            ), s
    if not adapted:
        hf.save(scaled(folder, 3.0, format, False), folder.parent / f"scaled-{format}")
        saved = rollout_copy(
            hf.load(folder.parent / f"scaled-{format}"), format, torch.float32, noisy=True
        )
        publish(hf.load(folder.parent / f"scaled-{format}"), saved, NOISE)
        assert torch.equal(logits(saved), policies[3.0][0])


def test_an_engine_that_was_not_made_for_noise_refuses_it(folder: Path) -> None:
    dense, shared = hf.load(folder), lora.attach(quantize_base(hf.load(folder), "int8"), 2, 4.0)
    for master, format, dtype in ((dense, "bf16", torch.bfloat16), (shared, "int8", torch.float32)):
        rollout = rollout_copy(master, format, dtype)
        before = digest(rollout)
        with pytest.raises(ValueError, match=r"blocks\.0\.input_norm\.weight cannot take noise"):
            publish(master, rollout, NOISE)
        assert digest(rollout) == before


@pytest.mark.parametrize("format", ["bf16", *FEW])
def test_a_lora_learner_keeps_its_clean_norms(folder: Path, format: str) -> None:
    """Base, embedding and final norm stay shared; the noisy norms are the engine's own."""
    learner = lora.attach(quantize_base(hf.load(folder), format), 3, 6.0, seed=1)
    before = weights_of(learner)
    engine = Engine(learner, weights=format, device="cpu", cache_tokens=1024, noisy=True)
    engine.update_weights(WeightUpdate.local(learner, 1, NOISE))
    assert all(torch.equal(p, before[name]) for name, p in learner.named_parameters())
    shared = {
        name
        for name, p in engine.model.named_parameters()
        if p.data_ptr() == dict(learner.named_parameters())[name].data_ptr()
    }
    if format != "bf16":  # there the norms are cast anyway
        assert shared == {
            name for name in before if ".adapter." not in name and not name.endswith(NOISY)
        }


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", *FEW])
def test_the_tag_names_the_noise_and_replays_it(folder: Path, format: str) -> None:
    master = hf.load(folder)
    engine = Engine(
        master, weights=format, device="cpu", cache_tokens=1024, page_size=4, noisy=True
    )
    clean = engine.generate([REQUEST])[0].rollouts
    engine.update_weights(WeightUpdate.local(master, 1, NOISE))
    noisy = engine.generate([REQUEST])[0].rollouts  # the prefix cache holds clean pages
    tag = noisy[0].behavior
    assert (tag.noise_seed, tag.noise_sigma) == (11, 0.1)
    assert (clean[0].behavior.noise_seed, clean[0].behavior.noise_sigma) == (None, 0.0)
    assert [r.logprobs for r in noisy] != [r.logprobs for r in clean]
    engine.update_weights(WeightUpdate.local(master, 2))
    again = engine.generate([REQUEST])[0].rollouts
    assert [r.token_ids for r in again] == [r.token_ids for r in clean]
    assert (again[0].behavior.noise_seed, again[0].behavior.noise_sigma) == (None, 0.0)
    fresh = Engine(
        hf.load(folder), weights=format, device="cpu", cache_tokens=1024, page_size=4, noisy=True
    )
    replayed = fresh.update_weights(
        WeightUpdate.local(hf.load(folder), 1, Noise(tag.noise_seed, tag.noise_sigma))
    )
    assert replayed.policy[0].digest == tag.policy[0].digest
    assert [r.token_ids for r in fresh.generate([REQUEST])[0].rollouts] == [
        r.token_ids for r in noisy
    ]


# -- the learner's share ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_noise_is_the_engines_bit_for_bit(folder: Path, dtype: torch.dtype) -> None:
    format = "fp32" if dtype == torch.float32 else "bf16"
    learner = hf.load(folder, dtype=dtype)
    rollout = rollout_copy(learner, format, dtype, noisy=True)
    publish(learner, rollout, NOISE)
    plain = logits(learner)
    share(learner, NOISE)
    for (_, ours), (_, theirs) in zip(noisy_norms(learner), noisy_norms(rollout), strict=True):
        assert torch.equal(ours.weight.float() + ours.noise, theirs.weight)
    assert torch.equal(logits(learner), logits(rollout)) and not torch.equal(logits(learner), plain)
    with muted(learner):
        assert torch.equal(logits(learner), plain)
    assert torch.equal(logits(learner), logits(rollout))
    share(learner, Noise(11, 0.0))
    assert torch.equal(logits(learner), plain)


def test_gradients_flow_through_the_noise_and_saving_does_not_see_it(
    folder: Path, tmp_path: Path
) -> None:
    learner = hf.load(folder).requires_grad_(True)
    share(learner, NOISE)
    norm = learner.blocks[0].input_norm
    x = torch.randn(5, norm.weight.numel(), generator=torch.Generator().manual_seed(0))
    norm(x).sum().backward()
    want = (x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()).sum(0)
    torch.testing.assert_close(norm.weight.grad, want)
    hf.save(learner, tmp_path / "saved")
    assert torch.equal(hf.load(tmp_path / "saved").blocks[0].input_norm.weight, norm.weight)


def test_the_learner_scores_the_rollouts_of_a_shared_noise_as_the_engine_did(folder: Path) -> None:
    master = hf.load(folder)
    engine = Engine(master, weights="fp32", device="cpu", cache_tokens=1024, noisy=True)
    engine.update_weights(WeightUpdate.local(master, 1, NOISE))
    rollouts = engine.generate([REQUEST])[0].rollouts
    sequences = [REQUEST.prompt_ids + r.token_ids for r in rollouts]
    clean = lowroll.score(master, sequences, [9] * 3)
    share(master, NOISE)
    shared = lowroll.score(master, sequences, [9] * 3)
    gaps = [
        max(
            float((torch.tensor(r.logprobs) - lp).abs().max())
            for r, lp in zip(rollouts, scores, strict=True)
        )
        for scores in (shared, clean)
    ]
    assert gaps[0] < 1e-4 and gaps[1] > 100 * gaps[0]
