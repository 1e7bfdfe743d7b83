"""The folders of a vLLM: the facts about its model, and weight updates, each in a new place. A
missing or half-written one kills vLLM's engine, so they appear whole."""

from __future__ import annotations

from pathlib import Path

import torch

from lowroll.checkpoint.atomic_folders import publish_folder
from lowroll.engine.remote.vllm.server import ServedModel
from lowroll.model import hf, lora
from lowroll.model.headers import low_bit_format
from lowroll.model.names import dtype_of, features_read
from lowroll.model.spec import read_config, read_spec, spec_from_config
from lowroll.model.tokenizer import eos_id
from lowroll.quant import dense
from lowroll.quant.formats import get_format
from lowroll.weights.publish import rollout_copy
from lowroll.weights.sync.update import WeightUpdate, arrivals, check_content, dense_shapes, gather


def served(folder: Path, dtype_name: str | None = None) -> ServedModel:
    """Read the facts about a vLLM's model from its folder. dtype_name: default the folder's.
    ValueError as of `read_config` and `read_spec`."""
    config = read_config(folder)
    spec = read_spec(folder)
    name = dtype_name or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{folder / 'config.json'}: dtype: {name} is no dtype of weights")
    weights = low_bit_format(folder) or dense.of(dtype)
    eos = {*spec.eos_ids}
    if (folder / "tokenizer.json").is_file() and (tokenizer_eos_id := eos_id(folder)) is not None:
        eos.add(tokenizer_eos_id)
    return ServedModel(
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(eos),
        tied=spec.tie_embeddings,
        dtype=str(dtype).removeprefix("torch."),
        weights=weights or name,
        weight_bits=float(get_format(weights).bits) if weights else dtype.itemsize * 8.0,
    )


def linear_names(folder: Path) -> tuple[str, ...]:
    """Return the names of a folder's linear layers ("q_proj", ...). ValueError as `read_spec`."""
    return tuple(features_read(read_spec(folder)))


def write_adapter(update: WeightUpdate, folder: Path, base: Path) -> Path:
    """Write an adapter as a new folder. ValueError as of `check_content`, and for names that are no
    adapter's."""
    if update.lora_alpha is None:
        raise ValueError("update: lora_alpha: an adapter's update states it")
    tensors = dict(update.tensors())
    check_content(update, tensors)
    alpha, scale = update.lora_alpha, update.input_scale

    def write(target: Path) -> None:
        lora.write_tensors(lora.unscaled(tensors, scale), target, alpha, str(base))

    return publish_folder(folder, write, {"kind": "adapter", "step": update.version})


def write_model(update: WeightUpdate, folder: Path, base: Path, dtype_name: str) -> Path:
    """Write a full update as a new folder in the format of `base`, dense parts in the named dtype.
    ValueError as of `weights.sync.update`."""
    dtype = getattr(torch, dtype_name)
    spec = spec_from_config(read_config(base))
    format = low_bit_format(base)
    if format is None:
        tensors = dict(arrivals(update, dense_shapes(spec), "cpu"))
        check_content(update, tensors)
        config = {**spec.config, "dtype": dtype_name}
        files = config, {name: t.to(dtype_of(name, dtype)) for name, t in tensors.items()}
    else:
        model = update.master or gather(update, spec, dtype, "cpu")
        files = hf.contents(rollout_copy(model, format, get_format(format).dtype or dtype))
    return publish_folder(
        folder,
        lambda target: hf.write(files, target, base),
        {"kind": "model", "step": update.version},
    )
