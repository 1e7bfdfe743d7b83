r"""The form of a final answer (list, set, tuple or interval, union, relation, expression).

Forms are compared part by part: brackets must match, tuples keep their order, lists and sets are
multisets. `x \ge 3` is the interval `[3,\infty)`; `1 \pm \sqrt 2` is a list of two. `1,2` is not
the point `(1,2)`, but `x=1, y=2` is. An implication equals only another with equal sides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from itertools import product

from lowroll.envs.answers.notation import (
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

MAX_PARTS = 40  # unmatched, of an unordered list
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
    """Cut a text at separators outside of all brackets; return the pieces and the separators."""
    parts = []
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
            parts.append(text[start : token.start()])
            separators.append(sign)
            start = token.end()
    if depth != 0:
        return [text], []
    return [*parts, text[start:]], separators


def wrapped(text: str) -> tuple[str, str] | None:
    """Return (brackets, inside) of a text in one pair of brackets, or None."""
    opening = TOKEN.match(text)
    if opening is None:
        return None
    depth = 0
    for token in TOKEN.finditer(text):
        sign = token[0]
        depth += sign in ("(", "[", "{", r"\{")
        depth -= sign in (")", "]", "}", r"\}")
        if depth <= 0:  # closes the first bracket, or the first sign is none
            if token.start() == 0 or token.end() < len(text):
                return None
            return opening[0] + sign, text[opening.end() : token.start()]
    return None


@lru_cache(maxsize=4096)
def form(text: str) -> Form:
    """Return the form of a tidy text.

    The outermost structure counts: a pair of brackets, then an implication, a union, a list, a
    relation.
    """
    text = text.strip()
    if (pair := wrapped(text)) is not None:
        bracketed_form = _bracketed_form(*pair)
        if bracketed_form is not None:
            return bracketed_form
    sides, arrows = pieces(text, IMPLIES)
    if arrows:
        return Form("implication", tuple(map(str.strip, sides)), " ".join(arrows))
    union_parts, _ = pieces(text, CUP)
    if len(union_parts) > 1:
        return Form("union", tuple(map(str.strip, union_parts)))
    values = _list_values(text)
    if len(values) > 1:
        are_intervals = all(_is_interval(form(value)) for value in values)
        return Form("union" if are_intervals else "list", values)
    return _relation_form(text) or Form("leaf", (text,))


def _bracketed_form(brackets: str, inside: str) -> Form | None:
    r"""Return the form of a text in one pair of brackets, or None. `\{x | x > 3\}` is the interval
    of its condition."""
    if brackets == r"\{\}":
        variable_and_condition, _ = pieces(inside, BAR)
        if len(variable_and_condition) == 2:
            condition_form = form(variable_and_condition[1])
            return condition_form if _is_interval(condition_form) else None
        return Form("set", _list_values(inside, braces=True))
    if brackets == "{}":
        return form(inside)
    parts = [part.strip() for part in pieces(inside, COMMA)[0]]
    if len(parts) > 1 and all(parts):
        return Form("tuple", tuple(parts), brackets)
    return form(inside) if brackets == "()" else None


def _is_interval(found: Form) -> bool:
    return found.kind == "tuple" and bool(found.name)


def _list_values(text: str, braces: bool = False) -> tuple[str, ...]:
    return tuple(part for piece in _split_list(text, braces) for part in _expand_signs(piece))


def _split_list(text: str, braces: bool) -> list[str]:
    """Split a list. A comma between digits is in a number if other commas are followed by
    spaces."""
    if not braces and quantity(without_unit(ASSIGNED.sub("", text))[0]) is not None:
        return [text]
    spaced = re.search(r",\s", text) is not None
    protected = THOUSANDS.sub("\0", text) if spaced else text
    parts = [part.replace("\0", ",").strip() for part in pieces(protected, COMMA)[0]]
    return [part for part in parts if part] or [text]


def _expand_signs(text: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return [text]
    return [
        re.sub(r"\\pm(?![A-Za-z])", pm, re.sub(r"\\mp(?![A-Za-z])", mp, text))
        .strip()
        .removeprefix("+")
        for pm, mp in ("+-", "-+")
    ]


def _relation_form(text: str) -> Form | None:
    r"""Return the form of a text with relation signs, or None.

    `x \in [1,2]` and `x = (1,2)` are the value with its name. `\frac13 \approx 0.33` is the value
    before the sign.
    """
    untrimmed_sides, operators = pieces(text, RELATION)
    sides = [side.strip() for side in untrimmed_sides]
    if not operators or not all(sides):
        return None
    first_is_name = NAME.fullmatch(sides[0]) is not None
    if r"\approx" in operators:
        num_kept = operators.index(r"\approx") + 1
        if num_kept == 1 and first_is_name:  # a name belongs to the value after it
            num_kept = 2
        return form("=".join(sides[:num_kept]))
    name = squeezed(sides[0]) if first_is_name else ""
    if operators[0] == r"\in" and first_is_name:
        return replace(form(text.partition(r"\in")[2]), name=name)
    if set(operators) == {"="} and first_is_name:
        value_form = form(sides[-1])
        if value_form.kind != "leaf":
            return replace(value_form, name=name)
    interval = _interval_form(sides, operators)
    return interval or Form("relation", tuple(sides), " ".join(operators), name)


def _interval_form(sides: list[str], operators: list[str]) -> Form | None:
    if operators[0] not in FLIPPED:
        return None
    if operators[0] not in BELOW:
        sides = sides[::-1]
        operators = [FLIPPED.get(sign, sign) for sign in operators[::-1]]
    if any(sign not in BELOW for sign in operators):
        return None
    opening = "[" if operators[0] == r"\leq" else "("
    closing = "]" if operators[-1] == r"\leq" else ")"
    is_constant = [CONSTANT.fullmatch(side) is not None for side in sides]
    if is_constant == [True, False, True]:
        low, variable, high = sides
    elif is_constant == [False, True]:
        variable, high = sides
        low, opening = r"-\infty", "("
    elif is_constant == [True, False]:
        low, variable = sides
        high, closing = r"\infty", ")"
    else:
        return None
    if not NAME.fullmatch(variable):
        return None
    return Form("tuple", (low, high), opening + closing, squeezed(variable))


def matches(gold: str, answer: str, ordered: bool = False) -> bool:
    """Return whether two texts state the same answer. `ordered`: the order of a list counts. The
    answer to a multiple choice, `(B) 12`, may be the letter or the text."""
    gold = tidy(gold)
    answer = tidy(answer)
    if squeezed(gold) == squeezed(answer):
        return True
    if not answer or r"\boxed{" in answer:
        return False
    gold_letter, gold_text = choice(gold) or ("", gold)
    # a letter before a text may be part of a formula, unless it is in brackets
    is_choice = gold_letter and (not gold_text or LETTERED.match(gold))
    if is_choice:
        answer_letter, _ = choice(answer) or ("", answer)
        if answer_letter == gold_letter:
            return True
        return gold_text != "" and matches(gold_text, answer)
    return _same_form(form(gold), form(answer), ordered)


def _same_form(gold: Form, answer: Form, ordered: bool) -> bool:
    kinds = {gold.kind, answer.kind}
    have_names = gold.name and answer.name
    if have_names and gold.name != answer.name and "relation" not in kinds:
        return False
    if kinds == {"tuple"} or kinds == {"implication"}:
        return gold.signs == answer.signs and _match_pairwise(gold.parts, answer.parts)
    if kinds == {"tuple", "list"}:  # the point `(1,2)` and its coordinates `x=1, y=2`
        point, values = (gold, answer) if gold.kind == "tuple" else (answer, gold)
        if point.signs != "()" or point.name or not _are_coordinates(values.parts):
            return False
        return _match_pairwise(gold.parts, answer.parts)
    if kinds <= {"list", "set", "union"}:
        if ordered and gold.kind == "list":
            return _match_pairwise(gold.parts, answer.parts)
        return _same_multiset(gold.parts, answer.parts)
    if "relation" in kinds:
        return _same_relation(gold, answer)
    if gold.kind == "leaf" and answer.kind == "list":
        return all(matches(gold.parts[0], part) for part in answer.parts)
    return kinds == {"leaf"} and same_leaf(gold.parts[0], answer.parts[0])


def _are_coordinates(parts: tuple[str, ...]) -> bool:
    names = [form(part).name for part in parts]
    return all(names) and len(set(names)) == len(names)


def _match_pairwise(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    return len(gold) == len(answer) and all(map(matches, gold, answer))


def _same_multiset(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    if len(gold) != len(answer):
        return False
    unmatched_answers = list(answer)
    unmatched_gold = []
    for part in gold:
        same_spelling = next(
            (other for other in unmatched_answers if squeezed(part) == squeezed(other)), None
        )
        if same_spelling is None:
            unmatched_gold.append(part)
        else:
            unmatched_answers.remove(same_spelling)
    if len(unmatched_gold) > MAX_PARTS:
        raise ValueError(f"a list of more than {MAX_PARTS} parts")
    for part in unmatched_gold:
        match = next((other for other in unmatched_answers if matches(part, other)), None)
        if match is None:
            return False
        unmatched_answers.remove(match)
    return True


def _same_relation(gold: Form, answer: Form) -> bool:
    """Return whether two relations, or a relation and a value, are equal: `x = 5` and `2 + 3 = 5`
    equal 5, `4 = 5` does not. A gold `2 + 3 = 5` has no name, and 5 does not equal it."""
    if answer.kind != "relation":
        if not gold.name or not _is_equation_and_value(gold, answer):
            return False
        return all(matches(side, answer.parts[0]) for side in _stated_values(gold))
    if gold.kind != "relation":
        if not _is_equation_and_value(answer, gold):
            return False
        return all(matches(gold.parts[0], side) for side in _stated_values(answer))
    if gold.name and gold.name == answer.name and gold.signs[0] == answer.signs[0] == "=":
        return matches(gold.parts[-1], answer.parts[-1])
    gold = _ascending(gold)
    answer = _ascending(answer)
    if gold.signs != answer.signs:
        return False
    if len(gold.parts) > 2:
        return _match_pairwise(gold.parts, answer.parts)
    from lowroll.envs.answers import expressions

    factor = expressions.proportion(gold.parts, answer.parts)
    may_be_negative = gold.signs in ("=", r"\neq")  # a negative factor turns an inequality
    return factor is not None and (factor > 0 or may_be_negative)


def _is_equation_and_value(relation: Form, other: Form) -> bool:
    return other.kind == "leaf" and set(relation.signs.split()) == {"="}


def _stated_values(equation: Form) -> list[str]:
    """Return what an equation says its name equals: the last side, and numbers before it."""
    sides = equation.parts[1:] if equation.name else equation.parts
    numbers = [side for side in sides[:-1] if CONSTANT.fullmatch(side)]
    return [*numbers, sides[-1]]


def _ascending(relation: Form) -> Form:
    signs = relation.signs.split()
    if not all(sign in FLIPPED and sign not in BELOW for sign in signs):
        return relation
    return replace(
        relation, parts=relation.parts[::-1], signs=" ".join(FLIPPED[sign] for sign in signs[::-1])
    )


def same_leaf(gold: str, answer: str) -> bool:
    """Return whether two leaves are equal, by the first kind that applies: times, words, numerals,
    numbers, expressions."""
    if squeezed(gold) == squeezed(answer):
        return True
    if DOTS in gold or DOTS in answer:
        return _is_truncation(gold, answer) or _is_truncation(answer, gold)
    for same_as_kind in (_same_time, _same_words, _same_numeral):
        verdict = same_as_kind(gold, answer)
        if verdict is not None:
            return verdict
    return _same_amount(gold, answer)


def _same_time(gold: str, answer: str) -> bool | None:
    gold_time = clock(gold)
    answer_time = clock(answer)
    if gold_time is None or answer_time is None:
        return None
    halves = {gold_time[2], answer_time[2]}
    return gold_time[:2] == answer_time[:2] and (len(halves) == 1 or "" in halves)


def _same_words(gold: str, answer: str) -> bool | None:
    gold_phrase = words(gold)
    if gold_phrase is not None:
        return gold_phrase == words(answer, beside_words=True)
    answer_phrase = words(answer)
    is_same = answer_phrase is not None and answer_phrase == words(gold, beside_words=True)
    return True if is_same else None


def _same_numeral(gold: str, answer: str) -> bool | None:
    gold_numeral = numeral(gold)
    answer_numeral = numeral(answer)
    if gold_numeral is None and answer_numeral is None:
        return None
    return gold_numeral == answer_numeral


def _same_amount(gold: str, answer: str) -> bool:
    gold, gold_unit_powers = without_unit(gold)
    answer, answer_unit_powers = without_unit(answer)
    if gold_unit_powers and answer_unit_powers and gold_unit_powers != answer_unit_powers:
        return False
    gold, gold_exponent = scaled(gold)
    answer, answer_exponent = scaled(answer)
    gold = without_unit(gold)[0]
    answer = without_unit(answer)[0]
    if same_value(gold, answer):
        return True
    shift = gold_exponent - answer_exponent
    return shift != 0 and same_value(gold, answer, shift)


def _is_truncation(text: str, other: str) -> bool:
    if not text.endswith(DOTS) or DOTS in other:
        return False
    from lowroll.envs.answers import expressions

    return expressions.begins(text.removesuffix(DOTS).strip(), other)


def same_value(gold: str, answer: str, shift: int = 0) -> bool:
    """Return whether `gold` times 10^shift equals `answer`, in any of their readings."""
    gold_number = quantity(gold)
    answer_number = quantity(answer)
    gold_readings = readings(gold)
    answer_readings = readings(answer)
    if gold_number is not None and answer_number is not None:
        sign, digits, exponent = gold_number.as_tuple()
        assert isinstance(exponent, int)
        if Decimal((sign, digits, exponent + shift)) == answer_number:
            return True
        if len(gold_readings) == len(answer_readings) == 1:
            return False
    from lowroll.envs.answers import expressions

    if shift:
        gold_readings = [rf"({reading}) \cdot 10^{{{shift}}}" for reading in gold_readings]
    return any(expressions.equal(*pair) for pair in product(gold_readings, answer_readings))
