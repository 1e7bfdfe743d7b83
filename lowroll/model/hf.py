"""Weights in and out of Hugging Face folders: safetensors only, HF names outside, fused matrices
inside.

`load` checks everything it can from the files' headers (names, shapes, dtypes) before it allocates,
then copies, and refuses non-finite values by tensor name; a model is returned whole or not at all.
`save` publishes a folder atomically. Save then load is bitwise, for dense and for low-bit linear
weights (`quant.layouts`): codes and scales go in and out as they are, and nothing is quantized on
the way.
"""

from __future__ import annotations

import json
import logging
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from lowroll.kernels import checksum
from lowroll.model import claims, gguf, shards
from lowroll.model.folder import (
    TOKENIZER_FILES,
    Headers,
    inside,
    read_json,
    resolve,
    some,
    tensor_headers,
)
from lowroll.model.linear import Linear
from lowroll.model.names import features_read, hf_names, is_linear, module_of, part_rows
from lowroll.model.spec import ModelSpec, read_config, read_spec
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed, transforms
from lowroll.quant.dense import over
from lowroll.quant.formats import QTensor, get_format
from lowroll.quant.layouts import (
    FLOATS,
    MixedLayout,
    StoredLayout,
    describe,
    describe_mixed,
    read_layout,
)
from lowroll.quant.mixed import Mixed
from lowroll.quant.packed import PackedWeights
from lowroll.quant.scheme import Header
from lowroll.quant.table import OWN
from lowroll.types import printable

log = logging.getLogger(__name__)
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Layouts = StoredLayout | PackedWeights | MixedLayout


def load(
    source: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    weights: str | None = None,
) -> Transformer:
    """A model from a Hugging Face folder or hub id, in `dtype` (default: float32 on CPU, bfloat16
    on CUDA).

    The linear layers of a low-bit folder are the QTensors that it holds; such a model is frozen.
    weights: the format in which the layers of a dense folder are kept, frozen too (a mixed one says
    which for each layer); each is quantized when it arrives, so that no more than a few of them are
    ever dense. A PEFT adapter folder gives the base that it states (`lowroll.model.base`), or else
    the one that its adapter_config.json names, with the adapter on top.

    ValueError names the file, tensors or key for: an unsupported config, missing, extra or
    mis-shaped tensors, non-finite values, wrong dtypes, damaged files, `.bin`/`.pt` weights, and
    repositories with their own code.
    """
    folder = resolve(source)
    if (folder / "adapter_config.json").is_file():
        from lowroll.model import base

        return base.load(folder, device, dtype, weights)
    spec, layout, files = read_headers(folder)
    if dtype is None:
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    own = _own_format(folder, spec, layout, dtype)
    kept = own or weights
    if isinstance(layout, PackedWeights) and own is None:
        log.warning("%s: %s weights that no format here holds become dense", folder, layout.words)
    bits = 8 * dtype.itemsize if kept is None else min(8 * dtype.itemsize, get_format(kept).bits)
    claims.check_memory(folder / "config.json", spec, bits, device)
    model = Transformer(spec, "meta", dtype)
    shapes = {
        name: {part: (part_rows(spec, part, whole[0]), *whole[1:]) for part in parts}
        for name, parts, whole in hf_names(spec)
    }
    amax: dict[str, Tensor] = {}
    for name, stored in zip(
        shapes, shards.stream(files, _batches(shapes, layout), device), strict=True
    ):
        owner = model.get_submodule(name.rpartition(".")[0])
        leaf = name.rpartition(".")[2]
        linear = owner if isinstance(owner, Linear) and leaf == "weight" else None
        mine = None if layout is None or linear is None else layout.of(module_of(shapes[name]))
        if mine is not None and linear is not None:
            parts = _decode_low_bit(stored, files, mine, shapes[name])
            if mine.format is not None:
                linear.set_weight(_stack(mine.format, parts))
                continue
            stored = parts
        whole = shards.join(list(stored.values()), dtype)
        extents = checksum.amax(whole.split([len(part) for part in stored.values()]))
        amax |= dict(zip(stored, extents, strict=True))
        if kept is not None and linear is not None:
            form = get_format(kept).of(name.removesuffix(".weight")).name
            linear.set_weight(_quantize(form, whole, torch.cat(extents).amax(0, keepdim=True)))
        else:
            setattr(owner, leaf, nn.Parameter(whole, requires_grad=kept is None))
    for part, finite in zip(amax, checksum.finite(list(amax.values())), strict=True):
        if not finite:
            raise ValueError(
                f"{files.get(part, folder)}: tensor {part} holds a value that is not finite in "
                f"{_DTYPES.get(dtype, dtype)}"
            )
    model.freqs = model.freqs.to(device)
    return model.eval()


