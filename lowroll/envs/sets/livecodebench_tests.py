"""LiveCodeBench's test cases: JSON text, or base64 of zlib of a pickle of JSON text.

The pickle is parsed opcode by opcode: only frames, one text, memo entries and the end are accepted.
Nothing can be looked up, built or called, and every size is bounded.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

MAX_ENCODED = 256 << 20  # characters of a column
MAX_DECODED = 512 << 20  # bytes behind zlib
_PROTO, _FRAME, _STOP, _MEMOIZE = 0x80, 0x95, 0x2E, 0x94
_TEXTS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # opcode of a text: bytes of its length
_SKIPPED = {_PROTO: 1, _FRAME: 8, _MEMOIZE: 0, 0x71: 1, 0x72: 4}  # opcode: bytes of its argument


def cases(column: str) -> list[dict[str, Any]]:
    """Return the test cases of a column: `input`, `output` and `testtype`. ValueError for anything
    else."""
    if len(column) > MAX_ENCODED:
        raise ValueError(f"{len(column)} characters of test cases, more than {MAX_ENCODED}")
    content = column.strip() or "[]"
    text = content if content.startswith("[") else pickled_text(_decompress(content))
    try:
        test_cases = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"test cases are no JSON: {error}") from None
    if not isinstance(test_cases, list) or not all(map(_is_case, test_cases)):
        raise ValueError("test cases must be a list of {input, output, testtype}")
    return test_cases


def pickled_text(data: bytes) -> str:
    """Return the text of a pickle of protocol 2 to 5; ValueError for one that holds more."""
    offset, text = 0, None
    while offset < len(data):
        opcode = data[offset]
        offset += 1
        if opcode in _TEXTS and text is None:
            size_end = offset + _TEXTS[opcode]
            size = int.from_bytes(data[offset:size_end], "little")
            offset = size_end + size
            if offset > len(data):
                raise ValueError("a pickle's text is cut short")
            text = data[size_end:offset].decode()
        elif opcode == _STOP and text is not None and offset == len(data):
            return text
        elif opcode in _SKIPPED:
            offset += _SKIPPED[opcode]
        else:
            raise ValueError(f"a pickle of more than one text (opcode {opcode:#04x}) is not read")
    raise ValueError("a pickle without an end")


def _decompress(column: str) -> bytes:
    try:
        compressed = base64.b64decode(column, validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(compressed, MAX_DECODED)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError(f"test cases are neither JSON nor base64 of zlib: {error}") from None
    if not unpacker.eof:
        raise ValueError(f"test cases are cut short, or hold more than {MAX_DECODED} bytes")
    return data


def _is_case(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("input"), str)
        and isinstance(found.get("output"), str)
        and found.get("testtype") in ("stdin", "functional")
    )
