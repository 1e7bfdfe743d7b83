"""The child process that tries a tokenizer.json: `python tokenizer_child.py FILE MEMORY_MB
SECONDS`.

It encodes and decodes a few texts under limits of address space and processor time, and prints one
line with the error, if any. It imports nothing of lowroll, to finish in a tenth of a second.
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

from tokenizers import Tokenizer

# words, several scripts, and runs that stall a pattern with nested repetition
PROBES = (
    "a b",
    "The 3 cats, 12.5 km\n\n\tx = [1, 2]  # \u00e4\u00df \u4f60\u597d \U0001f642 \u0645\u0631\u062d\u0628\u0627",
    *(character * 64 + end for character in "a 1.\n" for end in ("b", "!")),
    "ab 1" * 1024,
)


def protect(memory_mb: int, seconds: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def main(path: str, memory_mb: int, seconds: int) -> None:
    protect(memory_mb, seconds)
    try:
        tokenizer = Tokenizer.from_file(path)
        for text in PROBES:
            with suppress(Exception):  # a vocabulary may lack a word
                tokenizer.decode(tokenizer.encode(text).ids)
    except BaseException as error:  # a panic of the library is no Exception
        print(" ".join(str(error).split())[:1000] or type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
