"""Models whose linear layers have different formats: engine, publication, aligned learner, LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request
from lowroll.model import adapter_base, hf, lora
from lowroll.model.headers import low_bit_format
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed
from lowroll.quant.formats import QTensor, get_format
from lowroll.quant.table import EIGHT_BITS
from lowroll.weights import aligned_forward
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.masters import nudge, pointers

REQUEST = Request([5, 9, 23, 40, 7], n=3, max_tokens=12, seed=5, ignore_eos=True)
CYCLE = ("nvfp4", "int8", "fp32", "int8_rotated", "fp8")
FAMILY = "qwen3-tied-bias"


def assign(model: Transformer, formats: tuple[str, ...] = CYCLE) -> dict[str, str]:
    return {name: formats[i % len(formats)] for i, (name, _) in enumerate(model.linears())}


def register(model: Transformer) -> str:
    sizes = {name: linear.weight.shape.numel() for name, linear in model.linears()}
    return mixed.register(assign(model), sizes)


def learner(folder: Path) -> Transformer:
    return hf.load(folder).requires_grad_(True)


def engine_of(model: Transformer, weights: str) -> Engine:
    return Engine(model, weights=weights, device="cpu", cache_tokens=1024, page_size=4)


def formats_of(model: Transformer) -> dict[str, str]:
    return {
        name: linear.weight.format
        for name, linear in model.linears()
        if isinstance(linear.weight, QTensor)
    }


def drawn(engine: Engine) -> list[tuple[list[int], list[float]]]:
    return [(r.token_ids, r.logprobs) for r in engine.generate([REQUEST])[0].rollouts]


def test_an_engine_holds_each_layer_in_its_format_and_says_so(folder: Path) -> None:
    model = learner(folder)
    name = register(model)
    engine = engine_of(model, name)
    assert formats_of(engine.model) == assign(model)
    assert engine.model.weight_format == name == engine.behavior.weights
    assert engine.stats().weights == name
    assert engine.stats().weight_bits == get_format(name).bits
    groups = engine.generate([REQUEST])
    assert groups[0].rollouts[0].behavior.weights == name


def test_each_layer_has_the_codes_of_its_format_alone(folder: Path) -> None:
    model = learner(folder)
    rollout = rollout_copy(model, register(model), torch.float32)
    plain = {f: rollout_copy(model, f, torch.float32) for f in set(CYCLE)}
    for name, linear in rollout.linears():
        assert isinstance(linear.weight, QTensor)
        theirs = plain[linear.weight.format].get_submodule(name).weight
        for part, tensor in linear.weight.tensors.items():
            assert torch.equal(tensor, theirs.tensors[part]), (name, part)


@pytest.mark.parametrize("format", ["nvfp4", "int8", "fp32"])
def test_a_mixture_of_one_format_rolls_out_as_that_format(folder: Path, format: str) -> None:
    model = learner(folder)
    sizes = {name: linear.weight.shape.numel() for name, linear in model.linears()}
    name = mixed.register(dict.fromkeys(sizes, format), sizes)
    assert drawn(engine_of(model, name)) == drawn(engine_of(model, format))


def test_publication_refills_every_layer_in_place(folder: Path) -> None:
    model = learner(folder)
    name = register(model)
    engine = engine_of(model, name)
    before, where = drawn(engine), pointers(engine.model)
    nudge(model, seed=3)
    engine.update_weights(WeightUpdate.local(model, 1))
    assert pointers(engine.model) == where
    after = drawn(engine)
    assert after != before
    assert after == drawn(engine_of(model, name))


def test_what_travels_gives_the_same_bits(folder: Path) -> None:
    model = learner(folder)
    name = register(model)
    here, there = engine_of(model, name), engine_of(model, name)
    nudge(model, seed=3)
    update = WeightUpdate.local(model, 1)
    assert here.update_weights(update).policy == there.update_weights(update.as_stream()).policy
    assert drawn(here) == drawn(there)


def test_an_aligned_learner_has_the_engines_codes(folder: Path) -> None:
    model = learner(folder)
    name = register(model)
    aligned_forward.align(model, name)
    rollout = rollout_copy(model, name, torch.float32)
    assert digest(rollout) == digest(model)
    nudge(model, seed=3)
    aligned_forward.refresh(model)
    publish(model, rollout)
    assert digest(rollout) == digest(model)
    with pytest.raises(ValueError, match=r"blocks\.0\.qkv: the base is nvfp4"):
        aligned_forward.align(quantize_base(hf.load(folder), name), "int8")


def test_lora_shares_a_mixed_base(folder: Path) -> None:
    name = register(hf.load(folder))
    model = hf.load(folder, weights=name)
    assert formats_of(model) == assign(model)
    lora.attach(quantize_base(model, name), rank=3, alpha=6.0, seed=1)
    engine = engine_of(model, name)
    mine, theirs = pointers(model), pointers(engine.model)
    assert all((mine[n] == theirs[n]) == (".adapter." not in n) for n in mine)
    before = drawn(engine)
    nudge(model, seed=3)
    engine.update_weights(WeightUpdate.local(model, 1))
    after = drawn(engine)
    assert after != before
    assert after == drawn(engine_of(model, name))


def test_an_adapter_states_its_mixed_base(folder: Path, tmp_path: Path) -> None:
    name = register(hf.load(folder))
    model = lora.attach(quantize_base(hf.load(folder), name), rank=3, alpha=6.0, seed=1)
    nudge(model, seed=3)
    out = tmp_path / "adapter"
    out.mkdir()
    lora.write(model, out, str(folder), folder, 1.0)
    stated = json.loads((out / adapter_base.FILE).read_text())
    assert set(stated["weights"]) == set(CYCLE)
    again = hf.load(out)
    assert again.weight_format == name
    assert digest(again) == digest(model)


def test_a_guard_leaves_a_mixture_for_eight_bits(folder: Path) -> None:
    assert get_format(register(hf.load(folder))).fallback == "dense"  # 8 bits or more already
    model = hf.load(folder)
    sizes = {name: linear.weight.shape.numel() for name, linear in model.linears()}
    name = mixed.register(assign(model, ("nvfp4", "int8")), sizes)
    assert get_format(name).fallback == EIGHT_BITS


# -- folders ---------------------------------------------------------------------------------------


def saved(folder: Path, out: Path, formats: tuple[str, ...] = CYCLE) -> tuple[Transformer, str]:
    """A mixed model, saved as a folder."""
    model = hf.load(folder)
    sizes = {name: linear.weight.shape.numel() for name, linear in model.linears()}
    name = mixed.register(assign(model, formats), sizes)
    hf.save(quantize_base(model, name), out)
    return model, name


@pytest.mark.parametrize(
    "formats", [CYCLE, ("int8", "fp32"), ("int8_rotated", "int8"), ("int4", "fp8")]
)
def test_a_folder_of_several_formats_is_read_bit_for_bit(
    folder: Path, tmp_path: Path, formats: tuple[str, ...]
) -> None:
    model, name = saved(folder, tmp_path / "out", formats)
    again = hf.load(tmp_path / "out")
    assert again.weight_format == name
    assert digest(again) == digest(model)
    assert low_bit_format(tmp_path / "out") == name
    engine = Engine(tmp_path / "out", device="cpu", cache_tokens=1024, page_size=4)
    assert engine.behavior.weights == name
    assert drawn(engine) == drawn(engine_of(hf.load(folder), name))


def test_a_folder_names_the_modules_of_each_format(folder: Path, tmp_path: Path) -> None:
    saved(folder, tmp_path / "out")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["format"] == "mixed-precision"
    first = stated["config_groups"]["group_0"]
    assert first["format"] == "nvfp4-pack-quantized"
    assert first["targets"][:3] == [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    assert "model.layers.0.mlp.gate_proj" in stated["ignore"] and "lm_head" in stated["ignore"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c["config_groups"]["group_0"]["targets"].pop(), "missing tensors: .*up_proj"),
        (lambda c: c["config_groups"]["group_0"]["targets"].append("re:.*"), "'re:.*'"),
        (lambda c: c["config_groups"]["group_0"].update(targets="Linear"), "a list of names"),
        (lambda c: c.update(ignore=7), "ignore: expected a list"),
        (lambda c: c.update(ignore=["lm_head"]) or c["config_groups"].pop("group_2"), "unexpected"),
    ],
)
def test_a_folder_that_says_otherwise_is_refused(
    folder: Path, tmp_path: Path, edit: Any, said: str
) -> None:
    saved(folder, tmp_path / "out", ("int4", "int8", "fp8"))
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    edit(config["quantization_config"])
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        hf.load(tmp_path / "out")


def test_a_format_that_no_folder_holds_beside_others_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="nf4: compressed-tensors has no layout"):
        saved(folder, tmp_path / "out", ("nf4", "int8"))
    with pytest.raises(ValueError, match="it is bf16, and the folder's dtype is"):
        saved(folder, tmp_path / "out", ("bf16", "int8"))
