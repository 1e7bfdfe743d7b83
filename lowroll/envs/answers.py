r"""Final answers: where they stand in a response, and when two of them are equal.

Conventions: the number on the last valid `#### 72` line (GSM8K), or the content of the last `\boxed{...}` with balanced
braces (MATH). There is no fallback to "the last number in the text": under RL a lenient extractor is a loophole.

Equality: the same string, else the same number when both are plain numbers, else math-verify (symbolic, through sympy)
on the extracted answers alone, both parsed under the same strict configuration. math-verify's own time limits rest on
SIGALRM, which works in main threads only and cannot interrupt big-integer arithmetic; they are off. The worker pool
kills what takes too long, and `refuse_costly` stops the common number bombs before sympy sees them.
"""
from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from math import log2
from typing import Any

MAX_ANSWER = 1000          # characters: a longer "final answer" is wrong by rule
MAX_BITS = 100_000         # of a number that an answer may spell as a power

HASH = re.compile(r"####[ \t]*\$?(-?[\d,.]*\d)[^\d\n]*$", re.MULTILINE)
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
BASE = re.compile(r"\d_\{?(\d+)\}?$")
BARE = re.compile(r"[^\s$\\{}]+")
PLAIN = re.compile(r"(-?)\s*(?:\\?\$)?\s*((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)\.?")
FLATTEN = [(re.compile(pattern), by) for pattern, by in (    # brackets out, such that 9^{9^{9}} becomes 9^9^9,,
    (r"\\left|\\right|\s", ""), (r"[)}\]]+(?=\^|\*\*|!)", ""), (r"[)}\]]|(?<=\d)[({\[]", ","), (r"[({\[]", ""))]
TOWER = re.compile(r"\d+(?:(?:\^|\*\*)[-+]?\d+)+")
FACTORIAL = re.compile(r"\d{4,}!|\d{2,}!!|(?:\^|\*\*)\d+!")


def hash_answer(text: str) -> str | None:
    """The number of the last line `#### number` (a unit may follow, another number may not); None if there is none."""
    found = HASH.findall(text)
    return found[-1] if found else None


def boxed_answer(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\boxed x`; None when there is none or its braces never close."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start:start + 1] != "{":
        bare = BARE.match(text, start)
        return bare[0].rstrip(".,") if bare and text[start - 1].isspace() else None
    depth, escaped = 0, False
    for i in range(start, len(text)):
        char = text[i]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1:i].strip()
    return None


def last_answer(text: str) -> str | None:
    """The answer under whichever of the two conventions comes last in the text."""
    number, box = hash_answer(text), boxed_answer(text)
    if number is None or box is None:
        return number if box is None else box
    last_hash = [match.start() for match in HASH.finditer(text)][-1]
    return number if last_hash > max(text.rfind("\\boxed"), text.rfind("\\fbox")) else box


def same_number(gold: str, answer: str) -> bool | None:
    """Exact equality of two plain decimal numbers (`1,234.50`, `$7`, `-3.`); None when one of them is not one."""
    a, b = PLAIN.fullmatch(gold.strip()), PLAIN.fullmatch(answer.strip())
    if a is None or b is None:
        return None
    return Fraction(a[1] + a[2].replace(",", "")) == Fraction(b[1] + b[2].replace(",", ""))


def equal(gold: str, answer: str) -> bool:
    """Whether `answer` (already extracted) is the gold answer. LaTeX or plain on both sides; gold comes first.

    Units and text beside a formula are not judged, and 50\\% is both 50 and 0.5: those are math-verify's rules.
    Raises what math-verify raises when it cannot compare, and ValueError for an answer too costly to evaluate.
    """
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return True
    if not answer or len(answer) > max(MAX_ANSWER, 2 * len(gold)):
        return False
    numeric = same_number(gold, answer)
    if numeric is not None:
        return numeric
    bases = BASE.search(gold), BASE.search(answer)
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False                   # math-verify drops the subscript: 52_8 would be 52_9
    refuse_costly(answer)
    from math_verify import verify  # imports sympy: only environments that compare formulas pay for it

    return verify(_parsed(gold), _parsed(answer), timeout_seconds=None, raise_on_error=True)


def refuse_costly(answer: str) -> None:
    """ValueError for power towers and factorials whose value has more than about `MAX_BITS` bits."""
    flat = answer
    for pattern, by in FLATTEN:
        flat = pattern.sub(by, flat)
    costly = FACTORIAL.search(flat) is not None
    for tower in TOWER.findall(flat):
        numbers = [int(digits) for digits in re.findall(r"\d+", tower)]
        exponent = numbers.pop()
        while numbers and not costly:
            base = numbers.pop()
            costly = base > 1 and exponent * log2(base) > MAX_BITS
            exponent = 1 if costly else base**exponent
    if costly:
        raise ValueError(f"answer too costly to evaluate: {answer[:80]!r}")


@lru_cache(maxsize=4096)
def _parsed(answer: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    strict = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    return parse(f"\\boxed{{{answer}}}", [strict], extraction_mode="first_match", parsing_timeout=None,
                 raise_on_error=True)


class _NoTimeoutWarning(logging.Filter):
    """math-verify warns once that its time limits are off; that is on purpose here."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Timeout is disabled" not in record.getMessage()


for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).addFilter(_NoTimeoutWarning())
