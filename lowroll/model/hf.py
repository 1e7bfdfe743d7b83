"""Weights in and out of Hugging Face folders: safetensors only, HF names outside, fused matrices inside.

`load` checks everything it can from the files' headers (names, shapes, dtypes) before it allocates, then copies, and
refuses non-finite values by tensor name; a model is returned whole or not at all. `save` publishes a folder
atomically. Save then load is bitwise.
"""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lowroll.model.spec import ModelSpec, read_spec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import all_finite

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
                   "tokenizer.model", "added_tokens.json", "chat_template.jinja", "generation_config.json")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_FLOATS = ("F32", "BF16", "F16")


def resolve(source: str | Path) -> Path:
    """A local model folder, downloading a hub id when the path does not exist. ValueError says what was tried."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    name = str(source)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"model: {name!r} is neither a folder nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.jinja", "merges.txt"]))
    except Exception as error:   # the hub's errors are many; the user needs one line
        raise ValueError(f"model: {name!r} is no local folder, and the hub could not deliver it "
                         f"({type(error).__name__}: {str(error).splitlines()[0]})") from error


def hf_names(spec: ModelSpec) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """(internal name, HF names of the stacked parts, shape of the whole) of every parameter."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, wide = spec.hidden_size, spec.intermediate_size
    yield "embedding", ["model.embed_tokens.weight"], (spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        yield f"{ours}.input_norm.weight", [f"{theirs}.input_layernorm.weight"], (hidden,)
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        yield f"{ours}.qkv.weight", [f"{part}.weight" for part in qkv], (q + 2 * kv, hidden)
        if spec.qkv_bias:
            yield f"{ours}.qkv.bias", [f"{part}.bias" for part in qkv], (q + 2 * kv,)
        if spec.qk_norm:
            yield f"{ours}.q_norm.weight", [f"{attention}.q_norm.weight"], (spec.head_dim,)
            yield f"{ours}.k_norm.weight", [f"{attention}.k_norm.weight"], (spec.head_dim,)
        yield f"{ours}.o.weight", [f"{attention}.o_proj.weight"], (hidden, q)
        if spec.o_bias:
            yield f"{ours}.o.bias", [f"{attention}.o_proj.bias"], (hidden,)
        yield f"{ours}.post_attention_norm.weight", [f"{theirs}.post_attention_layernorm.weight"], (hidden,)
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        yield f"{ours}.gate_up.weight", [f"{part}.weight" for part in gate_up], (2 * wide, hidden)
        yield f"{ours}.down.weight", [f"{mlp}.down_proj.weight"], (hidden, wide)
        if spec.mlp_bias:
            yield f"{ours}.gate_up.bias", [f"{part}.bias" for part in gate_up], (2 * wide,)
            yield f"{ours}.down.bias", [f"{mlp}.down_proj.bias"], (hidden,)
    yield "norm.weight", ["model.norm.weight"], (hidden,)
    if not spec.tie_embeddings:
        yield "lm_head", ["lm_head.weight"], (spec.vocab_size, hidden)


def part_rows(spec: ModelSpec, hf_name: str, whole: int) -> int:
    """Rows that one HF tensor takes in its fused matrix of `whole` rows."""
    part = hf_name.rsplit(".", 2)[-2]
    return {"q_proj": spec.num_heads * spec.head_dim, "k_proj": spec.num_kv_heads * spec.head_dim,
            "v_proj": spec.num_kv_heads * spec.head_dim, "gate_proj": spec.intermediate_size,
            "up_proj": spec.intermediate_size}.get(part, whole)


def load(source: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """A model from a Hugging Face folder or hub id, in `dtype` (default: float32 on CPU, bfloat16 on CUDA).

    A PEFT adapter folder gives the base that its adapter_config.json names, with the adapter on top.

    ValueError names the file, tensors or key for: an unsupported config, missing, extra or mis-shaped tensors,
    non-finite values, non-float dtypes, damaged files, `.bin`/`.pt` weights, and repositories with their own code.
    """
    folder = resolve(source)
    if (folder / "adapter_config.json").is_file():
        from lowroll.model import lora

        return lora.load(load(lora.base_of(folder), device, dtype), folder).eval()
    spec = read_spec(folder)
    files = _weight_files(folder)
    _check_headers(folder, spec, files)
    if dtype is None:
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    model = Transformer(spec, device, dtype)
    parameters = dict(model.named_parameters())
    opened = {path: safe_open(path, framework="pt") for path in set(files.values())}
    with torch.no_grad():
        for name, parts, shape in hf_names(spec):
            start = 0
            for part in parts:
                value = opened[files[part]].get_tensor(part).to(dtype)
                if not all_finite(value):
                    raise ValueError(f"{files[part]}: tensor {part} holds a value that is not finite in "
                                     f"{_DTYPES.get(dtype, dtype)}")
                rows = part_rows(spec, part, shape[0])
                parameters[name][start:start + rows].copy_(value)
                start += rows
    return model.eval()


def _weight_files(folder: Path) -> dict[str, Path]:
    """HF tensor name -> safetensors file, from the single file or the index."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():                      # it wins over an index beside it, as in transformers
        return dict.fromkeys(_shapes(single), single)
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(tensor): str(shard) for tensor, shard in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index}: not a safetensors index ({type(error).__name__}: {error})") from None
        for shard in sorted(set(names.values())):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ValueError(f"{index}: shard name {shard!r} is not a plain .safetensors file name")
            if not (folder / shard).is_file():
                raise ValueError(f"{index}: shard {shard} is missing from the folder")
        stored: dict[str, Path] = {}
        for shard in sorted(set(names.values())):
            stored.update(dict.fromkeys(_shapes(folder / shard), folder / shard))
        lies = sorted(t for t in set(names) | set(stored) if stored.get(t) != folder / names.get(t, ""))
        if lies:
            raise ValueError(f"{index}: the index and the shards disagree about {_some(lies)}")
        return stored
    foreign = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in folder.glob(pattern))
    if foreign:
        raise ValueError(f"{folder}: weights only as {_some(foreign)}; lowroll reads safetensors "
                         "(a pickle can run code when it is opened). Convert them first")
    raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json")


def _shapes(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor name -> (shape, safetensors dtype), from the header alone."""
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from None


def _check_headers(folder: Path, spec: ModelSpec, files: dict[str, Path]) -> None:
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in sorted(set(files.values())):
        found.update(_shapes(path))
    wanted = {part: (part_rows(spec, part, shape[0]), *shape[1:])
              for _, parts, shape in hf_names(spec) for part in parts}
    missing = [name for name in wanted if name not in found]
    # Old Llama checkpoints store the rotary table; a tied checkpoint may repeat its embedding as lm_head.
    extra = [name for name in found if name not in wanted and not name.endswith("rotary_emb.inv_freq")
             and not (spec.tie_embeddings and name == "lm_head.weight")]
    shapes = [f"{name} {list(found[name][0])} instead of {list(shape)}" for name, shape in wanted.items()
              if name in found and found[name][0] != shape]
    dtypes = [f"{name} ({found[name][1]})" for name in wanted if name in found and found[name][1] not in _FLOATS]
    for problem, names in (("missing tensors", missing), ("unexpected tensors", extra),
                           ("tensors of the wrong shape", shapes), ("tensors that are not float32/16", dtypes)):
        if names:
            raise ValueError(f"{folder}: {problem}: {_some(names)}")
    if spec.tie_embeddings and "lm_head.weight" in found:
        with safe_open(files["lm_head.weight"], framework="pt") as head:
            lm_head = head.get_tensor("lm_head.weight")
        with safe_open(files["model.embed_tokens.weight"], framework="pt") as body:
            if not torch.equal(lm_head, body.get_tensor("model.embed_tokens.weight")):
                raise ValueError(f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from "
                                 "model.embed_tokens.weight")


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def state(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under their HF names, fused matrices split.

    ValueError when the weights are quantised, or an adapter rides on them: both would be lost without a word.
    """
    if model.weight_format is not None:
        raise ValueError(f"the linear weights are {model.weight_format}; only dense weights have an HF state")
    adapted = [name for name, linear in model.linears() if linear.adapter is not None]
    if adapted:
        raise ValueError(f"{_some(adapted)}: an adapter rides on the weights; merge it, or save it by itself")
    parameters, tensors = dict(model.named_parameters()), {}
    for name, parts, shape in hf_names(model.spec):
        rows = [part_rows(model.spec, part, shape[0]) for part in parts]
        pieces = parameters[name].detach().split(rows)
        tensors.update({part: piece.contiguous() for part, piece in zip(parts, pieces, strict=True)})
    return tensors


def copy_tokenizer(source: str | Path | None, target: Path) -> None:
    """Copy the tokenizer files of a model folder, if one is given."""
    for name in TOKENIZER_FILES:
        if source is not None and (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def save(model: Transformer, folder: str | Path, tokenizer_from: str | Path | None = None) -> Path:
    """Publish the model as a Hugging Face folder, with the tokenizer files of another folder beside it.

    The folder appears whole or not at all. FileExistsError when it exists already; ValueError as `state` says.
    """
    from lowroll.checkpoint.publish import publish_folder

    config: dict[str, Any] = {**model.spec.config, "dtype": _DTYPES[model.dtype]}
    config.pop("torch_dtype", None)

    def write(target: Path) -> None:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(state(model), target / "model.safetensors", metadata={"format": "pt"})
        copy_tokenizer(tokenizer_from, target)

    return publish_folder(Path(folder), write, {"kind": "model"})
