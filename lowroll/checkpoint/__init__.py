"""Checkpoints and every other folder that must be either whole or absent.

`publish` makes a folder appear atomically and proves later that it is undamaged, `store` keeps the numbered
checkpoints of a run on top of it, `lock` lets one process at a time own a run folder. No pickle anywhere:
tensors are safetensors, everything else is JSON.
"""
from __future__ import annotations

from lowroll.checkpoint.lock import RunLock, RunLockedError
from lowroll.checkpoint.publish import DamagedError, DiskFullError, publish_folder, verify_folder
from lowroll.checkpoint.store import Checkpoint, Store

__all__ = ["Checkpoint", "DamagedError", "DiskFullError", "RunLock", "RunLockedError", "Store",
           "publish_folder", "verify_folder"]
