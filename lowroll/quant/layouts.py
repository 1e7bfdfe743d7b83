"""The stored layout of each format in compressed-tensors and bitsandbytes folders.

Tensors of a matrix W [N, K], by the suffix of the module's name:

    int8        weight int8 [N, K], weight_scale [N, 1]                               int-quantized
    int8_rotated   the same, and a transform_config (`quant.transforms`)               int-quantized
    fp8         weight e4m3 [N, K], weight_scale [N, 1]                               float-quantized
    fp8_block   weight e4m3 [N, K], weight_scale [N / 128, K / 128]                   float-quantized
    int4        weight_packed int32 [N, K / 8], weight_scale [N, K / 128], weight_shape      pack-quantized
    int4_asym   the same and weight_zero_point int32 [N / 8, K / 128]                 pack-quantized
    w4a8        as int4, with activations of 8 bits in the config                     pack-quantized
                or weight int8 [N, K] with codes -8..7, weight_scale (read only)      int-quantized
    nvfp4       weight_packed uint8 [N, K / 2], weight_scale e4m3 [N, K / 16], weight_global_scale [1]
    mxfp4       weight_packed uint8 [N, K / 2], weight_scale uint8 [N, K / 32]
    nf4         weight uint8 [N K / 2, 1], weight.absmax, weight.quant_map [16], weight.quant_state.bitsandbytes__nf4
    nf4_dq      the same with weight.absmax uint8, weight.nested_absmax, weight.nested_quant_map [256]

Read only: `quant_method: fp8`, which is `fp8_block` with weight_scale_inv for weight_scale; `awq`
and `gptq` (`quant.packed`). Scales are written in float32 and read in any float dtype. Several
compressed-tensors formats in one folder are groups whose `targets` are module names. Anything else
that changes the computation is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowroll.quant import nf4, transforms
from lowroll.quant.formats import Format, QTensor, get_format, meta_tensors
from lowroll.quant.fp8 import Float8Block
from lowroll.quant.int4 import pack_words
from lowroll.quant.mixed import Mixed
from lowroll.quant.mxfp4 import MXFloat4
from lowroll.quant.packed import PackedWeights, read_packed
from lowroll.quant.scheme import Header, Scheme
from lowroll.quant.table import FORMATS

FLOATS = ("F32", "BF16", "F16")
EXPERTS_IN_MXFP4 = "mxfp4"  # GPT-OSS's quant_method
LINEARS = (  # suffixes of quantized modules
    *(f".{p}_proj" for p in ("q", "k", "v", "o", "gate", "up", "down", "qkv", "gate_up")),
    *(".in_proj_qkvz", ".in_proj_qkv", ".in_proj_z", ".out_proj"),
    *(".q_a_proj", ".q_b_proj", ".kv_a_proj_with_mqa", ".kv_b_proj"),
)
MIXED = "mixed-precision"  # compressed-tensors' word for groups stored differently
_DTYPES = {torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3"}
_ADVICE = "; quantize the dense model with `lowroll quantize`, or load the dense one"


@dataclass(frozen=True)
class StoredLayout:
    """The stored tensors of a format. renamed: a folder's own suffixes. unpacked: 4-bit integers
    take a byte each. rotated: width of the rotation blocks by kind of matrix."""

    format: str
    renamed: dict[str, str] = field(default_factory=dict)
    unpacked: bool = False
    rotated: dict[str, int] = field(default_factory=dict)

    def of(self, module: str) -> StoredLayout | None:
        return self

    def headers(self, shape: tuple[int, int]) -> dict[str, Header]:
        form = get_format(self.format)
        tensors = meta_tensors(form, *shape)
        stored_headers: dict[str, Header] = {}
        for name, suffix in self._suffixes(tensors).items():
            tensor = tensors[name]
            dtypes = FLOATS if tensor.dtype == torch.float32 else (_DTYPES[tensor.dtype],)
            stored_headers[suffix] = (tuple(tensor.shape), dtypes)
        if self.unpacked:
            return stored_headers | {"weight": (shape, ("I8",))}
        return stored_headers | form.headers_beside()

    def decode(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> QTensor:
        """Return the matrix of a file's tensors. ValueError names the wrong suffix."""
        form = get_format(self.format)
        expected_tensors = meta_tensors(form, *shape)
        if self.unpacked:
            if int(stored["weight"].min()) < -8 or int(stored["weight"].max()) > 7:
                raise ValueError("weight: holds codes outside of -8..7")
            stored = {**stored, "weight": pack_words(stored["weight"])}
        tensors = {}
        for name, suffix in self._suffixes(expected_tensors).items():
            tensors[name] = stored[suffix].to(expected_tensors[name].dtype).contiguous()
            _check_values(suffix, name, tensors[name], form)
        return QTensor(self.format, shape, tensors | form.read_beside(shape, stored))

    def encode(self, q: QTensor, dtype: torch.dtype) -> dict[str, Tensor]:
        suffixes = self._suffixes(q.tensors)
        stored = {suffix: q.tensors[name].contiguous() for name, suffix in suffixes.items()}
        return stored | get_format(self.format).write_beside(q, dtype)

    def _suffixes(self, names: Iterable[str]) -> dict[str, str]:
        suffixes: dict[str, str] = {}
        for name in names:
            suffix = get_format(self.format).suffixes.get(name, name)
            if suffix is not None:
                suffixes[name] = self.renamed.get(suffix, suffix)
        return suffixes


