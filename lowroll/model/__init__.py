"""One decoder, its weights in and out, and the only way from logits to log-probs."""

from lowroll.model.transformer import Transformer as Transformer
from lowroll.model.transformer import initialize as initialize
