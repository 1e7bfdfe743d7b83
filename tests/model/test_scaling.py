"""Update-aware scaling: the same function with other weights, once, and an update that flips more
codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.model import hf, lora, scaling
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.trainer import state as states
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.weights.publish import publish, quantize_base, rollout_copy
from lowroll.weights.update_metrics import AdapterWatch, WeightWatch, _codes, num_flipped
from tests.fixtures.sequences import IDS, logits
from tests.fixtures.tiny import FAMILIES, hf_folder


def parameters(model: Transformer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_model_without_norms_in_front_is_refused(tmp_path: Path) -> None:
    model = hf.load(hf_folder(tmp_path / "m", "olmo2"))
    before = parameters(model)
    with pytest.raises(ValueError, match="uaq_scale: Olmo2ForCausalLM has no norms in front of"):
        scaling.scale(model, 1.5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", [f for f in FAMILIES if "olmo" not in f])
@pytest.mark.parametrize("s", [1.5, 2.0, 0.4])
def test_logits_stay(tmp_path: Path, family: str, s: float) -> None:
    model = hf.load(hf_folder(tmp_path / "m", family))
    before, weights = logits(model), parameters(model)
    after = logits(scaling.scale(model, s))
    bound = 1e-5 if model.spec.delta is None else 5e-5  # a state sums over tokens
    assert (after - before).abs().max() <= bound * before.abs().max()
    for name, p in model.named_parameters():
        factor = s if name.endswith(("input_norm.weight", "post_attention_norm.weight")) else 1.0
        factor = (
            1 / s
            if name.endswith(
                (
                    "qkv.weight",
                    "qkvz.weight",
                    "qkv_a.weight",
                    "ba_weight",
                    "gate_up.weight",
                    "router.weight",
                    "shared_gate",
                )
            )
            else factor
        )
        offset = model.spec.norm_offset if factor == s else 0.0
        want = (weights[name] + offset) * factor - offset
        tolerance = 2e-6 if offset else 0.0
        torch.testing.assert_close(p.detach(), want, rtol=2e-7, atol=tolerance, msg=name)
        assert factor != 1 or torch.equal(p, weights[name]), name


def test_exact_factors_are_exact(tmp_path: Path) -> None:
    """1 changes no bit of the weights; a power of two changes none of the logits."""
    folder = hf_folder(tmp_path / "m", "qwen3-tied-bias")
    one = scaling.scale(hf.load(folder), 1.0)
    assert all(
        torch.equal(p, q)
        for p, q in zip(one.parameters(), hf.load(folder).parameters(), strict=True)
    )
    assert torch.equal(logits(scaling.scale(hf.load(folder), 2.0)), logits(hf.load(folder)))


def test_never_twice_not_even_after_saving(tmp_path: Path) -> None:
    import transformers

    model = scaling.scale(hf.load(hf_folder(tmp_path / "m", "qwen2")), 1.5)
    assert scaling.applied(model) == 1.5
    hf.save(model, tmp_path / "scaled")
    assert json.loads((tmp_path / "scaled" / "config.json").read_text())[scaling.KEY] == 1.5
    again = hf.load(tmp_path / "scaled")
    assert torch.equal(logits(again), logits(model))  # exported as it stands: bitwise
    for scaled in (model, again):
        before = parameters(scaled)
        with pytest.raises(ValueError, match=r"scaled by 1\.5 before"):
            scaling.scale(scaled, 1.5)
        assert all(torch.equal(p, before[name]) for name, p in scaled.named_parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "scaled").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS[None]).logits[0], logits(model), rtol=0, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3")
    for s in (0.0, -1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="uaq_scale: must be finite and positive"):
            scaling.scale(hf.load(folder), s)
    for odd in (quantize_base(hf.load(folder), "int8"), lora.attach(hf.load(folder), 2, 4.0)):
        before = parameters(odd)
        with pytest.raises(ValueError, match=r"blocks\.0\.qkv is quantized or has an adapter"):
            scaling.scale(odd, 1.5)
        assert all(torch.equal(p, before[name]) for name, p in odd.named_parameters())


def test_a_checkpoint_knows_the_scale_of_its_weights(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3")

    def made(s: float | None) -> tuple[Transformer, Optimizer]:
        model = hf.load(folder).requires_grad_(True)
        model = model if s is None else scaling.scale(model, s)
        return model, Optimizer(model.trainable_parameters(), OptimSettings())

    tensors, state = states.capture(*made(1.5))
    assert state["uaq_scale"] == 1.5
    model, optimizer = made(1.5)
    states.restore(model, optimizer, tensors, state)
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), made(1.5)[0].parameters(), strict=True)
    )
    for other, words in (
        (made(None), "carry 1.5, and the model None"),
        (made(2.0), "carry 1.5, and the model 2.0"),
    ):
        with pytest.raises(ValueError, match=words):
            states.restore(*other, tensors, state)


def test_an_adapter_is_folded_for_the_base_as_it_was(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen2")
    model = lora.attach(scaling.scale(hf.load(folder), 1.5), rank=3, alpha=6.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    lora.save(model, tmp_path / "adapter", base=str(folder), input_scale=1.5)
    apart = lora.load(hf.load(folder), tmp_path / "adapter")
    torch.testing.assert_close(
        logits(apart), logits(model), rtol=0, atol=1e-5 * float(logits(model).abs().max())
    )
    lora.save(model, tmp_path / "unfolded", base=str(folder))
    wrong = lora.load(hf.load(folder), tmp_path / "unfolded")
    assert (logits(wrong) - logits(model)).abs().max() > 1e-3
    for s in (1.5, 2.0):
        for name, t in lora.state(model, s).items():
            reads_a_norm = any(
                part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
            )
            factor = s if "lora_A" in name and reads_a_norm else 1
            assert torch.equal(t, lora.state(model)[name] * factor), name
    back = lora.load(scaling.scale(hf.load(folder), 1.5), tmp_path / "adapter", input_scale=1.5)
    torch.testing.assert_close(lora.state(back), lora.state(model), rtol=2e-7, atol=0)


# -- what it is good for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "flipped"), [(1e-6, [0.00233, 0.00330, 0.00425]), (1e-5, [0.0192, 0.0285, 0.0376])]
)
def test_a_sign_update_flips_s_times_as_many_codes(rate: float, flipped: list[float]) -> None:
    """algorithms B8: W ~ N(0, 0.02), one update of the rate in sign: INT8 codes that flip at s = 1,
    1.5, 2."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(512, 1024, generator=generator)
    sign = torch.sign(torch.randn(weight.shape, generator=generator))
    shares = []
    for s in (1.0, 1.5, 2.0):
        before, after = (
            lowroll.quantize(w, "int8") for w in (weight / s, weight / s - rate * sign)
        )
        shares.append(
            int(num_flipped(before.tensors["codes"], after.tensors["codes"], 8)) / weight.numel()
        )
    assert shares == pytest.approx(flipped, rel=0.2)  # a code's step follows the width of the rows
    assert rate < 1e-5 or [share / shares[0] for share in shares] == pytest.approx(
        [1.0, 1.5, 2.0], rel=0.03
    )


