"""Publication of master weights to the engine: master -> noise -> quantize -> the engine's buffers,
in place.

`rollout_copy` makes the engine's model once; `publish` refills it after each step without moving a
storage. Under LoRA a quantized base is shared, and only the adapter is published.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
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
from lowroll.model.names import dtype_of
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format, stored_format
from lowroll.quant.table import STORED
from lowroll.weights.aligned_forward import quantized
from lowroll.weights.exploration_noise import Noise, draw, noisy_norms

log = logging.getLogger(__name__)

COMPARED_ROWS = 4096  # of an embedding


def quantize_base(model: Transformer, format: str) -> Transformer:
    """Replace every linear weight by its QTensor: the frozen base of LoRA."""
    _warn_of_conversion(model, format)
    for name, linear in model.linears():
        linear.set_weight(quantized(name, linear, format))
    return model


@torch.no_grad()
def dequantize_base(model: Transformer) -> Transformer:
    """Replace QTensors by dequantized masters that can learn."""
    for _, linear in model.linears():
        if isinstance(linear.weight, QTensor):
            linear.set_weight(nn.Parameter(linear.weight.dequantize(model.dtype)))
    return model


def rollout_load(
    folder: Path, format: str, device: torch.device | str, dtype: torch.dtype, noisy: bool = False
) -> Transformer:
    """Return `rollout_copy` of a folder's model, in the memory of one. ValueError as by
    `hf.load`."""
    return rollout_copy(hf.load(folder, device, dtype, format), format, dtype, noisy, owned=True)


def rollout_copy(
    master: Transformer, format: str, dtype: torch.dtype, noisy: bool = False, owned: bool = False
) -> Transformer:
    """Return the engine's model: linear weights in `format`, everything else in `dtype`.

    Weights that the master holds in that format are shared, and with them its frozen norms and
    embeddings when `dtype` is the master's; the rest is copied. noisy: the norms that take noise
    are the engine's own, in float32, with the same bits without noise. owned: the new model takes
    the master's tensors.
    """
    _warn_of_conversion(master, format)
    rollout = Transformer(master.spec, "meta", dtype, ENGINE)
    rollout.shared = _fill_other_parameters(master, rollout, format, noisy, owned)
    for (name, engine_linear), (_, master_linear) in zip(
        rollout.linears(), master.linears(), strict=True
    ):
        engine_linear.set_weight(_engine_weight(name, master_linear, format))
        if engine_linear.weight is master_linear.weight and not owned:
            rollout.shared |= {f"{name}.weight"}
        if owned:
            master_linear.set_weight(engine_linear.weight)  # frees the old one layer by layer
        if master_linear.adapter is not None:
            engine_linear.adapter = _copy_adapter(master_linear.adapter)
    rollout.freqs = master.freqs
    rollout.head = over(rollout.lm_head_weight)
    return rollout.requires_grad_(False).eval()


def _fill_other_parameters(
    master: Transformer, rollout: Transformer, format: str, noisy: bool, owned: bool
) -> frozenset[str]:
    may_share = master.dtype == rollout.dtype and (owned or master.weight_format == format)
    noisy_names = {f"{name}.weight" for name, _ in noisy_norms(rollout)} if noisy else set()
    master_parameters = dict(master.named_parameters())
    shared_names: set[str] = set()
    for name, _ in list(rollout.named_parameters()):
        if name.endswith(_LINEAR_WEIGHTS):
            continue
        parameter = master_parameters[name]
        value = parameter.detach()
        if name in noisy_names:
            value = value.to(dtype_of(name, rollout.dtype), copy=True).float()
        elif may_share and (owned or not parameter.requires_grad):
            shared_names.add(name)
        else:
            value = value.to(dtype_of(name, rollout.dtype), copy=True)
        set_parameter(rollout, name, value)
    return frozenset() if owned else frozenset(shared_names)


def beside(master: Transformer, rollout: Transformer, format: str) -> Transformer:
    """Return a second engine model: linear weights in another format, other tensors `rollout`'s."""
    second_model = Transformer(rollout.spec, "meta", rollout.dtype, ENGINE)
    for name, parameter in rollout.named_parameters():
        if ".adapter." not in name:
            set_parameter(second_model, name, parameter.detach())
    for (name, second_linear), (_, rollout_linear), (_, master_linear) in zip(
        second_model.linears(), rollout.linears(), master.linears(), strict=True
    ):
        second_linear.set_weight(_engine_weight(name, master_linear, format))
        second_linear.adapter = rollout_linear.adapter
    second_model.freqs = rollout.freqs
    second_model.shared = rollout.shared
    second_model.head = rollout.head
    return second_model.requires_grad_(False).eval()


