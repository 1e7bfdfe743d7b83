"""Low-bit folders: ours and other tools', read, run, trained on and written without quantizing
twice; exports (P10).

The oracles are transformers with compressed-tensors and bitsandbytes, and the stored bytes
themselves.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowroll
from lowroll.checkpoint.atomic_folders import verify_folder
from lowroll.cli.main import main
from lowroll.config import from_mapping
from lowroll.kernels.quantize.rotation import rotate
from lowroll.model import hf, lora
from lowroll.model.attention import varlen
from lowroll.model.folder import TOKENIZER_FILES
from lowroll.model.tokenizer import load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant import int4
from lowroll.quant.formats import QTensor, get_format
from lowroll.runs.diagnose import diagnose
from lowroll.runs.export import export_run, quantize_folder
from lowroll.runs.folder import RunFolder
from lowroll.runs.grpo import Run
from lowroll.runs.sft import run_sft
from lowroll.transport.rollout_log import read_rollouts
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy, rollout_load
from tests.fixtures.runs import ALWAYS, run_session, settings, train
from tests.fixtures.tiny import hf_folder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
LOW_BIT = tuple(name for name in lowroll.formats() if not get_format(name).dense)
HELD = tuple(name for name in LOW_BIT if name not in ("q4_0", "q4_1", "q8_0"))  # by folders
PRESETS = {
    "int8": "W8A8",
    "fp8": "FP8_DYNAMIC",
    "fp8_block": "FP8_BLOCK",
    "int4": "W4A16",
    "int4_asym": "W4A16_ASYM",
    "w4a8": "W4A8",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
}
Q = "model.layers.0.self_attn.q_proj"
IDS = torch.randint(2, 67, (20,), generator=torch.Generator().manual_seed(0))
# transformers dequantizes NVFP4 through bfloat16: 2^-8 a weight, 0.02 of the logits' spread of 3.8
EXACT = 1e-4
BOUND = {"nvfp4": 0.2}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("folders") / "dense", "qwen3", **SIZES)


@pytest.fixture(scope="module")
def ours(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of ours in a format, made once."""
    root = tmp_path_factory.mktemp("ours")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            quantize_folder(dense, root / name, name)
        return root / name

    return folder


@torch.no_grad()
def logits(model: Transformer) -> Tensor:
    return model.logits(model(IDS, torch.arange(len(IDS)), varlen([len(IDS)])))


def transformers_logits(folder: Path, dequantize: bool) -> Tensor:
    """What transformers computes from a folder in float32, on the dequantized weights or as its
    tools run them."""
    from transformers import CompressedTensorsConfig

    nf4 = folder.name.startswith("nf4")
    options: dict[str, Any] = (
        {}
        if nf4 or not dequantize
        else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    )
    with warnings.catch_warnings(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )
        if nf4 and dequantize:
            theirs = theirs.dequantize()
        if folder.name == "int8_rotated":
            rotate_inputs(theirs, folder)
        return theirs(IDS[None]).logits[0].float()


