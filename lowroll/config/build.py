"""One document and its overrides -> RunConfig. Every error names the file, the line, the key and
the nearest known key.

    run.yaml:8: train.max_stepz: unknown key (did you mean max_steps?)
    override train.max_stepz: unknown key (did you mean max_steps?)
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lowroll.config.document import (
    ConfigError,
    Document,
    Mark,
    Path,
    clip,
    dotted,
    parse,
    parse_value,
    plain,
)
from lowroll.config.foreign import explain, foreign_keys
from lowroll.config.paths import anchor
from lowroll.config.renamed import carry_over, renamed_overrides
from lowroll.config.run_config import RunConfig
from lowroll.config.section import Section
from lowroll.types import HUB_NAME, nearest

M = TypeVar("M", bound=BaseModel)
Overrides = Mapping[str, object] | Iterable[str]


def read(path: str | FilePath) -> Document:
    """Parse one YAML file. ConfigError when it cannot be read."""
    try:
        text = FilePath(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(text, str(path))


def build(document: Document, overrides: Overrides = ()) -> RunConfig:
    """Rename old keys, apply overrides, check and resolve."""
    notes = carry_over(document)
    for key, value, written, note in renamed_overrides(list(_pairs(overrides))):
        _override(document, key, value, Mark("override", written))
        if note:
            notes.append(note)
    notes += carry_over(document)  # of an override of a whole section
    anchor(document)
    cfg = validate(RunConfig, document).resolved().with_origin(source=document.name)
    return cfg.with_notes(*notes)


def validate(model: type[M], document: Document) -> M:
    """Check a document against a section's model; one ConfigError with all problems in the order of
    the file."""
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        problems: set[str] = set()
        for details in error.errors():
            problems.update(_explain(model, document, details))
        raise ConfigError("\n".join(sorted(problems, key=_order))) from None


def override_pairs(overrides: Overrides) -> list[tuple[str, Any]]:
    """Return the overrides as written: (key, value)."""
    return list(_pairs(overrides))


def _pairs(overrides: Overrides) -> Iterable[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        yield from ((key, plain(value, f"override {key}")) for key, value in overrides.items())
        return
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"override {item}: write it as key=value, for example train.max_steps=20"
            )
        yield key.strip(), parse_value(text, Mark("override", key.strip()))


def _override(document: Document, key: str, value: Any, mark: Mark) -> None:
    parts = key.replace("[", ".").replace("]", "").split(".")
    if not all(parts):
        raise ConfigError(mark.blame("not a dotted key"))
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    if path[0] == "env" and len(path) > 1 and "env" not in document.value:
        document.value["env"] = [{"id": "reverse-text"}]
    if path[0] == "data" and len(path) > 1 and isinstance(document.value.get("data"), str):
        document.value["data"] = {"path": document.value["data"]}
    if (
        len(path) > 1
        and isinstance(path[1], int)
        and isinstance(document.value.get(str(path[0])), dict)
    ):
        document.wrap(path[:1])
    document.put(path, value, mark)


def _order(line: str) -> tuple[str, int, str]:
    name, _, rest = line.partition(":")
    number = rest.partition(":")[0]
    if not number.isdecimal():
        return name, 0, line
    return name, int(number), line


def _explain(model: type[BaseModel], document: Document, details: ErrorDetails) -> list[str]:
    loc: Path = tuple(details["loc"])
    if details["type"] == "combination":
        return [_blame(document, *problem) for problem in details["ctx"]["problems"]]
    path = _written(loc, document.value)
    if details["type"] == "extra_forbidden":
        return [
            _blame(document, (key,), "unknown key" + hint)
            for key, hint in _hints(model, path, details["input"])
        ]
    return [_blame(document, (path,), _message(model, loc, details))]


def _written(loc: Path, value: Any) -> Path:
    """Drop what pydantic adds: the index of a mapping that stands for a list, and the name of a
    union's branch."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(value, dict):
            if part in value:
                value = value[part]
            elif isinstance(part, int):
                continue
            else:
                value = None
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            break
        path.append(part)
    return tuple(path)


