"""AdamW whose moments are kept in 8 bits (Dettmers et al. 2021, arXiv 2110.02861), from
bitsandbytes.

Each block of 256 entries of a moment keeps its largest magnitude in float32 and 256 levels of a
dynamic tree code: 2 bytes a parameter (and 1/32) in the place of 8. An update dequantizes, is
AdamW's in float32, and quantizes again. Tensors of fewer than 4096 entries (norms, biases, small
adapters) keep float32 moments, as the library has it.

The library is the extra `bnb`; its CPU path needs 0.50.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALLEST = 4096  # entries from which on moments are 8-bit: the library's min_8bit_size
BLOCK = 256
FIX = "pip install 'lowroll[bnb]', or choose train.optimizer=adamw"


def find() -> Any:
    """The library's class. ValueError with the fix where the library is missing."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            f"optimizer: adamw8bit needs bitsandbytes 0.50 or later ({error}); {FIX}"
        ) from None
    return AdamW8bit


def make(groups: list[dict[str, Any]], rate: float, betas: tuple[float, float], eps: float) -> Any:
    """The library's optimizer; `moved` is the squared 2-norm of the updates since it was last set
    to 0, weight decay left out. ValueError as `find` says."""

    class Measured(find()):  # type: ignore[misc]
        moved = 0.0

        def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
            before = p.detach() * (1 - group["lr"] * group["weight_decay"])
            super().update_step(group, p, gindex, pindex)
            self.moved += torch.linalg.vector_norm(p.detach() - before).square().item()

    return Measured(groups, lr=rate, betas=betas, eps=eps, min_8bit_size=SMALLEST)


def moments(p: Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and dtypes of what the optimizer keeps of a parameter."""
    if p.numel() < SMALLEST:
        return dict.fromkeys(("state1", "state2"), (p.shape, torch.float32))
    blocks = torch.Size([-(-p.numel() // BLOCK)])
    return {
        "state1": (p.shape, torch.uint8),
        "absmax1": (blocks, torch.float32),
        "state2": (p.shape, torch.uint8),
        "absmax2": (blocks, torch.float32),
    }


def revive(optimizer: Any, p: Tensor, saved: dict[str, Tensor], step: int) -> None:
    """Give a parameter the moments that were saved after `step` updates; the code's levels are the
    library's own."""
    state: dict[str, Any] = {"step": step} | saved
    if "absmax1" in saved:
        for moment, levels in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
            optimizer.name2qmap[levels] = optimizer.name2qmap[levels].to(p.device)
            state[moment] = optimizer.name2qmap[levels]
    optimizer.state[p] = state