@dataclass(frozen=True)
class MixedLayout:
    """Layouts by module name. rest: that of unnamed modules; None: dense."""

    named: dict[str, StoredLayout]
    rest: StoredLayout | None
    ignored: frozenset[str]
    rotated: dict[str, int]

    def of(self, module: str) -> StoredLayout | None:
        return None if module in self.ignored else self.named.get(module, self.rest)

    @property
    def rotating(self) -> list[str]:
        rotating = [name for name in self.rotated if name not in self.named]
        for name, layout in self.named.items():
            scheme = get_format(layout.format).scheme
            if scheme is not None and scheme.rotated:
                rotating.append(name)
        return rotating


class ExpertsInMXFloat4(MixedLayout):
    """The layout of GPT-OSS's folders: experts in MXFP4 (`model.stacked`), all else dense."""

    def __init__(self) -> None:
        super().__init__({}, None, frozenset(), {})

    def of(self, module: str) -> StoredLayout | None:
        return StoredLayout(MXFloat4.name) if ".mlp.experts." in module else None


def read_layout(config: dict[str, Any]) -> StoredLayout | PackedWeights | MixedLayout:
    """Return the layout of a `quantization_config`. ValueError names the unsupported key."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _read_compressed_tensors(config)
    if method == "bitsandbytes":
        return StoredLayout(nf4.read_description(config, _ADVICE))
    if method == "fp8":
        blocks, scheme = config.get("weight_block_size"), config.get("activation_scheme")
        if blocks != [128, 128] or scheme != "dynamic":
            raise ValueError(
                "weight_block_size, activation_scheme: expected [128, 128] and dynamic, got "
                f"{blocks!r} and {scheme!r}{_ADVICE}"
            )
        return StoredLayout(Float8Block.name, {"weight_scale": "weight_scale_inv"})
    if method == EXPERTS_IN_MXFP4:
        return ExpertsInMXFloat4()
    if method in ("awq", "gptq"):
        return read_packed(config)
    raise ValueError(
        f"quant_method: {method!r} is not one of compressed-tensors, bitsandbytes, fp8, {EXPERTS_IN_MXFP4}, "
        f"awq, gptq{_ADVICE}"
    )


def describe_experts_in_mxfp4() -> dict[str, Any]:
    dense = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")
    return {
        "quant_method": EXPERTS_IN_MXFP4,
        "modules_to_not_convert": [*dense, "lm_head"],
    }


def describe(
    format: str,
    dtype: torch.dtype,
    dense: Sequence[str] = (),
    columns: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the `quantization_config` of a folder. dense: name endings of dense modules. columns:
    in features by kind of matrix."""
    form = get_format(format)
    description = form.describe(dtype, dense)
    if description is not None:
        return description
    if form.scheme is None:
        raise ValueError(f"{format}: no other tool has a layout for it, so no folder can hold it")
    group = _describe_group(format, ["Linear"])
    rotated = columns if form.scheme.rotated and columns is not None else {}
    ignored = [rf"re:.*\.{re.escape(module)}$" for module in dense]
    return _describe_groups([group], ignored, rotated)


def describe_mixed(modules: dict[str, list[str]], columns: Mapping[str, int]) -> dict[str, Any]:
    """Return the `quantization_config` of a folder with several formats. modules: file names by
    format. ValueError for a format that cannot be mixed."""
    dense: list[str] = []
    groups: list[dict[str, Any]] = []
    rotated: dict[str, int] = {}
    for format, names in modules.items():
        form = get_format(format)
        if form.dense:
            dense += names
            continue
        groups.append(_describe_group(format, names))
        if form.scheme is not None and form.scheme.rotated:
            rotated |= {name: columns[name.rpartition(".")[2]] for name in names}
    return _describe_groups(groups, dense, rotated)


