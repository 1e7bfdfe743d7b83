"""RMSNorm with the residual added before it, and the codes of the next product made after it, in one pass.

    sum = x + update                                 in the dtype of x
    normed = sum / sqrt(mean(sum^2) + eps) * weight      statistics in float32, rounded once to the dtype of x

(Zhang and Sennrich 2019.) Legend: T tokens, D features.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.rows import Product, Rows, quantize_rows


def add_rms_norm(x_TD: Tensor, update: Tensor | Product | None, weight_D: Tensor, eps: float,
                 rows: str | None = None) -> tuple[Tensor, Tensor | Rows]:
    """(x + update, its norm): the first in the dtype of x (x itself without update), the second dense or as codes.

    `rows` is "int8" or "fp8" for codes. Differentiable in x, update and weight when update is a tensor and rows None.
    """
    if isinstance(update, Product):
        update = update.dense(x_TD.dtype)
    sum_TD = x_TD if update is None else x_TD + update
    normed_TD = _plain(sum_TD, weight_D, eps)
    return sum_TD, normed_TD if rows is None else quantize_rows(normed_TD, rows)


def _plain(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if x_TD.dtype == weight_D.dtype == torch.float32:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    return (F.rms_norm(x_TD.float(), weight_D.shape, None, eps) * weight_D.float()).to(x_TD.dtype)
