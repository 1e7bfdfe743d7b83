"""Tensors derived from a learner's weights: an adapter's copies for products, and the codes of an
aligned layer. Call `renew` after changing weights: addresses and autograd's version counters do not
show writes in place by kernels and gathers of shards."""

from __future__ import annotations

from lowroll.model.transformer import Transformer
from lowroll.weights import aligned_forward


def renew(model: Transformer) -> None:
    """Renew codes now, and an adapter's copies at the next read. ValueError as by
    `aligned_forward.refresh`."""
    for _, linear in model.linears():
        if linear.adapter is not None:
            linear.adapter.changed()
    aligned_forward.refresh(model)