def _describe_groups(
    groups: list[dict[str, Any]], ignored: list[str], rotated: Mapping[str, int]
) -> dict[str, Any]:
    compressions = {group["format"] for group in groups}
    rotation = {transforms.KEY: transforms.describe(rotated)} if rotated else {}
    return {
        "quant_method": "compressed-tensors",
        "format": compressions.pop() if len(compressions) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *ignored],
        **rotation,
    }


def _describe_group(format: str, targets: list[str]) -> dict[str, Any]:
    """Return a format's entry in `config_groups`. ValueError for a format without one."""
    scheme = get_format(format).scheme
    if scheme is None:
        raise ValueError(
            f"{format}: compressed-tensors has no layout for it, so a folder of several formats "
            "cannot have it"
        )
    weights = _without_none(scheme.weights)
    if scheme.scale_dtype is not None:
        weights["scale_dtype"] = scheme.scale_dtype
    if not weights["symmetric"]:
        weights["zp_dtype"] = "torch.int8"
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None if scheme.inputs is None else _without_none(scheme.inputs),
        "output_activations": None,
        "format": scheme.compression,
    }


def unread_by_transformers(format: str, columns: set[int], experts: bool) -> str | None:
    """Return why transformers (5.23, with compressed-tensors 0.20 and bitsandbytes 0.50) cannot
    load such a folder, or None."""
    form = get_format(format)
    if isinstance(form, Mixed):
        return _mixture_unread_by_transformers(form, columns, experts)
    if form.whole_groups and form.group is not None:
        uneven_columns = sorted(count for count in columns if count % form.group)
        if uneven_columns:
            return (
                f"transformers cannot load this folder: it wants whole blocks of {form.group} "
                f"columns in {format}, and matrices here have "
                f"{', '.join(map(str, uneven_columns))}"
            )
    if experts and not form.read_experts:
        return f"transformers cannot use this folder: it does not read experts in {format}"
    return form.unread or None


def _mixture_unread_by_transformers(mixture: Mixed, columns: set[int], experts: bool) -> str | None:
    names = sorted(set(mixture.assignment.values()))
    for name in names:
        reason = unread_by_transformers(name, columns, experts)
        if reason is not None:
            return reason
    if sum(not get_format(name).dense for name in names) <= 1:
        return None
    return (
        "transformers reads this folder as its tools run it, and not with dequantize=True, "
        "which takes the first group's format for all layers"
    )


def _schemes_by_format() -> dict[str, Scheme]:
    schemes: dict[str, Scheme] = {}
    for name in FORMATS:
        scheme = get_format(name).scheme
        if scheme is not None and scheme not in schemes.values():
            schemes[name] = scheme
    return schemes


def _read_compressed_tensors(config: dict[str, Any]) -> StoredLayout | MixedLayout:
    """Return the layout. If all groups have the same one and `ignore` names no linear layer, the
    files say which modules are quantized."""
    if config.get("kv_cache_scheme"):
        raise ValueError(f"kv_cache_scheme: is not supported{_ADVICE}")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise ValueError(f"sparsity_config: sparse weights are not supported{_ADVICE}")
    rotated = _read_rotations(config)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"config_groups: expected a group of layers, got {groups!r}{_ADVICE}")
    layouts: dict[str, StoredLayout] = {}
    for key, group in groups.items():
        rotated_here = _rotated_in(group, rotated)
        where = f"config_groups.{key}"
        layouts[key] = _read_group(where, group, config.get("format"), rotated_here)
    first_layout = next(iter(layouts.values()))
    ignored = _check_names("ignore", config.get("ignore") or [])
    all_equal = all(other == first_layout for other in layouts.values())
    ignores_linears = any(name.endswith(LINEARS) for name in ignored)
    if all_equal and not ignores_linears:
        return first_layout
    named = _layouts_by_target(groups, layouts)
    rest = named.pop("Linear", None)
    return MixedLayout(named, rest, frozenset(ignored), rotated)


def _read_rotations(config: dict[str, Any]) -> dict[str, int]:
    transform_config = config.get(transforms.KEY)
    if not transform_config:
        return {}
    try:
        return transforms.read(transform_config)
    except ValueError as error:
        raise ValueError(f"{error}{_ADVICE}") from None