def _blame(document: Document, paths: tuple[Path, ...], message: str) -> str:
    """Return `file:line: key: message` for the first written key, otherwise for the nearest
    section."""
    for path in paths:
        if path in document.marks:
            return document.marks[path].blame(message)
    mark = document.mark(paths[0])
    if mark is None:
        return f"{document.name}: {dotted(paths[0])}: {message}"
    return Mark(mark.where, dotted(paths[0])).blame(message)


def _message(model: type[BaseModel], loc: Path, details: ErrorDetails) -> str:
    kind = details["type"]
    context = details.get("ctx", {})
    value = details.get("input")
    got = f", got {_show(value)}"
    if kind == "missing":
        if isinstance(loc[-1], int):
            return f"needs {loc[-1] + 1} entries"
        return "this key is required"
    if kind == "literal_error":
        choices = _choices(context["expected"])
        message = f"must be {'one of ' if len(choices) > 1 else ''}{', '.join(choices)}{got}"
        if isinstance(value, str):
            message += nearest(value.lower(), choices)
        return message
    if kind in _NEEDS:
        message = f"must be {_NEEDS[kind]}{got}"
        if isinstance(value, str) and _is_number(value):
            message += " (drop the quotes)"
        return message
    if kind in _BOUNDS:
        word, limit = _BOUNDS[kind]
        return f"must be {word} {context[limit]}{got}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "string_pattern_mismatch" and context["pattern"] == HUB_NAME:
        return f"must be ORG/NAME{got}"
    return details["msg"]


_NEEDS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "model_type": "a section of keys",
    "model_attributes_type": "a section of keys",
    "dict_type": "a section of keys",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, (list, tuple)):
        return "a list"
    return clip(repr(value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _choices(expected: str) -> list[str]:
    """Parse pydantic's "'a', 'b' or 'c'" into ["a", "b", "c"]."""
    return [choice.strip().strip("'") for choice in expected.replace(" or ", ", ").split(", ")]


def _hints(model: type[BaseModel], path: Path, value: Any) -> Iterator[tuple[Path, str]]:
    """Yield an unknown key, or the foreign keys in an unknown section, with a suggestion: a near
    key of its section, another tool's name, a key of this name elsewhere, or the nearest one
    anywhere."""
    word = str(path[-1])
    if "." in word and ".".join(map(str, path)) in known_keys(model):
        nested = ": {".join(word.split(".")) + ": ..." + "}" * word.count(".")
        yield path, f"; with dots it is an override, in a file it is {nested}"
        return
    section: type[BaseModel] | None = model
    for part in path[:-1]:
        if isinstance(part, str) and section is not None and part in section.model_fields:
            section = section_in(section.model_fields[part].annotation)
    here: list[str] = []
    if section is not None:
        here = list(section.model_fields)
    foreign: list[Path] = []
    if model is RunConfig:
        foreign = list(foreign_keys(path, value))
    if foreign and not nearest(word, here, cutoff=0.85):
        yield from ((key, f"; {explain(key)}") for key in foreign)
        return
    yield path, _meant(model, word, here)


def _meant(model: type[BaseModel], word: str, here: list[str]) -> str:
    elsewhere = last_names(model)
    if word in elsewhere:
        return f" (did you mean {elsewhere[word]}?)"
    if hint := nearest(word, here):
        return hint
    if model is RunConfig and (near := get_close_matches(word, elsewhere, n=1, cutoff=0.75)):
        return f" (did you mean {elsewhere[near[0]]}?)"
    return ""


def last_names(model: type[BaseModel]) -> dict[str, str]:
    """Return the last name of every key -> the key; among equals, rarely meant keys come last and
    keys of the top first."""
    keys = sorted(
        reversed(known_keys(model)),
        key=lambda key: ("." not in key, key.startswith(("train.", "rollout."))),
    )
    return {key.rpartition(".")[2]: key for key in keys}


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and of those inside it."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        keys.append(prefix + name)
        inner = section_in(info.annotation)
        if inner is not None:
            keys += known_keys(inner, f"{prefix}{name}.")
    if issubclass(model, Section):
        keys += [prefix + name for name in model.table_keys()]
    return keys


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside X | None, tuple[X, ...] or Annotated[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list, Annotated):
        for inner in typing.get_args(annotation):
            found = section_in(inner)
            if found is not None:
                return found
    return None
