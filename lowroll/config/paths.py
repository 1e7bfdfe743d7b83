"""The resolution of relative paths in a configuration.

Inputs (models, environments' files and those that their arguments name, demonstrations) are looked
up beside the YAML file that names them, then in the working directory; those of an override or a
Python mapping only in the working directory. Existing paths become absolute, so that the run's
config.yaml means the same everywhere. `output_dir` is relative to the working directory.
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
KWARGS: Path = ("advantage_function", "kwargs")
ENVIRONMENTS = (("env",), ("eval", "env"))


def anchor(document: Document) -> None:
    """Make the document's existing input paths absolute."""
    for path in READ:
        _replace(document, path, _beside)
    _replace(document, ("advantage_function", "import_path"), _code)
    _replace(document, FUNCTIONS, _code)
    for inside in _texts(_get(document.value, FUNCTIONS), FUNCTIONS):
        _replace(document, inside, _function)
    for inside in _texts(_get(document.value, KWARGS), KWARGS):
        _replace(document, inside, _argument)
    for path in ENVIRONMENTS:
        for place in _sections(document, path):
            _replace(document, (*place, "id"), _code)
            for inside in _texts(_get(document.value, (*place, "args")), (*place, "args")):
                _replace(document, inside, _argument)


def _sections(document: Document, path: Path) -> list[Path]:
    """Return the paths of the environments: one section, or a list of them."""
    envs = _get(document.value, path)
    if isinstance(envs, dict):
        return [path]
    if isinstance(envs, list):
        return [(*path, i) for i in range(len(envs))]
    return []


def _replace(
    document: Document, path: Path, find: Callable[[str, list[FilePath]], str | None]
) -> None:
    text = _get(document.value, path)
    if not isinstance(text, str) or not text or "\0" in text or FilePath(text).is_absolute():
        return
    if (found := find(text, _folders(document, path))) is not None:
        section = _get(document.value, path[:-1])
        section[path[-1]] = found


def _folders(document: Document, path: Path) -> list[FilePath]:
    """Return where a path written here may begin: beside the file, and the working directory."""
    mark = document.mark(path)
    here = FilePath.cwd()
    if mark is None or mark.where == "override":
        return [here]
    file = mark.where.rpartition(":")[0]
    if not file:
        return [here]
    return [FilePath(file).absolute().parent, here]


def _beside(text: str, folders: list[FilePath]) -> str | None:
    return next((str(folder / text) for folder in folders if _exists(folder / text)), None)


def _code(text: str, folders: list[FilePath]) -> str | None:
    """Resolve `file.py` or `file.py:Class`; a missing one is reported beside the YAML file."""
    if text.endswith(".py"):
        return _file(text, folders)
    stem, suffix, name = text.partition(".py:")
    if not suffix:
        return None
    return f"{_file(f'{stem}.py', folders)}:{name}"


def _function(text: str, folders: list[FilePath]) -> str | None:
    """Resolve a function of a file, or the folder of a reward model."""
    return _code(text, folders) or _argument(text, folders)


def _file(text: str, folders: list[FilePath]) -> str:
    return _beside(text, folders) or str(folders[0] / text)


def _argument(text: str, folders: list[FilePath]) -> str | None:
    """Resolve a text that is the path of a file, of a folder if it has a slash, or of a file's
    function."""
    if "/" not in text and "." not in text:
        return None
    if FUNCTION.fullmatch(text):
        return _code(text, folders)
    found = _beside(text, folders)
    if found is not None and "/" not in text and FilePath(found).is_dir():
        return None
    return found


def _exists(path: FilePath) -> bool:
    try:
        return path.exists() or any(c in path.name for c in "*?[") and any(glob.iglob(str(path)))
    except (OSError, ValueError):  # a text too long for a name
        return False


def _texts(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, str):
        yield path
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inside in pairs:
            yield from _texts(inside, (*path, key))


def _get(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            return None
    return value
