"""The checked RunConfig of a document and its overrides. Errors name the file, the line, the key
and the nearest known key.

    run.yaml:8: train.max_stepz: unknown key (did you mean max_steps?)
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
from lowroll.config.renamed import carry_over, rename_note, renamed_overrides
from lowroll.config.resolve import RunConfig
from lowroll.config.section import Section
from lowroll.types import HUB_NAME, nearest

M = TypeVar("M", bound=BaseModel)
Overrides = Mapping[str, object] | Iterable[str]


def read(path: str | FilePath) -> Document:
    """Parse a YAML file. ConfigError when it cannot be read."""
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
    for key, value, mark in renamed_overrides(override_pairs(overrides)):
        _apply_override(document, key, value, mark)
        if mark.key != key:
            notes.append(mark.blame(rename_note(key)))
    notes += carry_over(document)  # of an override of a whole section
    anchor(document)
    cfg = validate(RunConfig, document).resolved().with_origin(source=document.name)
    return cfg.with_notes(*notes)


def validate(model: type[M], document: Document) -> M:
    """Check a document. One ConfigError has all problems in the file's order."""
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        problems: set[str] = set()
        for details in error.errors():
            problems.update(_problem_lines(model, document, details))
        raise ConfigError("\n".join(sorted(problems, key=_sort_key))) from None


def override_pairs(overrides: Overrides) -> list[tuple[str, Any]]:
    """Return the overrides as (key, value), with texts parsed as YAML."""
    if isinstance(overrides, Mapping):
        return [(key, plain(value, f"override {key}")) for key, value in overrides.items()]
    pairs = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"override {override}: write it as key=value, for example train.max_steps=20"
            )
        pairs.append((key.strip(), parse_value(text, Mark("override", key.strip()))))
    return pairs


def _apply_override(document: Document, key: str, value: Any, mark: Mark) -> None:
    """Write an override into the document, creating its sections. A short form becomes a long one
    when the key names a part of it. ConfigError for a key that is not dotted names."""
    parts = key.replace("[", ".").replace("]", "").split(".")  # env[0].id is env.0.id
    if not all(parts):
        raise ConfigError(mark.blame("not a dotted key"))
    path = tuple(int(part) if part.isdecimal() else part for part in parts)
    tree = document.value
    if len(path) > 1:
        top = str(path[0])
        if top == "env" and "env" not in tree:  # the default, which the override changes
            tree["env"] = [{"id": "reverse-text"}]
        if top == "data" and isinstance(tree.get("data"), str):
            tree["data"] = {"path": tree["data"]}
        if isinstance(path[1], int) and isinstance(tree.get(top), dict):
            document.wrap(top)  # the key indexes a list, so the section becomes one
    document.put(path, value, mark)


def _sort_key(line: str) -> tuple[str, int, str]:
    file_name, _, after_name = line.partition(":")
    line_number = after_name.partition(":")[0]
    return file_name, int(line_number) if line_number.isdecimal() else 0, line


def _problem_lines(model: type[BaseModel], document: Document, details: ErrorDetails) -> list[str]:
    loc: Path = tuple(details["loc"])
    if details["type"] == "combination":
        return [_format_problem(document, *problem) for problem in details["ctx"]["problems"]]
    path = _document_path(loc, document.value)
    if details["type"] == "extra_forbidden":
        return [
            _format_problem(document, (key_path,), "unknown key" + hint)
            for key_path, hint in _unknown_key_hints(model, path, details["input"])
        ]
    return [_format_problem(document, (path,), _error_text(loc, details))]


