"""A blocked Hadamard rotation along the features, which spreads outliers.

    y = x H,    H block diagonal, each block the Sylvester matrix of `width(K)` over its root

H is symmetric and orthogonal, so (x H)(w H)' = x w' (QuaRot, arXiv 2404.00456, section 3; blocks as
`head_dim` in compressed-tensors' transforms). A width is a power of 4, so its root scales exactly.
Sums are pairwise, neighbours first, in float32: every implementation has the same bits for any
number of rows.

Legend: `kernels.quantize`; B features of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import jit, tl, triton, triton_supports
from lowroll.kernels.quantize import avx2
from lowroll.kernels.support import needs_gradient

WIDEST = 256  # a warp holds a row of so many 16-bit numbers, eight a thread
PIECE = 2048  # numbers that a program rotates


def width(size: int) -> int:
    """Return the largest power of 4 up to `WIDEST` that divides `size`; 1 is no rotation."""
    block_size = 1
    while block_size < WIDEST and size % (4 * block_size) == 0:
        block_size *= 4
    return block_size


def rotate(x: Tensor) -> Tensor:
    """Return x [..., K] rotated along its last dimension, in float32. The rotation is its own
    inverse."""
    x, size = x.float(), width(x.shape[-1])
    if size == 1:
        return x
    if avx2.supports(x):
        return avx2.rotate(x, size)
    if needs_gradient(x) or not triton_supports(x) or x.numel() == 0:
        return _plain(x, size)
    x = x.contiguous()
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), PIECE),)
    _rotate_kernel[grid](x, y, x.numel(), WIDTH=size, PIECE=PIECE, enable_fp_fusion=False)
    return y


def _plain(x: Tensor, size: int) -> Tensor:
    shape, half = x.shape, 1
    while half < size:
        even, odd = x.reshape(-1, 2, half).unbind(1)
        x = torch.stack((even + odd, even - odd), dim=1)
        half *= 2
    return x.reshape(shape) * size**-0.5


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _rotate_kernel(x, y, size, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
    values = rotated(tl.load(x + n, mask=n < size, other=0.0), WIDTH)
    tl.store(y + n, values, mask=n < size)


@jit
def rotated(y, WIDTH: tl.constexpr):
    """Rotate a float32 row in registers. Exchange within a warp takes a fifth of the time of shared
    memory (H100)."""
    SIZE: tl.constexpr = y.shape[0]
    if WIDTH == 4:
        y = tl.reshape(_four(tl.reshape(y, (SIZE // 4, 4)), SIZE // 4), (SIZE,)) * 0.5
    elif WIDTH == 16:
        y = tl.reshape(_four(tl.reshape(y, (SIZE // 4, 4)), SIZE // 4), (SIZE // 16, 4, 4))
        y = tl.reshape(_butterfly(y, SIZE // 16, 4, 4, 2), (SIZE,)) * 0.25
    elif WIDTH == 64:
        y = tl.reshape(_eight(tl.reshape(y, (SIZE // 8, 8)), SIZE // 8), (SIZE // 64, 8, 8))
        y = tl.reshape(_butterfly(y, SIZE // 64, 8, 8, 3), (SIZE,)) * 0.125
    elif WIDTH == 256:
        y = tl.reshape(_eight(tl.reshape(y, (SIZE // 8, 8)), SIZE // 8), (SIZE // 256, 32, 8))
        y = tl.reshape(_butterfly(y, SIZE // 256, 32, 8, 5), (SIZE,)) * 0.0625
    return y


@jit
def _four(y, N: tl.constexpr):
    even, odd = tl.split(tl.reshape(y, (N, 2, 2)))
    sum_low, sum_high = tl.split(even + odd)
    difference_low, difference_high = tl.split(even - odd)
    sums = tl.join(sum_low + sum_high, sum_low - sum_high)
    differences = tl.join(difference_low + difference_high, difference_low - difference_high)
    return tl.reshape(tl.join(sums, differences), (N, 4))


@jit
def _eight(y, N: tl.constexpr):
    y = tl.reshape(_four(tl.reshape(y, (N * 2, 4)), N * 2), (N, 2, 4))
    low, high = tl.split(tl.permute(y, (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (N, 8))


@jit
def _butterfly(y, N: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr):
    """Transform the second axis of y [N, COUNT, EACH], of length 2 ** STEPS."""
    index = tl.broadcast_to(tl.arange(0, COUNT)[None, :, None], (N, COUNT, EACH))
    for step in tl.static_range(STEPS):
        partner = tl.gather(y, index ^ (1 << step), 1)
        y = tl.where((index & (1 << step)) != 0, partner - y, y + partner)
    return y
