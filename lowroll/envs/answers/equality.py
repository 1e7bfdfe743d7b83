r"""Final answers: their place in a response, and their equality.

An answer is the number on the last valid `#### 72` line (GSM8K) or the content of the last balanced
`\boxed{...}` (MATH). A valid line holds one number and perhaps its name and unit, `#### x = 18
dollars`. There is no fallback to the text's last number: RL exploits a lenient extractor.

Equality is tested by spelling (`notation`), by parts (`forms`), then as expressions (`expressions`)
of a size bounded by `limits`, within `MAX_SECONDS` of CPU time.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from itertools import pairwise

from lowroll.envs.answers.notation import plain, quantity, stated_number, tidy, unboxed
from lowroll.envs.time_limit import limited

MAX_ANSWER = 1000  # characters; a longer one is wrong by rule
MAX_SECONDS = 2.0  # CPU time for one answer

HASH = re.compile(r"####[^\n]*")
BOX = re.compile(r"\\(?:boxed|fbox)\s*")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
BARE = re.compile(r"[^\s$\\{}]+")
# a minus sign before a box that is not part of a difference or a list
MINUS = re.compile(r"(?:(?:^|(?<![\d)}])\s|[$=(:{]|\\[(\[])-|[$=]\s*-\s*)$")
JOINED = re.compile(r"(?:[-\s$,;&}]|\\[()]|\\text\s*\{|\\quad|\band\b|\bor\b|\b[A-Za-z]\s*=)*")
JOINT = re.compile(r"[,;]|\band\b|\bor\b")


@dataclass(frozen=True)
class _Box:
    start: int
    end: int
    content: str | None


def hash_answer(text: str) -> str | None:
    """Return the number of the last line `#### number`, or None."""
    line_answer = _last_hash_line(plain(text))
    return None if line_answer is None else line_answer[1]


def _last_hash_line(text: str) -> tuple[int, str] | None:
    for line in reversed(list(HASH.finditer(text))):
        content = line[0].rpartition("####")[2]
        if len(content) <= MAX_ANSWER and (number := stated_number(content)) is not None:
            return line.start(), number
    return None


def boxed_answer(text: str, joined: bool = True) -> str | None:
    r"""Return the content of the last outer `\boxed{...}` or `\boxed x`, or None.

    A preceding minus sign belongs to it; with `joined`, so do boxes joined by "and", "or" or a
    comma.
    """
    text = plain(text)
    boxes = _outer_boxes(text)
    if not boxes or boxes[-1].content is None:
        return None
    contents = [boxes[-1].content]
    for next_box, box in pairwise(reversed(boxes)):
        if not joined or box.content is None or not _joins(text[box.end : next_box.start]):
            break
        contents.append(box.content)
    return ", ".join(reversed(contents))


def _joins(between: str) -> bool:
    if len(between) >= 60:
        return False
    return JOINT.search(between) is not None and JOINED.fullmatch(between) is not None


def _outer_boxes(text: str) -> list[_Box]:
    closing = _closing_braces(text)
    boxes: list[_Box] = []
    for command in BOX.finditer(text):
        if not boxes or command.start() >= boxes[-1].end:
            boxes.append(_read_box(text, command, closing))
    return boxes


def _closing_braces(text: str) -> dict[int, int]:
    open_braces: list[int] = []
    closing = {}
    for token in BRACES.finditer(text):
        if token[0] == "{":
            open_braces.append(token.start())
        elif token[0] == "}" and open_braces:
            closing[open_braces.pop()] = token.start()
    return closing


def _read_box(text: str, command: re.Match[str], closing: dict[int, int]) -> _Box:
    start, inside = command.span()
    if text[inside : inside + 1] == "{":
        if inside not in closing:
            return _Box(start, inside, None)
        content = unboxed(text[inside + 1 : closing[inside]].strip())
        end = closing[inside] + 1
    else:
        bare = BARE.match(text, inside)
        if bare is None or not text[inside - 1].isspace():
            return _Box(start, inside, None)
        content = bare[0].rstrip(".,")
        end = bare.end()
    if MINUS.search(text, max(0, start - 8), start) is not None:
        is_one_term = re.fullmatch(r"[^-+,\s]*", content) is not None
        content = f"-{content}" if is_one_term else f"-({content})"
    return _Box(start, end, content)


def last_answer(text: str, joined: bool = True) -> str | None:
    """Return the last answer in the text, after `####` or in a box, or None."""
    text = plain(text)
    hash_line = _last_hash_line(text)
    box = boxed_answer(text, joined)
    if hash_line is None:
        return box
    line_position, number = hash_line
    box_position = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    return number if box is None or line_position > box_position else box


def same_number(gold: str, answer: str) -> bool | None:
    """Return whether two plain numbers (`1,234.50`, `$7`, `4.5e33`) are equal; None if either is
    none."""
    a, b = quantity(tidy(gold)), quantity(tidy(answer))
    return None if a is None or b is None else a == b


class Unjudged(Exception):
    """An answer that cannot be parsed or evaluated within the limits."""


def equal(gold: str, answer: str, ordered: bool = False) -> bool:
    r"""Return whether an extracted answer equals the gold answer. With `ordered` the order of a
    list without brackets counts.

    Units and text around a formula are ignored, and 50\% is both 50 and 0.5. Raises Unjudged when
    the answer is at fault, other exceptions when the gold answer is.
    """
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return True
    if not answer or len(answer) > max(MAX_ANSWER, 2 * len(gold)):
        return False
    same_numbers = same_number(gold, answer)
    if same_numbers:
        return True
    # only formulas need these, which import sympy
    from lowroll.envs.answers import expressions, forms, limits

    try:
        with limited(MAX_SECONDS, limits.AnswerTimeout, of_cpu=True):
            return forms.matches(gold, answer, ordered)
    except expressions.GoldError:
        raise
    except (Exception, limits.AnswerTimeout) as error:
        raise Unjudged(f"{type(error).__name__}: {error}"[:200]) from error


for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).addFilter(
        lambda said: "Timeout is disabled" not in said.getMessage()
    )
