"""The aligned forward (QaRL; docs/algorithms.md): the learner multiplies with the engine's tensors.

Call `align`, and perhaps `transpose`, once, and `refresh` after every optimiser update and every
restore. Between two updates all micro-batches, the old log-probs and the publication use the same
codes, so the `digest` of learner and engine are equal. Over a quantized base (LoRA) the codes are
the base itself. Embeddings, norms and lm_head stay dense. In the model's own floating-point format
the aligned forward is the plain one, up to the order of sums in packed products (`quant.dense`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lowroll.kernels import checksum
from lowroll.model.experts import StackedLinear
from lowroll.model.linear import Linear
from lowroll.model.transformer import Block, Transformer
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format


def align(model: Transformer, format: str) -> Transformer:
    """Give every linear layer its weight in `format`, by which its forward multiplies from now on.
    A low-bit base is multiplied as it is. ValueError for one in another format, before any
    change."""
    for name, linear in model.linears():
        base = linear.weight
        expected_format = get_format(format).of(name).name  # ValueError before any change
        if not isinstance(base, QTensor) or get_format(base.format).dense:
            continue
        if base.format != expected_format:
            raise ValueError(
                f"{name}: the base is {base.format}, and the forward is to be {expected_format}"
            )
    for name, linear in model.linears():
        linear.aligned = quantized(name, linear, format)
    return model


def realign(model: Transformer, format: str) -> Transformer:
    """Align with another format: the dense forward over a quantized base, and for plain floats."""
    dense = get_format(format).dense
    for name, linear in model.linears():
        if dense or isinstance(linear.weight, QTensor):
            linear.aligned = None
        else:
            linear.aligned = quantized(name, linear, format)
    return model


@torch.no_grad()
def transpose(model: Transformer) -> Transformer:
    """Multiply every linear layer's input gradients in fp8, with codes of a byte a weight.
    ValueError for experts, before any change."""
    for name, linear in model.linears():
        if isinstance(linear, StackedLinear):
            raise ValueError(f"{name}: the products of experts have no gradient in fp8")
    for name, linear in model.linears():
        linear.transposed = _quantize_transposed(name, linear)
    return model


@torch.no_grad()
def refresh(model: Transformer) -> None:
    """Remake the codes of trainable weights in place. ValueError names a weight that is not finite,
    before a block read with it is written."""
    if not any(_has_codes(linear) for _, linear in model.linears()):
        return
    for blocks in model.read_blocks(model):
        _requantize_blocks(blocks)


def _has_codes(linear: Linear) -> bool:
    return linear.aligned is not None or linear.transposed is not None


def _requantize_blocks(blocks: list[Block]) -> None:
    trainable: list[tuple[str, Linear, nn.Parameter]] = []
    for block in blocks:
        for name, module in block.named_modules():
            if not isinstance(module, Linear) or not _has_codes(module):
                continue
            if isinstance(module.weight, nn.Parameter) and module.weight.requires_grad:
                trainable.append((f"blocks.{block.layer}.{name}", module, module.weight))
    amax = checksum.amax([master for _, _, master in trainable])
    for (name, linear, _), is_finite in zip(trainable, checksum.finite(amax), strict=True):
        if not is_finite:
            format = "fp8" if linear.aligned is None else linear.aligned.format
            raise ValueError(f"{name}.weight: {format}: the weight holds a non-finite value")
    for (_, linear, master), amax_1 in zip(trainable, amax, strict=True):
        if linear.aligned is not None:
            linear.aligned.quantize_(master, amax_1)
        if linear.transposed is not None:
            linear.transposed.quantize_(master.t(), amax_1)


@contextmanager
def suspended(model: Transformer) -> Iterator[Transformer]:
    """Run an aligned model's dense forward in the block."""
    saved_codes = [(linear, linear.aligned) for _, linear in model.linears()]
    for linear, _ in saved_codes:
        linear.aligned = None
    try:
        yield model
    finally:
        for linear, codes in saved_codes:
            linear.aligned = codes


@contextmanager
def dequantized(model: Transformer) -> Iterator[Transformer]:
    """Run an aligned model in the block on a dense copy of its codes, its activations
    unquantized."""
    model_codes = [linear.aligned for _, linear in model.linears()]
    with suspended(model):
        for (_, linear), layer_codes in zip(model.linears(), model_codes, strict=True):
            linear.aligned = (
                None if layer_codes is None else over(layer_codes.dequantize(model.dtype))
            )
        yield model


def quantized(name: str, linear: Linear, format: str) -> QTensor:
    """Quantize a layer's weight. ValueError names the layer."""
    try:
        return linear.quantized(get_format(format).of(name).name)
    except ValueError as error:
        raise ValueError(f"{name}.weight: {error}") from None


def _quantize_transposed(name: str, linear: Linear) -> QTensor:
    weight = linear.weight
    matrix_NK = weight.dequantize() if isinstance(weight, QTensor) else weight.detach()
    try:
        return get_format("fp8").quantize(matrix_NK.t())
    except ValueError as error:
        raise ValueError(f"{name}.weight: {error}") from None
