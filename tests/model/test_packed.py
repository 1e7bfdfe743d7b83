"""Folders of AutoAWQ and of AutoGPTQ and GPTQModel, packed here code by code as their layouts are
documented, and held to a dense model of the same numbers in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.headers import low_bit_format
from lowroll.runs.export import quantize_folder
from tests.fixtures.json_files import edit_json
from tests.fixtures.tiny import hf_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 64, "head_dim": 32}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
V2 = {"checkpoint_format": "gptq_v2"}


def word(codes: list[int], bits: int) -> int:
    """An int32 of the codes, the first in the lowest bits."""
    found = sum(int(code) << (bits * place) for place, code in enumerate(codes))
    return found - (1 << 32) if found >= 1 << 31 else found


def along(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Each row of codes as words."""
    count = 32 // bits
    places = order or tuple(range(count))
    rows = [
        [word([row[at + place] for place in places], bits) for at in range(0, len(row), count)]
        for row in codes
    ]
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def store(config: dict[str, Any], shape: tuple[int, int], seed: int) -> tuple[Any, Tensor]:
    """The tensors of a module, and the matrix [N, K] that they stand for."""
    draw = np.random.default_rng(seed)
    (rows, columns), bits, size = shape, config["bits"], config["group_size"]
    size = columns if size == -1 else size
    groups = -(-columns // size)
    group_of = np.arange(columns) // size
    if config.get("desc_act"):
        group_of = draw.permutation(group_of)
    codes = draw.integers(0, 1 << bits, (rows, columns))
    zeros = draw.integers(0, 1 << bits, (rows, groups))
    if config.get("sym"):
        zeros[:] = 1 << (bits - 1)
    scales = torch.tensor(draw.uniform(0.01, 0.04, (rows, groups)) * 16 / 2**bits).half()
    stored = {"scales": scales.t().contiguous()}
    if config["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored |= {"qweight": along(codes.T, 4, order), "qzeros": along(zeros.T, 4, order)}
    else:
        offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        kept = (zeros - offset) % (1 << bits)
        stored |= {
            "qweight": along(codes, bits).t().contiguous(),
            "qzeros": along(kept.T, bits),
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        }
    number = torch.tensor(codes - zeros[:, group_of])
    return stored, number * scales.float()[:, group_of]


def write(folder: Path, config: dict[str, Any], family: str = "qwen2", **changes: Any) -> Any:
    """A folder in that storage; the transformers model of the same numbers."""
    model = hf_model(family, **{**SIZES, **changes})
    tensors = {}
    for seed, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            stored, whole = store(config, tuple(module.weight.shape), seed)
            module.weight.data = whole.float()
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    edit_json(folder / "config.json", quantization_config=config)
    packed = {name.rpartition(".")[0] for name in tensors}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or module not in packed:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


CASES = [
    ({**AWQ, "group_size": 128}, "int4_asym"),
    ({**AWQ, "group_size": 64}, None),
    ({**GPTQ, "group_size": 128}, "int4_asym"),
    ({**GPTQ, **V2, "group_size": 128}, "int4_asym"),
    ({**GPTQ, "group_size": 128, "sym": True}, "int4"),
    ({**GPTQ, "group_size": 128, "desc_act": True}, None),
    ({**GPTQ, "group_size": 32}, None),
    ({**GPTQ, "group_size": -1}, None),
    ({**GPTQ, "group_size": 128, "bits": 8}, None),
    ({**GPTQ, **V2, "group_size": 32, "bits": 2}, None),
]


@pytest.mark.parametrize(("config", "format"), CASES)
def test_a_folder_gives_the_numbers_that_it_stands_for(
    config: dict[str, Any], format: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write(tmp_path, config)
    ours = hf.load(tmp_path, dtype=torch.float32)
    assert ours.weight_format == format
    assert low_bit_format(tmp_path) == format
    said = [record.getMessage() for record in caplog.records if "become dense" in record.message]
    assert len(said) == (format is None)
    tokens = torch.arange(24) % 64
    with torch.no_grad():
        wanted = theirs(tokens[None]).logits[0].log_softmax(-1)
        hidden = ours(tokens, torch.arange(len(tokens)), varlen([len(tokens)]))
        got = ours.logits(hidden).log_softmax(-1)
    # int4 kernels of a CPU round activations to 16 bits
    assert float((got - wanted).abs().max()) < (1e-4 if format is None else 2e-3)


def test_dense_weights_of_such_a_folder_are_those_of_any(tmp_path: Path) -> None:
    write(tmp_path, {**GPTQ, "group_size": 32})
    assert all(one.requires_grad for one in hf.load(tmp_path).parameters())
    kept = hf.load(tmp_path, weights="int8")
    assert kept.weight_format == "int8"


def test_a_folder_that_is_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path / "packed", {**GPTQ, "group_size": 32})
    with pytest.raises(ValueError, match="holds quantized weights already"):
        quantize_folder(tmp_path / "packed", tmp_path / "out", "int8")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**AWQ, "group_size": 128, "version": "gemv"}, "version, zero_point"),
        ({**AWQ, "group_size": 128, "bits": 8}, "bits: 8 in awq"),
        ({**GPTQ, "group_size": 128, "bits": 3}, "bits: 3 in gptq"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({**GPTQ, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**GPTQ, "group_size": 128, "dynamic": {"-:x": {}}}, "dynamic"),
    ],
)
def test_other_storage_is_refused_by_its_key(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write(tmp_path, {**GPTQ, "group_size": 128})
    edit_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config: {says}"):
        hf.load(tmp_path)


def test_values_that_contradict_the_config_name_their_tensor(tmp_path: Path) -> None:
    config = {**GPTQ, "group_size": 128}
    write(tmp_path, config | {"desc_act": True}, intermediate_size=384)
    edit_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(ValueError, match=r"down_proj\.g_idx: reorders columns"):
        hf.load(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=config | {"sym": True})
    with pytest.raises(ValueError, match=r"q_proj\.qzeros: holds other zero points than 8"):
        hf.load(tmp_path)
