"""A checkpoint that all ranks write together, each its share, into one folder that appears whole.

    lead(ranks, lambda share: store.save(..., share=share))        the rank that leads
    follow(ranks, tensors)                                         the others, at the same time

The one that leads says the folder; the others write their parts there and say how it went; a disk
that was full fails the save on the one that leads, which may try again. What is published, verified
and kept is its alone. The folder must be the same for all: several machines need a file system that
they share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lowroll.checkpoint.files import system_error
from lowroll.checkpoint.store import write_part
from lowroll.parallel.ranks import Ranks
from lowroll.transport.base import TransportError

SAVE_S = 3600.0  # the others wait so long for the one that leads to publish what they wrote
Result = TypeVar("Result")


def lead(ranks: Ranks, save: Callable[[Callable[[Path], None]], Result]) -> Result:
    """Return the result of `save(share)`, which calls share(folder) each time that it tries."""

    def share(folder: Path) -> None:
        ranks.tell(str(folder.absolute()).encode())
        for rank, code in enumerate(_said(ranks, 0)):
            if code:
                raise OSError(code, f"{os.strerror(code)} (rank {rank})", str(folder))

    try:
        result = save(share)
    except TransportError:
        raise
    except BaseException:
        ranks.tell(b"")
        raise
    ranks.tell(b"")
    return result


def follow(ranks: Ranks, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write this rank's share whenever the one that leads has a folder for it."""
    while folder := ranks.tell(wait_s=SAVE_S):
        _said(ranks, _written(Path(folder.decode()), tensors, ranks))


def _written(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> int:
    """Return the error of the system that writing a share has met; 0 for none."""
    try:
        write_part(folder, tensors, ranks.rank, ranks.size)
    except Exception as error:
        if code := system_error(error):
            return code
        raise
    return 0


def _said(ranks: Ranks, code: int) -> list[int]:
    """Return the error of the system that each rank has met; 0 for none."""
    sizes = dict.fromkeys(range(ranks.size), 1)
    (found,) = ranks.gather([{ranks.rank: torch.tensor([float(code)])}], sizes)
    return [int(found[rank].item()) for rank in range(ranks.size)]
