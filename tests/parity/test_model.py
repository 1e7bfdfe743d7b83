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
from tests.fixtures.sequences import forward, random_sequences
from tests.fixtures.tiny import COMMON, FAMILIES, hf_model

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
