"""The names, shapes, dtypes and formats of a model folder, checked against its file headers before
allocation."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from lowroll.model import adapter_base, gguf, shards, size_checks
from lowroll.model.files import Headers, read_json, some, tensor_headers
from lowroll.model.folder import resolve
from lowroll.model.names import features_read, hf_names, is_linear, part_rows
from lowroll.model.spec import ModelSpec, read_config, read_spec
from lowroll.quant import mixed, transforms
from lowroll.quant.layouts import (
    FLOATS,
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
    ValueError as for `hf.load`, except values."""
    spec = read_spec(folder)
    layout = read_folder_layout(folder)
    if isinstance(layout, StoredLayout | MixedLayout) and layout.rotated:
        reads = features_read(spec)
        if isinstance(layout, MixedLayout):
            reads = {name: reads.get(name.rpartition(".")[2], 1) for name in layout.rotating}
        try:
            transforms.check(layout.rotated, reads)
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: quantization_config: {error}") from None
    files = _weight_files(folder)
    stored = sum(path.stat().st_size for path in set(files.values()))
    size_checks.check_files(folder / "config.json", spec, len(files), stored)
    _check_headers(folder, spec, files, layout)
    return spec, layout, files


def read_folder_layout(folder: Path) -> Layouts | None:
    """Read the layout of a folder's linear layers; None when dense. ValueError names file and
    key."""
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
    """Return the format of a folder's linear layers (for an adapter folder, of its base), or None
    when dense. dtype: of dense layers in a mixed format, by default the folder's."""
    if (folder / "adapter_config.json").is_file():
        stated = adapter_base.read(folder)
        if stated is not None and stated.weights is not None:
            return stated.weights if stated.low_bit else None
        folder = resolve(adapter_base.base_of(folder))
    layout = read_folder_layout(folder)
    if not isinstance(layout, MixedLayout):
        return None if layout is None else layout.format
    config = read_config(folder)
    said = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    own = dtype or next((t for t, name in DTYPES.items() if name == said), torch.float32)
    return own_format(folder, read_spec(folder), layout, own)


def exact_format(folder: Path, dtype: torch.dtype | None = None) -> str | None:
    """Return the low-bit format that holds the linear layers exactly: that of `low_bit_format`, or
    of a dense folder's GGUF file, or None. dtype: in which dense weights will be read; only float32
    keeps a GGUF file's numbers exactly."""
    own = low_bit_format(folder, dtype)
    return gguf.format_of(folder) if own is None and dtype in (None, torch.float32) else own


def own_format(
    folder: Path, spec: ModelSpec, layout: Layouts | None, dtype: torch.dtype
) -> str | None:
    """Return the format of a folder's linear layers; None when they are or become dense. dtype: of
    dense layers in a mixed format. ValueError for parts of one matrix that differ."""
    if not isinstance(layout, MixedLayout):
        return None if layout is None else layout.format
    assignment, sizes = {}, {}
    for name, parts, shape in hf_names(spec):
        if not is_linear(parts[0]):
            continue
        mine, *others = [layout.of(part.removesuffix(".weight")) for part in parts]
        if any(other != mine for other in others):
            raise ValueError(
                f"{folder / 'config.json'}: quantization_config: {', '.join(parts)}: parts of one "
                "matrix here, in several formats; quantize the dense model with `lowroll quantize`"
            )
        layer = name.removesuffix(".weight")
        assignment[layer] = OWN if mine is None else mine.format
        sizes[layer] = prod(shape)
    own = mixed.register(assignment, sizes, dtype)
    return None if own == OWN else own


def stored_names(part: str, shape: tuple[int, ...], layout: Layouts | None) -> dict[str, Header]:
    if layout is None or not is_linear(part):
        return {part: (shape, FLOATS)}
    module = part.removesuffix(".weight")
    mine = layout.of(module)
    if mine is None:
        return {part: (shape, FLOATS)}
    rows, columns = shape
    return {
        f"{module}.{suffix}": header for suffix, header in mine.headers((rows, columns)).items()
    }


