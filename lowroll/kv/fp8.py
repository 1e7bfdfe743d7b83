"""An 8-bit KV cache: `kernels.attention.quantized_cache` in pages. Attention sees the stored codes
in every phase, also of a fresh prompt and of a step's new token. So recorded log-probs are those of
the 8-bit cache, and a prefix has the same keys whether just made, shared, or found in the prefix
cache.

`adapt` chooses the key channels that get a second code: of the pairs that RoPE rotates, those with
the largest bias of the key projection, or the largest gain of the keys' norm; among equals the
slowest, where models without biases have large keys (arXiv 2502.01563).

Legend: `kv`; F fine channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowroll.kernels.attention.decode8 import paged_decode8
from lowroll.kernels.attention.quantized_cache import (
    FINE,
    Codes,
    decode_keys,
    decode_values,
    encode,
)
from lowroll.kv.batch import DecodeRows
from lowroll.kv.cache import KVCache
from lowroll.model.attention import AttentionInputs
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Block, Transformer


class Float8Cache(KVCache):
    """An 8-bit KV cache. channels_LGF: int64, those with a second code."""

    skips_negative_slots = False

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(spec, num_pages, page_size, dtype, device)
        energy_LGd = torch.zeros(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, device=self.device
        )
        self.channels_LGF = fine_channels(energy_LGd)

    @staticmethod
    def columns(spec: ModelSpec, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
        widths = (spec.head_dim, spec.head_dim, min(FINE, spec.head_dim), 2)
        return [(width, torch.uint8) for width in widths]

    def adapt(self, model: Transformer) -> bool:
        channels_LGF = fine_channels(key_energy(model))
        changed = not torch.equal(channels_LGF, self.channels_LGF)
        self.channels_LGF.copy_(channels_LGF)  # captured steps hold its address
        return changed

    def codes(self, layer: int) -> Codes:
        return Codes(*(column[layer] for column in self.buffers))

    def write(
        self, layer: int, slots_T: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> tuple[Tensor, Tensor]:
        new_codes = encode(k_TGd, v_TGd, self.channels_LGF[layer])
        for buffer, codes in zip(self.codes(layer), new_codes, strict=True):
            buffer.flatten(0, 1).index_copy_(0, slots_T.long(), codes)
        return self._decode(layer, new_codes)

    def read(self, layer: int, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        stored = (buffer.flatten(0, 1).index_select(0, slots_T) for buffer in self.codes(layer))
        return self._decode(layer, Codes(*stored))

    def _decode(self, layer: int, codes: Codes) -> tuple[Tensor, Tensor]:
        k_TGd = decode_keys(
            codes.keys_TGd, codes.fine_TGF, codes.scales_TG2, self.channels_LGF[layer], self.dtype
        )
        return k_TGd, decode_values(codes.values_TGd, codes.scales_TG2, self.dtype)

    def gather_keys(self, layer: int, table_BP: Tensor) -> Tensor:
        keys, _, fine, scales = self.codes(layer)
        pages = table_BP.flatten()
        keys, fine, scales = (
            buffer.index_select(0, pages).flatten(0, 1) for buffer in (keys, fine, scales)
        )
        k_TGd = decode_keys(keys, fine, scales, self.channels_LGF[layer], self.dtype)
        return k_TGd.unflatten(0, (len(table_BP), -1)).transpose(1, 2)

    def key_pages(self, table_BP: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        copies = []
        for layer in range(len(self.keys)):
            k_BTGd = self.gather_keys(layer, table_BP).transpose(1, 2)
            copies.append(k_BTGd.reshape(-1, self.page_size, *k_BTGd.shape[2:]))
        numbers = torch.arange(table_BP.numel(), dtype=torch.int32, device=self.device)
        return copies, numbers.view_as(table_BP)

    def decode(self, layer: int, inputs: AttentionInputs, rows: DecodeRows) -> Tensor:
        assert inputs.sinks_H is None, "a model with sinks has no 8-bit cache"
        return paged_decode8(
            inputs.q_THd,
            inputs.k_TGd,
            inputs.v_TGd,
            self.codes(layer),
            self.channels_LGF[layer],
            rows.table_BP,
            rows.lengths_B,
            inputs.q_THd.shape[-1] ** -0.5,
        )


def key_energy(model: Transformer) -> Tensor:
    """Return how large the weights make each key channel, float32 [L, G, d], in the kernels' order:
    the square of its norm gain, else of its bias, else 0."""
    spec = model.spec
    size = spec.num_kv_heads * spec.head_dim
    energies = []
    for block in model.blocks:
        assert isinstance(block, Block)
        energy = torch.zeros(size, device=model.device)
        if block.k_norm is not None:
            gain = block.k_norm.gain.detach().float()
            if not block.norms_whole:
                gain = gain.repeat(spec.num_kv_heads)
            energy = gain.square()
        elif block.latent is None and block.qkv.bias is not None:
            key_bias = block.qkv.bias.detach()[-2 * size : -size]
            energy = key_bias.float().square()
        energy_Gd = energy.view(spec.num_kv_heads, spec.head_dim)
        if block.order is not None:
            energy_Gd = energy_Gd[:, block.order]
        energies.append(energy_Gd)
    return torch.stack(energies)


def fine_channels(energy_LGd: Tensor) -> Tensor:
    """Return the F channels of the most energetic pairs, int64 [L, G, F]; of equal ones the later,
    which are slower. Pair p is the channels p and p + d / 2."""
    pairs_LGp = energy_LGd.unflatten(-1, (2, -1)).sum(-2)
    num_pairs = pairs_LGp.shape[-1]
    reversed_order_LGp = pairs_LGp.flip(-1).argsort(dim=-1, descending=True, stable=True)
    order_LGp = num_pairs - 1 - reversed_order_LGp
    best_LGf = order_LGp[..., : min(FINE, 2 * num_pairs) // 2]
    return torch.cat([best_LGf, best_LGf + num_pairs], -1)
