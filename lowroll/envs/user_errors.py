"""Error messages with the file and line of a user's own environment."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def blamed(what: str, file: str | None) -> Iterator[None]:
    """Turn an exception from code of `file` into a ValueError `file:line: what: ...`."""
    try:
        yield
    except Exception as error:
        if file is None:
            raise
        raise ValueError(f"{place(error, file)}: {what}: {describe(error)}") from error


def place(error: BaseException, file: str) -> str:
    """Return `file:line` of the innermost line of `file` in the traceback."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == file
    ]
    return f"{file}:{lines[-1]}" if lines else file


def describe(error: BaseException) -> str:
    """Return a text such as `KeyError: 'answer'`; for a ValueError its message alone."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    if type(error) is ValueError and text:
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")
