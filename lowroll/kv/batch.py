"""The inputs of a pass over the cache: chunks of prompts, and rows of one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptChunk:
    """Tokens [start, stop) of a sequence, its page table and slot (-1: none)."""

    start: int
    stop: int
    pages: list[int]
    slot: int = -1

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def slots(self, page_size: int) -> Tensor:
        slots_PS = torch.tensor(self.pages)[:, None] * page_size + torch.arange(page_size)
        return slots_PS.flatten()[: self.stop]


@dataclass(frozen=True)
class DecodeRows:
    """Samples on the device. A length counts keys, which is not a position where a policy drops
    keys."""

    slots_B: Tensor  # int64: of the policy's state
    table_BP: Tensor  # int32
    lengths_B: Tensor  # int32; 0 is a dead row
    positions_B: Tensor  # int64: of the last key
