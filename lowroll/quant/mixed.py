"""Assignments of a format to each linear layer, under one name.

    name = mixed.register({"blocks.0.qkv": "int8", "blocks.0.o": "nvfp4", ...}, sizes)
    get_format(name).of("blocks.0.qkv").name     "int8"

The name is `mixed-` and eight hex digits of the assignment's digest. A process knows only the
assignments that it registered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from lowroll.quant import dense
from lowroll.quant.formats import Format, QTensor, get_format, register_format
from lowroll.quant.table import EIGHT_BITS, FORMATS, OWN

PREFIX = "mixed-"


class Mixed(Format):
    """A format that assigns a plain format to each linear layer. sizes: weights of each layer."""

    summary = "a format for each linear layer"

    def __init__(self, assignment: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        self.assignment = dict(sorted(assignment.items()))
        self.sizes = {layer: sizes[layer] for layer in self.assignment}
        text = json.dumps([(layer, name, sizes[layer]) for layer, name in self.assignment.items()])
        self.name = PREFIX + blake2b(text.encode(), digest_size=4).hexdigest()
        self.bits = mean_bits(assignment, sizes)
        self.fallback = EIGHT_BITS if self.bits < 8 else OWN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and self.stated() == other.stated()

    def __hash__(self) -> int:
        return hash(self.name)

    def of(self, layer: str) -> Format:
        """Return a layer's format. ValueError if it has none."""
        if layer not in self.assignment:
            raise ValueError(f"{self.name}: it assigns no format to {layer}")
        return get_format(self.assignment[layer])

    @property
    def dense(self) -> bool:
        return all(FORMATS[name].dense for name in self.assignment.values())

    @property
    def rounds_activations(self) -> bool:
        return any(get_format(name).rounds_activations for name in self.assignment.values())

    def stated(self) -> dict[str, dict[str, int]]:
        return stated(self.assignment, self.sizes)

    def slower_than_float32(self, device: torch.device) -> str:
        formats = [get_format(name) for name in sorted(set(self.assignment.values()))]
        reasons = ((fmt.name, fmt.slower_than_float32(device)) for fmt in formats)
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        raise self._no_layer()

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        raise self._no_layer()

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        raise self._no_layer()

    def _no_layer(self) -> ValueError:
        return ValueError(f"{self.name}: every layer has a format of its own, and none was named")


def title(name: str) -> str:
    """Return a format's name for a person."""
    if not name.startswith(PREFIX):
        return name
    form = get_format(name)
    assert isinstance(form, Mixed)
    formats = " and ".join(sorted(set(form.assignment.values())))
    return f"{formats} ({form.bits:.3g} bits a linear weight)"


def register(
    assignment: Mapping[str, str], sizes: Mapping[str, int], dtype: torch.dtype | None = None
) -> str:
    """Register an assignment; return its name, or the format that all layers share. sizes: weights
    of each layer. dtype: of `dense` layers. ValueError for an empty assignment or a format that is
    not plain."""
    if not assignment:
        raise ValueError("an assignment of formats names no layer")
    if dtype is not None:
        if set(assignment.values()) == {OWN}:
            return OWN
        assignment = in_dtype(assignment, dtype)
    for layer, name in assignment.items():
        if name not in FORMATS:
            raise ValueError(f"{layer}: {name!r} is none of {', '.join(FORMATS)}")
    if len(set(assignment.values())) == 1:
        return next(iter(assignment.values()))
    mixed = Mixed(assignment, sizes)
    register_format(mixed)
    return mixed.name


def stated(assignment: Mapping[str, str], sizes: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return an assignment as files hold it: each format's layers, with their weights."""
    sizes_by_format: dict[str, dict[str, int]] = {}
    for layer, name in sorted(assignment.items()):
        sizes_by_format.setdefault(name, {})[layer] = sizes[layer]
    return sizes_by_format


def read(found: object, dtype: torch.dtype | None = None) -> str:
    """Register the result of `stated`; return its name. ValueError for anything else."""
    assignment: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, layers in found.items() if isinstance(found, dict) else ():
        for layer, size in layers.items() if isinstance(layers, dict) else ():
            if type(size) is not int or size < 1 or layer in assignment:
                raise ValueError(f"{layer}: expected its number of weights, once; got {size!r}")
            assignment[layer], sizes[layer] = str(name), size
    return register(assignment, sizes, dtype)


def mean_bits(assignment: Mapping[str, str], sizes: Mapping[str, int]) -> float:
    total = sum(sizes[layer] for layer in assignment)
    return sum(sizes[layer] * get_format(name).bits for layer, name in assignment.items()) / total


def in_dtype(assignment: Mapping[str, str], dtype: torch.dtype) -> dict[str, str]:
    """Replace `dense` by the dense format of a dtype. ValueError when there is none."""
    dense_format = dense.of(dtype)
    if dense_format is None and OWN in assignment.values():
        raise ValueError(f"dtype: no dense format has {dtype}")
    return {layer: str(dense_format) if name == OWN else name for layer, name in assignment.items()}
