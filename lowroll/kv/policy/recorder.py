"""What a cache policy dropped, for whoever replays a sample (`model.replay`).

The recorder stands beside a `Selector`: it is told what the selector is told (a prompt begins in a
slot, a slot is copied, keys are kept), and keeps of each slot, on the host, at which positions its
cached keys stand and which compaction dropped each of the others. The indices of the kept keys are
all that leaves the device: one tensor for all layers of a batch of compactions, read in `settle`,
behind the steps that the device takes meanwhile.

Legend: L layers, B rows, G key-value heads, K keys that stay, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowroll.model.replay import IN_A_BYTE, pack_evictions
from lowroll.types import Evictions


@dataclass(frozen=True)
class _Slot:
    """A sample so far; never changed in place, so that copies share it."""

    after: tuple[int, ...]  # of each compaction: the last position before it
    held_LGK: Tensor  # int64: where the keys stand that the last one left
    numbers_LGT: Tensor  # the compaction that dropped each key, 0: none


class Recorder:
    """Slots of a model of so many layers and KV heads. All is called in the order of the device's
    work."""

    def __init__(self, layers: int, heads: int) -> None:
        self.layers, self.heads = layers, heads
        self._slots: dict[int, _Slot] = {}
        self._untold: list[Callable[[], None]] = []  # what happened since `settle`, in order

    def begin(self, slots: Sequence[int]) -> None:
        """A new prompt begins in each of these slots."""
        self._untold.append(partial(self._begin, tuple(slots)))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """What is known of a source is known of its target too; all are read before one is
        written."""
        self._untold.append(partial(self._copy, tuple(pairs)))

    def compacted(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[int],
        kept_LBGK: Tensor,
    ) -> None:
        """Of the keys of each row, `lengths` many, of which the last stands at `positions`, those
        of these indices have stayed."""
        short_LBGK = kept_LBGK.int()
        self._untold.append(
            partial(self._compact, tuple(slots), tuple(lengths), tuple(positions), short_LBGK)
        )

    def settle(self) -> None:
        """Take in what has happened. Waits for the device."""
        untold, self._untold = self._untold, []
        for happen in untold:
            happen()

    def evictions(self, slot: int | None) -> Evictions:
        """What the sample in a slot lost so far; None: of a sample that was never compacted."""
        self.settle()
        if slot not in self._slots:
            return Evictions(self.layers, self.heads)
        known = self._slots[slot]
        return pack_evictions(known.numbers_LGT, known.after)

    def _begin(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        before = dict(self._slots)
        for source, target in pairs:
            self._slots.pop(target, None)
            if source in before:
                self._slots[target] = before[source]

    def _compact(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        positions: Sequence[int],
        short_LBGK: Tensor,
    ) -> None:
        kept_LBGK = short_LBGK.cpu().long()
        for b, (slot, length, position) in enumerate(zip(slots, lengths, positions, strict=True)):
            self._slots[slot] = self._without(slot, length, position, kept_LBGK[:, b])

    def _without(self, slot: int, length: int, position: int, kept_LGK: Tensor) -> _Slot:
        """A slot after a compaction: the keys that are not kept get its number."""
        known = self._slots.get(slot)
        if known is None:
            nothing = torch.zeros(self.layers, self.heads, 0, dtype=torch.int64)
            known = _Slot((), nothing, nothing.to(torch.uint8))
        number = len(known.after) + 1
        new = length - known.held_LGK.shape[2]
        first = position + 1 - new
        new_T = torch.arange(first, position + 1)
        all_LGN = torch.cat([known.held_LGK, new_T.expand(self.layers, self.heads, -1)], 2)
        held_LGK = all_LGN.gather(2, kept_LGK)
        numbers_LGT = known.numbers_LGT
        if number == IN_A_BYTE + 1:
            numbers_LGT = numbers_LGT.to(torch.int16)
        assert numbers_LGT.shape[2] == first, "a key was neither recorded nor new"
        added_LGT = numbers_LGT.new_zeros(self.layers, self.heads, new)
        numbers_LGT = torch.cat([numbers_LGT, added_LGT], 2)
        numbers_LGT.scatter_(2, all_LGN, number).scatter_(2, held_LGK, 0)
        return _Slot((*known.after, position), held_LGK, numbers_LGT)