def _weight_files(folder: Path) -> dict[str, Path]:
    index, single = folder / shards.INDEX, folder / shards.WEIGHTS
    if single.is_file():  # it precedes an index, as in transformers
        return dict.fromkeys(tensor_headers(single), single)
    if index.is_file():
        try:
            weight_map = read_json(index)["weight_map"]
            names = {str(tensor): str(shard) for tensor, shard in weight_map.items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index}: not a safetensors index ({type(error).__name__}: {printable(error)})"
            ) from None
        for shard in sorted(set(names.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ValueError(
                    f"{index}: shard name {printable(repr(shard), 200)} is not a plain "
                    ".safetensors file name"
                )
            if not (folder / shard).is_file():
                raise ValueError(
                    f"{index}: shard {printable(shard, 200)} is missing from the folder"
                )
        stored: dict[str, Path] = {}
        for shard in sorted(set(names.values())):
            stored.update(dict.fromkeys(tensor_headers(folder / shard), folder / shard))
        lies = sorted(
            t for t in set(names) | set(stored) if stored.get(t) != folder / names.get(t, "")
        )
        if lies:
            raise ValueError(f"{index}: the index and the shards disagree about {some(lies)}")
        return stored
    foreign = sorted(
        p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern)
    )
    if foreign:
        raise ValueError(
            f"{folder}: weights only as {some(foreign)}; lowroll reads safetensors (a pickle can "
            "run code when it is opened), and a .gguf file that is named itself. Convert them first"
        )
    raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json")


def _check_headers(
    folder: Path, spec: ModelSpec, files: dict[str, Path], layout: Layouts | None
) -> None:
    found: Headers = {}
    for path in sorted(set(files.values())):
        found.update(tensor_headers(path))
    wanted = _wanted_headers(spec, layout)
    if layout is not None:
        _check_quantized(folder, found, wanted)
    missing = [name for name in wanted if name not in found]
    # Old Llama checkpoints store the rotary table; tied ones may repeat the embedding as lm_head.
    extra = [
        name
        for name in found
        if name not in wanted
        and not name.endswith("rotary_emb.inv_freq")
        and not (spec.tie_embeddings and name == "lm_head.weight")
    ]
    shapes = [
        f"{name} {list(found[name][0])} instead of {list(shape)}"
        for name, (shape, _) in wanted.items()
        if name in found and shape is not None and found[name][0] != shape
    ]
    dtypes = [
        f"{name} ({found[name][1]} instead of {' or '.join(dtypes)})"
        for name, (_, dtypes) in wanted.items()
        if name in found and found[name][1] not in dtypes
    ]
    for problem, names in (
        ("missing tensors", missing),
        ("unexpected tensors", extra),
        ("tensors of the wrong shape", shapes),
        ("tensors of the wrong dtype", dtypes),
    ):
        if names:
            raise ValueError(f"{folder}: {problem}: {some(names)}")
    if spec.tie_embeddings and "lm_head.weight" in found:
        with safe_open(files["lm_head.weight"], framework="pt") as head:
            lm_head = head.get_tensor("lm_head.weight")
        with safe_open(files["model.embed_tokens.weight"], framework="pt") as body:
            if not torch.equal(lm_head, body.get_tensor("model.embed_tokens.weight")):
                raise ValueError(
                    f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                    "model.embed_tokens.weight"
                )


def _wanted_headers(spec: ModelSpec, layout: Layouts | None) -> dict[str, Header]:
    wanted: dict[str, Header] = {}
    for _, parts, shape in hf_names(spec):
        for part in parts:
            wanted |= stored_names(part, (part_rows(spec, part, shape[0]), *shape[1:]), layout)
    return wanted


def _check_quantized(folder: Path, found: Headers, wanted: dict[str, Header]) -> None:
    """Check that exactly the declared linear layers are quantized, in column order."""
    dense = [
        name
        for name in found
        if is_linear(name)
        and found[name][1] in FLOATS
        and (name not in wanted or found[name][1] not in wanted[name][1])
    ]
    if dense:
        raise ValueError(
            f"{folder}: quantization_config leaves {some(dense)} dense; one format for all linear "
            "layers is supported. Quantize the dense model with `lowroll quantize`"
        )
    odd = [
        name
        for name in found
        if name.startswith("lm_head.") and name not in ("lm_head.weight", "lm_head.bias")
    ]
    if odd:
        raise ValueError(
            f"{folder}: quantization_config includes lm_head ({some(odd)}), which must stay dense. "
            "Quantize the dense model with `lowroll quantize`"
        )
    for suffix, what in (
        ("g_idx", "reordered columns (actorder)"),
        ("input_scale", "calibrated scales of activations"),
        ("input_global_scale", "calibrated scales of activations"),
    ):
        odd = [name for name in found if name.endswith(suffix) and name not in wanted]
        if odd:
            raise ValueError(
                f"{folder}: {some(odd)}: {what} are not supported. Quantize the dense model with "
                "`lowroll quantize`"
            )
