"""Metrics of whether updates reach the rollouts: the weights' movement compared with the format's
rounding (QuRL, appendix A).

    update        sum |W' - W|^2 / sum |W|^2            Eq. 13, over the step
    quant error   sum |Q(W') - W'|^2 / sum |W'|^2       Eq. 14, after it
    flipped       share of the low-bit codes that differ before and after

over all linear weights. Codes are compared without their scales: where a group's scale doubles and
its codes halve (MXFP4), all have flipped. Under LoRA only Eq. 13 is measured, on base + (alpha / r)
B A.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lowroll.model.linear import Linear
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format


class WeightWatch:
    """Compares a master's and its engine's weights with those at the last `measure`."""

    def __init__(self, master: Transformer, weights: Mapping[str, QTensor]) -> None:
        """weights: the engine's, by layer name, in storages that every publication refills."""
        self.master = master
        self.weights = weights
        self._before = [
            (_dense_weight(master_linear.weight).clone(), _codes(engine_weight).clone())
            for master_linear, engine_weight in self._pairs()
        ]

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return `weights/*` since the last call. Call it after `publish`."""
        changes, sizes, errors, sizes_after = _Norms(), _Norms(), _Norms(), _Norms()
        num_changed: list[Tensor] = []
        for (master_linear, engine_weight), (before, codes_before) in zip(
            self._pairs(), self._before, strict=True
        ):
            weight, codes = _dense_weight(master_linear.weight), _codes(engine_weight)
            changes.add(weight.float() - before.float())
            sizes.add(before.float())
            errors.add(engine_weight.dequantize() - weight.float())
            sizes_after.add(weight.float())
            bits = get_format(engine_weight.format).bits
            num_changed.append(num_flipped(codes_before, codes, bits))
            before.copy_(weight)
            codes_before.copy_(codes)
        num_weights = sum(before.numel() for before, _ in self._before)
        return {
            "weights/normalized_update": changes.squared() / max(sizes.squared(), 1e-30),
            "weights/normalized_quant_error": errors.squared() / max(sizes_after.squared(), 1e-30),
            "weights/codes_flipped_fraction": int(torch.stack(num_changed).sum()) / num_weights,
        }

    def _pairs(self) -> Iterator[tuple[Linear, QTensor]]:
        for name, master_linear in self.master.linears():
            yield master_linear, self.weights[name]


class AdapterWatch:
    """Compares a LoRA model's adapted weights with those at the last `measure`."""

    def __init__(self, master: Transformer) -> None:
        self.master = master
        self._before = [_adapter_factors(linear) for _, linear in master.linears()]

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return `weights/normalized_update` since the last call."""
        changes, sizes = _Norms(), _Norms()
        for i, (_, linear) in enumerate(self.master.linears()):
            factors_before, factors = self._before[i], _adapter_factors(linear)
            base = (
                linear.weight.dequantize() if isinstance(linear.weight, QTensor) else linear.weight
            )
            adapted_before = base.float().clone()  # a dense format returns the weights themselves
            for part, (a_before, b_before) in factors_before.items():
                a, b = factors[part]
                product_before = b_before @ a_before
                changes.add(b @ a - product_before)
                adapted_before[linear.rows(part)] += product_before
            sizes.add(adapted_before)
            self._before[i] = factors
        return {"weights/normalized_update": changes.squared() / max(sizes.squared(), 1e-30)}


@torch.no_grad()
def _adapter_factors(linear: Linear) -> dict[str, tuple[Tensor, Tensor]]:
    adapter = linear.adapter
    if adapter is None:
        return {}
    return {
        part: (adapter.a[part].clone(), adapter.b[part] * adapter.scaling) for part in adapter.a
    }


def num_flipped(before: Tensor, after: Tensor, bits: float) -> Tensor:
    """Count the codes of a format that differ, as a tensor. Below 8 bits a byte holds two."""
    if bits >= 8:
        return (before != after).sum()
    changed = before.view(torch.uint8) ^ after.view(torch.uint8)
    return ((changed & 15) != 0).sum() + ((changed >> 4) != 0).sum()


def _codes(weight: QTensor) -> Tensor:
    codes = max(weight.tensors.values(), key=lambda t: t.nbytes)
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes


def _dense_weight(weight: object) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight.detach()


class _Norms:
    """Norms of matrices, on their device until their squares are summed."""

    def __init__(self) -> None:
        self.norms: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        self.norms.append(torch.linalg.vector_norm(x))

    def squared(self) -> float:
        return float(torch.stack(self.norms).double().square().sum()) if self.norms else 0.0
