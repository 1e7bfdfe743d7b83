r"""The form of a final answer (list, set, tuple or interval, union, relation, expression).

Forms are compared part by part: brackets must match, tuples keep their order, lists and sets are
multisets. `x \ge 3` and `\{x | x \ge 3\}` are the interval `[3,\infty)`; `1 \pm \sqrt 2` is a list
of two. `1,2` is not the point `(1,2)`, but `x=1, y=2` is. An implication, `4 \implies x=5`, equals
only another with equal sides. `\frac13 \approx 0.33` has the value before the sign. Leaves are
compared as text, numbers, words, then expressions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from itertools import product

from lowroll.envs.notation import (
    DOTS,
    NAME,
    choice,
    clock,
    numeral,
    quantity,
    readings,
    scaled,
    squeezed,
    tidy,
    without_unit,
    words,
)

MAX_PARTS = 40  # of an unordered list
TOKEN = re.compile(r"\\begin|\\end|\\[{}]|\\[A-Za-z]+|.", re.DOTALL)
COMMA = re.compile(r"[,;]")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
ASSIGNED = re.compile(r"^[^,;]*(?:=|[<>]|\\[lg]eq(?![A-Za-z]))\s*")
IMPLIES = re.compile(r"\\(?:implies|iff|to)(?![A-Za-z])")
CUP = re.compile(r"\\cup(?![A-Za-z])")
BAR = re.compile(r"[|:]")
RELATION = re.compile(r"\\(?:leq|geq|neq|approx|in)(?![A-Za-z])|[=<>]")
FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
BELOW = ("<", r"\leq")
LETTERED = re.compile(r"(?:\\text\{)?\s*\(\s*[A-Z]\s*\)")  # (B) 12
CONSTANT = re.compile(
    r"(?:[\d\s.,+\-*/^(){}%!e]|\\(?:frac|sqrt|pi|infty|cdot|times|ln|log|sin|cos|tan)(?![A-Za-z]))+"
)


@dataclass(frozen=True)
class Form:
    """The kind and parts of an answer."""

    kind: str  # "list", "set", "tuple", "union", "implication", "relation" or "leaf"
    parts: tuple[str, ...]
    signs: str = ""  # the brackets of a tuple, the operators of a relation or implication
    name: str = ""  # the variable of an inequality or assignment


def pieces(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Cut a text at separators outside of all brackets into pieces and separators; unmatched
    brackets prevent cuts."""
    cut = []
    separators = []
    start = 0
    depth = 0
    for token in TOKEN.finditer(text):
        sign = token[0]
        depth += sign in ("(", "[", "{", r"\{", r"\begin")
        depth -= sign in (")", "]", "}", r"\}", r"\end")
        if depth < 0:
            return [text], []
        if depth == 0 and separator.fullmatch(sign):
            cut.append(text[start : token.start()])
            separators.append(sign)
            start = token.end()
    if depth != 0:
        return [text], []
    return [*cut, text[start:]], separators


def wrapped(text: str) -> tuple[str, str] | None:
    """Return (brackets, inside) of a text in one pair of brackets, or None."""
    depth = 0
    for token in TOKEN.finditer(text):
        sign = token[0]
        depth += sign in ("(", "[", "{", r"\{")
        depth -= sign in (")", "]", "}", r"\}")
        if depth <= 0:
            opening = TOKEN.match(text)
            if token.end() < len(text) or opening is None or token.start() == 0:
                return None
            return opening[0] + sign, text[opening.end() : token.start()]
    return None


@lru_cache(maxsize=4096)
def form(text: str) -> Form:
    text = text.strip()
    if (pair := wrapped(text)) is not None:
        found = _bracketed(*pair)
        if found is not None:
            return found
    sides, arrows = pieces(text, IMPLIES)
    if arrows:
        return Form("implication", tuple(map(str.strip, sides)), " ".join(arrows))
    if len(union := pieces(text, CUP)[0]) > 1:
        return Form("union", tuple(map(str.strip, union)))
    parts = _values(text)
    if len(parts) > 1:
        inequalities = all(_is_interval(form(part)) for part in parts)
        return Form("union" if inequalities else "list", parts)
    return _relation(text) or Form("leaf", (text,))


def _bracketed(brackets: str, inside: str) -> Form | None:
    if brackets == r"\{\}":
        condition = pieces(inside, BAR)[0]
        if len(condition) == 2:
            found = form(condition[1])
            return found if _is_interval(found) else None
        return Form("set", _values(inside, braces=True))
    if brackets == "{}":
        return form(inside)
    parts = [part.strip() for part in pieces(inside, COMMA)[0]]
    if len(parts) > 1 and all(parts):
        return Form("tuple", tuple(parts), brackets)
    if brackets == "()":
        return form(inside)
    return None


def _is_interval(found: Form) -> bool:
    return found.kind == "tuple" and bool(found.name)


