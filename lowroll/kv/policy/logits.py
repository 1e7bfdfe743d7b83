"""Plain torch attention scores for policies.

Legend: `kv`; C queries of a row, Q query heads of a group.
"""

from __future__ import annotations

from torch import Tensor

# float32 keys or scores in memory at once
MOST_SCORED = 1 << 26


def grouped_logits(q_BCHd: Tensor, k_BGNd: Tensor) -> Tensor:
    """Return q . k / sqrt(d) of each query head and its KV head's keys: float32 [B, G, Q, C, N]."""
    num_heads, d = k_BGNd.shape[1], k_BGNd.shape[3]
    q_BGQCd = q_BCHd.float().unflatten(2, (num_heads, -1)).permute(0, 2, 3, 1, 4)
    logits_BGXN = q_BGQCd.flatten(2, 3) @ k_BGNd.float().transpose(2, 3)
    return logits_BGXN.mul_(d**-0.5).unflatten(2, q_BGQCd.shape[2:4])
