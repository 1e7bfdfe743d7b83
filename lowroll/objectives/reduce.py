"""From token values to one number: the only place in lowroll that divides by a token or a sequence
count.

With x_t the value of token t, m_t its mask, |o_b| the number of unmasked tokens of sequence b, S
sequences:

    seq-mean-token-mean   1/S sum_b 1/|o_b| sum_{t in b} m_t x_t     GRPO, arXiv 2402.03300 eq. 3
    token-mean            sum m x / sum m                            DAPO, arXiv 2503.14476 eq. 8
    constant              sum m x / (S * max_length)                 Dr. GRPO, arXiv 2503.20783
    seq-mean-token-sum    1/S sum m x                                REINFORCE over whole sequences

Every mode is a weighted sum whose weights hold integers and no value of the model. `Denominators` carries
the denominators of the whole batch, so that the sum over micro-batches is the value (and gradient)
of the big batch, provided that no sequence is split between two micro-batches.

Fully masked sequences contribute 0 and stay in S: S is the number of rows, or the largest segment
id + 1, or `counts.num_sequences`. (verl leaves them out of S when no global batch size is given; a
rejected rollout would then make its neighbours count for more.)

Shape legend: N tokens of the call, laid end to end; B rows; T padded length; S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.objectives.table import MODES


@dataclass(frozen=True)
class Denominators:
    """The denominators of a whole batch: unmasked tokens, and sequences (fully masked ones
    included).

    `weight_sum` is the sum of the correction's weights over those tokens, for objectives that
    divide by their mean.
    """

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
    """The tokens that count (mask_N, bool) and the sequence that each belongs to (segments_N,
    int64)."""

    mask_N: Tensor
    segments_N: Tensor
    num_sequences: int

    def drop(self, drop_N: Tensor) -> Sequences:
        """Return the same sequences with the tokens of `drop_N` (bool) masked."""
        return Sequences(self.mask_N & ~drop_N, self.segments_N, self.num_sequences)


def sequences_of(mask: Tensor, segments: Tensor | None = None) -> Sequences:
    """Lay padded [B, T] or packed [N] tokens end to end.

    `mask` is bool, or 0/1 in any dtype. `segments` (int64 [N], sequence ids from 0 up, in any
    order) goes with packed tokens only. ValueError for any other shape, a mask value other than 0
    and 1, or a negative segment.
    """
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
    """Return the denominators of these tokens; add them up over micro-batches and ranks.

    With `behavior`, tokens without a finite behaviour log-prob are left out, as the objectives that
    need it do.
    """
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
    """Reduce token values to a scalar under `mode`; masked values may be anything. No tokens: 0
    with zero gradient.

    `counts` replaces the number of tokens and of sequences; the |o_b| of seq-mean-token-mean are
    always those of the call. `max_length` (tokens) is what "constant" divides by; the other modes
    have no use for it.
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
    """Return the number of unmasked tokens of each sequence, int64 [S], at least 1 so that an empty
    sequence may be divided by it."""
    # Integer addition has one result in any order; a float sum of scattered values would not on a
    # GPU.
    counts_S = torch.zeros(
        sequences.num_sequences, dtype=torch.int64, device=sequences.mask_N.device
    )
    return counts_S.index_add(0, sequences.segments_N, sequences.mask_N.long()).clamp(min=1)


def sequence_sum(x_N: Tensor, sequences: Sequences) -> Tensor:
    """Sum over the unmasked tokens of each sequence, float64 [S], detached."""
    x_N = torch.where(sequences.mask_N, x_N.detach(), 0).double()
    return x_N.new_zeros(sequences.num_sequences).index_add(0, sequences.segments_N, x_N)


def sequence_mean(x_N: Tensor, sequences: Sequences) -> Tensor:
    """Return the mean over the unmasked tokens of each sequence (0 for one without), float64 [S],
    detached."""
    return sequence_sum(x_N, sequences) / token_counts(sequences)


def sequence_any(flag_N: Tensor, sequences: Sequences) -> Tensor:
    """Return which sequences have an unmasked token with the flag, bool [S]."""
    flags_S = torch.zeros(sequences.num_sequences, dtype=torch.int64, device=flag_N.device)
    return flags_S.index_add(0, sequences.segments_N, (flag_N & sequences.mask_N).long()) > 0


def sequence_from(flag_N: Tensor, sequences: Sequences) -> Tensor:
    """Return which tokens stand at or behind their sequence's first unmasked token with the flag,
    bool [N]. Tokens of a sequence come in their order."""
    place_N = torch.arange(len(flag_N), device=flag_N.device)
    flagged_N = torch.where(flag_N & sequences.mask_N, place_N, len(flag_N))
    first_S = place_N.new_full((sequences.num_sequences,), len(flag_N))
    first_S = first_S.scatter_reduce(0, sequences.segments_N, flagged_N, "amin")
    return place_N >= first_S[sequences.segments_N]


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the entries under the mask (0 where there are none), float64 scalar,
    detached."""
    return torch.where(mask, x.detach(), 0).double().sum() / mask.sum().clamp(min=1)
