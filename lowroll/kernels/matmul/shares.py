"""Products of many features and few channels (the last one of a block), in shares of the features:

    y = sum_s x[:, share s] W[:, share s]^T

A matrix with few channels has too few tiles to fill a device, so its features are cut. torch's
product would do the same and join the sums in a launch of its own; here they are left in float32 to
whoever reads them (`Product`), which is the next norm, for it reads the product anyway. The number
of shares depends on shapes alone.

Legend: M rows of activations, N out features, K in features, S shares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize.rows import Product
from lowroll.kernels.support import NO_CUDA, NO_GRADIENT, YES, Support, no

ROWS = range(65, 257)  # for which it is faster than torch's product
TALL = 3  # in features over out features, at least


def supports(x_MK: Tensor, w_NK: Tensor) -> Support:
    """Is it the product for these numbers?"""
    if not x_MK.is_cuda:
        return NO_CUDA
    if not (found := triton_supports(x_MK)):
        return found  # nobody would add the shares
    if len(x_MK) not in ROWS:
        return no(f"takes {ROWS[0]} to {ROWS[-1]} rows")
    if x_MK.dtype not in (torch.bfloat16, torch.float16) or x_MK.dtype != w_NK.dtype:
        return no("takes bfloat16 and float16")
    if w_NK.shape[1] < TALL * w_NK.shape[0] or w_NK.shape[1] % (8 * shares(len(x_MK))):
        return no(f"takes {TALL} times as many features in as out")
    return NO_GRADIENT if torch.is_grad_enabled() and x_MK.requires_grad else YES


def multiply(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Product:
    """x W^T + b, of which the sums are left [S, M, N] in float32."""
    size = (shares(len(x_MK)), -1)
    x_SMK, w_SNK = (t.unflatten(1, size).transpose(0, 1) for t in (x_MK, w_NK))
    sums_SMN = torch.bmm(x_SMK, w_SNK.transpose(1, 2), out_dtype=torch.float32)
    return Product(sums_SMN, bias_N=bias_N, dtype=x_MK.dtype)


def shares(num_rows: int) -> int:
    """Of a product of so many rows."""
    return 4 if num_rows <= 128 else 2
