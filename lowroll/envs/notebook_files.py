"""Files for classes, functions and rows that a notebook or script puts into its settings.

Scoring workers are fresh processes without pickle, so the text of a class or function is written to
a file with the functions, classes, imports and plain constants that it uses. Values without text,
such as an open client, are refused. Rows become JSON lines.
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
    """Return settings with `write(value)` in the place of classes, functions and rows. An
    environment gets its class's name, unless the settings give one."""
    if isinstance(tree, Mapping):
        values = {}
        for key in tree:
            last_key = str(key).rpartition(".")[2]
            values[key] = _replaced_value(last_key, tree[key], write)
        environment: Any = tree.get("id")
        return {"name": environment.__name__, **values} if _is_environment(environment) else values
    if isinstance(tree, list | tuple):
        return [replaced(value, write) for value in tree]
    if _is_environment(tree):
        return {"id": write(tree), "name": tree.__name__}
    if callable(tree) and not isinstance(tree, type):
        return write(tree)
    return tree


def _replaced_value(key: str, value: Any, write: Callable[[Any], str]) -> Any:
    if _is_environment(value) and key == "id":
        return write(value)
    if isinstance(value, Path):
        return str(value)
    if key in ROWS and value is not None and not isinstance(value, str | Mapping):
        return write(value)
    if key == "data" and isinstance(value, Mapping) and "train" in value:
        test_split = next((name for name in TEST_SPLITS if name in value), None)
        test_path = {} if test_split is None else {"test_path": write(value[test_split])}
        return {"path": write(value["train"]), **test_path}
    return replaced(value, write)


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def named(value: Any, folder: Path) -> CellReference:
    """Return the id of a class or function, or the path of rows, with its file in `folder`.
    ValueError for what has no text or name."""
    if not callable(value):
        return _rows_reference(value, folder)
    if isinstance(value, type | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return _definition_reference(value, folder)
    return _object_reference(value, folder)


def _definition_reference(value: Any, folder: Path) -> CellReference:
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
    """Return (file, None) for an importable class or function, else a new file in `folder` and its
    text."""
    if value.__module__ != MAIN:
        return Path(inspect.getfile(value)).resolve(), None
    text = source(value)
    return _digest_path(folder, value.__name__, text, ".py"), text


def _object_reference(value: Callable[..., Any], folder: Path) -> CellReference:
    """Return the id by which a scoring worker finds a callable object: its module and name, or, of
    one that a notebook defines, a file with its source, which the caller writes."""
    if (global_name := _global_of(value)) is not None:
        module, name = global_name
        if module.__name__ != MAIN:
            return CellReference(f"{_import_place(module)}:{name}")
        text = _object_source(name)
    elif isinstance(value, functools.partial) and isinstance(value.func, types.FunctionType):
        _refuse_nameless(value.func)
        name, text = value.func.__name__, _partial_source(value)
    else:
        raise ValueError(
            f"reward_funcs: {value!r} has no name by which the scoring workers could find it: give "
            f"it one at the top level, as in judge = {type(value).__name__}(...)"
        )
    path = _digest_path(folder, name, text, ".py")
    return CellReference(f"{path}:{name}", path, text)


def _import_place(module: types.ModuleType) -> str:
    file = getattr(module, "__file__", None)
    is_single_file = file is not None and not getattr(module, "__package__", "")
    return str(Path(str(file)).resolve()) if is_single_file else module.__name__


def _global_of(value: object) -> tuple[types.ModuleType, str] | None:
    modules = sorted(sys.modules.items(), key=lambda item: item[0] == MAIN)
    for _, module in modules:
        if isinstance(module, types.ModuleType):
            for name, global_value in list(vars(module).items()):
                if global_value is value and name.isidentifier() and not name.startswith("_"):
                    return module, name
    return None


def _object_source(name: str) -> str:
    definitions: dict[str, str] = {}
    main_globals = vars(sys.modules[MAIN])
    text = _last_statement(name, [], lambda node: name in _assigned_names(node))
    for used_name in _global_names(text):
        if used_name in main_globals:
            _collect_definition(used_name, main_globals[used_name], name, definitions)
    definitions[name] = text
    return _module_text(name, definitions, False)


def _partial_source(value: Any) -> str:
    function = value.func
    name = function.__name__
    for argument in (*value.args, *value.keywords.values()):
        if not _is_literal(argument):
            raise ValueError(
                f"reward_funcs: {name} is given {argument!r}, which has no text to copy: make the partial "
                "function at the top level of a file, under a name"
            )
    definitions = {"functools": "import functools as functools"}
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if function.__module__ != MAIN and file and not getattr(module, "__package__", ""):
        folder = str(Path(file).resolve().parent)
        definitions["sys"] = f"import sys as sys\n\nsys.path.append({folder!r})"
    _collect_definition(name, function, name, definitions)
    keyword_texts = [f"{key}={argument!r}" for key, argument in value.keywords.items()]
    argument_texts = ", ".join([name, *map(repr, value.args), *keyword_texts])
    # a separate key, as `name` has the function's definition
    definitions[f"{name}()"] = f"{name} = functools.partial({argument_texts})"
    return _module_text(name, definitions, _has_annotations(function))


def _assigned_names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _digest_path(folder: Path, name: str, text: str, suffix: str) -> Path:
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return folder.absolute() / f"{name}_{digest}{suffix}"


def _refuse_nameless(value: Any) -> None:
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
        captured = ", ".join(value.__code__.co_freevars)
        hint = (
            f"; make constants beside it of what it takes from there ({captured})"
            if captured
            else ""
        )
        raise ValueError(
            f"reward_funcs: {value.__name__} stands inside another function "
            f"({value.__qualname__}), where the scoring workers cannot find it: move it to the top "
            f"level{hint}"
        )
    if "." in value.__qualname__:
        raise ValueError(
            f"reward_funcs: {value.__qualname__} stands inside a class, where the scoring workers "
            "cannot find it: move it to the top level"
        )


def _rows_reference(value: Any, folder: Path) -> CellReference:
    if hasattr(value, "to_dict") and hasattr(value, "iterrows"):
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
    path = _digest_path(folder, "data", text, ".jsonl")
    return CellReference(str(path), path, text)


def source(value: type[Environment] | types.FunctionType) -> str:
    """Return the module text of a class or function with all that it uses."""
    definitions: dict[str, str] = {}
    _collect_definition(value.__name__, value, value.__name__, definitions)
    return _module_text(value.__name__, definitions, _has_annotations(value))


def _has_annotations(value: type | types.FunctionType) -> bool:
    return any(
        member.__code__.co_flags & __future__.annotations.compiler_flag
        for member in (value, *vars(value).values())
        if isinstance(member, types.FunctionType)
    )


def _module_text(name: str, parts: Mapping[str, str], annotations: bool) -> str:
    imports = [text for text in parts.values() if text.startswith(("import ", "from "))]
    definitions = [text for text in parts.values() if text not in imports]
    header = f"# {name} of a notebook or script, and what it uses; written by lowroll.run."
    if annotations:
        header += "\nfrom __future__ import annotations\n"
    return "\n".join([header, *sorted(imports), "", "\n\n\n".join(definitions)]) + "\n"


def _collect_definition(name: str, value: object, user: str, parts: dict[str, str]) -> None:
    """Add the text of a name to `parts`, behind all that it uses."""
    if name in parts:
        return
    if getattr(value, "__module__", None) == MAIN and isinstance(value, type | types.FunctionType):
        text = _definition_text(value)
        parts[name] = ""  # a placeholder, so that a recursive definition ends
        main_globals = vars(sys.modules[MAIN])
        for used_name in _global_names(text):
            if used_name in main_globals and not _is_builtin(used_name, main_globals[used_name]):
                _collect_definition(used_name, main_globals[used_name], value.__name__, parts)
        del parts[name]  # moved behind what it uses
        parts[name] = text if value.__name__ == name else f"{text}\n\n{name} = {value.__name__}"
    elif isinstance(value, types.ModuleType):
        parts[name] = f"import {value.__name__} as {name}"
    elif isinstance(value, re.Pattern):
        parts["re"] = "import re as re"
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
    elif (import_name := _import_name(name, value)) is not None:
        module, imported_name = import_name
        parts[name] = f"from {module} import {imported_name} as {name}"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}"
    else:
        raise ValueError(
            f"{user} uses {name}, a {type(value).__name__} of the notebook, which has no text to copy: "
            "make it in __init__ (of a function: inside it), or put all into a file"
        )


