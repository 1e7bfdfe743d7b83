"""Publication of master weights to the engine: master -> noise -> quantize -> the engine's buffers,
in place.

`rollout_copy` makes the engine's model once; `publish` refills it after each step without moving a
storage. Under LoRA the frozen base is shared when it is already quantized: the two models hold the
same QTensors, norms and embeddings, and only the adapter is published. The codes of an aligned
learner (`weights.aligned`) are copied. `digest` verifies what the engine holds. Noise
(`weights.noise`) applies only to the engine's norms.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor, nn

from lowroll.kernels import checksum
from lowroll.model import hf
from lowroll.model.adapter import Adapter
from lowroll.model.layers import ENGINE
from lowroll.model.linear import Linear
from lowroll.model.transformer import Transformer
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format, stored_format
from lowroll.quant.table import STORED
from lowroll.weights.aligned import quantized
from lowroll.weights.noise import Noise, draw, noisy_norms

log = logging.getLogger(__name__)


def quantize_base(model: Transformer, format: str) -> Transformer:
    """Replace every linear weight by its QTensor, for good: the frozen base that learner and engine
    share (LoRA).

    Weights that are already in the format stay.
    """
    _note_conversion(model, format)
    for name, linear in model.linears():
        linear.set_weight(quantized(name, linear, format))
    return model


@torch.no_grad()
def dequantize_base(model: Transformer) -> Transformer:
    """Replace the QTensors of a low-bit model by dequantized masters that can learn."""
    for _, linear in model.linears():
        if isinstance(linear.weight, QTensor):
            linear.set_weight(nn.Parameter(linear.weight.dequantize(model.dtype)))
    return model


def rollout_load(
    folder: Path, format: str, device: torch.device | str, dtype: torch.dtype, noisy: bool = False
) -> Transformer:
    """Return the engine's model loaded from a folder, equal to `rollout_copy` of the loaded model,
    in the memory of one model. It shares no weights. ValueError as `hf.load`."""
    return rollout_copy(hf.load(folder, device, dtype, format), format, dtype, noisy, owned=True)


def rollout_copy(
    master: Transformer, format: str, dtype: torch.dtype, noisy: bool = False, owned: bool = False
) -> Transformer:
    """Return the engine's model: linear weights in `format`, everything else in `dtype`, ready for
    `publish`.

    Weights that the master holds in that format are shared, and with them its frozen norms and
    embeddings when `dtype` is the master's. Adapters and trainable weights are copied. noisy: the
    norms that take noise are the engine's own and in float32; without noise the model computes the
    same bits. owned: the master is consumed, and its shared tensors belong to the new model.
    """
    _note_conversion(master, format)
    shares_base = master.dtype == dtype and (owned or master.weight_format == format)
    rollout = Transformer(master.spec, "meta", dtype, ENGINE)
    mine = dict(master.named_parameters())
    shared: set[str] = set()
    disturbed = {f"{name}.weight" for name, _ in noisy_norms(rollout)} if noisy else set()
    for name, _ in list(rollout.named_parameters()):
        if not name.endswith(_LINEAR_WEIGHTS):
            frozen = owned or not mine[name].requires_grad
            share = shares_base and frozen and name not in disturbed
            value = mine[name].detach()
            value = value if share else value.to(dtype, copy=True)
            set_parameter(rollout, name, value.float() if name in disturbed else value)
            shared |= {name} if share else set()
    for (name, ours), (_, theirs) in zip(rollout.linears(), master.linears(), strict=True):
        ours.set_weight(_engines(name, theirs, format))
        if ours.weight is theirs.weight:
            shared.add(f"{name}.weight")
        if owned:
            theirs.set_weight(ours.weight)  # frees the old one layer by layer
        if theirs.adapter is not None:
            ours.adapter = _copy_adapter(theirs.adapter)
    rollout.freqs = master.freqs
    rollout.shared = frozenset() if owned else frozenset(shared)
    rollout.head = over(rollout.lm_head_weight)
    return rollout.requires_grad_(False).eval()


def beside(master: Transformer, rollout: Transformer, format: str) -> Transformer:
    """Return a second engine model whose linear weights are in another format and whose other
    tensors are those of `rollout`."""
    other = Transformer(rollout.spec, "meta", rollout.dtype, ENGINE)
    for name, p in rollout.named_parameters():
        if ".adapter." not in name:
            set_parameter(other, name, p.detach())
    for (name, ours), (_, same), (_, theirs) in zip(
        other.linears(), rollout.linears(), master.linears(), strict=True
    ):
        ours.set_weight(_engines(name, theirs, format))
        ours.adapter = same.adapter
    other.freqs = rollout.freqs
    other.shared = rollout.shared
    other.head = rollout.head
    return other.requires_grad_(False).eval()


@torch.no_grad()
def publish(
    master: Transformer,
    rollout: Transformer,
    noise: Noise | None = None,
    large_batch_model: Transformer | None = None,
) -> None:
    """Refill the engine's model, and the model `beside` it, from the master in place. Shared
    tensors and what was derived from them stay.

    The result is a function of the master's weights and `noise`; without noise (or at sigma 0) the
    norms are clean. ValueError, before anything is written, names a mismatch: a master of other
    sizes, another adapter, another base than the shared one, a linear weight that is not finite, or
    noise for an engine that was not made for it.
    """
    linears = dict(master.linears())
    weights = {
        name: linear.weight
        for name, linear in linears.items()
        if isinstance(linear.weight, nn.Parameter)
    }
    # reduced on the device now, compared on the host below
    amax = dict(zip(weights, checksum.amax(list(weights.values())), strict=True))
    mine = {name: p for name, p in master.named_parameters() if not name.endswith(_LINEAR_WEIGHTS)}
    targets = dict(rollout.named_parameters())
    _check_fits(master, rollout, mine, targets)
    for name, finite in zip(amax, checksum.finite(list(amax.values())), strict=True):
        if not finite:
            raise ValueError(f"publish: {name}.weight holds a non-finite value")
    drawn = drawn_noise(noise, rollout)
    models = [rollout]
    if large_batch_model is not None:
        models.append(large_batch_model)
    for model in models:
        for name, ours in model.linears():
            assert isinstance(ours.weight, QTensor)
            if f"{name}.weight" not in rollout.shared and ours.weight is not linears[name].weight:
                _refill(name, ours.weight, linears[name], amax.get(name))
    for name, target in targets.items():
        if name not in rollout.shared:
            value: Tensor = mine[name]
            if ".adapter." not in name:
                value = value.to(rollout.dtype)
            if name in drawn:
                value = value.float() + drawn[name]
            target.copy_(value)
    if rollout.head is not None:
        rollout.head.renew()
    for _, ours in rollout.linears():
        if ours.adapter is not None:
            ours.adapter.renew()


def can_take_noise(rollout: Transformer) -> bool:
    """Return whether the model's noisy norms are its own and in float32."""
    return not _norms_without_noise(rollout)


