"""Triton side of `logprobs.py`. It is imported only where it runs, so the room needs no Triton to be imported."""
from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)           # a maximum of nothing: finite, so that no difference of infinities is taken


@triton.jit
def token_log_probs(logits_ptr, targets_ptr, scale_ptr, logp_ptr, entropy_ptr, gradient_ptr, vocab, logits_stride,
                    gradient_stride, inverse_temperature, BLOCK: tl.constexpr):
    """One row: its statistics in one pass with a running maximum a lane; a second pass only for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    offs_n = tl.arange(0, BLOCK)
    largest_n = tl.full((BLOCK,), LOWEST, tl.float32)
    mass_n = tl.zeros((BLOCK,), tl.float32)            # sum exp(z - largest)
    moment_n = tl.zeros((BLOCK,), tl.float32)          # sum exp(z - largest) (z - largest)
    for start in range(0, vocab, BLOCK):
        z_n = tl.load(row_ptr + start + offs_n, mask=start + offs_n < vocab, other=float("-inf")).to(tl.float32)
        z_n = z_n * inverse_temperature
        new_n = tl.maximum(largest_n, z_n)
        fall_n = largest_n - new_n
        shrink_n = tl.exp(fall_n)
        gap_n = z_n - new_n
        e_n = tl.exp(gap_n)
        moment_n = shrink_n * (moment_n + fall_n * mass_n) + tl.where(z_n == float("-inf"), 0.0, e_n * gap_n)
        mass_n = shrink_n * mass_n + e_n
        largest_n = new_n
    largest = tl.max(largest_n, 0)
    fall_n = largest_n - largest
    shrink_n = tl.exp(fall_n)
    mass = tl.sum(shrink_n * mass_n, 0)
    moment = tl.sum(shrink_n * (moment_n + fall_n * mass_n), 0)
    target = tl.load(targets_ptr + row)
    lse = largest + tl.log(mass)
    tl.store(logp_ptr + row, tl.load(row_ptr + target).to(tl.float32) * inverse_temperature - lse)
    tl.store(entropy_ptr + row, tl.log(mass) - moment / mass)
    if gradient_ptr is not None:
        scale = inverse_temperature
        if scale_ptr is not None:
            scale *= tl.load(scale_ptr + row)
        for start in range(0, vocab, BLOCK):
            inside_n = start + offs_n < vocab
            z_n = tl.load(row_ptr + start + offs_n, mask=inside_n, other=float("-inf")).to(tl.float32)
            hit_n = tl.where(start + offs_n == target, 1.0, 0.0)
            g_n = scale * (hit_n - tl.exp(z_n * inverse_temperature - lse))
            tl.store(gradient_ptr + row * gradient_stride + start + offs_n,
                     g_n.to(gradient_ptr.dtype.element_ty), mask=inside_n)
