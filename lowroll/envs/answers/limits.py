"""Limits on the size of an answer, checked before it is evaluated.

`refuse_text` checks what the parser itself evaluates; `refuse_tree` bounds the numbers of the
unevaluated tree.
"""

from __future__ import annotations

import re
from math import inf, log2, prod

import sympy

MAX_BITS = 100_000  # bits of a number
MAX_ARGUMENT = 10_000  # largest argument that the parser evaluates
MAX_DEPTH = 20  # nested brackets
MAX_BARS = 16  # bars of absolute values, whose nesting is ambiguous
MAX_ROWS, MAX_ENTRIES = 4, 64  # rows of a determinant, entries of a matrix

EAGER = re.compile(r"\\(binom|Gamma|gcd|lcm|operatorname)(?![A-Za-z])")
ARGUMENT = re.compile(r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|\(([^()]*)\)|(\S))")
ORDINARY = r"a?r?c?(?:sin|cos|tan)h?|gcd|lcm|floor|ceil|log|ln|max|min"
OPERATIONS = re.compile(rf"\\operatorname\*?\{{\s*(?!(?:{ORDINARY})\b)")
MATRIX = re.compile(r"\\begin\{(\w*)matrix\}(.*?)\\end\{", re.DOTALL)
SUBSTITUTION = re.compile(r"\|\s*_")
UNFINISHED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit)


class Costly(ValueError):
    """An answer refused for its size."""


class AnswerTimeout(BaseException):
    """The end of an answer's CPU time; a BaseException, so that no handler swallows it."""


def refuse_text(text: str) -> None:
    """Raise Costly for a text that is nested too deep, or too expensive to parse."""
    depth = 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if depth > MAX_DEPTH:
            raise Costly(f"more than {MAX_DEPTH} brackets deep")
    if text.count("|") > MAX_BARS:
        raise Costly(f"more than {MAX_BARS} bars")
    for command in EAGER.finditer(text):
        num_arguments = 2 if command[1] == "binom" else 1
        if any(map(_is_large, _arguments(text, command.end(), num_arguments))):
            raise Costly(rf"the argument of \{command[1]} is too large")
    if OPERATIONS.search(text) or SUBSTITUTION.search(text):
        raise Costly("an operation that is no final answer")
    for kind, body in MATRIX.findall(text):
        rows = body.count(r"\\") + 1
        is_determinant = kind == "v" or r"\det" in text
        if is_determinant and rows > MAX_ROWS or body.count("&") + rows > MAX_ENTRIES:
            raise Costly("a matrix of this size")


def _arguments(text: str, start: int, count: int) -> list[str]:
    arguments: list[str] = []
    while len(arguments) < count and (match := ARGUMENT.match(text, start)) is not None:
        arguments.append("".join(filter(None, match.groups())))
        start = match.end()
    return arguments


def _is_large(argument: str) -> bool:
    if re.search(r"[\^!\\]", argument.replace(r"\cdot", "").replace(r"\times", "")):
        return True
    return prod(int(digits[:9]) + 1 for digits in re.findall(r"\d+", argument)) > MAX_ARGUMENT


def refuse_tree(tree: object, unfinished: bool = False) -> None:
    """Raise Costly for a too large number or, unless `unfinished`, a sum, an integral or a
    limit."""
    if isinstance(tree, sympy.MatrixBase):
        for entry in tree:
            refuse_tree(entry, unfinished)
    elif isinstance(tree, sympy.Basic):
        if not unfinished and tree.has(*UNFINISHED):
            raise Costly("a sum, an integral or a limit that is left to do")
        if _bits(tree) > MAX_BITS:
            raise Costly(f"a number of more than {MAX_BITS} bits")


def _bits(tree: object) -> float:
    """Return a rough upper bound, in bits, of the largest number in the tree's evaluation."""
    if isinstance(tree, sympy.Rational):
        return log2(max(abs(int(tree.p)), 1)) + log2(int(tree.q))
    if isinstance(tree, sympy.Float):
        return abs(float(sympy.log(abs(tree), 2).evalf(5))) + 1 if tree else 1
    if not isinstance(tree, (sympy.Basic, sympy.MatrixBase)) or not getattr(tree, "args", ()):
        return 2  # symbols get small values
    bits = [_bits(argument) for argument in tree.args]
    if isinstance(tree, (sympy.Pow, sympy.MatPow)):
        base_bits, exponent_bits = bits
        if not base_bits:
            return exponent_bits  # a base of 1 or -1
        exponent = _value_bound(tree.args[1], exponent_bits)
        return max(exponent_bits, base_bits * max(1, exponent))
    if isinstance(tree, sympy.exp):
        return 2 * _value_bound(tree.args[0], bits[0])  # e < 2^2
    if isinstance(tree, (sympy.factorial, sympy.factorial2, sympy.gamma)):
        value = _value_bound(tree.args[0], bits[0])
        return value * log2(value + 2)  # n! < n^n
    if isinstance(tree, sympy.binomial):
        return _value_bound(tree.args[0], bits[0])  # below 2^n
    return sum(bits)


def _value_bound(tree: object, bits: float) -> float:
    if isinstance(tree, sympy.Rational):
        return abs(int(tree.p)) / int(tree.q) if bits < 1000 else inf
    return 2.0**bits if bits < 1000 else inf