def _norms_without_noise(rollout: Transformer) -> list[str]:
    norms = {f"{name}.weight": norm for name, norm in noisy_norms(rollout)}
    return [
        name
        for name, norm in norms.items()
        if norm.weight.dtype != torch.float32 or name in rollout.shared
    ]


def drawn_noise(noise: Noise | None, rollout: Transformer) -> dict[str, Tensor]:
    """Return the noise by parameter name, on the device. ValueError for an engine that was not made
    for noise."""
    drawn = {f"{name}.weight": z for name, z in draw(rollout, noise).items()}
    if not drawn:
        return {}
    odd = _norms_without_noise(rollout)
    if odd:
        raise ValueError(f"publish: {odd[0]} cannot take noise; make the engine with noisy=True")
    on_device = torch.cat(list(drawn.values())).to(rollout.device)  # in one transfer
    return dict(zip(drawn, on_device.split([z.numel() for z in drawn.values()]), strict=True))


def _check_fits(
    master: Transformer,
    rollout: Transformer,
    mine: dict[str, nn.Parameter],
    targets: dict[str, nn.Parameter],
) -> None:
    """Raise ValueError as `publish`, except for values that are not finite."""
    if master.spec != rollout.spec:
        raise ValueError("publish: the master's sizes are not those of the engine's model")
    odd = sorted(
        {
            name
            for name in mine.keys() | targets.keys()
            if name not in mine or name not in targets or mine[name].shape != targets[name].shape
        }
    )
    if odd:
        raise ValueError(
            f"publish: the master's adapter is not the one that the engine was made with: {odd[0]}"
        )
    for (name, ours), (_, theirs) in zip(rollout.linears(), master.linears(), strict=True):
        if ours.adapter and theirs.adapter and ours.adapter.scaling != theirs.adapter.scaling:
            raise ValueError(
                f"publish: {name}: the adapter's scaling is {theirs.adapter.scaling}, and the "
                f"engine was made with {ours.adapter.scaling}"
            )
        if f"{name}.weight" in rollout.shared and theirs.weight is not ours.weight:
            raise ValueError(
                f"publish: {name}.weight belongs to another model, whose base the engine shares"
            )
    for name in rollout.shared & mine.keys():
        if targets[name].data_ptr() != mine[name].data_ptr():
            raise ValueError(
                f"publish: {name} belongs to another model, whose base the engine shares"
            )


