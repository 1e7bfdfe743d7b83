"""Tensors derived from a learner's weights: an adapter's copies for products, and the codes of an
aligned layer.

Code that changes the weights calls `renew` after every optimizer update and after a restore. A
kernel that writes through an address, or a gather of shards into existing storage, leaves the
address and autograd's version counter unchanged, so the change cannot be detected.
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
