"""YAML text as plain values, with the line of every key.

Anchors, aliases, tags, merge keys, several documents and duplicated keys are refused, which
prevents alias bombs and object construction. Plain scalars follow YAML 1.2 (1e-5 is a number);
those that YAML 1.1 reads otherwise (no, 010, 1:30, 1_000) are refused.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_NULL = re.compile(r"|~|null|Null|NULL")
_BOOLEAN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_HEX = re.compile(r"0x[0-9a-fA-F]{1,32}|0o[0-7]{1,48}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_YES_OR_NO = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
_YAML_1_1_NUMBER = re.compile(
    r"[-+]?0[0-9_]+|[-+]?[0-9][0-9_]*_[0-9_]*|0b[01_]+|[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?"
)


class ConfigError(ValueError):
    """An invalid configuration; a line for each problem: `file:line: key: message`."""


@dataclass(frozen=True)
class Mark:
    """The place of a value ("run.yaml:8" or "override") and its name there."""

    where: str
    key: str

    def blame(self, message: str) -> str:
        separator = " " if self.where == "override" else ": "
        return f"{self.where}{separator}{self.key}: {message}"


@dataclass
class Document:
    """Plain values and the marks of all written paths."""

    value: dict[str, Any]
    marks: dict[Path, Mark] = field(default_factory=dict)
    name: str = "config"

    def mark(self, path: Path) -> Mark | None:
        """Return the mark of a path, else of the first key beneath it, else of the nearest section
        above."""
        inner_paths = (written for written in self.marks if written[: len(path)] == path)
        outer_paths = (path[:end] for end in range(len(path) - 1, 0, -1))
        candidates = (path, *inner_paths, *outer_paths)
        return next((self.marks[one] for one in candidates if one in self.marks), None)

    def marks_at(self, path: Path) -> dict[Path, Mark]:
        """Return the marks of a path and beneath it, by relative path."""
        length = len(path)
        return {one[length:]: mark for one, mark in self.marks.items() if one[:length] == path}

    def wrap(self, key: str) -> None:
        """Replace the section at a top key by a list of it alone."""
        marks = self.marks_at((key,))
        self.put((key,), [self.value[key]], marks.pop((), Mark(self.name, key)))
        self.marks |= {(key, 0, *rest): mark for rest, mark in marks.items()}

    def move(self, old: Path, new: Path, mark: Mark) -> None:
        """Move a value and its marks. mark: where it was written."""
        marks = self.marks_at(old)
        self.put(new, self.drop(old), mark)
        self.marks |= {(*new, *rest): kept_mark for rest, kept_mark in marks.items()}

    def drop(self, path: Path) -> Any:
        """Remove and return a value and its marks."""
        node: Any = self.value
        for part in path[:-1]:
            node = node[part]
        self._drop_marks(path)
        return node.pop(path[-1])

    def put(self, path: Path, value: Any, mark: Mark) -> None:
        """Write a value, creating its sections."""
        node: Any = self.value
        for depth, part in enumerate(path[:-1]):
            child = _get_child(node, part, path[: depth + 1], mark)
            if child is None:
                child = node[part] = {}
            node = child
        _get_child(node, path[-1], path, mark)
        node[path[-1]] = value
        self._drop_marks(path)
        self.marks[path] = mark

    def _drop_marks(self, path: Path) -> None:
        for rest in self.marks_at(path):
            del self.marks[(*path, *rest)]


def dotted(path: Path) -> str:
    """Format a path: ("env", 0, "id") -> "env[0].id"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def parse(text: str, name: str) -> Document:
    """Parse a YAML mapping. ConfigError names the file, the line and the key."""
    node = _compose(text, name)
    if node is None:
        return Document({}, name=name)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: a mapping of keys is needed here")
    marks: dict[Path, Mark] = {}
    return Document(_to_dict(node, (), marks, name), marks, name)


def parse_value(text: str, mark: Mark) -> Any:
    """Parse the value of an override. ConfigError names its mark."""
    try:
        node = _compose(text, mark.key)
        return None if node is None else _to_plain_value(node, (), {}, mark.key)
    except ConfigError as error:
        message = str(error).removeprefix(f"{mark.key}:1: ").removeprefix(f"{mark.key}: ")
        raise ConfigError(mark.blame(message)) from None


