"""Packing: many sequences in one row of tokens, without padding.

Sequences are sorted by length, longest first and stable, and each goes into the first micro-batch that still has
room (first-fit decreasing: at most 11/9 of the optimal number of bins plus 6/9, Dosa 2007). Positions restart with
every sequence and `lengths` bounds its attention, so a packed row computes what the sequences would compute alone.

A response token y_t is predicted by the hidden state of the token before it, so entry n of every `_N` tensor is
about one response token: `targets_N[n]` is y_t, `index_N[n]` the row of the hidden state that predicts it, and
log pi(y_t | x, y_<t) of the learner lands at n. The last token of a sequence predicts nothing and is not fed.

T: tokens fed to the model, N: response tokens, S: sequences of one micro-batch.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lowroll.types import MicroBatch, Sample

PerToken = dict[int, Tensor]       # sample index -> float32 [tokens of its response], detached


@dataclass(frozen=True)
class Packed:
    """One micro-batch as tensors. `samples[s]` is the index in the batch of the sequence in segment s."""

    samples: tuple[int, ...]
    lengths: tuple[int, ...]           # tokens fed of each sequence; they add up to T
    ids_T: Tensor                      # int64
    pos_T: Tensor                      # int64, from 0 in each sequence
    index_N: Tensor                    # int64 into T
    targets_N: Tensor                  # int64
    mask_N: Tensor                     # bool: the token carries loss
    segments_N: Tensor                 # int64, 0 .. S-1
    behavior_N: Tensor                 # float32 log-probs that the sampler recorded
    advantages_N: Tensor               # float32


def first_fit(lengths: Sequence[int], capacity: int) -> list[MicroBatch]:
    """Pack sequences of the given token counts into micro-batches of at most `capacity` tokens.

    A sequence longer than `capacity` cannot be split and becomes a micro-batch of its own, which is the least memory
    that any packing could give it. Raises ValueError for a capacity or a length below 1.
    """
    if capacity < 1:
        raise ValueError(f"tokens_per_microbatch: must be at least 1, is {capacity}")
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] < 1:
            raise ValueError(f"sequence {i}: has {lengths[i]} tokens, must have at least 1")
        home = next((b for b, load in enumerate(loads) if load + lengths[i] <= capacity), None)
        if home is None:
            bins.append([i])
            loads.append(lengths[i])
        else:
            bins[home].append(i)
            loads[home] += lengths[i]
    return [MicroBatch(tuple(b), load) for b, load in zip(bins, loads, strict=True)]


def split_groups(groups: Sequence[int], parts: int) -> list[list[int]]:
    """Split sample indices into at most `parts` minibatches of whole groups, in planned order.

    `groups[i]` is the group of sample i. The sizes, in groups, differ by at most one; with fewer groups than parts
    there are as many minibatches as groups. Raises ValueError when parts < 1.
    """
    if parts < 1:
        raise ValueError(f"minibatches: must be at least 1, is {parts}")
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    whole = list(members.values())
    parts = min(parts, len(whole))
    bounds = [len(whole) * p // parts for p in range(parts + 1)] if parts else [0]
    return [[i for group in whole[a:b] for i in group] for a, b in zip(bounds, bounds[1:], strict=False)]


def num_fed(sample: Sample) -> int:
    """Tokens that the model must read to score a sample: all but the last of prompt and response."""
    return len(sample.prompt_ids) + len(sample.rollout.token_ids) - 1


def check(samples: Sequence[Sample], vocab_size: int, context_length: int) -> None:
    """Raise a ValueError that names the sample and the field when a sample cannot be learned from."""
    if not samples:
        raise ValueError("samples: the batch is empty")
    for i, sample in enumerate(samples):
        rollout, num = sample.rollout, len(sample.rollout.token_ids)
        if not sample.prompt_ids:
            raise ValueError(f"sample {i} ({sample.prompt.id}): prompt_ids is empty")
        if not num:
            raise ValueError(f"sample {i} ({sample.prompt.id}): rollout.token_ids is empty")
        for name, values in (("rollout.logprobs", rollout.logprobs), ("loss_mask", sample.loss_mask)):
            if len(values) != num:
                raise ValueError(f"sample {i} ({sample.prompt.id}): {name} has {len(values)} entries "
                                 f"for {num} response tokens")
        if num_fed(sample) > context_length:
            raise ValueError(f"sample {i} ({sample.prompt.id}): prompt_ids and rollout.token_ids are {num_fed(sample)} "
                             f"tokens to read, the model's context is {context_length}")
        for name, ids in (("prompt_ids", sample.prompt_ids), ("rollout.token_ids", rollout.token_ids)):
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"sample {i} ({sample.prompt.id}): {name} leaves 0..{vocab_size - 1}")


def collate(samples: Sequence[Sample], indices: Sequence[int], device: torch.device | str = "cpu") -> Packed:
    """Lay the chosen samples end to end as the tensors of one micro-batch on `device`."""
    chosen = [samples[i] for i in indices]
    lengths = tuple(num_fed(s) for s in chosen)
    responses = [len(s.rollout.token_ids) for s in chosen]

    def upload(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        """On the device; the host goes on while it is copied."""
        x = torch.tensor(values, dtype=dtype)
        return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)

    def long(values: list[int]) -> Tensor:
        return upload(values, torch.int64)

    def real(values: list[float]) -> Tensor:
        return upload(values, torch.float32)

    return Packed(
        samples=tuple(indices),
        lengths=lengths,
        ids_T=long([t for s in chosen for t in (s.prompt_ids + s.rollout.token_ids)[:-1]]),
        pos_T=long([p for length in lengths for p in range(length)]),
        index_N=long([i for end, n in zip(accumulate(lengths), responses, strict=True) for i in range(end - n, end)]),
        targets_N=long([t for s in chosen for t in s.rollout.token_ids]),
        mask_N=long([m for s in chosen for m in s.loss_mask]) != 0,
        segments_N=long([k for k, n in enumerate(responses) for _ in range(n)]),
        behavior_N=real([p for s in chosen for p in s.rollout.logprobs]),
        advantages_N=real([s.advantage for s, n in zip(chosen, responses, strict=True) for _ in range(n)]),
    )


def gather(values: PerToken, packed: Packed) -> Tensor:
    """The values of the packed samples, end to end, [N]."""
    return torch.cat([values[i] for i in packed.samples])
