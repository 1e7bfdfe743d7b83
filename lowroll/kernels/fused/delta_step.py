"""One token of the gated delta rule a row, on a CPU: `delta_step.cpp` for torch, in float32.

Legend: `model.recurrence`; N slots.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import cxx
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.support import Support, no

SOURCE = Path(__file__).with_suffix(".cpp")
MULTIPLE = 8  # of a state's columns


class DeltaStepArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "q", "k", "v", "kept", "beta", "slots", "state", "o"),
        *fields(ctypes.c_int, "B", "H", "K", "V", "threads"),
    ]


def supports(state_NHkv: Tensor) -> Support:
    if not torch.is_inference_mode_enabled():
        return no("writes states in place, in inference mode")
    if state_NHkv.shape[-1] % MULTIPLE:
        return no(f"takes values in multiples of {MULTIPLE}")
    return cxx.supports(SOURCE, state_NHkv.device, "the delta rule's steps run in torch")


def delta_step(
    q_BHk: Tensor,
    k_BHk: Tensor,
    v_BHv: Tensor,
    decay_BH: Tensor,
    beta_BH: Tensor,
    state_NHkv: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """Compute `recurrence.delta_step` of states in different slots, in place. Return outputs [B, H,
    v] in v's dtype."""
    rows, heads, keys = q_BHk.shape
    inputs = [
        x.float().contiguous() for x in (q_BHk, k_BHk, v_BHv, decay_BH.float().exp(), beta_BH)
    ]
    o_BHv = torch.empty(v_BHv.shape)
    arguments = DeltaStepArguments(
        *(pointer(t) for t in (*inputs, slots_B.contiguous(), state_NHkv, o_BHv)),
        rows,
        heads,
        keys,
        v_BHv.shape[-1],
    )
    cxx.run(SOURCE, "avx2_delta_step", arguments)
    return o_BHv.to(v_BHv.dtype)
