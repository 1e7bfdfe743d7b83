"""Adapters: the identity when fresh, PEFT's files in and out with equal logits, gradients, and
refusals by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowroll.model import hf, lora
from lowroll.model.adapter_base import base_of
from lowroll.model.headers import low_bit_format
from lowroll.model.logprobs import token_log_probs
from lowroll.model.tokenizer import eos_id, load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor
from lowroll.trainer import recompute
from lowroll.weights.publish import quantize_base
from tests.fixtures.json_files import edit_json
from tests.fixtures.sequences import IDS, logits
from tests.fixtures.tiny import hf_folder, hf_model

SUBSET = ("q_proj", "v_proj", "down_proj")
TARGETS = {"all": lora.TARGETS, "subset": SUBSET}
FUSED = {  # what the targets are where matrices are fused
    "phi3-partial": {
        "all": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
        "subset": ("qkv_proj", "down_proj"),
    },
    "glm": {
        "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
        "subset": ("q_proj", "gate_up_proj"),
    },
}
OUTSIDE = ("qwen3", "llama-biases", *FUSED)  # the families of PEFT's files


def hidden(model: Transformer) -> Tensor:
    return model(IDS, torch.arange(len(IDS)), model.causal([len(IDS)]))


def loss(model: Transformer) -> Tensor:
    logp, _ = token_log_probs(hidden(model)[:-1], model.lm_head_weight, IDS[1:])
    return -logp.mean()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: hf_folder(root / family, family) for family in OUTSIDE}


def adapted(
    folder: Path, targets: Sequence[str] = lora.TARGETS, format: str | None = None
) -> Transformer:
    """A model whose adapter is not the identity: B is random too."""
    model = hf.load(folder)
    if format is not None:
        quantize_base(model, format)
    lora.attach(model, rank=3, alpha=7.0, targets=targets, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.trainable_parameters().items():
            if ".b." in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


# -- identity limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_fresh_adapter_is_exactly_the_identity(
    folders: dict[str, Path], format: str | None
) -> None:
    model = hf.load(folders["qwen3"])
    if format is not None:
        quantize_base(model, format)
    before = logits(model)
    lora.attach(model, rank=4, alpha=32.0)
    assert torch.equal(logits(model), before)
    assert all(
        p.abs().max() > 0 for name, p in model.trainable_parameters().items() if ".a." in name
    )


def test_disabled_is_the_base_bitwise_and_ends_with_the_block(folders: dict[str, Path]) -> None:
    base, model = logits(hf.load(folders["qwen3"])), adapted(folders["qwen3"])
    on = logits(model)
    assert (on - base).abs().max() > 0.1
    with pytest.raises(KeyError), lora.disabled(model) as frozen:
        assert frozen is model and torch.equal(logits(model), base)
        with lora.disabled(model):
            pass
        assert torch.equal(logits(model), base)  # the inner block gave back what it found
        raise KeyError
    assert torch.equal(logits(model), on)


def test_a_fresh_adapter_is_drawn_as_pefts_is(folders: dict[str, Path]) -> None:
    """A uniform within 1 / sqrt(in), a function of the seed (0 by default), any rank from 1 on;
    every layer another."""
    first, again, other = (
        lora.attach(hf.load(folders["qwen3"]), 1, 4.0, **seed).trainable_parameters()
        for seed in ({}, {"seed": 0}, {"seed": 1})
    )
    drawn = {name: p for name, p in first.items() if ".a." in name}
    assert all(torch.equal(p, again[name]) for name, p in first.items())
    assert not any(torch.equal(p, other[name]) for name, p in drawn.items())
    assert len({tuple(p.flatten()[:20].tolist()) for p in drawn.values()}) == len(drawn) == 14
    for p in drawn.values():
        assert p.shape[0] == 1 and p.dtype == torch.float32
        assert (
            0.8 < float(p.abs().max()) * p.shape[1] ** 0.5 <= 1
            and -0.5 < float(p.mean()) * p.shape[1] ** 0.5 < 0.5
        )
    theirs = peft.get_peft_model(
        hf_model("qwen3"), peft.LoraConfig(r=64, target_modules=["q_proj"])
    ).state_dict()
    (bound,) = {round(float(p.abs().max()), 2) for name, p in theirs.items() if "lora_A" in name}
    assert bound == round(32**-0.5, 2)


def test_the_switch_passes_layers_without_an_adapter(folders: dict[str, Path]) -> None:
    base, model = logits(hf.load(folders["qwen3"])), adapted(folders["qwen3"], SUBSET)
    model.blocks[0].qkv.adapter.enabled = False  # off before, and so after
    with lora.disabled(model):
        assert torch.equal(logits(model), base)
    assert [linear.adapter.enabled for _, linear in model.linears() if linear.adapter] == [
        False,
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("targets", TARGETS)
def test_merged_weights_are_the_adapter(
    folders: dict[str, Path], targets: str, tmp_path: Path
) -> None:
    model = adapted(folders["qwen3"], TARGETS[targets])
    on = logits(model)
    merged = lora.merge(model)
    assert (
        logits(merged) - on
    ).abs().max() < 1e-5 * on.abs().max() and not merged.trainable_parameters()
    hf.save(merged, tmp_path / "merged")
    assert torch.equal(logits(hf.load(tmp_path / "merged")), logits(merged))
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv: the base is int8"):
        lora.merge(adapted(folders["qwen3"], format="int8"))


def test_an_adapter_moves_its_own_rows_only(folders: dict[str, Path]) -> None:
    """y_p = W_p x + (alpha / r) B_p A_p x, by hand in float64; the other parts of the fused matrix
    stay put."""
    base, model = hf.load(folders["qwen3"]), adapted(folders["qwen3"], ("k_proj",))
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    plain, qkv = base.blocks[1].qkv, model.blocks[1].qkv
    update = (
        (7.0 / 3)
        * (x.double() @ qkv.adapter.a["k_proj"].double().t())
        @ qkv.adapter.b["k_proj"].double().t()
    )
    want = plain(x).double()
    want[:, 64:96] += update  # 4 heads of 16 are q's rows; 2 of 16 are k's
    torch.testing.assert_close(qkv(x).double(), want, rtol=0, atol=1e-5)
    assert torch.equal(qkv(x)[:, :64], plain(x)[:, :64]) and torch.equal(
        qkv(x)[:, 96:], plain(x)[:, 96:]
    )
    assert model.blocks[1].down.adapter is None


# -- PEFT's files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("family", OUTSIDE)
def test_peft_loads_our_adapter(
    folders: dict[str, Path], family: str, targets: str, tmp_path: Path
) -> None:
    model = adapted(folders[family], FUSED.get(family, TARGETS)[targets])
    lora.save(model, tmp_path / "adapter", base=str(folders[family]))
    theirs = peft.PeftModel.from_pretrained(hf_model(family), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert (theirs(IDS[None]).logits[0] - logits(model)).abs().max() < 1e-4
    again = lora.load(hf.load(folders[family]), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))
    for (name, p), (other, q) in zip(
        lora.state(model).items(), lora.state(again).items(), strict=True
    ):
        assert name == other and torch.equal(p, q)
    assert again.trainable_parameters().keys() == model.trainable_parameters().keys()


@pytest.mark.parametrize("family", FUSED)
def test_the_default_targets_mean_the_fused_matrices(folders: dict[str, Path], family: str) -> None:
    model = lora.attach(hf.load(folders[family]), 2, 4.0)
    parts = [part for _, linear in [*model.linears()][:4] for part in linear.adapter.a]
    assert (*parts,) == FUSED[family]["all"]
    assert lora.state(model).keys() == lora.state(adapted(folders[family], parts)).keys()
    for targets, words in (
        (["gate_proj", "o_proj"], "has no gate_proj; choose out of .*gate_up_proj"),
        (["gate_up_proj", "up_proj", "lm_head"], r"got \['lm_head'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            lora.attach(model, 2, 4.0, targets)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no qkv_proj"):
        lora.attach(hf.load(folders["qwen3"]), 2, 4.0, ["qkv_proj"])


def test_what_is_written_for_peft(folders: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(folders["qwen3"], ("down_proj", "q_proj"))
    lora.save(model, tmp_path / "adapter", base="Qwen/Qwen3-0.6B", tokenizer_from=tmp_path)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 7.0,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": ["q_proj", "down_proj"],
        "base_model_name_or_path": "Qwen/Qwen3-0.6B",
    }
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "by hand").mkdir()
    lora.write(model, tmp_path / "by hand", "Qwen/Qwen3-0.6B")
    unscaled = load_file(tmp_path / "by hand" / "adapter_model.safetensors")
    assert stored.keys() == unscaled.keys() == lora.state(model).keys() and len(stored) == 2 * 2 * 2
    assert all(
        torch.equal(t, stored[name]) and torch.equal(t, unscaled[name])
        for name, t in lora.state(model).items()
    )


def peft_adapter(
    path: Path, family: str = "qwen3", targets: Sequence[str] = SUBSET, **options: Any
) -> Tensor:
    """Write an adapter with random B by PEFT; returns the logits of PEFT's model."""
    config = peft.LoraConfig(
        **{
            "r": 3,
            "lora_alpha": 5,
            "target_modules": list(targets),
            "task_type": "CAUSAL_LM",
            "lora_dropout": 0.1,
            **options,
        }
    )
    model = peft.get_peft_model(hf_model(family), config).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(0.3 * torch.randn_like(p))
        got = model(IDS[None]).logits[0]
    model.save_pretrained(path)
    return got