def read_headers(folder: Path) -> tuple[ModelSpec, Layouts | None, dict[str, Path]]:
    """Read the spec of a folder, how it stores its linear layers, and the file of each tensor,
    checked as far as headers go. ValueError as `load` says, but for the values of the weights."""
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
    claims.check_files(folder / "config.json", spec, len(files), stored)
    _check_headers(folder, spec, files, layout)
    return spec, layout, files


def stored(folder: Path) -> tuple[ModelSpec, dict[str, Path], dict[str, Tensor]]:
    """Read the spec of a dense folder, the file of each of its weights, and the weights on the CPU
    as the files hold them, under their Hugging Face names. ValueError as `read_headers` says, and
    for a low-bit folder."""
    spec, layout, files = read_headers(folder)
    if layout is not None:
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config: its weights are no dense ones"
        )
    names = [part for _, parts, _ in hf_names(spec) for part in parts]
    held = {path: load_file(path) for path in sorted({files[name] for name in names})}
    return spec, {name: files[name] for name in names}, {n: held[files[n]][n] for n in names}


def _quantize(format: str, w_NK: Tensor, amax_1: Tensor) -> QTensor:
    """The matrix in `format`: its own storage, when that is what the format holds."""
    mine = over(w_NK)
    if mine is not None and mine.format == format:
        return mine
    return (
        get_format(format)
        .empty((w_NK.shape[0], w_NK.shape[1]), w_NK.device)
        .quantize_(w_NK, amax_1)
    )


def _own_format(
    folder: Path, spec: ModelSpec, layout: Layouts | None, dtype: torch.dtype
) -> str | None:
    """The format of a folder's linear layers; None when they are dense, or become so. dtype: of
    layers that are dense beside others. ValueError for parts of one matrix that differ."""
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


def low_bit_format(folder: Path, dtype: torch.dtype | None = None) -> str | None:
    """The format of a folder's linear layers (of the base that it states, when it is an adapter
    folder); None when they are dense. dtype: of layers that are dense beside others, the folder's
    own unless it is given."""
    if (folder / "adapter_config.json").is_file():
        from lowroll.model import base, lora

        stated = base.read(folder)
        if stated is not None and stated.weights is not None:
            return stated.weights if stated.low_bit else None
        folder = resolve(lora.base_of(folder))
    layout = read_folder_layout(folder)
    if not isinstance(layout, MixedLayout):
        return None if layout is None else layout.format
    config = read_config(folder)
    said = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    own = dtype or next((t for t, name in _DTYPES.items() if name == said), torch.float32)
    return _own_format(folder, read_spec(folder), layout, own)


def exact_format(folder: Path, dtype: torch.dtype | None = None) -> str | None:
    """The low-bit format that holds the folder's linear layers exactly: that of `low_bit_format`, or
    of the GGUF file that a dense folder was made of. None when there is none. dtype: in which the
    dense weights will be read; a file's numbers are exact in float32 alone."""
    own = low_bit_format(folder, dtype)
    return gguf.format_of(folder) if own is None and dtype in (None, torch.float32) else own


def read_folder_layout(folder: Path) -> Layouts | None:
    """Read how a folder stores its linear layers; None when they are dense. ValueError names file
    and key."""
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


def _batches(
    shapes: dict[str, dict[str, tuple[int, ...]]], layout: Layouts | None
) -> list[list[str]]:
    """The stored tensors of every parameter."""
    return [
        [name for part, shape in parts.items() for name in _stored_names(part, shape, layout)]
        for parts in shapes.values()
    ]


def _stored_names(part: str, shape: tuple[int, ...], layout: Layouts | None) -> dict[str, Header]:
    """Return the headers of what the files hold for one HF tensor, by name."""
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


def _decode_low_bit(
    tensors: dict[str, Tensor],
    files: dict[str, Path],
    layout: StoredLayout | PackedWeights,
    shapes: dict[str, tuple[int, ...]],
) -> dict[str, Any]:
    """The parts of a matrix, each as its file holds it: QTensors, or dense where the layout has no
    format."""
    parts = {}
    for part, (rows, columns) in shapes.items():
        module = part.removesuffix(".weight")
        names = _stored_names(part, (rows, columns), layout)
        stored = {name.removeprefix(f"{module}."): tensors[name] for name in names}
        try:
            parts[part] = layout.decode((rows, columns), stored)
        except ValueError as error:
            raise ValueError(f"{files[next(iter(names))]}: {module}.{error}") from None
    return parts


