"""A record of the keys that a cache policy dropped, for the replay of a sample
(`model.evicted_attention`). Only their positions go to the host: one tensor for all layers of a
batch of compactions, read in `settle` while the device runs on.

Legend: `kv`; E keys that are dropped, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kv.policy.base import CachePolicy, Compaction, copy_slots, num_slots
from lowroll.kv.recurrent import RecurrentStates
from lowroll.model.attention import upload
from lowroll.model.evicted_attention import IN_A_BYTE, pack_evictions
from lowroll.model.spec import ModelSpec
from lowroll.types import Evictions

MOST_TRACED = 1 << 24  # keys, over layers and heads, traced at once


def most_held(policy: CachePolicy, spec: ModelSpec) -> int:
    return min(policy.budget or 0, spec.max_position)


def policy_bytes(
    kv: CachePolicy, spec: ModelSpec, max_batch: int, dtype: torch.dtype, record_evictions: bool
) -> int:
    """Return the device memory of a policy's state, records, and recurrent layers."""
    slots = num_slots(max_batch)
    keys = slots * spec.num_layers * spec.num_kv_heads * most_held(kv, spec)
    recorded = keys * torch.int32.itemsize if record_evictions else 0
    recurrent = RecurrentStates.nbytes(spec, slots, dtype)
    return kv.state_bytes(spec, max_batch, dtype.itemsize) + recorded + recurrent


@dataclass(frozen=True)
class _History:
    """A sample's history; immutable, so copies share it."""

    after: tuple[int, ...]  # last positions before compactions
    numbers_LGT: Tensor  # the compaction that dropped each key; 0: none


class CompactionRecorder:
    """A recorder of compactions, each of which leaves at most `most` keys. Call its methods in the
    device's order. held_LSGK: the positions of the keys that a slot's last compaction left."""

    def __init__(
        self, layers: int, slots: int, heads: int, most: int, device: torch.device | str
    ) -> None:
        self.layers, self.heads = layers, heads
        shape = (layers, slots, heads, most)
        self.held_LSGK = torch.zeros(shape, dtype=torch.int32, device=device)
        self._num_held: dict[int, int] = {}
        self._histories: dict[int, _History] = {}
        self._untold: list[Callable[[], None]] = []  # events since `settle`

    def begin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._num_held.pop(slot, None)
        self._untold.append(partial(self._begin, tuple(slots)))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy records as `Selector.copy`."""
        num_held = dict(self._num_held)
        for source, target in pairs:
            self._num_held[target] = num_held.get(source, 0)
        copy_slots(self.held_LSGK, pairs)
        self._untold.append(partial(self._copy, tuple(pairs)))

    def compacted(self, rows: Sequence[Compaction], kept_LBGK: Tensor) -> None:
        max_length = max(row.cached for row in rows)
        rows_at_once = max(1, MOST_TRACED // (self.layers * self.heads * max_length))
        for start in range(0, len(rows), rows_at_once):
            portion = rows[start : start + rows_at_once]
            self._trace(portion, kept_LBGK[:, start : start + rows_at_once])

    def settle(self) -> None:
        events, self._untold = self._untold, []
        for apply_event in events:
            apply_event()

    def evictions(self, slot: int | None) -> Evictions:
        """Return the dropped keys of a slot's sample; None: a sample that was never compacted."""
        self.settle()
        if slot not in self._histories:
            return Evictions(self.layers, self.heads)
        history = self._histories[slot]
        return pack_evictions(history.numbers_LGT, history.after)

    def _trace(self, rows: Sequence[Compaction], kept_LBGK: Tensor) -> None:
        """Find the positions of kept and of dropped keys. The first keys of a row are those in
        held_LSGK; the others were added since, without gaps."""
        device = self.held_LSGK.device
        row_values = [(r.slot, r.cached, r.position, self._num_held.get(r.slot, 0)) for r in rows]
        slots_B, *columns = upload(torch.tensor(row_values).t().contiguous(), device)
        length_B11, position_B11, num_held_B11 = (x[:, None, None] for x in columns)
        max_length = max(row.cached for row in rows)
        n_N = torch.arange(max_length, device=device)
        held_LBGN = self.held_LSGK[:, slots_B, :, :max_length]
        held_LBGN = F.pad(held_LBGN, (0, max_length - held_LBGN.shape[3]))
        since_B1N = (position_B11 - length_B11 + 1 + n_N).int()
        position_LBGN = torch.where(n_N < num_held_B11, held_LBGN, since_B1N)
        self.held_LSGK[:, slots_B, :, : rows[0].kept] = position_LBGN.gather(3, kept_LBGK)

        gone_LBGN = (n_N < length_B11).expand_as(position_LBGN).scatter(3, kept_LBGK, False)
        max_gone = max(row.cached - row.kept for row in rows)
        # dropped positions move to the front; all others go to the last entry
        index_LBGN = (gone_LBGN.cumsum(3) - 1).masked_fill(~gone_LBGN, max_gone)
        gone_LBGE = position_LBGN.new_zeros(*position_LBGN.shape[:3], max_gone + 1)
        gone_LBGE.scatter_(3, index_LBGN, position_LBGN)
        self._num_held |= {row.slot: row.kept for row in rows}
        self._untold.append(partial(self._compact, tuple(rows), gone_LBGE))

    def _begin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._histories.pop(slot, None)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        histories = dict(self._histories)
        for source, target in pairs:
            self._histories.pop(target, None)
            if source in histories:
                self._histories[target] = histories[source]

    def _compact(self, rows: Sequence[Compaction], gone_LBGE: Tensor) -> None:
        gone_LBGE = gone_LBGE.cpu().long()
        for b, row in enumerate(rows):
            history = self._histories.get(row.slot)
            if history is None:
                no_keys_LG0 = torch.zeros(self.layers, self.heads, 0, dtype=torch.uint8)
                history = _History((), no_keys_LG0)
            number = len(history.after) + 1
            numbers_LGT = history.numbers_LGT
            if number == IN_A_BYTE + 1:
                numbers_LGT = numbers_LGT.to(torch.int16)
            num_new = row.position + 1 - numbers_LGT.shape[2]
            numbers_LGT = F.pad(numbers_LGT, (0, num_new))
            numbers_LGT.scatter_(2, gone_LBGE[:, b, :, : row.cached - row.kept], number)
            self._histories[row.slot] = _History((*history.after, row.position), numbers_LGT)
