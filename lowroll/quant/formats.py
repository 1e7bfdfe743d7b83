"""QTensor, the Format protocol, and the registry of formats.

A format turns a matrix w_NK ([out, in]) into codes and scales, and multiplies activations with it
as the rollout engine does. Stored tensors have the names and layouts of published checkpoints.
Scales are computed in their stored dtype, by default float32, so codes depend on the weights alone.

A fused matrix (qkv, gate-up) is one QTensor; checkpoints hold its parts. A value kept once a
matrix, such as NVFP4's global scale, is shared by parts quantized here; parts from elsewhere keep
their own.

Legend: `quant`.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels import checksum
from lowroll.kernels.matmul import ordered, w4_avx2, w4a16
from lowroll.kernels.quantize.rows import Product, QuantizedRows
from lowroll.quant.scheme import Header, Scheme
from lowroll.quant.table import DEFAULT, EIGHT_BITS, FORMATS, OWN

LARGE = 1 << 26  # weights of a matrix that stays faster as codes up to 64 rows
EPS = torch.finfo(torch.float32).eps  # the scale of an all-zero channel or group


@dataclass(eq=False)
class QTensor:
    """A quantized matrix: named storages that never move. `tensors` are the published codes and
    scales, which digests and checkpoints cover. `packed` holds what kernels derived from them
    (`derive`), such as oneDNN's layout. When the codes change, it is dropped on CPU and recomputed
    elsewhere in place, for CUDA graphs."""

    format: str
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    packed: dict[str, Any] = field(default_factory=dict)
    makers: dict[str, Callable[[QTensor], Any]] = field(default_factory=dict)
    version: int = 0
    # the source of these codes, its version and this one's at that time
    source: tuple[ref[QTensor], int, int] | None = None

    def note_source(self, source: QTensor) -> None:
        self.source = ref(source), source.version, self.version

    def is_made_of(self, source: QTensor) -> bool:
        """Return whether the codes were made of `source`, and neither has changed since."""
        return self.source == (ref(source), source.version, self.version)

    def derive(self, key: str, make: Callable[[QTensor], Any]) -> Any:
        """Return `make(self)`, cached until the codes change: off the CPU a tensor, or a tuple of
        tensors or of QTensors over these storages."""
        if key not in self.packed:
            self.packed[key], self.makers[key] = make(self), make
        return self.packed[key]

    @torch.no_grad()
    def keep_dense(self, dtype: torch.dtype) -> None:
        self.derive(f"dense {dtype}", lambda q: q.dequantize(dtype))

    @torch.no_grad()
    def renew(self) -> None:
        """Update `packed` after a write to `tensors`."""
        self.version += 1
        if self.device.type == "cpu":
            self.packed.clear()
            return
        for key, derived in self.packed.items():
            if isinstance(derived, tuple) and isinstance(derived[0], QTensor):
                for qtensor in derived:
                    qtensor.renew()
                continue
            remade = self.makers[key](self)
            for old, new in zip(_as_tuple(derived), _as_tuple(remade), strict=True):
                old.copy_(new)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the matrix [N, K]."""
        return get_format(self.format).dequantize(self, dtype)

    def linear(self, x_MK: Tensor, bias_N: Tensor | None = None, exact: bool = False) -> Tensor:
        return get_format(self.format).linear(x_MK, self, bias_N, exact)

    def copy_(self, other: QTensor) -> QTensor:
        """Copy codes and scales in place. ValueError for another format or shape."""
        if (self.format, self.shape) != (other.format, other.shape):
            raise ValueError(
                f"cannot copy a {other.format} tensor of shape {list(other.shape)} into a "
                f"{self.format} one of shape {list(self.shape)}"
            )
        for name, tensor in self.tensors.items():
            if tensor.shape != other.tensors[name].shape:
                raise ValueError(
                    f"cannot copy a {other.format} tensor with {name} "
                    f"{list(other.tensors[name].shape)} into one with {list(tensor.shape)}"
                )
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])
        self.renew()
        return self

    @torch.no_grad()
    def quantize_(self, w_NK: Tensor, amax_1: Tensor | None = None) -> QTensor:
        """Quantize `w_NK` in place. amax_1: its largest magnitude, known to be finite, which saves
        a wait for the device. ValueError, before any write, for another shape or a non-finite
        value."""
        if tuple(w_NK.shape) != self.shape:
            raise ValueError(
                f"cannot quantize a matrix of shape {list(w_NK.shape)} into one of {list(self.shape)}"
            )
        if amax_1 is None:
            (amax_1,) = checksum.amax([w_NK])
            if not checksum.finite([amax_1])[0]:
                raise ValueError(f"{self.format}: the weight holds a non-finite value")
        get_format(self.format).encode_into(w_NK.detach(), amax_1, self.tensors)
        self.renew()
        return self

    def seen_as(self, format: str) -> QTensor | None:
        """Return the same storages in another format that stores the same tensors (int4 and w4a8),
        or None."""
        if format == self.format:
            return self
        if stored_format(format) != stored_format(self.format):
            return None
        return QTensor(format, self.shape, self.tensors)

    def to(self, device: torch.device | str) -> QTensor:
        return self._with_each(lambda t: t.to(device))

    def clone(self) -> QTensor:
        return self._with_each(Tensor.clone)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> QTensor:
        changed = {name: change(tensor) for name, tensor in self.tensors.items()}
        return QTensor(self.format, self.shape, changed)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device


