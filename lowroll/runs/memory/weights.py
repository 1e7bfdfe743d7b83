"""Exact bytes of a run's permanent tensors: weights, adapters, masters, moments, and the engine's
copies.

Legend: N out features, K in features, R adapter rank, L = R times the parts that have an adapter.
"""

from __future__ import annotations

from math import prod

import torch

from lowroll.config import RunConfig
from lowroll.kernels.matmul import float32_by_int8, ordered, w4_avx2, w8a8_onednn, w8a8_vnni
from lowroll.model import lora
from lowroll.model.experts import StackedLinear
from lowroll.model.linear import Linear
from lowroll.model.transformer import Transformer
from lowroll.quant.blocks import BlockFormat
from lowroll.quant.dense import PACK_FROM
from lowroll.quant.formats import Format, get_format
from lowroll.quant.int8 import Int8
from lowroll.runs.assembly import exactness
from lowroll.runs.assembly.compute import Compute
from lowroll.trainer import adamw8bit
from lowroll.trainer.muon import hidden_matrices
from lowroll.weights.exploration_noise import noisy_norms

MASTER = 4  # bytes of a float32
META = torch.device("meta")


def linear_size(model: Transformer) -> int:
    return sum(_num_weights(linear) for _, linear in model.linears())


def other_size(model: Transformer) -> int:
    return sum(p.numel() for p in model.parameters()) - linear_size(model)


def linear_bytes(model: Transformer, format: str) -> int:
    """Count the linear layers in a format. ValueError for an unsupported shape."""
    total = 0
    for name, linear in model.linears():
        rows, columns = linear.weight.shape
        try:
            total += get_format(format).of(name).empty((rows, columns), META).nbytes
        except ValueError as error:
            raise ValueError(f"rollout.weights: {name}: {error}") from None
    return total


def largest(model: Transformer) -> int:
    """Return the number of weights of the largest linear layer, with all experts of a stack."""
    return max(_num_weights(linear) for _, linear in model.linears())


def largest_unit(model: Transformer) -> int:
    """Return the most weights that sharded ranks gather at a time: a block's, or those outside
    blocks."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return max(*blocks, sum(p.numel() for p in model.parameters()) - sum(blocks))


def adapted(cfg: RunConfig, linear: Linear) -> dict[str, int]:
    """Return a layer's parts with an adapter, and their rows."""
    targets = cfg.train.lora_target_modules if cfg.train.lora else ()
    return {part: linear.parts[part] for part in lora.adapted_parts(linear.parts, targets)}


def adapter_sizes(cfg: RunConfig, model: Transformer) -> list[int]:
    """Return the sizes of every A [R, K] and B [rows, R]."""
    rank = cfg.train.lora_rank
    return [
        rank * features
        for _, linear in model.linears()
        for rows in adapted(cfg, linear).values()
        for features in (linear.in_features, rows)
    ]


def adapter_copies(cfg: RunConfig, model: Transformer, item: int) -> int:
    """Count the copies that products read instead of A and B: [L, K] and the block-diagonal [N, L]
    (`model.adapter`)."""
    columns = sum(
        len(adapted(cfg, linear)) * (linear.in_features + sum(linear.parts.values()))
        for _, linear in model.linears()
    )
    return item * cfg.train.lora_rank * columns


