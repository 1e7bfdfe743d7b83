"""Bytes of what stays in a run: weights, adapters, masters and moments, the engine's weights and
copies, what `weights/*` compares with. All sizes are exact. A model is its shapes.

Legend: N out features, K in features, R adapter rank, L = R times the parts that have an adapter.
"""

from __future__ import annotations

from math import prod

import torch

from lowroll.config import RunConfig
from lowroll.kernels.matmul import limbs, w4_avx2, w8a8_onednn
from lowroll.model import lora
from lowroll.model.experts import StackedLinear
from lowroll.model.linear import Linear
from lowroll.model.transformer import Transformer
from lowroll.quant.dense import PACK_FROM
from lowroll.quant.formats import Format, get_format
from lowroll.quant.int8 import Int8
from lowroll.runs.assembly.compute import Compute
from lowroll.trainer import adamw8bit
from lowroll.trainer.muon import hidden_matrices
from lowroll.weights.noise import noisy_norms

MASTER = 4  # bytes of a float32
META = torch.device("meta")


def linear_size(model: Transformer) -> int:
    return sum(_num_weights(linear) for _, linear in model.linears())


def other_size(model: Transformer) -> int:
    """Return the number of all other weights."""
    return sum(p.numel() for p in model.parameters()) - linear_size(model)


def linear_bytes(model: Transformer, format: str) -> int:
    """Return the bytes of the linear layers in a format. ValueError for a shape that it does not
    support."""
    total = 0
    for name, linear in model.linears():
        rows, columns = linear.weight.shape
        try:
            total += get_format(format).of(name).empty((rows, columns), META).nbytes
        except ValueError as error:
            raise ValueError(f"rollout.weights: {name}: {error}") from None
    return total


def largest(model: Transformer) -> int:
    """Return the weights of the largest linear layer; all experts count as one."""
    return max(_num_weights(linear) for _, linear in model.linears())


def largest_unit(model: Transformer) -> int:
    """Return the most weights that ranks with parts gather at a time: a block's, or those outside
    of blocks."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return max(*blocks, sum(p.numel() for p in model.parameters()) - sum(blocks))


def adapted(cfg: RunConfig, linear: Linear) -> dict[str, int]:
    """Return the parts of a layer with an adapter, and their rows."""
    targets = cfg.train.lora_target_modules if cfg.train.lora else ()
    return {part: linear.parts[part] for part in lora.adapted_parts(linear.parts, targets)}


def adapter_sizes(cfg: RunConfig, model: Transformer) -> list[int]:
    """Return the number of parameters of every A [R, K] and B [rows, R]."""
    rank = cfg.train.lora_rank
    return [
        rank * features
        for _, linear in model.linears()
        for rows in adapted(cfg, linear).values()
        for features in (linear.in_features, rows)
    ]


def adapter_copies(cfg: RunConfig, model: Transformer, item: int) -> int:
    """Return the bytes of the copies that products read in place of A and B: [L, K] and the
    block-diagonal [N, L] (`model.adapter`)."""
    rank, total = cfg.train.lora_rank, 0
    for _, linear in model.linears():
        columns = rank * len(adapted(cfg, linear))
        total += columns * (linear.in_features + sum(linear.parts.values()))
    return item * total


def learner(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of the learner's weights, with `codes` and an adapter's copies."""
    item, format = compute.dtype.itemsize, compute.format(cfg.rollout.weights)
    if cfg.train.lora:
        adapter = MASTER * sum(adapter_sizes(cfg, model)) + adapter_copies(cfg, model, item)
        dense = other_size(model) * item + linear_bytes(model, format) + adapter
        dense += turned_codes(cfg, compute, model)
    else:
        dense = (linear_size(model) + other_size(model)) * item
    return dense + codes(cfg, compute, model)


