"""The tensors and formats of a model folder, checked by file headers before allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from lowroll.kernels.quantize import rotation
from lowroll.model import adapter_base, gguf, shards, size_checks, stacked
from lowroll.model.files import Headers, read_json, some, tensor_headers
from lowroll.model.folder import resolve
from lowroll.model.names import (
    features_read,
    is_linear,
    part_rows,
    stored_hf_names,
    widths_of_down,
)
from lowroll.model.spec import ModelSpec, read_config, read_spec
from lowroll.quant import mixed, transforms
from lowroll.quant.layouts import (
    FLOATS,
    ExpertsInMXFloat4,
    MixedLayout,
    StoredLayout,
    read_layout,
)
from lowroll.quant.packed import PackedWeights
from lowroll.quant.scheme import Header
from lowroll.quant.table import OWN
from lowroll.types import printable

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Layouts = StoredLayout | PackedWeights | MixedLayout


def read_headers(folder: Path) -> tuple[ModelSpec, Layouts | None, dict[str, Path]]:
    """Read a folder's spec, the layout of its linear layers, and the file of each tensor.
    ValueError as `hf.load`, but not for values."""
    spec = read_spec(folder)
    layout = read_folder_layout(folder)
    if isinstance(layout, StoredLayout | MixedLayout) and layout.rotated:
        refuse_two_rotations(spec, folder / "config.json")
        in_features = features_read(spec)
        if isinstance(layout, MixedLayout):
            in_features = {
                name: in_features.get(name.rpartition(".")[2], 1) for name in layout.rotating
            }
        try:
            transforms.check(layout.rotated, in_features)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: quantization_config: {error}") from None
    files = _weight_files(folder)
    spec = replace(spec, stored_stacked=stacked.are_in(files, spec))
    stored_bytes = sum(path.stat().st_size for path in set(files.values()))
    size_checks.check_files(folder / "config.json", spec, len(files), stored_bytes)
    _check_headers(folder, spec, files, layout)
    return spec, layout, files


def refuse_two_rotations(spec: ModelSpec, what: object) -> None:
    """Raise ValueError if down projections would be rotated in two widths, as a folder has one."""
    widths = {rotation.width(size) for size in widths_of_down(spec)}
    if len(widths) > 1:
        raise ValueError(
            f"{what}: {spec.architecture} has down projections that are rotated in blocks of "
            f"{' and '.join(map(str, sorted(widths)))}, and a folder has one width for all"
        )


def read_folder_layout(folder: Path) -> Layouts | None:
    """Read the layout of a folder; None: dense. ValueError names file and key."""
    config = read_config(folder).get("quantization_config")
    if not config:
        return None
    try:
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, got {config!r}")
        return read_layout(config)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config: {printable(error)}"
        ) from None


def low_bit_format(folder: Path, dtype: torch.dtype | None = None) -> str | None:
    """Return the format of the linear layers of a folder, or of an adapter's base; None: dense.
    dtype: of dense layers in a mixed format, by default the folder's."""
    if (folder / "adapter_config.json").is_file():
        base = adapter_base.read(folder)
        if base is not None and base.weights is not None:
            return base.weights if base.low_bit else None
        folder = resolve(adapter_base.base_of(folder))
    layout = read_folder_layout(folder)
    if not isinstance(layout, MixedLayout):
        return None if layout is None else layout.format
    config = read_config(folder)
    dtype_name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtypes_by_name = {name: known_dtype for known_dtype, name in DTYPES.items()}
    dense_dtype = dtype or dtypes_by_name.get(dtype_name, torch.float32)
    return own_format(folder, read_spec(folder), layout, dense_dtype)


def exact_format(folder: Path, dtype: torch.dtype | None = None) -> str | None:
    """Return the low-bit format, of the folder or its GGUF file, that holds the linear layers
    exactly. dtype: of dense weights; only float32 keeps a GGUF file's numbers."""
    folder_format = low_bit_format(folder, dtype)
    return (
        gguf.format_of(folder)
        if folder_format is None and dtype in (None, torch.float32)
        else folder_format
    )


