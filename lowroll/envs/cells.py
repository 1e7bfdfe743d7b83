"""Files for classes, functions and rows that a notebook or script puts into its settings.

Scoring workers are fresh processes without pickle, so the text of a class or function is written to
a file with the functions, classes, imports and plain constants that it uses. Values without text
(an open client, a tensor, a lambda) are refused by name. Rows become JSON lines. Changes after a
cell ran go unnoticed unless the class's text names them.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import hashlib
import inspect
import json
import linecache
import re
import symtable
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowroll.envs.base import Environment
from lowroll.envs.data.columns import ODD, plain
from lowroll.envs.data.rows import TEST_SPLITS

MAIN = "__main__"
ROWS = ("data", "path", "test_path")  # keys whose values may be rows


@dataclass(frozen=True)
class CellReference:
    """A settings value's id or path, and the file to write for it."""

    id: str
    file: Path | None = None
    text: str = ""


def replaced(tree: Any, write: Callable[[Any], str]) -> Any:
    """Replace Environment classes (as `id` or alone), functions, and rows at their keys by
    `write(value)`."""
    if isinstance(tree, Mapping):
        found = {key: _value(str(key).rpartition(".")[2], tree[key], write) for key in tree}
        return {"name": tree["id"].__name__, **found} if _is_environment(tree.get("id")) else found
    if isinstance(tree, list | tuple):
        return [replaced(value, write) for value in tree]
    if callable(tree) and not isinstance(tree, type):
        return write(tree)
    return {"id": write(tree), "name": tree.__name__} if _is_environment(tree) else tree