@torch.no_grad()
def publish(
    master: Transformer,
    rollout: Transformer,
    noise: Noise | None = None,
    large_batch_model: Transformer | None = None,
) -> None:
    """Refill the engine's model, and the model `beside` it, from the master in place, except for
    shared tensors.

    ValueError, before anything is written, names a master of other sizes, another adapter or base,
    a linear weight that is not finite, or noise for an engine without noisy=True.
    """
    dense_weights = {
        name: linear.weight
        for name, linear in master.linears()
        if isinstance(linear.weight, nn.Parameter)
    }
    # read on the host below, without waiting here
    amax = checksum.amax(list(dense_weights.values()))
    master_parameters = {
        name: parameter
        for name, parameter in master.named_parameters()
        if not name.endswith(_LINEAR_WEIGHTS)
    }
    targets = dict(rollout.named_parameters())
    _check_fits(master, rollout, master_parameters, targets)
    for name, is_finite in zip(dense_weights, checksum.finite(amax), strict=True):
        if not is_finite:
            raise ValueError(f"publish: {name}.weight holds a non-finite value")
    noise_by_name = drawn_noise(noise, rollout)
    amax_by_name = dict(zip(dense_weights, amax, strict=True))
    _refill_linears(master, rollout, rollout.shared, amax_by_name)
    if large_batch_model is not None:
        _refill_linears(master, large_batch_model, rollout.shared, amax_by_name)
    for name, target in targets.items():
        if name in rollout.shared:
            continue
        value: Tensor = master_parameters[name]
        if ".adapter." not in name:
            value = value.to(dtype_of(name, rollout.dtype))
        if name in noise_by_name:
            value = value.float() + noise_by_name[name]
        target.copy_(value)
    renew_head(rollout, targets.keys() - rollout.shared)
    for _, linear in rollout.linears():
        if linear.adapter is not None:
            linear.adapter.renew()


def _refill_linears(
    master: Transformer, engine: Transformer, shared: Set[str], amax_by_name: Mapping[str, Tensor]
) -> None:
    for (name, engine_linear), (_, master_linear) in zip(
        engine.linears(), master.linears(), strict=True
    ):
        codes = engine_linear.weight
        assert isinstance(codes, QTensor)
        if f"{name}.weight" not in shared and codes is not master_linear.weight:
            _refill_codes(name, codes, master_linear, amax_by_name.get(name))


def renew_head(rollout: Transformer, written: Set[str]) -> None:
    """Renew what was derived from the head, if it was written."""
    head_name = "embedding" if rollout.lm_head is None else "lm_head"
    if rollout.head is not None and head_name in written:
        rollout.head.renew()


@torch.no_grad()
def first_difference(
    master: Transformer, rollout: Transformer, block: int, noisy: bool = False
) -> str | None:
    """Return the first tensor of one block, or outside all blocks, that differs from what `publish`
    makes of the master. A frozen low-bit base, `noisy` norms and dense rows after COMPARED_ROWS are
    not compared."""
    prefix = f"blocks.{block}."
    noisy_names = {f"{name}.weight" for name, _ in noisy_norms(rollout)} if noisy else set()
    master_parameters = dict(master.named_parameters())
    for name, target in rollout.named_parameters():
        is_here = name.startswith(prefix) or not name.startswith("blocks.")
        if not is_here or name in rollout.shared | noisy_names or name.endswith(_LINEAR_WEIGHTS):
            continue
        expected = master_parameters[name][:COMPARED_ROWS]
        if ".adapter." not in name:
            expected = expected.to(dtype_of(name, rollout.dtype))
        if not torch.equal(target[:COMPARED_ROWS], expected.to(target.dtype)):
            return name
    for (name, engine_linear), (_, master_linear) in zip(
        rollout.linears(), master.linears(), strict=True
    ):
        codes = engine_linear.weight
        is_frozen = isinstance(master_linear.weight, QTensor) and master_linear.aligned is None
        if not name.startswith(prefix) or f"{name}.weight" in rollout.shared or is_frozen:
            continue
        assert isinstance(codes, QTensor)
        expected_codes = codes.clone()
        _refill_codes(name, expected_codes, master_linear, None)
        for part, tensor in expected_codes.tensors.items():
            if not torch.equal(codes.tensors[part], tensor):
                return f"{name}.weight"
    return None


def norms_without_noise(rollout: Transformer) -> list[str]:
    """Return the noisy norms that cannot take noise, being shared or not in float32."""
    norms = {f"{name}.weight": norm for name, norm in noisy_norms(rollout)}
    return [
        name
        for name, norm in norms.items()
        if norm.weight.dtype != torch.float32 or name in rollout.shared
    ]


def drawn_noise(noise: Noise | None, rollout: Transformer) -> dict[str, Tensor]:
    """Return the noise by parameter name, on the device. ValueError for an engine not
    made for it."""
    noise_by_name = {f"{name}.weight": noise_D for name, noise_D in draw(rollout, noise).items()}
    if not noise_by_name:
        return {}
    if unfit_norms := norms_without_noise(rollout):
        raise ValueError(
            f"publish: {unfit_norms[0]} cannot take noise; make the engine with noisy=True"
        )
    sizes = [noise_D.numel() for noise_D in noise_by_name.values()]
    on_device = torch.cat(list(noise_by_name.values())).to(rollout.device)  # one transfer
    return dict(zip(noise_by_name, on_device.split(sizes), strict=True))


