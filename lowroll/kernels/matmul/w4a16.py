"""4-bit weights times bf16 activations.

Up to `stream_rows` the weights are decoded in registers (`streamed.cu`); beyond, one pass
dequantizes and cuBLAS multiplies. `dequantize` equals the formats' torch code bit for bit: value
times multiplier in float32, rounded once.

    nvfp4      e2m1 (scale / global scale)      blocks of 16
    mxfp4      e2m1 2^(E - 127)                 blocks of 32
    int4       q scale                          groups of 128; int4_asym (q - z) scale
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.launch import jit, tl, triton_supports
from lowroll.kernels.matmul import streamed
from lowroll.kernels.support import NO_CUDA, YES, Support, no

BLOCK = {"nvfp4": 16, "mxfp4": 32, "int4": 128, "int4_asym": 128}
WORDS = 1024  # of 8 codes, a program of the dequantizer
# rows beyond which dequantizing and cuBLAS are faster
BROAD_ROWS = 256  # with tiles for many rows
STREAM_ROWS = 128  # without


def stream_rows(kind: str, shape: tuple[int, int], device: torch.device) -> int:
    """Return the most rows of activations that are streamed."""
    return BROAD_ROWS if streamed.broad_supports(kind, shape, device) else STREAM_ROWS


def supports(kind: str, x_MK: Tensor, shape: tuple[int, int]) -> Support:
    if kind not in BLOCK:
        return no("knows nvfp4, mxfp4, int4 and int4_asym")
    max_rows = stream_rows(kind, shape, x_MK.device)
    if x_MK.shape[0] > max_rows and not (support := triton_supports(x_MK)):
        return support
    return streamed.supports(kind, x_MK[:max_rows], shape)


def linear(
    kind: str,
    tensors: Mapping[str, Tensor],
    x_MK: Tensor,
    shape: tuple[int, int],
    bias_N: Tensor | None = None,
) -> Tensor:
    """Return y_MN in bf16 with fp32 sums. Errors as of `streamed.linear`."""
    if x_MK.shape[0] <= stream_rows(kind, shape, x_MK.device):
        return streamed.linear(kind, tensors, x_MK, shape[0], bias_N)
    if bias_N is not None:
        bias_N = bias_N.to(x_MK.dtype)
    return F.linear(x_MK, dequantize(kind, tensors, shape, x_MK.dtype), bias_N)


def supports_dequantize(
    kind: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> Support:
    """Return whether `dequantize` takes this matrix. The interpreter rounds bf16 otherwise."""
    packed = tensors["weight_packed"]
    if not (support := triton_supports(packed)):
        return support
    if shape[1] % BLOCK[kind]:
        return no("takes channels of whole blocks")
    if not packed.is_cuda and dtype == torch.bfloat16:
        return NO_CUDA
    return YES


def dequantize(
    kind: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the matrix in `dtype`. Where `supports_dequantize`."""
    words = tensors["weight_packed"].view(torch.int32)
    w_NK = torch.empty(shape, dtype=dtype, device=words.device)
    global_ = tensors.get("weight_global_scale")
    zero = tensors.get("weight_zero_point")
    scale = tensors["weight_scale"]
    if scale.dtype != torch.float32:
        scale = scale.view(torch.uint8)
    global_mode = 0  # one for the matrix, or (2) one a channel
    if global_ is not None:
        global_mode = 1 if global_.numel() == 1 else 2
    _dequantize_kernel[(-(-words.numel() // WORDS),)](
        words,
        scale,
        scale if global_ is None else global_,
        scale if zero is None else zero,
        w_NK,
        words.numel(),
        shape[1] // BLOCK[kind],
        KIND=streamed.FORMATS[kind],
        BLOCK=BLOCK[kind] // 8,
        WORDS=WORDS,
        GLOBALS=global_mode,
    )
    return w_NK


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _dequantize_kernel(
    words,
    scale,
    global_,
    zero,
    w,
    count,
    row_blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    GLOBALS: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word < count
    block = word // BLOCK
    row = block // row_blocks
    step = tl.load(scale + block, mask=mask, other=0)
    if KIND == 0:  # e4m3; its subnormals are multiples of 2^-9
        bits = step.to(tl.int32)
        exponent, mantissa = bits >> 3 & 15, bits & 7
        normal = ((exponent + 120) << 23 | mantissa << 20).to(tl.float32, bitcast=True)
        step = tl.where(exponent > 0, normal, mantissa.to(tl.float32) * 0.001953125)
        step = tl.where(bits >= 128, -step, step)
        step = tl.div_rn(
            step, tl.load(global_ + (row if GLOBALS == 2 else row * 0), mask=mask, other=1.0)
        )
    elif KIND == 1:
        bits = step.to(tl.int32) << 23
        step = tl.where(bits > 0, bits, 1 << 22).to(tl.float32, bitcast=True)
    code = tl.load(words + word, mask=mask, other=0)[:, None] >> (4 * tl.arange(0, 8))[None, :] & 15
    if KIND <= 1:  # e2m1: 0 and 0.5 below its normal numbers
        magnitude = code & 7
        normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
        value = tl.where(code >= 8, -value, value)
    else:
        zero_point = tl.full((WORDS,), 8, tl.int32)
        if KIND == 3:
            zeros = tl.load(zero + row // 8 * row_blocks + block % row_blocks, mask=mask, other=0)
            zero_point = zeros >> (row % 8 * 4).to(tl.int32) & 15
        value = (code - zero_point[:, None]).to(tl.float32)
    offs = word[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(w + offs, (value * step[:, None]).to(w.dtype.element_ty), mask=mask[:, None])
