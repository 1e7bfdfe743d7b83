"""The types of `lowroll.types` as JSON lines, strictly and without loss.

A batch is a header line (`kind`, `format`, `num_samples` and the batch's own fields) and one line a
sample. msgspec checks the lines against the dataclasses' type hints.

1. Floats are written as their shortest decimal, which parses back to the same double (Steele &
   White 1990), infinities and NaN as the strings "inf", "-inf" and "nan".
2. A union of dataclasses carries the class name under `type`.
3. Bytes are base64; a tuple of fixed length is a list of that length.
4. A field marked `types.OMITTED` is left out where it is None, and never null.
5. An unknown, missing or ill-typed field, a wrong count or a torn line is a CodecError that names
   the line and the field.

The decoder also accepts a repeated field, an integer above 2^53 in a float field, and bits behind
the last byte of base64.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable
from functools import cache, reduce
from typing import Any, Literal, TypeVar, Union, cast

import msgspec

from lowroll.types import Batch, Sample

Found = TypeVar("Found")

FORMAT = 1
MAX_BYTES = 1 << 30
_TAG = "type"
_MAX_EXACT_INT = 1 << 53  # integers up to here are doubles
_NON_FINITE = ("inf", "-inf", "nan")
_FLOAT: Any = float | Literal["inf", "-inf", "nan"]


class CodecError(ValueError):
    """A message that the codec did not write, or an object that it cannot write exactly."""


def encode_batch(batch: Batch) -> bytes:
    """Return a batch as lines. Raises CodecError."""
    return encode_header(batch) + b"".join(map(encode_sample, batch.samples))


def decode_batch(data: bytes, max_bytes: int = MAX_BYTES) -> Batch:
    """Decode `encode_batch`."""
    if len(data) > max_bytes:
        raise CodecError(f"a batch of {len(data)} bytes is over the limit of {max_bytes}")
    if not data.endswith(b"\n"):
        raise CodecError("the last line is torn (no newline at the end)")
    header, *lines = data[:-1].split(b"\n")
    batch = decode_header(header, len(lines))
    for number, line in enumerate(lines, 2):
        batch.samples.append(decode_sample(line, f"line {number}: sample"))
    return batch


def encode_header(batch: Batch) -> bytes:
    """Return the first line of a batch."""
    header = {"kind": "batch", "format": FORMAT, "num_samples": len(batch.samples)}
    header |= _to_plain(dataclasses.replace(batch, samples=[]), Batch, "batch")
    del header["samples"]
    return _encode_line(header, "batch")


def decode_header(line: bytes, num_samples: int) -> Batch:
    """Return the batch of a header, without its samples."""
    header = strictly("line 1", lambda: msgspec.json.decode(line))
    if type(header) is not dict or header.pop("kind", None) != "batch":
        raise CodecError("line 1: not the header of a batch")
    if (version := header.pop("format", None)) != FORMAT:
        raise CodecError(f"line 1: format {version!r}, this program reads {FORMAT}")
    count = header.pop("num_samples", None)
    if type(count) is not int or count != num_samples:
        raise CodecError(f"line 1: num_samples is {count!r}, {num_samples} samples follow")
    header["samples"] = []
    checked = strictly("line 1: batch", lambda: msgspec.convert(header, _schema(Batch)))
    return cast(Batch, _to_record(checked, Batch, _has_non_finite(line)))


def encode_sample(sample: Sample) -> bytes:
    return _encode_line(_to_plain(sample, Sample, "sample"), "sample")


def decode_sample(line: bytes, where: str = "sample") -> Sample:
    """Decode a sample's line, with or without its newline."""
    decoded = strictly(where, lambda: msgspec.json.decode(line, type=_schema(Sample)))
    return cast(Sample, _to_record(decoded, Sample, _has_non_finite(line)))


