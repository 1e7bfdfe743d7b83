"""Checkpoints and every other folder that must be either whole or absent.

`publish` makes a folder appear atomically and proves later that it is undamaged, `store` keeps the
numbered checkpoints of a run on top of it, `lock` lets one process at a time own a run folder.
`files` does for a single file what `publish` does for a folder, `seal` lets a line of JSON show its
damage, `space` waits for room on a full disk. No pickle anywhere: tensors are safetensors,
everything else is JSON.
"""

from __future__ import annotations

from lowroll.checkpoint.lock import RunLock, RunLockedError
from lowroll.checkpoint.publish import (
    DamagedError,
    DiskFullError,
    NotSyncedError,
    publish_folder,
    verify_folder,
)
from lowroll.checkpoint.store import Checkpoint, Store

__all__ = [
    "Checkpoint",
    "DamagedError",
    "DiskFullError",
    "NotSyncedError",
    "RunLock",
    "RunLockedError",
    "Store",
    "publish_folder",
    "verify_folder",
]
