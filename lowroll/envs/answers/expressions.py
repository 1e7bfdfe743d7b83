"""Equality of expressions, parsed from LaTeX (latex2sympy).

Rational numbers are compared exactly. Others are evaluated to `DIGITS` digits at points that depend
only on the variables' names: agreement at all means equality (J. Schwartz, "Fast probabilistic
algorithms for verification of polynomial identities", 1980). Nothing is simplified, which could
take long. Sets and logic go to math-verify.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import factorial, prod
from random import Random
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import verify
from sympy.core.function import AppliedUndef

from lowroll.envs.answers.limits import UNFINISHED, AnswerTimeout, Costly, refuse_text, refuse_tree
from lowroll.envs.answers.notation import repeating, ungrouped

log = logging.getLogger(__name__)

DIGITS = 60  # of a value at a point
DIGITS_ALONE = 240  # of a value without variables
AGREE = 2 / 3  # share of the digits in which equal values agree
ROUNDED = 6  # significant digits of a decimal for an irrational number
POINTS = 3
CONFIG = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
# the parser takes these for functions
GAMMA = re.compile(r"\\(gamma(?![A-Za-z])|Gamma(?![A-Za-z])(?!\s*\())")
ENERGY = re.compile(r"(?<![A-Za-z\\])E(?=\s*_)")  # E_1 is not Euler's number
# and 3(\frac12) is no mixed number
FACTOR = re.compile(
    r"((?<![A-Za-z\\])[A-Za-z]\s*\^\s*(?:\{[^{}-]*\}|\w)|"  # x^2(y+1) is no function of y+1,
    r"(?<![_^\d.])\d+(?:\.\d+)?)\s*\("
)
DECIMAL = re.compile(r"-?\d*\.\d+")
MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)")


class GoldError(Exception):
    """A gold answer that cannot be parsed in time."""


def equal(gold: str, answer: str) -> bool:
    """Return whether two formulas are equal.

    A gold answer too large to evaluate equals only its own spelling; one that cannot be parsed
    equals nothing. The parser's errors for an answer pass.
    """
    fold = _can_ignore_case(gold, answer)
    gold_tree = _gold_tree(gold, fold)
    if gold_tree is None:
        return False
    try:
        refuse_tree(gold_tree, unfinished=True)
    except Costly:
        return same_tree(gold_tree, _parse(answer, fold))
    answer_tree = _parse(answer, fold)
    refuse_tree(answer_tree, unfinished=_is_unfinished(gold_tree))
    are_equal = compare(gold_tree, answer_tree)
    if are_equal is None:
        return verified(gold_tree, answer_tree)
    return are_equal or rounds_to(answer, gold_tree) or rounds_to(gold, answer_tree)


def proportion(gold: Sequence[str], answer: Sequence[str]) -> float | None:
    r"""Return the sign of the constant factor between two equations or inequalities, given by their
    sides, or None: 1.0 for `2x = 4` and `x = 2`. An equation of numbers alone must be spelled
    alike."""
    fold = _can_ignore_case(" ".join(gold), " ".join(answer))
    gold_trees = [_gold_tree(side, fold) for side in gold]
    if not all(isinstance(tree, sympy.Expr) for tree in gold_trees):
        return None
    answer_trees = [_parse(side, fold) for side in answer]
    for tree in (*gold_trees, *answer_trees):
        refuse_tree(tree)
    has_variables = any(tree.free_symbols or tree.has(AppliedUndef) for tree in gold_trees)
    if not has_variables:
        for sides in (answer_trees, answer_trees[::-1]):
            if all(map(same_tree, gold_trees, sides)):
                return 1.0
        return None
    gold_difference = _difference(*gold_trees)
    answer_difference = _difference(*answer_trees)
    factor = _constant_ratio(gold_difference, answer_difference)
    if factor is not None:
        return factor
    # Equations with proportional numerators have the same solutions: `1/x = 2` and `1 = 2x`. The
    # denominators of inequalities count as positive.
    return _constant_ratio(_numerator(gold_difference), _numerator(answer_difference))


def _difference(left: Any, right: Any) -> Any:
    """Return left - right, unevaluated, as an evaluation could take long."""
    return sympy.Add(left, sympy.Mul(-1, right, evaluate=False), evaluate=False)


def _numerator(tree: Any) -> Any:
    return sympy.fraction(sympy.together(tree))[0]


def _can_ignore_case(gold: str, answer: str) -> bool:
    """Return whether no text has a letter in both cases, apart from the constants e and i."""
    for text in (gold, answer):
        letters = set(re.sub(r"\\[A-Za-z]+", "", text)) - set("eEiI")
        if any(letter.isupper() and letter.lower() in letters for letter in letters):
            return False
    return True


def _gold_tree(text: str, fold: bool) -> Any:
    try:
        return _parse(text, fold)
    except AnswerTimeout as error:
        raise GoldError(f"the gold answer takes too long to read: {text[:80]!r}") from error
    except Exception as error:  # the parser has no exception class of its own
        log.debug("gold answer %r is compared as text: %s", text, error)
        return None


@lru_cache(maxsize=4096)
def _parse(text: str, fold: bool) -> Any:
    refuse_text(text)
    text = ungrouped(text)
    text = GAMMA.sub(lambda found: rf"\mbox{{{found[1][0]}amma variable}}", text)
    text = ENERGY.sub(r"\\mbox{E variable}", text).replace(r"\odot", "odot")
    text = MIXED.sub(r"(\1+\\frac{\2}{\3})", repeating(text).replace("%", r"\%"))
    text = FACTOR.sub(r"\1\\cdot (", text)
    reader = _Reader(is_real=True, config=ConversionConfig(lowercase_symbols=fold))
    return reader.parse(normalize_latex(text, CONFIG))


class _Reader(_Latex2Sympy):
    """latex2sympy without sympy's `sympify`, an `eval`, for numbers."""

    def parse_number(self, text: str) -> Any:
        """Return an integer or Float; ValueError for anything else."""
        text = text.replace(",", "")
        if text.isascii() and text.isdigit():
            return sympy.Integer(int(text))
        return sympy.Float(text)


