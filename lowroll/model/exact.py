"""The conditions for an exact model (`Transformer.be_exact`): every operation is in
`kernels.batch_invariant`, or a product of codes with exact integer sums (INT8; on a CPU also 4
bits).
"""

from __future__ import annotations

import torch

from lowroll.kernels.attention import avx2 as attention
from lowroll.kernels.attention import tiled
from lowroll.kernels.batch_invariant import rows
from lowroll.kernels.fused import avx2 as heads
from lowroll.kernels.launch import INTERPRETED
from lowroll.kernels.matmul import ordered
from lowroll.model.families.base import PRE_NORMS
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format


def make(model: Transformer, key: str = "rollout.exact") -> None:
    """Have a model give a token the same bits in any batch (`Transformer.be_exact`). ValueError as
    of `refuse`, and for layers of another dtype."""
    weights = [linear.weight for _, linear in model.linears()]
    weight_formats = {get_format(w.format) for w in weights if isinstance(w, QTensor)}
    if other_dtype_formats := [
        layer_format.name
        for layer_format in weight_formats
        if layer_format.dtype not in (None, model.dtype)
    ]:
        raise ValueError(
            f"{key}: it computes in {model.dtype}, and some layers are {other_dtype_formats[0]}"
        )
    refuse(model.spec, model.device, model.dtype, key)
    model.be_exact()


def refuse(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, key: str = "rollout.exact"
) -> None:
    """Raise ValueError when a model cannot be exact. key: the setting to name."""
    if (reason := why_not(spec, device, dtype)) is not None:
        raise ValueError(f"{key}: {reason}")


def why_no_model(spec: ModelSpec) -> str | None:
    features = {
        "sliding windows": bool(spec.windows),
        "norms after attention and MLP": spec.norms != PRE_NORMS,
        "updates that a constant scales": spec.update_scale != 1,
        "recurrent layers": spec.delta is not None,
        "gates of attention": spec.attention_gate,
        "attention sinks": spec.attention_sinks,
        f"the activation {spec.activation}": spec.activation != "silu",
        "routers of sigmoids": spec.mixture.scores is not None,
        "experts with biases or a clamped gate": spec.mixture.has_biases
        or spec.mixture.clamped_gate is not None,
    }
    if found := [feature for feature, is_present in features.items() if is_present]:
        return (
            f"{spec.architecture} has {', '.join(found)}, whose kernels with the same bits in any "
            "batch are not there yet"
        )
    return None


def why_not(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    if (reason := why_no_model(spec)) is not None:
        return reason
    if device.type == "cpu" and not INTERPRETED:
        return _why_not_on_cpu(spec, device, dtype)
    support = tiled.supports_device(device) and tiled.supports_heads(
        spec.head_dim, spec.num_heads, spec.num_kv_heads
    )
    if not support:
        return f"attention {support.why_not}"
    if spec.mixture.num_experts:
        return "experts have the same bits on a CPU alone; set device: cpu"
    return None


def _why_not_on_cpu(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype != torch.float32:
        return f"on a CPU it computes in float32, and the dtype is {dtype}"
    for kernel in (rows, heads, attention, ordered):
        if not (support := kernel.supports_device(device)):
            return f"a kernel of this CPU {support.why_not}"
    if spec.head_dim % heads.MULTIPLE or spec.head_dim > attention.WIDEST:
        return (
            f"heads have {spec.head_dim} numbers; it takes multiples of {heads.MULTIPLE} up "
            f"to {attention.WIDEST}"
        )
    return None