def rotate_inputs(model: Any, folder: Path) -> None:
    """Let compressed-tensors rotate what every linear layer reads, as the folder's config says:
    transformers leaves it out, and the weights are rotated already."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    transform = config["transform_config"]
    for group in transform["config_groups"].values():
        group["apply"] = [entry for entry in group["apply"] if entry["location"] == "input"]
    apply_transform_config(model, TransformConfig.model_validate(transform))


def same_tensors(a: QTensor, b: QTensor) -> bool:
    return (
        a.format == b.format
        and a.tensors.keys() == b.tensors.keys()
        and all(
            t.shape == b.tensors[name].shape
            and t.dtype == b.tensors[name].dtype
            and torch.equal(
                t.contiguous().view(torch.uint8), b.tensors[name].contiguous().view(torch.uint8)
            )
            for name, t in a.tensors.items()
        )
    )


# -- fused matrices and their parts ----------------------------------------------------------------


@pytest.mark.parametrize("name", LOW_BIT)
def test_cutting_and_stacking_change_no_code(name: str) -> None:
    rows, w = [256, 128, 128], torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    q, format = lowroll.quantize(w, name), get_format(name)
    parts = format.cut(q, rows)
    assert same_tensors(format.stack(parts), q)
    assert torch.equal(torch.cat([part.dequantize() for part in parts]), q.dequantize())
    alone = [
        lowroll.quantize(part * size, name)
        for part, size in zip(w.split(rows), (1, 3, 9), strict=True)
    ]
    stacked = format.stack(alone)  # parts of other tools, each with its own global scale or offset
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in alone]))
    assert all(same_tensors(a, b) for a, b in zip(format.cut(stacked, rows), alone, strict=True))
    with (
        pytest.raises(ValueError, match="cannot (copy|quantize)")
        if name in ("nvfp4", "nf4_dq")
        else ExitStack()
    ):
        q.clone().copy_(stacked)


@pytest.mark.parametrize("name", ["fp8_block", "int4_asym", "nf4", "nf4_dq"])
def test_a_block_over_a_border_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    source = hf_folder(
        tmp_path / "m", hidden_size=36, head_dim=6, num_key_value_heads=2, intermediate_size=30
    )
    with pytest.raises(
        ValueError,
        match=rf"q_proj.*{name}: 24 rows of 36 weights end within one of its blocks"
        if name != "int4_asym"
        else rf"q_proj.*{name}: 12 rows of 36",
    ):
        quantize_folder(source, tmp_path / "out", name)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# -- ours ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_a_folder_holds_the_engines_very_tensors(
    name: str, dense: Path, ours: Callable[[str], Path]
) -> None:
    """Write, read, run: one digest, and the engine shares what was read."""
    wanted = quantize_base(hf.load(dense), name)
    assert verify_folder(ours(name)) == {"kind": "model"}
    read = hf.load(ours(name))
    assert not any(p.requires_grad for p in read.parameters())
    for (where, linear), (_, made) in zip(read.linears(), wanted.linears(), strict=True):
        stored = linear.weight.seen_as(name)
        assert stored is not None and same_tensors(stored, made.weight), where
    engine = lowroll.Engine(read, weights=name, device="cpu", cache_tokens=64)
    assert digest(engine.model) == digest(wanted)
    if name == read.weight_format:  # w4a8 and mxfp4_floor share the layouts of others
        assert engine.model.blocks[1].down.weight is read.blocks[1].down.weight
    before = [
        linear.weight.tensors[
            "codes" if name == "int8" else next(iter(linear.weight.tensors))
        ].data_ptr()
        for _, linear in engine.model.linears()
    ]
    publish(read, engine.model)
    assert before == [
        linear.weight.tensors[
            "codes" if name == "int8" else next(iter(linear.weight.tensors))
        ].data_ptr()
        for _, linear in engine.model.linears()
    ]
    assert digest(engine.model) == digest(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD)
def test_transformers_reads_ours(name: str, ours: Callable[[str], Path]) -> None:
    torch.testing.assert_close(
        transformers_logits(ours(name), True),
        logits(hf.load(ours(name))),
        rtol=0,
        atol=BOUND.get(name, EXACT),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("int8", "int8_rotated", "fp8", "fp8_block", "int4", "w4a8", "nf4", "nf4_dq"),
    ],
)
def test_transformers_runs_ours(name: str, ours: Callable[[str], Path]) -> None:
    """With its tools' own arithmetic: activations rounded by other rules, NF4 multiplied in
    bfloat16."""
    ran = transformers_logits(ours(name), False)
    mine = logits(rollout_load(ours(name), name, "cpu", torch.float32))
    assert (ran - mine).norm() / mine.norm() < {"int4": 1e-5, "fp8_block": 1e-3}.get(name, 0.05)


EXPERTS = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 256,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("name", "family", "sizes", "loads"),
    [
        ("int4", "qwen3", SIZES, True),
        ("int4", "qwen3", {**SIZES, "intermediate_size": 192}, False),
        ("mxfp4", "qwen3", {**SIZES, "intermediate_size": 48}, False),
        ("int4_asym", "qwen3", SIZES, False),
        ("int8", "qwen3-moe", {"hidden_size": 64}, False),
        ("fp8_block", "qwen3-moe", EXPERTS, False),
        ("int8", "qwen3", {"intermediate_size": 50}, True),
    ],
)
def test_what_transformers_cannot_load_is_said(
    name: str,
    family: str,
    sizes: dict[str, Any],
    loads: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it is: without CompressedTensorsConfig(dequantize=True)."""
    source = hf_folder(tmp_path / "m", family, **sizes)
    assert main(["quantize", str(source), str(tmp_path / "out"), "--format", name]) == 0
    assert ("\nnote: transformers" not in capsys.readouterr().out) == loads
    with (
        torch.compiler.set_stance("force_eager"),
        ExitStack() if loads else pytest.raises((ValueError, RuntimeError)),
    ):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)(
            IDS[None]
        )


