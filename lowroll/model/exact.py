"""What keeps a model from `Transformer.be_exact`.

Its rows have the same bits in any batch where every operation is one of `kernels.invariant`, or a
product of INT8 codes, whose sums are exact integers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lowroll.kernels.attention import avx2 as attention
from lowroll.kernels.fused import avx2 as heads
from lowroll.kernels.invariant import rows
from lowroll.kernels.matmul import ordered
from lowroll.model.spec import ModelSpec
from lowroll.quant.formats import get_format

FORMATS = ("int8", "int8_rotated", "fp32")


def refuse(
    spec: ModelSpec,
    format: str,
    layers: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    key: str = "rollout.exact",
) -> None:
    """ValueError when a model whose linear `layers` are in `format` cannot be exact, with what
    could be. key: what asks."""
    if device.type != "cpu":
        raise ValueError(f"{key}: it runs on a CPU, and the device is {device}")
    if dtype != torch.float32:
        raise ValueError(f"{key}: it computes in float32, and the dtype is {dtype}")
    for part in (rows, heads, attention, ordered):
        if not (found := part.supports_device(device)):
            raise ValueError(f"{key}: a kernel of this CPU {found.why_not}")
    if spec.num_experts:
        raise ValueError(f"{key}: {spec.architecture} has experts, which are not exact yet")
    if spec.head_dim % heads.MULTIPLE or spec.head_dim > attention.WIDEST:
        raise ValueError(
            f"{key}: heads have {spec.head_dim} numbers; it takes multiples of {heads.MULTIPLE} up "
            f"to {attention.WIDEST}"
        )
    chosen = get_format(format)
    odd = sorted({form.name for form in map(chosen.of, layers)} - {*FORMATS})
    if odd:
        raise ValueError(
            f"{key}: {odd[0]} weights sum in another order for many rows than for few; it takes "
            f"{', '.join(FORMATS)}"
        )
