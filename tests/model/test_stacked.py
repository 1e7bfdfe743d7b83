"""Folders that stack the experts of a layer in one tensor: GPT-OSS's in bfloat16 and in MXFP4, and
Qwen3.5-MoE's as they are published. transformers is the oracle of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from lowroll import Engine, Request
from lowroll.model import hf, lora
from lowroll.model.headers import low_bit_format, read_headers
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.runs.export import quantize_folder
from lowroll.weights.publish import dequantize_base, quantize_base
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.gpt_oss import WIDE, published
from tests.fixtures.json_files import edit_json
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import hf_folder, hf_model

SEQUENCES = random_sequences([30, 5])


def theirs(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return torch.cat([model(torch.tensor([s])).logits[0] for s in SEQUENCES])


def experts_of(model: Transformer) -> dict[str, QTensor]:
    weights = {name: linear.weight for name, linear in model.linears() if ".experts." in name}
    return {name: weight for name, weight in weights.items() if isinstance(weight, QTensor)}


@pytest.mark.parametrize("family", ["gpt-oss", "gpt-oss-mqa"])
def test_published_experts_are_read_as_they_are(family: str, tmp_path: Path) -> None:
    """The experts keep their codes, all else is dense, and transformers' dequantization computes the
    same."""
    folder = published(tmp_path / "m", family)
    ours = hf.load(folder)
    assert {weight.format for weight in experts_of(ours).values()} == {"mxfp4"}
    assert len(experts_of(ours)) == 4
    form = get_format(str(low_bit_format(folder, torch.float32)))
    assert form.of("blocks.0.qkv").dense and form.of("blocks.1.experts.down").name == "mxfp4"
    want = logits(theirs(folder, quantization_config=Mxfp4Config(dequantize=True)))
    assert (forward(ours, SEQUENCES) - want).abs().max() < 1e-4


def test_whoever_refuses_a_published_folder_names_its_formats(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    holds = r"holds fp32 and mxfp4 \(7\.51 bits a linear weight\) weights already"
    with pytest.raises(ValueError, match=holds):
        quantize_folder(str(folder), str(tmp_path / "out"), "int8")


def test_dequantized_experts_are_transformers_bit_for_bit(tmp_path: Path) -> None:
    """The weights that a full learner begins with, and their export in stacked tensors."""
    folder = published(tmp_path / "m")
    want = theirs(folder, quantization_config=Mxfp4Config(dequantize=True))
    hf.save(dequantize_base(hf.load(folder)), tmp_path / "dense")
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    for name, p in want.named_parameters():
        assert torch.equal(stored[name], p), name
    assert torch.equal(logits(theirs(tmp_path / "dense")), logits(want))


def test_published_experts_are_saved_byte_for_byte(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    hf.save(hf.load(folder), tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    reread = theirs(tmp_path / "again", quantization_config=Mxfp4Config(dequantize=True))
    want = theirs(folder, quantization_config=Mxfp4Config(dequantize=True))
    assert torch.equal(logits(reread), logits(want))


def test_an_engine_serves_stored_experts_and_learns_adapters_on_them(tmp_path: Path) -> None:
    """Greedy tokens are those of the dequantized model in transformers."""
    folder = published(tmp_path / "m")
    engine = Engine(folder, cache_tokens=512, page_size=4)
    assert {weight.format for weight in experts_of(engine.model).values()} == {"mxfp4"}
    request = Request(SEQUENCES[0], max_tokens=12, temperature=0.0, ignore_eos=True)
    (rollout,) = engine.generate([request])[0].rollouts
    oracle = theirs(folder, quantization_config=Mxfp4Config(dequantize=True))
    ids = torch.tensor([SEQUENCES[0]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    want = oracle.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 30:]
    assert rollout.token_ids == want.tolist()

    base = lora.attach(hf.load(folder), 4, 8.0, ["q_proj", "k_proj", "v_proj", "o_proj"])
    forward(base, SEQUENCES).square().mean().backward()
    grads = [p.grad for p in base.trainable_parameters().values()]
    assert grads and all(grad is not None and grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("gate_up_proj_scales", 255, "gate_up_proj_scales: holds a non-finite value"),
        ("down_proj_blocks", None, "missing tensors: .*down_proj_blocks"),
    ],
)
def test_damaged_experts_are_named(
    suffix: str, value: int | None, message: str, tmp_path: Path
) -> None:
    folder = published(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{suffix}"
    if value is None:
        del tensors[name]
    else:
        tensors[name][0, 0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        hf.load(folder)


def test_columns_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "m")
    edit_json(folder / "config.json", intermediate_size=80)
    with pytest.raises(ValueError, match=r"down_proj: rows of 80 are no whole blocks of 32"):
        hf.load(folder)


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4"])
def test_other_formats_have_a_matrix_an_expert(format: str, tmp_path: Path) -> None:
    """Such a folder is ours alone, and is read back bit for bit."""
    model = quantize_base(hf.load(hf_folder(tmp_path / "m", "gpt-oss", **WIDE)), format)
    hf.save(model, tmp_path / "low")
    again = hf.load(tmp_path / "low")
    assert again.weight_format == format and not again.spec.stored_stacked
    assert torch.equal(forward(again, SEQUENCES), forward(model, SEQUENCES))
    written = quantize_folder(tmp_path / "m", tmp_path / "written", format, device="cpu")
    assert written.note == (
        "transformers cannot use this folder: it reads experts of GptOssForCausalLM dense or in MXFP4 "
        "beside dense layers"
    )


def test_an_update_of_a_folder_has_a_tensor_an_expert(tmp_path: Path) -> None:
    """The folder that a trainer publishes stacks experts; what an engine reads of it is the learner's
    own stream."""
    model = hf.load(hf_folder(tmp_path / "m", "gpt-oss"))
    hf.save(model, tmp_path / "published")
    assert read_headers(tmp_path / "published")[0].stored_stacked
    _, files, tensors = hf.stored(tmp_path / "published")
    sent = dict(WeightUpdate.local(model, 1).tensors())
    assert tensors.keys() == sent.keys() == files.keys()
    assert all(torch.equal(tensor, sent[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("family", ["qwen3.5-moe", "glm4-moe"])
def test_experts_stacked_by_rows_are_read(family: str, tmp_path: Path) -> None:
    """Published folders of Qwen3.5 have gates in front of ups, by rows, as the modules of
    transformers do. GLM-4.5's first layer is dense, and its corrections are float32 in any dtype."""
    model = hf_model(family)
    model.save_pretrained(tmp_path / "m")
    apart = hf.load(tmp_path / "m")
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.1.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "m" / "model.safetensors")
    stacked = hf.load(tmp_path / "m")
    assert stacked.spec.stored_stacked and not apart.spec.stored_stacked
    for (name, p), (_, q) in zip(stacked.named_parameters(), apart.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    kinds = {
        name: p.dtype
        for name, p in hf.load(tmp_path / "m", dtype=torch.bfloat16).named_parameters()
    }
    floats = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert floats == {name for name in kinds if name.endswith("correction_bias")}
    with torch.no_grad():
        assert (forward(stacked, SEQUENCES) - logits(model)).abs().max() < 1e-4