def test_an_adapter_may_name_every_linear_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    """PEFT does for `all-linear`, where a model has few."""
    want = peft_adapter(tmp_path, targets=lora.TARGETS)
    path = tmp_path / "adapter_config.json"
    blocks = [name.split(".") for name in load_file(tmp_path / "adapter_model.safetensors")]
    every = sorted({".".join(block[2:-2]) for block in blocks})
    edit_json(path, target_modules=every)
    assert (logits(lora.load(hf.load(folders["qwen3"]), tmp_path)) - want).abs().max() < 1e-4
    edit_json(path, target_modules=every[:1])
    with pytest.raises(ValueError, match="unexpected tensors"):
        lora.load(hf.load(folders["qwen3"]), tmp_path)


def test_an_adapter_without_a_tokenizer_has_its_bases(model: Path, tmp_path: Path) -> None:
    edit_json(
        tmp_path / "adapter_config.json", peft_type="LORA", base_model_name_or_path=str(model)
    )
    assert eos_id(tmp_path) == eos_id(model)
    assert load_tokenizer(tmp_path).chat_template == load_tokenizer(model).chat_template


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama-biases"])
def test_gradients_over_a_quantized_base_are_those_over_the_dequantized_one(
    folders: dict[str, Path], family: str, checkpointing: bool
) -> None:
    """Autograd through the same model with dequantized Parameters is the oracle."""
    quantized, dense = (
        adapted(folders[family], format="int8"),
        adapted(folders[family], format="int8"),
    )
    for _, linear in dense.linears():
        assert isinstance(linear.weight, QTensor)
        linear.set_weight(nn.Parameter(linear.weight.dequantize(), requires_grad=False))
    recompute.apply(quantized, checkpointing)
    for model in (quantized, dense):
        loss(model).backward()
    want = dense.trainable_parameters()
    for name, p in quantized.trainable_parameters().items():
        torch.testing.assert_close(p.grad, want[name].grad, rtol=1e-5, atol=1e-7)
    assert (
        logits(dense) - logits(adapted(folders[family]))
    ).abs().max() > 1e-3  # quantizing did change the model


