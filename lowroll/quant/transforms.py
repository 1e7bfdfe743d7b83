r"""Rotations of a folder's matrices in compressed-tensors' `transform_config`.

    {"config_groups": {"hadamard_64": {"type": "hadamard", "head_dim": 64, "apply": [
        {"targets": ["re:.*\\.q_proj$", ...], "location": "input"},
        {"targets": ["re:.*\\.q_proj$", ...], "location": "weight_input", "inverse": true}]}}}

`input` rotates the activations of every product; `weight_input` is already in the stored codes.
Each width of block (`kernels.quantize.rotation`) has one group. With mixed formats, targets are
module names. Any other transform is refused (compressed-tensors 0.20; vLLM 0.32 reads it,
transformers 5.23 does not).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowroll.kernels.quantize.rotation import width

KEY = "transform_config"
# filled in by compressed-tensors
_GROUP_DEFAULTS = {"randomize": False, "requires_grad": False, "precision": "torch.float32"}


def describe(columns: Mapping[str, int]) -> dict[str, Any]:
    """Return the `transform_config` of a rotated model. columns: in features by kind of matrix or
    module."""
    widths = {kind: width(size) for kind, size in columns.items()}
    groups = {}
    for size in sorted(set(widths.values()) - {1}):
        kinds = [kind for kind, block_size in widths.items() if block_size == size]
        groups[f"hadamard_{size}"] = _describe_group(size, kinds)
    return {"config_groups": groups}


def read(config: Any) -> dict[str, int]:
    """Return the widths of blocks by kind of matrix or module. ValueError for another transform."""
    groups = config.get("config_groups") if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        raise ValueError(f"{KEY}.config_groups: expected groups of transforms, got {groups!r}")
    widths: dict[str, int] = {}
    for name, group in groups.items():
        kinds, size = _read_group(f"{KEY}.config_groups.{name}", group)
        if rotated_twice := sorted(kinds & widths.keys()):
            raise ValueError(f"{KEY}: {rotated_twice[0]} is rotated twice")
        widths |= dict.fromkeys(kinds, size)
    return widths


def check(found: Mapping[str, int], columns: Mapping[str, int]) -> None:
    """Raise ValueError where a folder's rotations do not fit matrices."""
    for kind, size in columns.items():
        if found.get(kind, 1) != width(size):
            raise ValueError(
                f"{KEY}: {kind} is rotated in blocks of {found.get(kind, 1)}, and {width(size)} is "
                f"what is known here for rows of {size}"
            )


def _describe_group(size: int, parts: list[str]) -> dict[str, Any]:
    targets = [kind if "." in kind else rf"re:.*\.{kind}$" for kind in parts]
    apply = [
        {"targets": targets, "location": "input", "inverse": False, "ignore": []},
        {"targets": targets, "location": "weight_input", "inverse": True, "ignore": []},
    ]
    return {"type": "hadamard", "apply": apply, "head_dim": size, **_GROUP_DEFAULTS}


def _read_group(where: str, group: Any) -> tuple[set[str], int]:
    known_keys = {"type", "apply", "head_dim", *_GROUP_DEFAULTS}
    if not isinstance(group, dict) or not group.keys() <= known_keys:
        raise ValueError(f"{where}: expected the keys {', '.join(sorted(known_keys))}")
    block_size = group.get("head_dim")
    if group.get("type") != "hadamard" or not isinstance(block_size, int):
        raise ValueError(
            f"{where}: a hadamard transform with a head_dim is supported, and no other"
        )
    for key, value in _GROUP_DEFAULTS.items():
        if group.get(key, value) != value:
            raise ValueError(f"{where}.{key}: {group[key]!r} is not supported")
    sides = _read_sides(where, group.get("apply"))
    # a Sylvester matrix is its own inverse, so `inverse` says nothing
    if sides.keys() != {"input", "weight_input"} or sides["input"] != sides["weight_input"]:
        raise ValueError(f"{where}.apply: expected the same targets at input and weight_input")
    return sides["input"], block_size


def _read_sides(where: str, entries: Any) -> dict[str, set[str]]:
    sides: dict[str, set[str]] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or entry.get("ignore"):
            raise ValueError(f"{where}.apply: {entry!r} is not supported")
        side, targets = str(entry.get("location")), entry.get("targets")
        if side in sides or not isinstance(targets, list):
            raise ValueError(f"{where}.apply: expected one list of targets for each location")
        sides[side] = {_parse_target(where, target) for target in targets}
    return sides


def _parse_target(where: str, target: Any) -> str:
    text = str(target)
    if "." in text and all(name.isalnum() or name.isidentifier() for name in text.split(".")):
        return text
    kind = text.removeprefix(r"re:.*\.").removesuffix("$")
    if text != rf"re:.*\.{kind}$" or not kind.isidentifier():
        raise ValueError(rf"{where}.apply.targets: {target!r} is not like 're:.*\.q_proj$'")
    return kind
