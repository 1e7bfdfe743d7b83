"""Tensors derived from a learner's weights: an adapter's copies for products, and the codes of an
aligned layer. Whoever changes the weights calls `renew`: neither an address nor autograd's version
counter shows what kernels and gathers of shards write into existing storage.
"""

from __future__ import annotations

from lowroll.model.transformer import Transformer
from lowroll.weights import aligned


def renew(model: Transformer) -> None:
    """Renew codes at once, and an adapter's copies when they are next read. ValueError as by
    `aligned.refresh`."""
    for _, linear in model.linears():
        if linear.adapter is not None:
            linear.adapter.changed()
    aligned.refresh(model)
