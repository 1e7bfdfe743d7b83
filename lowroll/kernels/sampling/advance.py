"""The end of a decode step: record the drawn tokens and advance every row, in one launch.

    ids = token,   pos += 1 where pos < end,   next = pos + 1
    length += 1 where pos < end, else 0

Legend: `kernels.sampling`; S steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import after_others, block, early_start, jit, tl, triton_supports
from lowroll.kernels.sampling.penalties import SEEN, Marked, flat


def advance(
    tokens_B: Tensor,
    logprobs_B: Tensor,
    step_1: Tensor,
    tokens_SB: Tensor,
    logprobs_SB: Tensor,
    ids_B: Tensor,
    pos_B: Tensor,
    next_B: Tensor,
    end_B: Tensor,
    lengths_B: Tensor,
    marked: Marked | None = None,
) -> None:
    """Write tokens and log-probs to row `step_1` of the results, count the step, and advance the
    rows, in place. A length counts cached keys and the next token. marked: of the same rows; tokens
    become seen where a row has a repetition penalty.

    int64 all but logprobs (float32) and lengths_B (int32); the results have at least B columns.
    """
    rows = tokens_B.shape[0]
    if triton_supports(tokens_B):
        _advance_kernel[(1,)](
            tokens_B,
            logprobs_B,
            step_1,
            tokens_SB,
            logprobs_SB,
            ids_B,
            pos_B,
            next_B,
            end_B,
            lengths_B,
            None if marked is None else marked.marks_SV,
            None if marked is None else marked.slots_B,
            None if marked is None else marked.penalty_B,
            rows,
            tokens_SB.stride(0),
            0 if marked is None else marked.marks_SV.stride(0),
            SEEN=SEEN,
            BLOCK=block(rows),
            num_warps=4,
            **early_start(),
        )
        return
    tokens_SB[:, :rows].index_copy_(0, step_1, tokens_B[None])
    logprobs_SB[:, :rows].index_copy_(0, step_1, logprobs_B[None])
    step_1.add_(1)
    ids_B.copy_(tokens_B)
    if marked is not None:
        marks_seen_B = (pos_B < end_B) & (marked.penalty_B != 1)
        marks = flat(marked.marks_SV)
        index_B = marked.slots_B * marked.marks_SV.stride(0) + tokens_B
        marked_B = torch.where(marks_seen_B, marks[index_B] | SEEN, 0).to(marks.dtype)
        marks.scatter_reduce_(0, index_B, marked_B, "amax")  # dead rows may share a place
    pos_B.add_(pos_B < end_B)
    next_B.copy_(pos_B + 1)
    lengths_B.add_(1).mul_(pos_B < end_B)


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _advance_kernel(
    tokens,
    logprobs,
    step_1,
    tokens_SB,
    logprobs_SB,
    ids,
    pos,
    next_,
    end,
    lengths,
    marks,
    slots,
    penalties,
    rows,
    stride,
    marks_stride,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    after_others(EARLY)
    offs = tl.arange(0, BLOCK)
    live = offs < rows
    step = tl.load(step_1)
    token = tl.load(tokens + offs, mask=live, other=0)
    tl.store(tokens_SB + step * stride + offs, token, mask=live)
    tl.store(
        logprobs_SB + step * stride + offs,
        tl.load(logprobs + offs, mask=live, other=0.0),
        mask=live,
    )
    tl.store(ids + offs, token, mask=live)
    position, end_position = (
        tl.load(pos + offs, mask=live, other=0),
        tl.load(end + offs, mask=live, other=0),
    )
    if marks is not None:
        penalty = tl.load(penalties + offs, mask=live, other=1.0)
        slot = tl.load(slots + offs, mask=live, other=0)
        marks_seen = live & (position < end_position) & (penalty != 1)
        mark = tl.load(marks + slot * marks_stride + token, mask=marks_seen, other=0)
        tl.store(marks + slot * marks_stride + token, mark | SEEN, mask=marks_seen)
    position += (position < end_position).to(tl.int64)
    tl.store(pos + offs, position, mask=live)
    tl.store(next_ + offs, position + 1, mask=live)
    length = tl.load(lengths + offs, mask=live, other=0)
    tl.store(lengths + offs, tl.where(position < end_position, length + 1, 0), mask=live)
    tl.debug_barrier()
    tl.store(step_1, step + 1)
