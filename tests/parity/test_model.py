"""Rung P1: our decoder equals transformers' in float32, for every family and flag, at once and step
by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowroll
from lowroll.model import hf, initialize
from lowroll.model.logprobs import log_probs, token_log_probs
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.trainer import recompute
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import COMMON, FAMILIES, LLAMA3_ROPE, hf_folder, hf_model

BOUND = 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path / "m")
    ours = hf.load(tmp_path / "m")
    sequences = random_sequences([60, 1, 17, 17])
    want = torch.cat([theirs(torch.tensor([s])).logits[0] for s in sequences])
    assert (forward(ours, sequences) - want).abs().max() < BOUND
    assert sum(p.numel() for p in ours.parameters()) == ours.spec.num_parameters


def test_llama3_scaling_really_changes_the_logits(tmp_path: Path) -> None:
    scaled = hf.load(hf_folder(tmp_path / "a", "llama3-rope"))
    plain = hf.load(
        hf_folder(
            tmp_path / "b",
            "llama3-rope",
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    )
    sequences = random_sequences([50])
    assert (forward(scaled, sequences) - forward(plain, sequences)).abs().max() > 0.01


def test_rope_keys_of_transformers_4_are_read() -> None:
    new = {**COMMON, "architectures": ["LlamaForCausalLM"], "rope_parameters": LLAMA3_ROPE}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 500.0,
        "rope_scaling": scaling,
    }
    assert spec_from_config(new) == spec_from_config(old)
    assert spec_from_config(old).ropes[0].theta == 500.0


@torch.no_grad()
def test_packing_and_checkpointing_change_nothing(tmp_path: Path) -> None:
    model = hf.load(hf_folder(tmp_path / "m"))
    sequences = random_sequences([5, 9, 5, 30])
    alone = torch.cat([forward(model, [s]) for s in sequences])
    torch.testing.assert_close(forward(model, sequences), alone, rtol=0, atol=1e-5)
    with torch.enable_grad():
        model.zero_grad()
        forward(model, sequences).square().sum().backward()
        plain = {name: p.grad.clone() for name, p in model.named_parameters()}
        recompute.apply(model, True)
        model.zero_grad()
        forward(model, sequences).square().sum().backward()
    assert all(torch.equal(plain[name], p.grad) for name, p in model.named_parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_token_log_probs_and_gradients_are_the_dense_ones(temperature: float, chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, dtype=torch.float64)
    weight = torch.randn(31, 8, dtype=torch.float64)
    targets, upstream = torch.randint(0, 31, (23,)), torch.randn(23, dtype=torch.float64)
    h64, w64 = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    dense = torch.log_softmax(h64 @ w64.t() / temperature, -1)
    (dense[torch.arange(23), targets] * upstream).sum().backward()
    h32, w32 = hidden.float().requires_grad_(), weight.float().requires_grad_()
    logp, entropy = token_log_probs(h32, w32, targets, temperature, chunk)
    (logp * upstream.float()).sum().backward()
    torch.testing.assert_close(
        logp.double(), dense[torch.arange(23), targets], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        entropy.double(), -(dense.exp() * dense).sum(-1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(h32.grad.double(), h64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w32.grad.double(), w64.grad, rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad


def test_token_log_probs_refuses_greedy() -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(
            torch.zeros(1, 2), torch.zeros(3, 2), torch.zeros(1, dtype=torch.int64), 0.0
        )


@torch.no_grad()
def test_score_equals_transformers(tmp_path: Path) -> None:
    theirs = hf_model("qwen2-tied")
    theirs.save_pretrained(tmp_path / "m")
    sequences, prompt_lens = random_sequences([12, 7, 12, 3]), [4, 1, 12, 2]
    for limit in (1, 20, 1000):
        got = lowroll.score(
            hf.load(tmp_path / "m"), sequences, prompt_lens, 0.8, tokens_per_batch=limit
        )
        for ids, start, logp in zip(sequences, prompt_lens, got, strict=True):
            rows = log_probs(theirs(torch.tensor([ids])).logits[0], 0.8)
            want = torch.tensor([rows[t - 1, ids[t]] for t in range(start, len(ids))])
            torch.testing.assert_close(logp, want, rtol=0, atol=BOUND)
    assert lowroll.score(str(tmp_path / "m"), sequences[:1], [4])[0].dtype == torch.float32
    with pytest.raises(ValueError, match=r"prompt_lens\[0\]: 0"):
        lowroll.score(hf.load(tmp_path / "m"), sequences[:1], [0])
    with pytest.raises(ValueError, match=r"sequences\[0\]: an id"):
        lowroll.score(hf.load(tmp_path / "m"), [[1, 67]], [1])


def test_initialize_is_seeded() -> None:
    spec = spec_from_config({**COMMON, "architectures": ["Qwen3ForCausalLM"]})
    a, b, c = (initialize(Transformer(spec), seed) for seed in (1, 1, 2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embedding, c.embedding)
    assert (a.norm.weight == 1).all()