def own_format(
    folder: Path, spec: ModelSpec, layout: Layouts | None, dtype: torch.dtype
) -> str | None:
    """Return the format of a folder's linear layers, a registered mixed one if they differ; None:
    dense. dtype: as in `low_bit_format`. ValueError if parts of one matrix differ."""
    if not isinstance(layout, MixedLayout):
        return None if layout is None else layout.format
    assignment, sizes = {}, {}
    for name, parts, shape in stored_hf_names(spec):
        if not is_linear(parts[0]):
            continue
        part_layout, *other_layouts = [layout.of(part.removesuffix(".weight")) for part in parts]
        if any(other != part_layout for other in other_layouts):
            raise ValueError(
                f"{folder / 'config.json'}: quantization_config: {', '.join(parts)}: parts of one "
                "matrix here, in several formats; quantize the dense model with `lowroll quantize`"
            )
        layer = name.removesuffix(".weight")
        assignment[layer] = OWN if part_layout is None else part_layout.format
        sizes[layer] = prod(shape)
    folder_format = mixed.register(assignment, sizes, dtype)
    return None if folder_format == OWN else folder_format


def stored_names(part: str, shape: tuple[int, ...], layout: Layouts | None) -> dict[str, Header]:
    """Return the headers of a parameter's stored tensors, given its HF name."""
    module = part.removesuffix(".weight")
    module_layout = None if layout is None or not is_linear(part) else layout.of(module)
    if module_layout is None:
        return {part: (shape, FLOATS)}
    rows, columns = shape
    return {
        f"{module}.{suffix}": header
        for suffix, header in module_layout.headers((rows, columns)).items()
    }


def _weight_files(folder: Path) -> dict[str, Path]:
    index, single_file = folder / shards.INDEX, folder / shards.WEIGHTS
    if single_file.is_file():  # it precedes an index, as in transformers
        return dict.fromkeys(tensor_headers(single_file), single_file)
    if index.is_file():
        return _indexed_files(index)
    other_weight_files = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern)
    )
    if other_weight_files:
        raise ValueError(
            f"{folder}: weights only as {some(other_weight_files)}; lowroll reads safetensors (a pickle can "
            "run code when it is opened), and a .gguf file that is named itself. Convert them first"
        )
    raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json")


def _indexed_files(index: Path) -> dict[str, Path]:
    folder = index.parent
    try:
        weight_map = read_json(index)["weight_map"]
        shard_by_tensor = {str(tensor): str(shard) for tensor, shard in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index}: not a safetensors index ({type(error).__name__}: {printable(error)})"
        ) from None
    shards_named = sorted(set(shard_by_tensor.values()))
    for shard in shards_named:
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{index}: shard name {printable(repr(shard), 200)} is not a plain "
                ".safetensors file name"
            )
        if not (folder / shard).is_file():
            raise ValueError(f"{index}: shard {printable(shard, 200)} is missing from the folder")
    stored: dict[str, Path] = {}
    for shard in shards_named:
        stored.update(dict.fromkeys(tensor_headers(folder / shard), folder / shard))
    indexed = {tensor: folder / shard for tensor, shard in shard_by_tensor.items()}
    inconsistent = sorted(
        tensor
        for tensor in indexed.keys() | stored.keys()
        if stored.get(tensor) != indexed.get(tensor)
    )
    if inconsistent:
        raise ValueError(f"{index}: the index and the shards disagree about {some(inconsistent)}")
    return stored


