"""What families have of their own: text inside of a model of images, and modules that stay dense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from lowroll.model import hf
from lowroll.weights.publish import quantize_base
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import hf_folder

SEQUENCES = random_sequences([30, 5])


def inside_of_images(text: Path, folder: Path) -> Path:
    """The same text model as published folders have it: beside a vision tower and a draft head."""
    shutil.copytree(text, folder)
    config = json.loads((text / "config.json").read_text())
    outer = config["model_type"].removesuffix("_text")
    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[outer]
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": [f"{name}ForConditionalGeneration"],
                "model_type": outer,
                "tie_word_embeddings": config["tie_word_embeddings"],
                "text_config": {k: v for k, v in config.items() if k != "architectures"},
                "vision_config": {"hidden_size": 8},
            }
        )
    )
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    extra = {"mtp.fc.weight": torch.zeros(2, 4), "model.visual.patch.weight": torch.zeros(3)}
    save_file(tensors | extra, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_text_inside_of_a_model_of_images_is_the_text_model(family: str, tmp_path: Path) -> None:
    """It computes the same, and is saved as the text model that it is."""
    text = hf.load(hf_folder(tmp_path / "text", family))
    inside = hf.load(inside_of_images(tmp_path / "text", tmp_path / "inside"))
    assert torch.equal(forward(inside, SEQUENCES), forward(text, SEQUENCES))
    hf.save(inside, tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    want = torch.cat([theirs(torch.tensor([s])).logits[0] for s in SEQUENCES])
    assert (forward(text, SEQUENCES) - want).abs().max() < 1e-4
    assert hf.load(tmp_path / "saved").spec.stored_prefix == "model."


def test_other_tensors_are_still_unexpected(tmp_path: Path) -> None:
    hf_folder(tmp_path / "text", "qwen3.5")
    folder = inside_of_images(tmp_path / "text", tmp_path / "inside")
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.audio.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.audio\.weight"):
        hf.load(folder)


@pytest.mark.parametrize(
    "family", ["qwen3.5", "qwen3-next", "gemma3", "olmo3", "granite", "smollm3"]
)
def test_a_low_bit_folder_says_what_stays_dense(family: str, tmp_path: Path) -> None:
    """We read it back bit for bit, and transformers computes the same with its own reader."""
    model = quantize_base(hf.load(hf_folder(tmp_path / "m", family)), "fp8")
    hf.save(model, tmp_path / "low")
    again = hf.load(tmp_path / "low")
    assert torch.equal(forward(again, SEQUENCES), forward(model, SEQUENCES))
    if family == "qwen3-next":
        return  # transformers reads no experts in fp8
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "low",
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    want = torch.cat([theirs(torch.tensor([s])).logits[0] for s in SEQUENCES])
    assert (forward(again, SEQUENCES) - want).abs().max() < 2e-4