def _document_path(loc: Path, value: Any) -> Path:
    """Return the document's path of pydantic's location.

    Pydantic adds the index of a mapping that stands for a list, and a union's branch at the end.
    """
    path: list[str | int] = []
    node = value
    for part in loc:
        if isinstance(node, dict):
            if part not in node and isinstance(part, int):
                continue  # the mapping stands for the list's only item
            node = node.get(part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
        else:
            break  # the rest is a union's branch
        path.append(part)
    return tuple(path)


def _format_problem(document: Document, paths: tuple[Path, ...], message: str) -> str:
    """Return `file:line: key: message` for the first written key, else for the nearest section."""
    written_marks = [document.marks[path] for path in paths if path in document.marks]
    if written_marks:
        return written_marks[0].blame(message)
    section_mark = document.mark(paths[0])
    where = document.name if section_mark is None else section_mark.where
    return Mark(where, dotted(paths[0])).blame(message)


def _error_text(loc: Path, details: ErrorDetails) -> str:
    error_type = details["type"]
    context = details.get("ctx", {})
    value = details.get("input")
    got_text = f", got {_describe_value(value)}"
    if error_type == "missing":
        part = loc[-1]
        return f"needs {part + 1} entries" if isinstance(part, int) else "this key is required"
    if error_type == "literal_error":
        # pydantic has "'a', 'b' or 'c'"
        parts = context["expected"].replace(" or ", ", ").split(", ")
        choices = [part.strip().strip("'") for part in parts]
        one_of = "one of " if len(choices) > 1 else ""
        hint = nearest(value.lower(), choices) if isinstance(value, str) else ""
        return f"must be {one_of}{', '.join(choices)}{got_text}{hint}"
    if error_type in _EXPECTED_TYPES:
        hint = " (drop the quotes)" if isinstance(value, str) and _is_number(value) else ""
        return f"must be {_EXPECTED_TYPES[error_type]}{got_text}{hint}"
    if error_type in _BOUND_SIGNS:
        sign, limit_name = _BOUND_SIGNS[error_type]
        return f"must be {sign} {context[limit_name]}{got_text}"
    if error_type in ("too_short", "string_too_short"):
        return "must not be empty"
    if error_type == "string_pattern_mismatch" and context["pattern"] == HUB_NAME:
        return f"must be ORG/NAME{got_text}"
    return details["msg"]


_EXPECTED_TYPES = {
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
_BOUND_SIGNS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}


def _describe_value(value: Any) -> str:
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


def _unknown_key_hints(
    model: type[BaseModel], path: Path, value: Any
) -> Iterator[tuple[Path, str]]:
    """Yield an unknown key, or each of another tool's keys, with the first hint of: a dotted key's
    form in a file, another tool's setting unless a key of the section is very near,
    `_suggest_key`."""
    last_name = str(path[-1])
    if "." in last_name and ".".join(map(str, path)) in known_keys(model):
        nested_form = ": {".join(last_name.split(".")) + ": ..." + "}" * last_name.count(".")
        yield path, f"; with dots it is an override, in a file it is {nested_form}"
        return
    section_keys = _keys_of_section(model, path[:-1])
    foreign_paths = list(foreign_keys(path, value)) if model is RunConfig else []
    if foreign_paths and not nearest(last_name, section_keys, cutoff=0.85):
        for foreign_path in foreign_paths:
            yield foreign_path, f"; {explain(foreign_path)}"
        return
    yield path, _suggest_key(model, last_name, section_keys)


def _keys_of_section(model: type[BaseModel], path: Path) -> list[str]:
    section: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, str) and section is not None and part in section.model_fields:
            section = section_in(section.model_fields[part].annotation)
    return [] if section is None else list(section.model_fields)


def _suggest_key(model: type[BaseModel], word: str, here: list[str]) -> str:
    """Return a hint at the probable key. An equal name elsewhere comes before a near one of
    `here`."""
    key_by_last_name = last_names(model)
    if word in key_by_last_name:
        return f" (did you mean {key_by_last_name[word]}?)"
    if hint := nearest(word, here):
        return hint
    if model is RunConfig:
        for close_name in get_close_matches(word, key_by_last_name, n=1, cutoff=0.75):
            return f" (did you mean {key_by_last_name[close_name]}?)"
    return ""


def last_names(model: type[BaseModel]) -> dict[str, str]:
    """Return {last name: key}. Of equal names, top keys win, then those of `train` and
    `rollout`."""
    keys = sorted(
        reversed(known_keys(model)),
        key=lambda key: ("." not in key, key.startswith(("train.", "rollout."))),
    )
    return {key.rpartition(".")[2]: key for key in keys}


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the dotted keys of a section and its subsections."""
    keys: list[str] = []
    for name, field_info in model.model_fields.items():
        keys.append(prefix + name)
        nested_section = section_in(field_info.annotation)
        if nested_section is not None:
            keys += known_keys(nested_section, f"{prefix}{name}.")
    if issubclass(model, Section):
        keys += [prefix + name for name in model.table_keys()]
    return keys


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside X | None, tuple[X, ...] or Annotated[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list, Annotated):
        sections = map(section_in, typing.get_args(annotation))
        return next((section for section in sections if section is not None), None)
    return None
