r"""Final answers: their place in a response, and their equality.

An answer is the number on the last valid `#### 72` line (GSM8K) or the content of the last balanced
`\boxed{...}` (MATH). A valid line holds one number and perhaps its name and unit, `#### x = 18
dollars`. There is no fallback to the text's last number: RL exploits a lenient extractor.

Equality is tested by spelling (`notation`), by parts (`forms`), then as expressions (`expressions`)
of a size bounded by `answer_limits`, within `MAX_SECONDS` of CPU time.
"""

from __future__ import annotations

import logging
import re

from lowroll.envs.notation import plain, quantity, stated_number, tidy, unboxed

MAX_ANSWER = 1000  # characters: a longer "final answer" is wrong by rule
MAX_SECONDS = 2.0  # CPU time for one answer

HASH = re.compile(r"####[^\n]*")
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[^\s$\\{}]+")
# a minus sign before a box that is not part of a difference or a list
MINUS = re.compile(r"(?:(?:^|(?<![\d)}])\s|[$=(:{]|\\[(\[])-|[$=]\s*-\s*)$")
JOINED = re.compile(r"(?:[-\s$,;&}]|\\[()]|\\text\s*\{|\\quad|\band\b|\bor\b|\b[A-Za-z]\s*=)*")
JOINT = re.compile(r"[,;]|\band\b|\bor\b")


def hash_answer(text: str) -> str | None:
    """Return the number of the last line `#### number`, or None."""
    line_answer = _last_hash_line(plain(text))
    return None if line_answer is None else line_answer[1]


def _last_hash_line(text: str) -> tuple[int, str] | None:
    """Return (position, number) of the last valid `####` line, or None."""
    for line in reversed(list(HASH.finditer(text))):
        content = line[0].rpartition("####")[2]
        if len(content) <= MAX_ANSWER and (number := stated_number(content)) is not None:
            return line.start(), number
    return None


def boxed_answer(text: str, joined: bool = True) -> str | None:
    r"""Return the content of the last outer `\boxed{...}` or `\boxed x`; None without one or with
    unclosed braces.

    A preceding minus sign belongs to it; with `joined`, so do boxes joined by "and", "or" or a
    comma.
    """
    text = plain(text)
    boxes = _outer_boxes(text)
    if not boxes or (last_box := boxes[-1][1]) is None:
        return None
    contents, start = [last_box[0]], boxes[-1][0]
    for box_start, found in reversed(boxes[:-1] if joined else []):
        between = text[found[1] : start] if found is not None and start - found[1] < 60 else ""
        if found is None or JOINT.search(between) is None or JOINED.fullmatch(between) is None:
            break
        contents.append(found[0])
        start = box_start
    return ", ".join(reversed(contents))


def _outer_boxes(text: str) -> list[tuple[int, tuple[str, int] | None]]:
    """Return (start, (content, end)) of each outer box; None for one that never closes."""
    closing = _closing_braces(text)
    boxes: list[tuple[int, tuple[str, int] | None]] = []
    end = 0
    for match in BOX.finditer(text):
        if match.start() >= end:
            content = _box_content(text, match, closing)
            end = content[1] if content is not None else end
            boxes.append((match.start(), content))
    return boxes


def _closing_braces(text: str) -> dict[int, int]:
    """Return the position of each opening brace's closing one."""
    open_braces: list[int] = []
    closing = {}
    for token in BRACES.finditer(text):
        if token[0] == "{":
            open_braces.append(token.start())
        elif token[0] == "}" and open_braces:
            closing[open_braces.pop()] = token.start()
    return closing


def _box_content(text: str, box: re.Match[str], closing: dict[int, int]) -> tuple[str, int] | None:
    """Return (content, end) of a box, with a preceding minus sign; None for unclosed braces."""
    inner = None
    if text[box.end() : box.end() + 1] != "{":
        inner = _bare_content(text, box.end())
    elif (close := closing.get(box.end())) is not None:
        inner = unboxed(text[box.end() + 1 : close].strip()), close + 1
    if inner is None or MINUS.search(text, max(0, box.start() - 8), box.start()) is None:
        return inner
    return f"-{inner[0]}" if re.fullmatch(r"[^-+,\s]*", inner[0]) else f"-({inner[0]})", inner[1]


def _bare_content(text: str, start: int) -> tuple[str, int] | None:
    r"""Return (content, end) of `\boxed x`, without braces, or None."""
    bare = BARE.match(text, start)
    return (bare[0].rstrip(".,"), bare.end()) if bare and text[start - 1].isspace() else None


def last_answer(text: str, joined: bool = True) -> str | None:
    """Return the last answer in the text, after `####` or in a box, or None."""
    text = plain(text)
    line, box = _last_hash_line(text), boxed_answer(text, joined)
    if line is None or box is None:
        return line[1] if line is not None else box
    return line[1] if line[0] > max(text.rfind("\\boxed"), text.rfind("\\fbox")) else box


def same_number(gold: str, answer: str) -> bool | None:
    """Return whether two plain numbers (`1,234.50`, `$7`, `4.5e33`) are equal; None if either is
    none."""
    a, b = quantity(tidy(gold)), quantity(tidy(answer))
    return None if a is None or b is None else a == b


class Unjudged(Exception):
    """An answer that cannot be parsed or evaluated within the limits; it is wrong."""


def equal(gold: str, answer: str, ordered: bool = False) -> bool:
    r"""Return whether an extracted answer equals the gold answer, both LaTeX or plain text.
    `ordered`: the order of a list without brackets counts.

    Units and text around a formula are ignored, and 50\% is both 50 and 0.5. Raises Unjudged when
    the answer is at fault; another exception is the gold answer's or this program's fault.
    """
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return True
    if not answer or len(answer) > max(MAX_ANSWER, 2 * len(gold)):
        return False
    same_numbers = same_number(gold, answer)
    if same_numbers:
        return True
    # they import sympy, which only formulas need
    from lowroll.envs import answer_limits, expressions, forms

    try:
        with answer_limits.cpu_limit(MAX_SECONDS):
            return forms.matches(gold, answer, ordered)
    except expressions.GoldError:
        raise
    except (Exception, answer_limits.AnswerTimeout) as error:
        raise Unjudged(f"{type(error).__name__}: {error}"[:200]) from error


class _NoTimeoutWarning(logging.Filter):
    """A filter of math-verify's warning about its disabled time limits."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Timeout is disabled" not in record.getMessage()


for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).addFilter(_NoTimeoutWarning())