def test_bias_gradient_over_a_quantized_weight(folders: dict[str, Path]) -> None:
    linear = quantize_base(hf.load(folders["llama-biases"]), "int8").blocks[0].o
    x = torch.randn(5, 32, requires_grad=True)
    (linear(x) * torch.arange(5.0)[:, None]).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((32,), 10.0))
    torch.testing.assert_close(x.grad[2], 2 * linear.weight.dequantize().sum(0))


def test_training_an_adapter_moves_nothing_else(folders: dict[str, Path]) -> None:
    model = adapted(folders["qwen3"], format="int8")
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    codes = {name: linear.weight.tensors["codes"].clone() for name, linear in model.linears()}
    optimizer = torch.optim.AdamW(model.trainable_parameters().values(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0] - 0.1
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], p) for name, p in frozen.items())
    assert all(
        torch.equal(linear.weight.tensors["codes"], codes[name]) for name, linear in model.linears()
    )


# -- refusals --------------------------------------------------------------------------------------


def test_attach_refusals_leave_the_model_alone(folders: dict[str, Path]) -> None:
    model = hf.load(folders["qwen3"])
    for options, words in (
        ({"targets": ["q_proj", "lm_head"]}, r"lora_target_modules: .*got \['lm_head'\]"),
        ({"targets": []}, r"lora_target_modules: .*got \[\]"),
        ({"targets": "q_proj"}, r"lora_target_modules: .*got \['q_proj'\]"),
        ({"rank": 0}, "lora_rank"),
        ({"alpha": float("nan")}, "lora_alpha"),
    ):
        with pytest.raises(ValueError, match=words):
            lora.attach(model, **{"rank": 2, "alpha": 4.0, **options})
    assert all(p.requires_grad for p in model.parameters()) and not any(
        x.adapter for _, x in model.linears()
    )
    with pytest.raises(ValueError, match="no adapter"):
        lora.save(model, folders["qwen3"].parent / "nothing")


