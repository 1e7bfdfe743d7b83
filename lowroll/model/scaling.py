"""Update-aware scaling (QuRL, Eq. 11-12): once, before training, every norm grows by s and what
reads it shrinks by s.

    (W / s) (s x) = W x        for q, k, v behind the input norm; gate, up, a router behind the post-attention norm

The function stays, the gradient of W / s is s times larger, and W / s is s times smaller: an SGD
update is s^2 times larger beside the weight. Adam's and Muon's updates do not follow the size of a
gradient, so with them the relative update grows by s. A format whose scales follow the largest
weight has the codes of W / s equal to those of W but for ties, so its relative error stays; what
grows is the share of codes that an update flips (`weights.watch`). In int8 it grows by s in the
scaled matrices once an update flips a few codes in a hundred; fewer flips grow less, because the
largest weight of a row lies on a tie whatever s is, and fp8's, whose steps follow each weight, grow
less too. o and down flip as before: of all codes, s = 1.5 flips 1.2 to 1.3 times as many.

Biases stay. o and down have no norm before them and stay. A bfloat16 weight is rounded once more by
a division by an s that is no power of two. The model's config records s, so that a scaled model
cannot be scaled again, also after it was saved: a scaled model is an ordinary model with the same
logits, and is exported as it stands. Noise on its norms (`weights.noise`) grows by s with them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from lowroll.model.transformer import Block, Transformer
from lowroll.quant.formats import QTensor

KEY = "lowroll_uaq_scale"  # in config.json of a model whose weights are scaled


def applied(model: Transformer) -> float | None:
    """The s that the model's weights carry, or None."""
    return model.spec.config.get(KEY)


@torch.no_grad()
def scale(model: Transformer, s: float) -> Transformer:
    """Scale a dense model in place. s = 1 is the identity, bit for bit.

    ValueError, before anything changes, for an s that is not finite and positive, a model that was
    scaled before, one with quantized weights, or one with an adapter (which learnt to read the
    norms as they were).
    """
    if not (math.isfinite(s) and s > 0):
        raise ValueError(f"uaq_scale: must be finite and positive, is {s}")
    if applied(model) is not None:
        raise ValueError(
            f"uaq_scale: the model's weights were scaled by {applied(model)} before ({KEY} in its "
            "config.json), and scaling is done once; write null"
        )
    for name, linear in model.linears():
        if isinstance(linear.weight, QTensor) or linear.adapter is not None:
            raise ValueError(
                f"uaq_scale: {name} is quantized or has an adapter; scale the dense model before"
            )
    for block in model.blocks:
        assert isinstance(block, Block)
        experts = block.experts
        if experts is None:
            mlp = [block.gate_up.weight]
        else:
            mlp = [experts.gate_up.weight, experts.router.weight]
        for norm, readers in (
            (block.input_norm, [block.qkv.weight]),
            (block.post_attention_norm, mlp),
        ):
            norm.weight.mul_(s)
            for weight in readers:
                assert not isinstance(weight, QTensor)
                weight.div_(s)
    model.spec = replace(model.spec, config={**model.spec.config, KEY: s})
    return model
