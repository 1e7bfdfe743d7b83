"""The answer of `supports` functions: yes, or no with the reason.

`supports` is about the operands of one call, `supports_device` about capability and compiler.
Answers are made once, so a check before every launch is cheap.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


class Support(int):
    """True, or false with the reason in `why_not`. An int, whose truth costs no call."""

    why_not: str

    def __new__(cls, why_not: str = "") -> Support:
        self = super().__new__(cls, not why_not)
        self.why_not = why_not
        return self

    def __repr__(self) -> str:
        return f"no: {self.why_not}" if self.why_not else "yes"


YES = Support()
no = cache(Support)  # the answer with that reason

NO_CUDA = no("needs a CUDA device")
NO_CPU = no("runs on a CPU")
NO_TRITON = no("Triton is not installed")
NO_GRADIENT = no("has no gradient")


def needs_gradient(*inputs: object) -> bool:
    """Return whether a gradient is recorded for one of the inputs."""
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )


def cuda_supports(
    device: torch.device, least: tuple[int, int] = (0, 0), only: bool = False
) -> Support:
    """Return whether the device is CUDA of capability `least` or later; with `only`, exactly."""
    if device.type != "cuda":
        return NO_CUDA
    capability = torch.cuda.get_device_capability(device)
    if capability == least or (capability > least and not only):
        return YES
    required = f"{least[0]}.{least[1]}{'' if only else ' or later'}"
    return no(
        f"needs compute capability {required}, and the device has {capability[0]}.{capability[1]}"
    )
