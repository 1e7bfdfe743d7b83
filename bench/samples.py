"""Batches for learners that are measured: random sequences as rollouts in groups, half of them good."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowroll.types import Batch, BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score


def random_ids(vocab_size: int, rows: int, length: int, seed: int = 1) -> Tensor:
    """Return random token ids, [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (rows, length), generator=generator)


def batch_of(
    sequences: Iterable[Sequence[int]],
    prompt: int,
    weights: str,
    group: int,
    log_prob: float = -12.0,
    step: int = 1,
) -> Batch:
    """Return sequences as samples of a batch, with advantages of both signs in each group.

    prompt: tokens of each sequence that are its prompt; weights: the format they were drawn with.
    """
    samples = []
    for i, ids in enumerate(sequences):
        response = list(ids[prompt:])
        tag = BehaviorTag((PolicySpan(0, ""),), weights)
        rollout = Rollout(response, [log_prob] * len(response), "length", tag)
        advantage = 1.0 if i % 2 else -1.0
        samples.append(sample_of(list(ids[:prompt]), rollout, advantage, i // group, Score(1.0)))
    return Batch(step, samples, temperature=1.0)


def sample_of(
    prompt_ids: list[int], rollout: Rollout, advantage: float, group: int, score: Score
) -> Sample:
    """Return a sample whose response is learnt from as a whole."""
    prompt = Prompt(f"p{group}", "bench", [{"role": "user", "content": ""}])
    mask = [1] * len(rollout.token_ids)
    return Sample(prompt, prompt_ids, rollout, "", score, advantage, mask, group, score.reward)
