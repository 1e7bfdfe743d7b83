"""The nouns of `lowroll.types` as JSON lines, strictly and without loss.

A batch is one header line (`kind`, `format`, `num_samples` and the batch's own fields) followed by
one line a sample, UTF-8, each ended by a newline. The schema is read off the dataclasses' type
hints, so a new field needs no code here.

1. Floats travel as Python's shortest repr, which parses back to the same double (Steele & White
   1990; David Gay). JSON has no infinities: a float field holds the string "inf", "-inf" or "nan"
   for those, and no other string.
2. A union of dataclasses carries the class name under `type`.
3. Bytes travel as base64, a tuple of fixed length as a list of that length.
4. A field that says so (`types.OMITTED`) is left out where it is None, and never null.
5. Decoding is strict: an unknown, missing, duplicated or ill-typed field, a wrong count, a torn line or an oversized
   message is a CodecError that names the line and the field. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import itertools
import json
import math
import operator
import types
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union

from lowroll.types import Batch, Sample

Record = TypeVar("Record")

FORMAT = 1
MAX_BYTES = 1 << 30
_TAG = "type"
_EXACT = 1 << 53  # integers up to here are doubles
_PLAIN = (str, int, bool)  # what JSON has as it is
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class CodecError(ValueError):
    """A message that is not what the codec writes, or an object that it cannot write without
    loss."""


def encode_batch(batch: Batch, encode: Callable[[Sample], bytes] | None = None) -> bytes:
    """Return a header line and one line a sample (by `encode`, else `encode_sample`). CodecError
    naming the field that JSON cannot carry exactly."""
    header = {"kind": "batch", "format": FORMAT, "num_samples": len(batch.samples)}
    header |= _encode(replace(batch, samples=[]), Batch, "batch")
    del header["samples"]
    return _line(header) + b"".join(map(encode or encode_sample, batch.samples))


def decode_batch(
    data: bytes, max_bytes: int = MAX_BYTES, decode: Callable[[bytes, str], Sample] | None = None
) -> Batch:
    """Return the batch that `encode_batch` wrote as `data`; its samples by `decode`, else
    `decode_sample`."""
    if len(data) > max_bytes:
        raise CodecError(f"a batch of {len(data)} bytes is over the limit of {max_bytes}")
    if not data.endswith(b"\n"):
        raise CodecError("the last line is torn (no newline at the end)")
    lines = data[:-1].split(b"\n")
    header = _parse(lines[0], "line 1")
    if type(header) is not dict or header.pop("kind", None) != "batch":
        raise CodecError("line 1: not the header of a batch")
    if (version := header.pop("format", None)) != FORMAT:
        raise CodecError(f"line 1: format {version!r}, this program reads {FORMAT}")
    count = header.pop("num_samples", None)
    if type(count) is not int or count != len(lines) - 1:
        raise CodecError(f"line 1: num_samples is {count!r}, {len(lines) - 1} samples follow")
    header["samples"] = []
    batch = _decode(header, Batch, "line 1: batch")
    for number, line in enumerate(lines[1:], 2):
        batch.samples.append((decode or decode_sample)(line, f"line {number}: sample"))
    return batch


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as one line, newline included."""
    return encode_record(sample, "sample")


def decode_sample(line: bytes, where: str = "sample") -> Sample:
    """Return the sample that `encode_sample` wrote as `line` (with or without its newline)."""
    return decode_record(Sample, line, where)


def encode_record(record: Any, where: str) -> bytes:
    """Return any dataclass of plain data as one line, newline included."""
    return _line(_encode(record, type(record), where))


def decode_record(kind: type[Record], line: bytes, where: str) -> Record:
    """Return the `kind` that `encode_record` wrote as `line` (with or without its newline)."""
    record: Record = _decode(_parse(line.removesuffix(b"\n"), where), kind, where)
    return record


