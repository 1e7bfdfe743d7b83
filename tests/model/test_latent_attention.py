"""Multi-head latent attention: every matrix in low-bit formats, bounded and 8-bit caches, folders as
DeepSeek publishes them, and configurations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import lowroll
from lowroll import Request, score
from lowroll.kv.policy.table import make
from lowroll.model import hf, lora, size_checks
from lowroll.model.spec import read_spec, spec_from_config
from lowroll.runs import preflight
from lowroll.runs.assembly.compute import Compute
from lowroll.weights.publish import digest, quantize_base
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import FAMILIES, hf_config, hf_folder

LATENT = [family for family, (_, special) in FAMILIES.items() if "kv_lora_rank" in special]
SEQUENCES = random_sequences([30, 5])
CODE = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
# of whole blocks, whatever the format
BLOCKS = dict.fromkeys(
    ("hidden_size", "q_lora_rank", "intermediate_size", "moe_intermediate_size"), 128
)


def gaps(folder: Path, weights: str = "fp32", **options: Any) -> Tensor:
    """How far recorded log-probs are from those of a learner that replays the cache."""
    engine = engine_of(folder, weights=weights, record_evictions=True, **options)
    requests = [
        Request(prompt(11), n=3, max_tokens=20, seed=3, ignore_eos=True),
        Request(prompt(25), n=1, max_tokens=12, seed=4, ignore_eos=True),
    ]
    rollouts = [(g.request.prompt_ids, r) for g in engine.generate(requests) for r in g.rollouts]
    again = score(
        engine.model,
        [ids + r.token_ids for ids, r in rollouts],
        [len(ids) for ids, _ in rollouts],
        evictions=[r.evictions for _, r in rollouts],
    )
    pairs = zip(rollouts, again, strict=True)
    return torch.cat([(torch.tensor(r.logprobs) - x).abs() for (_, r), x in pairs])


@pytest.mark.slow
@pytest.mark.parametrize("weights", lowroll.formats())
def test_engines_in_every_format_draw_from_their_models_distribution(
    weights: str, tmp_path: Path
) -> None:
    """But for activations on a tie, which round the other way in a pass of other rows."""
    found = gaps(hf_folder(tmp_path / "m", "deepseek-v3", **BLOCKS), weights)
    assert found.median() < (0.1 if weights == "bf16" else 1e-4)


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "rkv"])
def test_bounded_caches_are_replayed(policy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sinks": 2} if policy == "streaming" else {"window": 3, "kernel": 3}
    kv = make(policy, budget=9, buffer=4, **({} if policy == "h2o" else options))
    assert gaps(hf_folder(tmp_path / "m", "deepseek-v2"), kv=kv).max() < 1e-4


def test_an_8_bit_cache_rounds_keys_and_values(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "glm4-moe-lite", qk_nope_head_dim=26, v_head_dim=32)
    assert 0.001 < gaps(folder, kv_dtype="fp8").median() < 0.1


def test_adapters_of_every_matrix_come_back(tmp_path: Path) -> None:
    """Also onto a base whose input norms are scaled, which only the first matrices read."""
    folder = hf_folder(tmp_path / "m", "deepseek-v3")
    model = hf.load(folder)
    targets = lora.attention_targets(model.spec)
    assert targets == ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
    lora.attach(model, 3, 6.0, targets)
    for name, p in model.trainable_parameters().items():
        if ".b." in name:
            p.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    lora.save(model, tmp_path / "adapter")
    unscaled = lora.state(model)
    for name, tensor in lora.state(model, input_scale=2.0).items():
        reads_norm = name.endswith(("q_a_proj.lora_A.weight", "with_mqa.lora_A.weight"))
        assert torch.equal(tensor, unscaled[name] * (2.0 if reads_norm else 1.0)), name
    again = lora.load(hf.load(folder), tmp_path / "adapter")
    assert torch.equal(forward(again, SEQUENCES), forward(model, SEQUENCES))


@pytest.mark.parametrize("family", LATENT)
def test_an_export_is_the_folder_that_was_read(family: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", family)
    hf.save(hf.load(folder), tmp_path / "saved")
    theirs = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, tmp_path / "saved")
    ]
    ids = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        assert torch.equal(theirs[0](ids).logits, theirs[1](ids).logits)


# -- folders as DeepSeek publishes them ------------------------------------------------------------


def test_layers_of_drafts_and_code_are_not_read(tmp_path: Path) -> None:
    """And the exported folder, which has no code, names none."""
    folder = hf_folder(tmp_path / "m", "deepseek-v3", num_nextn_predict_layers=1)
    want = forward(hf.load(folder), SEQUENCES)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    draft = {"model.layers.3.eh_proj.weight": torch.zeros(2, 4)}
    save_file(tensors | draft, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": CODE}))
    model = hf.load(folder)
    assert torch.equal(forward(model, SEQUENCES), want)
    hf.save(model, tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())


@pytest.mark.parametrize("key", ["kv_lora_rank", "qk_nope_head_dim"])
def test_sizes_beyond_the_files_are_named(key: str, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "deepseek-v3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: 10**9}))
    with pytest.raises(ValueError, match=f"{key}: 1,000,000,000 makes a model of"):
        hf.load(folder)


def test_code_of_other_families_is_refused() -> None:
    config = {**hf_config("glm4-moe-lite").to_dict(), "architectures": ["Glm4MoeLiteForCausalLM"]}
    spec_from_config(config)
    with pytest.raises(ValueError, match="auto_map"):
        spec_from_config({**config, "auto_map": CODE})


def test_blocks_of_fp8_are_read_as_deepseek_names_them(tmp_path: Path) -> None:
    model = quantize_base(hf.load(hf_folder(tmp_path / "m", "deepseek-v3", **BLOCKS)), "fp8_block")
    hf.save(model, tmp_path / "low")
    path = tmp_path / "low" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "low" / "model.safetensors")
    renamed = {name.replace("weight_scale", "weight_scale_inv"): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "low" / "model.safetensors")
    assert digest(hf.load(tmp_path / "low")) == digest(model)


# -- refusals --------------------------------------------------------------------------------------


def test_heads_that_are_too_wide_for_cuda_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By both sizes, when a model of them is loaded there and in a dry run."""

    def folder(name: str, nope: int) -> Path:
        sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "v_head_dim": 128}
        return hf_folder(tmp_path / name, "deepseek-v3", **sizes)

    fits, wide = folder("fits", 192), folder("wide", 194)
    told = r"config.json: qk_nope_head_dim \+ qk_rope_head_dim: 194 \+ 64; on CUDA .* 256 numbers"
    size_checks.check_heads(fits, read_spec(fits), "cuda:0")
    size_checks.check_heads(wide, read_spec(wide), "cpu")
    monkeypatch.setattr(hf, "Transformer", lambda *_: pytest.fail("a model was made"))
    with pytest.raises(ValueError, match=told):
        hf.load(wide, "cuda:0")
    compute = Compute(torch.device("cuda", 0), torch.bfloat16)
    with pytest.raises(ValueError, match=told):
        preflight._outline("model", str(wide), compute, preflight.Findings())
    assert (
        preflight._outline("model", str(fits), compute, preflight.Findings()).spec.head_dim == 256
    )


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek-v2", {"topk_method": "group_limited_greedy"}, "topk_method: .*greedy"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid'"),
        ("deepseek-v2", {"routed_scaling_factor": 16.0}, "routed_scaling_factor"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax'"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek-v3", {"v_head_dim": 17}, "v_head_dim: 17 are more than the 16"),
        ("deepseek-v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        ("deepseek-v3", {"qk_nope_head_dim": 9, "v_head_dim": 8}, "qk_nope_head_dim"),
        ("deepseek-v3", {"q_lora_rank": 0}, "q_lora_rank"),
        ("glm4-moe-lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_layer_types"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"] * 3}, "3 of 3 layers"),
        ("glm4-moe-lite", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
    ],
)
def test_configurations_that_are_refused(family: str, changes: dict[str, Any], words: str) -> None:
    theirs = hf_config(family)
    name = {"deepseek-v2": "DeepseekV2", "deepseek-v3": "DeepseekV3"}.get(family, "Glm4MoeLite")
    config = {**theirs.to_dict(), "architectures": [f"{name}ForCausalLM"]}
    spec_from_config(config)
    with pytest.raises(ValueError, match=words):
        spec_from_config({**config, **changes})
