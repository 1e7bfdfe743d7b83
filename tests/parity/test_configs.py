"""A config.json means here what it means in transformers, or it is refused by the key that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowroll.engine.native import NativeEngine
from lowroll.engine.request import Request
from lowroll.model import hf
from lowroll.model.spec import read_spec, read_spec_apart
from tests.fixtures.json_files import edit_json
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import LLAMA3_ROPE, hf_folder

BOUND = 1e-4
LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
SHORT = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}

# name: (family, keys that are written over those of the saved config.json; ... removes one)
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 scaling by hand, which replaces the base too": ("llama", {"rope_scaling": LLAMA3}),
    "llama3 scaling by hand, with a base": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama3 scaling of transformers 4": (
        "llama",
        {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": LLAMA3},
    ),
    "llama3 scaling whose original context stands outside": (
        "llama",
        {"rope_parameters": {**SHORT, "rope_theta": 500.0}, "original_max_position_embeddings": 16},
    ),
    "llama3 scaling with two original contexts": (
        "llama",
        {
            "rope_parameters": {
                **SHORT,
                "rope_theta": 500.0,
                "original_max_position_embeddings": 8,
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "a base of transformers 4": ("qwen3", {"rope_parameters": ..., "rope_theta": 77.0}),
    "no base at all": ("qwen2", {"rope_parameters": ...}),
    "a base outside that a newer key overrules": (
        "qwen2",
        {"rope_theta": 77.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "no model_type": ("qwen2", {"architectures": ["Qwen2ForCausalLM"]}),
    "yarn by hand": (
        "qwen2",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "yarn with a size of its own, borders between pairs": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.5,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
            }
        },
    ),
    "yarn of heads that are rotated in part": (
        "glm4",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear by hand": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "a mixture with a window, which layer_types does not switch off": (
        "qwen3-moe",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 99,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "Gemma 3 as transformers 4 wrote it": (
        "gemma3",
        {
            "rope_parameters": ...,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": ...,
            "sliding_window_pattern": 2,
        },
    ),
    "GPT-OSS as it is published": (
        "gpt-oss",
        {
            "rope_parameters": ...,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
            "experts_per_token": 2,
            "initial_context_length": 8,
            "swiglu_alpha": ...,
        },
    ),
    "SmolLM3 with an interval": (
        "smollm3",
        {"no_rope_layers": ..., "no_rope_layer_interval": 3, "layer_types": ...},
    ),
}
# name: (family, keys, the key that the refusal names)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic by hand": (
        "qwen3",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling",
    ),
    "gemma": ("llama", {"model_type": "gemma"}, "model_type"),
    "another family of ours": ("llama", {"model_type": "mistral"}, "architectures"),
}


def edited(folder: Path, changes: dict[str, Any]) -> Path:
    edit_json(folder / "config.json", **changes)
    return folder


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_what_is_read_has_transformers_logits(name: str, tmp_path: Path) -> None:
    family, changes = READ[name]
    folder = edited(hf_folder(tmp_path / "m", family), changes)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = hf.load(folder)
    sequences = random_sequences([60, 9])
    want = torch.cat([theirs(torch.tensor([s])).logits[0] for s in sequences])
    assert (forward(ours, sequences) - want).abs().max() < BOUND


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_done_is_refused_by_its_key(name: str, tmp_path: Path) -> None:
    family, changes, key = REFUSED[name]
    folder = edited(hf_folder(tmp_path / "m", family), changes)
    with pytest.raises(ValueError, match=f"config.json: {key}"):
        hf.load(folder)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {}),
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 0, "layer_types": ...},
        ),
    ],
)
def test_a_window_that_no_key_names_is_the_class_s_own(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = edited(
        hf_folder(tmp_path / "m", family),
        {"sliding_window": ..., "max_position_embeddings": 8192, **changes},
    )
    assert hf.load(folder).spec.windows == (4096, 4096)


def test_ends_that_stand_in_generation_config_alone_end_a_response(tmp_path: Path) -> None:
    folder = edited(hf_folder(tmp_path / "m", "qwen2"), {"eos_token_id": 5})
    request = Request(id="0", prompt_ids=[3, 4], max_tokens=8, temperature=0.0)
    (group,) = NativeEngine(hf.load(folder)).generate([request])
    (first, *_) = drawn = group.rollouts[0].token_ids
    assert len(drawn) == 8
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, 6]}))
    assert read_spec(folder).eos_ids == (5, first, 6)
    (group,) = NativeEngine(hf.load(folder)).generate([request])
    assert group.rollouts[0].token_ids == [first]
    assert group.rollouts[0].finish_reason == "stop"


@pytest.mark.parametrize("family", ["qwen3-moe", "llama3-rope"])
def test_a_process_without_torch_reads_the_same(family: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", family)
    assert read_spec_apart(folder) == read_spec(folder)
    edited(folder, {"model_type": "gemma"})
    with pytest.raises(ValueError, match="config.json: model_type"):
        read_spec_apart(folder)
