"""GPTQ: valid codes of every format with a grid, products that lose less than those of the nearest
codes, which it gives where nothing is to be made up for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowroll
from lowroll.cli.main import main
from lowroll.model import hf, lora
from lowroll.quant import nf4
from lowroll.quant.formats import QTensor, get_format
from lowroll.quant.grid import Gridded
from lowroll.quant.groups import E2M1_LEVELS, encode_e2m1, nearest_e2m1
from lowroll.runs.calibration import calibration_sequences
from lowroll.runs.demo import build_tokenizer
from lowroll.weights import blockwise, gptq
from lowroll.weights.publish import digest, quantize_base
from tests.fixtures.loud import HELD_OUT, TEXT, logits, loud
from tests.fixtures.tiny import CALIBRATED, NORMED_UPDATES, hf_folder

GRIDDED = [name for name in lowroll.formats() if isinstance(get_format(name), Gridded)]


def matrix() -> tuple[Tensor, Tensor]:
    """Weights, and the Gram matrix of inputs that go together and differ in size."""
    draw = torch.Generator().manual_seed(0)
    w_NK = torch.randn(48, 192, generator=draw)
    mix_KK = torch.randn(192, 192, generator=draw) / 192**0.5 + torch.eye(192)
    x_TK = torch.randn(512, 192, generator=draw) @ mix_KK * torch.logspace(-1, 1, 192)
    return w_NK, x_TK.t() @ x_TK


def same(a: QTensor, b: QTensor) -> bool:
    return all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


def loss(q: QTensor, w_NK: Tensor, gram_KK: Tensor) -> float:
    d_NK = q.dequantize() - w_NK
    return float(((d_NK @ gram_KK) * d_NK).sum())


def test_formats_with_a_grid() -> None:
    known = {"int4", "int4_asym", "w4a8", "nvfp4", "mxfp4", "nf4", "int8", "fp8", "fp8_block"}
    assert known <= set(GRIDDED)


@pytest.mark.parametrize("format", [name for name in GRIDDED if name != "nf4_dq"])
def test_inputs_that_do_not_go_together_give_the_nearest_codes(format: str) -> None:
    """nf4_dq alone takes its nearest codes under an absmax that is rounded afterwards."""
    w_NK, _ = matrix()
    form = get_format(format)
    assert isinstance(form, Gridded)
    assert same(gptq.encode(w_NK, torch.eye(192), form, [1.0]), form.quantize(w_NK))


@pytest.mark.parametrize("format", GRIDDED)
def test_products_lose_less_with_the_scales_of_the_format(format: str) -> None:
    w_NK, gram_KK = matrix()
    form = get_format(format)
    assert isinstance(form, Gridded)
    nearest, rounded = form.quantize(w_NK), gptq.encode(w_NK, gram_KK, form, [1.0])
    assert loss(rounded, w_NK, gram_KK) < 0.6 * loss(nearest, w_NK, gram_KK)
    for name in form.scales(w_NK):
        assert torch.equal(rounded.tensors[name], nearest.tensors[name])
    scales = form.scales(form.turned(w_NK))
    again = form.codes(form.turned(rounded.dequantize()), scales) | scales
    assert torch.equal(QTensor(format, (48, 192), again).dequantize(), rounded.dequantize())


def test_levels_are_those_of_the_codes() -> None:
    """Ties too, of which the steps of 1/8 have all."""
    x = torch.arange(-8, 8, 1 / 8)
    assert torch.equal(nearest_e2m1(x), torch.tensor(E2M1_LEVELS)[encode_e2m1(x).int()])
    y = torch.linspace(-1.2, 1.2, 999)
    assert torch.equal(nf4.nearest_normal(y), torch.tensor(nf4.LEVELS)[nf4.encode_normal(y).int()])


def test_the_formula_by_plain_loops() -> None:
    """Without panels, and with the inverse that is made anew for every column."""
    w_NK, gram_KK = matrix()
    form = get_format("nvfp4")
    assert isinstance(form, Gridded)
    grid = form.grid(form.scales(w_NK), (48, 192))
    damped_KK = gram_KK.double() + 0.01 * gram_KK.diagonal().mean() * torch.eye(192).double()
    left = torch.argsort(gram_KK.diagonal(), descending=True).tolist()
    now_NK = w_NK.double()
    while left:
        k, others = left[0], left[1:]
        lost_N = now_NK[:, k] - grid.nearest(now_NK[:, k].float(), k).double()
        inverse = damped_KK[left][:, left].inverse()
        now_NK[:, others] -= torch.outer(lost_N / inverse[0, 0], inverse[0, 1:])
        left = others
    torch.testing.assert_close(
        gptq.compensated(w_NK, gram_KK, grid).double(), now_NK, rtol=1e-3, atol=1e-3
    )


def test_silent_channels_and_text_that_says_little() -> None:
    """A Gram matrix of low rank, or of zeros, has a factor too."""
    w_NK, gram_KK = matrix()
    form = get_format("int4")
    assert isinstance(form, Gridded)
    assert same(gptq.encode(w_NK, torch.zeros(192, 192), form), form.quantize(w_NK))
    gram_KK = torch.zeros(192, 192)
    gram_KK[:3, :3] = torch.ones(3, 3)
    made = gptq.encode(w_NK, gram_KK, form, [1.0])
    assert same(form.cut(made, [48])[0], made) and loss(made, w_NK, gram_KK) < loss(
        form.quantize(w_NK), w_NK, gram_KK
    )


@pytest.mark.parametrize("family", ["qwen3", "llama-biases"])
def test_a_model_is_rounded_on_what_its_rounded_layers_say(tmp_path: Path, family: str) -> None:
    """The last matrix of the first block, measured here again; the model is a base for LoRA."""
    model, dense = (loud(tmp_path / name, family) for name in "ab")
    seen: list[tuple[int, int]] = []
    records = gptq.round_base(
        model, "nvfp4", TEXT, on_progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 2), (2, 2)] and model.weight_format == "nvfp4"
    assert [r.name for r in records] == [name for name, _ in dense.linears()]
    assert all(r.format == "nvfp4" and r.error <= r.nearest_error for r in records)
    assert sum(r.error for r in records) < 0.9 * sum(r.nearest_error for r in records)
    down = model.blocks[0].down
    x_TK = torch.cat(
        [blockwise.input_of(down, lambda row=row: logits(model, [row])) for row in TEXT]
    )
    w_NK = dense.blocks[0].down.weight.detach()
    y_TN = F.linear(x_TK, w_NK)
    lost_TN = F.linear(x_TK, down.weight.dequantize()) - y_TN
    assert records[3].error == pytest.approx(
        float(lost_TN.square().sum() / y_TN.square().sum()), rel=1e-3
    )
    lora.attach(model, 2, 4.0)


def test_the_same_text_gives_the_same_codes_in_any_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [loud(tmp_path / name) for name in "abc"]
    for model, tokens in zip(models, (8192, 8192, 45), strict=True):
        monkeypatch.setattr(blockwise, "CHUNK_TOKENS", tokens)
        gptq.round_base(model, "int4", TEXT)
    for (_, one), (_, two) in zip(models[0].linears(), models[1].linears(), strict=True):
        assert same(one.weight, two.weight)
    torch.testing.assert_close(logits(models[0]), logits(models[2]), rtol=0.02, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("family", CALIBRATED)
def test_every_family(tmp_path: Path, family: str) -> None:
    records = gptq.round_base(loud(tmp_path / "m", family), "int4_asym", TEXT)
    assert sum(r.error for r in records) < sum(r.nearest_error for r in records)


@pytest.mark.parametrize("format", GRIDDED)
def test_groups_choose_their_range(format: str) -> None:
    """No group loses more than within its own range, where inputs do not go together; where they do
    it costs next to nothing."""
    w_NK, gram_KK = matrix()
    form = get_format(format)
    assert isinstance(form, Gridded)
    own, chosen = (
        gptq.encode(w_NK, torch.eye(192), form, some) for some in ([1.0], gptq.STRETCHES)
    )
    lost, before = ((q.dequantize() - w_NK).square().sum() for q in (chosen, own))
    gains = format in ("int4", "int4_asym", "nvfp4", "nf4")  # others have few scales, or wide rows
    assert lost < (0.97 if gains else 1.01) * before
    plain, stretched = (
        loss(gptq.encode(w_NK, gram_KK, form, some), w_NK, gram_KK)
        for some in ([1.0], gptq.STRETCHES)
    )
    assert stretched < 1.05 * plain


@pytest.mark.slow
def test_the_whole_model_loses_less_on_other_text(tmp_path: Path) -> None:
    plain, model = loud(tmp_path / "a"), loud(tmp_path / "b")
    dense = logits(plain).log_softmax(-1)

    def kl(other: Tensor) -> float:
        return float((dense.exp() * (dense - other.log_softmax(-1))).sum(-1).mean())

    nearest = kl(logits(quantize_base(plain, "nvfp4"), HELD_OUT))
    draw = torch.Generator().manual_seed(0)
    text = [torch.randint(0, 67, (60,), generator=draw).tolist() for _ in range(20)]
    gptq.round_base(model, "nvfp4", text)
    assert kl(logits(model, HELD_OUT)) < 0.7 * nearest


class Each(type(get_format("nvfp4"))):  # type: ignore[misc]
    """A format that differs by layer."""

    name = "each"

    def of(self, layer: str) -> object:
        return get_format("q8_0" if layer.endswith("qkv") else "nvfp4")


def test_layers_have_their_own_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a grid are rounded to nearest."""
    model, dense = loud(tmp_path / "a"), loud(tmp_path / "b")
    each = Each()
    monkeypatch.setattr(gptq, "get_format", lambda name: each)
    monkeypatch.setattr(type(each), "dense", False)
    records = gptq.round_base(model, "each", TEXT)
    assert [r.format for r in records] == ["q8_0", "nvfp4", "nvfp4", "nvfp4"] * 2
    qkv = dense.blocks[0].qkv.weight.detach()
    assert same(model.blocks[0].qkv.weight, get_format("q8_0").quantize(qkv))