def _is_unfinished(tree: Any) -> bool:
    return isinstance(tree, sympy.Basic) and tree.has(*UNFINISHED)


def exact(tree: Any) -> Fraction | None:
    """Return the exact value of a tree of rational numbers; None for any other tree."""
    if isinstance(tree, sympy.Rational):
        return Fraction(int(tree.p), int(tree.q))
    if isinstance(tree, sympy.Float):
        return Fraction(str(tree))
    if isinstance(tree, sympy.factorial):
        value = exact(tree.args[0])
        if value is not None and value.denominator == 1 and value >= 0:
            return Fraction(factorial(int(value)))
        return None
    if not isinstance(tree, (sympy.Add, sympy.Mul, sympy.Pow, sympy.UnevaluatedExpr)):
        return None
    values = []
    for argument in tree.args:
        if (value := exact(argument)) is None:
            return None
        values.append(value)
    if isinstance(tree, sympy.Pow):
        base, power = values
        if power.denominator != 1 or (base == 0 and power <= 0):
            return None
        return base ** int(power)
    if isinstance(tree, sympy.UnevaluatedExpr):
        return values[0]
    if isinstance(tree, sympy.Mul):
        return prod(values, start=Fraction(1))
    return sum(values, start=Fraction(0))


def same_tree(a: Any, b: Any) -> bool:
    """Return whether two trees are equal up to the order of summands and factors."""
    return a == b or _canonical_order(a) == _canonical_order(b)


def _canonical_order(tree: Any) -> Any:
    ordered_args = [_canonical_order(argument) for argument in getattr(tree, "args", ())]
    if isinstance(tree, (sympy.Add, sympy.Mul)):
        ordered_args.sort(key=repr)
    if not ordered_args:
        return type(tree).__name__, str(tree)
    return (type(tree).__name__, *ordered_args)


def compare(a: Any, b: Any) -> bool | None:
    """Return whether two trees are equal; None when numbers cannot decide."""
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        if a.shape != b.shape:
            return False
        entry_verdicts = [compare(x, y) for x, y in zip(a, b, strict=True)]
        if False in entry_verdicts:
            return False
        return None if None in entry_verdicts else True
    are_expressions = isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)
    if not are_expressions or _is_unfinished(a) or _is_unfinished(b):
        return None
    exact_a = exact(a)
    exact_b = exact(b)
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b
    pairs = _value_pairs(a, b)
    digits = DIGITS if len(pairs) > 1 else DIGITS_ALONE
    verdicts = [_values_agree(u, v, digits) for u, v in pairs if u is not None and v is not None]
    if False in verdicts:
        return False
    both_defined_at_most_points = len(verdicts) > len(pairs) // 2
    return True if both_defined_at_most_points else None


def _constant_ratio(a: Any, b: Any) -> float | None:
    """Return the sign of a / b if it is the same at two points or more, else None."""
    ratios = []
    for a_value, b_value in _value_pairs(a, b):
        if a_value is None or b_value is None:
            continue
        if _is_zero(a_value) or _is_zero(b_value):
            return None  # an equation that always holds
        ratios.append(a_value / b_value)
    if len(ratios) < 2 or any(_values_agree(ratio, ratios[0]) is not True for ratio in ratios[1:]):
        return None
    return float(sympy.sign(sympy.re(ratios[0])))


