"""Hidden tests in the shapes that data sets have (docs/programs.md), and the program in a response."""

from __future__ import annotations

import json
import re
from typing import Any

from lowroll.envs.sandbox.cases import Case, as_text

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
FIELDS = ("tests", "test_cases", "input_output", "public_test_cases", "verification_info")
FUNCTIONAL = ("functional", "function_call", "call_based")
# expected by solutions with a class `Solution`
PRELUDE = "\n".join(
    [
        "import bisect, collections, copy, functools, heapq, itertools, math, random, re, string, sys",
        "from bisect import *",
        "from collections import *",
        "from functools import *",
        "from heapq import *",
        "from itertools import *",
        "from math import *",
        "from typing import *",
        "",
    ]
)


def last_block(text: str) -> str | None:
    """Return the content of a response's last closed fenced block, or None."""
    blocks = FENCE.findall(text)
    return blocks[-1][1] if blocks else None


def cases_of(row: dict[str, Any], where: str) -> list[Case]:
    """Return a row's hidden tests. ValueError names the place and the fault."""
    cases: list[Case] = []
    for field in (*FIELDS, "private_test_cases"):
        if row.get(field) is not None:
            value = _parse_if_text(row[field], f"{where}: field {field!r}")
            cases += _parse_cases(value, _function_name(row), f"{where}: field {field!r}")
    if not cases:
        raise ValueError(
            f"{where}: no tests in any of the fields {', '.join(FIELDS)} (there: "
            f"{', '.join(map(str, row))})"
        )
    return cases


def _parse_cases(value: Any, fn_name: str | None, where: str) -> list[Case]:
    if isinstance(value, dict) and "test_cases" in value:
        value = value["test_cases"]
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        return _cases_of_lists(value, where)
    if not isinstance(value, list):
        raise ValueError(
            f"{where}: must be a list of {{input, output}}, or {{inputs, outputs}}, got "
            f"{type(value).__name__}"
        )
    return [_parse_case(test, fn_name, f"{where}[{number}]") for number, test in enumerate(value)]


def _cases_of_lists(value: dict[str, Any], where: str) -> list[Case]:
    inputs, outputs, fn_name = value["inputs"], value["outputs"], value.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"{where}: 'inputs' and 'outputs' must be lists of one length")
    if not fn_name:
        return [
            Case(as_text(input_value), as_text(output_value))
            for input_value, output_value in zip(inputs, outputs, strict=True)
        ]
    return [
        Case(_require_list(input_value, where), _unwrap_result(output_value), fn_name)
        for input_value, output_value in zip(inputs, outputs, strict=True)
    ]


def _parse_case(one: Any, fn_name: str | None, where: str) -> Case:
    if not isinstance(one, dict) or not {"input", "output"} <= one.keys():
        raise ValueError(f"{where}: must have 'input' and 'output'")
    kind = one.get("testtype", one.get("type"))
    name = one.get("fn_name") or (fn_name if kind in FUNCTIONAL else None)
    if kind in FUNCTIONAL and not name:
        raise ValueError(f"{where}: a {kind} test needs the function's name (fn_name)")
    if not name:
        return Case(as_text(one["input"]), as_text(one["output"]))
    arguments, expected = one["input"], one["output"]
    if isinstance(arguments, str):  # LiveCodeBench: an argument a line, each as JSON
        arguments = [_parse_json(line, where) for line in arguments.split("\n") if line.strip()]
        expected = _parse_json(expected, where)
    return Case(_require_list(arguments, where), expected, name)


def _require_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: the arguments of a function must be a list")
    return value


def _unwrap_result(output: Any) -> Any:
    return output[0] if isinstance(output, list) and len(output) == 1 else output


def _function_name(row: dict[str, Any]) -> str | None:
    metadata = row.get("metadata")
    if isinstance(metadata, str) and metadata.lstrip().startswith("{"):
        metadata = _parse_json(metadata, "metadata")
    name = metadata.get("func_name") if isinstance(metadata, dict) else row.get("fn_name")
    return name if isinstance(name, str) else None


def _parse_if_text(value: Any, where: str) -> Any:
    return _parse_json(value, where) if isinstance(value, str) else value


def _parse_json(text: Any, where: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {str(error)[:100]}") from None
