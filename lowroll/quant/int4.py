"""INT4 in groups of 128 weights of a row: W4A16 symmetric and asymmetric, and W4A8.

    symmetric    s = amax(|w_g|) / 7.5,            q = clamp(round(w / s), -8, 7),        w^ = q s
    asymmetric   s = (max(w_g, 0) - min(w_g, 0)) / 15,   z = round(clamp(-8 - min / s, -8, 7)),
                 q = clamp(round(w / s + z), -8, 7),                                      w^ = (q - z) s
    w4a8         the symmetric weights, times INT8 activations with one dynamic scale a token

Ties round to even. Range and scales are those of compressed-tensors (`pack-quantized`).
`weight_packed` holds q + 8 in int32 words of eight codes from the lowest bits up;
`weight_zero_point` holds z + 8 the same way, along the rows.

Legend: `quant`.
"""

from __future__ import annotations

from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.matmul import w4_avx2
from lowroll.kernels.quantize.quantize4 import quantize4
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.quant.formats import (
    QTensor,
    WeightOnly,
    divide,
    float_product,
    multiplicand,
    nonzero,
)
from lowroll.quant.grid import Grid, Stretch
from lowroll.quant.groups import Packed4, pack, split, unpack
from lowroll.quant.int8 import KIND as ROWS
from lowroll.quant.scheme import INT8_TOKENS, Header, Scheme, arguments
from lowroll.quant.table import EIGHT_BITS

GROUP = 128
PACKED = "pack-quantized"
LEVELS = tuple(float(q) for q in range(-8, 8))  # by stored code


def pack_words(q_NK: Tensor) -> Tensor:
    """Pack codes -8..7, eight an int32 word, with zero bits at the end: [N, ceil(K / 8)]."""
    codes_NK = (q_NK + 8).to(torch.uint8)
    return _row_major(pack(F.pad(codes_NK, (0, -codes_NK.shape[1] % 8)))).view(torch.int32)


def unpack_words(words: Tensor, num_in: int) -> Tensor:
    """Unpack `pack_words`: float32 [N, K]."""
    return unpack(_row_major(words).view(torch.uint8), LEVELS, num_in)


class Words(Packed4):
    group = GROUP
    fallback = EIGHT_BITS
    whole_groups = True

    def pack(self, x_NK: Tensor) -> Tensor:
        return pack_words(_round_to_code(x_NK))

    def unpack(self, packed: Tensor, num_in: int) -> Tensor:
        return unpack_words(packed, num_in)

    def headers_beside(self) -> dict[str, Header]:
        return {"weight_shape": ((2,), ("I64", "I32"))}

    def write_beside(self, q: QTensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return {"weight_shape": torch.tensor(q.shape)}

    def read_beside(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> dict[str, Tensor]:
        if "weight_shape" in stored and stored["weight_shape"].tolist() != list(shape):
            raise ValueError(
                f"weight_shape: {stored['weight_shape'].tolist()} instead of {list(shape)}"
            )
        return {}


class Symmetric(Words):
    bits = 4.25
    kernel = "int4"

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        amax_NG = split(w_NK, GROUP).abs().amax(dim=-1) * stretch_NG
        return {"weight_scale": nonzero(divide(amax_NG, 7.5))}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        return Grid(scales["weight_scale"], _round_to_code, GROUP)

    def encode_by_kernel(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        quantize4(w_NK, self.kernel, GROUP, tensors["weight_packed"], tensors["weight_scale"])


class Int4(Symmetric, WeightOnly):
    name = Symmetric.kernel
    summary = "W4A16, symmetric, groups of 128"
    stacked = (name, "weight_packed", "weight_scale")
    scheme = Scheme(PACKED, arguments(4, "int", "group", group_size=GROUP))


class Int4Asymmetric(Words, WeightOnly):
    name = "int4_asym"
    summary = "W4A16, asymmetric (a zero point a group), groups of 128"
    bits = 4.28125
    kernel = name
    scheme = Scheme(PACKED, arguments(4, "int", "group", group_size=GROUP, symmetric=False))
    read_experts = False
    unread = (
        "transformers loads this folder with CompressedTensorsConfig(dequantize=True) only: it does "
        "not run packed zero points"
    )

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        w_NGS = split(w_NK, GROUP)
        low_NG, high_NG = w_NGS.amin(dim=-1).clamp_max(0), w_NGS.amax(dim=-1).clamp_min(0)
        low_NG, high_NG = low_NG * stretch_NG, high_NG * stretch_NG
        scale_NG = nonzero(divide(high_NG - low_NG, 15.0))
        zero_NG = torch.round((-8 - low_NG / scale_NG).clamp(-8, 7))
        return {"weight_scale": scale_NG, "weight_zero_point": pack_zeros(zero_NG)}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        zero_NG = unpack_zeros(scales["weight_zero_point"], shape[0])
        return Grid(scales["weight_scale"], _round_to_code, GROUP, zero_NG)

    def encode_by_kernel(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        zero_NG = quantize4(
            w_NK, self.kernel, GROUP, tensors["weight_packed"], tensors["weight_scale"]
        )
        assert zero_NG is not None
        tensors["weight_zero_point"].copy_(pack_zeros(zero_NG))

    def pitch(self, name: str, num_in: int) -> Fraction:
        return Fraction(1, 8) if name == "weight_zero_point" else Fraction(1)


class Int4Int8(Symmetric):
    name = "w4a8"
    summary = "int4's weights, INT8 activations with a scale a token"
    stored_as = Int4.name
    rounds = True
    scheme = Scheme(
        PACKED,
        arguments(4, "int", "group", group_size=GROUP),
        INT8_TOKENS,
        unpacked="int-quantized",
    )

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        rows = quantize_rows(x_MK, ROWS)
        if w4_avx2.supports(self.kernel, x_MK, q.shape):
            codes_MK = rows.codes_MK.float()
            y_MN = w4_avx2.linear(self.kernel, q.tensors, codes_MK, q.shape[0], integers=True)
        else:
            dense_NK = multiplicand(q, torch.float32)
            y_MN = float_product(rows.codes_MK.float(), dense_NK, None, exact)
        y_MN *= rows.scale_M1
        if bias_N is not None:
            y_MN += bias_N
        return y_MN.to(x_MK.dtype)

    def rounded(self, x_MK: Tensor) -> Tensor:
        rows = quantize_rows(x_MK, ROWS)
        return rows.codes_MK.float() * rows.scale_M1


def pack_zeros(zero_NG: Tensor) -> Tensor:
    """Pack zero points -8..7, eight rows a word."""
    return _row_major(pack_words(zero_NG.t()).t())


def unpack_zeros(words: Tensor, num_out: int) -> Tensor:
    """Unpack `pack_zeros`: float32 [N, G]."""
    return unpack_words(words.t(), num_out).t()


def _round_to_code(x: Tensor) -> Tensor:
    return torch.round(x).clamp_(-8, 7)


def _row_major(x: Tensor) -> Tensor:
    """Return x with row-major strides, also along sizes of 1, as views of bytes need."""
    return x.clone(memory_format=torch.contiguous_format)
