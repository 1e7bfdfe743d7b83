"""The rows of a held-out set, and its columns by any of their published names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lowroll.envs.rows import read_jsonl
from lowroll.envs.sets.table import EvalSet

Row = dict[str, Any]


def read(
    name: str, found: EvalSet, path: str | None = None, split: str | None = None
) -> Iterator[tuple[str, Row]]:
    """(place, row) of every row of a set: of a local file or another hub id, or of the hub's. A
    place is what an error says."""
    if path is not None and path.endswith(".jsonl"):
        yield from read_jsonl(path)
        return
    raise NotImplementedError


def column(row: Row, found: EvalSet, role: str, where: str) -> str:
    """The column of a row that plays a role. ValueError names those that would, and those that are
    there."""
    wanted = found.columns[role]
    key = next((key for key in wanted if key in row), None)
    if key is None:
        raise ValueError(
            f"{where}: no column {' or '.join(wanted)}; it has: {', '.join(map(str, row)) or 'none'}"
        )
    return key


def text_of(row: Row, found: EvalSet, role: str, where: str) -> str:
    """The text of a role, without blanks around it. ValueError when there is none."""
    key = column(row, found, role, where)
    if not isinstance(row[key], str) or not row[key].strip():
        raise ValueError(f"{where}: column {key!r} must hold text")
    return str(row[key]).strip()
