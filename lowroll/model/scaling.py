"""Update-aware scaling (QuRL, Eq. 11-12): before training, norms are multiplied by s and their
readers divided by s.

    (W / s) (s x) = W x        for q, k, v behind the input norm; gate, up, a router behind the post-attention norm

The function stays, and updates are relatively larger: SGD's by s^2, those of Adam and Muon by s. So
they flip more codes (docs/algorithms.md).

An s that is no power of two rounds a bfloat16 weight once more; so does every s in norms of 1 + w,
whose weight becomes s (1 + w) - 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Block, Transformer
from lowroll.quant.formats import QTensor

KEY = "lowroll_uaq_scale"


def applied(model: Transformer) -> float | None:
    return model.spec.config.get(KEY)


def why_not(spec: ModelSpec) -> str | None:
    if {"input_norm", "post_attention_norm"} - {name for name, _ in spec.norms}:
        return (
            f"{spec.architecture} has no norms in front of attention and MLP that could be scaled"
        )
    return None


@torch.no_grad()
def scale(model: Transformer, s: float) -> Transformer:
    """Scale a dense model in place. s = 1 is the identity, bit for bit. ValueError, before anything
    changes, for an s that is not finite and positive, or a model that is scaled, quantized, or has
    an adapter."""
    if not (math.isfinite(s) and s > 0):
        raise ValueError(f"uaq_scale: must be finite and positive, is {s}")
    if applied(model) is not None:
        raise ValueError(
            f"uaq_scale: the model's weights were scaled by {applied(model)} before ({KEY} in its "
            "config.json), and scaling is done once; write null"
        )
    if (reason := why_not(model.spec)) is not None:
        raise ValueError(f"uaq_scale: {reason}; write null")
    for name, linear in model.linears():
        if isinstance(linear.weight, QTensor) or linear.adapter is not None:
            raise ValueError(
                f"uaq_scale: {name} is quantized or has an adapter; scale the dense model before"
            )
    for block in model.blocks:
        assert isinstance(block, Block)
        readers_of_norms = (_mixer_readers(block), _mlp_readers(block))
        for norm, readers in zip(block.pre_norms, readers_of_norms, strict=True):
            norm.weight.copy_((norm.weight.float() + norm.offset) * s - norm.offset)
            for weight in readers:
                assert not isinstance(weight, QTensor)
                weight.div_(s)
    model.spec = replace(model.spec, config={**model.spec.config, KEY: s})
    return model


def _mixer_readers(block: Block) -> list[nn.Parameter | QTensor]:
    if block.delta is not None:
        return [block.delta.qkvz.weight, block.delta.ba_weight]
    assert block.mixer_reader is not None
    return [block.mixer_reader.weight]


def _mlp_readers(block: Block) -> list[nn.Parameter | QTensor]:
    if block.experts is None:
        return [block.gate_up.weight]
    readers = [block.experts.gate_up.weight, block.experts.router.weight]
    if block.has_shared_expert:
        readers.append(block.gate_up.weight)
    if block.shared_gate is not None:
        readers.append(block.shared_gate)
    return readers
