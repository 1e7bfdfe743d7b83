"""What files hold for a matrix in each format: the layouts of compressed-tensors and bitsandbytes
folders.

A folder's config.json says in `quantization_config` how its linear layers are stored. `read_layout`
turns that into a `Layout`, or refuses it in one line; `describe` writes it. A Layout gives the
tensors of one matrix W [N, K] by the suffix behind the module's name:

    int8        weight int8 [N, K], weight_scale [N, 1]                               int-quantized
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

DeepSeek's and Qwen's `quant_method: fp8` is `fp8_block` with weight_scale_inv for weight_scale, and
is read only. Scales are written in float32 and read in any float dtype (algorithms B1-B6;
compressed-tensors 0.20, bitsandbytes 0.50). What changes the computation and is not one of these is
refused: static activation scales, sparsity, transforms, a quantized KV cache, reordered columns,
several formats in one folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowroll.quant.formats import QTensor, all_finite, get_format, layout
from lowroll.quant.int4 import pack_words
from lowroll.quant.nf4 import BLOCK as NF4_BLOCK
from lowroll.quant.nf4 import LEVELS as NF4_LEVELS
from lowroll.quant.nf4 import NESTED_BLOCK, dynamic_levels

FLOATS = ("F32", "BF16", "F16")
_DTYPES = {torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.float8_e4m3fn: "F8_E4M3"}
_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
_MOST_STATE = 1 << 14  # bytes of JSON
_ADVICE = "; quantize the dense model with `lowroll quantize`, or load the dense one"


def _args(num_bits: int, type: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": type,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        **more,
    }


_INT8_TOKENS = _args(8, "int", "token", dynamic=True)
# format: (compression, arguments of the weights, arguments of the activations)
_SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int8": ("int-quantized", _args(8, "int", "channel"), _INT8_TOKENS),
    "fp8": (
        "float-quantized",
        _args(8, "float", "channel"),
        _args(8, "float", "token", dynamic=True),
    ),
    "fp8_block": (
        "float-quantized",
        _args(8, "float", "block", block_structure=[128, 128]),
        _args(8, "float", "group", group_size=128, dynamic=True),
    ),
    "int4": ("pack-quantized", _args(4, "int", "group", group_size=128), None),
    "int4_asym": (
        "pack-quantized",
        _args(4, "int", "group", group_size=128, symmetric=False),
        None,
    ),
    "w4a8": ("pack-quantized", _args(4, "int", "group", group_size=128), _INT8_TOKENS),
    "nvfp4": ("nvfp4-pack-quantized", _args(4, "float", "tensor_group", group_size=16), None),
    "mxfp4": ("mxfp4-pack-quantized", _args(4, "float", "group", group_size=32), None),
}
_SCALE_DTYPE = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
_SUFFIXES = {
    "codes": "weight",
    "scale": "weight_scale",
    "absmax": "weight.absmax",
    "nested_absmax": "weight.nested_absmax",
}

Header = tuple[tuple[int, ...] | None, tuple[str, ...]]  # shape, None for any; safetensors dtypes


@dataclass(frozen=True)
class Layout:
    """The stored tensors of a format. `renamed` maps a suffix to the one that a folder uses in its
    place.

    unpacked: 4-bit integers have a byte each.
    """

    format: str
    renamed: dict[str, str] = field(default_factory=dict)
    unpacked: bool = False

    def headers(self, shape: tuple[int, int]) -> dict[str, Header]:
        """Everything that a file holds for a matrix, by suffix."""
        tensors = get_format(self.format).encode(torch.empty(shape, device="meta"))
        found: dict[str, Header] = {}
        for name, tensor in tensors.items():
            if (suffix := self._suffix(name)) is not None:
                dtypes = FLOATS if tensor.dtype == torch.float32 else (_DTYPES[tensor.dtype],)
                found[suffix] = (tuple(tensor.shape), dtypes)
        if self.unpacked:
            found["weight"] = (shape, ("I8",))
        elif "int4" in layout(self.format):
            found["weight_shape"] = ((2,), ("I64", "I32"))
        if self.format.startswith("nf4"):
            found |= {_NF4_STATE: (None, ("U8",)), "weight.quant_map": ((16,), ("F32",))}
        if self.format == "nf4_dq":
            found["weight.nested_quant_map"] = ((256,), ("F32",))
        return found

    def decode(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> QTensor:
        """The matrix that a file's tensors (by suffix) hold. ValueError names the suffix whose
        values are wrong."""
        wanted = get_format(self.format).encode(torch.empty(shape, device="meta"))
        tensors = {}
        if self.unpacked:
            if int(stored["weight"].min()) < -8 or int(stored["weight"].max()) > 7:
                raise ValueError("weight: holds codes outside of -8..7")
            stored = {**stored, "weight": pack_words(stored["weight"])}
        for name, like in wanted.items():
            if (suffix := self._suffix(name)) is not None:
                tensors[name] = stored[suffix].to(like.dtype).contiguous()
                _check_values(suffix, name, tensors[name], self.format)
        if "weight_shape" in stored and stored["weight_shape"].tolist() != list(shape):
            raise ValueError(
                f"weight_shape: {stored['weight_shape'].tolist()} instead of {list(shape)}"
            )
        if self.format.startswith("nf4"):
            tensors |= self._decode_nf4(shape, stored)
        return QTensor(self.format, shape, tensors)

    def encode(self, q: QTensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """What a file holds for a matrix, by suffix. dtype: the model's, which bitsandbytes
        dequantizes to."""
        stored = {
            suffix: t.contiguous()
            for name, t in q.tensors.items()
            if (suffix := self._suffix(name)) is not None
        }
        if "int4" in layout(self.format):
            stored["weight_shape"] = torch.tensor(q.shape)
        if not self.format.startswith("nf4"):
            return stored
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": _name(dtype),
            "shape": list(q.shape),
        }
        stored["weight.quant_map"] = torch.tensor(NF4_LEVELS)
        if self.format == "nf4_dq":
            if len(q.tensors["nested_offset"]) > 1:
                raise ValueError(
                    "nf4_dq: a part of a fused matrix has several offsets, and files hold one"
                )
            state |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": q.tensors["nested_offset"].item(),
            }
            stored["weight.nested_quant_map"] = torch.tensor(dynamic_levels())
        stored[_NF4_STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return stored

    def _suffix(self, name: str) -> str | None:
        if name == "nested_offset":  # in the state's JSON
            return None
        suffix = _SUFFIXES.get(name, name)
        return self.renamed.get(suffix, suffix)

    def _decode_nf4(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check the levels and the state; the tensors that are in the state's JSON."""
        try:
            if stored[_NF4_STATE].numel() > _MOST_STATE:
                raise ValueError(f"{stored[_NF4_STATE].numel()} bytes")
            state = json.loads(bytes(stored[_NF4_STATE].tolist()).decode())
            wanted = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "shape": list(shape)}
            if self.format == "nf4_dq":
                wanted["nested_blocksize"] = NESTED_BLOCK
            odd = [key for key, value in wanted.items() if state.get(key) != value]
            offset = float(state.get("nested_offset", 0.0))
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{_NF4_STATE}: not the JSON of a quantization state ({error})"
            ) from None
        if odd:
            raise ValueError(
                f"{_NF4_STATE}: {odd[0]} is {state.get(odd[0])!r} instead of {wanted[odd[0]]!r}"
            )
        if not math.isfinite(offset):
            raise ValueError(f"{_NF4_STATE}: nested_offset is {offset}")
        for suffix, levels in (
            ("weight.quant_map", NF4_LEVELS),
            ("weight.nested_quant_map", dynamic_levels()),
        ):
            if suffix in stored and not torch.allclose(
                stored[suffix].cpu(), torch.tensor(levels), rtol=0, atol=1e-6
            ):
                raise ValueError(f"{suffix}: the levels are not those of {self.format}")
        device = stored[_NF4_STATE].device
        return (
            {"nested_offset": torch.tensor([offset], device=device)}
            if self.format == "nf4_dq"
            else {}
        )


