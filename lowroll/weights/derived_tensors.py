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
    """Renew what was derived from weights that have changed: codes at once, an adapter's copies
    when they are next read. Raises ValueError under the same conditions as `aligned.refresh`."""
    for _, linear in model.linears():
        if linear.adapter is not None:
            linear.adapter.changed()
    aligned.refresh(model)
