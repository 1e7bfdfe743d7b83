"""What a run holds in memory, by arithmetic on the shapes of its model: what `--dry-run` prints
before anything is loaded.

Everything but the activations follows from the settings: weights, the optimiser's float32 masters
of what is not float32, gradients and moments (`trainer.optim`), the engine's own weights
(`weights.publish`), what `weights/*` is measured against (`weights.watch`), the frozen models
beside, the KV cache (`kv.capacity`), and what its policy remembers of each sample. Activations are
an estimate: what a layer keeps of one micro-batch for its backward pass, and the logits of a piece
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from lowroll.config import RunConfig
from lowroll.engine.native import free_memory, policy_bytes
from lowroll.kv.capacity import UNKNOWN_FREE, Workload, capacity
from lowroll.kv.storage import storage
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.build import caches
from lowroll.runs.build.compute import Compute

MASTER = 4  # bytes of a float32
MOMENTS = {"adamw": 8.0, "adamw8bit": 2 + 2 * 4 / 256, "muon": 4.0}  # bytes a parameter
LESS = {
    "learner's weights": "a smaller model takes less, and so does train.lora with rollout.weights: "
    "nvfp4",
    "its optimiser": "train.lora, train.optimizer: adamw8bit or muon take less",
    "KV cache": "a smaller rollout.cache_tokens takes less",
    "its policy's state": "a smaller rollout.max_batch takes less",
    "what weights/* compares with": "train.weight_metrics: false takes none of it",
}


@dataclass(frozen=True)
class Budget:
    """Bytes of what stays, by name; of the activations, estimated; and those that the device has
    free, if it says."""

    parts: dict[str, int]
    activations: int
    free: int | None
    device: str
    cache_tokens: int = 0

    @property
    def total(self) -> int:
        """Bytes of all that stays."""
        return sum(self.parts.values())

    def lines(self) -> list[str]:
        """For people."""
        free = "" if self.free is None else f" of {_shown(self.free)} that are free"
        cache = f" ({self.cache_tokens:,} tokens)" if self.cache_tokens else ""
        held = ", ".join(f"{name} {_shown(size)}" for name, size in self.parts.items() if size)
        return [
            f"memory on {self.device}: {_shown(self.total)}{free}, and about "
            f"{_shown(self.activations)} of activations while it learns",
            f"of that: {held}{cache}",
        ]

    def problem(self) -> str:
        """Why the run cannot fit; "" when it can."""
        if self.free is None or self.total <= self.free:
            return ""
        largest = max(self.parts, key=lambda name: self.parts[name])
        return (
            f"memory: the run holds {_shown(self.total)}, {_shown(self.parts[largest])} of it "
            f"{largest}, and {_shown(self.free)} are free on {self.device}; "
            f"{LESS.get(largest, 'a smaller model takes less')}"
        )


def plan(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    workloads: Sequence[Workload],
    beside: dict[str, Transformer],
) -> Budget:
    """The memory of a run of `lowroll grpo`. model: its shapes, on the meta device. beside: those
    of the frozen models and the critic, by name."""
    train = cfg.train
    free = free_memory(compute.device)
    format = compute.format(cfg.rollout.weights)
    own = cfg.rollout.engine == "native"
    parts = learner(cfg, compute, model)
    parts["rollouts' weights"] = _engine(cfg, compute, model, format) if own else 0
    if train.weight_metrics and train.lora:
        parts["what weights/* compares with"] = MASTER * adapter_size(cfg, model)
    elif train.weight_metrics and own:
        before = linear_size(model) * compute.dtype.itemsize
        parts["what weights/* compares with"] = before + linear_bytes(model, format)
    for name, other in beside.items():
        size = sum(p.numel() for p in other.parameters())
        parts[name] = size * compute.dtype.itemsize
        if name == "critic":
            parts[name] += _learning(size, compute, "adamw")
    tokens = 0
    if own:
        tokens = _cache(cfg, compute, model, workloads, parts, free)
    batches = [work.groups * work.n * (work.prompt + work.response) for work in workloads]
    longest = max(batches, default=1 << 62)
    working = activations(cfg, compute, model, longest)
    return Budget(parts, working, free, str(compute.device), tokens)


def _cache(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    workloads: Sequence[Workload],
    parts: dict[str, int],
    free: int | None,
) -> int:
    """Tokens of the KV cache; it and its policy's state join the parts."""
    kv = caches.policy(cfg)
    dtype = get_format(compute.format(cfg.rollout.weights)).dtype or compute.dtype
    each = storage(cfg.rollout.cache.kv_dtype).bytes_per_token(model.spec, dtype)
    left = UNKNOWN_FREE if free is None else free
    left -= parts["learner's weights"] + parts["rollouts' weights"]
    state = policy_bytes(kv, model.spec, cfg.rollout.max_batch, dtype, cfg.train.replay_kv)
    tokens = cfg.rollout.cache_tokens or capacity(
        workloads,
        page_size=cfg.rollout.page_size,
        max_batch=cfg.rollout.max_batch,
        context=model.spec.max_position,
        bytes_per_token=each,
        free=max(0, left - state),
        kv=kv,
    )
    parts["KV cache"] = tokens * each
    parts["its policy's state"] = state
    return tokens