def turned_codes(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of the codes with which a frozen int8 base multiplies gradients
    (`model.frozen`)."""
    if compute.dtype != torch.float32 or not limbs.supports_device(compute.device):
        return 0
    format = get_format(compute.format(cfg.rollout.weights))
    sizes = (
        _num_weights(linear)
        for name, linear in model.linears()
        if isinstance(format.of(name), Int8)
    )
    return sum(size for size in sizes if size >= limbs.LEAST)


def codes(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of an aligned learner's codes, which may be the base, and of the transposed
    codes for gradients."""
    forward_format, size = cfg.forward_weights, 0
    if forward_format is not None and not (
        cfg.train.lora and forward_format == cfg.rollout.weights
    ):
        size = linear_bytes(model, compute.format(forward_format))
    if cfg.train.backward == "fp8":
        size += linear_size(model) + MASTER * sum(
            linear.in_features for _, linear in model.linears()
        )
    return size


def optimizer(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of moments and of float32 masters."""
    kind = cfg.train.optimizer
    if cfg.train.lora:
        return sum(_moment_bytes(kind, size, kind == "muon") for size in adapter_sizes(cfg, model))
    hidden = hidden_matrices(model) if kind == "muon" else {}
    learning = model.trainable_parameters()
    return _master_bytes(compute) * sum(p.numel() for p in learning.values()) + sum(
        _moment_bytes(kind, p.numel(), name in hidden) for name, p in learning.items()
    )


def learning_size(cfg: RunConfig, model: Transformer) -> int:
    if cfg.train.lora:
        return sum(adapter_sizes(cfg, model))
    return sum(p.numel() for p in model.trainable_parameters().values())


def largest_learning(cfg: RunConfig, model: Transformer) -> int:
    if cfg.train.lora:
        return max(adapter_sizes(cfg, model), default=0)
    return max(p.numel() for p in model.parameters())


def gradient(cfg: RunConfig, compute: Compute, micro_batches: int) -> tuple[int, int]:
    """Return the bytes of a parameter's gradient before and after the last backward pass
    (`trainer.optim`): on CUDA a first gradient keeps its dtype, a second one makes both float32."""
    keeps_dtype = (
        not cfg.train.lora and compute.dtype.itemsize < MASTER and compute.device.type == "cuda"
    )
    if not keeps_dtype:
        return (0 if micro_batches == 1 else MASTER), MASTER
    item = compute.dtype.itemsize
    return ((0, item), (item, MASTER), (MASTER, MASTER))[min(micro_batches, 3) - 1]


def engine(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of the engine's own weights, under LoRA of its adapters."""
    format = get_format(compute.format(cfg.rollout.weights))
    item = (format.dtype or compute.dtype).itemsize
    num_noisy = sum(norm.weight.numel() for _, norm in noisy_norms(model)) if cfg.noise else 0
    if cfg.train.lora:
        adapter = MASTER * sum(adapter_sizes(cfg, model)) + adapter_copies(cfg, model, item)
        return adapter + MASTER * num_noisy
    weights = other_size(model) * item + linear_bytes(model, format.name)
    return weights + (MASTER - item) * num_noisy


def large_batch(cfg: RunConfig, model: Transformer) -> int:
    second_format = cfg.rollout.large_batch_weights
    return 0 if second_format is None else linear_bytes(model, second_format)


def dense_copies(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Return the bytes of the engine's copies beside the codes: on CUDA for `keep_dense`, on a CPU
    for its products."""
    format = get_format(compute.format(cfg.rollout.weights))
    item = (format.dtype or compute.dtype).itemsize
    layers = ((format.of(name), linear) for name, linear in model.linears())
    return sum(
        _dense_copy_bytes(cfg, compute, model, layer_format, linear, item)
        for layer_format, linear in layers
    )


def _dense_copy_bytes(
    cfg: RunConfig, compute: Compute, model: Transformer, form: Format, linear: Linear, item: int
) -> int:
    if compute.device.type == "cuda":
        is_kept = cfg.rollout.keep_dense and form.bits < 8 and not isinstance(linear, StackedLinear)
        return item * _num_weights(linear) if is_kept else 0
    if form.bits < 8:
        matrix = _product_shape(linear, model)
        has_kernel = w4_avx2.supports_matrix(form.kernel, matrix, compute.device)
        return 0 if has_kernel else item * _num_weights(linear)
    if form.dense:
        return item * _num_weights(linear) if _num_weights(linear) >= PACK_FROM else 0
    if isinstance(form, Int8) and w8a8_onednn.supports_device(compute.device):
        return _num_weights(linear)
    return MASTER * _num_weights(linear)


def watch(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    if not _is_watched(cfg):
        return 0
    if cfg.train.lora:
        return MASTER * sum(adapter_sizes(cfg, model))
    format = get_format(compute.format(cfg.rollout.weights))
    codes = sum(
        max(t.nbytes for t in format.of(name).empty((rows, columns), META).tensors.values())
        for name, rows, columns in (
            (name, *linear.weight.shape) for name, linear in model.linears()
        )
    )
    return linear_size(model) * compute.dtype.itemsize + codes


def watching(cfg: RunConfig, model: Transformer) -> int:
    """Return the temporary bytes of measuring `weights/*`: float32 matrices of one layer and of the
    one before."""
    if not _is_watched(cfg):
        return 0
    if not cfg.train.lora:
        return 3 * MASTER * largest(model)
    peak = previous_size = 0
    for _, linear in model.linears():
        size = _num_weights(linear)
        rows = max(adapted(cfg, linear).values(), default=0)
        moments = (
            2 * previous_size + size,
            previous_size + 2 * size,
            2 * size + 3 * rows * linear.in_features,
        )
        peak, previous_size = max(peak, *moments), size
    return MASTER * peak


def frozen(compute: Compute, model: Transformer) -> int:
    return compute.dtype.itemsize * sum(p.numel() for p in model.parameters())


def critic(compute: Compute, model: Transformer) -> int:
    """Return the bytes of PPO's critic and its optimiser, without gradients."""
    head_size = 0 if model.lm_head is None else model.lm_head.numel()
    num_learning = sum(p.numel() for p in model.parameters()) - head_size
    return num_learning * (compute.dtype.itemsize + _master_bytes(compute) + 2 * MASTER)


def _is_watched(cfg: RunConfig) -> bool:
    """Return whether `weights/*` is measured: a remote engine shows only adapters."""
    return cfg.train.weight_metrics and (cfg.train.lora or cfg.rollout.engine == "native")


def _product_shape(linear: Linear, model: Transformer) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    return rows // model.spec.mixture.num_experts if isinstance(
        linear, StackedLinear
    ) else rows, columns


def _num_weights(linear: Linear) -> int:
    return prod(linear.weight.shape)


def _master_bytes(compute: Compute) -> int:
    return 0 if compute.dtype == torch.float32 else MASTER


def _moment_bytes(kind: str, size: int, hidden: bool) -> int:
    if kind == "adamw8bit":
        moments = adamw8bit.moments(torch.empty(size, device="meta")).values()
        return sum(prod(shape) * dtype.itemsize for shape, dtype in moments)
    return MASTER * size * (1 if kind == "muon" and hidden else 2)
