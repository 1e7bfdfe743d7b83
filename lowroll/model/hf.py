"""Weights in and out of Hugging Face folders. Save then load is bitwise, for dense and for low-bit
weights (`quant.layouts`).
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lowroll.kernels import checksum
from lowroll.model import adapter_base as bases
from lowroll.model import lora, scaling, shards, size_checks, stacked
from lowroll.model.device import dtype_on
from lowroll.model.files import some
from lowroll.model.folder import copy_tokenizer, resolve
from lowroll.model.headers import (
    DTYPES,
    Layouts,
    own_format,
    read_headers,
    refuse_two_rotations,
    stored_names,
    stored_parameters,
)
from lowroll.model.linear import Linear
from lowroll.model.names import (
    dense_modules,
    features_read,
    hf_names,
    is_linear,
    module_of,
    part_rows,
    stored_hf_names,
)
from lowroll.model.spec import ModelSpec, spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format
from lowroll.quant.layouts import (
    StoredLayout,
    describe,
    describe_experts_in_mxfp4,
    describe_mixed,
)
from lowroll.quant.mixed import Mixed
from lowroll.quant.packed import PackedWeights

log = logging.getLogger(__name__)


def load(
    source: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weights: str | None = None,
) -> Transformer:
    """Load a model from a Hugging Face folder or hub id, in `dtype` (default: float32 on CPU,
    bfloat16 on CUDA).

    A low-bit folder gives frozen QTensors. weights: the format for a dense folder's linear layers,
    frozen too; each is quantized on arrival. An adapter folder gives its base
    (`lowroll.model.adapter_base`) with the adapter on top.

    ValueError names the file, tensors or key for: an unsupported config, missing, extra or
    mis-shaped tensors, non-finite values, wrong dtypes, damaged files, `.bin`/`.pt` weights, and
    own code.
    """
    folder = resolve(source)
    if (folder / "adapter_config.json").is_file():
        return _load_adapted(folder, device, dtype, weights)
    spec, layout, files = read_headers(folder)
    size_checks.check_heads(folder / "config.json", spec, device)
    if dtype is None:
        dtype = dtype_on(torch.device(device))
    folder_format = own_format(folder, spec, layout, dtype)
    weight_format = folder_format or weights
    if isinstance(layout, PackedWeights) and folder_format is None:
        log.warning("%s: %s weights that no format here holds become dense", folder, layout.words)
    bits: float = 8 * dtype.itemsize
    if weight_format is not None:
        bits = min(bits, get_format(weight_format).bits)
    size_checks.check_memory(folder / "config.json", spec, bits, device)
    model = Transformer(spec, "meta", dtype)
    amax = _fill(model, layout, files, weight_format, device)
    _refuse_infinite(amax, files, folder, dtype)
    model.freqs = model.freqs.to(device)
    return model.eval()


def _fill(
    model: Transformer,
    layout: Layouts | None,
    files: dict[str, Path],
    weight_format: str | None,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """Read the model's parameters one by one. Return the largest absolute value of each dense part:
    checked together, they make the host wait once."""
    spec = model.spec
    shapes = {
        name: {part: (part_rows(spec, part, whole[0]), *whole[1:]) for part in parts}
        for name, parts, whole in stored_hf_names(spec)
    }
    batches = [[*tensors] for tensors in stored_parameters(spec, layout).values()]
    stacks = stacked.stored_tensors(spec)
    amax: dict[str, Tensor] = {}
    for name, tensors in zip(shapes, shards.stream(files, batches, device), strict=True):
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        linear = module if isinstance(module, Linear) and attribute == "weight" else None
        part_layout = None
        if layout is not None and linear is not None:
            part_layout = layout.of(module_of(shapes[name]))
        stored_weight = _decode(tensors, files, part_layout, shapes[name], stacks.get(name))
        if isinstance(stored_weight, QTensor):
            assert linear is not None, "a layout is one of linear layers"
            linear.set_weight(stored_weight)
            continue
        parts = stored_weight
        parameter = getattr(module, attribute)
        joined = shards.join(list(parts.values()), parameter.dtype)
        part_amax = checksum.amax(joined.split([len(part) for part in parts.values()]))
        amax |= dict(zip(parts, part_amax, strict=True))
        if weight_format is not None and linear is not None:
            layer_format = get_format(weight_format).of(module_name).name
            amax_1 = torch.cat(part_amax).amax(0, keepdim=True)
            linear.set_weight(_quantize(layer_format, joined, amax_1))
        else:
            is_trained = weight_format is None and parameter.requires_grad
            setattr(module, attribute, nn.Parameter(joined, is_trained))
    return amax


def _refuse_infinite(
    amax: dict[str, Tensor], files: dict[str, Path], folder: Path, dtype: torch.dtype
) -> None:
    for part, is_finite in zip(amax, checksum.finite(list(amax.values())), strict=True):
        if not is_finite:
            raise ValueError(
                f"{files.get(part, folder)}: tensor {part} holds a value that is not finite in "
                f"{DTYPES.get(dtype, dtype)}"
            )


def stored(folder: Path) -> tuple[ModelSpec, dict[str, Path], dict[str, Tensor]]:
    """Read a dense folder's spec, and the files and CPU weights by HF name. ValueError as
    `read_headers`, and for a low-bit folder."""
    spec, layout, files = read_headers(folder)
    if layout is not None:
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config: its weights are no dense ones"
        )
    found: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        found |= load_file(path)
    stacks = stacked.stored_tensors(spec)
    part_files: dict[str, Path] = {}
    tensors: dict[str, Tensor] = {}
    for name, parts, shape in stored_hf_names(spec):
        if name not in stacks:
            part_files |= {part: files[part] for part in parts}
            tensors |= {part: found[part] for part in parts}
            continue
        stack = stacks[name]
        rows = [part_rows(spec, part, shape[0]) for part in parts]
        pieces = stack.by_expert(found.pop(stack.name)).split(rows)
        part_files |= dict.fromkeys(parts, files[stack.name])
        tensors |= dict(zip(parts, pieces, strict=True))
    return spec, part_files, tensors


def _load_adapted(
    folder: Path, device: torch.device | str, dtype: torch.dtype | None, weights: str | None
) -> Transformer:
    """Load an adapter's base as the run, if any, made it, and add the adapter."""
    base, base_folder = bases.read(folder), bases.base_of(folder)
    if base is None:
        return lora.load(load(base_folder, device, dtype, weights), folder).eval()
    loaded_format = base.weights if base.rounds else weights
    if base.uaq_scale is not None:
        loaded_format = None  # the run scaled before rounding
    model = load(base_folder, device, getattr(torch, base.dtype), loaded_format)
    if base.uaq_scale is not None:
        scaling.scale(model, base.uaq_scale)
    if base.rounds:
        base_format = get_format(str(base.weights))
        for name, linear in model.linears():
            linear.set_weight(linear.quantized(base_format.of(name).name))
    model.to(dtype or dtype_on(torch.device(device)))
    return lora.load(model, folder, base.uaq_scale or 1.0).eval()