def learner(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count the learner's weights, with `codes` and an adapter's copies."""
    item, format = compute.dtype.itemsize, compute.format(cfg.rollout.weights)
    if cfg.train.lora:
        adapter = MASTER * sum(adapter_sizes(cfg, model)) + adapter_copies(cfg, model, item)
        base = other_size(model) * item + linear_bytes(model, format)
        weights = base + adapter + turned_codes(cfg, compute, model)
    else:
        weights = frozen(compute, model)
    return weights + codes(cfg, compute, model)


def turned_codes(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count the codes by which a frozen int8 base multiplies gradients (`model.frozen_product`)."""
    if compute.dtype != torch.float32 or not float32_by_int8.supports_device(compute.device):
        return 0
    format = get_format(compute.format(cfg.rollout.weights))
    return sum(
        _num_weights(linear)
        for name, linear in model.linears()
        if isinstance(format.of(name), Int8) and _num_weights(linear) >= float32_by_int8.LEAST
    )


def codes(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count an aligned learner's codes beside the adapter's base, and transposed codes for
    gradients."""
    forward_format = cfg.forward_weights
    has_base_codes = cfg.train.lora and forward_format == cfg.rollout.weights
    code_bytes = 0
    if forward_format is not None and not has_base_codes:
        code_bytes = linear_bytes(model, compute.format(forward_format))
    if cfg.train.backward == "fp8":  # a byte for each weight, and a scale for each input
        num_scales = sum(linear.in_features for _, linear in model.linears())
        code_bytes += linear_size(model) + MASTER * num_scales
    return code_bytes


def optimizer(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count moments and float32 masters. An adapter is its own master."""
    kind = cfg.train.optimizer
    if cfg.train.lora:
        is_hidden = kind == "muon"
        return sum(_moment_bytes(kind, size, is_hidden) for size in adapter_sizes(cfg, model))
    hidden = hidden_matrices(model) if kind == "muon" else {}
    return sum(
        _master_bytes(compute) * p.numel() + _moment_bytes(kind, p.numel(), name in hidden)
        for name, p in model.trainable_parameters().items()
    )


def learning_sizes(cfg: RunConfig, model: Transformer) -> list[int]:
    """Return the sizes of the learning parameters."""
    if cfg.train.lora:
        return adapter_sizes(cfg, model)
    return [p.numel() for p in model.trainable_parameters().values()]


def gradient(cfg: RunConfig, compute: Compute, micro_batches: int) -> tuple[int, int]:
    """Return the bytes of a parameter's gradient before and after the last backward pass
    (`trainer.optim`). On CUDA a first gradient keeps its dtype; a second makes both float32."""
    item = compute.dtype.itemsize
    is_half = not cfg.train.lora and item < MASTER
    first_item = item if is_half and compute.device.type == "cuda" else MASTER
    if micro_batches == 1:
        return 0, first_item
    if micro_batches == 2:
        return first_item, MASTER
    return MASTER, MASTER


def engine(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count the engine's own weights, or its adapters under LoRA."""
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
    """Count the engine's copies beside the codes: for `keep_dense` on CUDA, for products on a
    CPU."""
    asked = compute.format(cfg.rollout.weights)
    format = get_format(asked)
    item = (format.dtype or compute.dtype).itemsize
    is_exact = exactness.of_engine(cfg, compute, model.spec, asked) and not cfg.train.lora
    return sum(
        _dense_copy_bytes(cfg, compute, model, format.of(name), linear, item, is_exact)
        for name, linear in model.linears()
    )


def _dense_copy_bytes(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    form: Format,
    linear: Linear,
    item: int,
    is_exact: bool,
) -> int:
    size = _num_weights(linear)
    dense_bytes = item * size
    if compute.device.type == "cuda":
        is_kept = cfg.rollout.keep_dense and form.bits < 8 and not isinstance(linear, StackedLinear)
        return dense_bytes if is_kept else 0
    if isinstance(form, BlockFormat) and is_exact and linear.weight.shape[1] % ordered.GROUP == 0:
        return int(size * form.compact_bits / 8)
    if form.bits < 8:
        matrix = _product_shape(linear, model)
        return 0 if w4_avx2.supports_matrix(form.kernel, matrix, compute.device) else dense_bytes
    if form.dense:  # large matrices are packed
        return dense_bytes if size >= PACK_FROM else 0
    if isinstance(form, Int8) and w8a8_onednn.supports_device(compute.device):
        is_packed_twice = w8a8_vnni.supports_device(compute.device) and w8a8_onednn.has_amx()
        return 2 * size if is_packed_twice else size
    return MASTER * size


def compact_head(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count the most bytes of an exact CPU engine's bfloat16 head (`Transformer.logits`). Its
    values decide whether there is one."""
    format = compute.format(cfg.rollout.weights)
    is_exact = exactness.of_engine(cfg, compute, model.spec, format)
    if not is_exact or compute.device.type != "cpu" or model.spec.hidden_size % ordered.GROUP:
        return 0
    return torch.bfloat16.itemsize * model.lm_head_weight.numel()


def watch(cfg: RunConfig, compute: Compute, model: Transformer) -> int:
    """Count the copies that `weights/*` compares with."""
    if not _is_watched(cfg):
        return 0
    if cfg.train.lora:
        return MASTER * sum(adapter_sizes(cfg, model))
    format = get_format(compute.format(cfg.rollout.weights))
    code_bytes = 0
    for name, linear in model.linears():
        rows, columns = linear.weight.shape
        codes = format.of(name).empty((rows, columns), META)
        code_bytes += max(tensor.nbytes for tensor in codes.tensors.values())  # not the scales
    return linear_size(model) * compute.dtype.itemsize + code_bytes


def watching(cfg: RunConfig, model: Transformer) -> int:
    """Count the temporary float32 matrices of `weights/*`: of this layer and the previous one
    (`weights.update_metrics`)."""
    if not _is_watched(cfg):
        return 0
    if not cfg.train.lora:
        return 3 * MASTER * largest(model)
    peak = previous_size = 0  # numbers
    for _, linear in model.linears():
        # The previous layer's matrices still have a name while these are made.
        size = _num_weights(linear)
        making_base = 2 * previous_size + size
        making_copy = previous_size + 2 * size
        largest_part = max(adapted(cfg, linear).values(), default=0) * linear.in_features
        multiplying = 2 * size + 3 * largest_part
        peak = max(peak, making_base, making_copy, multiplying)
        previous_size = size
    return MASTER * peak


def frozen(compute: Compute, model: Transformer) -> int:
    return compute.dtype.itemsize * sum(p.numel() for p in model.parameters())


def critic(compute: Compute, model: Transformer) -> int:
    """Count PPO's critic and its optimiser, without gradients."""
    head_size = 0 if model.lm_head is None else model.lm_head.numel()
    num_learning = sum(p.numel() for p in model.parameters()) - head_size
    return num_learning * (compute.dtype.itemsize + _master_bytes(compute) + 2 * MASTER)


def _is_watched(cfg: RunConfig) -> bool:
    return cfg.train.weight_metrics and (cfg.train.lora or cfg.rollout.engine == "native")


def _product_shape(linear: Linear, model: Transformer) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    if isinstance(linear, StackedLinear):
        rows //= model.spec.mixture.num_experts
    return rows, columns


def _num_weights(linear: Linear) -> int:
    return prod(linear.weight.shape)


def _master_bytes(compute: Compute) -> int:
    return 0 if compute.dtype == torch.float32 else MASTER


def _moment_bytes(kind: str, size: int, hidden: bool) -> int:
    if kind == "adamw8bit":
        moments = adamw8bit.moments(torch.empty(size, device="meta")).values()
        return sum(prod(shape) * dtype.itemsize for shape, dtype in moments)
    num_moments = 1 if kind == "muon" and hidden else 2
    return num_moments * MASTER * size
