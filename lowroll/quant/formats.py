"""QTensor, the Format protocol, and the table of formats.

A format knows bits, never layer names. `quantize` turns a matrix w_NK ([out, in]) into codes and scales,
`dequantize` gives the matrix that the codes stand for, and `linear` multiplies activations with it the way the
rollout engine does. One file a format; a new one is a subclass of `Format` and a row in `formats()`.

Scales are computed and kept in the dtype that is stored (float32 unless the format says otherwise), whatever the
dtype of the matrix: the codes depend on the weights' values alone. Tensors carry the names and layouts of the
checkpoints that other tools read (`weight_packed`, `weight_scale`, ...). A fused matrix (qkv, gate-up) is one QTensor,
so what a format keeps once a matrix, such as NVFP4's global scale, its parts share.

Legend: N out features, K in features, M rows of activations.
"""
from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = torch.finfo(torch.float32).eps      # the scale of an all-zero channel or group


@dataclass(eq=False)
class QTensor:
    """A quantised matrix: named storages (codes, scales) that never move once made.

    `tensors` are the published bytes: digests, checkpoints and `copy_` see them. `packed` is what a kernel derived
    from them for its own use (oneDNN's blocked layout); it is made on first use and dropped when the codes change.
    """

    format: str
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    packed: dict[str, Any] = field(default_factory=dict)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K] that the codes stand for."""
        return get_format(self.format).dequantize(self, dtype)

    def linear(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        """x_MK times the matrix, in the format's own arithmetic. Returns y_MN in the dtype of x."""
        return get_format(self.format).linear(x_MK, self, bias_N)

    def copy_(self, other: QTensor) -> QTensor:
        """Adopt the codes and scales of `other` in place: no storage moves. ValueError when they do not fit."""
        if (self.format, self.shape) != (other.format, other.shape):
            raise ValueError(f"cannot adopt a {other.format} tensor of shape {list(other.shape)} into a "
                             f"{self.format} one of shape {list(self.shape)}")
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])
        self.packed.clear()
        return self

    def quantize_(self, w_NK: Tensor) -> QTensor:
        """Quantise `w_NK` into this tensor's own storages."""
        return self.copy_(get_format(self.format).quantize(w_NK))

    def to(self, device: torch.device | str) -> QTensor:
        return QTensor(self.format, self.shape, {name: t.to(device) for name, t in self.tensors.items()})

    def clone(self) -> QTensor:
        return QTensor(self.format, self.shape, {name: t.clone() for name, t in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity? By the two extremes, which a NaN takes over: one pass, a tenth of `isfinite().all()`."""
    return tensor.numel() == 0 or bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device: CUDA would multiply by the rounded reciprocal of a scalar."""
    return x / torch.full_like(x, divisor)


def nonzero(scale: Tensor) -> Tensor:
    """The scale, or float32's epsilon where it is 0 (a channel or group of zeros, or one too small to scale)."""
    return torch.where(scale > 0, scale, torch.full_like(scale, EPS))


def multiplicand(q: QTensor, dtype: torch.dtype) -> Tensor:
    """The dequantised matrix [N, K] as a product needs it in every step: on CPU it is kept until the codes change.

    That costs a dense copy of the weight; without it, unpacking would take longer than a decode step's product. On
    CUDA, where memory is the reason for low-bit weights, it is made anew and lives for one product.
    """
    if q.device.type != "cpu":
        return q.dequantize(dtype)
    if (key := f"dense {dtype}") not in q.packed:
        with torch.inference_mode(False):       # the learner may differentiate through what the engine kept
            q.packed[key] = q.dequantize(dtype)
    return q.packed[key]


class Format(ABC):
    """How a matrix is stored and multiplied. Implementations are stateless."""

    name: str
    bits: float                      # bits a weight, with the scales of its group; those of a long row left out
    summary: str
    group: int | None = None         # weights of a row that share a scale; None: the whole row
    dense: bool = False              # dense formats hold plain floating point: there is nothing to correct for

    @abstractmethod
    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        """Codes and scales of a finite matrix."""

    @abstractmethod
    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def linear(self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None) -> Tensor: ...

    def quantize(self, w_NK: Tensor) -> QTensor:
        """Quantise [N, K]. ValueError for a tensor that is no matrix, is empty, or holds a non-finite value."""
        if w_NK.ndim != 2 or w_NK.numel() == 0:
            raise ValueError(f"{self.name}: expected a non-empty matrix [out, in], got shape {list(w_NK.shape)}")
        if not all_finite(w_NK):
            raise ValueError(f"{self.name}: the weight holds a non-finite value")
        with torch.no_grad():
            return QTensor(self.name, (w_NK.shape[0], w_NK.shape[1]), self.encode(w_NK.detach()))


class WeightOnly(Format):
    """Low-bit storage only: the product is that of the dequantised matrix, in the activations' dtype."""

    def linear(self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None) -> Tensor:
        return F.linear(x_MK, multiplicand(q, x_MK.dtype), None if bias_N is None else bias_N.to(x_MK.dtype))


_TABLE = {
    "fp32": "lowroll.quant.dense:Float32",
    "bf16": "lowroll.quant.dense:BFloat16",
    "int8": "lowroll.quant.int8:Int8",
    "fp8": "lowroll.quant.fp8:Float8",
    "fp8_block": "lowroll.quant.fp8:Float8Block",
    "int4": "lowroll.quant.int4:Int4",
    "int4_asym": "lowroll.quant.int4:Int4Asymmetric",
    "w4a8": "lowroll.quant.int4:Int4Int8",
    "nvfp4": "lowroll.quant.nvfp4:NVFloat4",
    "mxfp4": "lowroll.quant.mxfp4:MXFloat4",
    "mxfp4_floor": "lowroll.quant.mxfp4:MXFloat4Floor",
    "nf4": "lowroll.quant.nf4:NormalFloat4",
    "nf4_dq": "lowroll.quant.nf4:NormalFloat4Double",
}
_MADE: dict[str, Format] = {}


def get_format(name: str) -> Format:
    """The format of that name. ValueError names the known ones."""
    if name not in _TABLE:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(_TABLE)}")
    if name not in _MADE:
        module, cls = _TABLE[name].split(":")
        _MADE[name] = getattr(importlib.import_module(module), cls)()
    return _MADE[name]


def formats() -> dict[str, str]:
    """The table of formats: name and one line about it."""
    return {name: f"{get_format(name).bits:g} bits a weight: {get_format(name).summary}" for name in _TABLE}


def quantize(w_NK: Tensor, format: str = "int8") -> QTensor:
    """Quantise a matrix [out, in] into `format`."""
    return get_format(format).quantize(w_NK)
