"""QTensor, the Format protocol, and the table of formats.

A format knows bits, never layer names. `quantize` turns a matrix w_NK ([out, in]) into codes and
scales, `dequantize` gives the matrix that the codes stand for, and `linear` multiplies activations
with it the way the rollout engine does. All that is known of a format stands on its class; a new
one is a file with a subclass of `Format`, and a row in `table.FORMATS`.

Scales are computed and kept in the dtype that is stored (float32 unless the format says otherwise),
whatever the dtype of the matrix: the codes depend on the weights' values alone. Tensors carry the
names and layouts of the checkpoints that other tools read (`weight_packed`, `weight_scale`, ...). A
fused matrix (qkv, gate-up) is one QTensor, so what a format keeps once a matrix, such as NVFP4's
global scale, its parts share when it is quantized here.

Checkpoints hold the parts. `cut` and `stack` take a fused matrix apart and together without
changing a code: stored tensors are cut along their first dimension, which has `pitch` entries for a
row of the matrix. Parts that come from elsewhere with different values of what is kept once a
matrix keep theirs, in one entry for each row (or block).

Legend: N out features, K in features, M rows of activations.
"""

from __future__ import annotations

import importlib
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
from lowroll.kernels.matmul import avx2, ordered, w4a16
from lowroll.kernels.quantize.rows import Product, QuantizedRows
from lowroll.quant.scheme import Header, Scheme
from lowroll.quant.table import DEFAULT, EIGHT_BITS, FORMATS, OWN

# weights of a matrix whose 4-bit codes are read faster than the dense copy up to 64 rows
LARGE = 1 << 26
EPS = torch.finfo(torch.float32).eps  # the scale of an all-zero channel or group