@pytest.mark.parametrize("family", NORMED_UPDATES)
def test_updates_with_a_norm_or_scale_are_refused(tmp_path: Path, family: str) -> None:
    model = hf.load(hf_folder(tmp_path / "m", family))
    with pytest.raises(ValueError, match="gptq: .*not supported"):
        gptq.round_base(model, "int4_asym", TEXT)


def test_refusals(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    for format, sequences, words in [
        ("bf16", TEXT, "gptq: bf16 does not round to low bits"),
        ("q8_0", TEXT, "gptq: q8_0 has no grid"),
        ("nf4", TEXT, r"gptq: blocks\.0\.qkv\.weight: nf4: rows of 32 weights end within"),
        ("int4", [], "gptq: no calibration sequences"),
        ("int4", [[1, 67]], r"gptq: sequences\[0\]: an id is outside the vocabulary of 67"),
    ]:
        model = hf.load(folder)
        with pytest.raises(ValueError, match=words):
            gptq.round_base(model, format, sequences)
        assert model.weight_format is None
    with pytest.raises(ValueError, match=r"gptq: blocks\.0\.qkv is quantized"):
        gptq.round_base(quantize_base(hf.load(folder), "int8"), "int4", TEXT)
    with pytest.raises(ValueError, match="gptq: Qwen3MoeForCausalLM has experts"):
        gptq.round_base(hf.load(hf_folder(tmp_path / "moe", "qwen3-moe")), "int4", TEXT)


def test_the_command_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder holds the codes that `round_base` makes of the same text, and a LoRA base loaded
    from it has them."""
    tokenizer = build_tokenizer()
    source = hf.save(loud(tmp_path / "plain", vocab_size=len(tokenizer)), tmp_path / "m")
    tokenizer.save_pretrained(source)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 9)
    words = ["quantize", str(source), str(tmp_path / "out"), "--format", "nvfp4"]
    options = ["--device", "cpu", "--rounding", "gptq"]
    limits = ["--calibration-samples", "5", "--calibration-length", "40"]
    assert main([*words, *options, "--calibration", str(text), *limits]) == 0
    told = capsys.readouterr().out
    assert "GPTQ on 5 sequences, 200 tokens: squared error" in told
    assert "KL from the dense model " in told and " on 195 of these tokens" in told
    model = hf.load(source)
    gptq.round_base(model, "nvfp4", calibration_sequences(text, tokenizer, 5, 40))
    loaded = quantize_base(hf.load(tmp_path / "out"), "nvfp4")
    for (_, ours), (_, theirs) in zip(model.linears(), loaded.linears(), strict=True):
        assert same(theirs.weight, ours.weight)


def test_inputs_that_are_not_finite_are_refused_by_their_matrix(tmp_path: Path) -> None:
    model = hf.load(hf_folder(tmp_path / "m"))
    with torch.no_grad():
        model.blocks[0].input_norm.weight[0] = float("inf")  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match="gptq: blocks.0.qkv: the calibration text makes inputs"):
        gptq.round_base(model, "int4", [[5, 6, 7, 8]])


def test_without_a_text_the_model_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says is the same each time, and so are the codes."""
    tokenizer = build_tokenizer()
    source = hf.save(loud(tmp_path / "plain", vocab_size=len(tokenizer)), tmp_path / "m")
    tokenizer.save_pretrained(source)
    options = ["--format", "nvfp4", "--device", "cpu", "--rounding", "gptq"]
    for name in "ab":
        assert main(["quantize", str(source), str(tmp_path / name), *options]) == 0
        assert "GPTQ on 64 sequences" in capsys.readouterr().out
    assert digest(hf.load(tmp_path / "a")) == digest(hf.load(tmp_path / "b"))
    nearest = quantize_base(hf.load(source), "nvfp4")
    assert digest(hf.load(tmp_path / "a")) != digest(nearest)