def plan_sft(cfg: RunConfig, compute: Compute, model: Transformer, longest: int) -> Budget:
    """The memory of `lowroll sft`. longest: tokens of a whole batch."""
    return Budget(
        learner(cfg, compute, model),
        activations(cfg, compute, model, longest),
        free_memory(compute.device),
        str(compute.device),
    )


def learner(cfg: RunConfig, compute: Compute, model: Transformer) -> dict[str, int]:
    """What learns, and what its optimiser holds."""
    train = cfg.train
    item = compute.dtype.itemsize
    if train.lora:
        adapter = adapter_size(cfg, model)
        weights = (
            other_size(model) * item
            + linear_bytes(model, compute.format(cfg.rollout.weights))
            + MASTER * adapter
        )
        return {
            "learner's weights": weights,
            "its optimiser": round(adapter * (MASTER + MOMENTS[train.optimizer])),
        }
    weights = (linear_size(model) + other_size(model)) * item
    if train.forward == "aligned":
        weights += linear_bytes(model, compute.format(cfg.rollout.weights))
    if train.optimizer != "muon":
        return {
            "learner's weights": weights,
            "its optimiser": _learning(
                linear_size(model) + other_size(model), compute, train.optimizer
            ),
        }
    return {
        "learner's weights": weights,
        "its optimiser": _learning(linear_size(model), compute, "muon")
        + _learning(other_size(model), compute, "adamw"),
    }


def activations(cfg: RunConfig, compute: Compute, model: Transformer, longest: int) -> int:
    """About what the backward pass of one micro-batch holds. longest: tokens of a whole batch."""
    spec = model.spec
    item = compute.dtype.itemsize
    tokens = min(cfg.train.tokens_per_microbatch, longest)
    share = float(cfg.train.activation_checkpointing)
    q = spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    wide = spec.experts_per_token * spec.moe_intermediate_size or spec.intermediate_size
    stream = 2 * spec.hidden_size
    inside = 2 * q + 2 * kv + 2 * wide
    if cfg.train.activation_checkpointing is True:
        layers = spec.num_layers * spec.hidden_size + stream + inside
    else:
        layers = spec.num_layers * (stream + inside - round(share * 2 * wide))
    logits = 2 * min(cfg.train.logprob_chunk, tokens) * spec.vocab_size * MASTER
    return tokens * layers * item + logits


def linear_size(model: Transformer) -> int:
    """Weights of the linear layers."""
    return sum(prod(linear.weight.shape) for _, linear in model.linears())


def other_size(model: Transformer) -> int:
    """All other weights: embeddings, norms, biases, routers, lm_head."""
    return sum(p.numel() for p in model.parameters()) - linear_size(model)


def linear_bytes(model: Transformer, format: str) -> int:
    """Bytes of the linear layers in a format, with scales. ValueError as the format says of a shape
    that it has not."""
    sizes: dict[tuple[int, ...], int] = {}
    for name, linear in model.linears():
        shape = tuple(linear.weight.shape)
        if shape not in sizes:
            try:
                sizes[shape] = (
                    get_format(format).empty((shape[0], shape[1]), torch.device("meta")).nbytes
                )
            except ValueError as error:
                raise ValueError(f"rollout.weights: {name}: {error}") from None
    return sum(sizes[tuple(linear.weight.shape)] for _, linear in model.linears())


def adapter_size(cfg: RunConfig, model: Transformer) -> int:
    """Parameters of the LoRA adapters."""
    return sum(
        cfg.train.lora_rank * (linear.in_features + rows)
        for _, linear in model.linears()
        for part, rows in linear.parts.items()
        if part in cfg.train.lora_target_modules
    )


def _learning(size: int, compute: Compute, optimizer: str) -> int:
    """Master copies, gradients and moments of so many weights."""
    masters = 0 if compute.dtype == torch.float32 else MASTER
    return round(size * (masters + MASTER + MOMENTS[optimizer]))


def _engine(cfg: RunConfig, compute: Compute, model: Transformer, format: str) -> int:
    """The engine's own weights: under LoRA those of the adapters alone, as it shares the base."""
    item = (get_format(format).dtype or compute.dtype).itemsize
    if cfg.train.lora:
        mine = MASTER * adapter_size(cfg, model)
    else:
        mine = other_size(model) * item + linear_bytes(model, format)
    if cfg.rollout.large_batch_weights is not None:
        mine += linear_bytes(model, cfg.rollout.large_batch_weights)
    # whether codes are dequantized for the product, beside themselves
    kept = compute.device.type == "cpu" or cfg.rollout.keep_dense
    if kept and get_format(format).bits < 8:
        mine += linear_size(model) * item
    return mine


def _shown(size: int) -> str:
    unit, scale = next(
        ((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6)) if size >= scale), ("kB", 1e3)
    )
    return f"{size / scale:,.0f} {unit}" if size >= 100 * scale else f"{size / scale:.3g} {unit}"
