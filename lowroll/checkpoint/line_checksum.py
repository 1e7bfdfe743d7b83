"""A line of JSON with a checksum: `{"step": 3, "reward/mean": 0.4, "crc": "9cf16ae5"}`.

`crc` is the CRC-32 of the line without that field, in hexadecimal: it finds every change of up to
32 neighbouring bits. Where the order of lines matters the sum begins with the line's number.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from lowroll.checkpoint.atomic_files import read_file

FIELD = "crc"
_CHECKSUM_SUFFIX = re.compile(rb', "crc": "([0-9a-f]{8})"\}$')


def seal(line: bytes, number: int = 0) -> bytes:
    """Return the line, a JSON object without its newline, with its checksum as the last field."""
    return line[:-1] + b', "crc": "%08x"}' % zlib.crc32(line, number)


def unseal(line: bytes, number: int = 0) -> tuple[bytes, bool]:
    """Return (what was sealed, True), or (the line, False) without a checksum. ValueError for
    damage."""
    match = _CHECKSUM_SUFFIX.search(line)
    if match is None:
        return line, False
    content, stated_checksum = line[: match.start()] + b"}", match[1].decode()
    if (computed_checksum := f"{zlib.crc32(content, number):08x}") != stated_checksum:
        raise ValueError(
            f"damaged: its checksum is {stated_checksum}, its content gives {computed_checksum}"
        )
    return content, True


def unseal_lines(data: bytes) -> bytes:
    """Return the content of a file whose lines are all sealed with their numbers, or all not.
    ValueError names the first damaged line."""
    contents: list[bytes] = []
    are_sealed: bool | None = None
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            contents.append(line)
            continue
        try:
            content, is_sealed = unseal(line, number)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if are_sealed is None:
            are_sealed = is_sealed
        if is_sealed != are_sealed:
            others = "have" if are_sealed else "lack"
            raise ValueError(f"line {number}: damaged: the lines before it {others} a checksum")
        contents.append(content)
    return b"\n".join(contents)


def read_objects(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the JSON objects of a sealed file's undamaged lines, and what is wrong with the
    others."""
    objects, problems = [], []
    for number, line in enumerate(read_file(path).removesuffix(b"\n").split(b"\n"), 1):
        try:
            value = json.loads(unseal(line, number)[0])
            if not isinstance(value, dict):
                raise ValueError("damaged: not a JSON object")
            objects.append(value)
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}:{number}: {error}")
    return objects, problems