def strictly(where: str, call: Callable[[], Found]) -> Found:
    """Call msgspec, with its errors as a CodecError that begins with the field."""
    try:
        return call()
    except UnicodeEncodeError as error:
        raise CodecError(f"{where}: text that is not valid Unicode: {error.reason}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        text, _, path = str(error).partition(" - at `$")
        raise CodecError(f"{where}{path.removesuffix('`')}: {text}") from error


def _encode_line(value: Any, where: str) -> bytes:
    return strictly(where, lambda: msgspec.json.encode(value)) + b"\n"


@cache
def _field_hints(kind: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind)
    return {
        field.name: (hints[field.name], bool(field.metadata.get("omitted")))
        for field in dataclasses.fields(kind)
    }


@cache
def _origin_and_args(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(hint), typing.get_args(hint)


@cache
def _union_members(hint: Any) -> tuple[Any, ...]:
    origin, args = _origin_and_args(hint)
    return args if origin in (Union, types.UnionType) else ()


@cache
def _needs_no_conversion(hint: Any) -> bool:
    origin, args = _origin_and_args(hint)
    if origin is Literal or hint in (Any, str, int, bool, bytes, type(None)):
        return True
    return bool(args) and all(_needs_no_conversion(arg) for arg in args if arg is not ...)


@cache
def _is_numeric(hint: Any) -> bool:
    origin, args = _origin_and_args(hint)
    members = [member for member in args if member is not ...]
    return origin in (list, tuple) and all(
        member in (int, float) or _is_numeric(member) for member in members
    )


@cache
def _schema(hint: Any, tagged: bool = False) -> Any:
    if hint is float:
        return _FLOAT
    if dataclasses.is_dataclass(hint):
        return _msgspec_struct(cast(type, hint), tagged)
    if members := _union_members(hint):
        return reduce(operator.or_, (_schema(member, True) for member in members))
    origin, args = _origin_and_args(hint)
    if origin in (list, tuple, dict):
        return origin[tuple(arg if arg is ... else _schema(arg) for arg in args)]
    return hint


def _msgspec_struct(kind: type, tagged: bool) -> type[msgspec.Struct]:
    members: list[Any] = []
    for name, (hint, is_omitted) in _field_hints(kind).items():
        if is_omitted:  # the hint is `... | None`, and None is never in the JSON
            given = [member for member in _union_members(hint) if member is not type(None)]
            schema = reduce(operator.or_, (_schema(member, True) for member in given))
            members.append((name, schema | msgspec.UnsetType, msgspec.UNSET))
        else:
            members.append((name, _schema(hint)))
    return msgspec.defstruct(
        kind.__name__,
        members,
        kw_only=True,
        forbid_unknown_fields=True,
        tag=kind.__name__ if tagged else None,
        tag_field=_TAG if tagged else None,
    )


def _to_plain(value: Any, hint: Any, where: str) -> Any:
    if hint is Any:
        return _check_json(value, where)
    if members := _union_members(hint):
        return _union_to_plain(value, members, where)
    origin, args = _origin_and_args(hint)
    if origin is Literal:
        if value not in args:
            raise CodecError(f"{where}: {value!r} is none of {args}")
        return value
    if hint is float:
        return _float_to_plain(value, where)
    _check_type(value, origin or hint, where)
    if dataclasses.is_dataclass(hint):
        plain = {}
        for name, (item_hint, is_omitted) in _field_hints(cast(type, hint)).items():
            item = getattr(value, name)
            if item is not None or not is_omitted:
                plain[name] = _to_plain(item, item_hint, f"{where}.{name}")
        return plain
    if _is_numeric(hint) and (numbers := _encode_numbers(value, hint)) is not None:
        return numbers
    if origin is dict:
        return {
            _to_plain(key, args[0], f"{where}: key"): _to_plain(item, args[1], f"{where}.{key}")
            for key, item in value.items()
        }
    if origin is list or origin is tuple and args[-1] is ...:
        return [_to_plain(item, args[0], f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        if len(value) != len(args):
            raise CodecError(f"{where}: expected {len(args)} items, got {len(value)}")
        return [
            _to_plain(item, item_hint, where) for item, item_hint in zip(value, args, strict=True)
        ]
    return value


def _union_to_plain(value: Any, members: tuple[Any, ...], where: str) -> Any:
    kind = type(value)
    for member in members:
        origin, _ = _origin_and_args(member)
        if kind is (origin or member):
            plain = _to_plain(value, member, where)
            return {_TAG: kind.__name__, **plain} if dataclasses.is_dataclass(member) else plain
    if float in members and kind is int:
        return _float_to_plain(value, where)
    names = ", ".join(getattr(member, "__name__", str(member)) for member in members)
    raise CodecError(f"{where}: {kind.__name__} is none of {names}")


def _float_to_plain(value: Any, where: str) -> float | str:
    if type(value) is int and abs(value) <= _MAX_EXACT_INT:
        return float(value)
    _check_type(value, float, where)
    return value if math.isfinite(value) else str(value)


def _check_type(value: Any, kind: type, where: str) -> None:
    if type(value) is not kind:
        raise CodecError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")


def _encode_numbers(values: Any, hint: Any) -> msgspec.Raw | None:
    """Return lists of numbers as JSON, checked together, because a batch has millions of them. None
    for another type, or a number that is not finite."""
    try:
        converted = msgspec.convert(values, hint)
        data = msgspec.json.encode(converted)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return None
    return msgspec.Raw(data) if converted == values and b"null" not in data else None


def _check_json(value: Any, where: str) -> Any:
    if type(value) is dict:
        for key, item in value.items():
            _check_type(key, str, f"{where}: key")
            _check_json(item, f"{where}.{key}")
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        raise CodecError(f"{where}: {value} is not a JSON number")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CodecError(f"{where}: a {type(value).__name__} is not JSON data")
    return value


def _has_non_finite(line: bytes) -> bool:
    return any(f'"{non_finite}"'.encode() in line for non_finite in _NON_FINITE)


def _to_record(value: Any, hint: Any, has_non_finite: bool) -> Any:
    if _needs_no_conversion(hint) or _is_numeric(hint) and not has_non_finite:
        return value
    if members := _union_members(hint):
        return _union_to_record(value, members, has_non_finite)
    if dataclasses.is_dataclass(hint):
        kind = cast(type, hint)
        fields: dict[str, Any] = {}
        for name, (item_hint, _) in _field_hints(kind).items():
            item = getattr(value, name)
            if item is not msgspec.UNSET:
                fields[name] = _to_record(item, item_hint, has_non_finite)
        return kind(**fields)
    if hint is float:
        return float(value)
    origin, args = _origin_and_args(hint)
    if origin is dict:
        return {key: _to_record(item, args[1], has_non_finite) for key, item in value.items()}
    if len(args) == 1 or args[-1] is ...:
        return origin(_to_record(item, args[0], has_non_finite) for item in value)
    return tuple(
        _to_record(item, item_hint, has_non_finite)
        for item, item_hint in zip(value, args, strict=True)
    )


def _union_to_record(value: Any, members: tuple[Any, ...], has_non_finite: bool) -> Any:
    for member in members:
        origin, _ = _origin_and_args(member)
        if type(value).__name__ == (origin or member).__name__:
            return _to_record(value, member, has_non_finite)
    # an integer, or the string of an infinity or NaN
    return float(value) if float in members and value is not None else value
