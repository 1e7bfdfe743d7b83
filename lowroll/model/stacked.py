"""Experts that a folder stores as one tensor, where the decoder has names for each expert.

    by rows       gate_up_proj [E, 2 F, D], gates in front of ups;  down_proj [E, D, F]     (Qwen3.5-MoE)
    by columns    gate_up_proj [E, D, 2 F], gates and ups alternating, gate_up_proj_bias [E, 2 F];
                  down_proj [E, F, D], down_proj_bias [E, D]                                 (GPT-OSS)
    in MXFP4      gate_up_proj_blocks uint8 [E, 2 F, D / 32, 16], gate_up_proj_scales [E, 2 F, D / 32],
                  rows alternating; down_proj likewise                                       (GPT-OSS)

Blocks and scales have the bytes of `quant.mxfp4`, with other rows.

Legend: `model`; E experts, N and F of an expert.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowroll.model.names import hf_names, stored_hf_names
from lowroll.model.spec import ModelSpec
from lowroll.quant.formats import Format, QTensor, get_format
from lowroll.quant.layouts import EXPERTS_IN_MXFP4, FLOATS
from lowroll.quant.mixed import Mixed
from lowroll.quant.mxfp4 import BLOCK, MXFloat4
from lowroll.quant.scheme import Header

EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class StackedTensor:
    """The stored tensor of one matrix or bias of all experts of a layer. by_columns: transposed.
    alternating: rows of gates and of ups alternate."""

    name: str
    num_experts: int
    rows: int  # of an expert
    columns: int | None  # None: a bias
    by_columns: bool
    alternating: bool

    def headers(self, in_mxfp4: bool) -> dict[str, Header]:
        """Return the headers in a file. ValueError unless MXFP4's blocks divide the columns."""
        if self.columns is None:
            return {self.name: ((self.num_experts, self.rows), FLOATS)}
        if not in_mxfp4:
            sizes = (self.columns, self.rows) if self.by_columns else (self.rows, self.columns)
            return {self.name: ((self.num_experts, *sizes), FLOATS)}
        if self.columns % BLOCK:
            raise ValueError(f"{self.name}: rows of {self.columns} are no whole blocks of {BLOCK}")
        shape = (self.num_experts, self.rows, self.columns // BLOCK)
        return {
            f"{self.name}_blocks": ((*shape, BLOCK // 2), ("U8",)),
            f"{self.name}_scales": (shape, ("U8",)),
        }

    def by_expert(self, stored: Tensor) -> Tensor:
        """Return a dense stored tensor as in the decoder: [E N, K], or [E N] of a bias."""
        if self.by_columns and self.columns is not None:
            stored = stored.transpose(1, 2)
        return self._in_order(stored).flatten(0, 1).contiguous()

    def stored(self, w_NK: Tensor) -> Tensor:
        w_ENK = self._alternate(w_NK.unflatten(0, (self.num_experts, self.rows)))
        is_turned = self.by_columns and self.columns is not None
        return (w_ENK.transpose(1, 2) if is_turned else w_ENK).contiguous()

    def decode(self, tensors: Mapping[str, Tensor]) -> QTensor:
        """Return the QTensor of blocks and scales. ValueError for a scale of NaN."""
        blocks, scales = (tensors[f"{self.name}_{kind}"] for kind in ("blocks", "scales"))
        if not get_format(MXFloat4.name).finite("weight_scale", scales):
            raise ValueError(f"{self.name}_scales: holds a non-finite value")
        assert self.columns is not None
        return QTensor(
            MXFloat4.name,
            (self.num_experts * self.rows, self.columns),
            {
                "weight_packed": self._in_order(blocks.flatten(2)).flatten(0, 1).contiguous(),
                "weight_scale": self._in_order(scales).flatten(0, 1).contiguous(),
            },
        )

    def encode(self, packed: Tensor, scale: Tensor) -> dict[str, Tensor]:
        blocks, scales = (
            self._alternate(x.unflatten(0, (self.num_experts, self.rows))).contiguous()
            for x in (packed, scale)
        )
        return {
            f"{self.name}_blocks": blocks.unflatten(2, (-1, BLOCK // 2)),
            f"{self.name}_scales": scales,
        }

    def _in_order(self, x_EN: Tensor) -> Tensor:
        if not self.alternating:
            return x_EN
        return x_EN.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)

    def _alternate(self, x_EN: Tensor) -> Tensor:
        if not self.alternating:
            return x_EN
        return x_EN.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def are_in(files: Container[str], spec: ModelSpec) -> bool:
    if not spec.mixture.num_experts:
        return False
    first = f"{spec.stored_prefix}layers.{spec.mixture.dense_layers}{EXPERTS}gate_up_proj"
    return first in files or f"{first}_blocks" in files


def stored_tensors(spec: ModelSpec) -> dict[str, StackedTensor]:
    """Return the stacked tensors of the spec's folder, by internal name."""
    if not spec.stored_stacked:
        return {}
    return {
        name: _stacked(spec, parts, shape)
        for name, parts, shape in stored_hf_names(spec)
        if EXPERTS in parts[0]
    }


def is_native(spec: ModelSpec, format: Format) -> bool:
    """Return whether a format is that of published folders: experts in MXFP4, all else dense."""
    if not spec.mixture.stacked or not isinstance(format, Mixed):
        return False
    return all(
        name == MXFloat4.name if ".experts." in layer else get_format(name).dense
        for layer, name in format.assignment.items()
    )


def pack(
    spec: ModelSpec, config: Mapping[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return a model's tensors as its folder stores them."""
    quantization = config.get("quantization_config")
    in_mxfp4 = quantization is not None and quantization["quant_method"] == EXPERTS_IN_MXFP4
    is_dense = quantization is None
    if not spec.mixture.stacked or not (is_dense or in_mxfp4):
        return tensors
    packed = dict(tensors)
    for _, parts, shape in hf_names(spec):
        if EXPERTS not in parts[0]:
            continue
        stack = _stacked(spec, parts, shape)
        if in_mxfp4 and stack.columns is not None:
            codes, scales = (
                torch.cat([packed.pop(f"{part}_{kind}") for part in parts])
                for kind in ("packed", "scale")
            )
            packed |= stack.encode(codes, scales)
        else:
            packed[stack.name] = stack.stored(torch.cat([packed.pop(part) for part in parts]))
    return packed


def _stacked(spec: ModelSpec, parts: list[str], shape: tuple[int, ...]) -> StackedTensor:
    prefix, _, first_part = parts[0].partition(EXPERTS)
    _, matrix, kind = first_part.split(".")
    has_gate_and_up = matrix == "gate_proj"
    stacked_name = "gate_up_proj" if has_gate_and_up else matrix
    suffix = "_bias" if kind == "bias" else ""
    return StackedTensor(
        name=f"{prefix}{EXPERTS}{stacked_name}{suffix}",
        num_experts=spec.mixture.num_experts,
        rows=shape[0] // spec.mixture.num_experts,
        columns=shape[1] if len(shape) == 2 else None,
        by_columns=spec.mixture.stacked,
        alternating=spec.mixture.stacked and has_gate_and_up,
    )
