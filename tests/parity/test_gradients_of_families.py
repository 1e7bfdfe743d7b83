"""The gradients of all weights, and of adapters, are those of transformers and PEFT, in every family,
for packed sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowroll.model import hf, lora
from lowroll.model.names import features_read
from lowroll.model.transformer import Transformer
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import COMMON, FAMILIES, hf_model

SEQUENCES = random_sequences([9, 1, 17])
UPSTREAM = torch.randn(27, COMMON["vocab_size"], generator=torch.Generator().manual_seed(5)) / 27


def backward(theirs: Any, ours: Transformer) -> None:
    """Compute the gradients of one weighted sum of all logits in both models."""
    logits = torch.cat([theirs(torch.tensor([ids])).logits[0] for ids in SEQUENCES])
    (logits * UPSTREAM).sum().backward()
    (forward(ours, SEQUENCES) * UPSTREAM).sum().backward()


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compare gradients by name, relative to the largest number of each."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert tensor.abs().max() > 0, name
        within = 5e-4 if any("linear_attn" in part for part in want) else 1e-4
        bound = within * float(tensor.abs().max()) + 1e-6
        assert (got[name] - tensor).abs().max() < bound, name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_weights_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "m")
    theirs.get_input_embeddings().padding_idx = None  # of which it drops the gradient
    ours = hf.load(tmp_path / "m").requires_grad_(True)
    backward(theirs, ours)
    with torch.no_grad():  # both write them under the names of checkpoints
        for p in (*theirs.parameters(), *ours.parameters()):
            if p.grad is not None:  # a router's correction has none
                p.copy_(p.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    hf.save(ours, tmp_path / "ours")
    got, want = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "gradients"))
    assert_close(got, want)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_are_those_of_peft(family: str, tmp_path: Path) -> None:
    base = hf_model(family)
    base.save_pretrained(tmp_path / "m")
    ours = hf.load(tmp_path / "m")
    parts = (
        lora.attention_targets(ours.spec)
        if ours.spec.mixture.num_experts
        else [*features_read(ours.spec)]
    )
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=[*parts], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(base, config).eval()
    torch.manual_seed(4)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_B" in name:
                p.copy_(0.3 * torch.randn_like(p))
    theirs.save_pretrained(tmp_path / "adapter")
    lora.load(ours, tmp_path / "adapter")
    backward(theirs, ours)
    with torch.no_grad():
        for p in (*theirs.parameters(), *ours.parameters()):
            if p.grad is not None:
                p.copy_(p.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    assert_close(lora.state(ours), load_file(tmp_path / "gradients" / "adapter_model.safetensors"))
