"""A checkpoint that all ranks write together, each its share, into one folder that appears whole.

    lead(ranks, lambda share: store.save(..., share=share))        the leading rank
    follow(ranks, tensors)                                         the others, at the same time

Any rank's full disk fails the save on the leading rank, which may retry, and which alone publishes
and verifies. Several machines need a shared file system.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lowroll.checkpoint.atomic_files import system_error
from lowroll.checkpoint.store import write_part
from lowroll.parallel.ranks import Ranks
from lowroll.transport.base import TransportError

SAVE_S = 3600.0  # seconds to wait for the leading rank to publish
Result = TypeVar("Result")


def lead(ranks: Ranks, save: Callable[[Callable[[Path], None]], Result]) -> Result:
    """Return the result of `save(share)`, which calls share(folder) at each attempt."""

    def share(folder: Path) -> None:
        ranks.tell(str(folder.absolute()).encode())
        for rank, code in enumerate(_gather_errnos(ranks, 0)):
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
    """Write this rank's share at each of the leading rank's attempts."""
    while folder := ranks.tell(wait_s=SAVE_S):
        _gather_errnos(ranks, _write_share(Path(folder.decode()), tensors, ranks))


def _write_share(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> int:
    try:
        write_part(folder, tensors, ranks.rank, ranks.size)
    except Exception as error:
        if code := system_error(error):
            return code
        raise
    return 0


def _gather_errnos(ranks: Ranks, code: int) -> list[int]:
    sizes = dict.fromkeys(range(ranks.size), 1)
    (errno_by_rank,) = ranks.gather([{ranks.rank: torch.tensor([float(code)])}], sizes)
    return [int(errno_by_rank[rank].item()) for rank in range(ranks.size)]