def read_layout(config: dict[str, Any]) -> Layout:
    """The layout that a `quantization_config` describes. ValueError names the key that is not
    supported."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _read_compressed_tensors(config)
    if method == "bitsandbytes":
        return Layout(_read_bitsandbytes(config))
    if method == "fp8":
        blocks, scheme = config.get("weight_block_size"), config.get("activation_scheme")
        if blocks != [128, 128] or scheme != "dynamic":
            raise ValueError(
                "weight_block_size, activation_scheme: expected [128, 128] and dynamic, got "
                f"{blocks!r} and {scheme!r}{_ADVICE}"
            )
        return Layout("fp8_block", {"weight_scale": "weight_scale_inv"})
    raise ValueError(
        f"quant_method: {method!r} is not one of compressed-tensors, bitsandbytes, fp8{_ADVICE}"
    )


def describe(format: str, dtype: torch.dtype, routers: bool = False) -> dict[str, Any]:
    """The `quantization_config` of a folder whose linear layers are in `format`. dtype: the
    model's.

    routers: the model has experts, whose routers stay dense."""
    if format.startswith("nf4"):
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": format == "nf4_dq",
            "bnb_4bit_compute_dtype": _name(dtype),
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", *(["mlp.gate"] if routers else [])],
        }
    compression, weights, inputs = _SCHEMES[_described_as(format)]
    weights = {key: value for key, value in weights.items() if value is not None}
    if scale_dtype := _SCALE_DTYPE.get(layout(format)):
        weights["scale_dtype"] = scale_dtype
    if not weights["symmetric"]:
        weights["zp_dtype"] = "torch.int8"
    if inputs is not None:
        inputs = {key: value for key, value in inputs.items() if value is not None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": compression,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": compression,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *([r"re:.*\.mlp\.gate$"] if routers else [])],
    }


_WHOLE_BLOCKS = {"int4": 128, "int4_asym": 128, "w4a8": 128, "mxfp4": 32, "nf4": 64, "nf4_dq": 64}


def unread_by_transformers(format: str, columns: set[int], experts: bool) -> str | None:
    """Why transformers cannot load a folder of ours, if it cannot: 5.23, with compressed-tensors
    0.20 and bitsandbytes 0.50. lowroll reads all of them. columns: those of the quantized matrices;
    experts: whether the model has any."""
    block = _WHOLE_BLOCKS.get(_described_as(format), 1)
    odd = sorted(count for count in columns if count % block)
    if odd:
        return (
            f"transformers cannot load this folder: it wants whole blocks of {block} columns in "
            f"{format}, and "
            f"matrices here have {', '.join(map(str, odd))}"
        )
    if experts and (format.startswith("nf4") or format in ("int8", "int4_asym")):
        return f"transformers cannot load this folder: it does not read experts in {format}"
    if format == "int4_asym":
        return (
            "transformers loads this folder with CompressedTensorsConfig(dequantize=True) only: it "
            "does not run "
            "packed zero points"
        )
    return None


def _described_as(format: str) -> str:
    return format if format in _SCHEMES else layout(format)


def _read_compressed_tensors(config: dict[str, Any]) -> Layout:
    """The layout. Which modules are quantized is read from the files and not from targets and
    ignore."""
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise ValueError(f"{key}: is not supported{_ADVICE}")
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise ValueError(f"sparsity_config: sparse weights are not supported{_ADVICE}")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"config_groups: expected a group of layers, got {groups!r}{_ADVICE}")
    layouts = {
        key: _read_group(f"config_groups.{key}", group, config.get("format"))
        for key, group in groups.items()
    }
    first = next(iter(layouts.values()))
    if any(other != first for other in layouts.values()):
        words = ", ".join(f"{key} is {found.format}" for key, found in layouts.items())
        raise ValueError(f"config_groups: {words}; one format for all layers is supported{_ADVICE}")
    return first


def _read_group(where: str, group: Any, compression: object) -> Layout:
    if not isinstance(group, dict):
        raise ValueError(f"{where}: expected an object, got {group!r}")
    if group.get("output_activations"):
        raise ValueError(f"{where}.output_activations: is not supported{_ADVICE}")
    weights = _normal(f"{where}.weights", group.get("weights"))
    inputs = _normal(f"{where}.input_activations", group.get("input_activations"))
    if inputs is not None and inputs["dynamic"] is not True:
        raise ValueError(
            f"{where}.input_activations.dynamic: is {inputs['dynamic']!r}, and calibrated scales "
            f"of "
            f"activations are not supported{_ADVICE}"
        )
    for name, (stored, wanted, wanted_inputs) in _SCHEMES.items():
        if (weights, inputs) == (wanted, wanted_inputs):
            found = group.get("format") or compression
            if (name, found) == ("w4a8", "int-quantized"):
                return Layout(name, {"weight_packed": "weight"}, unpacked=True)
            if found != stored and not (found == "naive-quantized" and wanted["num_bits"] == 8):
                raise ValueError(
                    f"{where}.format: {name} is stored as {stored}, not as {found!r}{_ADVICE}"
                )
            return Layout(name)
    words = ["weights " + _words(weights), "activations " + _words(inputs)]
    raise ValueError(f"{where}: {', '.join(words)}: not one of {', '.join(_SCHEMES)}{_ADVICE}")


def _normal(where: str, args: Any) -> dict[str, Any] | None:
    """The arguments that decide what is computed, with their defaults."""
    if args is None:
        return None
    if not isinstance(args, dict):
        raise ValueError(f"{where}: expected an object, got {args!r}")
    if args.get("actorder") not in (None, False, "weight", "static"):
        raise ValueError(
            f"{where}.actorder: {args['actorder']!r} reorders columns, which is not "
            f"supported{_ADVICE}"
        )
    size, blocks = args.get("group_size"), args.get("block_structure")
    strategy = args.get("strategy") or ("channel" if size == -1 else "group" if size else "tensor")
    if isinstance(blocks, str) and all(part.isdigit() for part in blocks.split("x")):
        blocks = [int(part) for part in blocks.split("x")]
    return {
        "num_bits": args.get("num_bits", 8),
        "type": args.get("type", "int"),
        "strategy": strategy,
        "symmetric": args.get("symmetric", True),
        "dynamic": args.get("dynamic", False),
        "group_size": size if "group" in strategy else None,
        "block_structure": blocks,
    }


def _words(args: dict[str, Any] | None) -> str:
    if args is None:
        return "dense"
    return " ".join(f"{key} {value}" for key, value in args.items() if value is not None)


def _read_bitsandbytes(config: dict[str, Any]) -> str:
    four = config.get("load_in_4bit", config.get("_load_in_4bit"))
    kind, storage = (
        config.get("bnb_4bit_quant_type", "fp4"),
        config.get("bnb_4bit_quant_storage", "uint8"),
    )
    if not four:
        raise ValueError(f"load_in_4bit: LLM.int8() folders are not supported{_ADVICE}")
    for key, value, wanted in (
        ("bnb_4bit_quant_type", kind, "nf4"),
        ("bnb_4bit_quant_storage", storage, "uint8"),
    ):
        if value != wanted:
            raise ValueError(f"{key}: expected {wanted}, got {value!r}{_ADVICE}")
    return "nf4_dq" if config.get("bnb_4bit_use_double_quant") else "nf4"


def _check_values(suffix: str, name: str, tensor: Tensor, format: str) -> None:
    finite = all_finite(tensor.float()) if tensor.is_floating_point() else True
    if format.startswith("mxfp4") and name == "weight_scale":
        finite = bool((tensor < 255).all())  # e8m0's NaN
    if not finite:
        raise ValueError(f"{suffix}: holds a non-finite value")
    if name == "weight_global_scale" and not bool((tensor > 0).all()):
        raise ValueError(f"{suffix}: expected a positive number")
    if (
        ("scale" in name or "absmax" in name)
        and tensor.is_floating_point()
        and bool((tensor.float() < 0).any())
    ):
        raise ValueError(f"{suffix}: holds a negative scale")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
