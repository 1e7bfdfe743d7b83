"""One decoder, its weights in and out, and the only path from logits to log-probs.

Public names load on first use: a folder's settings and tokenizer need no torch.

Legend: T packed tokens, S sequences, L layers, D hidden size, H query heads, G key-value heads, d
head size, V vocabulary, K in features, N out features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowroll.model.transformer import Transformer as Transformer
    from lowroll.model.transformer import initialize as initialize


def __getattr__(name: str) -> Any:
    if name in ("Transformer", "initialize"):
        from lowroll.model import transformer

        return getattr(transformer, name)
    raise AttributeError(f"module 'lowroll.model' has no attribute {name!r}")
