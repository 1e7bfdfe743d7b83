"""An environment class of a notebook or script as a file of its own, which the scoring workers can
import.

Workers are fresh processes that know nothing of a notebook, and nothing is pickled. So the text of
the class is written to a file, with the text of the functions and classes of the notebook that it
uses, imports of what comes from modules, and plain constants. What has no such text (an open
client, a tensor, a lambda) is refused by name: make it in __init__. Not seen is what is changed in
a class or constant after its cell has run and without its name in the class's text.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import hashlib
import inspect
import linecache
import re
import symtable
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowroll.envs.base import Environment

MAIN = "__main__"


def replaced(tree: Any, write: Callable[[type[Environment]], str]) -> Any:
    """A configuration in which `write(class)` stands for every Environment class: as `id`, or alone
    in its place."""
    if isinstance(tree, Mapping):
        found = {
            key: write(value)
            if _is_environment(value) and str(key).rpartition(".")[2] == "id"
            else replaced(value, write)
            for key, value in tree.items()
        }
        return {"name": tree["id"].__name__, **found} if _is_environment(tree.get("id")) else found
    if isinstance(tree, list | tuple):
        return [replaced(value, write) for value in tree]
    return {"id": write(tree), "name": tree.__name__} if _is_environment(tree) else tree


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def as_file(cls: type[Environment], folder: Path) -> tuple[Path, str | None]:
    """The file of an environment class; of a class of a notebook or script the one that it needs in
    `folder`, and the text to write there.

    The file's name has a digest of its text, so no other one is replaced. ValueError when the class
    has no text, or uses what has none.
    """
    if cls.__module__ != MAIN:
        return Path(inspect.getfile(cls)).resolve(), None
    text = source(cls)
    return (
        folder.absolute() / f"{cls.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py",
        text,
    )


def source(cls: type[Environment]) -> str:
    """The text of a module with the class and all that it uses."""
    parts: dict[str, str] = {}
    _collect(cls.__name__, cls, cls.__name__, parts)
    imports = [text for text in parts.values() if text.startswith(("import ", "from "))]
    others = [text for text in parts.values() if text not in imports]
    head = f"# The class {cls.__name__} of a notebook or script, and what it uses; written by lowroll.run."
    if any(
        found.__code__.co_flags & __future__.annotations.compiler_flag
        for found in vars(cls).values()
        if isinstance(found, types.FunctionType)
    ):
        head += "\nfrom __future__ import annotations\n"
    return "\n".join([head, *sorted(imports), "", "\n\n\n".join(others)]) + "\n"


def _collect(name: str, value: object, user: str, parts: dict[str, str]) -> None:
    """Add what defines `name`, after what that needs itself."""
    if name in parts:
        return
    if getattr(value, "__module__", None) == MAIN and isinstance(value, type | types.FunctionType):
        text = _text(value)
        parts[name] = ""  # it may use itself
        known = vars(sys.modules[MAIN])
        for needed in _globals(text):
            if needed in known and (
                needed not in vars(builtins) or known[needed] is not vars(builtins)[needed]
            ):
                _collect(needed, known[needed], value.__name__, parts)
        del parts[name]
        parts[name] = text if value.__name__ == name else f"{text}\n\n{name} = {value.__name__}"
    elif isinstance(value, types.ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, re.Pattern):
        parts["re"] = "import re as re"
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
    elif (home := _home(name, value)) is not None:
        parts[name] = f"from {home[0]} import {home[1]} as {name}"
    elif _is_plain(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise ValueError(
            f"{user} uses {name}, a {type(value).__name__} of the notebook, which has no text to copy: "
            "make it in __init__, or put the environment into a file"
        )


def _home(name: str, value: object) -> tuple[str, str] | None:
    """(module, name) that it can be imported by."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == MAIN:
        return None
    for known in (getattr(value, "__qualname__", None), getattr(value, "_name", None), name):
        if (
            isinstance(known, str)
            and known.isidentifier()
            and getattr(sys.modules.get(module), known, None) is value
        ):
            return module, known
    return None


def _is_plain(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _text(value: type | types.FunctionType) -> str:
    """The text of a class or function of the main module. ValueError when nobody has kept it."""
    if isinstance(value, types.FunctionType):
        functions = [value]
    else:
        functions = [
            found for found in vars(value).values() if isinstance(found, types.FunctionType)
        ]
    file = getattr(sys.modules[MAIN], "__file__", None)
    for name in dict.fromkeys(
        [
            *(function.__code__.co_filename for function in functions),
            *([file] if file else []),
            *reversed(linecache.cache),
        ]
    ):
        lines = linecache.getlines(name)
        lines_of = [node for node in _definitions("".join(lines)) if node.name == value.__name__]
        if lines_of:
            node = lines_of[-1]
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise ValueError(
        f"the text of {value.__qualname__} cannot be found (a plain Python prompt keeps none, and it must "
        "stand at the top level of a cell): put the environment into a file"
    )


def _definitions(text: str) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        body = ast.parse(text).body
    except SyntaxError:  # not Python, such as a cell of magic commands
        return []
    return [
        node
        for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _globals(text: str) -> list[str]:
    """The names that a text takes from the module around it."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        yield from (
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (symbol.is_global() or top and not symbol.is_assigned())
        )
        for inner in table.get_children():
            yield from walk(inner)

    return sorted(set(walk(symtable.symtable(text, "cell", "exec"))))
