"""NF4 W4A16: 16 levels at the quantiles of a normal distribution, one absmax for 64 weights.

    c = absmax of 64 consecutive weights of the flattened matrix,   q = nearest level to w / c,   w^ = level[q] c

Levels and layout are bitsandbytes' (QLoRA, arXiv 2305.14314, section 3 and appendix E): blocks run
over the row-major matrix, the last may be short; two codes a byte, the first in the HIGH half; a
midpoint belongs to the lower level.

`nf4_dq` keeps the absmax in 8 bits (double quantization): less their mean, blocks of 256 are scaled
to [-1, 1] and rounded to 256 levels of dynamic precision (arXiv 1511.04561): +-0.1 ... 1 in 2^i
steps, times 10^(i - 6), i = 0..6, with 0 and 1.

    absmax^ = level[code] * nested_absmax[block // 256] + nested_offset

Parts from a file with different means keep them, one for 256 blocks.

Legend: `quant`; L weights of the matrix, B blocks, P bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.quant.formats import QTensor, WeightOnly
from lowroll.quant.grid import Grid, Gridded, Stretch
from lowroll.quant.groups import pack, unpack
from lowroll.quant.scheme import Header

BLOCK = 64
NESTED_BLOCK = 256
TYPE = "nf4"
STATE = "weight.quant_state.bitsandbytes__nf4"
MOST_STATE = 1 << 14  # bytes of JSON
TINY = 1e-38  # the divisor of a block of zeros
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class NormalFloat4(Gridded, WeightOnly):
    name = "nf4"
    summary = "W4A16, QLoRA's normal levels in blocks of 64"
    bits = 4.5
    group = BLOCK
    double = False
    suffixes = {"absmax": "weight.absmax"}
    whole_groups = True
    read_experts = False

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        absmax_B = _split_blocks(w_NK.float().reshape(-1), BLOCK).abs().amax(dim=-1)
        if isinstance(stretch_NG, Tensor):
            stretch_NG = stretch_NG.flatten()
        return self.encode_absmax(absmax_B * stretch_NG)

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks_BS = _split_blocks(w_NK.float().reshape(-1), BLOCK)
        scaled_BS = _normalize_blocks(blocks_BS, self.decode_absmax(scales))
        return _encode_blocks(scaled_BS, w_NK.numel())

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        if shape[1] % BLOCK:
            raise ValueError(
                f"{self.name}: rows of {shape[1]} weights end within its blocks of {BLOCK}"
            )
        absmax_NG = self.decode_absmax(scales).clamp_min(TINY).view(shape[0], -1)
        return Grid(absmax_NG, nearest_normal, BLOCK)

    def encode_absmax(self, absmax_B: Tensor) -> dict[str, Tensor]:
        return {"absmax": absmax_B}

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        absmax_B = self.decode_absmax(q.tensors)
        values_L = unpack(q.tensors["weight"].t(), LEVELS, q.shape[0] * q.shape[1], first_high=True)
        blocks_BS = F.pad(values_L, (0, -values_L.shape[1] % BLOCK)).view(-1, BLOCK)
        w_L = (blocks_BS * absmax_B[:, None]).flatten()[: values_L.shape[1]]
        return w_L.view(q.shape).to(dtype)

    def decode_absmax(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["absmax"]

    def pitch(self, name: str, num_in: int) -> Fraction:
        if name == "weight":
            return Fraction(num_in, 2)
        return Fraction(num_in, BLOCK if name == "absmax" else BLOCK * NESTED_BLOCK)

    def levels(self) -> dict[str, tuple[float, ...]]:
        return {"weight.quant_map": LEVELS}

    def state(self, shape: tuple[int, int], **more: str) -> dict[str, Any]:
        return {"quant_type": TYPE, "blocksize": BLOCK, **more, "shape": list(shape)}

    def describe(self, dtype: torch.dtype, dense: Sequence[str] = ()) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": TYPE,
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", *dense],
        }

    def headers_beside(self) -> dict[str, Header]:
        maps: dict[str, Header] = {
            suffix: ((len(levels),), ("F32",)) for suffix, levels in self.levels().items()
        }
        return {STATE: (None, ("U8",)), **maps}

    def write_beside(self, q: QTensor, dtype: torch.dtype) -> dict[str, Tensor]:
        state = self.state(q.shape, dtype=str(dtype).removeprefix("torch."))
        maps = {suffix: torch.tensor(levels) for suffix, levels in self.levels().items()}
        return maps | {STATE: _json_to_bytes(state | self.write_offset(q))}

    def write_offset(self, q: QTensor) -> dict[str, Any]:
        return {}

    def read_beside(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> dict[str, Tensor]:
        offset = self._read_state(shape, stored[STATE])
        for suffix, levels in self.levels().items():
            levels_match = torch.allclose(
                stored[suffix].cpu(), torch.tensor(levels), rtol=0, atol=1e-6
            )
            if not levels_match:
                raise ValueError(f"{suffix}: the levels are not those of {self.name}")
        return self.read_offset(torch.tensor([offset], device=stored[STATE].device))

    def _read_state(self, shape: tuple[int, int], encoded: Tensor) -> float:
        expected = self.state(shape)
        try:
            state = _bytes_to_json(encoded)
            mismatched = [key for key, value in expected.items() if state.get(key) != value]
            offset = float(state.get("nested_offset", 0.0))
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{STATE}: not the JSON of a quantization state ({error})") from None
        if mismatched:
            key = mismatched[0]
            raise ValueError(f"{STATE}: {key} is {state.get(key)!r} instead of {expected[key]!r}")
        if not math.isfinite(offset):
            raise ValueError(f"{STATE}: nested_offset is {offset}")
        return offset

    def read_offset(self, offset_1: Tensor) -> dict[str, Tensor]:
        return {}


class NormalFloat4Double(NormalFloat4):
    name = "nf4_dq"
    summary = "nf4 with its absmax in 8 bits (double quantization)"
    bits = 4.127
    once = ("nested_offset",)
    double = True
    suffixes = {
        "absmax": "weight.absmax",
        "nested_absmax": "weight.nested_absmax",
        "nested_offset": None,  # in the JSON
    }

    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        # as in bitsandbytes, codes use absmax before its own rounding
        scaled_BS, absmax_B = _scale_blocks(w_NK.float().reshape(-1), BLOCK)
        return _encode_blocks(scaled_BS, w_NK.numel()) | self.encode_absmax(absmax_B)

    def encode_absmax(self, absmax_B: Tensor) -> dict[str, Tensor]:
        offset = absmax_B.double().mean().float()  # in float64: independent of device and threads
        scaled_BS, nested_absmax = _scale_blocks(absmax_B - offset, NESTED_BLOCK)
        codes_B = torch.bucketize(
            scaled_BS, midpoints(dynamic_levels()).to(scaled_BS.device), out_int32=True
        ).flatten()
        return {
            "absmax": codes_B[: len(absmax_B)].to(torch.uint8),
            "nested_absmax": nested_absmax,
            "nested_offset": offset.reshape(1),
        }

    def decode_absmax(self, tensors: dict[str, Tensor]) -> Tensor:
        codes_B, offset = tensors["absmax"], tensors["nested_offset"]
        scale_B = tensors["nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(codes_B)]
        if len(offset) > 1:
            offset = offset.repeat_interleave(NESTED_BLOCK)[: len(codes_B)]
        return _table(dynamic_levels(), codes_B.device)[codes_B.int()] * scale_B + offset

    def levels(self) -> dict[str, tuple[float, ...]]:
        return super().levels() | {"weight.nested_quant_map": dynamic_levels()}

    def state(self, shape: tuple[int, int], **more: str) -> dict[str, Any]:
        return super().state(shape, **more) | {"nested_blocksize": NESTED_BLOCK}

    def write_offset(self, q: QTensor) -> dict[str, Any]:
        if len(q.tensors["nested_offset"]) > 1:
            raise ValueError(
                f"{self.name}: a part of a fused matrix has several offsets, and files hold one"
            )
        return {"nested_dtype": "float32", "nested_offset": q.tensors["nested_offset"].item()}

    def read_offset(self, offset_1: Tensor) -> dict[str, Tensor]:
        return {"nested_offset": offset_1}


def read_description(config: dict[str, Any], advice: str) -> str:
    """Return the format of bitsandbytes' `quantization_config`. ValueError names the unsupported
    key."""
    is_4bit = config.get("load_in_4bit", config.get("_load_in_4bit"))
    if not is_4bit:
        raise ValueError(f"load_in_4bit: LLM.int8() folders are not supported{advice}")
    for key, default, expected in (
        ("bnb_4bit_quant_type", "fp4", TYPE),
        ("bnb_4bit_quant_storage", "uint8", "uint8"),
    ):
        value = config.get(key, default)
        if value != expected:
            raise ValueError(f"{key}: expected {expected}, got {value!r}{advice}")
    if config.get("bnb_4bit_use_double_quant"):
        return NormalFloat4Double.name
    return NormalFloat4.name


def _json_to_bytes(state: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _bytes_to_json(state: Tensor) -> Any:
    if state.numel() > MOST_STATE:
        raise ValueError(f"{state.numel()} bytes")
    return json.loads(bytes(state.tolist()).decode())


def encode_normal(x: Tensor) -> Tensor:
    """Return the codes (uint8) of the nearest levels, faster than by a search."""
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint in midpoints(LEVELS).tolist():
        codes += (x > midpoint).view(torch.uint8)
    return codes


def nearest_normal(x: Tensor) -> Tensor:
    return _table(LEVELS, x.device)[encode_normal(x).int()]


def midpoints(levels: tuple[float, ...]) -> Tensor:
    table = torch.tensor(levels)
    return (table[:-1] + table[1:]) / 2


@cache
def dynamic_levels() -> tuple[float, ...]:
    """Return the 256 levels of a quantized absmax, ascending."""
    magnitudes: list[float] = []
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        magnitudes += (10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return tuple(sorted([*magnitudes, *(-m for m in magnitudes), 0.0, 1.0]))


@cache
def _table(levels: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(levels, device=device)


def _scale_blocks(x_L: Tensor, size: int) -> tuple[Tensor, Tensor]:
    x_BS = _split_blocks(x_L, size)
    absmax_B = x_BS.abs().amax(dim=-1)
    return _normalize_blocks(x_BS, absmax_B), absmax_B


def _split_blocks(x_L: Tensor, size: int) -> Tensor:
    return F.pad(x_L, (0, -len(x_L) % size)).view(-1, size)


def _normalize_blocks(x_BS: Tensor, absmax_B: Tensor) -> Tensor:
    return x_BS * (1 / absmax_B.clamp_min(TINY))[:, None]


def _encode_blocks(scaled_BS: Tensor, weights: int) -> dict[str, Tensor]:
    codes_L = encode_normal(scaled_BS).flatten()[: weights + weights % 2]
    return {"weight": pack(codes_L[None], first_high=True).t().contiguous()}
