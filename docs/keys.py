"""The tables of docs/configuration.md: every key of lowroll's own file and of the Surogate document,
from the schemas.

The meaning of a key of lowroll's own is the comment at its field, beside it or above it; a section
that is a key stands before its own keys, with the first paragraph of its docstring.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import tokenize
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined


class Key(NamedTuple):
    """A key: its dotted name (`env[].id`), its field, and what the comment says."""

    name: str
    field: FieldInfo
    meaning: str


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a section and of those in it, in the order of the file."""
    said = meanings(model)
    for name, field in model.model_fields.items():
        inner, many = section(field.annotation)
        meaning = said.get(name, "")
        if inner is None:
            yield Key(prefix + name, field, meaning)
            continue
        whole = ". ".join(words for words in (meaning, about(inner)) if words)
        optional = type(None) in get_args(field.annotation) or many
        if optional or meaning:
            yield Key(prefix + name, field, whole)
        yield from keys(inner, f"{prefix}{name}{'[]' if many else ''}.")


@cache
def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the comment at each field of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base is not BaseModel and isinstance(base, type) and issubclass(base, BaseModel):
            found |= _comments(base)
    return found


def _comments(model: type[BaseModel]) -> dict[str, str]:
    source = inspect.getsource(model)
    lines = source.splitlines()
    comments = {
        token.start[0]: token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    (made,) = ast.parse(source).body
    assert isinstance(made, ast.ClassDef)
    for node in made.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        line = node.lineno - 1
        while line in comments and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comments[line].string)
            line -= 1
        beside = [
            comments[n].string
            for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if n in comments
        ]
        said = " ".join(text.lstrip("# ") for text in (*above, *beside))
        found[node.target.id] = said.replace("<", "&lt;")
    return found


def about(model: type[BaseModel]) -> str:
    """Return the first paragraph of a section's docstring, without the name of its file."""
    doc = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    return doc.partition(": ")[2] if doc.startswith(("orch.yaml", "train.yaml")) else doc


def section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Return the model in an annotation, and whether it is a list of such."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType, tuple, Annotated):
        for inner in get_args(annotation):
            found, many = section(inner)
            if found is not None:
                return found, many or origin is tuple
    return None, False


def default(field: FieldInfo) -> str:
    """Return the default as YAML has it, in one line."""
    value = field.default
    if value is PydanticUndefined:
        return "(required)"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple):
        value = [v.model_dump(exclude_unset=True) if isinstance(v, BaseModel) else v for v in value]
    if isinstance(value, float):
        return f"`{value:g}`" if value != int(value) or value >= 1e6 else f"`{value:.1f}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def kind(annotation: Any) -> str:
    """Return the name of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = arguments[0]
        return kind(inner)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        parts = [kind(one) for one in arguments if one is not type(None)]
        return ", ".join(dict.fromkeys(parts)) + (", null" if type(None) in arguments else "")
    if origin is tuple:
        return f"list of {kind(arguments[0])}"
    if origin is dict:
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {int: "int", float: "float", str: "string", bool: "bool"}
    return names.get(annotation, "any")


def own() -> list[tuple[str, ...]]:
    """Return the rows of lowroll's own keys: name, type, default, meaning."""
    from lowroll.config.resolve import RunConfig

    return [
        (f"`{key.name}`", _type(key.field), default(key.field), key.meaning)
        for key in keys(RunConfig)
        if not (key.name.startswith("eval.env[].") and key.name != "eval.env[].id")
    ]


def _type(field: FieldInfo) -> str:
    """Return the type of a key, without the null that its default shows already."""
    words = kind(field.annotation)
    return words.removesuffix(", null") if field.default is None else words


def of_file(file: str) -> list[tuple[str, ...]]:
    """Return the rows of a file of the document: name, default, where it acts, and what differs from
    the document, or why it is refused, once for keys that share it. A section has no row: its keys
    have one each."""
    from lowroll.config.surogate.read import MODELS
    from lowroll.config.surogate.table import TABLES

    rows = []
    before = ""
    for key in keys(MODELS[file]):
        row, refused = TABLES[file].get(key.name), only(key.field)
        if refused is not None:
            acts, differs = f"only {refused.words}", refused.why
        elif row is not None:
            acts, differs = ", ".join(f"`{name}`" for name in row.to), row.differs
        else:
            continue
        said = "as above" if differs and differs == before else differs
        rows.append((f"`{key.name}`", default(key.field), acts, said))
        before = differs
    return rows


def only(field: FieldInfo) -> Any:
    """Return why a key takes one value alone; None for any other key."""
    from lowroll.config.section import AllowOnly

    return next((found for found in field.metadata if isinstance(found, AllowOnly)), None)
