"""Log-probs of given tokens, with the bits of `kernels.sampling.draw`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import block, jit, tl, triton_supports
from lowroll.kernels.sampling.tile_statistics import WARPS, row_of, tiles_of


def log_probs(logits_BV: Tensor, targets_B: Tensor, temperature: float) -> Tensor:
    """Return each target's log-prob under softmax(logits / temperature), float32 [B]. Rows are
    contiguous."""
    if not triton_supports(logits_BV):
        logp_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
        return logp_BV.gather(-1, targets_B[:, None])[:, 0]
    rows = logits_BV.shape[0]
    temperature_B = torch.full((rows,), temperature, device=logits_BV.device)
    logp_B = torch.empty(rows, dtype=torch.float32, device=logits_BV.device)
    if rows == 0:
        return logp_B
    tiles = tiles_of(logits_BV, temperature_B, None, blocks=False)
    num_tiles = tiles.mass_BC.shape[1]
    _log_prob_kernel[(rows,)](
        logits_BV,
        targets_B,
        temperature_B,
        tiles.largest_BC,
        tiles.mass_BC,
        logp_B,
        num_tiles,
        logits_BV.stride(0),
        TILES=max(16, block(num_tiles)),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return logp_B


# -- Triton ----------------------------------------------------------------------------------------


@jit
def log_prob(chosen, largest, shift, total, factor, temperature):
    """Return the log-prob of a logit; row values as from `row_of`. The total is relative to the
    rounded shift, whose rounding error is put back."""
    rounded = largest.to(tl.float64) * factor - shift
    return (
        (chosen - largest).to(tl.float64) / temperature
        + rounded * 0.6931471805599453
        - tl.log(total)
    )


@jit
def _log_prob_kernel(
    logits_ptr,
    targets_ptr,
    temperature_ptr,
    largest_ptr,
    mass_ptr,
    logp_ptr,
    tiles,
    stride,
    TILES: tl.constexpr,
):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    factor = 1.4426950408889634 / temperature
    _, largest, shift, mass_c = row_of(largest_ptr, mass_ptr, row, tiles, factor, TILES)
    chosen = tl.load(logits_ptr + row.to(tl.int64) * stride + tl.load(targets_ptr + row))
    total = tl.sum(mass_c, 0)
    logp = log_prob(chosen.to(tl.float32), largest, shift, total, factor, temperature)
    tl.store(logp_ptr + row, logp.to(tl.float32))
