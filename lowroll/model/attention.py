"""The `attend` seam and the learner's attention.

A model calls `attend(layer, q_THd, k_TGd, v_TGd) -> o_THd` and knows no more. The learner passes `varlen`: causal
attention within each of the packed sequences. The engine passes paged attention (`lowroll.kv.cache`).

Legend: T packed tokens, H query heads, G key-value heads, d head size, S sequences, L tokens of a sequence.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def varlen(lengths: Sequence[int], device: torch.device | str = "cpu") -> Attend:
    """Causal attention over packed sequences of these lengths; nothing is padded.

    In half precision on CUDA it is torch's variable-length flash attention, for the head sizes that it takes.
    Elsewhere sequences of equal length are stacked and share one call. ValueError for a length below 1.
    """
    if any(length < 1 for length in lengths):
        raise ValueError(f"lengths: every packed sequence needs at least one token, got {min(lengths)}")
    starts = [0, *accumulate(lengths)]
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    by_length: dict[int, list[int]] = defaultdict(list)
    for start, length in zip(starts, lengths, strict=False):
        by_length[length].append(start)
    order = torch.tensor([t for length, firsts in by_length.items() for first in firsts
                          for t in range(first, first + length)], device=device)
    shapes = [(len(firsts), length) for length, firsts in by_length.items()]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=device)
    longest = max(lengths)

    def attend(_layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        half = q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16)
        if half and q_THd.shape[-1] % 8 == 0 and q_THd.shape[-1] <= 256:       # what the flash kernels take
            return _flash(q_THd, k_TGd, v_TGd, bounds, longest)
        return _by_length(q_THd[order], k_TGd[order], v_TGd[order], shapes)[back]

    return attend


def _by_length(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
    """Causal attention where the tokens are sorted into stacks of equally long sequences."""
    sizes = [count * length for count, length in shapes]
    outputs = []
    for (count, length), q, k, v in zip(shapes, q_THd.split(sizes), k_TGd.split(sizes), v_TGd.split(sizes),
                                        strict=True):
        q_SHLd, k_SGLd, v_SGLd = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        o_SHLd = F.scaled_dot_product_attention(q_SHLd, k_SGLd, v_SGLd, is_causal=True, enable_gqa=True)
        outputs.append(o_SHLd.transpose(1, 2).reshape(q.shape))
    return torch.cat(outputs)


def _flash(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, bounds: Tensor, longest: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    repeats = q_THd.shape[1] // k_TGd.shape[1]
    if repeats > 1:                           # torch 2.11's varlen attention has no grouped heads
        k_TGd, v_TGd = k_TGd.repeat_interleave(repeats, 1), v_TGd.repeat_interleave(repeats, 1)
    o_THd = varlen_attn(q_THd.contiguous(), k_TGd.contiguous(), v_TGd.contiguous(), bounds, bounds, longest, longest,
                        window_size=(-1, 0))
    assert isinstance(o_THd, Tensor)
    return o_THd
