"""Weight updates as the folders that a vLLM loads: an adapter in PEFT's layout, or the whole model
in the format of the folder that it was started with.

A folder appears whole, in a new place for each version, before the server hears of it: of a
missing or half-written one vLLM's engine dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lowroll.checkpoint.publish import publish_folder
from lowroll.model import hf, lora
from lowroll.model.headers import low_bit_format
from lowroll.model.names import hf_names, part_rows
from lowroll.model.spec import ModelSpec, read_config, spec_from_config
from lowroll.quant.formats import get_format
from lowroll.weights.publish import rollout_copy
from lowroll.weights.receive import arrivals, check_content, gather
from lowroll.weights.update import WeightUpdate

if TYPE_CHECKING:
    import torch


def write_adapter(update: WeightUpdate, folder: Path, base: Path) -> Path:
    """The adapter of an update as a new folder. ValueError for a value that is not finite, another
    digest than was stated, or names that are no adapter's."""
    if update.lora_alpha is None:
        raise ValueError("update: lora_alpha: an adapter's update states it")
    tensors = dict(update.tensors())
    check_content(update, tensors)
    alpha, scale = update.lora_alpha, update.input_scale

    def write(target: Path) -> None:
        lora.write_tensors(lora.unscaled(tensors, scale), target, alpha, str(base))

    return publish_folder(folder, write, {"kind": "adapter", "step": update.version})


def write_model(update: WeightUpdate, folder: Path, base: Path, dtype: torch.dtype) -> Path:
    """Write the model of a full update as a new folder in the format of `base`, whose dense parts
    are in `dtype`. ValueError as `weights.receive` raises it."""
    spec = spec_from_config(read_config(base))
    format = low_bit_format(base)
    if format is None:
        tensors = dict(arrivals(update, _shapes(spec), "cpu"))
        check_content(update, tensors)
        config = {**spec.config, "dtype": str(dtype).removeprefix("torch.")}
        files = config, {name: tensor.to(dtype) for name, tensor in tensors.items()}
    else:
        model = update.master or gather(update, spec, dtype, "cpu")
        files = hf.contents(rollout_copy(model, format, get_format(format).dtype or dtype))
    return publish_folder(
        folder,
        lambda target: hf.write(files, target, base),
        {"kind": "model", "step": update.version},
    )


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every dense tensor, by its Hugging Face name."""
    return {
        part: (part_rows(spec, part, shape[0]), *shape[1:])
        for _, parts, shape in hf_names(spec)
        for part in parts
    }