def _check_fits(
    master: Transformer,
    rollout: Transformer,
    mine: dict[str, nn.Parameter],
    targets: dict[str, nn.Parameter],
) -> None:
    if master.spec != rollout.spec:
        raise ValueError("publish: the master's sizes are not those of the engine's model")
    mismatched = sorted(
        name
        for name in mine.keys() | targets.keys()
        if name not in mine or name not in targets or mine[name].shape != targets[name].shape
    )
    if mismatched:
        raise ValueError(
            f"publish: the master's adapter is not the one that the engine was made with: {mismatched[0]}"
        )
    for (name, engine_linear), (_, master_linear) in zip(
        rollout.linears(), master.linears(), strict=True
    ):
        if (
            engine_linear.adapter
            and master_linear.adapter
            and engine_linear.adapter.scaling != master_linear.adapter.scaling
        ):
            raise ValueError(
                f"publish: {name}: the adapter's scaling is {master_linear.adapter.scaling}, and the "
                f"engine was made with {engine_linear.adapter.scaling}"
            )
        if f"{name}.weight" in rollout.shared and master_linear.weight is not engine_linear.weight:
            raise ValueError(
                f"publish: {name}.weight belongs to another model, whose base the engine shares"
            )
    for name in rollout.shared & mine.keys():
        if targets[name].data_ptr() != mine[name].data_ptr():
            raise ValueError(
                f"publish: {name} belongs to another model, whose base the engine shares"
            )


def digest(model: Transformer) -> str:
    """Return 32 hex digits over every weight's bytes, name, shape and dtype. An adapter's scaling
    counts, an engine's unused adapter capacity does not; of an aligned learner the codes count."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    scalings: dict[str, float] = {}
    for name, linear in model.linears():
        weight = linear.weight if linear.aligned is None else linear.aligned
        if isinstance(weight, QTensor):
            tensors.pop(f"{name}.weight", None)
            tensors.update({f"{name}.weight.{part}": t for part, t in weight.tensors.items()})
        if linear.adapter is not None:
            for part in linear.adapter.a:
                for factor in "ab":
                    tensors.pop(f"{name}.adapter.{factor}.{part}")
            for part, a, b in linear.adapter.holding():
                tensors |= {f"{name}.adapter.a.{part}": a, f"{name}.adapter.b.{part}": b}
                scalings[f"{name}.adapter.scaling"] = linear.adapter.scaling
    return fingerprint(tensors, scalings)


def fingerprint(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> str:
    """Return 32 hex digits over tensors and numbers by name, in any order and on any devices."""
    tensor_checksums = checksum.checksums(list(tensors.values()))
    descriptions = {
        name: f"{tuple(tensor.shape)} {tensor.dtype} {value}"
        for (name, tensor), value in zip(tensors.items(), tensor_checksums, strict=True)
    }
    # a number counts as a float64 tensor without dimensions
    descriptions |= {
        name: f"() {torch.float64} {_number_checksum(value)}" for name, value in numbers.items()
    }
    text = "\n".join(f"{name} {descriptions[name]}" for name in sorted(descriptions))
    return blake2b(text.encode(), digest_size=16).hexdigest()


_LINEARS = ("qkv", "qkvz", "qkv_a", "q_b", "kv_b", "o", "gate_up", "down")
_LINEAR_WEIGHTS = tuple(f"{name}.weight" for name in _LINEARS)


def _engine_weight(name: str, linear: Linear, format: str) -> QTensor:
    """Return `quantized` for an engine: a copy of codes that the learner will refresh."""
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


def _refill_codes(name: str, target: QTensor, linear: Linear, amax_1: Tensor | None) -> None:
    if linear.aligned is not None and linear.aligned.format == target.format:
        target.copy_(linear.aligned)
    elif isinstance(linear.weight, nn.Parameter):
        target.quantize_(linear.weight, amax_1)
    elif not target.is_made_of(linear.weight):
        target.copy_(quantized(name, linear, target.format))
        target.note_source(linear.weight)


def _warn_of_conversion(model: Transformer, format: str) -> None:
    base_name = model.weight_format
    if base_name is None or get_format(base_name).dense:
        return
    base_format, new_format = get_format(base_name), get_format(format)
    low_bit_layers = [name for name, _ in model.linears() if not base_format.of(name).dense]
    if any(
        stored_format(base_format.of(name).name) != stored_format(new_format.of(name).name)
        for name in low_bit_layers
    ):
        log.warning(
            "the model's weights are %s: %s is made from their dequantized values; with "
            "rollout.weights: %s they would be used as they are",
            mixed.title(base_name),
            format,
            STORED,
        )


def set_parameter(model: Transformer, name: str, value: Tensor) -> None:
    """Replace a parameter by a frozen one."""
    module_name, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(module_name), attribute, nn.Parameter(value, requires_grad=False))


def _copy_adapter(adapter: Adapter) -> Adapter:
    copy = Adapter(adapter.rank, adapter.alpha)
    for part in adapter.a:
        copy.a[part] = nn.Parameter(adapter.a[part].detach().clone())
        copy.b[part] = nn.Parameter(adapter.b[part].detach().clone())
    return copy


@cache
def _number_checksum(value: float) -> int:
    return checksum.checksums([torch.tensor(value, dtype=torch.float64)])[0]