@pytest.mark.parametrize(("format", "grows"), [("int8", 1.5), ("fp8", 1.4)])
def test_of_all_codes_fewer_flip_than_s_times_as_many(
    tmp_path: Path, format: str, grows: float
) -> None:
    """`weights/codes_flipped_fraction` shows it: o and down are not scaled, and stay."""
    folder, found = (
        hf_folder(tmp_path / "m", "qwen3", hidden_size=128, intermediate_size=320, head_dim=32),
        [],
    )
    for s in (1.0, 1.5):
        model = scaling.scale(hf.load(folder), s)
        engine = rollout_copy(model, format, torch.float32)
        before = {name: _codes(linear.weight).clone() for name, linear in engine.linears()}
        watch, generator = WeightWatch(model, multiplied(engine)), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, linear in model.linears():
                linear.weight.sub_(
                    1e-3 * torch.sign(torch.randn(linear.weight.shape, generator=generator))
                )
        publish(model, engine)
        flips = {
            name: int(num_flipped(before[name], _codes(linear.weight), 8))
            for name, linear in engine.linears()
        }
        found.append((flips, watch.measure()["weights/codes_flipped_fraction"]))
    (one, plain), (scaled, more) = found
    kinds = {
        kind: [
            sum(count for name, count in flips.items() if name.endswith(kind))
            for flips in (one, scaled)
        ]
        for kind in (".qkv", ".gate_up", ".o", ".down")
    }
    assert all(
        kinds[kind][1] / kinds[kind][0] == pytest.approx(grows, rel=0.06)
        for kind in (".qkv", ".gate_up")
    )
    assert all(kinds[kind][1] == kinds[kind][0] > 0 for kind in (".o", ".down"))
    assert 1.15 < more / plain < 1.35 and more / plain == pytest.approx(
        sum(scaled.values()) / sum(one.values())
    )


def test_formats_with_scales_from_the_largest_weight_keep_their_codes() -> None:
    """algorithms B8: INT8 codes of W / s differ by rounding alone, NVFP4's not; MXFP4's error
    stays."""
    weight = 0.02 * torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    plain, scaled = (lowroll.quantize(w, "int8").tensors["codes"] for w in (weight, weight / 1.5))
    assert (
        int(num_flipped(plain, scaled, 8)) / weight.numel() < 2e-3
    )  # only ties: relative error stays
    nvfp4 = [lowroll.quantize(w, "nvfp4").tensors for w in (weight, weight / 1.5)]
    for part in ("weight_packed", "weight_scale"):
        assert torch.equal(nvfp4[0][part].view(torch.uint8), nvfp4[1][part].view(torch.uint8)), part
    errors = [
        float((lowroll.quantize(w, "mxfp4").dequantize() - w).norm() / w.norm())
        for w in (weight, weight / 1.5)
    ]
    assert errors == pytest.approx([0.1143, 0.1150], rel=0.03) and errors[1] / errors[
        0
    ] == pytest.approx(1, abs=0.01)


