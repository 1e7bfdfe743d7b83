"""What log-probs say of a sampler, and what prompts say of a tokenizer, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowroll.objectives.objective import select
from lowroll.runs.setup_faults import LEAST_TOKENS, sampler_suspects
from lowroll.trainer.mismatch_probe import Probe
from lowroll.trainer.step import LearnSettings


def probe_of(learner_N: Tensor, behavior_N: Tensor, entropy_N: Tensor) -> Probe:
    mask_N = torch.ones(len(learner_N), dtype=torch.bool)
    packed: Any = SimpleNamespace(mask_N=mask_N, behavior_N=behavior_N)
    return Probe(packed, learner_N, entropy_N, LearnSettings(select("grpo", "acr")))


def draws(logits_V: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs under temperature 1, drawn tokens and the entropy of `count` equal positions."""
    logp_V = logits_V.log_softmax(0)
    generator = torch.Generator().manual_seed(0)
    ids_N = torch.multinomial(logp_V.exp(), count, replacement=True, generator=generator)
    entropy = -(logp_V.exp() * logp_V).sum()
    return logp_V, ids_N, entropy.expand(count)


LOGITS_V = torch.linspace(0, 6, 50)


def test_an_honest_sampler_is_not_suspected() -> None:
    logp_V, ids_N, entropy_N = draws(LOGITS_V, 4000)
    assert sampler_suspects(probe_of(logp_V[ids_N], logp_V[ids_N], entropy_N), len(LOGITS_V)) == []


@pytest.mark.parametrize(("sharper", "word"), [(1.3, "narrower"), (0.7, "wider")])
def test_another_temperature_shows_in_the_surprise(sharper: float, word: str) -> None:
    logp_V, _, entropy_N = draws(LOGITS_V, 4000)
    _, ids_N, _ = draws(LOGITS_V * sharper, 4000)
    (line,) = sampler_suspects(probe_of(logp_V[ids_N], logp_V[ids_N], entropy_N), len(LOGITS_V))
    assert word in line


def test_renormalized_log_probs_say_how_much_was_cut() -> None:
    logp_V, _, entropy_N = draws(LOGITS_V, 4000)
    kept_V = LOGITS_V.clone()
    kept_V[logp_V < logp_V.sort().values[-12]] = -torch.inf  # the 12 likeliest are left
    cut_V, ids_N, _ = draws(kept_V, 4000)
    missing = 1 - logp_V[~kept_V.isinf()].exp().sum().item()
    (line,) = sampler_suspects(probe_of(logp_V[ids_N], cut_V[ids_N], entropy_N), len(LOGITS_V))
    assert f"leave out {missing:.1%}" in line


def test_a_small_batch_is_not_judged() -> None:
    logp_V, _, entropy_N = draws(LOGITS_V, LEAST_TOKENS - 1)
    _, ids_N, _ = draws(LOGITS_V * 3, LEAST_TOKENS - 1)
    assert sampler_suspects(probe_of(logp_V[ids_N], logp_V[ids_N], entropy_N), len(LOGITS_V)) == []
