"""A run of every family, in small: rollouts in a low-bit format, an update, resumption and export."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowroll.metrics.record import reproducible
from lowroll.model import hf
from lowroll.model.lora import attention_targets
from lowroll.model.spec import read_spec
from lowroll.quant.formats import QTensor
from lowroll.runs import demo
from tests.fixtures.gpt_oss import published
from tests.fixtures.runs import copy_stopped_after
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import FAMILIES, hf_folder
from tests.fuzz_runs import train

FORMATS = ("int8", "fp8", "int4", "nvfp4", "mxfp4", "nf4", "bf16")
CASES = list(zip(FAMILIES, cycle(FORMATS), strict=False))


def adapter_of(model: Path) -> dict[str, Any]:
    targets = list(attention_targets(read_spec(model)))
    return {"lora": True, "lora_rank": 3, "lora_target_modules": targets}


def model_of(family: str, folder: Path) -> Path:
    """A random model of a family beside the tokenizer of the demo."""
    tokenizer = demo.build_tokenizer()
    hf_folder(folder, family, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder


def tree(model: Path, weights: str, **learner: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "seed": 7,
        "device": "cpu",
        "batch_size": 8,
        "rollouts_per_example": 4,
        "env": [{"id": "reverse-text"}],
        "rollout": {"weights": weights, "max_tokens": 5},
        "correction": "tis",
        "score": {"workers": 1},
        "force": True,
        "ckpt": {"interval": 1, "keep_last": None},
        "train": {"max_steps": 2, "learning_rate": 1e-3, **learner},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("family", "weights"), CASES)
@pytest.mark.parametrize("learner", ["full", "lora"])
def test_a_run_is_resumed_bit_for_bit_and_exported(
    family: str, weights: str, learner: str, tmp_path: Path
) -> None:
    folder = model_of(family, tmp_path / "m")
    settings = tree(folder, weights, **(adapter_of(folder) if learner == "lora" else {}))
    whole = train(settings, tmp_path / "whole")
    copy_stopped_after(tmp_path / "whole", 1, tmp_path / "cut")
    again = train(settings, tmp_path / "cut", resume=True)
    assert [json.dumps(reproducible(r), sort_keys=True) for r in whole.records] == [
        json.dumps(reproducible(r), sort_keys=True) for r in again.records
    ]
    model, resumed = hf.load(tmp_path / "whole" / "final"), hf.load(tmp_path / "cut" / "final")
    for (name, p), (_, q) in zip(model.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    if learner == "lora":
        return
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "final", dtype=torch.float32)
    sequences = random_sequences([20, 3])
    with torch.no_grad():
        want = torch.cat([theirs(torch.tensor([s])).logits[0] for s in sequences])
    assert (forward(model, sequences) - want).abs().max() < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["full", "lora"])
def test_a_run_on_published_experts_is_resumed_and_exported(learner: str, tmp_path: Path) -> None:
    """Experts in MXFP4 roll out as stored. Adapters learn on them; all weights learn from them
    dequantized, and are exported as transformers stacks them."""
    tokenizer = demo.build_tokenizer()
    folder = published(tmp_path / "m", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    settings = tree(folder, "stored", **(adapter_of(folder) if learner == "lora" else {}))
    whole = train(settings, tmp_path / "whole")
    copy_stopped_after(tmp_path / "whole", 1, tmp_path / "cut")
    again = train(settings, tmp_path / "cut", resume=True)
    assert [json.dumps(reproducible(r), sort_keys=True) for r in whole.records] == [
        json.dumps(reproducible(r), sort_keys=True) for r in again.records
    ]
    final = tmp_path / "whole" / "final"
    model = hf.load(final)
    formats = {
        linear.weight.format
        for name, linear in model.linears()
        if ".experts." in name and isinstance(linear.weight, QTensor)
    }
    assert formats == ({"mxfp4"} if learner == "lora" else set())
    if learner == "lora":
        return
    theirs = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    sequences = random_sequences([20, 3])
    with torch.no_grad():
        want = torch.cat([theirs(torch.tensor([s])).logits[0] for s in sequences])
    assert (forward(model, sequences) - want).abs().max() < 2e-4
