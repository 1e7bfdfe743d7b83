"""Low-rank adapters (Hu et al. 2021): y += (alpha / r) B A x, trained in float32 on a frozen base.

On disk an adapter is what PEFT writes and reads: `adapter_model.safetensors` with
`base_model.model.<module>.lora_A.weight` [r, in] and `lora_B.weight` [out, r], and `adapter_config.json`. Inside, the
adapters of a fused matrix (q, k, v; gate, up) stay separate, one pair a part.
"""
from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lowroll.model.linear import Adapter
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_HOMES = {"qkv": "self_attn", "o": "self_attn", "gate_up": "mlp", "down": "mlp"}


def attach(model: Transformer, rank: int, alpha: float, targets: Sequence[str] = TARGETS, seed: int = 0) -> Transformer:
    """Freeze the model and give every target part a fresh adapter: A uniform (Kaiming, a = sqrt 5), B zero.

    A fresh adapter is exactly the identity. ValueError names an unknown target or a rank below 1.
    """
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown or not targets:
        raise ValueError(f"lora_target_modules: unknown {unknown}; known: {', '.join(TARGETS)}")
    if rank < 1:
        raise ValueError(f"lora_rank: expected at least 1, got {rank}")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, linear in model.linears():
        linear.adapter = None
        wanted = [part for part in linear.parts if part in targets]
        if not wanted:
            continue
        linear.adapter = Adapter(rank, alpha)
        bound = 1 / math.sqrt(linear.in_features)
        for part in wanted:
            a_RK = torch.empty(rank, linear.in_features).uniform_(-bound, bound, generator=generator)
            linear.adapter.a[part] = nn.Parameter(a_RK.to(model.device))
            linear.adapter.b[part] = nn.Parameter(torch.zeros(linear.parts[part], rank, device=model.device))
    return model


@contextmanager
def disabled(model: Transformer) -> Iterator[Transformer]:
    """The base policy: adapters switched off inside the block."""
    adapters = [linear.adapter for _, linear in model.linears() if linear.adapter is not None]
    before = [adapter.enabled for adapter in adapters]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield model
    finally:
        for adapter, enabled in zip(adapters, before, strict=True):
            adapter.enabled = enabled


def merge(model: Transformer) -> Transformer:
    """Add the adapters into dense weights and drop them. ValueError when the base is quantised."""
    for name, linear in model.linears():
        if linear.adapter is None:
            continue
        if isinstance(linear.weight, QTensor):
            raise ValueError(f"{name}: the base is {linear.weight.format}; merge into a dense model instead")
        with torch.no_grad():
            for part in linear.adapter.a:
                update = linear.adapter.b[part] @ linear.adapter.a[part] * linear.adapter.scaling
                linear.weight[linear.rows(part)] += update.to(linear.weight.dtype)
        linear.adapter = None
    return model


def state(model: Transformer) -> dict[str, Tensor]:
    """The adapter's tensors under PEFT's names."""
    return {name: p.detach() for name, p in _named(model)}


def _named(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    for name, linear in model.linears():
        if linear.adapter is None:
            continue
        _, layer, kind = name.split(".")
        for part in linear.adapter.a:
            stem = f"base_model.model.model.layers.{layer}.{_HOMES[kind]}.{part}"
            yield f"{stem}.lora_A.weight", linear.adapter.a[part]
            yield f"{stem}.lora_B.weight", linear.adapter.b[part]


def save(model: Transformer, folder: str | Path, base: str = "") -> Path:
    """Publish the adapter as a PEFT folder (atomically). ValueError when there is none."""
    from lowroll.checkpoint.publish import publish_folder

    adapters = [linear.adapter for _, linear in model.linears() if linear.adapter is not None]
    if not adapters:
        raise ValueError("the model has no adapter to save")
    parts = {part for _, linear in model.linears() if linear.adapter for part in linear.adapter.a}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": adapters[0].rank, "lora_alpha": adapters[0].alpha,
              "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
              "target_modules": [part for part in TARGETS if part in parts], "base_model_name_or_path": base}

    def write(target: Path) -> None:
        (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(state(model), target / "adapter_model.safetensors", metadata={"format": "pt"})

    return publish_folder(Path(folder), write, {"kind": "adapter"})


def load(model: Transformer, folder: str | Path) -> Transformer:
    """Attach the adapter of a PEFT folder. ValueError names what does not fit: keys, tensors, features we lack."""
    folder = Path(folder)
    config_path, weights_path = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for path in (config_path, weights_path):
        if not path.is_file():
            raise ValueError(f"{path}: no such file; an adapter folder holds adapter_config.json and "
                             "adapter_model.safetensors")
    config, tensors = json.loads(config_path.read_text()), load_file(weights_path)
    for key, neutral in (("use_dora", False), ("use_rslora", False), ("bias", "none"), ("modules_to_save", None),
                         ("rank_pattern", {}), ("alpha_pattern", {}), ("fan_in_fan_out", False)):
        if config.get(key, neutral) not in (neutral, None):
            raise ValueError(f"{config_path}: {key}={config[key]!r} is not supported")
    targets = config["target_modules"]
    shape_like = Transformer(model.spec, "meta")
    attach_names = dict(_named(attach(shape_like, int(config["r"]), float(config["lora_alpha"]), targets)))
    wrong = sorted(set(attach_names) ^ set(tensors))
    if wrong:
        raise ValueError(f"{weights_path}: missing or unexpected tensors: {', '.join(wrong[:5])}")
    for name, p in attach_names.items():
        if tensors[name].shape != p.shape:
            raise ValueError(f"{weights_path}: {name} has shape {list(tensors[name].shape)} instead of {list(p.shape)}")
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"{weights_path}: {name} holds a non-finite value")
    attach(model, int(config["r"]), float(config["lora_alpha"]), targets)
    with torch.no_grad():
        for name, p in _named(model):
            p.copy_(tensors[name])
    return model