@dataclass(eq=False)
class QTensor:
    """A quantized matrix: named storages (codes, scales) that never move once made.

    `tensors` are the published bytes: digests, checkpoints and `copy_` see them. `packed` is what a
    kernel derived from them for its own use (oneDNN's blocked layout); it is made on first use
    (`derive`). When the codes change, it is dropped on CPU, and elsewhere made again at once in the
    same storages, which a CUDA graph may hold.
    """

    format: str
    shape: tuple[int, int]
    tensors: dict[str, Tensor]
    packed: dict[str, Any] = field(default_factory=dict)
    makers: dict[str, Callable[[QTensor], Any]] = field(default_factory=dict)
    version: int = 0  # how often the codes have changed
    # whose codes, in another format, these were made of: that tensor, its version and one's own then
    source: tuple[ref[QTensor], int, int] | None = None

    def note_source(self, source: QTensor) -> None:
        """The codes were made of those of `source`, as both are now."""
        self.source = ref(source), source.version, self.version

    def is_made_of(self, source: QTensor) -> bool:
        """Were the codes made of those that `source` has, and has neither changed since?"""
        return self.source == (ref(source), source.version, self.version)

    def derive(self, key: str, make: Callable[[QTensor], Any]) -> Any:
        """`make(self)`, kept under `key` until the codes change. Off the CPU it is a tensor, a
        tuple of tensors, or one of QTensors over this one's storages."""
        if key not in self.packed:
            self.packed[key], self.makers[key] = make(self), make
        return self.packed[key]

    @torch.no_grad()
    def keep_dense(self, dtype: torch.dtype) -> None:
        """Keep the dequantized matrix beside the codes: memory for the time that many rows would
        unpack them in."""
        self.derive(f"dense {dtype}", lambda q: q.dequantize(dtype))

    @torch.no_grad()
    def renew(self) -> None:
        """The codes have changed: so must what was derived from them. Whoever writes to `tensors`
        calls it."""
        self.version += 1
        if self.device.type == "cpu":
            self.packed.clear()
        for key, kept in self.packed.items():
            if isinstance(kept, tuple) and isinstance(kept[0], QTensor):
                for view in kept:
                    view.renew()
                continue
            for old, new in zip(_tuple(kept), _tuple(self.makers[key](self)), strict=True):
                old.copy_(new)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix [N, K] that the codes stand for."""
        return get_format(self.format).dequantize(self, dtype)

    def linear(self, x_MK: Tensor, bias_N: Tensor | None = None, exact: bool = False) -> Tensor:
        """x_MK times the matrix, in the format's own arithmetic. Returns y_MN in the dtype of x. exact:
        as `Format.linear`."""
        return get_format(self.format).linear(x_MK, self, bias_N, exact)

    def copy_(self, other: QTensor) -> QTensor:
        """Take over the codes and scales of `other` in place: no storage moves. ValueError when they
        do not fit."""
        if (self.format, self.shape) != (other.format, other.shape):
            raise ValueError(
                f"cannot copy a {other.format} tensor of shape {list(other.shape)} into a "
                f"{self.format} one of shape {list(self.shape)}"
            )
        shapes = {name: tensor.shape for name, tensor in other.tensors.items()}
        odd = [name for name, tensor in self.tensors.items() if tensor.shape != shapes[name]]
        if odd:
            raise ValueError(
                f"cannot copy a {other.format} tensor with {odd[0]} "
                f"{list(other.tensors[odd[0]].shape)} into one with "
                f"{list(self.tensors[odd[0]].shape)}"
            )
        for name, tensor in self.tensors.items():
            tensor.copy_(other.tensors[name])
        self.renew()
        return self

    @torch.no_grad()
    def quantize_(self, w_NK: Tensor, amax_1: Tensor | None = None) -> QTensor:
        """Quantize `w_NK` into this tensor's own storages.

        amax_1: its largest magnitude (`kernels.checksum.amax`) from a caller who knows that it is
        finite: then nobody waits for the device. ValueError, before anything is written, for
        another shape or a non-finite value.
        """
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
        """The same storages in another format that stores the same tensors (int4 and w4a8); None
        when they differ."""
        if format == self.format:
            return self
        if stored_format(format) != stored_format(self.format):
            return None
        return QTensor(format, self.shape, self.tensors)

    def to(self, device: torch.device | str) -> QTensor:
        return QTensor(
            self.format, self.shape, {name: t.to(device) for name, t in self.tensors.items()}
        )

    def clone(self) -> QTensor:
        return QTensor(
            self.format, self.shape, {name: t.clone() for name, t in self.tensors.items()}
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors.values())).device


def all_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity? Waits for the device; of many tensors ask `kernels.checksum` at
    once."""
    return checksum.finite(checksum.amax([tensor]))[0]


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor, rounded once on every device: CUDA would multiply by the rounded reciprocal of a
    scalar."""
    return x / torch.full_like(x, divisor)


def nonzero(scale: Tensor) -> Tensor:
    """The scale, or float32's epsilon where it is 0 (a channel or group of zeros, or one too small
    to scale)."""
    return torch.where(scale > 0, scale, torch.full_like(scale, EPS))


def multiplicand(q: QTensor, dtype: torch.dtype) -> Tensor:
    """The dequantized matrix [N, K] as a product needs it in every step: on CPU it is kept until
    the codes change.

    That costs a dense copy of the weight: without it, unpacking would take longer than a decode
    step's product, except where a kernel multiplies codes (kernels.matmul.avx2). On CUDA, where
    memory is the reason for low-bit weights, it is made anew and lives for one product, unless
    `keep_dense` asked for it.
    """
    if q.device.type != "cpu":
        kept = q.packed.get(f"dense {dtype}")
        return q.dequantize(dtype) if kept is None else kept
    with torch.inference_mode(False):  # the learner may differentiate through what the engine kept
        return q.derive(f"dense {dtype}", lambda q: q.dequantize(dtype))


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


class Format(ABC):
    """A format: how a matrix is stored and multiplied, and every fact about that. Implementations
    are stateless."""

    name: str
    summary: str
    bits: float  # bits a weight, with the scales of its group; those of a long row left out
    group: int | None = None  # weights of a row that share a scale; None: the whole row
    once: tuple[str, ...] = ()  # stored tensors that have one entry for the whole matrix
    stored_as: str | None = None  # another format that has the same stored tensors
    dtype: torch.dtype | None = None  # of a dense format: what it holds and computes in
    fallback: str = OWN  # the guard's next format; "": nothing is left to fall back to

    rounds: bool = False  # activations, to what `rounded` says, for a product in float32
    rows: str | None = None  # kind of codes that `product` takes; None: it has no such product
    kernel: str = ""  # what the 4-bit kernels call it; "": they do not know it
    # what the kernels of experts call it, and the tensors that they take; (): they do not know it
    stacked: tuple[str, ...] = ()

    scheme: Scheme | None = None  # compressed-tensors' words; None: another tool's, or no file's
    # what files call a stored tensor, where that is another name; None: it is not one of theirs
    suffixes: Mapping[str, str | None] = {}
    whole_groups: bool = False  # transformers reads no matrix that ends within a group
    read_experts: bool = True  # transformers reads experts in it
    unread: str = ""  # what else keeps transformers from such a folder, for people

    @property
    def dense(self) -> bool:
        """Is it plain floating point? Then there is nothing to correct for."""
        return FORMATS[self.name].dense

    def of(self, layer: str) -> Format:
        """Return the format of a linear layer, as `Transformer.linears` names it: another for each
        one only where they differ (`quant.mixed`)."""
        return self

    @property
    def rounds_activations(self) -> bool:
        """Does its product round activations to codes of their own?"""
        return self.rounds or self.rows is not None

    @abstractmethod
    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        """Codes and scales of a finite matrix."""

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        """`encode` into storages that are there already. amax_1: the largest magnitude, float32."""
        for name, value in self.encode(w_NK).items():
            tensors[name].copy_(value)

    @abstractmethod
    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        """x times the matrix, in the format's own arithmetic. exact: a row's bits are those of any
        batch (`kernels.invariant`)."""

    def rounded(self, x_MK: Tensor) -> Tensor:
        """Activations as `linear` multiplies them with the dequantized matrix: float32. For formats
        that `rounds`."""
        raise NotImplementedError(f"{self.name} does not round activations")

    def slower_than_float32(self, device: torch.device) -> str:
        """Return why this format's products are slower than float32's on the device, by what is
        known of its kernels and instructions; "" where nothing says so."""
        return ""

    def product(
        self, rows: QuantizedRows, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Product:
        """`linear` of activations that are quantized already; its scales may be left to the kernel
        that comes next."""
        raise NotImplementedError(f"{self.name} has no product of quantized rows")

    def quantize(self, w_NK: Tensor) -> QTensor:
        """Quantize [N, K]. ValueError for a tensor that is no matrix, is empty, or holds a
        non-finite value."""
        if w_NK.ndim != 2 or w_NK.numel() == 0:
            raise ValueError(
                f"{self.name}: expected a non-empty matrix [out, in], got shape {list(w_NK.shape)}"
            )
        return self.empty((w_NK.shape[0], w_NK.shape[1]), w_NK.device).quantize_(w_NK)

    def empty(self, shape: tuple[int, int], device: torch.device) -> QTensor:
        """Storages for a matrix [N, K]; nothing is in them yet."""
        like = _stored(self, *shape)
        return QTensor(
            self.name, shape, {name: torch.empty_like(t, device=device) for name, t in like.items()}
        )

    def pitch(self, name: str, num_in: int) -> Fraction:
        """Entries along the first dimension of a stored tensor for one row of a matrix with
        `num_in` columns."""
        return Fraction(1)

    def finite(self, name: str, tensor: Tensor) -> bool:
        """Has a stored tensor neither a NaN nor an infinity?"""
        return not tensor.is_floating_point() or all_finite(tensor.float())

    def describe(self, dtype: torch.dtype, routers: bool) -> dict[str, Any] | None:
        """The `quantization_config` of a folder in another tool's words; None: it has a scheme, or
        no other tool knows it. routers: the model has experts, whose routers stay dense."""
        return None

    def headers_beside(self) -> dict[str, Header]:
        """Return the headers that a file holds for a matrix beside its stored tensors, by
        suffix."""
        return {}

    def write_beside(self, q: QTensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of `headers_beside`. dtype: the model's."""
        return {}

    def read_beside(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stored tensors that a file holds there. ValueError names the suffix whose values are
        wrong."""
        return {}

    def cut(self, q: QTensor, rows: Sequence[int]) -> list[QTensor]:
        """The parts, of `rows` rows each, with copies of the codes and scales that they have in the
        whole matrix.

        ValueError when a block of the format reaches over the border of two parts.
        """
        return [part.clone() for part in self.split(q, rows)]

    def split(self, q: QTensor, rows: Sequence[int]) -> list[QTensor]:
        """The parts as `cut` gives them, over the storages of the whole matrix."""
        assert sum(rows) == q.shape[0]
        parts = [QTensor(self.name, (size, q.shape[1]), {}) for size in rows]
        for name, tensor in q.tensors.items():
            edges = self._edges(name, q.shape[1], rows)
            for part, (start, stop) in zip(parts, pairwise(edges), strict=True):
                shared = name in self.once and tensor.shape[0] == 1
                part.tensors[name] = tensor if shared else self._once(name, tensor[start:stop])
        return parts

    def stack(self, parts: Sequence[QTensor]) -> QTensor:
        """The matrix of which these are the parts, from the top. ValueError as for `cut`."""
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
        """One entry instead of equal ones, where one is what the format keeps."""
        return tensor[:1] if name in self.once and bool((tensor == tensor[:1]).all()) else tensor

    def _edges(self, name: str, num_in: int, rows: Sequence[int]) -> list[int]:
        """Return where the parts begin and end in a stored tensor. ValueError when two parts share
        a block."""
        edges = [row * self.pitch(name, num_in) for row in accumulate(rows, initial=0)]
        if odd := [i for i, edge in enumerate(edges[1:-1]) if edge.denominator > 1]:
            raise ValueError(
                f"{self.name}: {rows[odd[0]]} rows of {num_in} weights end within one of its "
                "blocks, which two parts of a fused matrix would have to share"
            )
        return [-(-edge.numerator // edge.denominator) for edge in edges]


def dense_from(shape: tuple[int, int]) -> int:
    """Rows beyond which a matrix that is kept dense takes less time than its 4-bit codes (measured:
    docs/LOG.md)."""
    return 64 if shape[0] * shape[1] >= LARGE else 32


def float_product(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, exact: bool) -> Tensor:
    """x W' + b of plain numbers; `exact` as for `Format.linear`."""
    return ordered.product(x_MK, w_NK, bias_N) if exact else F.linear(x_MK, w_NK, bias_N)


class WeightOnly(Format):
    """Low-bit storage only: the product is that of the dequantized matrix, in the activations'
    dtype.

    On CUDA few rows are multiplied with the exact one, whose bits are decoded as they arrive
    (kernels.matmul.streamed); on a CPU with AVX2 so is a large matrix, with activations rounded to
    16 bits (kernels.matmul.avx2).
    """

    fallback = EIGHT_BITS

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        many = x_MK.is_cuda and x_MK.shape[0] > dense_from(q.shape)
        kept = many and f"dense {x_MK.dtype}" in q.packed
        if not kept and not exact and w4a16.supports(self.kernel, x_MK, q.shape):
            return w4a16.linear(self.kernel, q.tensors, x_MK, q.shape, bias_N)
        if avx2.supports(self.kernel, x_MK, q.shape):
            return avx2.linear(self.kernel, q.tensors, x_MK, q.shape[0], bias_N)
        bias_N = None if bias_N is None else bias_N.to(x_MK.dtype)
        return float_product(x_MK, multiplicand(q, x_MK.dtype), bias_N, exact)


_MADE: dict[str, Format] = {}


def get_format(name: str) -> Format:
    """The format of that name: of the table, or registered. ValueError names the known ones."""
    if name not in FORMATS and name not in _MADE:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(FORMATS)}")
    if name not in _MADE:
        module, _, cls = FORMATS[name].home.partition(":")
        _MADE[name] = getattr(importlib.import_module(module), cls)()
    return _MADE[name]


def register_format(format: Format) -> None:
    """Make a format that is no row of the table known by its name. ValueError where another one has
    the name."""
    if _MADE.setdefault(format.name, format) != format:
        raise ValueError(f"{format.name}: two mixed formats have this name")


@lru_cache(maxsize=1024)
def _stored(format: Format, rows: int, columns: int) -> dict[str, Tensor]:
    """Return the tensors that a format keeps of a matrix, on the meta device. Finding them takes as
    long as quantizing a small matrix."""
    return format.encode(torch.empty((rows, columns), device="meta"))


def stored_format(name: str) -> str:
    """The format under whose name files hold the tensors of this one."""
    return get_format(name).stored_as or name


def formats() -> dict[str, str]:
    """The table of formats: name and one line about it."""
    return {
        name: f"{get_format(name).bits:g} bits a weight: {get_format(name).summary}"
        for name in FORMATS
    }


def quantize(w_NK: Tensor, format: str = DEFAULT) -> QTensor:
    """Quantize a matrix [out, in] into `format`."""
    return get_format(format).quantize(w_NK)
