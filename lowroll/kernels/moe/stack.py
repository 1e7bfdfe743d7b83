from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """The stacked matrices of all experts in their stored format."""

    kind: str
    num_experts: int
    codes_NK: Tensor  # floats, int8, float8_e4m3fn; uint8 [N, K / 2]; int4: int32 [N, K / 8]
    scale_N1: Tensor | None = None  # w8a8, int4: float32; nvfp4: float8_e4m3fn; mxfp4: uint8
    global_scale: Tensor | None = None  # nvfp4: float32 [1] or [N]
    # dense: rounds x as its product takes it
    rounded: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)
    rows: str = field(default="", kw_only=True)  # w8a8: the kind of activations' codes
    bias_N: Tensor | None = field(default=None, kw_only=True)  # added to the products

    @property
    def channels(self) -> int:
        return self.codes_NK.shape[0] // self.num_experts

    @property
    def features(self) -> int:
        return self.codes_NK.shape[1] * (2 * self.codes_NK.element_size() if self.packed else 1)

    @property
    def block(self) -> int:
        """Return how many features are adjacent in packed order (`grouped`)."""
        if not self.packed:
            return 0
        return 32 if self.kind == "mxfp4" else 16

    @property
    def packed(self) -> bool:
        return self.kind in ("nvfp4", "mxfp4", "int4")