def _value(key: str, value: Any, write: Callable[[Any], str]) -> Any:
    if _is_environment(value) and key == "id":
        return write(value)
    if isinstance(value, Path):
        return str(value)
    if key in ROWS and value is not None and not isinstance(value, str | Mapping):
        return write(value)
    if key == "data" and isinstance(value, Mapping) and "train" in value:  # several splits
        test = next((name for name in TEST_SPLITS if name in value), None)
        beside = {} if test is None else {"test_path": write(value[test])}
        return {"path": write(value["train"]), **beside}
    return replaced(value, write)


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def named(value: Any, folder: Path) -> CellReference:
    """Return the id of a class or function, or the path of rows, with its file in `folder`, named
    by a digest.

    ValueError without text, also of something it uses, or without a name to find it.
    """
    if not callable(value):
        return _as_rows(value, folder)
    if isinstance(value, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return _as_definition(value, folder)
    return _as_object(value, folder)


def _as_definition(value: Any, folder: Path) -> CellReference:
    if not isinstance(value, type):
        _refuse_nameless(value)
        module = sys.modules.get(value.__module__)
        if getattr(module, "__package__", ""):
            return CellReference(f"{value.__module__}:{value.__name__}")
    path, text = as_file(value, folder)
    return CellReference(
        f"{path}:{value.__qualname__}", path if text is not None else None, text or ""
    )


def as_file(value: type[Environment] | types.FunctionType, folder: Path) -> tuple[Path, str | None]:
    """Return (file, None) for an importable class or function, else a file in `folder` and its
    text."""
    if value.__module__ != MAIN:
        return Path(inspect.getfile(value)).resolve(), None
    text = source(value)
    return _file(folder, value.__name__, text, ".py"), text


def _as_object(value: Callable[..., Any], folder: Path) -> CellReference:
    """Return the reference of a callable object: its name in a module, or a partial's parts."""
    function = value.func if isinstance(value, functools.partial) else None
    if (home := _holder(value)) is not None:
        module, name = home
        if module.__name__ != MAIN:
            file = getattr(module, "__file__", None)
            alone = file is not None and not getattr(module, "__package__", "")
            return CellReference(
                f"{Path(str(file)).resolve() if alone else module.__name__}:{name}"
            )
        text = _object_source(name)
    elif isinstance(function, types.FunctionType):
        _refuse_nameless(function)
        name, text = function.__name__, _partial_source(value)
    else:
        raise ValueError(
            f"reward_funcs: {value!r} has no name by which the scoring workers could find it: give "
            f"it one at the top level, as in judge = {type(value).__name__}(...)"
        )
    path = _file(folder, name, text, ".py")
    return CellReference(f"{path}:{name}", path, text)


def _holder(value: object) -> tuple[types.ModuleType, str] | None:
    """Return (module, name) of a global that holds an object, the main module last."""
    modules = sorted(sys.modules.items(), key=lambda item: item[0] == MAIN)
    for _, module in modules:
        if isinstance(module, types.ModuleType):
            for name, held in list(vars(module).items()):
                if held is value and name.isidentifier() and not name.startswith("_"):
                    return module, name
    return None


def _object_source(name: str) -> str:
    """Return the module text of a main-module object."""
    parts: dict[str, str] = {}
    known = vars(sys.modules[MAIN])
    text = _assignment(name)
    for needed in _globals(text):
        if needed in known:
            _collect(needed, known[needed], name, parts)
    parts[name] = text
    return _module_text(name, parts, False)


def _partial_source(value: Any) -> str:
    function, parts = value.func, {"functools": "import functools as functools"}
    name = function.__name__
    given = [*map(repr, value.args), *(f"{key}={value.keywords[key]!r}" for key in value.keywords)]
    if odd := [one for one in (*value.args, *value.keywords.values()) if not _is_plain(one)]:
        raise ValueError(
            f"reward_funcs: {name} is given {odd[0]!r}, which has no text to copy: make the partial "
            "function at the top level of a file, under a name"
        )
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ != MAIN and file and not getattr(module, "__package__", ""):
        folder = str(Path(file).resolve().parent)
        parts["sys"] = f"import sys as sys\n\nsys.path.append({folder!r})"
    _collect(name, function, name, parts)
    parts[f"{name}()"] = f"{name} = functools.partial({', '.join([name, *given])})"
    return _module_text(name, parts, _has_annotations(function))


def _assignment(name: str) -> str:
    """Return the last top-level statement of the main module that assigns a name."""
    file = getattr(sys.modules[MAIN], "__file__", None)
    for held in dict.fromkeys([*([file] if file else []), *reversed(linecache.cache)]):
        lines = linecache.getlines(held)
        found = [node for node in _statements("".join(lines)) if name in _targets(node)]
        if found:
            return "".join(lines[found[-1].lineno - 1 : found[-1].end_lineno]).rstrip()
    raise ValueError(
        f"the text of {name} cannot be found (a plain Python prompt keeps none, and it must stand at "
        "the top level of a cell): put it into a file"
    )


def _targets(node: ast.stmt) -> list[str]:
    found = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        found = [node.target]
    return [target.id for target in found if isinstance(target, ast.Name)]


def _file(folder: Path, name: str, text: str, suffix: str) -> Path:
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return folder.absolute() / f"{name}_{digest}{suffix}"


def _refuse_nameless(value: Any) -> None:
    """Raise ValueError for an object that a worker cannot find."""
    if not isinstance(value, types.FunctionType):
        raise ValueError(
            f"reward_funcs: {value!r} is no function of its own, and workers find functions by name; "
            "write one with def that calls it"
        )
    if value.__name__ == "<lambda>":
        raise ValueError(
            "reward_funcs: a lambda has no name by which the scoring workers could find it; write it "
            "with def"
        )
    if "<locals>" in value.__qualname__:
        held = ", ".join(value.__code__.co_freevars)
        inside = f"; make constants beside it of what it takes from there ({held})" if held else ""
        raise ValueError(
            f"reward_funcs: {value.__name__} stands inside another function "
            f"({value.__qualname__}), where the scoring workers cannot find it: move it to the top "
            f"level{inside}"
        )
    if "." in value.__qualname__:
        raise ValueError(
            f"reward_funcs: {value.__qualname__} stands inside a class, where the scoring workers "
            "cannot find it: move it to the top level"
        )


def _as_rows(value: Any, folder: Path) -> CellReference:
    if hasattr(value, "to_dict") and hasattr(value, "iterrows"):  # a frame of pandas
        value = value.to_dict("records")
    if not isinstance(value, Iterable):
        raise ValueError(f"data: must be a path, a mapping or rows, got {value!r}")
    lines = []
    for number, row in enumerate(value):
        if not isinstance(row, Mapping):
            raise ValueError(f"data[{number}]: expected a mapping, got {type(row).__name__}")
        lines.append(json.dumps({k: v for k in row if (v := plain(row[k])) is not ODD}) + "\n")
    text = "".join(lines)
    if not lines:
        raise ValueError("data: it has no rows")
    path = _file(folder, "data", text, ".jsonl")
    return CellReference(str(path), path, text)


def source(value: type[Environment] | types.FunctionType) -> str:
    """Return the module text of a class or function with all that it uses."""
    parts: dict[str, str] = {}
    _collect(value.__name__, value, value.__name__, parts)
    return _module_text(value.__name__, parts, _has_annotations(value))


def _has_annotations(value: type | types.FunctionType) -> bool:
    return any(
        found.__code__.co_flags & __future__.annotations.compiler_flag
        for found in (value, *vars(value).values())
        if isinstance(found, types.FunctionType)
    )


def _module_text(name: str, parts: Mapping[str, str], annotations: bool) -> str:
    """Return module text of these definitions, imports first."""
    imports = [text for text in parts.values() if text.startswith(("import ", "from "))]
    others = [text for text in parts.values() if text not in imports]
    head = f"# {name} of a notebook or script, and what it uses; written by lowroll.run."
    if annotations:
        head += "\nfrom __future__ import annotations\n"
    return "\n".join([head, *sorted(imports), "", "\n\n\n".join(others)]) + "\n"


def _collect(name: str, value: object, user: str, parts: dict[str, str]) -> None:
    if name in parts:
        return
    if getattr(value, "__module__", None) == MAIN and isinstance(value, type | types.FunctionType):
        text = _text(value)
        parts[name] = ""  # allows recursion
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
            "make it in __init__ (of a function: inside it), or put all into a file"
        )


def _home(name: str, value: object) -> tuple[str, str] | None:
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
    """Return a main-module definition's text; ValueError when it was not kept."""
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
        "stand at the top level of a cell): put it into a file"
    )


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # such as a cell of magic commands
        return []


def _definitions(text: str) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in _statements(text)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _globals(text: str) -> list[str]:
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
