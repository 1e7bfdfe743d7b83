"""The states of recurrent layers, one slot a sample, beside the paged cache. A state is that of all
tokens so far, so it cannot be shared by pages or taken back.

Legend: `model.recurrence`; L layers, N slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowroll.kernels.fused import delta_step as in_place
from lowroll.kv.batch import DecodeRows, PromptChunk
from lowroll.model.attention import upload
from lowroll.model.delta_net import DeltaInputs
from lowroll.model.recurrence import convolve, delta_rule, delta_step
from lowroll.model.spec import ModelSpec


class RecurrentStates:
    """The states of all recurrent layers, by slot, zeros at first. conv_LNCK: the last K - 1 inputs
    of each convolution. rule_LNHkv: the states of the delta rule, float32. row: of a layer in both.
    """

    def __init__(
        self, spec: ModelSpec, num_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert spec.delta is not None
        sizes = spec.delta
        layers = [i for i, layer in enumerate(spec.layers) if layer.mixer == "delta"]
        self.row = {layer: row for row, layer in enumerate(layers)}
        lead = (len(layers), num_slots)
        self.conv_LNCK = torch.zeros(
            *lead, sizes.channels, sizes.taps - 1, dtype=dtype, device=device
        )
        self.rule_LNHkv = torch.zeros(
            *lead, sizes.value_heads, sizes.key_dim, sizes.value_dim, device=device
        )

    @staticmethod
    def nbytes(spec: ModelSpec, num_slots: int, dtype: torch.dtype) -> int:
        """Return the bytes of the states."""
        if spec.delta is None:
            return 0
        sizes = spec.delta
        rule = sizes.value_heads * sizes.key_dim * sizes.value_dim * torch.float32.itemsize
        conv = sizes.channels * (sizes.taps - 1) * dtype.itemsize
        return sum(layer.mixer == "delta" for layer in spec.layers) * num_slots * (rule + conv)

    def begin(self, slots: Sequence[int]) -> None:
        slots_S = upload(torch.tensor(list(slots)), self.rule_LNHkv.device)
        self.conv_LNCK.index_fill_(1, slots_S, 0)
        self.rule_LNHkv.index_fill_(1, slots_S, 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states as `Selector.copy`."""
        sources, targets = upload(torch.tensor(list(pairs)), self.rule_LNHkv.device).unbind(1)
        for state_N in (*self.conv_LNCK, *self.rule_LNHkv):  # layer by layer: they are large
            state_N[targets] = state_N[sources]

    def clear(self) -> None:
        self.conv_LNCK.zero_()
        self.rule_LNHkv.zero_()

    def prefilled(self, layer: int, inputs: DeltaInputs, chunks: Sequence[PromptChunk]) -> Tensor:
        lengths = [chunk.num_tokens for chunk in chunks]
        slots_S = upload(torch.tensor([chunk.slot for chunk in chunks]), inputs.qkv_TC.device)
        conv_NCK, rule_NHkv = self._of(layer)
        convolved_TC, conv_SCK = convolve(
            inputs.qkv_TC, inputs.weight_CK, lengths, conv_NCK[slots_S]
        )
        o_THv, rule_SHkv = delta_rule(*inputs.tokens(convolved_TC), lengths, rule_NHkv[slots_S])
        conv_NCK[slots_S], rule_NHkv[slots_S] = conv_SCK, rule_SHkv
        return o_THv

    def decoded(self, layer: int, inputs: DeltaInputs, rows: DecodeRows) -> Tensor:
        conv_NCK, rule_NHkv = self._of(layer)
        lengths = [1] * len(inputs.qkv_TC)
        convolved_BC, conv_NCK[rows.slots_B] = convolve(
            inputs.qkv_TC, inputs.weight_CK, lengths, conv_NCK[rows.slots_B]
        )
        tokens = inputs.tokens(convolved_BC)
        if in_place.supports(rule_NHkv):
            return in_place.delta_step(*tokens, rule_NHkv, rows.slots_B)
        o_BHv, rule_NHkv[rows.slots_B] = delta_step(*tokens, rule_NHkv[rows.slots_B])
        return o_BHv

    def _of(self, layer: int) -> tuple[Tensor, Tensor]:
        row = self.row[layer]
        return self.conv_LNCK[row], self.rule_LNHkv[row]