def _quantize(format: str, w_NK: Tensor, amax_1: Tensor) -> QTensor:
    """Return a matrix in a format, without a copy in its own dtype."""
    own_storage = over(w_NK)
    if own_storage is not None and own_storage.format == format:
        return own_storage
    codes = get_format(format).empty((w_NK.shape[0], w_NK.shape[1]), w_NK.device)
    return codes.quantize_(w_NK, amax_1)


def _decode(
    stored: dict[str, Tensor],
    files: dict[str, Path],
    layout: StoredLayout | PackedWeights | None,
    shapes: dict[str, tuple[int, ...]],
    stack: stacked.StackedTensor | None,
) -> QTensor | dict[str, Tensor]:
    if stack is not None:
        if layout is not None:
            return _decode_stack(stored, files, stack)
        return {name: stack.by_expert(tensor) for name, tensor in stored.items()}
    if layout is None:
        return stored
    parts = _decode_low_bit(stored, files, layout, shapes)
    return parts if layout.format is None else _stack(layout.format, parts)


def _decode_stack(
    tensors: dict[str, Tensor], files: dict[str, Path], stack: stacked.StackedTensor
) -> QTensor:
    try:
        return stack.decode(tensors)
    except ValueError as error:
        raise ValueError(f"{files[next(iter(tensors))]}: {error}") from None


