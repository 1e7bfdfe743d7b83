"""The rows of a held-out set, and its columns under their published names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowroll.envs.data.files import Located
from lowroll.envs.data.rows import DataSource, located, missing
from lowroll.envs.sets.table import EvalSet

Row = dict[str, Any]


def read(
    found: EvalSet, path: str | None = None, split: str | None = None, subset: str | None = None
) -> Iterator[Located]:
    """Yield (place, row), from the hub or `path`. ValueError says what to name instead."""
    if path is not None:
        if reason := missing(path):
            raise ValueError(f"set {found.name!r}: {path!r} {reason}")
        return located(DataSource(path, split or found.split, subset))
    return _read_hub(found, DataSource(found.path, split or found.split, subset or found.subset))


def _read_hub(found: EvalSet, source: DataSource) -> Iterator[Located]:
    try:
        yield from located(source)
    except ValueError as error:
        raise ValueError(
            f"set {found.name!r}: {error}; a file in its published shape does as well: --data "
            f"{found.name}=FILE"
        ) from None


def column(row: Row, found: EvalSet, role: str, where: str) -> str:
    """Return the column of a role; ValueError names expected and present columns."""
    candidates = found.columns[role]
    key = next((key for key in candidates if key in row), None)
    if key is None:
        present = ", ".join(key for key in row if isinstance(key, str)) or "none"
        raise ValueError(f"{where}: no column {' or '.join(candidates)}; it has: {present}")
    return key


def text_of(row: Row, found: EvalSet, role: str, where: str) -> str:
    """Return the stripped text of a role; ValueError if empty."""
    key = column(row, found, role, where)
    if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(f"{where}: column {key!r} must hold text")
    return str(row[key]).strip()