def begins(text: str, number: str) -> bool:
    """Return whether a decimal begins or rounds a number without finite decimals: 0.666666 or
    0.666667 for 2/3."""
    if DECIMAL.fullmatch(text) is None:
        return False
    tree = _parse(number, True)
    refuse_tree(tree)
    return rounds_to(text, tree, cut=True)


def rounds_to(text: str, tree: Any, cut: bool = False) -> bool:
    """Return whether a decimal of at least ROUNDED significant digits rounds a number without
    finite decimals. `cut`: rounding towards zero counts too."""
    significant_digits = text.replace(".", "").lstrip("-0")
    if DECIMAL.fullmatch(text) is None or len(significant_digits) < ROUNDED:
        return False
    value = _endless_value(tree)
    if value is None:
        return False
    num_decimals = len(text.partition(".")[2])
    difference = (value - Fraction(text)) * 10**num_decimals  # in units of the last digit
    if abs(difference) * 2 <= 1:
        return True
    missing_from_text = difference if value > 0 else -difference
    return cut and 0 < missing_from_text < 1


def _endless_value(tree: Any) -> Fraction | None:
    value = exact(tree)
    if value is not None:
        return None if _is_decimal(value) else value
    if not isinstance(tree, sympy.Expr) or tree.free_symbols:
        return None
    number = _value_at(_as_evaluable(tree), {}, DIGITS)
    if number is None or not number.is_real:
        return None
    return Fraction(str(number))


def _is_decimal(value: Fraction) -> bool:
    remaining = value.denominator
    for prime in (2, 5):
        while remaining % prime == 0:
            remaining //= prime
    return remaining == 1


def verified(gold: Any, answer: Any) -> bool:
    if any(
        isinstance(tree, sympy.Basic) and tree.has(sympy.nan, sympy.zoo) for tree in (gold, answer)
    ):
        return False
    return bool(
        verify(
            gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True
        )
    )


def _value_pairs(a: Any, b: Any) -> list[tuple[Any, Any]]:
    a = _as_evaluable(a)
    b = _as_evaluable(b)
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols} - {"i"})
    if not names:
        return [(_value_at(a, {}, DIGITS_ALONE), _value_at(b, {}, DIGITS_ALONE))]
    value_pairs = []
    for point in range(POINTS):
        coordinates = {name: _coordinate(name, point) for name in names}
        value_pairs.append((_value_at(a, coordinates, DIGITS), _value_at(b, coordinates, DIGITS)))
    return value_pairs


def _coordinate(name: str, point: int) -> Any:
    rng = Random(f"{name}/{point}")
    value = sympy.Rational(rng.randrange(25_000, 400_000), 100_003)
    if point and rng.random() < 0.5:
        return -value
    return value


def _as_evaluable(tree: Any) -> Any:
    unknown = {
        subtree: sympy.Symbol(str(subtree))
        for subtree in tree.atoms(AppliedUndef, sympy.Derivative)
    }
    decimals = {subtree: sympy.Rational(str(subtree)) for subtree in tree.atoms(sympy.Float)}
    if not unknown and not decimals:
        return tree
    return tree.xreplace(unknown | decimals)


def _value_at(tree: Any, point: Mapping[str, Any], digits: int) -> Any:
    substitutions = {
        symbol: sympy.I if symbol.name == "i" else point[symbol.name]
        for symbol in tree.free_symbols
    }
    value = tree.evalf(digits, subs=substitutions, maxn=4 * digits)
    if not (value.is_number and value.is_finite):
        return None
    is_evaluated = all(
        component.is_Float or component.is_Integer or component.is_Rational
        for component in value.as_real_imag()
    )
    return value if is_evaluated else None


def _is_zero(value: Any) -> bool:
    return all(part == 0 or part.is_Float and part._prec < 60 for part in value.as_real_imag())


def _values_agree(u: Any, v: Any, digits: int = DIGITS) -> bool:
    if _is_zero(u) and _is_zero(v):
        return True
    u_real, u_imaginary = u.as_real_imag()
    v_real, v_imaginary = v.as_real_imag()
    largest = max(abs(u_real), abs(u_imaginary), abs(v_real), abs(v_imaginary))
    difference = max(abs(u_real - v_real), abs(u_imaginary - v_imaginary))
    return bool(difference < largest * sympy.Rational(1, 10 ** int(AGREE * digits)))
