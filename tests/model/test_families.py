"""What families have of their own: text inside of a model of images, modules that stay dense, and
GLM-4.5's routers."""

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
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.trainer.critic import Critic
from lowroll.trainer.optim import OptimSettings
from lowroll.weights.publish import quantize_base, rollout_copy
from lowroll.weights.sync.update import UpdateReceiver, WeightUpdate
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import hf_config, hf_folder

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


# -- GLM-4.5 ---------------------------------------------------------------------------------------


def corrections(model: Transformer) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: p.detach() for name, p in named if name.endswith("router.correction_bias")}


def test_layers_of_drafts_are_not_read(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "glm4-moe", num_nextn_predict_layers=1)
    want = forward(hf.load(folder), SEQUENCES)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    draft = {"model.layers.2.eh_proj.weight": torch.zeros(2, 4)}
    save_file(tensors | draft, folder / "model.safetensors")
    assert torch.equal(forward(hf.load(folder), SEQUENCES), want)
    far = {"model.layers.3.eh_proj.weight": torch.zeros(2, 4)}
    save_file(tensors | far, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.layers\.3\.eh_proj"):
        hf.load(folder)


def test_corrections_are_in_float32_wherever_a_model_goes(tmp_path: Path) -> None:
    """Files, engines, updates from elsewhere, and casts of a bfloat16 model hold the same numbers."""
    folder = hf_folder(tmp_path / "m", "glm4-moe-groups")
    want = corrections(hf.load(folder))
    model = hf.load(folder, dtype=torch.bfloat16)
    hf.save(model, tmp_path / "saved")
    update = WeightUpdate.local(model, 1).as_stream()
    engine = rollout_copy(hf.load(folder), "int8", torch.bfloat16)
    with torch.no_grad():
        for correction in corrections(engine).values():
            correction.zero_()
    UpdateReceiver(engine).take(update)
    copies = {
        "loaded": model,
        "saved": hf.load(tmp_path / "saved", dtype=torch.bfloat16),
        "copied": rollout_copy(model, "fp8", torch.bfloat16),
        "updated": engine,
        "cast": hf.load(folder).to(torch.bfloat16),
    }
    for way, copy in copies.items():
        found = corrections(copy)
        assert found.keys() == want.keys() and len(want) == 3, way
        for name, correction in want.items():
            assert torch.equal(found[name], correction), (way, name)
    assert all(torch.equal(c.bfloat16().float(), c) is False for c in want.values())


def test_corrections_do_not_learn(tmp_path: Path) -> None:
    """Neither a policy's, nor a critic's, whose optimiser decays what it trains."""
    model = hf.load(hf_folder(tmp_path / "m", "glm4-moe")).requires_grad_(True)
    forward(model, SEQUENCES).square().sum().backward()
    names = {name for name, p in model.named_parameters() if p.grad is None}
    assert names == corrections(model).keys() and names
    assert model.trainable_parameters().keys() == dict(model.named_parameters()).keys() - names
    critic = Critic(hf.load(tmp_path / "m"), OptimSettings())
    assert not any(name.endswith("correction_bias") for name in critic.params)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 4}, "n_group: 6 experts do not make 4 groups of 2 or more"),
        ({"n_group": 6}, "n_group: 6 experts do not make 6 groups of 2 or more"),
        ({"n_group": 2, "topk_group": 3}, "topk_group: 3 of 2 groups"),
        ({"n_group": 3, "num_experts_per_tok": 3}, "num_experts_per_tok: 3 are more than"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace: 2 of 2 layers"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
    ],
)
def test_mixtures_that_are_refused(changes: dict[str, object], words: str) -> None:
    config = {**hf_config("glm4-moe").to_dict(), "architectures": ["Glm4MoeForCausalLM"]}
    spec_from_config(config)
    with pytest.raises(ValueError, match=words):
        spec_from_config({**config, **changes})


def test_folders_say_one_width_of_rotation_for_down_projections(tmp_path: Path) -> None:
    """Experts' have 24 numbers, the dense layer's 48: blocks of 4 and of 16."""
    model = quantize_base(hf.load(hf_folder(tmp_path / "m", "glm4-moe")), "int8_rotated")
    with pytest.raises(ValueError, match="int8_rotated: .* in blocks of 4 and 16"):
        hf.save(model, tmp_path / "low")