BAD_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora"),
    "rsLoRA": ({"use_rslora": True}, "use_rslora"),
    "biases": ({"bias": "all"}, "bias"),
    "adapter biases": ({"lora_bias": True}, "lora_bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "rank by layer": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "alpha by layer": ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
    "some layers": ({"layers_to_transform": [1]}, "layers_to_transform"),
    "a key of the future": ({"use_xlora": {"n": 1}}, "use_xlora"),
    "unknown target": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules"),
    "a pattern as target": ({"target_modules": ".*_proj"}, "target_modules"),
    "no target": ({"target_modules": []}, "target_modules"),
    "not LoRA": ({"peft_type": "IA3"}, "peft_type"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "other rank": ({"r": 4}, "wrong shape"),
    "other targets": (
        {"target_modules": ["q_proj", "v_proj", "up_proj"]},
        "missing tensors.*up_proj",
    ),
    "fewer targets": ({"target_modules": ["q_proj", "v_proj"]}, "unexpected tensors.*down_proj"),
}
V1 = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
BAD_TENSORS: dict[str, tuple[Tensor | None, str]] = {
    "missing": (None, f"missing tensors: {V1}"),
    "shape": (torch.zeros(33, 3), rf"wrong shape for r = 3: {V1} \[33, 3\] instead of \[32, 3\]"),
    "NaN": (torch.full((32, 3), float("nan")), f"non-finite value: {V1}"),
    "integers": (torch.zeros(32, 3, dtype=torch.int32), f"wrong dtype: {V1}"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "good"
    peft_adapter(path)
    return path


@pytest.fixture
def adapter(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "adapter"))


def refused(model_folder: Path, adapter: Path, words: str) -> None:
    """One line that names what is wrong, and a model that is as it was."""
    model = hf.load(model_folder)
    with pytest.raises(ValueError, match=words) as caught:
        lora.load(model, adapter)
    assert "\n" not in str(caught.value) and str(adapter) in str(caught.value)
    assert all(p.requires_grad for p in model.parameters()) and not any(
        x.adapter for _, x in model.linears()
    )


@pytest.mark.parametrize("case", BAD_KEYS)
def test_bad_adapter_configs(case: str, folders: dict[str, Path], adapter: Path) -> None:
    changes, words = BAD_KEYS[case]
    edit_json(adapter / "adapter_config.json", **changes)
    refused(folders["qwen3"], adapter, words)


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_adapter_tensors(case: str, folders: dict[str, Path], adapter: Path) -> None:
    value, words = BAD_TENSORS[case]
    path = adapter / "adapter_model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(path).items() if name != V1}
    save_file(tensors if value is None else {**tensors, V1: value}, path)
    refused(folders["qwen3"], adapter, words)


def test_damaged_and_absent_adapter_files(folders: dict[str, Path], adapter: Path) -> None:
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    refused(folders["llama-biases"], adapter, "wrong shape")  # another model's adapter
    weights.write_bytes(weights.read_bytes()[:-9])
    refused(folders["qwen3"], adapter, "adapter_model.safetensors: damaged")
    config.unlink()
    refused(folders["qwen3"], adapter, "adapter_config.json: no such file")


def test_a_relative_base_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder(tmp_path / "models" / "base")
    monkeypatch.chdir(tmp_path)
    lora.save(lora.attach(hf.load("models/base"), 2, 4.0), "adapter", base="models/base")
    monkeypatch.setenv("HOME", str(tmp_path / "models"))
    lora.save(
        lora.attach(hf.load("~/base"), 2, 4.0), "home", base="~/base"
    )  # it looks like a hub id
    monkeypatch.chdir(tmp_path / "models")
    for adapter in ("adapter", "home"):
        assert base_of(tmp_path / adapter) == str(tmp_path / "models" / "base")
        assert "base_model" not in (tmp_path / adapter / "README.md").read_text()


def test_an_adapter_of_rank_1_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    want = peft_adapter(tmp_path / "one", r=1, init_lora_weights=False)
    assert (
        logits(lora.load(hf.load(folders["qwen3"]), tmp_path / "one")) - want
    ).abs().max() < 1e-4
    for harmless in (False, True, None, "gaussian", "orthogonal"):  # how A and B were drawn, once
        edit_json(tmp_path / "one" / "adapter_config.json", init_lora_weights=harmless)
        assert (
            logits(lora.load(hf.load(folders["qwen3"]), tmp_path / "one")) - want
        ).abs().max() < 1e-4


def test_the_base_of_an_adapter_folder(adapter: Path) -> None:
    for odd in (None, "", 5, ["Qwen/Qwen3-0.6B"]):
        edit_json(adapter / "adapter_config.json", base_model_name_or_path=odd)
        with pytest.raises(
            ValueError, match="base_model_name_or_path: expected the base model's folder or hub id"
        ):
            base_of(adapter)
    (adapter / "base").mkdir()
    assert base_of(adapter) == str(adapter / "base")


def test_a_revision_of_the_base_is_that_revision(
    folders: dict[str, Path], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest commit may be another model."""
    commits, asked = {None: "other", "0a1b": "qwen3"}, []
    hf_folder(tmp_path / "other", "qwen3", seed=5)

    def download(name: str, revision: str | None = None, **_: Any) -> str:
        asked.append((name, revision))
        return str({**folders, "other": tmp_path / "other"}[commits[revision]])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    path = adapter / "adapter_config.json"
    edit_json(path, base_model_name_or_path="some/model")
    for revision, family in ((None, tmp_path / "other"), ("0a1b", folders["qwen3"])):
        edit_json(path, revision=revision)
        assert low_bit_format(adapter) is None
        assert torch.equal(logits(hf.load(adapter)), logits(lora.load(hf.load(family), adapter)))
    assert set(asked) == {("some/model", None), ("some/model", "0a1b")}
    edit_json(path, revision=7)
    with pytest.raises(
        ValueError, match="revision: expected a commit, branch or tag of the base model, got 7"
    ):
        base_of(adapter)


def test_a_refusal_names_five_tensors_and_counts_the_rest(
    folders: dict[str, Path], adapter: Path
) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    for left_out, rest in ((5, ""), (6, " and 1 more"), (8, " and 3 more")):
        save_file({name: tensors[name] for name in names[left_out:]}, path)
        refused(folders["qwen3"], adapter, rf"missing tensors: (\S+, ){{4}}\S+{rest}$")
