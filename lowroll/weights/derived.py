"""Tensors that a learner derives from its weights and keeps beside them: the copies of an adapter
that products use, and the codes of an aligned layer.

Code that changes the weights reports it here, once: after every optimizer update, and after a
restore. Nothing else could tell. A kernel that writes through an address, or a gather of shards
into the storage that was there before, leaves both the address and autograd's version counter as
they were.
"""

from __future__ import annotations

from lowroll.model.transformer import Transformer
from lowroll.weights import aligned


def renew(model: Transformer) -> None:
    """Renew what was made of weights that have changed: codes at once (ValueError as
    `aligned.refresh` says), an adapter's copies when they are next read."""
    for _, linear in model.linears():
        if linear.adapter is not None:
            linear.adapter.changed()
    aligned.refresh(model)
