"""GGUF files, written here by the gguf package, against the same numbers in transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from torch import Tensor

import lowroll
from lowroll.config import from_mapping
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.folder import resolve
from lowroll.model.gguf import NOTE
from lowroll.model.headers import exact_format, low_bit_format
from lowroll.model.tokenizer import load_tokenizer
from lowroll.runs.evaluate import _rollouts
from tests.fixtures.tiny import hf_model

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u0120", "\u0120a"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(TOKENS)}
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama"}
Kind = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowroll"


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k in the order that llama's files have: the halves of a head take turns."""
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def write(
    path: Path,
    family: str,
    kind: Kind,
    special: Mapping[str, Kind] = {},
    moved: bool = False,
    **keys: str,
) -> Any:
    """A file of a random model; the transformers model with the numbers that the file stands for.

    special: other kinds of single parts. moved: blocks that leave the ends of their grid free."""
    # transformers takes qwen3's heads to have 128 columns, as all published ones have
    model = hf_model(family, **{**SIZES, "head_dim": 128 if family == "qwen3" else 16})
    config, architecture = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in keys.items():
        writer.add_string(key.replace("_", "."), value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "\u0120 a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(
        {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}.get(
            family, gguf.MODEL_ARCH.LLAMA
        ),
        config.num_hidden_layers,
    )
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        values = tensor.numpy()
        how = kind if values.ndim == 2 and "embed" not in name else Kind.F32
        how = special.get(stem.rpartition(".")[2], how)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", 2)):
            if family == "llama" and stem.endswith(part):
                values = interleaved(values, heads)
        data = values if how == Kind.F32 else gguf.quants.quantize(values, how)
        if moved and how == Kind.Q4_1:
            codes = data.reshape(-1, 20)[:, 4:]
            codes[:] = np.maximum(codes & 15, 1) | np.maximum(codes >> 4, 1) << 4
        writer.add_tensor(f"{names.get_name(stem)}.{leaf}", data, raw_dtype=how)
        stored = values if how == Kind.F32 else gguf.quants.dequantize(data, how)
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", 2)):
            if family == "llama" and stem.endswith(part):
                stored = (
                    stored.reshape(heads, -1, 2, stored.shape[1])
                    .swapaxes(1, 2)
                    .reshape(stored.shape)
                )
        tensor.copy_(torch.tensor(np.ascontiguousarray(stored)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen2", Kind.Q4_0),
        ("qwen3", Kind.Q4_1),
        ("qwen3", Kind.Q8_0),
        ("llama", Kind.Q8_0),
        ("llama", Kind.F16),
    ],
)
def test_a_file_gives_the_numbers_that_it_stands_for(
    family: str, kind: Kind, tmp_path: Path
) -> None:
    theirs = write(tmp_path / "tiny.gguf", family, kind)
    ours = hf.load(tmp_path / "tiny.gguf", dtype=torch.float32)
    assert ours.weight_format is None
    noted = {Kind.Q4_0: "q4_0", Kind.Q4_1: "q4_1", Kind.Q8_0: "q8_0"}.get(kind)
    folder = resolve(tmp_path / "tiny.gguf")
    assert exact_format(folder) == noted and low_bit_format(folder) is None
    ids = torch.arange(len(TOKENS))
    with torch.no_grad():
        wanted: Tensor = theirs(ids[None]).logits[0].log_softmax(-1)
        hidden = ours(ids, torch.arange(len(ids)), varlen([len(ids)]))
        got = ours.logits(hidden).log_softmax(-1)
    assert float((got - wanted).abs().max()) < 1e-4
    held = hf.load(folder, dtype=torch.float32, weights=noted)
    for (name, dense), (_, low) in zip(ours.linears(), held.linears(), strict=True):
        low_NK = low.weight if noted is None else low.weight.dequantize()
        assert torch.equal(low_NK, dense.weight), name


def test_its_own_format_is_that_of_rollouts_for_which_none_is_asked(tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "qwen3", Kind.Q4_1)
    path = str(tmp_path / "tiny.gguf")
    assert lowroll.Engine(path, cache_tokens=64).behavior.weights == "q4_1"
    assert lowroll.Engine(path, weights="int8", cache_tokens=64).behavior.weights == "int8"
    assert _rollouts(from_mapping({"model": path})) == "q4_1"
    assert _rollouts(from_mapping({"model": path, "rollout": {"weights": "int8"}})) == "int8"


def test_no_format_is_noted_where_layers_have_several_or_codes_would_change(tmp_path: Path) -> None:
    write(tmp_path / "mixed.gguf", "qwen3", Kind.Q4_1, special={"v_proj": Kind.Q8_0})
    write(tmp_path / "moved.gguf", "qwen3", Kind.Q4_1, moved=True)
    for name in ("mixed", "moved"):
        folder = resolve(tmp_path / f"{name}.gguf")
        assert exact_format(folder) is None and not (folder / NOTE).exists()
    (folder / NOTE).write_text('{"format": "int3"}')
    with pytest.raises(ValueError, match=r"gguf\.json: format: 'int3' is unknown"):
        exact_format(folder)


def test_the_folder_has_its_tokenizer_and_is_made_once(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "qwen3", Kind.Q8_0)
    folder = resolve(path)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token == "</s>" and tokenizer.encode("ab a") == [5, 7]
    assert resolve(path) == folder and [one for one in cache.iterdir() if one.is_dir()] == [folder]
    said = [record.getMessage() for record in caplog.records if "become dense" in record.message]
    assert len(said) == 1
    os.utime(path, ns=(1, 1))
    assert resolve(path) != folder


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 64, b"PK" * 99])
def test_a_damaged_file_is_one_line_that_names_it(
    content: bytes, tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.gguf: cannot be read as a GGUF model") as refused:
        resolve(path)
    assert "\n" not in str(refused.value)
    assert not cache.exists() or not any(one.is_dir() for one in cache.iterdir())


def test_what_transformers_would_leave_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "qwen2", Kind.Q8_0, qwen2_rope_scaling_type="yarn")
    with pytest.raises(ValueError, match=r"tiny\.gguf: .*qwen2\.rope\.scaling.type: scaled pos"):
        resolve(path)


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lowroll\[gguf\]'"):
        resolve(path)