def digest(model: Transformer) -> str:
    """Return 32 hex digits over every weight's bytes, name, shape and dtype, computed on the
    weights' device.

    An adapter's scaling counts as a weight, because it changes the policy. An engine's unused
    adapter capacity does not count. Of an aligned learner the codes count instead of the masters,
    because its forward runs on the codes.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    scalings: dict[str, float] = {}
    for name, linear in model.linears():
        weight = linear.weight if linear.aligned is None else linear.aligned
        if isinstance(weight, QTensor):
            tensors.pop(f"{name}.weight", None)
            tensors.update({f"{name}.weight.{part}": t for part, t in weight.tensors.items()})
        if linear.adapter is not None:
            for part in linear.adapter.a:
                for half in "ab":
                    tensors.pop(f"{name}.adapter.{half}.{part}")
            for part, a, b in linear.adapter.holding():
                tensors |= {f"{name}.adapter.a.{part}": a, f"{name}.adapter.b.{part}": b}
                scalings[f"{name}.adapter.scaling"] = linear.adapter.scaling
    return fingerprint(tensors, scalings)


def fingerprint(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> str:
    """Return 32 hex digits over tensors (names, shapes, dtypes, bytes), in any order and on any
    devices, and over numbers by name."""
    sums = checksum.checksums(list(tensors.values()))
    parts = {
        name: f"{tuple(t.shape)} {t.dtype} {value}"
        for (name, t), value in zip(tensors.items(), sums, strict=True)
    }
    parts |= {name: f"() {torch.float64} {_checksum(value)}" for name, value in numbers.items()}
    return blake2b(
        "\n".join(f"{name} {parts[name]}" for name in sorted(parts)).encode(), digest_size=16
    ).hexdigest()


_LINEAR_WEIGHTS = tuple(f"{name}.weight" for name in ("qkv", "o", "gate_up", "down"))


def _engines(name: str, linear: Linear, format: str) -> QTensor:
    """Return `quantized` for an engine: codes that the learner will refresh are copied, a frozen
    base is shared."""
    weight = quantized(name, linear, format)
    if weight is linear.aligned and weight is not linear.weight:
        return weight.clone()
    if (
        isinstance(linear.weight, QTensor)
        and linear.aligned is None
        and weight is not linear.weight
    ):
        weight.note_source(linear.weight)
    return weight


def _refill(name: str, target: QTensor, linear: Linear, amax_1: Tensor | None) -> None:
    """Write `quantized` into the storages of `target`. A dense weight is known to be finite; codes
    made from the same codes of another format stay."""
    if linear.aligned is not None and linear.aligned.format == target.format:
        target.copy_(linear.aligned)
    elif isinstance(linear.weight, nn.Parameter):
        target.quantize_(linear.weight, amax_1)
    elif not target.is_made_of(linear.weight):
        target.copy_(quantized(name, linear, target.format))
        target.note_source(linear.weight)


def _note_conversion(model: Transformer, format: str) -> None:
    before = model.weight_format
    if before is None or get_format(before).dense:
        return
    forms = get_format(before), get_format(format)
    if any(
        stored_format(forms[0].of(name).name) != stored_format(forms[1].of(name).name)
        for name, _ in model.linears()
        if not forms[0].of(name).dense
    ):
        log.warning(
            "the model's weights are %s: %s is made from their dequantized values; with "
            "rollout.weights: %s they would be used as they are",
            before,
            format,
            STORED,
        )


def set_parameter(model: Transformer, name: str, value: Tensor) -> None:
    """Replace the parameter `name` by a frozen one."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _copy_adapter(adapter: Adapter) -> Adapter:
    copy = Adapter(adapter.rank, adapter.alpha)
    for part in adapter.a:
        copy.a[part] = nn.Parameter(adapter.a[part].detach().clone())
        copy.b[part] = nn.Parameter(adapter.b[part].detach().clone())
    return copy


@cache
def _checksum(value: float) -> int:
    return checksum.checksums([torch.tensor(value, dtype=torch.float64)])[0]