def _layouts_by_target(
    groups: dict[str, Any], layouts: dict[str, StoredLayout]
) -> dict[str, StoredLayout]:
    by_target: dict[str, StoredLayout] = {}
    for key, layout in layouts.items():
        where = f"config_groups.{key}.targets"
        for target in _check_names(where, groups[key].get("targets")):
            if target.startswith("re:") or target in by_target:
                raise ValueError(
                    f"{where}: {target!r}: of several formats each names its modules, once{_ADVICE}"
                )
            if target == "Linear" and layout.rotated:
                raise ValueError(
                    f"{where}: 'Linear': rotated layers beside others are named{_ADVICE}"
                )
            by_target[target] = layout
    return by_target


def _rotated_in(group: Any, rotated: dict[str, int]) -> dict[str, int]:
    """Return a group's rotations, declared by module name, which has dots, or by kind of matrix."""
    if not any("." in name for name in rotated):
        return rotated
    targets = group.get("targets") if isinstance(group, dict) else None
    modules = targets if isinstance(targets, list) else []
    return {name: rotated[name] for name in modules if isinstance(name, str) and name in rotated}


def _check_names(where: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where}: expected a list of names, got {value!r}{_ADVICE}")
    return value


def _read_group(
    where: str, group: Any, compression: object, rotated: dict[str, int]
) -> StoredLayout:
    if not isinstance(group, dict):
        raise ValueError(f"{where}: expected an object, got {group!r}")
    if group.get("output_activations"):
        raise ValueError(f"{where}.output_activations: is not supported{_ADVICE}")
    weights = _normalize_arguments(f"{where}.weights", group.get("weights"))
    inputs = _normalize_arguments(f"{where}.input_activations", group.get("input_activations"))
    if inputs is not None and inputs["dynamic"] is not True:
        raise ValueError(
            f"{where}.input_activations.dynamic: is {inputs['dynamic']!r}, and calibrated scales "
            f"of activations are not supported{_ADVICE}"
        )
    schemes = _schemes_by_format()
    for name, scheme in schemes.items():
        if (weights, inputs, bool(rotated)) == (scheme.weights, scheme.inputs, scheme.rotated):
            layout = _layout_of_compression(where, name, scheme, group.get("format") or compression)
            return replace(layout, rotated=rotated)
    descriptions = [
        "weights " + _describe_arguments(weights),
        "activations " + _describe_arguments(inputs),
    ]
    raise ValueError(
        f"{where}: {', '.join(descriptions)}: not one of {', '.join(schemes)}{_ADVICE}"
    )


def _layout_of_compression(where: str, name: str, scheme: Scheme, found: object) -> StoredLayout:
    if scheme.unpacked is not None and found == scheme.unpacked:
        return StoredLayout(name, {"weight_packed": "weight"}, unpacked=True)
    is_8bit_plain = found == "naive-quantized" and scheme.weights["num_bits"] == 8
    if found != scheme.compression and not is_8bit_plain:
        raise ValueError(
            f"{where}.format: {name} is stored as {scheme.compression}, not as {found!r}{_ADVICE}"
        )
    return StoredLayout(name)


def _normalize_arguments(where: str, args: Any) -> dict[str, Any] | None:
    if args is None:
        return None
    if not isinstance(args, dict):
        raise ValueError(f"{where}: expected an object, got {args!r}")
    if args.get("actorder") not in (None, False, "weight", "static"):
        raise ValueError(
            f"{where}.actorder: {args['actorder']!r} reorders columns, which is not "
            f"supported{_ADVICE}"
        )
    size = args.get("group_size")
    strategy = args.get("strategy") or ("channel" if size == -1 else "group" if size else "tensor")
    block_structure = args.get("block_structure")
    if isinstance(block_structure, str):  # "128x128"
        sizes = block_structure.split("x")
        if all(size.isdigit() for size in sizes):
            block_structure = [int(size) for size in sizes]
    return {
        "num_bits": args.get("num_bits", 8),
        "type": args.get("type", "int"),
        "strategy": strategy,
        "symmetric": args.get("symmetric", True),
        "dynamic": args.get("dynamic", False),
        "group_size": size if "group" in strategy else None,
        "block_structure": block_structure,
    }


def _describe_arguments(args: dict[str, Any] | None) -> str:
    if args is None:
        return "dense"
    return " ".join(f"{key} {value}" for key, value in args.items() if value is not None)


def _without_none(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def _check_values(suffix: str, name: str, tensor: Tensor, form: Format) -> None:
    if not form.finite(name, tensor):
        raise ValueError(f"{suffix}: holds a non-finite value")
    if name == "weight_global_scale" and not bool((tensor > 0).all()):
        raise ValueError(f"{suffix}: expected a positive number")
    scales = "scale" in name or "absmax" in name
    if scales and tensor.is_floating_point() and bool((tensor.float() < 0).any()):
        raise ValueError(f"{suffix}: holds a negative scale")
