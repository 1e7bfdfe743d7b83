"""Keys and values in 8 bits: e4m3 codes, one scale for a token and KV head.

    scale   2^e, the least with amax <= 448 * 2^e, e >= -60; stored as the byte e + 127
    codes   q = e4m3(x / 2^e), to nearest, ties to even
    fine    of 16 channels of a key, r = e4m3(16 (x / 2^e - q)):  x ~ 2^e (q + r / 16)

Codes times scales are exact. A few channels of a key are far larger than the others (biases of
hundreds in Qwen2.5) and dominate a product's error; the second code cuts theirs to bfloat16's 2^-8
(docs/log/kernels.md). Codes are the same on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
FINE = 16  # most channels of a head
FINER = 16  # fine units in one unit of a code
LEAST = 127 - 60  # byte of the smallest scale
# carries into the exponent above the mantissa of 448 = 1.75 * 2^8
CARRY = 0x1FFFFF


class Codes(NamedTuple):
    """Codes of T tokens, or of [p, P] slots of the cache; uint8."""

    keys_TGd: Tensor
    values_TGd: Tensor
    fine_TGF: Tensor
    scales_TG2: Tensor  # of the key, of the value


def encode(k_TGd: Tensor, v_TGd: Tensor, channels_GF: Tensor) -> Codes:
    """Encode keys and values. channels_GF: int64, each head's distinct fine channels."""
    k_TGd, v_TGd = k_TGd.float(), v_TGd.float()
    bytes_TG2 = torch.stack([_scale_bytes(k_TGd), _scale_bytes(v_TGd)], -1)
    inverse_TG2 = _power_of_two(254 - bytes_TG2)  # from e + 127 to -e + 127
    scaled_k_TGd = k_TGd * inverse_TG2[..., :1]
    scaled_v_TGd = v_TGd * inverse_TG2[..., 1:]
    keys_TGd = scaled_k_TGd.to(E4M3)
    channels_TGF = channels_GF.expand(len(k_TGd), *channels_GF.shape)
    residual_TGF = scaled_k_TGd.gather(2, channels_TGF) - keys_TGd.float().gather(2, channels_TGF)
    return Codes(
        keys_TGd.view(torch.uint8),
        scaled_v_TGd.to(E4M3).view(torch.uint8),
        (residual_TGF * FINER).to(E4M3).view(torch.uint8),
        bytes_TG2.to(torch.uint8),
    )


def _scale_bytes(x_TGd: Tensor) -> Tensor:
    """Return e + 127, int32 [T, G]: amax's exponent byte less 8, and one more above 448's
    mantissa."""
    bits_TG = x_TGd.abs().amax(-1).view(torch.int32)
    return (((bits_TG + CARRY) >> 23) - 8).clamp(min=LEAST)


def decode_keys(
    keys_TGd: Tensor, fine_TGF: Tensor, scales_TG2: Tensor, channels_GF: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return keys [T, G, d] in `dtype`."""
    k_TGd = keys_TGd.view(E4M3).float()
    residual_TGF = fine_TGF.view(E4M3).float() / FINER
    k_TGd.scatter_add_(2, channels_GF.expand(fine_TGF.shape), residual_TGF)
    return (k_TGd * _power_of_two(scales_TG2[..., :1])).to(dtype)


def decode_values(values_TGd: Tensor, scales_TG2: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values [T, G, d] in `dtype`."""
    return (values_TGd.view(E4M3).float() * _power_of_two(scales_TG2[..., 1:])).to(dtype)


def _power_of_two(bytes_TG1: Tensor) -> Tensor:
    return (bytes_TG1.int() << 23).view(torch.float32)
