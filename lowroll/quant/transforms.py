r"""Rotations of a folder's matrices in compressed-tensors' `transform_config`.

    {"config_groups": {"hadamard_64": {"type": "hadamard", "head_dim": 64, "apply": [
        {"targets": ["re:.*\\.q_proj$", ...], "location": "input"},
        {"targets": ["re:.*\\.q_proj$", ...], "location": "weight_input", "inverse": true}]}}}

`input` rotates the activations in every product; `weight_input` rotates the weights, and is already
in the stored codes. There is one group for each width of block (`kernels.quantize.rotation`); a
matrix that no block divides is in none. With mixed formats, targets are module names. Any other
transform is another model, and is refused (compressed-tensors 0.20; vLLM 0.32 reads it,
transformers 5.23 does not).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowroll.kernels.quantize.rotation import width

KEY = "transform_config"
# keys of a group that compressed-tensors fills in
_PLAIN = {"randomize": False, "requires_grad": False, "precision": "torch.float32"}


def describe(columns: Mapping[str, int]) -> dict[str, Any]:
    """Return the `transform_config` of a rotated model. columns: the in features of each kind of
    matrix ("q_proj", ...) or of each module."""
    widths = {part: width(size) for part, size in columns.items()}
    return {
        "config_groups": {
            f"hadamard_{size}": _group(size, [part for part, w in widths.items() if w == size])
            for size in sorted(set(widths.values()) - {1})
        }
    }


def read(config: Any) -> dict[str, int]:
    """Return the width of the blocks by kind of matrix, or by module. ValueError names what
    `describe` does not write."""
    groups = config.get("config_groups") if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        raise ValueError(f"{KEY}.config_groups: expected groups of transforms, got {groups!r}")
    found: dict[str, int] = {}
    for name, group in groups.items():
        parts, size = _read_group(f"{KEY}.config_groups.{name}", group)
        if twice := sorted(parts & found.keys()):
            raise ValueError(f"{KEY}: {twice[0]} is rotated twice")
        found |= dict.fromkeys(parts, size)
    return found


def check(found: Mapping[str, int], columns: Mapping[str, int]) -> None:
    """Raise ValueError where a folder's rotations do not fit matrices with these features."""
    for part, size in columns.items():
        if found.get(part, 1) != width(size):
            raise ValueError(
                f"{KEY}: {part} is rotated in blocks of {found.get(part, 1)}, and {width(size)} is "
                f"what is known here for rows of {size}"
            )


def _group(size: int, parts: list[str]) -> dict[str, Any]:
    targets = [part if "." in part else rf"re:.*\.{part}$" for part in parts]
    apply = [
        {"targets": targets, "location": "input", "inverse": False, "ignore": []},
        {"targets": targets, "location": "weight_input", "inverse": True, "ignore": []},
    ]
    return {"type": "hadamard", "apply": apply, "head_dim": size, **_PLAIN}


def _read_group(where: str, group: Any) -> tuple[set[str], int]:
    known = {"type", "apply", "head_dim", *_PLAIN}
    if not isinstance(group, dict) or not group.keys() <= known:
        raise ValueError(f"{where}: expected the keys {', '.join(sorted(known))}")
    size = group.get("head_dim")
    if group.get("type") != "hadamard" or not isinstance(size, int):
        raise ValueError(
            f"{where}: a hadamard transform with a head_dim is supported, and no other"
        )
    odd = [key for key, value in _PLAIN.items() if group.get(key, value) != value]
    if odd:
        raise ValueError(f"{where}.{odd[0]}: {group[odd[0]]!r} is not supported")
    apply = group.get("apply")
    sides: dict[str, set[str]] = {}
    for entry in apply if isinstance(apply, list) else ():
        if not isinstance(entry, dict) or entry.get("ignore"):
            raise ValueError(f"{where}.apply: {entry!r} is not supported")
        side, targets = str(entry.get("location")), entry.get("targets")
        if side in sides or not isinstance(targets, list):
            raise ValueError(f"{where}.apply: expected one list of targets for each location")
        sides[side] = {_part(where, target) for target in targets}
    # a Sylvester matrix is its own inverse, so `inverse` says nothing
    if sides.keys() != {"input", "weight_input"} or sides["input"] != sides["weight_input"]:
        raise ValueError(f"{where}.apply: expected the same targets at input and weight_input")
    return sides["input"], size


def _part(where: str, target: Any) -> str:
    text = str(target)
    if "." in text and all(name.isalnum() or name.isidentifier() for name in text.split(".")):
        return text
    part = text.removeprefix(r"re:.*\.").removesuffix("$")
    if text != rf"re:.*\.{part}$" or not part.isidentifier():
        raise ValueError(rf"{where}.apply.targets: {target!r} is not like 're:.*\.q_proj$'")
    return part