def _check_headers(
    folder: Path, spec: ModelSpec, files: dict[str, Path], layout: Layouts | None
) -> None:
    found_headers: Headers = {}
    for path in sorted(set(files.values())):
        found_headers.update(tensor_headers(path))
    wanted_headers: dict[str, Header] = {}
    for headers in stored_parameters(spec, layout).values():
        wanted_headers |= headers
    if layout is not None:
        _check_quantized(folder, found_headers, wanted_headers)
    # Old Llama checkpoints store the rotary table; tied ones may repeat the embedding.
    unexpected = [
        name
        for name in found_headers
        if name not in wanted_headers
        and not name.startswith(spec.unused)
        and not name.endswith("rotary_emb.inv_freq")
        and not (spec.tie_embeddings and name == "lm_head.weight")
    ]
    require_headers(folder, found_headers, wanted_headers, unexpected)
    if spec.tie_embeddings and "lm_head.weight" in found_headers:
        _check_tied(folder, f"{spec.stored_prefix}embed_tokens.weight", files)


def require_headers(
    where: Path,
    found: Headers,
    wanted: Mapping[str, Header],
    unexpected: Sequence[str],
    shapes_of: str = "",
) -> None:
    """Raise ValueError for missing or `unexpected` tensors, or unwanted shapes or dtypes.
    shapes_of: for the message."""
    present = [name for name in wanted if name in found]
    shapes = [
        f"{name} {list(found[name][0])} instead of {list(wanted[name][0] or ())}"
        for name in present
        if wanted[name][0] not in (None, found[name][0])
    ]
    dtypes = [
        f"{name} ({found[name][1]} instead of {' or '.join(wanted[name][1])})"
        for name in present
        if found[name][1] not in wanted[name][1]
    ]
    for problem, names in (
        ("missing tensors", [name for name in wanted if name not in found]),
        ("unexpected tensors", unexpected),
        (f"tensors of the wrong shape{shapes_of}", shapes),
        ("tensors of the wrong dtype", dtypes),
    ):
        if names:
            raise ValueError(f"{where}: {problem}: {some(names)}")


def _check_tied(folder: Path, embedding: str, files: dict[str, Path]) -> None:
    with safe_open(files["lm_head.weight"], framework="pt") as lm_head_file:
        lm_head = lm_head_file.get_tensor("lm_head.weight")
    with safe_open(files[embedding], framework="pt") as embedding_file:
        if not torch.equal(lm_head, embedding_file.get_tensor(embedding)):
            raise ValueError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                f"{embedding}"
            )


def stored_parameters(spec: ModelSpec, layout: Layouts | None) -> dict[str, dict[str, Header]]:
    """Return the headers of each parameter's tensors, by internal name. ValueError as
    `StackedTensor.headers`."""
    stacks = stacked.stored_tensors(spec)
    in_mxfp4 = isinstance(layout, ExpertsInMXFloat4)
    parameters: dict[str, dict[str, Header]] = {}
    for name, parts, shape in stored_hf_names(spec):
        if name in stacks:
            parameters[name] = stacks[name].headers(in_mxfp4)
            continue
        parameters[name] = {}
        for part in parts:
            part_shape = (part_rows(spec, part, shape[0]), *shape[1:])
            parameters[name] |= stored_names(part, part_shape, layout)
    return parameters


def _check_quantized(folder: Path, found: Headers, wanted: dict[str, Header]) -> None:
    dense_linears = [
        name
        for name in found
        if is_linear(name)
        and found[name][1] in FLOATS
        and (name not in wanted or found[name][1] not in wanted[name][1])
    ]
    codes_of_head = [
        name
        for name in found
        if name.startswith("lm_head.") and name not in ("lm_head.weight", "lm_head.bias")
    ]
    others = [name for name in found if name not in wanted]
    reordering = [name for name in others if name.endswith("g_idx")]
    input_scales = [name for name in others if name.endswith(("input_scale", "input_global_scale"))]
    for problem, names in (
        ("quantization_config leaves layers dense, and needs one format for all", dense_linears),
        ("quantization_config includes lm_head, which must stay dense", codes_of_head),
        ("reordered columns (actorder) are not supported", reordering),
        ("calibrated scales of activations are not supported", input_scales),
    ):
        if names:
            raise ValueError(
                f"{folder}: {problem}: {some(names)}. Quantize the dense model with `lowroll quantize`"
            )
