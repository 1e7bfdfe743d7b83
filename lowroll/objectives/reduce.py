"""Reduction of token values to a scalar, the only place that divides by token or sequence counts.

With x_t the value of token t, m_t its mask, |o_b| the number of unmasked tokens of sequence b, S
sequences:

    seq-mean-token-mean   1/S sum_b 1/|o_b| sum_{t in b} m_t x_t     GRPO, arXiv 2402.03300 eq. 3
    token-mean            sum m x / sum m                            DAPO, arXiv 2503.14476 eq. 8
    constant              sum m x / (S * max_length)                 Dr. GRPO, arXiv 2503.20783
    seq-mean-token-sum    1/S sum m x                                REINFORCE over whole sequences

With the `Denominators` of the whole batch, micro-batches of whole sequences sum to the batch's
value and gradient. Fully masked sequences stay in S, the number of rows or the largest segment id +
1. (verl drops them, so that a rejected rollout reweights its neighbours.)

N: tokens, B: rows, T: padded length, S: sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.objectives.table import MODES


@dataclass(frozen=True)
class Denominators:
    """The counts by which the loss of a whole batch is divided. `weight_sum`: of the correction's
    weights."""

    num_tokens: int
    num_sequences: int
    weight_sum: float = 0.0

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(
            self.num_tokens + other.num_tokens,
            self.num_sequences + other.num_sequences,
            self.weight_sum + other.weight_sum,
        )


@dataclass(frozen=True)
class Sequences:
    """The unmasked tokens (mask_N, bool) and their sequences (segments_N, int64)."""

    mask_N: Tensor
    segments_N: Tensor
    num_sequences: int

    def drop(self, drop_N: Tensor) -> Sequences:
        """Return the sequences with the tokens of `drop_N` (bool) masked."""
        return Sequences(self.mask_N & ~drop_N, self.segments_N, self.num_sequences)


def sequences_of(mask: Tensor, segments: Tensor | None = None) -> Sequences:
    """Flatten padded [B, T] or packed [N] tokens. `mask` is bool, or 0/1 in any dtype; `segments`
    (int64 [N], sequence ids from 0 up, in any order) is for packed tokens. ValueError for anything
    else."""
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError("mask: every entry must be 0 or 1")
    if mask.dim() == 2:
        if segments is not None:
            raise ValueError(
                "segments: only packed [N] tensors have segments; these are padded [B, T]"
            )
        num_rows, length = mask.shape
        segments_N = torch.arange(num_rows, device=mask.device).repeat_interleave(length)
        return Sequences(mask.reshape(-1).bool(), segments_N, num_rows)
    if mask.dim() != 1:
        raise ValueError(f"mask: expected [B, T] or packed [N], got shape {list(mask.shape)}")
    if segments is None:
        raise ValueError("segments: packed [N] tensors need the sequence id of each token")
    if segments.shape != mask.shape or segments.dtype != torch.int64:
        raise ValueError(
            f"segments: expected int64 {list(mask.shape)}, got {segments.dtype} "
            f"{list(segments.shape)}"
        )
    if not len(segments):
        return Sequences(mask.bool(), segments, 0)
    lowest, highest = torch.stack(segments.aminmax()).tolist()
    if lowest < 0:
        raise ValueError(f"segments: {lowest} is negative")
    return Sequences(mask.bool(), segments, highest + 1)


def count(
    *, mask: Tensor, segments: Tensor | None = None, behavior: Tensor | None = None
) -> Denominators:
    """Count the unmasked tokens and the sequences, without tokens whose `behavior` log-prob is not
    finite."""
    sequences = sequences_of(mask, segments)
    if behavior is not None:
        sequences = sequences.drop(~behavior.reshape(-1).isfinite())
    return Denominators(int(sequences.mask_N.sum()), sequences.num_sequences)


def aggregate(
    x_N: Tensor,
    sequences: Sequences,
    *,
    mode: str,
    counts: Denominators | None = None,
    max_length: float | None = None,
) -> Tensor:
    """Return the scalar reduction of the token values x_N; 0 with zero gradient without tokens.

    `counts` replaces the numbers of tokens and sequences, but not the |o_b| of seq-mean-token-mean.
    `max_length` (tokens) is the divisor of "constant".
    """
    if mode not in MODES:
        raise ValueError(f"reduce: unknown mode {mode!r}; expected one of {', '.join(MODES)}")
    mask_N = sequences.mask_N
    num_sequences = max(sequences.num_sequences if counts is None else counts.num_sequences, 1)
    weight_N: Tensor
    if mode == "token-mean":
        if counts is None:
            num_tokens = mask_N.sum()
        else:
            num_tokens = torch.tensor(counts.num_tokens, device=mask_N.device)
        weight_N = 1 / num_tokens.clamp(min=1).to(x_N.dtype)
    elif mode == "seq-mean-token-mean":
        weight_N = 1 / (token_counts(sequences)[sequences.segments_N] * num_sequences).to(x_N.dtype)
    elif mode == "constant":
        if max_length is None or not max_length > 0:
            raise ValueError(
                f'max_length: reduce="constant" needs a positive length, got {max_length}'
            )
        weight_N = x_N.new_tensor(1 / (num_sequences * max_length))
    else:
        weight_N = x_N.new_tensor(1 / num_sequences)
    return (torch.where(mask_N, x_N, 0) * weight_N).sum()


def token_counts(sequences: Sequences) -> Tensor:
    """Return each sequence's number of unmasked tokens, int64 [S], at least 1 for division."""
    # Integer sums are order-independent; scattered float sums on a GPU are not.
    counts_S = torch.zeros(
        sequences.num_sequences, dtype=torch.int64, device=sequences.mask_N.device
    )
    return counts_S.index_add(0, sequences.segments_N, sequences.mask_N.long()).clamp(min=1)


def sequence_sum(x_N: Tensor, sequences: Sequences) -> Tensor:
    """Return sums over each sequence's unmasked tokens, float64 [S], detached."""
    x_N = torch.where(sequences.mask_N, x_N.detach(), 0).double()
    return x_N.new_zeros(sequences.num_sequences).index_add(0, sequences.segments_N, x_N)


def sequence_mean(x_N: Tensor, sequences: Sequences) -> Tensor:
    """Return means over each sequence's unmasked tokens (0 without any), float64 [S], detached."""
    return sequence_sum(x_N, sequences) / token_counts(sequences)


def sequence_any(flag_N: Tensor, sequences: Sequences) -> Tensor:
    """Return the sequences that have an unmasked token with the flag, bool [S]."""
    flags_S = torch.zeros(sequences.num_sequences, dtype=torch.int64, device=flag_N.device)
    return flags_S.index_add(0, sequences.segments_N, (flag_N & sequences.mask_N).long()) > 0


def sequence_from(flag_N: Tensor, sequences: Sequences) -> Tensor:
    """Return the tokens, bool [N], from their sequence's first unmasked flagged token on. A
    sequence's tokens must be in order."""
    beyond_all = len(flag_N)
    position_N = torch.arange(len(flag_N), device=flag_N.device)
    flagged_position_N = torch.where(flag_N & sequences.mask_N, position_N, beyond_all)
    first_flagged_S = position_N.new_full((sequences.num_sequences,), beyond_all).scatter_reduce(
        0, sequences.segments_N, flagged_position_N, "amin"
    )
    return position_N >= first_flagged_S[sequences.segments_N]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean under the mask (0 without entries), float64 scalar, detached."""
    return torch.where(mask, x.detach(), 0).double().sum() / mask.sum().clamp(min=1)
