"""AdamW with 8-bit moments (Dettmers et al. 2021, arXiv 2110.02861), from bitsandbytes.

Each block of 256 entries of a moment keeps its largest magnitude in float32 and 256 levels of a
dynamic tree code: about 2 bytes a parameter instead of 8. Blocks are those of a rank's part, so the
results of another number of ranks differ within the moments' rounding, unless parts are multiples
of 256 entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowroll.parallel.ranks import Ranks, rows_of

SMALLEST = 4096  # entries; smaller tensors keep float32 moments, as the library's min_8bit_size
BLOCK = 256
FIX = "pip install 'lowroll[bnb]', or choose train.optimizer=adamw"


def find() -> Any:
    """Return the library's class. ValueError if it is missing."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            f"optimizer: adamw8bit needs bitsandbytes 0.50 or later ({error}); {FIX}"
        ) from None
    return AdamW8bit


def make(
    groups: list[dict[str, Any]],
    rate: float,
    betas: tuple[float, float],
    eps: float,
    sizes: Mapping[int, int],
) -> Any:
    """Return the library's optimizer with an attribute `moved`: the sum of the squared 2-norms of
    all updates, without weight decay, since it was set to 0. `sizes` has the whole parameter's
    entries, by the id of this rank's part."""

    class Measured(find()):  # type: ignore[misc]
        moved = 0.0

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            """Decide on 8 bits by the whole parameter's size."""
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            p = group["params"][pindex]
            always, never = 0, p.numel() + 1
            return config | {"min_8bit_size": always if sizes[id(p)] >= SMALLEST else never}

        def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
            if not p.numel():
                return
            decayed = p.detach() * (1 - group["lr"] * group["weight_decay"])
            super().update_step(group, p, gindex, pindex)
            self.moved += torch.linalg.vector_norm(p.detach() - decayed).square().item()

    return Measured(groups, lr=rate, betas=betas, eps=eps, min_8bit_size=SMALLEST)


def moments(p: Tensor, shards: int = 1) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the names, shapes and dtypes of a whole parameter's state over `shards` ranks."""
    if p.numel() < SMALLEST:
        return dict.fromkeys(("state1", "state2"), (p.shape, torch.float32))
    blocks = torch.Size([sum(_block_counts(p, shards))])
    return {
        "state1": (p.shape, torch.uint8),
        "absmax1": (blocks, torch.float32),
        "state2": (p.shape, torch.uint8),
        "absmax2": (blocks, torch.float32),
    }


def cut(absmax: Tensor, p: Tensor, ranks: Ranks, shards: int) -> Tensor:
    """Return this rank's blocks out of all blocks of a parameter that `shards` ranks saved.
    ValueError when a part of either number of ranks begins within a block."""
    size = ranks.size if ranks.is_part(p) else 1
    rank = ranks.rank if size > 1 else 0
    block_counts = _block_counts(p, size)
    if size != shards and not (_ends_with_blocks(p, size) and _ends_with_blocks(p, shards)):
        raise ValueError(
            f"optimizer state: the 8-bit moments of a parameter {list(p.shape)} were made by "
            f"{shards} ranks, in blocks of {BLOCK} that {size} cannot share; go on with "
            f"{shards} (train.gpus={shards}), or with another optimizer from the weights"
        )
    first_block = sum(block_counts[:rank])
    return absmax[first_block : first_block + block_counts[rank]]


def _block_counts(p: Tensor, shards: int) -> list[int]:
    width = p.numel() // max(1, len(p))
    part_ranges = (rows_of(rank, shards, len(p)) for rank in range(shards))
    return [-(-(part_rows.stop - part_rows.start) * width // BLOCK) for part_rows in part_ranges]


def _ends_with_blocks(p: Tensor, shards: int) -> bool:
    num_entries = rows_of(0, shards, len(p)).stop * (p.numel() // max(1, len(p)))
    return num_entries % BLOCK == 0 or num_entries == p.numel()


def revive(optimizer: Any, p: Tensor, saved: dict[str, Tensor], step: int) -> None:
    """Restore a parameter's moments after `step` updates."""
    state: dict[str, Any] = {"step": step} | saved
    if "absmax1" in saved:
        for moment, levels in (("qmap1", "dynamic"), ("qmap2", "udynamic")):
            optimizer.name2qmap[levels] = optimizer.name2qmap[levels].to(p.device)
            state[moment] = optimizer.name2qmap[levels]
    optimizer.state[p] = state
