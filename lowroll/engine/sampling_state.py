"""The sampling parameters of rows except their temperature, resident on the device.

The repetition penalty and `min_tokens` depend on earlier tokens, which are marked by slot
(`kernels.sampling.penalties`).

Legend: B rows, S slots, V vocabulary, N tokens to count.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from lowroll.engine.sequence import DrawnPosition, Sequence, banned_ids
from lowroll.kernels.sampling.filters import Filters
from lowroll.kernels.sampling.penalties import SEEN, STOPS, Marked, add, blank, clear
from lowroll.model.attention import upload


class DrawMode(IntEnum):
    """The work of a batch's draw. Each mode includes those before it, with the same bits."""

    PLAIN = 0
    FILTERED = 1
    MARKED = 2  # penalties and bans


def draw_of(sequences: Collection[Sequence | DrawnPosition]) -> DrawMode:
    return max((_sequence_draw_mode(s) for s in sequences), default=DrawMode.PLAIN)


def _sequence_draw_mode(s: Sequence | DrawnPosition) -> DrawMode:
    if s.request.repetition_penalty != 1 or banned_ids(s):
        return DrawMode.MARKED
    return DrawMode.FILTERED if is_filtered(s) else DrawMode.PLAIN


def is_filtered(s: Sequence | DrawnPosition) -> bool:
    """Return whether filters matter. A greedy row's token passes all of them."""
    request = s.request
    return request.temperature != 0 and (
        request.top_k > 0 or request.top_p < 1 or request.min_p > 0
    )


def filters_of(sequences: Collection[Sequence | DrawnPosition], vocab_size: int) -> Filters:
    requests = [s.request for s in sequences]
    top_k = [min(request.top_k or vocab_size, vocab_size) for request in requests]
    log_min_p = [math.log(request.min_p) if request.min_p else -math.inf for request in requests]
    return Filters(
        torch.tensor(top_k),
        torch.tensor([request.top_p for request in requests], dtype=torch.float64),
        torch.tensor(log_min_p, dtype=torch.float64),
    )


class SamplingState:
    """The filters, penalties and bans of `most` rows, and the marks of samples in `slots` slots."""

    def __init__(self, most: int, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.slots = slots
        # lines: top-k (int64), top-p, log of min-p, repetition penalty (bits of float64), and the
        # first position without a ban (int64)
        self._device = torch.zeros(5, most, dtype=torch.int64, device=device)
        self._rows: list[Sequence] = []
        self._marks_SV: Tensor | None = None
        # by slot: the marked sequence, and its number of marked response tokens
        self._marked: list[tuple[Sequence | None, int]] = [(None, 0)] * slots

    def filters(self, rows: int) -> Filters:
        top_k_B, top_p_B, min_p_B, _, _ = self._device[:, :rows].unbind()
        return Filters(top_k_B, top_p_B.view(torch.float64), min_p_B.view(torch.float64))

    def marked(self, slots_B: Tensor) -> Marked:
        penalty_B, banned_until_B = self._device[3:, : len(slots_B)].unbind()
        return Marked(self._marks(), slots_B, penalty_B.view(torch.float64), banned_until_B)

    def upload(self, sequences: list[Sequence], size: int, draw: DrawMode) -> None:
        """Upload the settings of these rows, padded to `size` with neutral settings."""
        if sequences != self._rows:
            self._upload(sequences, size)
            self._rows = list(sequences)
        if draw is DrawMode.MARKED:
            self._mark(sequences)

    def drew(self, sequences: list[Sequence], steps: int) -> None:
        for s in sequences:
            if s.request.repetition_penalty != 1:
                self._marked[s.slot] = s, len(s.token_ids) + min(steps, s.until - s.position)

    def _upload(self, sequences: list[Sequence], size: int) -> None:
        num_rows = len(sequences)
        filters = filters_of(sequences, self.vocab_size)
        penalties = [s.request.repetition_penalty for s in sequences]
        bans_end = [
            len(s.prompt_ids) + s.request.min_tokens if s.group.stop_ids else 0 for s in sequences
        ]
        settings = torch.zeros(5, size, dtype=torch.int64)
        top_k_B, *_, banned_until_B = settings.unbind()
        _, top_p_B, log_min_p_B, penalty_B, _ = settings.view(torch.float64).unbind()
        top_k_B.fill_(self.vocab_size)
        top_k_B[:num_rows] = filters.top_k_B
        top_p_B.fill_(1)
        top_p_B[:num_rows] = filters.top_p_B
        log_min_p_B.fill_(-torch.inf)
        log_min_p_B[:num_rows] = filters.log_min_p_B
        penalty_B.fill_(1)
        penalty_B[:num_rows] = torch.tensor(penalties, dtype=torch.float64)
        banned_until_B[:num_rows] = torch.tensor(bans_end)
        self._device[:, :size].copy_(upload(settings, self._device.device))

    def _marks(self) -> Tensor:
        if self._marks_SV is None:
            self._marks_SV = blank(self.slots, self.vocab_size, self._device.device)
        return self._marks_SV

    def _mark(self, sequences: list[Sequence]) -> None:
        cleared_slots: list[int] = []
        seen_ids: list[tuple[int, Many[int]]] = []
        stop_ids: list[tuple[int, Many[int]]] = []
        for s in sequences:
            is_penalised = s.request.repetition_penalty != 1
            if not is_penalised and not banned_ids(s):
                continue
            marked_sequence, num_marked = self._marked[s.slot]
            if marked_sequence is not s:
                cleared_slots.append(s.slot)
                num_marked = 0
                if banned_ids(s):
                    stop_ids.append((s.slot, s.group.stop_ids))
                if is_penalised:
                    seen_ids.append((s.slot, s.prompt_ids))
            if is_penalised and num_marked < len(s.token_ids):
                seen_ids.append((s.slot, s.token_ids[num_marked:]))
            self._marked[s.slot] = s, len(s.token_ids)
        marks_SV = self._marks()
        if cleared_slots:
            clear(marks_SV, upload(torch.tensor(cleared_slots), marks_SV.device))
        if stop_ids:
            add(marks_SV, STOPS, *index_pairs(stop_ids, marks_SV.device))
        if seen_ids:
            add(marks_SV, SEEN, *index_pairs(seen_ids, marks_SV.device))


def index_pairs(
    ids_by_row: Many[tuple[int, Many[int]]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the row (or slot) [N] and the id [N] of each token, on the device after one copy."""
    lengths = torch.tensor([len(ids) for _, ids in ids_by_row])
    rows_N = torch.tensor([row for row, _ in ids_by_row]).repeat_interleave(lengths)
    ids_N = torch.tensor([*chain.from_iterable(ids for _, ids in ids_by_row)], dtype=torch.int64)
    rows_N, ids_N = upload(torch.stack([rows_N, ids_N]), device).unbind()
    return rows_N, ids_N
