"""float32 rows times frozen int8 codes on a CPU, by integer products: three of them make one of
float32, and where a processor multiplies bytes ten times as fast as floats they take a third of its
time.

    x^[m, k] = step[m] (2^16 a + 2^8 b + c),      a, b, c signed bytes,      step[m] = amax(|x[m, :]|) / MOST
    y[m, n] = step[m] (2^16 (a . w) + 2^8 (b . w) + c . w)[m, n]

The three inner sums are exact, whatever the number of rows; what is lost is 2^-23 of the largest
number of a row, as in float32's own sums. A row gives the same bits alone and in any batch. Rows
that hold a number that is not finite give NaN.

Small matrices are left to torch, whose bits small models keep.

Legend: M rows, N out features, K in features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.matmul import onednn
from lowroll.kernels.support import Support, no

MOST = (1 << 22) * 1.98  # of x over its step: a, b and c are bytes then, and b and c may round up
LEAST = 1 << 18  # weights of a matrix
FEW = 32  # rows, for which the codes' float32 matrix is read faster than made


def supports(x_MK: Tensor, codes_NK: Tensor) -> Support:
    """Does `multiply` take these rows and codes?"""
    if x_MK.dtype != torch.float32 or codes_NK.dtype != torch.int8:
        return no("takes float32 rows and int8 codes")
    if codes_NK.numel() < LEAST or x_MK.shape[0] < FEW:
        return no("small products are torch's")
    return onednn.supports_device(x_MK.device)


def multiply(x_MK: Tensor, packed: onednn.Packed) -> Tensor:
    """x times the transposed codes, each with its scale: [M, N] float32."""
    step_M1 = x_MK.abs().amax(dim=1, keepdim=True).div_(MOST)
    whole_MK = (x_MK / step_M1.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int32)
    low_MK = whole_MK.to(torch.int8)  # the last eight bits, as a signed byte
    whole_MK.sub_(low_MK).bitwise_right_shift_(8)
    middle_MK = whole_MK.to(torch.int8)
    whole_MK.sub_(middle_MK).bitwise_right_shift_(8)
    y_MN = onednn.multiply(whole_MK.to(torch.int8), packed)
    y_MN.mul_(256).add_(onednn.multiply(middle_MK, packed))
    y_MN.mul_(256).add_(onednn.multiply(low_MK, packed))
    return y_MN.mul_(step_M1)