def _is_builtin(name: str, value: object) -> bool:
    return name in vars(builtins) and value is vars(builtins)[name]


def _import_name(name: str, value: object) -> tuple[str, str] | None:
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module == MAIN:
        return None
    for candidate in (getattr(value, "__qualname__", None), getattr(value, "_name", None), name):
        if (
            isinstance(candidate, str)
            and candidate.isidentifier()
            and getattr(sys.modules.get(module), candidate, None) is value
        ):
            return module, candidate
    return None


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _definition_text(value: type | types.FunctionType) -> str:
    members = [value] if isinstance(value, types.FunctionType) else list(vars(value).values())
    code_files = [
        member.__code__.co_filename for member in members if isinstance(member, types.FunctionType)
    ]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return _last_statement(
        value.__qualname__,
        code_files,
        lambda node: isinstance(node, kinds) and node.name == value.__name__,
    )


def _last_statement(name: str, files: Iterable[str], defines: Callable[[ast.stmt], bool]) -> str:
    """Return the last top-level definition of a name, from the first source that has one: `files`,
    the script, the notebook's cells from the latest on."""
    script = getattr(sys.modules[MAIN], "__file__", None)
    script_files = [script] if script else []
    for file in dict.fromkeys([*files, *script_files, *reversed(linecache.cache)]):
        lines = linecache.getlines(file)
        definitions = [node for node in _statements("".join(lines)) if defines(node)]
        if definitions:
            node = definitions[-1]
            decorators = getattr(node, "decorator_list", ())
            first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            return "".join(lines[first_line - 1 : node.end_lineno]).rstrip()
    raise ValueError(
        f"the text of {name} cannot be found (a plain Python prompt keeps none, and it must stand at "
        "the top level of a cell): put it into a file"
    )


def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except SyntaxError:  # such as a cell with magic commands
        return []


def _global_names(text: str) -> list[str]:
    """Return the names that a text uses and does not define."""

    def walk(table: symtable.SymbolTable) -> Iterator[str]:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            # a name of the text's top level is global unless the text assigns it
            is_global = symbol.is_global() or (is_module and not symbol.is_assigned())
            if symbol.is_referenced() and is_global:
                yield symbol.get_name()
        for inner in table.get_children():
            yield from walk(inner)

    return sorted(set(walk(symtable.symtable(text, "cell", "exec"))))
