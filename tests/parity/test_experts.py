"""Mixture of experts against transformers' Qwen3-MoE and GLM-4.5 and against loops over tokens;
routing, formats, adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

import lowroll
from lowroll import Engine, Request
from lowroll.kernels.moe import grouped
from lowroll.kernels.moe.route import choose_by, sort_slots
from lowroll.kernels.moe.scores import Routing, SigmoidRouting
from lowroll.model import hf, lora
from lowroll.model.experts import EngineExperts, Experts, LearnerExperts, Router
from lowroll.model.spec import ModelSpec, read_spec, spec_from_config
from lowroll.model.transformer import Transformer, initialize
from lowroll.quant.formats import QTensor
from lowroll.trainer import recompute
from lowroll.weights import aligned_forward, awq
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import hf_folder

SEQUENCES = random_sequences([9, 1, 14])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / "moe", "qwen3-moe")


@pytest.fixture
def spec(folder: Path) -> ModelSpec:
    return read_spec(folder)


def experts_of(spec: ModelSpec, seed: int = 0, kind: type[Experts] = LearnerExperts) -> Experts:
    experts = kind(spec, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return experts


# -- routing ---------------------------------------------------------------------------------------


def test_the_router_by_hand(spec: ModelSpec) -> None:
    """Equal experts: the lower one is chosen first; the weights are those of the chosen alone, and
    sum to 1."""
    router = Router(spec, "cpu", torch.float32)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0, 1.0])
    x_TD = torch.zeros(2, spec.hidden_size)
    x_TD[0, 0] = 1.0  # token 0: experts 1, 3, 4 are equal; token 1: all are
    weights_TS, experts_TS = router(x_TD)
    assert experts_TS.tolist() == [[1, 3], [0, 1]]
    torch.testing.assert_close(weights_TS, torch.full((2, 2), 0.5))
    router.renormalize = False
    z = 3 * torch.e**2 + 2 * torch.e + 1
    torch.testing.assert_close(router(x_TD)[0], torch.tensor([[torch.e**2 / z] * 2, [1 / 6] * 2]))


@pytest.mark.parametrize(
    ("groups", "kept", "choices"), [(1, 1, 5), (4, 2, 3), (6, 5, 10), (2, 2, 7)]
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_corrected_sigmoids_are_those_of_transformers(
    groups: int, kept: int, choices: int, renormalize: bool
) -> None:
    config = Glm4MoeConfig(
        hidden_size=16,
        n_routed_experts=12,
        num_experts_per_tok=choices,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=renormalize,
        routed_scaling_factor=1.7,
    )
    theirs = Glm4MoeTopkRouter(config)
    generator = torch.Generator().manual_seed(groups)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(12, 16, generator=generator))
        theirs.e_score_correction_bias.copy_(0.3 * torch.randn(12, generator=generator))
    x_TD = torch.randn(40, 16, generator=generator)
    logits_TE, want_TS, experts_TS = theirs(x_TD)
    sigmoids = SigmoidRouting(theirs.e_score_correction_bias, groups, kept, 1.7)
    found_TS, chosen_TS = choose_by(logits_TE, Routing(choices, renormalize, sigmoids=sigmoids))
    want_TE = torch.zeros(40, 12).scatter(1, experts_TS, want_TS)
    torch.testing.assert_close(torch.zeros(40, 12).scatter(1, chosen_TS, found_TS), want_TE)


def test_slots_are_sorted_by_expert_and_the_earlier_first() -> None:
    groups = sort_slots(torch.tensor([[4, 0], [0, 4], [2, 4]]), 6)
    assert groups.slot_P.tolist() == [1, 2, 4, 0, 3, 5] and groups.ends_E.tolist() == [
        2,
        2,
        3,
        3,
        6,
        6,
    ]
    assert groups.place_P[groups.slot_P].tolist() == list(range(6))
    assert groups.bounds == [(0, 2), (2, 2), (2, 3), (3, 3), (3, 6), (6, 6)]


def test_products_of_groups_and_their_gradient() -> None:
    """Against a loop over rows; the expert without rows gets a zero gradient."""
    generator = torch.Generator().manual_seed(0)
    x_PK, w_ENK = torch.randn(7, 5, generator=generator), torch.randn(4, 3, 5, generator=generator)
    experts_P = torch.tensor([0, 0, 1, 3, 3, 3, 3])
    groups = sort_slots(experts_P[:, None], 4)
    y_PN = grouped.product(x_PK, w_ENK.transpose(1, 2), groups)
    torch.testing.assert_close(
        y_PN, torch.stack([w_ENK[e] @ x for e, x in zip(experts_P, x_PK, strict=True)])
    )
    want = torch.zeros(4, 3, 5)
    for e, y, x in zip(experts_P, y_PN, x_PK, strict=True):
        want[e] += torch.outer(y, x)
    torch.testing.assert_close(grouped.outer(y_PN, x_PK, groups), want)


# -- a model ---------------------------------------------------------------------------------------


def test_checkpointing_changes_no_gradient(folder: Path) -> None:
    grads = []
    for checkpointing in (False, True):
        model = hf.load(folder).requires_grad_(True)
        recompute.apply(model, checkpointing)
        forward(model, SEQUENCES).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({"num_local_experts": 0}, "num_local_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
def test_configs_that_are_refused(folder: Path, changes: dict[str, object], words: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=words):
        spec_from_config({**config, **changes})


def test_both_names_of_the_number_of_experts_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    older = {**config, "num_experts": config.pop("num_local_experts")}
    older.pop("num_local_experts", None)
    assert spec_from_config(older) == read_spec(folder)


# -- low bits --------------------------------------------------------------------------------------

FORMATS = [
    name for name in lowroll.formats() if name not in ("fp8_block", "nf4_dq")
]  # whose blocks are too large


@pytest.mark.parametrize("format", FORMATS)
def test_the_engines_product_is_every_experts_own(spec: ModelSpec, format: str) -> None:
    """As if each expert were a matrix with the codes and scales that it has in the stack."""
    linear = experts_of(spec, kind=EngineExperts).gate_up
    linear.set_weight(lowroll.quantize(linear.weight, format))
    assert isinstance(linear.weight, QTensor)
    rows = 2 * spec.mixture.expert_size
    groups = sort_slots(torch.tensor([[0], [5], [0], [2]]), 6)
    x_PK = torch.randn(4, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    got = linear.multiply(x_PK, groups)
    for place, expert in enumerate((0, 0, 2, 5)):
        whole = linear.weight.linear(x_PK[place : place + 1])[
            :, expert * rows : (expert + 1) * rows
        ]
        torch.testing.assert_close(got[place : place + 1], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "fp8", "nvfp4", "int4", "mxfp4", "nf4"])
@pytest.mark.parametrize("family", ["qwen3-moe", "glm4-moe", "glm4-moe-groups"])
def test_decode_is_the_learners_forward(family: str, format: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", family)
    engine = Engine(
        folder, weights=format, device="cpu", cache_tokens=1024, page_size=4, prefill_chunk=3
    )
    group = engine.generate([Request(SEQUENCES[0], n=3, max_tokens=12, temperature=0.8, seed=3)])[0]
    sequences = [SEQUENCES[0] + r.token_ids for r in group.rollouts]
    again = lowroll.score(engine.model, sequences, [len(SEQUENCES[0])] * 3, temperature=0.8)
    bound = {"int8": 0.1, "fp8": 0.3, "bf16": 0.2}.get(format, 1e-4)
    for rollout, logp in zip(group.rollouts, again, strict=True):
        assert (torch.tensor(rollout.logprobs) - logp).abs().max() < bound


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "fp8", "nvfp4", "int4", "mxfp4", "nf4"])
def test_low_bit_folders_hold_every_expert_and_come_back_bitwise(
    folder: Path, format: str, tmp_path: Path
) -> None:
    model = quantize_base(hf.load(folder), format)
    hf.save(model, tmp_path / "low")
    again = hf.load(tmp_path / "low")
    assert digest(again) == digest(model) and torch.equal(
        forward(again, SEQUENCES), forward(model, SEQUENCES)
    )
    config = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]
    skipped = config.get("ignore", config.get("llm_int8_skip_modules"))
    assert any("mlp" in name and "gate" in name for name in skipped)
    with torch.no_grad():
        assert torch.isfinite(forward(rollout_copy(again, format, again.dtype), SEQUENCES)).all()


@pytest.mark.parametrize("format", ["int8", "fp8", "nvfp4"])
def test_publication_is_in_place_and_an_aligned_learner_is_the_engine(
    folder: Path, format: str
) -> None:
    master = aligned_forward.align(hf.load(folder).requires_grad_(True), format)
    rollout = rollout_copy(master, format, torch.float32)
    places = [
        t.data_ptr() for _, linear in rollout.linears() for t in linear.weight.tensors.values()
    ]
    for _ in range(2):
        with torch.no_grad():
            for p in master.parameters():
                p.add_(0.05 * torch.randn_like(p))
        aligned_forward.refresh(master)
        publish(master, rollout)
        assert digest(master) == digest(rollout)
        with torch.no_grad():
            assert torch.equal(forward(rollout, SEQUENCES), forward(master, SEQUENCES))
    assert places == [
        t.data_ptr() for _, linear in rollout.linears() for t in linear.weight.tensors.values()
    ]
    forward(master, SEQUENCES).square().sum().backward()
    for i in range(2):
        grad = master.blocks[i].experts.gate_up.weight.grad
        assert grad is not None and torch.isfinite(grad).all() and grad.abs().max() > 0


def test_the_straight_through_gradient_is_that_of_the_dequantized_weights(spec: ModelSpec) -> None:
    """Rows rounded by nothing (nvfp4): the aligned gradient equals the one of a model that holds
    those weights."""
    plain, x_TD = (
        experts_of(spec),
        torch.randn(9, spec.hidden_size, generator=torch.Generator().manual_seed(1)),
    )
    held = experts_of(spec)
    for linear, other in ((plain.gate_up, held.gate_up), (plain.down, held.down)):
        linear.aligned = lowroll.quantize(linear.weight, "nvfp4")
        with torch.no_grad():
            other.weight.copy_(linear.aligned.dequantize())
    for experts in (plain, held):
        experts(x_TD).square().sum().backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), held.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_low_bits_have_no_gradient(spec: ModelSpec) -> None:
    experts = experts_of(spec, kind=EngineExperts)
    for linear in (experts.gate_up, experts.down):
        linear.set_weight(lowroll.quantize(linear.weight, "int8"))
    with pytest.raises(ValueError, match="no gradient"):
        experts(torch.randn(2, spec.hidden_size).requires_grad_())


def test_blocks_over_two_experts_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="nf4_dq: .* end within one of its blocks"):
        quantize_base(hf.load(folder), "nf4_dq")


# -- adapters and the rest -------------------------------------------------------------------------


def test_adapters_ride_on_attention_alone(folder: Path, tmp_path: Path) -> None:
    model = hf.load(folder)
    with pytest.raises(
        ValueError,
        match="lora_target_modules: down_proj, gate_proj, up_proj are experts' matrices.*; "
        "choose out of q_proj, k_proj, v_proj, o_proj$",
    ):
        lora.attach(model, 2, 4.0)
    lora.attach(quantize_base(model, "nvfp4"), 2, 4.0, ("q_proj", "o_proj"), seed=1)
    forward(model, SEQUENCES).square().sum().backward()
    learning = model.trainable_parameters()
    assert (
        all(".qkv.adapter." in name or ".o.adapter." in name for name in learning)
        and len(learning) == 8
    )
    assert all(p.grad is not None for p in learning.values())
    with torch.no_grad():
        for p in learning.values():
            p.add_(0.1)
    lora.save(model, tmp_path / "adapter", base=str(folder))
    again = lora.load(quantize_base(hf.load(folder), "nvfp4"), tmp_path / "adapter")
    assert torch.equal(forward(again, SEQUENCES), forward(model, SEQUENCES))


def test_awq_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="awq: Qwen3MoeForCausalLM has experts"):
        awq.calibrate(hf.load(folder), "int4", SEQUENCES)


def test_initialize_fills_every_expert(spec: ModelSpec) -> None:
    model = initialize(Transformer(spec), 0)
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters
    for p in model.parameters():
        assert torch.isfinite(p).all() and (p.ndim == 1 or 0.001 < p.std() < 0.05)
