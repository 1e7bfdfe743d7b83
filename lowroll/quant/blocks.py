"""The GGUF block formats Q4_0, Q4_1 and Q8_0, 32 weights of a row a block.

    q4_0   d = (the entry of the largest magnitude) / -8,   q = clamp(round(w / d) + 8, 0, 15),   w^ = (q - 8) d
    q4_1   m = min(w), d = (max(w) - m) / 15,               q = clamp(round((w - m) / d), 0, 15), w^ = q d + m
    q8_0   d = max |w| / 127,                               q = round(w / d),                     w^ = q d

d and m are float16, and weights are rounded, halves to even, by the stored values (ggml rounds by
the d before it is stored, halves away from zero). A matrix from such a file is recovered bit for
bit where each block uses the ends of its grid, as without an importance matrix (`keeps`). No folder
holds these formats. An exact engine on a CPU decodes them within the product (`ordered.Compact`).

Legend: `quant`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.matmul import ordered
from lowroll.quant.formats import QTensor, WeightOnly, divide, get_format
from lowroll.quant.groups import join, pack, split, unpack
from lowroll.quant.table import OWN

GROUP = 32
CODES = tuple(float(code) for code in range(16))


class BlockFormat(WeightOnly):
    group = GROUP
    compact_bits: float  # of a weight in `compact`

    def grid(self, w_NGS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scale and perhaps the minimum of each group: float32 [N, G]."""
        raise NotImplementedError

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        w_NGS = split(w_NK, GROUP)
        scale_NG, low_NG = self.grid(w_NGS)
        stored = {"scale": _to_float16(scale_NG)}
        if low_NG is not None:
            stored["low"] = _to_float16(low_NG)
            w_NGS = w_NGS - stored["low"].float()[..., None]
        step_NG = stored["scale"].float()
        step_NG = torch.where(step_NG == 0, torch.ones_like(step_NG), step_NG)
        q_NK = join(torch.round(w_NGS / step_NG[..., None]), w_NK.shape[1])
        return {"codes": self.pack(q_NK), **stored}

    def pack(self, q_NK: Tensor) -> Tensor:
        """Pack whole numbers, which may lie beyond the grid."""
        raise NotImplementedError

    def unpack(self, codes: Tensor, num_in: int) -> Tensor:
        """Return the whole numbers that a scale multiplies: float32 [N, K]."""
        raise NotImplementedError

    def compact(self, q: QTensor) -> ordered.Compact:
        """Return the same numbers for `ordered.compact_product`."""
        raise NotImplementedError

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        if exact and takes_compact(x_MK, q.shape):
            return ordered.compact_product(x_MK, q.derive("compact", self.compact), bias_N)
        return super().linear(x_MK, q, bias_N, exact)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        w_NGS = split(self.unpack(q.tensors["codes"], q.shape[1]), GROUP)
        w_NGS = w_NGS * q.tensors["scale"].float()[..., None]
        if "low" in q.tensors:
            w_NGS += q.tensors["low"].float()[..., None]
        return join(w_NGS, q.shape[1]).to(dtype)


class Block4(BlockFormat):
    middle = 0.0  # the code of 0
    compact_bits = 6.0

    def pack(self, q_NK: Tensor) -> Tensor:
        return pack((q_NK + self.middle).clamp(0, 15).to(torch.uint8))

    def unpack(self, codes: Tensor, num_in: int) -> Tensor:
        return unpack(codes, tuple(code - self.middle for code in CODES), num_in)

    def compact(self, q: QTensor) -> ordered.Compact:
        codes_NK = unpack(q.tensors["codes"], CODES, q.shape[1]).to(torch.uint8)
        scale_NG = q.tensors["scale"].float()
        low_NG = q.tensors["low"].float() if "low" in q.tensors else -self.middle * scale_NG
        return ordered.nibbles(codes_NK, scale_NG, low_NG)


class Q4_0(Block4):
    name = "q4_0"
    summary = "W4A16, GGUF's Q4_0: groups of 32, a scale"
    bits = 4.5
    middle = 8.0

    def grid(self, w_NGS: Tensor) -> tuple[Tensor, Tensor | None]:
        low_NG, high_NG = w_NGS.amin(dim=-1), w_NGS.amax(dim=-1)
        return divide(torch.where(high_NG > -low_NG, high_NG, low_NG), -8.0), None


class Q4_1(Block4):
    name = "q4_1"
    summary = "W4A16, GGUF's Q4_1: groups of 32, a scale and a minimum"
    bits = 5

    def grid(self, w_NGS: Tensor) -> tuple[Tensor, Tensor | None]:
        low_NG = w_NGS.amin(dim=-1)
        return divide(w_NGS.amax(dim=-1) - low_NG, 15.0), low_NG


class Q8_0(BlockFormat):
    name = "q8_0"
    summary = "W8A16, GGUF's Q8_0: groups of 32, a scale"
    bits = 8.5
    compact_bits = 9.0
    fallback = OWN

    def grid(self, w_NGS: Tensor) -> tuple[Tensor, Tensor | None]:
        return divide(w_NGS.abs().amax(dim=-1), 127.0), None

    def pack(self, q_NK: Tensor) -> Tensor:
        return q_NK.clamp(-127, 127).to(torch.int8)

    def unpack(self, codes: Tensor, num_in: int) -> Tensor:
        return codes.float()

    def compact(self, q: QTensor) -> ordered.Compact:
        return ordered.blocks(q.tensors["codes"], q.tensors["scale"].float())


def takes_compact(x_MK: Tensor, shape: tuple[int, int]) -> bool:
    """Return whether x is multiplied by `ordered.compact_product`, which has no gradients."""
    if not torch.is_inference_mode_enabled() or x_MK.device.type != "cpu":
        return False
    return x_MK.shape[0] > 0 and shape[1] % GROUP == 0


def keeps(name: str, w_NK: Tensor) -> bool:
    return bool(torch.equal(get_format(name).quantize(w_NK).dequantize(), w_NK.float()))


def _to_float16(x: Tensor) -> Tensor:
    largest = torch.finfo(torch.float16).max
    return x.clamp(-largest, largest).half()