def all_finite(tensor: Tensor) -> bool:
    """Return whether a tensor is finite. Waits for the device; `kernels.checksum` takes many."""
    return checksum.finite(checksum.amax([tensor]))[0]


def divide(x: Tensor, divisor: float) -> Tensor:
    """Divide with one rounding; CUDA multiplies by a scalar's rounded reciprocal."""
    return x / torch.full_like(x, divisor)


def nonzero(scale: Tensor) -> Tensor:
    """Replace scales of 0 by `EPS`."""
    return torch.where(scale > 0, scale, torch.full_like(scale, EPS))


def multiplicand(q: QTensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized matrix [N, K] for a product. A CPU keeps it, as unpacking takes longer
    than a decode step's product; CUDA only if `keep_dense` asked for it."""
    if q.device.type != "cpu":
        dense_copy = q.packed.get(f"dense {dtype}")
        return q.dequantize(dtype) if dense_copy is None else dense_copy
    with torch.inference_mode(False):  # a learner may differentiate through it
        return q.derive(f"dense {dtype}", lambda q: q.dequantize(dtype))


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


class Format(ABC):
    """A way to store and multiply a matrix, without state."""

    name: str
    summary: str
    bits: float  # of a weight, with its group's scales but not its row's
    group: int | None = None  # weights of a row that share a scale; None: all
    once: tuple[str, ...] = ()  # stored tensors with one entry a matrix
    stored_as: str | None = None  # a format with the same stored tensors
    dtype: torch.dtype | None = None  # of a dense format: storage and computation
    fallback: str = OWN  # the guard's next format; "": none

    rounds: bool = False  # activations (`rounded`), for a product in float32
    rows: str | None = None  # kind of codes that `product` takes; None: no such product
    kernel: str = ""  # name in the 4-bit kernels; "": unsupported
    # name in the kernels of experts, and their tensors; (): unsupported
    stacked: tuple[str, ...] = ()

    scheme: Scheme | None = None  # in compressed-tensors; None: another tool's, or no file's
    # names in files, where they differ; None: not in files
    suffixes: Mapping[str, str | None] = {}
    whole_groups: bool = False  # transformers wants whole groups of columns
    read_experts: bool = True  # transformers reads its experts
    unread: str = ""  # why transformers cannot read it

    @property
    def dense(self) -> bool:
        return FORMATS[self.name].dense

    def of(self, layer: str) -> Format:
        """Return the format of a linear layer, named as in `Transformer.linears`."""
        return self

    @property
    def rounds_activations(self) -> bool:
        return self.rounds or self.rows is not None

    @abstractmethod
    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        """Return codes and scales of a finite matrix."""

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        """Encode into existing storages. amax_1: the largest magnitude."""
        for name, value in self.encode(w_NK).items():
            tensors[name].copy_(value)

    @abstractmethod
    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        """Multiply x with the matrix. exact: a row's bits do not depend on its batch."""

    def rounded(self, x_MK: Tensor) -> Tensor:
        """Return activations rounded as `linear` does, in float32."""
        raise NotImplementedError(f"{self.name} does not round activations")

    def slower_than_float32(self, device: torch.device) -> str:
        """Return why products are slower than float32's on the device, or ""."""
        return ""

    def product(
        self, rows: QuantizedRows, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Product:
        """Multiply quantized activations; the next kernel may apply the scales."""
        raise NotImplementedError(f"{self.name} has no product of quantized rows")

    def quantize(self, w_NK: Tensor) -> QTensor:
        """Quantize [N, K]. ValueError unless it is finite and not empty."""
        if w_NK.ndim != 2 or w_NK.numel() == 0:
            raise ValueError(
                f"{self.name}: expected a non-empty matrix [out, in], got shape {list(w_NK.shape)}"
            )
        return self.empty((w_NK.shape[0], w_NK.shape[1]), w_NK.device).quantize_(w_NK)

    def empty(self, shape: tuple[int, int], device: torch.device) -> QTensor:
        """Return uninitialised storages."""
        templates = meta_tensors(self, *shape)
        return QTensor(
            self.name,
            shape,
            {name: torch.empty_like(t, device=device) for name, t in templates.items()},
        )

    def pitch(self, name: str, num_in: int) -> Fraction:
        """Return a stored tensor's entries of its first dimension for a row of `num_in` columns."""
        return Fraction(1)

    def finite(self, name: str, tensor: Tensor) -> bool:
        """Return whether a stored tensor is finite."""
        return not tensor.is_floating_point() or all_finite(tensor.float())

    def describe(self, dtype: torch.dtype, dense: Sequence[str] = ()) -> dict[str, Any] | None:
        """Return another tool's `quantization_config`, or None. dense: name endings of dense
        modules."""
        return None

    def headers_beside(self) -> dict[str, Header]:
        return {}

    def write_beside(self, q: QTensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {}

    def read_beside(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return further stored tensors. ValueError names the wrong suffix."""
        return {}

    def cut(self, q: QTensor, rows: Sequence[int]) -> list[QTensor]:
        """Return copies of parts of `rows` rows. ValueError when a block spans two parts."""
        return [part.clone() for part in self.split(q, rows)]

    def split(self, q: QTensor, rows: Sequence[int]) -> list[QTensor]:
        """Return the parts over the storages of `q`."""
        assert sum(rows) == q.shape[0]
        parts = [QTensor(self.name, (size, q.shape[1]), {}) for size in rows]
        for name, tensor in q.tensors.items():
            edges = self._edges(name, q.shape[1], rows)
            is_shared = name in self.once and tensor.shape[0] == 1
            for part, (start, stop) in zip(parts, pairwise(edges), strict=True):
                part.tensors[name] = tensor if is_shared else self._once(name, tensor[start:stop])
        return parts

    def stack(self, parts: Sequence[QTensor]) -> QTensor:
        """Join parts from top to bottom. ValueError as of `cut`."""
        rows = [part.shape[0] for part in parts]
        num_in = parts[0].shape[1]
        stacked: dict[str, Tensor] = {}
        for name in parts[0].tensors:
            edges = self._edges(name, num_in, rows)
            pieces = [part.tensors[name] for part in parts]
            if name in self.once:
                counts = [stop - start for start, stop in pairwise(edges)]
                pieces = [piece.expand(count) for piece, count in zip(pieces, counts, strict=True)]
            stacked[name] = self._once(name, torch.cat(pieces))
        return QTensor(self.name, (sum(rows), num_in), stacked)

    def _once(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.once and bool((tensor == tensor[:1]).all()):
            return tensor[:1]
        return tensor

    def _edges(self, name: str, num_in: int, rows: Sequence[int]) -> list[int]:
        edges = [row * self.pitch(name, num_in) for row in accumulate(rows, initial=0)]
        if unaligned := [i for i, edge in enumerate(edges[1:-1]) if edge.denominator > 1]:
            raise ValueError(
                f"{self.name}: {rows[unaligned[0]]} rows of {num_in} weights end within one of its "
                "blocks, which two parts of a fused matrix would have to share"
            )
        return [math.ceil(edge) for edge in edges]  # the last block may be partly empty


def dense_from(shape: tuple[int, int]) -> int:
    """Return the rows beyond which a kept dense matrix beats 4-bit codes (docs/LOG.md)."""
    return 64 if shape[0] * shape[1] >= LARGE else 32


def float_product(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, exact: bool) -> Tensor:
    """Compute x W' + b in floating point."""
    return ordered.product(x_MK, w_NK, bias_N) if exact else F.linear(x_MK, w_NK, bias_N)


class WeightOnly(Format):
    """A format whose product is that of the dequantized matrix in the activations' dtype.

    Few rows on CUDA are multiplied with the codes (`kernels.matmul.streamed`, exact), as are large
    matrices on a CPU with AVX2 (`kernels.matmul.w4_avx2`, which rounds activations to 16 bits).
    """

    fallback = EIGHT_BITS

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        has_many_rows = x_MK.is_cuda and x_MK.shape[0] > dense_from(q.shape)
        uses_dense_copy = has_many_rows and f"dense {x_MK.dtype}" in q.packed
        if not exact and not uses_dense_copy and w4a16.supports(self.kernel, x_MK, q.shape):
            return w4a16.linear(self.kernel, q.tensors, x_MK, q.shape, bias_N)
        if w4_avx2.supports(self.kernel, x_MK, q.shape):
            return w4_avx2.linear(self.kernel, q.tensors, x_MK, q.shape[0], bias_N)
        bias_N = None if bias_N is None else bias_N.to(x_MK.dtype)
        return float_product(x_MK, multiplicand(q, x_MK.dtype), bias_N, exact)


_INSTANCES: dict[str, Format] = {}


def get_format(name: str) -> Format:
    """Return a format by name. ValueError names the known ones."""
    if name not in FORMATS and name not in _INSTANCES:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(FORMATS)}")
    if name not in _INSTANCES:
        module, _, class_name = FORMATS[name].home.partition(":")
        _INSTANCES[name] = getattr(importlib.import_module(module), class_name)()
    return _INSTANCES[name]


def register_format(format: Format) -> None:
    """Register a format beyond the table. ValueError if another has the name."""
    if _INSTANCES.setdefault(format.name, format) != format:
        raise ValueError(f"{format.name}: two mixed formats have this name")


@lru_cache(maxsize=1024)
def meta_tensors(format: Format, rows: int, columns: int) -> dict[str, Tensor]:
    """Return a matrix's tensors on the meta device, cached, as it takes as long as quantizing."""
    return format.encode(torch.empty((rows, columns), device="meta"))


def stored_format(name: str) -> str:
    return get_format(name).stored_as or name


def formats() -> dict[str, str]:
    """Return each format's description by name."""
    return {
        name: f"{get_format(name).bits:g} bits a weight: {get_format(name).summary}"
        for name in FORMATS
    }


def quantize(w_NK: Tensor, format: str = DEFAULT) -> QTensor:
    """Quantize a matrix [out, in] into `format`."""
    return get_format(format).quantize(w_NK)