def _stack(format: str, parts: dict[str, QTensor]) -> QTensor:
    try:
        return get_format(format).stack(list(parts.values()))
    except ValueError as error:
        raise ValueError(f"{', '.join(parts)}: {error}") from None


def _weight_files(folder: Path) -> dict[str, Path]:
    """HF tensor name -> safetensors file, from the single file or the index."""
    index, single = folder / shards.INDEX, folder / shards.WEIGHTS
    if single.is_file():  # it wins over an index beside it, as in transformers
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
    # Old Llama checkpoints store the rotary table; a tied checkpoint may repeat its embedding as
    # lm_head.
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
    """Return the headers of what the files must hold, by HF tensor name."""
    wanted: dict[str, Header] = {}
    for _, parts, shape in hf_names(spec):
        for part in parts:
            wanted |= _stored_names(part, (part_rows(spec, part, shape[0]), *shape[1:]), layout)
    return wanted


def _check_quantized(folder: Path, found: Headers, wanted: dict[str, Header]) -> None:
    """Are exactly the linear layers quantized that are said to be, in the order of their columns?"""
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


def state(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under their HF names, fused matrices cut: dense tensors, or the codes and
    scales of files.

    ValueError when an adapter rides on the weights (it would be lost without a word), or when a
    block of the format reaches over the border of two parts.
    """
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
            continue
        try:
            cut = get_format(weight.format).cut(weight, rows)
        except ValueError as error:
            raise ValueError(f"{', '.join(parts)}: {error}") from None
        for part, piece in zip(parts, cut, strict=True):
            stored = StoredLayout(weight.format).encode(piece, model.dtype)
            tensors |= {
                f"{part.removesuffix('.weight')}.{suffix}": tensor
                for suffix, tensor in stored.items()
            }
    return tensors


def copy_tokenizer(source: str | Path | None, target: Path) -> None:
    """Copy the tokenizer files of a model folder, if one is given. ValueError for a link that leads
    out of it."""
    for name in TOKENIZER_FILES:
        if source is not None and (path := inside(Path(source), name)) is not None:
            shutil.copyfile(path, target / name)


def save(
    model: Transformer,
    folder: str | Path,
    tokenizer_from: str | Path | None = None,
    step: int | None = None,
) -> Path:
    """Publish the model as a Hugging Face folder, with the tokenizer files of another folder beside
    it.

    Linear layers are stored as they are: dense, or in their low-bit format with a
    `quantization_config`. The folder appears whole or not at all, and its manifest says of which
    step of a run it is. FileExistsError when it exists already; ValueError as `state` says.
    """
    from lowroll.checkpoint.publish import publish_folder

    files = contents(model)
    return publish_folder(
        Path(folder),
        lambda target: write(files, target, tokenizer_from),
        {"kind": "model"} | ({} if step is None else {"step": step}),
    )


def contents(model: Transformer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a folder. ValueError as `state` says."""
    config: dict[str, Any] = {**model.spec.config, "dtype": _DTYPES[model.dtype]}
    config.pop("torch_dtype", None)
    form = None if model.weight_format is None else get_format(model.weight_format)
    if isinstance(form, Mixed):
        config["quantization_config"] = describe_mixed(
            _modules(model, form), features_read(model.spec)
        )
    elif form is not None and not form.dense:
        config["quantization_config"] = describe(
            form.name, model.dtype, bool(model.spec.num_experts), features_read(model.spec)
        )
    return config, state(model)


def _modules(model: Transformer, form: Mixed) -> dict[str, list[str]]:
    """The modules of each format, as files call them. ValueError for a dense format that is not the
    model's: files hold it in another dtype."""
    found: dict[str, list[str]] = {}
    for name, parts, _ in hf_names(model.spec):
        if is_linear(parts[0]):
            mine = form.of(name.removesuffix(".weight"))
            if mine.dense and mine.dtype != model.dtype:
                raise ValueError(
                    f"{name}: it is {mine.name}, and the folder's dtype is {model.dtype}"
                )
            found.setdefault(mine.name, []).extend(part.removesuffix(".weight") for part in parts)
    return found


def write(
    files: tuple[dict[str, Any], dict[str, Tensor]], target: Path, tokenizer_from: str | Path | None
) -> None:
    """Write the `contents` of a model into an existing folder."""
    config, tensors = files
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards.write(tensors, target)
    copy_tokenizer(tokenizer_from, target)
