"""Replacement of published folders: the old is kept until the new is complete.

    publish beside dest  ->  rename dest aside  ->  rename the new one to dest  ->  fsync parent  ->  remove the old one

A process that dies between the renames leaves both, whole, for `settle_folder`.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from lowroll.checkpoint.atomic_files import sync_folder
from lowroll.checkpoint.atomic_folders import (
    MANIFEST,
    TEMPORARY,
    DamagedError,
    published_files,
    remove_leftovers,
    verify_folder,
)
from lowroll.checkpoint.fault_injection import faultpoint

log = logging.getLogger(__name__)


def foreign_in(folder: Path, contents: bool = True) -> str:
    """Describe the first unpublished or changed thing in a folder, or return "". contents: read
    every byte."""
    if folder.is_symlink() or not folder.is_dir():
        return f"{folder}: not a published folder"
    try:
        if contents:
            verify_folder(folder)
        published_names = published_files(folder) | {MANIFEST}
    except DamagedError as error:
        return str(error)
    present_names = set()
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_dir():
            present_names.add(path.relative_to(folder).as_posix())
    foreign_names = sorted(present_names - published_names)
    if not foreign_names:
        return ""
    return f"{folder / foreign_names[0]}: it was not published with the folder"


def replace_folder(dest: Path, publish: Callable[[Path], object]) -> Path:
    """Publish a folder with `publish(path)` in place of `dest`; return `dest`."""
    settle_folder(dest)
    if not dest.exists():
        publish(dest)
        return dest
    new_folder, old_folder = _sibling_paths(dest)
    publish(new_folder)
    faultpoint("replace.published")
    os.rename(dest, old_folder)
    faultpoint("replace.moved")
    os.rename(new_folder, dest)
    sync_folder(dest.parent)
    faultpoint("replace.renamed")
    _remove_or_keep(old_folder, dest)
    return dest


def settle_folder(dest: Path) -> None:
    """Finish a dead process's replacement or removal: afterwards `dest` is the newest whole one."""
    new_folder, old_folder = _sibling_paths(dest)
    remove_leftovers(dest.parent)
    if new_folder.is_dir() and not dest.exists():
        os.rename(new_folder, dest)
        sync_folder(dest.parent)
    for leftover in (new_folder, old_folder):
        if leftover.is_dir():
            _remove_or_keep(leftover, dest)


def remove_published(folder: Path, trash: Path) -> None:
    """Remove a published folder by way of `trash`, a folder of the same disk, which the next writer
    cleans after a crash."""
    trash_folder = trash / f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"
    os.rename(folder, trash_folder)
    faultpoint("replace.trashed")
    shutil.rmtree(trash_folder)


def _sibling_paths(dest: Path) -> tuple[Path, Path]:
    return dest.with_name(f".lowroll-new-{dest.name}"), dest.with_name(f".lowroll-old-{dest.name}")


def _remove_or_keep(folder: Path, dest: Path) -> None:
    """Remove a published folder; keep one with anything else under a visible name."""
    foreign = foreign_in(folder)
    if not foreign:
        remove_published(folder, folder.parent)
        return
    number = 1
    while (kept_path := dest.with_name(f"{dest.name}-{number}")).exists():
        number += 1
    os.rename(folder, kept_path)
    log.warning("%s; kept as %s", foreign, kept_path)