def resolve_plain(text: str) -> Any:
    """Return the value of an unquoted scalar. ValueError if YAML versions differ on it."""
    if _NULL.fullmatch(text):
        return None
    if _BOOLEAN.fullmatch(text):
        return text[0] in "tT"
    if _YES_OR_NO.fullmatch(text):
        boolean = "true" if text.lower() in ("yes", "on") else "false"
        raise ValueError(f"{text} is ambiguous in YAML: write {boolean}, or quote it if it is text")
    if _INT.fullmatch(text):
        return int(text)
    if _HEX.fullmatch(text):
        return int(text, 0)
    if _YAML_1_1_NUMBER.fullmatch(text):
        raise ValueError(
            f"{text} is ambiguous in YAML: write plain decimal digits, or quote it if it is text"
        )
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise ValueError(f"{clip(text)} is too large a number")
        return number
    return text


def clip(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _compose(text: str, name: str) -> yaml.Node | None:
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: longer than {MAX_BYTES} characters")
    try:
        _refuse_unsafe_events(yaml.parse(text, Loader=yaml.SafeLoader), name)
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = str(error.problem or error.context)
        hint = "; indent with spaces" if "'\\t'" in problem else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {problem}{hint}") from None
    except yaml.reader.ReaderError as error:
        line_number = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{name}:{line_number}: not valid YAML: {error.reason}") from None


def _refuse_unsafe_events(events: Iterator[yaml.Event], name: str) -> None:
    depth = documents = 0
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise ConfigError(f"{name}:{line}: more than one document in a file")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ConfigError(
                f"{name}:{line}: anchors and aliases (&, *) are not allowed; write the value out"
            )
        if getattr(event, "tag", None):
            raise ConfigError(f"{name}:{line}: tags (!) are not allowed")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ConfigError(f"{name}:{line}: nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _to_plain_value(node: yaml.Node, path: Path, marks: dict[Path, Mark], name: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _to_dict(node, path, marks, name)
    if isinstance(node, yaml.SequenceNode):
        values = []
        for index, item in enumerate(node.value):
            item_path = (*path, index)
            marks[item_path] = Mark(f"{name}:{item.start_mark.line + 1}", dotted(item_path))
            values.append(_to_plain_value(item, item_path, marks, name))
        return values
    assert isinstance(node, yaml.ScalarNode)
    if node.style is not None:
        return node.value
    try:
        return resolve_plain(node.value)
    except ValueError as error:
        key = f"{dotted(path)}: " if path else ""
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: {key}{error}") from None


def _to_dict(
    node: yaml.MappingNode, path: Path, marks: dict[Path, Mark], name: str
) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = key_node.value
        where = f"{name}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode) or not isinstance(key, str) or not key:
            raise ConfigError(f"{where}: {dotted(path) or 'top level'}: a key must be text")
        key_path = (*path, key)
        if key in mapping:
            first_line = marks[key_path].where.rpartition(":")[2]
            raise ConfigError(
                f"{where}: {dotted(key_path)}: duplicated key (first written in line {first_line})"
            )
        marks[key_path] = Mark(where, dotted(key_path))
        mapping[key] = _to_plain_value(value_node, key_path, marks, name)
    return mapping


def _get_child(node: Any, part: str | int, path: Path, mark: Mark) -> Any:
    if isinstance(node, dict) and isinstance(part, str):
        return node.get(part)
    if isinstance(node, list) and isinstance(part, int) and part < len(node):
        return node[part]
    raise ConfigError(mark.blame(f"{dotted(path[:-1])} has no {part}"))


class ConfigDumper(yaml.SafeDumper):
    """A dumper whose YAML `parse` reads back to the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    try:
        plain = resolve_plain(text) == text
    except ValueError:
        plain = False
    quotes = None if plain else "'"
    style = quotes if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


ConfigDumper.add_representer(str, _represent_text)


def plain(value: Any, where: str) -> Any:
    """Copy a Python value as plain configuration values, or raise ConfigError."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, where) for item in value]
    raise ConfigError(f"{where}: {type(value).__name__} is no configuration value")


def dump_short(tree: dict[str, Any], width: int) -> str:
    """Return YAML text with a line for each top key, of about `width` columns."""
    text = io.StringIO()
    dumper = ConfigDumper(
        text, default_flow_style=True, width=width, allow_unicode=True, sort_keys=False
    )
    dumper.open()
    node = dumper.represent_data(tree)
    assert isinstance(node, yaml.MappingNode)
    node.flow_style = False  # only the top
    dumper.serialize(node)
    dumper.close()
    return text.getvalue()
