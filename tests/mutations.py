"""What a mutant is: one changed operator, comparison, constant or condition of one file of the
package.

Left out, because no test should see them: annotations, strings, what only makes text (raise,
f-strings, logs, prints, `__repr__`), asserts, `strict` and `frozen` (they state what never is
otherwise), hints to a device, and what runs for a type checker alone. `mutants.toml` names the few
others, each with its reason.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
COMPARISON: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
SAYING = {
    "print",
    "warn",
    "warning",
    "info",
    "debug",
    "error",
    "exception",
}  # calls that only make text
UNTYPED = {"annotation", "returns", "type_params"}
STATED = {"strict", "frozen", "non_blocking", "pin_memory"}  # keywords of calls
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SHOWN = 90  # characters of code shown around a change


@dataclass(frozen=True)
class Mutant:
    """The `change`-th change of the tree's `place`-th node; `function` is "" for what runs at
    import."""

    file: str
    function: str
    line: int
    before: str
    after: str
    place: int
    change: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"

    def rank(self, seed: int) -> bytes:
        """Its place in a sample: what changes elsewhere in the code does not move it."""
        return hashlib.sha256(
            f"{seed} {self.file} {self.function} {self.before} {self.after}".encode()
        ).digest()


def changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """(attribute, its new value) of every change of one node."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in BINARY:
            yield "op", BINARY[type(op)]()
        case ast.BoolOp(op=op):
            yield "op", ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARISON[type(op)]:
                    yield "ops", [*ops[:i], other(), *ops[i + 1 :]]
        case ast.Constant(value=bool(value)):
            yield "value", not value
        case ast.Constant(value=int(value)):
            yield "value", value + 1
        case ast.Constant(value=float(value)):
            yield "value", 2 * value or 1.0
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            pass  # the last of two dimensions is also the first from the left
        case ast.UnaryOp(op=ast.USub()):
            yield "op", ast.UAdd()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "operand", ast.UnaryOp(ast.Not(), operand)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not _changes_itself(
            test
        ):
            yield "test", ast.UnaryOp(ast.Not(), test)
        case ast.comprehension(ifs=ifs):
            for i, test in enumerate(ifs):
                if not _changes_itself(test):
                    yield "ifs", [*ifs[:i], ast.UnaryOp(ast.Not(), test), *ifs[i + 1 :]]


def _changes_itself(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare | ast.BoolOp | ast.Constant) or (
        isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    )


def mutants(source: str, file: str) -> list[Mutant]:
    """Every mutant of one file, in the order of its tree."""
    found = []
    for place, (node, function, context) in enumerate(_nodes(ast.parse(source), "", ())):
        for change, (attribute, new) in enumerate(changes(node)):
            old, before = getattr(node, attribute), _text(context)
            setattr(node, attribute, new)
            line = getattr(node, "lineno", getattr(context, "lineno", 0))
            found.append(Mutant(file, function, line, before, _text(context), place, change))
            setattr(node, attribute, old)
    return found


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The tree of the changed file."""
    tree = ast.parse(source)
    node = list(_nodes(tree, "", ()))[mutant.place][0]
    attribute, new = list(changes(node))[mutant.change]
    setattr(node, attribute, new)
    return ast.fix_missing_locations(tree)


def _nodes(
    node: ast.AST,
    function: str,
    scope: tuple[str, ...],
    context: ast.AST | None = None,
) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """(node, the outermost function or method around it, the code to show) of all that may
    change."""
    if _silent(node):
        return
    small = isinstance(node, ast.expr | ast.stmt | ast.comprehension) and len(_text(node)) <= SHOWN
    shown = context or (node if small else None)
    yield node, function, shown or node
    if isinstance(node, ast.arguments):
        for name, default in _defaults(node):
            yield from _nodes(default, function, scope, ast.keyword(name, default))
        return
    for field, value in ast.iter_fields(node):
        if field in UNTYPED:
            continue
        inner, names = function, scope
        if field == "body" and isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            names = (*scope, node.name)
            inner = function or (".".join(names) if isinstance(node, FUNCTION) else "")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _nodes(
                    child, inner, names, None if isinstance(child, ast.stmt) else shown
                )


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    known = [*arguments.posonlyargs, *arguments.args]
    for arg, default in (
        *zip(known[len(known) - len(arguments.defaults) :], arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ):
        if default is not None:
            yield arg.arg, default


def _silent(node: ast.AST) -> bool:
    match node:
        case ast.keyword(arg=name):
            return name in STATED
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in SAYING
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'")
    return False


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        return f"{'if' if isinstance(node, ast.If) else 'while'} {ast.unparse(node.test)}"
    return ast.unparse(node).split("\n")[0]


@dataclass(frozen=True)
class Excuse:
    """Mutants that are not counted: all of a function of a file, or all on the lines that contain a
    text."""

    file: str
    why: str
    function: str = ""
    text: str = ""

    def covers(self, mutant: Mutant, lines: list[str]) -> bool:
        inside = not self.function or mutant.function == self.function
        return mutant.file == self.file and inside and self.text in lines[mutant.line - 1]


def excuses(path: Path) -> list[Excuse]:
    """The table of `mutants.toml`."""
    entries = tomllib.loads(path.read_text())["excuse"] if path.exists() else []
    return [Excuse(**entry) for entry in entries]