def _values(text: str, braces: bool = False) -> tuple[str, ...]:
    """Return the parts of a list, both values of a sign."""
    return tuple(part for piece in _listed(text, braces) for part in _signs(piece))


def _listed(text: str, braces: bool) -> list[str]:
    """Split a list. A comma between digits is in a number if other commas are followed by
    spaces."""
    if not braces and quantity(without_unit(ASSIGNED.sub("", text))[0]) is not None:
        return [text]
    spaced = re.search(r",\s", text) is not None
    held = THOUSANDS.sub("\0", text) if spaced else text
    parts = [part.replace("\0", ",").strip() for part in pieces(held, COMMA)[0]]
    return [part for part in parts if part] or [text]


def _signs(text: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return [text]
    return [
        re.sub(r"\\pm(?![A-Za-z])", pm, re.sub(r"\\mp(?![A-Za-z])", mp, text))
        .strip()
        .removeprefix("+")
        for pm, mp in ("+-", "-+")
    ]


def _relation(text: str) -> Form | None:
    """Return a relation, or the interval of one that bounds a variable by numbers or a set."""
    sides, operators = pieces(text, RELATION)
    sides = [side.strip() for side in sides]
    if not operators or not all(sides):
        return None
    if r"\approx" in operators:
        first = operators.index(r"\approx")
        keep = first + 1
        if first == 0 and NAME.fullmatch(sides[0]):  # a name is about what follows it
            keep = 2
        return form("=".join(sides[:keep]))
    name = ""
    if NAME.fullmatch(sides[0]):
        name = sides[0]
    if operators[0] == r"\in" and name:
        return replace(form(text.partition(r"\in")[2]), name=squeezed(name))
    if operators[0] == "=" and name:
        rest = form(sides[-1])
        if set(operators) == {"="} and rest.kind != "leaf":
            return replace(rest, name=squeezed(name))
    return _interval(sides, operators) or Form(
        "relation", tuple(sides), " ".join(operators), squeezed(name)
    )


def _interval(sides: list[str], operators: list[str]) -> Form | None:
    if operators[0] not in FLIPPED:
        return None
    if operators[0] not in BELOW:
        sides = sides[::-1]
        operators = [FLIPPED.get(sign, sign) for sign in operators[::-1]]
    if any(sign not in BELOW for sign in operators):
        return None
    bounds = [CONSTANT.fullmatch(side) is not None for side in sides]
    opening = "[" if operators[0] == r"\leq" else "("
    closing = "]" if operators[-1] == r"\leq" else ")"
    if bounds == [True, False, True]:
        low, variable, high = sides
    elif bounds == [False, True]:
        low = r"-\infty"
        opening = "("
        variable, high = sides
    elif bounds == [True, False]:
        low, variable = sides
        high = r"\infty"
        closing = ")"
    else:
        return None
    if not NAME.fullmatch(variable):
        return None
    return Form("tuple", (low, high), opening + closing, squeezed(variable))


def matches(gold: str, answer: str, ordered: bool = False) -> bool:
    """Return whether two texts state the same answer. `ordered`: the order of a list counts."""
    gold = tidy(gold)
    answer = tidy(answer)
    if squeezed(gold) == squeezed(answer):
        return True
    if not answer or r"\boxed{" in answer:
        return False
    if (asked := choice(gold)) is not None and (not asked[1] or LETTERED.match(gold)):
        letter, text = asked
        said = choice(answer)
        if said is not None and said[0] == letter:
            return True
        return text != "" and matches(text, answer)
    return _same_form(form(gold), form(answer), ordered)


def _same_form(gold: Form, answer: Form, ordered: bool) -> bool:
    if (
        gold.name
        and answer.name
        and gold.name != answer.name
        and "relation" not in (gold.kind, answer.kind)
    ):
        return False
    several = ("list", "set", "union")
    if gold.kind == answer.kind == "tuple":
        return gold.signs == answer.signs and _pairwise(gold.parts, answer.parts)
    if gold.kind == answer.kind == "implication":
        return gold.signs == answer.signs and _pairwise(gold.parts, answer.parts)
    if {gold.kind, answer.kind} == {"tuple", "list"}:
        point, values = (gold, answer) if gold.kind == "tuple" else (answer, gold)
        if point.signs != "()" or point.name or not _are_coordinates(values.parts):
            return False
        return _pairwise(gold.parts, answer.parts)
    if gold.kind in several and answer.kind in several:
        if ordered and gold.kind == "list":
            return _pairwise(gold.parts, answer.parts)
        return _unordered(gold.parts, answer.parts)
    if "relation" in (gold.kind, answer.kind):
        return _same_relation(gold, answer)
    if gold.kind == "leaf" and answer.kind == "list":  # one value in several forms
        return all(matches(gold.parts[0], part) for part in answer.parts)
    return gold.kind == answer.kind == "leaf" and same_leaf(gold.parts[0], answer.parts[0])


def _are_coordinates(parts: tuple[str, ...]) -> bool:
    """Return whether the parts assign different names, as in `x=1, y=2`."""
    names = [form(part).name for part in parts]
    return all(names) and len(set(names)) == len(names)


def _pairwise(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    return len(gold) == len(answer) and all(map(matches, gold, answer))


def _unordered(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Return whether two lists are equal multisets. ValueError above MAX_PARTS unmatched parts."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    rest = []
    for part in gold:
        alike = next((other for other in left if squeezed(part) == squeezed(other)), None)
        if alike is None:
            rest.append(part)
        else:
            left.remove(alike)
    if len(rest) > MAX_PARTS:
        raise ValueError(f"a list of more than {MAX_PARTS} parts")
    for part in rest:
        equal = next((other for other in left if matches(part, other)), None)
        if equal is None:
            return False
        left.remove(equal)
    return True


def _same_relation(gold: Form, answer: Form) -> bool:
    """Return whether two relations, or a relation and a value, are equal: `x = 5` and `2 + 3 = 5`
    equal 5, `4 = 5` does not."""
    if answer.kind != "relation":
        if not gold.name or not _is_equation_and_value(gold, answer):
            return False
        return all(matches(side, answer.parts[0]) for side in _said(gold))
    if gold.kind != "relation":
        if not _is_equation_and_value(answer, gold):
            return False
        return all(matches(gold.parts[0], side) for side in _said(answer))
    if gold.name and gold.name == answer.name and gold.signs[0] == answer.signs[0] == "=":
        return matches(gold.parts[-1], answer.parts[-1])
    gold = _upwards(gold)
    answer = _upwards(answer)
    if gold.signs != answer.signs:
        return False
    if len(gold.parts) > 2:
        return _pairwise(gold.parts, answer.parts)
    from lowroll.envs import expressions

    factor = expressions.proportion(gold.parts, answer.parts)
    return factor is not None and (factor > 0 or gold.signs in ("=", r"\neq"))


def _is_equation_and_value(relation: Form, other: Form) -> bool:
    return other.kind == "leaf" and set(relation.signs.split()) == {"="}


def _said(equation: Form) -> list[str]:
    """Return the values of an equation's name: its last side, and numbers before it."""
    sides = equation.parts[bool(equation.name) :]
    return [side for side in sides[:-1] if CONSTANT.fullmatch(side)] + [sides[-1]]


def _upwards(relation: Form) -> Form:
    signs = relation.signs.split()
    if not all(sign in FLIPPED and sign not in BELOW for sign in signs):
        return relation
    return replace(
        relation, parts=relation.parts[::-1], signs=" ".join(FLIPPED[sign] for sign in signs[::-1])
    )


def same_leaf(gold: str, answer: str) -> bool:
    """Return whether two leaves are equal as times, numerals with a base, words, numbers or
    expressions."""
    if squeezed(gold) == squeezed(answer):
        return True
    if DOTS in gold or DOTS in answer:
        return _begins(gold, answer) or _begins(answer, gold)
    time = clock(gold)
    other_time = clock(answer)
    if time is not None and other_time is not None:
        either_half = "" in (time[2], other_time[2])  # of the day
        return time[:2] == other_time[:2] and (either_half or time == other_time)
    if (said := words(gold)) is not None:
        return said == words(answer, beside_words=True)
    if (said := words(answer)) is not None and said == words(gold, beside_words=True):
        return True
    number = numeral(gold)
    other_number = numeral(answer)
    if number is not None or other_number is not None:
        return number == other_number
    gold, unit = without_unit(gold)
    answer, other_unit = without_unit(answer)
    if unit and other_unit and unit != other_unit:
        return False
    gold, up = scaled(gold)
    answer, also_up = scaled(answer)
    gold = without_unit(gold)[0]
    answer = without_unit(answer)[0]
    if same_value(gold, answer):
        return True
    return up != also_up and same_value(gold, answer, up - also_up)


def _begins(text: str, other: str) -> bool:
    r"""Return whether `0.6666667\ldots` begins a number without finite decimals."""
    if not text.endswith(DOTS) or DOTS in other:
        return False
    from lowroll.envs import expressions

    return expressions.begins(text.removesuffix(DOTS).strip(), other)


def same_value(gold: str, answer: str, shift: int = 0) -> bool:
    """Return whether `gold` times 10^shift equals `answer`."""
    number = quantity(gold)
    other = quantity(answer)
    if number is not None and other is not None:
        sign, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        if Decimal((sign, digits, exponent + shift)) == other:
            return True
        if len(readings(gold)) == len(readings(answer)) == 1:
            return False
    # imports sympy: only for formulas
    from lowroll.envs import expressions

    golds = list(readings(gold))
    if shift:
        golds = [rf"({reading}) \cdot 10^{{{shift}}}" for reading in golds]
    return any(expressions.equal(*pair) for pair in product(golds, readings(answer)))
