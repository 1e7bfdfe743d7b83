"""The resolution of relative paths in a configuration.

Inputs are looked up in the folder of their YAML file, then in the working directory, and only there
for an override or a Python mapping. Existing paths become absolute.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any

from lowroll.config.document import Document, Path

READ: tuple[Path, ...] = (
    ("model",),
    ("train", "teacher"),
    ("critic", "model"),
    ("sft", "data"),
    ("rollout", "vllm", "python"),
    ("data",),
    ("data", "path"),
    ("data", "test_path"),
)
FUNCTIONS: Path = ("reward_funcs",)
FUNCTION = re.compile(r"\S+\.py:[A-Za-z_]\w*")
IMPORT_PATH: Path = ("advantage_function", "import_path")
KWARGS: Path = ("advantage_function", "kwargs")
ENVIRONMENTS = (("env",), ("eval", "env"))


def anchor(document: Document) -> None:
    """Make the document's existing input paths absolute."""
    for path in READ:
        _resolve_in_place(document, path, _find_existing)
    env_paths = [env for path in ENVIRONMENTS for env in _section_paths(document, path)]
    for path in (IMPORT_PATH, *((*env_path, "id") for env_path in env_paths)):
        _resolve_in_place(document, path, _resolve_code_file)
    for path, find in (
        (FUNCTIONS, _resolve_function),
        (KWARGS, _resolve_argument),
        *(((*env_path, "args"), _resolve_argument) for env_path in env_paths),
    ):
        for text_path in _text_paths(_value_at(document.value, path), path):
            _resolve_in_place(document, text_path, find)


def _section_paths(document: Document, path: Path) -> list[Path]:
    envs = _value_at(document.value, path)
    if isinstance(envs, dict):
        return [path]
    return [(*path, i) for i in range(len(envs))] if isinstance(envs, list) else []


def _resolve_in_place(
    document: Document, path: Path, find: Callable[[str, list[FilePath]], str | None]
) -> None:
    text = _value_at(document.value, path)
    if not isinstance(text, str) or not text or "\0" in text or FilePath(text).is_absolute():
        return
    if (resolved := find(text, _search_folders(document, path))) is not None:
        section = _value_at(document.value, path[:-1])
        section[path[-1]] = resolved


def _search_folders(document: Document, path: Path) -> list[FilePath]:
    mark = document.mark(path)
    # marks of overrides and of Python have no line
    file_name = mark.where.rpartition(":")[0] if mark is not None else ""
    file_folders = [FilePath(file_name).absolute().parent] if file_name else []
    return [*file_folders, FilePath.cwd()]


def _find_existing(text: str, folders: list[FilePath]) -> str | None:
    return next((str(folder / text) for folder in folders if _exists(folder / text)), None)


def _resolve_code_file(text: str, folders: list[FilePath]) -> str | None:
    if text.endswith(".py"):
        return _resolve_file(text, folders)
    file_stem, separator, function_name = text.partition(".py:")
    if not separator:
        return None
    return f"{_resolve_file(f'{file_stem}.py', folders)}:{function_name}"


def _resolve_function(text: str, folders: list[FilePath]) -> str | None:
    return _resolve_code_file(text, folders) or _resolve_argument(text, folders)


def _resolve_file(text: str, folders: list[FilePath]) -> str:
    return _find_existing(text, folders) or str(folders[0] / text)


def _resolve_argument(text: str, folders: list[FilePath]) -> str | None:
    if "/" not in text and "." not in text:
        return None
    if FUNCTION.fullmatch(text):
        return _resolve_code_file(text, folders)
    resolved = _find_existing(text, folders)
    if resolved is not None and "/" not in text and FilePath(resolved).is_dir():
        return None
    return resolved


def _exists(path: FilePath) -> bool:
    try:
        return (
            path.exists()
            or any(wildcard in path.name for wildcard in "*?[")
            and any(glob.iglob(str(path)))
        )
    except (OSError, ValueError):  # a text too long for a name
        return False


def _text_paths(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _text_paths(item, (*path, key))


def _value_at(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            return None
    return value
