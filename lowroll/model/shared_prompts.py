"""Attention over packed groups: a prompt, then the responses that share it, each of which sees the
prompt and itself.

A prompt is fed once for all its responses, so every layer but attention has fewer rows. Keys and
values of the prompt are copied for each response ("Prefix Grouper", arXiv 2506.05433). Up to
rounding, results and gradients are those of prompts that are fed with every response.

Legend: `model`; X rows that may repeat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowroll.model.attention import Attend, AttentionInputs, ranges, suffixes, upload


class PromptGroup(NamedTuple):
    """A prompt's number of tokens, and those fed of each of its responses."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def num_fed(self) -> int:
        return self.prompt + sum(self.responses)


@dataclass(frozen=True)
class RowCopies:
    """Rows to copy, of which some are copied more than once. Both directions are deterministic:
    the gradient of a row sums those of its copies in their order. rows_X: int64, on the host."""

    rows_X: Tensor
    num_rows: int
    device: torch.device

    @cached_property
    def index_X(self) -> Tensor:
        return upload(self.rows_X, self.device)

    @cached_property
    def copied(self) -> list[tuple[Tensor, Tensor]]:
        """For each number of copies: the rows [R], and the places of their copies [R, copies]."""
        places_X = self.rows_X.argsort(stable=True)
        rows_U, counts_U = self.rows_X[places_X].unique_consecutive(return_counts=True)
        firsts_U = counts_U.cumsum(0) - counts_U
        by_count = []
        for count in counts_U.unique().tolist():
            chosen_U = counts_U == count
            places_RC = places_X[firsts_U[chosen_U][:, None] + torch.arange(count)]
            by_count.append((rows_U[chosen_U], places_RC))
        return [
            (upload(rows_R, self.device), upload(places_RC, self.device))
            for rows_R, places_RC in by_count
        ]

    def copy(self, x_T: Tensor) -> Tensor:
        """Return x[rows] along the first axis."""
        copies_X = _Copy.apply(x_T, self)
        assert isinstance(copies_X, Tensor)
        return copies_X

    def sum_copies(self, grad_X: Tensor) -> Tensor:
        grad_T = grad_X.new_zeros(self.num_rows, *grad_X.shape[1:])
        for rows_R, places_RC in self.copied:
            grad_T[rows_R] = grad_X[places_RC].sum(1)
        return grad_T


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_T: Tensor, copies: RowCopies) -> Tensor:
        ctx.copies = copies
        return x_T.index_select(0, copies.index_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_X: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.sum_copies(grad_X), None


def grouped(
    groups: Sequence[PromptGroup],
    device: torch.device | str = "cpu",
    windows: Sequence[int] = (),
) -> Attend:
    """Return causal attention over packed groups: a prompt's tokens, then those of each of its
    responses. windows: of each layer (`LayerSpec`)."""
    spans = [span for span in _spans(groups) if span.queries]
    rows_X = ranges([stretch for span in spans for stretch in span.keys])
    num_rows = sum(group.num_fed for group in groups)
    copies = RowCopies(rows_X, num_rows, torch.device(device))
    lengths = [span.queries for span in spans]
    totals = [sum(size for _, size in span.keys) for span in spans]
    attend_suffixes = suffixes(lengths, totals, device, windows=windows)

    def attend(layer: int, inputs: AttentionInputs) -> Tensor:
        keys, values = copies.copy(inputs.k_TGd), copies.copy(inputs.v_TGd)
        return attend_suffixes(layer, inputs._replace(k_TGd=keys, v_TGd=values))

    return attend


class _Span(NamedTuple):
    """The number of neighbouring queries, and (start, size) of the stretches of rows that are their
    keys."""

    queries: int
    keys: list[tuple[int, int]]


def _spans(groups: Sequence[PromptGroup]) -> Iterator[_Span]:
    start = 0
    for prompt, responses in groups:
        first, start = start, start + prompt
        if len(responses) == 1:  # as one sequence
            yield _Span(prompt + responses[0], [(first, prompt + responses[0])])
            start += responses[0]
            continue
        yield _Span(prompt, [(first, prompt)])
        for fed in responses:
            yield _Span(fed, [(first, prompt), (start, fed)])
            start += fed