def test_nibbles_are_counted_one_by_one() -> None:
    before = torch.tensor([0x12, 0x34, 0x56, 0x78], dtype=torch.uint8)
    after = torch.tensor([0x12, 0x35, 0x66, 0x87], dtype=torch.uint8)  # 0, 1, 1 and 2 codes differ
    assert num_flipped(before, after, 4.5) == 4
    assert num_flipped(before.view(torch.int32), after.view(torch.int32), 4.125) == 4
    assert num_flipped(before, after, 8) == 3


def multiplied(rollout: Transformer) -> dict[str, QTensor]:
    """The linear weights of an engine's model by name."""
    return {name: linear.weight for name, linear in rollout.linears()}


def codes_of(q: QTensor) -> list[int]:
    """Every code of a quantized matrix as a whole number; below 8 bits the two halves of each
    byte."""
    stored = next(
        q.tensors[name] for name in ("codes", "weight_packed", "weight") if name in q.tensors
    )
    codes = stored.view(torch.uint8).numpy().tobytes()
    return (
        list(codes)
        if get_format(q.format).bits >= 8
        else [half for c in codes for half in (c & 15, c >> 4)]
    )


@pytest.mark.parametrize("format", lowroll.formats())
def test_the_watch_measures_by_hand(tmp_path: Path, format: str) -> None:
    """Eq. 13 and 14 over all linear weights in float64, and codes that differ; then nothing moves
    and all is 0."""
    from lowroll.weights.publish import publish

    master = hf.load(hf_folder(tmp_path / "m", "llama-biases"))
    rollout = rollout_copy(master, format, torch.bfloat16 if format == "bf16" else torch.float32)
    watch = WeightWatch(master, multiplied(rollout))
    before = [linear.weight.detach().double().clone() for _, linear in master.linears()]
    old = [linear.weight.clone() for _, linear in rollout.linears()]
    with torch.no_grad():
        for i, (_, linear) in enumerate(master.linears()):
            linear.weight[0] += 0.01 * (i + 1)
    publish(master, rollout)
    got = watch.measure()
    after = [linear.weight.detach().double() for _, linear in master.linears()]
    rounded = [linear.weight.dequantize().double() for _, linear in rollout.linears()]
    total = sum(w.numel() for w in before)
    update = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    error = sum(float((a - q).square().sum()) for a, q in zip(after, rounded, strict=True))
    assert got["weights/normalized_update"] == pytest.approx(
        update / sum(float(b.square().sum()) for b in before), rel=1e-5
    )
    assert got["weights/normalized_quant_error"] == pytest.approx(
        error / sum(float(a.square().sum()) for a in after), rel=1e-5, abs=1e-15
    )
    assert (error == 0) == (format == "fp32")
    new = [linear.weight for _, linear in rollout.linears()]
    if get_format(format).dense:
        flipped = sum(
            int((a.dequantize() != b.dequantize()).sum()) for a, b in zip(new, old, strict=True)
        )
    else:
        flipped = sum(
            x != y
            for a, b in zip(new, old, strict=True)
            for x, y in zip(codes_of(a), codes_of(b), strict=True)
        )
    assert flipped > 0 and got["weights/codes_flipped_fraction"] * total == pytest.approx(flipped)
    publish(master, rollout)
    again = watch.measure()
    assert again["weights/normalized_update"] == again["weights/codes_flipped_fraction"] == 0
    assert again["weights/normalized_quant_error"] == pytest.approx(
        got["weights/normalized_quant_error"]
    )


@pytest.mark.parametrize("format", ["fp32", "int8", "nf4"])
def test_the_watch_of_an_adapter_measures_the_merged_weights(tmp_path: Path, format: str) -> None:
    """Eq. 13 in float64 on base + (alpha / r) B A, and the base is left as it was."""
    model = quantize_base(hf.load(hf_folder(tmp_path / "m", "llama-biases")), format)
    lora.attach(model, 3, 12.0, ("q_proj", "v_proj", "down_proj"))
    bases = [linear.weight.dequantize().double().clone() for _, linear in model.linears()]

    def merged() -> list[Tensor]:
        weights = [base.clone() for base in bases]
        for (_, linear), w in zip(model.linears(), weights, strict=True):
            for part in linear.adapter.a if linear.adapter else ():
                w[linear.rows(part)] += (
                    4 * linear.adapter.b[part].double() @ linear.adapter.a[part].double()
                )
        return weights

    def learn(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.trainable_parameters().values():
                p.add_(0.1 * torch.randn(p.shape, generator=generator))

    learn(0)
    watch, before = AdapterWatch(model), merged()
    learn(1)
    after = merged()
    want = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True)) / sum(
        float(b.square().sum()) for b in before
    )
    assert (
        watch.measure() == {"weights/normalized_update": pytest.approx(want, rel=1e-5)}
        and want > 1e-4
    )
    assert watch.measure() == {"weights/normalized_update": 0.0}
    assert all(
        torch.equal(linear.weight.dequantize().double(), base)
        for (_, linear), base in zip(model.linears(), bases, strict=True)
    )
