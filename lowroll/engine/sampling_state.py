"""The sampling parameters of rows beside their temperature, resident on the device: filters, a
repetition penalty, and no end before `min_tokens`.

The last two depend on earlier tokens, which are marked by the sample's slot
(`kernels.sampling.penalties`): the prompt when the sample first decodes, drawn tokens by the step
itself, and tokens drawn elsewhere (the first, a draft's, one beside a prompt) before the next step.
A slot with another sample is marked anew.

Legend: B rows, S slots, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from enum import IntEnum
from itertools import chain

import torch
from torch import Tensor

from lowroll.engine.sequence import DrawnPosition, Sequence
from lowroll.kernels.sampling.filters import Filters
from lowroll.kernels.sampling.penalties import SEEN, STOPS, Marked, add, blank, clear
from lowroll.model.attention import upload


class DrawMode(IntEnum):
    """The work of a batch's draw; each mode includes those before it, with the same bits."""

    PLAIN = 0
    FILTERED = 1
    MARKED = 2  # penalties and bans


def draw_of(sequences: Collection[Sequence | DrawnPosition]) -> DrawMode:
    return max((_draw_of(s) for s in sequences), default=DrawMode.PLAIN)


def _draw_of(s: Sequence | DrawnPosition) -> DrawMode:
    if s.request.repetition_penalty != 1 or s.banned_ids():
        return DrawMode.MARKED
    return DrawMode.FILTERED if is_filtered(s) else DrawMode.PLAIN


def is_filtered(s: Sequence | DrawnPosition) -> bool:
    """Return whether filters matter; the likeliest token, which a greedy row takes, passes all of
    them."""
    r = s.request
    return r.temperature != 0 and (r.top_k > 0 or r.top_p < 1 or r.min_p > 0)


def filters_of(sequences: Collection[Sequence | DrawnPosition], vocab_size: int) -> Filters:
    requests = [s.request for s in sequences]
    top_k = [min(r.top_k or vocab_size, vocab_size) for r in requests]
    log_min_p = [math.log(r.min_p) if r.min_p else -math.inf for r in requests]
    return Filters(
        torch.tensor(top_k),
        torch.tensor([r.top_p for r in requests], dtype=torch.float64),
        torch.tensor(log_min_p, dtype=torch.float64),
    )


class SamplingState:
    """The filters, penalties and bans of `most` rows, and the marks of the samples in `slots`
    slots."""

    def __init__(self, most: int, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.slots = slots
        # top-k, top-p, log of min-p, penalty, and where bans end; all but the first and last float64
        self._device = torch.zeros(5, most, dtype=torch.int64, device=device)
        self._rows: list[Sequence] = []
        self._marks_SV: Tensor | None = None
        # by slot: the sequence of the marks, and its number of marked response tokens
        self._marked: list[tuple[Sequence | None, int]] = [(None, 0)] * slots

    def filters(self, rows: int) -> Filters:
        top_k_B, top_p_B, min_p_B, _, _ = self._device[:, :rows].unbind()
        return Filters(top_k_B, top_p_B.view(torch.float64), min_p_B.view(torch.float64))

    def marked(self, slots_B: Tensor) -> Marked:
        penalty_B, banned_until_B = self._device[3:, : len(slots_B)].unbind()
        return Marked(self._marks(), slots_B, penalty_B.view(torch.float64), banned_until_B)

    def upload(self, sequences: list[Sequence], size: int, draw: DrawMode) -> None:
        """Upload the settings of these rows, and settings without effect for the padding up to
        `size`."""
        if sequences != self._rows:
            self._upload(sequences, size)
            self._rows = list(sequences)
        if draw is DrawMode.MARKED:
            self._mark(sequences)

    def drew(self, sequences: list[Sequence], steps: int) -> None:
        """Note that the device has marked the tokens of so many steps."""
        for s in sequences:
            if s.request.repetition_penalty != 1:
                self._marked[s.slot] = s, len(s.token_ids) + min(steps, s.until - s.position)

    def _upload(self, sequences: list[Sequence], size: int) -> None:
        rows = len(sequences)
        filters = filters_of(sequences, self.vocab_size)
        packed = torch.zeros(5, size, dtype=torch.int64)
        numbers = packed.view(torch.float64)
        packed[0] = self.vocab_size
        packed[0, :rows] = filters.top_k_B
        numbers[1], numbers[2], numbers[3] = 1, -torch.inf, 1
        numbers[1, :rows], numbers[2, :rows] = filters.top_p_B, filters.log_min_p_B
        numbers[3, :rows] = torch.tensor(
            [s.request.repetition_penalty for s in sequences], dtype=torch.float64
        )
        packed[4, :rows] = torch.tensor(
            [len(s.prompt_ids) + s.request.min_tokens if s.group.stop_ids else 0 for s in sequences]
        )
        self._device[:, :size].copy_(upload(packed, self._device.device))

    def _marks(self) -> Tensor:
        if self._marks_SV is None:
            self._marks_SV = blank(self.slots, self.vocab_size, self._device.device)
        return self._marks_SV

    def _mark(self, sequences: list[Sequence]) -> None:
        fresh, seen, stops = (
            list[int](),
            list[tuple[int, list[int]]](),
            list[tuple[int, Many[int]]](),
        )
        for s in sequences:
            penalised = s.request.repetition_penalty != 1
            if not penalised and not s.banned_ids():
                continue
            owner, known = self._marked[s.slot]
            if owner is not s:
                fresh.append(s.slot)
                known = 0
                if s.banned_ids():
                    stops.append((s.slot, s.group.stop_ids))
                if penalised:
                    seen.append((s.slot, s.prompt_ids))
            if penalised and known < len(s.token_ids):
                seen.append((s.slot, s.token_ids[known:]))
            self._marked[s.slot] = s, len(s.token_ids)
        marks_SV = self._marks()
        if fresh:
            clear(marks_SV, upload(torch.tensor(fresh), marks_SV.device))
        for mark, found in ((STOPS, stops), (SEEN, seen)):
            if found:
                slots, tokens = zip(*found, strict=True)
                lengths = torch.tensor([len(ids) for ids in tokens])
                slots_N = torch.tensor(slots).repeat_interleave(lengths)
                tokens_N = torch.tensor([*chain.from_iterable(tokens)])
                pairs_2N = upload(torch.stack([slots_N, tokens_N]), marks_SV.device)
                add(marks_SV, mark, *pairs_2N.unbind())
