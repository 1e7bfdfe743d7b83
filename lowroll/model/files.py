"""Bounded reads of an untrusted model folder. Claims are checked against file sizes and memory
before they are used; every ValueError is one line and names the file.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lowroll.types import printable

MOST_JSON = 16 << 20  # bytes; parsed JSON takes up to forty times the memory
# bytes; the largest known has 35 MB
MOST_TOKENIZER = 256 << 20
MOST_HEADER = 32 << 20  # bytes; 100 a tensor

Headers = dict[str, tuple[tuple[int, ...], str]]  # tensor: (shape, safetensors dtype)


def regular(path: Path, most: int) -> int:
    """Return the size of a regular file of at most `most` bytes."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"{printable(path)}: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{printable(path)}: not a regular file")
    if status.st_size > most:
        raise ValueError(
            f"{printable(path)}: {status.st_size:,} bytes; a file of this kind has {most:,} at most"
        )
    return status.st_size


def read_json(path: Path, most: int = MOST_JSON) -> Any:
    """Read a JSON file of at most `most` bytes."""
    regular(path, most)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(
            f"{printable(path)}: not JSON that can be read (nested too deeply)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{printable(path)}: not JSON ({printable(error)})") from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{printable(path)}: expected a JSON object")
    return content


def tensor_headers(path: Path) -> Headers:
    """Return shapes and dtypes from a safetensors header."""
    size = regular(path, 1 << 62)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
        if length > min(size, MOST_HEADER):
            raise ValueError(
                f"a header of {length:,} bytes in a file of {size:,}; {MOST_HEADER:,} at most are "
                f"read"
            )
        with safe_open(path, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}
            return {
                name: (tuple(tensor_slice.get_shape()), tensor_slice.get_dtype())
                for name, tensor_slice in slices.items()
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(
            f"{printable(path)}: damaged or not a safetensors file ({printable(error)})"
        ) from None


def some(names: Iterable[str]) -> str:
    names = list(names)
    first_names = ", ".join(printable(name, 200) for name in names[:5])
    if len(names) <= 5:
        return first_names
    return f"{first_names} and {len(names) - 5} more"
