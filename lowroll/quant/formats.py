"""QTensor, the Format protocol, and the table of formats.

A format knows bits, never layer names. `quantize` turns a matrix w_NK ([out, in]) into codes and scales,
`dequantize` gives the matrix that the codes stand for, and `linear` multiplies activations with it the way the
rollout engine does. One file a format; a new one is a subclass of `Format` and a row in `formats()`.

Legend: N out features, K in features, M rows of activations.
"""
from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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


class Format(ABC):
    """How a matrix is stored and multiplied. Implementations are stateless."""

    name: str
    bits: float                      # bits a weight, scales of a long row left out
    summary: str
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


_TABLE = {
    "fp32": "lowroll.quant.dense:Float32",
    "bf16": "lowroll.quant.dense:BFloat16",
    "int8": "lowroll.quant.int8:Int8",
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
