"""Activation checkpointing of a model.

    False       norms and activation functions, one by one (`model.recompute`)
    0 .. 1      also the gate-up product, a block's widest tensor, in this share of the blocks
    True        of every block all but its input (Chen et al. 2016, arXiv 1604.06174)

The gradient is bitwise the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowroll.model.attention import Attend
from lowroll.model.recompute import remaking
from lowroll.model.residual_stream import Stream
from lowroll.model.transformer import Block, Transformer, run_block, whole


def apply(model: Transformer, activation_checkpointing: bool | float = False) -> Transformer:
    """Apply the setting to the model's blocks; returns the model."""
    if activation_checkpointing is True:
        model.run_block = _checkpoint
    else:
        model.run_block = _Remaking(activation_checkpointing * len(model.blocks))
    return model


@dataclass(frozen=True)
class _Remaking:
    products_below: float

    def __call__(
        self,
        block: Block,
        x_TD: Tensor,
        update_TD: Stream | None,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, Stream | None]:
        if not torch.is_grad_enabled():
            return run_block(block, x_TD, update_TD, cos, sin, attend)
        with remaking(products=block.layer < self.products_below):
            return run_block(block, x_TD, update_TD, cos, sin, attend)


def _checkpoint(
    block: Block,
    x_TD: Tensor,
    update_TD: Stream | None,
    cos: Tensor,
    sin: Tensor,
    attend: Attend,
) -> tuple[Tensor, Stream | None]:
    if not torch.is_grad_enabled():
        return run_block(block, x_TD, update_TD, cos, sin, attend)
    assert update_TD is None, "a block that is made again whole leaves no update behind"
    x_TD = checkpoint(
        whole, block, x_TD, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
    )
    return x_TD, None