def _decode_low_bit(
    tensors: dict[str, Tensor],
    files: dict[str, Path],
    layout: StoredLayout | PackedWeights,
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    parts = {}
    for part, (rows, columns) in shapes.items():
        module = part.removesuffix(".weight")
        names = stored_names(part, (rows, columns), layout)
        tensors_by_suffix = {name.removeprefix(f"{module}."): tensors[name] for name in names}
        try:
            parts[part] = layout.decode((rows, columns), tensors_by_suffix)
        except ValueError as error:
            raise ValueError(f"{files[next(iter(names))]}: {module}.{error}") from None
    return parts


def _stack(format: str, parts: dict[str, QTensor]) -> QTensor:
    try:
        return get_format(format).stack(list(parts.values()))
    except ValueError as error:
        raise ValueError(f"{', '.join(parts)}: {error}") from None


def state(model: Transformer) -> dict[str, Tensor]:
    """Return the weights by HF name, fused matrices split. ValueError for an adapter, and when a
    block of the format spans two parts."""
    adapted = [name for name, linear in model.linears() if linear.adapter is not None]
    if adapted:
        raise ValueError(
            f"{some(adapted)}: an adapter rides on the weights; merge it, or save it by itself"
        )
    weights: dict[str, Tensor | QTensor] = dict(model.named_parameters())
    weights |= {f"{name}.weight": linear.weight for name, linear in model.linears()}
    tensors: dict[str, Tensor] = {}
    for name, parts, shape in hf_names(model.spec):
        rows = [part_rows(model.spec, part, shape[0]) for part in parts]
        weight = weights[name]
        if isinstance(weight, QTensor) and get_format(weight.format).dense:
            weight = weight.tensors["weight"]
        if isinstance(weight, Tensor):
            pieces = weight.detach().split(rows)
            tensors |= {part: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)}
        else:
            tensors |= _encode_parts(weight, parts, rows, model.dtype)
    return tensors


def _encode_parts(
    weight: QTensor, parts: list[str], rows: list[int], dtype: torch.dtype
) -> dict[str, Tensor]:
    try:
        part_weights = get_format(weight.format).cut(weight, rows)
    except ValueError as error:
        raise ValueError(f"{', '.join(parts)}: {error}") from None
    tensors: dict[str, Tensor] = {}
    for part, part_weight in zip(parts, part_weights, strict=True):
        module = part.removesuffix(".weight")
        for suffix, tensor in StoredLayout(weight.format).encode(part_weight, dtype).items():
            tensors[f"{module}.{suffix}"] = tensor
    return tensors


def save(
    model: Transformer,
    folder: str | Path,
    tokenizer_from: str | Path | None = None,
    step: int | None = None,
) -> Path:
    """Publish the model as a Hugging Face folder, atomically, with another folder's tokenizer
    files. FileExistsError for an existing folder; ValueError as `state`."""
    from lowroll.checkpoint.atomic_folders import publish_folder

    files = contents(model)
    return publish_folder(
        Path(folder),
        lambda target: write(files, target, tokenizer_from),
        {"kind": "model"} | ({} if step is None else {"step": step}),
    )


def contents(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config: dict[str, Any] = {**model.spec.config, "dtype": DTYPES[model.dtype]}
    config.pop("torch_dtype", None)
    weight_format = None if model.weight_format is None else get_format(model.weight_format)
    _refuse_two_rotations(model)
    if weight_format is not None and stacked.is_native(model.spec, weight_format):
        config["quantization_config"] = describe_experts_in_mxfp4()
    elif isinstance(weight_format, Mixed):
        config["quantization_config"] = describe_mixed(
            _modules_by_format(model, weight_format), features_read(model.spec)
        )
    elif weight_format is not None and not weight_format.dense:
        config["quantization_config"] = describe(
            weight_format.name, model.dtype, dense_modules(model.spec), features_read(model.spec)
        )
    return config, state(model)


def _refuse_two_rotations(model: Transformer) -> None:
    for _, linear in model.linears():
        if isinstance(linear.weight, QTensor):
            scheme = get_format(linear.weight.format).scheme
            if scheme is not None and scheme.rotated:
                refuse_two_rotations(model.spec, linear.weight.format)


def _modules_by_format(model: Transformer, form: Mixed) -> dict[str, list[str]]:
    modules_by_format: dict[str, list[str]] = {}
    for name, parts, _ in hf_names(model.spec):
        if not is_linear(parts[0]):
            continue
        layer_format = form.of(name.removesuffix(".weight"))
        if layer_format.dense and layer_format.dtype != model.dtype:
            raise ValueError(
                f"{name}: it is {layer_format.name}, and the folder's dtype is {model.dtype}"
            )
        modules = modules_by_format.setdefault(layer_format.name, [])
        modules += [part.removesuffix(".weight") for part in parts]
    return modules_by_format


def write(
    files: tuple[dict[str, Any], dict[str, Tensor]], target: Path, tokenizer_from: str | Path | None
) -> None:
    config, tensors = files
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards.write(stacked.pack(spec_from_config(config), config, tensors), target)
    copy_tokenizer(tokenizer_from, target)