def test_a_rotation_is_told_and_is_that_of_compressed_tensors(
    dense: Path, ours: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    assert main(["quantize", str(dense), str(tmp_path / "out"), "--format", "int8_rotated"]) == 0
    assert "transformers does not read transform_config" in capsys.readouterr().out
    config = json.loads((ours("int8_rotated") / "config.json").read_text())
    transform = config["quantization_config"]["transform_config"]
    layer = torch.nn.Linear(64, 8, bias=False)
    holder = torch.nn.ModuleDict({"q_proj": layer})
    before = layer.weight.detach().clone()
    for group in transform["config_groups"].values():
        for entry in group["apply"]:
            entry["targets"] = ["re:.*q_proj$"]
        if group["head_dim"] == 64:
            apply_transform_config(
                holder, TransformConfig.model_validate({"config_groups": {"a": group}})
            )
    torch.testing.assert_close(layer.weight.detach(), rotate(before))


def test_a_rotation_of_another_width_is_refused(
    ours: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(ours("int8_rotated"), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(path.read_text().replace('"head_dim": 64', '"head_dim": 16'))
    with pytest.raises(
        ValueError, match=r"config.json: .*q_proj is rotated in blocks of 16, and 64"
    ):
        hf.load(tmp_path / "m")


def test_experts_that_transformers_reads_as_other_numbers_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hf_folder(tmp_path / "m", "qwen3-moe", **EXPERTS)
    assert main(["quantize", str(source), str(tmp_path / "out"), "--format", "nvfp4"]) == 0
    assert "\nnote: transformers cannot use this folder: it does not read experts in nvfp4" in (
        capsys.readouterr().out
    )
    theirs = transformers_logits(tmp_path / "out", True)
    ours = logits(hf.load(tmp_path / "out"))
    assert (theirs - ours).norm() > ours.norm() / 10  # once it is small, take the note away


@pytest.mark.slow
def test_a_format_is_chosen_by_the_folder(
    ours: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"device": "cpu", "cache_tokens": 64}
    assert lowroll.Engine(ours("nvfp4"), **options).behavior.weights == "nvfp4"
    assert lowroll.Engine(hf.load(ours("nf4_dq")), **options).behavior.weights == "nf4_dq"
    assert not caplog.records
    engine = lowroll.Engine(ours("nvfp4"), weights="int8", **options)
    assert "nvfp4: int8 is made from their dequantized values" in caplog.text
    read = hf.load(ours("nvfp4")).blocks[0].o.weight
    assert same_tensors(
        engine.model.blocks[0].o.weight, lowroll.quantize(read.dequantize(), "int8")
    )


def test_the_codes_of_int4_run_as_w4a8_without_a_second_rounding(
    ours: Callable[[str], Path],
) -> None:
    read = hf.load(ours("int4"))
    rollout = rollout_copy(read, "w4a8", torch.float32)
    for (_, linear), (_, stored) in zip(rollout.linears(), read.linears(), strict=True):
        assert linear.weight.format == "w4a8" and same_tensors(
            linear.weight.seen_as("int4"), stored.weight
        )
        assert (
            linear.weight.tensors["weight_scale"].data_ptr()
            != stored.weight.tensors["weight_scale"].data_ptr()
        )


# -- theirs ----------------------------------------------------------------------------------------


def written_by_compressed_tensors(dense: Path, out: Path, name: str, dtype: torch.dtype) -> None:
    """Min-max scales of each matrix by itself, compressed and saved by the library."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    theirs = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    apply_quantization_config(
        theirs, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    )
    args = scheme.weights
    for module in theirs.modules():
        if not hasattr(module, "weight_scale"):
            continue
        w = module.weight.detach()
        rows, columns = args.block_structure or (1, args.group_size or w.shape[1])
        blocks = w.view(w.shape[0] // rows, rows, w.shape[1] // columns, columns)
        if name == "nvfp4":
            module.weight_global_scale.data.copy_(generate_gparam(w.amin(), w.amax()))
        scale, zero = calculate_qparams(
            blocks.amin(dim=(1, 3)),
            blocks.amax(dim=(1, 3)),
            args,
            getattr(module, "weight_global_scale", None),
        )
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        module.weight_zero_point.data = zero.view_as(module.weight_zero_point).to(
            module.weight_zero_point.dtype
        )
    compressor = ModelCompressor.from_pretrained_model(theirs)
    compressor.compress_model(theirs)
    theirs.save_pretrained(out)
    compressor.update_config(str(out))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in PRESETS),
        *((name, torch.bfloat16) for name in ("fp8", "int4", "nvfp4")),
    ],
)
def test_folders_of_compressed_tensors_load(
    name: str, dtype: torch.dtype, dense: Path, tmp_path: Path
) -> None:
    with torch.compiler.set_stance("force_eager"):
        written_by_compressed_tensors(dense, tmp_path / name, name, dtype)
    read = hf.load(tmp_path / name)
    assert read.weight_format == name
    stored, q = load_file(tmp_path / name / "model.safetensors"), read.blocks[0].qkv.weight
    suffix = "weight_packed" if f"{Q}.weight_packed" in stored else "weight"
    parts = torch.cat([stored[f"model.layers.0.self_attn.{part}_proj.{suffix}"] for part in "qkv"])
    codes = q.tensors.get("codes", q.tensors.get("weight", q.tensors.get("weight_packed")))
    parts = int4.pack_words(parts) if name == "w4a8" else parts  # this one has a byte for each code
    assert torch.equal(codes.view(torch.uint8), parts.view(torch.uint8))
    if name == "nvfp4":  # each part with the scale of its own, as this writer made them
        assert len(set(q.tensors["weight_global_scale"].tolist())) == 3
    # bfloat16 folders have bfloat16 scales, and transformers rounds codes times scale to them
    bound = BOUND.get(name, EXACT) if dtype == torch.float32 else 0.25
    torch.testing.assert_close(
        logits(read), transformers_logits(tmp_path / name, True), rtol=0, atol=bound
    )
    hf.save(read, tmp_path / "again")
    assert digest(hf.load(tmp_path / "again")) == digest(read)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4_dq"])
def test_folders_of_bitsandbytes_load(name: str, dense: Path, tmp_path: Path) -> None:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=name == "nf4_dq"
    )
    with torch.compiler.set_stance("force_eager"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            dense, dtype=torch.float32, quantization_config=config
        )
        theirs.save_pretrained(tmp_path / name)
    read = hf.load(tmp_path / name)
    assert read.weight_format == name
    if name == "nf4_dq":  # q, k and v have three means
        assert len(set(read.blocks[0].qkv.weight.tensors["nested_offset"].tolist())) == 3
    torch.testing.assert_close(
        logits(read), transformers_logits(tmp_path / name, True), rtol=0, atol=EXACT
    )
    hf.save(read, tmp_path / "again")
    assert digest(hf.load(tmp_path / "again")) == digest(read)


def test_deepseeks_fp8_loads(ours: Callable[[str], Path], tmp_path: Path) -> None:
    """`quant_method: fp8`: the tensors of fp8_block under another name."""
    shutil.copytree(ours("fp8_block"), tmp_path / "m")
    edit(
        tmp_path / "m",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    )
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file(
        {name.replace("weight_scale", "weight_scale_inv"): t for name, t in tensors.items()},
        tmp_path / "m" / "model.safetensors",
    )
    assert digest(hf.load(tmp_path / "m")) == digest(hf.load(ours("fp8_block")))


# -- refusals --------------------------------------------------------------------------------------


def edit(folder: Path, changes: dict[str, Any]) -> None:
    """Put keys into a folder's quantization_config; a dotted key goes into its first group."""
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        owner = config["quantization_config"]
        if "." in key:
            owner = owner["config_groups"]["group_0"]
            for name in key.split(".")[:-1]:
                owner = owner.setdefault(name, {}) if name != "group" else owner
        owner[key.split(".")[-1]] = value
    (folder / "config.json").write_text(json.dumps(config))


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "method": ("int8", {"quant_method": "hqq"}, "quant_method: 'hqq'"),
    "kv": ("int8", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "sparsity": ("int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    "transform": ("int4", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "other transform": (
        "int8_rotated",
        {"transform_config": {"config_groups": {"u": {"type": "random-hadamard"}}}},
        "transform_config.config_groups.u: a hadamard transform",
    ),
    "rotated rest": (
        "int8_rotated",
        {"ignore": ["lm_head", "model.layers.0.self_attn.q_proj"]},
        "config_groups.group_0.targets: 'Linear': rotated layers",
    ),
    "no list": (
        "int8_rotated",
        {
            "transform_config": {
                "config_groups": {
                    "u": {
                        "type": "hadamard",
                        "head_dim": 16,
                        "apply": [{"targets": 5, "location": "input"}],
                    }
                }
            }
        },
        "transform_config.config_groups.u.apply: expected one list of targets",
    ),
    "no groups": ("int4", {"config_groups": {}}, "config_groups"),
    "static": (
        "fp8",
        {"input_activations.dynamic": False},
        "config_groups.group_0.input_activations.dynamic",
    ),
    "no activations": (
        "int8",
        {"group.input_activations": None},
        "activations dense: not one of int8",
    ),
    "outputs": ("int8", {"group.output_activations": {"num_bits": 8}}, "output_activations"),
    "order": (
        "int4",
        {"weights.actorder": "group"},
        "config_groups.group_0.weights.actorder: 'group'",
    ),
    "group": ("int4", {"weights.group_size": 32}, "group_size 32"),
    "bits": ("int4", {"weights.num_bits": 3}, "num_bits 3"),
    "marlin": (
        "int4",
        {"group.format": "marlin-24"},
        "group_0.format: int4 is stored as pack-quantized",
    ),
    "fp4": ("nf4", {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
    "int8()": ("nf4", {"load_in_4bit": False}, "load_in_4bit"),
    "storage": ("nf4", {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_not_supported_is_refused_by_its_key(
    case: str, ours: Callable[[str], Path], tmp_path: Path
) -> None:
    name, changes, words = CONFIGS[case]
    shutil.copytree(ours(name), tmp_path / "m")
    edit(tmp_path / "m", changes)
    with pytest.raises(ValueError) as caught:
        hf.load(tmp_path / "m")
    message = str(caught.value)
    assert (
        f"{tmp_path / 'm' / 'config.json'}: quantization_config: " in message and words in message
    )
    assert "\n" not in message and "lowroll quantize" in message


def test_groups_of_several_formats_for_the_same_layers_are_refused(
    ours: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(ours("int4"), tmp_path / "m")
    a, b = (
        json.loads((ours(name) / "config.json").read_text())["quantization_config"][
            "config_groups"
        ]["group_0"]
        for name in ("int8", "int4")
    )
    edit(tmp_path / "m", {"config_groups": {"a": a, "b": b}})
    with pytest.raises(ValueError, match=r"config_groups\.b\.targets: 'Linear': of several"):
        hf.load(tmp_path / "m")


TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "dense part": (
        "int4",
        lambda t: (
            [t.pop(f"{Q}.{s}") for s in ("weight_packed", "weight_scale", "weight_shape")]
            + [t.update({f"{Q}.weight": torch.zeros(128, 128)})]
        ),
        rf"leaves layers dense.*{Q}\.weight",
    ),
    "head": (
        "fp8",
        lambda t: t.update({"lm_head.weight_scale": torch.ones(67, 1)}),
        "includes lm_head",
    ),
    "order": ("int4", lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(128)}), "actorder"),
    "input": ("fp8", lambda t: t.update({f"{Q}.input_scale": torch.ones(1)}), "calibrated"),
    "missing": (
        "nvfp4",
        lambda t: t.pop(f"{Q}.weight_global_scale"),
        rf"missing tensors: {Q}\.weight_global_scale",
    ),
    "shape": (
        "mxfp4",
        lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"][:, :2].contiguous()}),
        rf"wrong shape: {Q}\.weight_scale \[128, 2\]",
    ),
    "dtype": (
        "int8",
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].int()}),
        rf"{Q}\.weight \(I32 instead of I8\)",
    ),
    "nan": (
        "int4",
        lambda t: t[f"{Q}.weight_scale"].fill_(float("nan")),
        rf"{Q}\.weight_scale: holds a non-finite",
    ),
    "nan code": (
        "fp8",
        lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(127),
        rf"{Q}\.weight: holds a non-finite",
    ),
    "nan exponent": (
        "mxfp4",
        lambda t: t[f"{Q}.weight_scale"].fill_(255),
        rf"{Q}\.weight_scale: holds a non-finite",
    ),
    "no scale": (
        "nvfp4",
        lambda t: t[f"{Q}.weight_global_scale"].zero_(),
        r"weight_global_scale: expected a positive",
    ),
    "sizes": ("int4", lambda t: t[f"{Q}.weight_shape"].fill_(5), r"weight_shape: \[5, 5\]"),
    "levels": ("nf4", lambda t: t[f"{Q}.weight.quant_map"].mul_(2), "quant_map: the levels"),
    "nested levels": (
        "nf4_dq",
        lambda t: t[f"{Q}.weight.nested_quant_map"].mul_(2),
        "nested_quant_map: the levels",
    ),
    "state": (
        "nf4",
        lambda t: t[f"{Q}.weight.quant_state.bitsandbytes__nf4"].fill_(7),
        "not the JSON",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_damaged_folders_are_refused_by_the_tensor(
    case: str, ours: Callable[[str], Path], tmp_path: Path
) -> None:
    name, damage, words = TENSORS[case]
    shutil.copytree(ours(name), tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        hf.load(tmp_path / "m")


def test_a_low_bit_model_cannot_lose_its_gradient_silently(ours: Callable[[str], Path]) -> None:
    read = hf.load(ours("int8"))
    with pytest.raises(ValueError, match="int8 codes, which have no gradient"):
        read.requires_grad_(True)
    lora.attach(read, 2, 4.0)
    engine = rollout_copy(read, "int8", read.dtype)
    for p in engine.parameters():
        p.requires_grad_(True)
    with pytest.raises(ValueError, match="the engine's arithmetic has no gradient"):
        engine(IDS, torch.arange(len(IDS)), varlen([len(IDS)]))
    out = read(IDS, torch.arange(len(IDS)), varlen([len(IDS)]))
    out.square().sum().backward()
    assert all(p.grad is not None for p in read.trainable_parameters().values())


# -- training on them, and out again ---------------------------------------------------------------


@pytest.mark.slow
def test_lora_keeps_the_tensors_of_the_folder(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """QeRL's setting: an NVFP4 base under an adapter, one copy for learner and engine."""
    quantize_folder(model, tmp_path / "base", "nvfp4")
    tree = settings(
        tmp_path / "base",
        tmp_path / "run",
        rollout={"weights": "nvfp4"},
        train={"max_steps": 2, "lora": True, "lora_rank": 4},
    )
    stored = hf.load(tmp_path / "base")
    with ExitStack() as stack:
        session = run_session(tree, stack)
        for (_, learner), (_, engine), (_, file) in zip(
            session.learner.model.linears(),
            session.rollouts.engine.model.linears(),
            stored.linears(),
            strict=True,
        ):
            assert learner.weight is engine.weight and same_tensors(learner.weight, file.weight)
        session.finish(2)
    assert not [r for r in caplog.records if "dequantized" in r.getMessage()]
    engine = lowroll.Engine(tmp_path / "run" / "final", device="cpu", cache_tokens=64)
    assert engine.behavior.weights == "nvfp4"


@pytest.mark.slow
def test_all_weights_of_a_low_bit_folder_learn_as_their_dequantized_values(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_folder(model, tmp_path / "low", "int8")
    with caplog.at_level(logging.WARNING, logger="lowroll"), ExitStack() as stack:
        tree = settings(
            tmp_path / "low",
            tmp_path / "run",
            train={"max_steps": 1, "warmup_steps": 0},
            loss={"kl_coef": 0.01},
        )
        session = Run(RunFolder(from_mapping(tree).resolved(), "grpo"), stack)
        start = hf.load(tmp_path / "low").blocks[0].o.weight.dequantize()
        assert (
            torch.equal(session.learner.model.blocks[0].o.weight, start)
            and session.learner.model.blocks[0].o.weight.requires_grad
        )
        assert "int8: their dequantized values are the weights that learn" in caplog.text
    final = train({**tree, "output_dir": str(tmp_path / "two")}).folder / "final"
    assert hf.load(final).weight_format is None
    assert "quantization_config" not in json.loads((final / "config.json").read_text())


RUNS = {
    "int8": {"rollout": {"weights": "int8"}},
    "aligned nvfp4, scaled": {
        "rollout": {"weights": "nvfp4"},
        "train": {"forward": "aligned", "uaq_scale": 1.5},
    },
    "mxfp4_floor": {"rollout": {"weights": "mxfp4_floor"}},
    "bf16": {"rollout": {"weights": "bf16"}},
    "lora nvfp4, scaled": {
        "rollout": {"weights": "nvfp4"},
        "train": {"lora": True, "lora_rank": 4, "uaq_scale": 1.5},
    },
    "guard": {"rollout": {"weights": "int4"}, "guard": {**ALWAYS, "action": "fallback"}},
    "lora, guard": {
        "rollout": {"weights": "int4"},
        "guard": {**ALWAYS, "action": "fallback"},
        "train": {"lora": True, "lora_rank": 4},
    },
    "lora int4": {"rollout": {"weights": "int4"}, "train": {"lora": True, "lora_rank": 4}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_an_exported_rollout_policy_is_the_engines(case: str, model: Path, tmp_path: Path) -> None:
    """P10: the same digest, tokens and log-probs bit for bit as the run's engine; and the earlier
    step's too."""
    changes = RUNS[case]
    tree = settings(
        model,
        tmp_path / "run",
        **{**changes, "train": {"max_steps": 2, **changes.get("train", {})}},
    )
    with ExitStack() as stack:
        session = run_session(tree, stack)
        done, weights = (
            export_run(tmp_path / "run", tmp_path / "out", "rollout"),
            session.rollouts.engine.behavior.weights,
        )
        assert (weights == changes["rollout"]["weights"]) == ("guard" not in case)
        assert (done.step, done.format) == (2, weights)
        engine = lowroll.Engine(
            done.folder,
            weights=weights,
            device="cpu",
            cache_tokens=1024,
            exact=session.rollouts.engine.model.exact,
        )
        assert engine.behavior.policy[0].digest == session.rollouts.engine.behavior.policy[0].digest
        requests = [lowroll.Request([6, 7, 8 + i], n=3, max_tokens=8, seed=i) for i in range(3)]
        for mine, theirs in zip(
            engine.generate(requests), session.rollouts.engine.generate(requests), strict=True
        ):
            for a, b in zip(mine.rollouts, theirs.rollouts, strict=True):
                assert a.token_ids == b.token_ids and a.logprobs == b.logprobs
    export_run(tmp_path / "run", tmp_path / "first", "rollout", step=1)
    first = lowroll.Engine(
        tmp_path / "first", weights=changes["rollout"]["weights"], device="cpu", cache_tokens=64
    )
    logged = (
        read_rollouts(tmp_path / "run" / "rollouts" / "step_000002.jsonl")
        .samples[0]
        .rollout.behavior
    )
    assert first.behavior.policy[0].digest == logged.policy[0].digest


@pytest.mark.slow
def test_exports_of_a_lora_run(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "nvfp4"},
        train={"max_steps": 1, "warmup_steps": 0, "lora": True, "lora_rank": 4},
    )
    with ExitStack() as stack:
        session = run_session(tree, stack, 1)
        session.finish(1)
        learner = logits(session.learner.model)
    run = str(tmp_path / "run")
    assert main(["export", run, str(tmp_path / "merged"), "--as", "merged"]) == 0
    assert "merged of step 1, linear weights fp32 (32 bits)" in capsys.readouterr().out
    torch.testing.assert_close(logits(hf.load(tmp_path / "merged")), learner, rtol=0, atol=1e-5)
    assert main(["export", run, str(tmp_path / "adapter"), "--as", "adapter"]) == 0
    adapter, final = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "adapter", tmp_path / "run" / "final")
    )
    assert adapter.keys() == final.keys() and all(
        torch.equal(adapter[name], final[name]) for name in final
    )
    assert main(["export", run, str(tmp_path / "rollout"), "--as", "rollout"]) == 0
    from peft import PeftModel

    base = hf.load(tmp_path / "rollout" / "base")
    assert base.weight_format == "nvfp4"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    named = (
        PeftModel.from_pretrained(theirs, tmp_path / "rollout")
        .peft_config["default"]
        .base_model_name_or_path
    )
    assert named == str(tmp_path / "rollout" / "base")
    shutil.move(tmp_path / "rollout", tmp_path / "moved")  # base and adapter travel together
    torch.testing.assert_close(logits(hf.load(tmp_path / "moved")), learner, rtol=0, atol=1e-5)
    for name in TOKENIZER_FILES:  # PEFT saves adapters without them
        (tmp_path / "adapter" / name).unlink(missing_ok=True)
    for kind, home in (("merged", "of_peft"), ("rollout", "beside/base")):
        out = tmp_path / home.split("/")[0]
        assert main(["export", str(tmp_path / "adapter"), str(out), "--as", kind]) == 0
        assert load_tokenizer(tmp_path / home).get_vocab() == load_tokenizer(model).get_vocab()


@pytest.mark.parametrize("weights", ["dense", "nvfp4", "max_bits=5"])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_supervised_run_is_exported(
    model: Path, tmp_path: Path, weights: str, adapter: bool
) -> None:
    """Its learner as one model, and the codes of its base."""
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": weights},
        train={"lora": adapter, "lora_rank": 4},
        sft={"num_examples": 16, "steps": 2, "batch_size": 4},
    )
    if adapter and weights == "max_bits=5":
        pytest.skip("an adapter of lowroll sft has no base of a budget")
    run_sft(from_mapping(tree))
    final = hf.load(tmp_path / "run" / "final")
    merged = export_run(tmp_path / "run", tmp_path / "merged", "merged")
    torch.testing.assert_close(logits(hf.load(merged.folder)), logits(final), rtol=0, atol=1e-5)
    if adapter:
        export_run(tmp_path / "run", tmp_path / "adapter", "adapter")
    with pytest.raises(ValueError, match="diagnose: .* is a run of lowroll sft"):
        diagnose(from_mapping(tree), tmp_path / "run")
    if weights == "max_bits=5":
        with pytest.raises(ValueError, match="lowroll sft, which searches for no formats"):
            export_run(tmp_path / "run", tmp_path / "out", "rollout")
        return
    done = export_run(tmp_path / "run", tmp_path / "out", "rollout")
    assert done.format == {"dense": "fp32"}.get(weights, weights)


def test_exports_are_refused_before_anything_is_written(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ExitStack() as stack:
        run_session(
            settings(model, tmp_path / "run", train={"max_steps": 1, "warmup_steps": 0}),
            stack,
            1,
        )
    capsys.readouterr()  # the run's own words
    (tmp_path / "taken").mkdir()
    (tmp_path / "empty").mkdir()
    run = str(tmp_path / "run")
    for words, problem in (
        ([run, "out", "--as", "adapter"], "trains all weights and has no adapter"),
        ([run, "taken", "--as", "merged"], "taken: exists already"),
        ([run, "out", "--as", "rollout", "--step", "7"], "no checkpoint of step 7"),
        (["empty", "out", "--as", "rollout"], "empty: not a run folder"),
    ):
        words = [
            str(tmp_path / word) if word in ("out", "taken", "empty") else word for word in words
        ]
        assert main(["export", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and problem in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not list((tmp_path / "taken").iterdir())


def test_a_run_whose_model_changed_is_not_exported(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    with ExitStack() as stack:
        run_session(
            settings(
                tmp_path / "m",
                tmp_path / "run",
                train={"max_steps": 1, "warmup_steps": 0, "lora": True},
            ),
            stack,
            1,
        )
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match="are not those that the run began with"):
        export_run(tmp_path / "run", tmp_path / "out", "rollout")


@pytest.mark.slow
def test_quantize_at_the_terminal(
    dense: Path, ours: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(dense), str(tmp_path / "out"), "--format", "mxfp4"]) == 0
    out = capsys.readouterr().out
    assert "mxfp4, 4.25 bits a weight" in out and "1.4 MB before, 0.2 MB now" in out
    assert digest(hf.load(tmp_path / "out")) == digest(hf.load(ours("mxfp4")))
    for words, problem in (
        ([str(dense), "o", "--format", "bf16"], "format: bf16 is dense"),
        ([str(dense), "o", "--format", "fp3"], "unknown weight format 'fp3'"),
        ([str(ours("int8")), "o", "--format", "int4"], "holds int8 weights already"),
        ([str(dense), str(tmp_path / "out"), "--format", "int4"], "exists already"),
    ):
        words = [str(tmp_path / "o") if word == "o" else word for word in words]
        assert main(["quantize", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and problem in error and not (tmp_path / "o").exists()


def test_quantize_keeps_the_dtype_of_the_rest_and_takes_a_transformation(
    dense: Path, tmp_path: Path
) -> None:
    half = hf.load(dense, dtype=torch.bfloat16)
    hf.save(half, tmp_path / "half")

    def double(model: Transformer) -> None:
        for _, linear in model.linears():
            linear.weight.data.mul_(2)

    quantize_folder(tmp_path / "half", tmp_path / "out", "int8", transform=double)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    wanted = lowroll.quantize(2 * half.blocks[0].down.weight.float(), "int8")
    assert same_tensors(hf.load(tmp_path / "out").blocks[0].down.weight, wanted)
