"""Rows of JSON lines, JSON, CSV and parquet files.

Each row has its place: `file:line` in JSON lines and CSV, `file[3]` (from 0) elsewhere. ValueError
names an invalid row.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Located = tuple[str, dict[str, Any]]

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
LONGEST_CELL = 1 << 24  # characters
NEEDS_DATASETS = "needs the package 'datasets' (pip install 'lowroll[data]')"


def no_text(error: UnicodeEncodeError) -> str:
    return f"a lone surrogate ({ascii(error.object[error.start])[1:-1]}) is no text"


def read_jsonl(path: str) -> Iterator[Located]:
    """Yield ("file:line", object) for non-empty lines."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                yield where, parse_object(line, where)


def read_json(path: str) -> Iterator[Located]:
    """Yield the objects of a JSON list, of an object's only list, or of JSON lines. Any other
    object is the only row."""
    text = Path(path).read_bytes()
    first_line, _, other_lines = text.strip().partition(b"\n")
    first_is_object = first_line.startswith(b"{") and first_line.endswith(b"}")
    if first_is_object and other_lines.startswith(b"{"):
        yield from read_jsonl(path)
        return
    rows = _parse_json(text, path)
    if isinstance(rows, dict):
        values = list(rows.values())
        rows = values[0] if len(values) == 1 and isinstance(values[0], list) else [rows]
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list of objects, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        where = f"{path}[{number}]"
        yield where, _require_object(row, where)


def read_csv(path: str) -> Iterator[Located]:
    """Yield a CSV file's rows (.tsv: tab-separated) as text by column."""
    csv.field_size_limit(LONGEST_CELL)
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)
        try:
            header = next(lines, [])
            if len(set(header)) < len(header) or "" in header:
                raise ValueError(f"{path}:1: the columns must have names, each another one")
            for cells in lines:
                where = f"{path}:{lines.line_num}"
                if cells and len(cells) != len(header):
                    raise ValueError(f"{where}: {len(cells)} cells, and {len(header)} columns")
                if cells:
                    yield where, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise ValueError(f"{path}:{lines.line_num}: not CSV: {error}") from None
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None


def read_parquet(path: str) -> Iterator[Located]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(f"{path}: parquet {NEEDS_DATASETS}") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{path}[{number}]", row
                    number += 1
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from error


READERS: dict[str, Callable[[str], Iterator[Located]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
}


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    return _require_object(_parse_json(line, where), where)


def _parse_json(text: bytes, where: str) -> Any:
    try:
        value = json.loads(decoded := text.decode("utf-8-sig"))
        if SURROGATE.search(decoded):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {no_text(error)}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{where}: nested too deep") from None
    return value


def _require_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row