def _line(value: Any) -> bytes:
    try:
        return (
            json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
            + b"\n"
        )
    except UnicodeEncodeError as error:
        raise CodecError(f"text that is not valid Unicode: {error.reason}") from error


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(
            line.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except (
        ValueError,
        RecursionError,
    ) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CodecError(f"{where}: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise CodecError(f"duplicated field {next(key for key in keys if keys.count(key) > 1)!r}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise CodecError(f"{text} is not JSON")


@cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def _omitted(kind: type) -> frozenset[str]:
    """Return the fields that are left out where they are None."""
    return frozenset(f.name for f in dataclasses.fields(kind) if f.metadata.get("omitted"))


class _Shape(typing.NamedTuple):
    """A type hint, taken apart."""

    origin: Any  # list of list[int], None of int
    args: tuple[Any, ...]
    options: tuple[Any, ...]  # the members of a union, or ()
    is_record: bool  # a dataclass
    is_fixed: bool  # a tuple of so many items, each of a type of its own


@cache
def _shape(hint: Any) -> _Shape:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    return _Shape(
        origin,
        args,
        args if origin in (Union, types.UnionType) else (),
        dataclasses.is_dataclass(hint),
        origin is tuple and args[-1] is not ...,
    )


def _encode(value: Any, hint: Any, where: str) -> Any:
    if type(value) is hint and hint in _PLAIN:
        return value
    if hint is Any:
        return _check_json(value, where)
    origin, args, options, is_record, is_fixed = _shape(hint)
    if options:
        return _encode_union(value, options, where)
    if is_record:
        kind = typing.cast(type, hint)
        _expect(value, kind, where)
        return {
            name: _encode(getattr(value, name), inner, f"{where}.{name}")
            for name, inner in _fields(kind).items()
            if name not in _omitted(kind) or getattr(value, name) is not None
        }
    if origin in (list, tuple):
        _expect(value, origin, where)
        if is_fixed:
            _expect_length(value, args, where)
            return [_encode(one, inner, where) for one, inner in zip(value, args, strict=True)]
        return _encode_items(value, args[0], where)
    if origin is dict:
        _expect(value, dict, where)
        return {
            _encode(key, str, f"{where}: key"): _encode(item, args[1], f"{where}.{key}")
            for key, item in value.items()
        }
    return _encode_scalar(value, hint, where)


def _encode_items(values: Any, hint: Any, where: str) -> Any:
    if _are_plain(values, hint, tuple):
        return values
    return [_encode(value, hint, f"{where}[{index}]") for index, value in enumerate(values)]


def _are_plain(values: Any, hint: Any, fixed: type) -> bool:
    """Return whether JSON has all values as they are, looked at all at once: a batch has millions
    of them. False where any needs a closer look. fixed: the type of a tuple of so many items just
    now, a tuple in an object and a list in JSON."""
    if not values:
        return True
    kinds = set(map(type, values))
    if hint is float:  # a sum with one that is not finite is not finite either
        return kinds == {float} and math.isfinite(sum(values))
    if hint in (int, str):
        return kinds == {hint}
    origin, args, _, _, is_fixed = _shape(hint)
    if is_fixed:
        return (
            kinds == {fixed}
            and set(map(len, values)) == {len(args)}
            and all(
                _are_plain(list(map(operator.itemgetter(place), values)), inner, fixed)
                for place, inner in enumerate(args)
            )
        )
    if origin is list and kinds == {list}:
        return _are_plain(list(itertools.chain.from_iterable(values)), args[0], fixed)
    return False


def _encode_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    if dataclasses.is_dataclass(value) and type(value) in options:
        return {_TAG: type(value).__name__, **_encode(value, type(value), where)}
    for hint in options:
        if _shape(hint).origin is type(value) or _is_word(value, hint):
            return _encode(value, hint, where)
        if hint is type(value) or (hint is float and type(value) is int and int not in options):
            return _encode(value, hint, where)
    raise CodecError(f"{where}: {type(value).__name__} is none of {_names(options)}")


def _is_word(value: Any, hint: Any) -> bool:
    """Return whether a value is one of a Literal."""
    shape = _shape(hint)
    return shape.origin is Literal and value in shape.args


def _encode_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float:
        if type(value) is int and abs(value) <= _EXACT:
            return float(value)
        _expect(value, float, where)
        if math.isfinite(value):
            return value
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if _shape(hint).origin is Literal:
        if value not in _shape(hint).args:
            raise CodecError(f"{where}: {value!r} is none of {typing.get_args(hint)}")
        return value
    _expect(value, hint, where)
    return base64.b64encode(value).decode() if hint is bytes else value


def _check_json(value: Any, where: str) -> Any:
    """Return `value` unless JSON would change it: tuples, non-string keys, NaN, objects."""
    if type(value) is dict:
        for key, item in value.items():
            _expect(key, str, f"{where}: key")
            _check_json(item, f"{where}.{key}")
    elif type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{where}[{index}]")
    elif type(value) is float and not math.isfinite(value):
        raise CodecError(f"{where}: {value} is not a JSON number")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CodecError(f"{where}: a {type(value).__name__} is not JSON data")
    return value


def _decode(value: Any, hint: Any, where: str) -> Any:
    if hint is Any or (type(value) is hint and hint in _PLAIN):
        return value
    origin, args, options, is_record, is_fixed = _shape(hint)
    if options:
        return _decode_union(value, options, where)
    if is_record:
        return _decode_dataclass(value, typing.cast(type, hint), where)
    if origin in (list, tuple):
        _expect(value, list, where)
        if is_fixed:
            _expect_length(value, args, where)
            return tuple(_decode(one, inner, where) for one, inner in zip(value, args, strict=True))
        return origin(_decode_items(value, args[0], where))
    if origin is dict:
        _expect(value, dict, where)
        return {key: _decode(item, args[1], f"{where}.{key}") for key, item in value.items()}
    return _decode_scalar(value, hint, where)


def _decode_items(values: list[Any], hint: Any, where: str) -> list[Any]:
    if _are_plain(values, hint, list):
        return _with_tuples(values, hint)
    return [_decode(value, hint, f"{where}[{index}]") for index, value in enumerate(values)]


def _with_tuples(values: list[Any], hint: Any) -> list[Any]:
    """Return plain values with the tuples that JSON has not."""
    args = _shape(hint).args
    if not args:
        return values
    if _shape(hint).is_fixed:
        if not any(map(typing.get_args, args)):
            return list(map(tuple, values))
        columns = [_with_tuples([v[i] for v in values], inner) for i, inner in enumerate(args)]
        return list(zip(*columns, strict=True))
    return [_with_tuples(value, args[0]) for value in values]


def _decode_dataclass(value: Any, kind: type, where: str) -> Any:
    _expect(value, dict, where)
    fields = _fields(kind)
    if unknown := value.keys() - fields.keys():
        raise CodecError(f"{where}: unknown field {min(unknown)!r}")
    if missing := fields.keys() - value.keys() - _omitted(kind):
        raise CodecError(f"{where}: missing field {min(missing)!r}")
    if null := [name for name in _omitted(kind) & value.keys() if value[name] is None]:
        raise CodecError(
            f"{where}: field {min(null)!r} is null, which is written by leaving it out"
        )
    return kind(
        **{
            name: _decode(value[name], hint, f"{where}.{name}")
            for name, hint in fields.items()
            if name in value
        }
    )


def _decode_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    if type(value) is dict:
        kinds: dict[str, type] = {
            kind.__name__: kind
            for kind in options
            if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        }
        if not kinds:
            return _decode(value, _of_kind(options, (dict,), value, where), where)
        kind = kinds.get(value.get(_TAG, "")) if isinstance(value.get(_TAG), str) else None
        if kind is None:
            raise CodecError(f"{where}: field {_TAG!r} is none of {_names(options)}")
        return _decode_dataclass(
            {key: item for key, item in value.items() if key != _TAG}, kind, where
        )
    if type(value) is list:
        return _decode(value, _of_kind(options, (list, tuple), value, where), where)
    if type(value) in options or any(_is_word(value, hint) for hint in options):
        return value
    if float in options:
        return _decode_scalar(value, float, where)
    raise CodecError(f"{where}: {type(value).__name__} is none of {_names(options)}")


def _of_kind(options: tuple[Any, ...], kinds: tuple[type, ...], value: Any, where: str) -> Any:
    """Return the member of a union that is a generic of one of `kinds`."""
    for hint in options:
        if _shape(hint).origin in kinds:
            return hint
    raise CodecError(f"{where}: {type(value).__name__} is none of {_names(options)}")


def _decode_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float:
        if type(value) is str and value in _NON_FINITE:
            return _NON_FINITE[value]
        if type(value) is int and abs(value) <= _EXACT:
            return float(value)
    if _shape(hint).origin is Literal:
        if type(value) is not str or value not in _shape(hint).args:
            raise CodecError(f"{where}: {value!r} is none of {typing.get_args(hint)}")
        return value
    if hint is bytes:
        return _decode_bytes(value, where)
    _expect(value, hint, where)
    return value


def _decode_bytes(value: Any, where: str) -> bytes:
    _expect(value, str, where)
    try:
        data = base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error) as error:
        raise CodecError(f"{where}: not base64: {error}") from error
    if base64.b64encode(data).decode() != value:  # bits behind the last byte
        raise CodecError(f"{where}: not base64 as it is written here")
    return data


def _expect_length(value: Any, items: tuple[Any, ...], where: str) -> None:
    if len(value) != len(items):
        raise CodecError(f"{where}: expected {len(items)} items, got {len(value)}")


def _expect(value: Any, kind: Any, where: str) -> None:
    if type(value) is not kind:
        raise CodecError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")


def _names(options: tuple[Any, ...]) -> str:
    return ", ".join(
        "null" if option is type(None) else getattr(option, "__name__", str(option))
        for option in options
    )
