"""The base that an adapter was trained on: the rollouts' weights, as `adapter_base.json` describes
them.

    weights      the format of the linear weights, or each layer's (`quant.mixed`); null: the model's own
    dtype        of the model before it was quantized, and of what was not
    uaq_scale    the scale s before it was quantized (`model.scaling`); null: none

Without this file, which PEFT and vLLM ignore, the base is the model of adapter_config.json as it
is.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from lowroll.model.config_values import LARGE
from lowroll.model.files import read_json
from lowroll.model.folder import resolve
from lowroll.model.transformer import Transformer
from lowroll.quant import dense, mixed
from lowroll.quant.formats import formats, get_format
from lowroll.quant.mixed import Mixed
from lowroll.types import printable

FILE = "adapter_base.json"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Base:
    """The contents of `adapter_base.json`."""

    weights: str | None
    dtype: str
    uaq_scale: float | None

    @property
    def low_bit(self) -> bool:
        return self.weights is not None and not get_format(self.weights).dense

    @property
    def rounds(self) -> bool:
        return self.low_bit or self.weights not in (None, dense.of(getattr(torch, self.dtype)))


def of(model: Transformer, uaq_scale: float) -> Base:
    """Return the base under a model's adapter."""
    dtype = str(model.dtype).removeprefix("torch.")
    return Base(model.weight_format, dtype, None if uaq_scale == 1 else uaq_scale)


def write(base: Base, folder: Path) -> None:
    content = asdict(base)
    weight_format = None if base.weights is None else get_format(base.weights)
    if isinstance(weight_format, Mixed):
        content["weights"] = weight_format.stated()
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> Base | None:
    """Read an adapter folder's base, if any. ValueError names the file and the key."""
    path = folder / FILE
    if not path.exists():
        return None
    content = read_json(path)
    known_keys = [field.name for field in fields(Base)]
    if not isinstance(content, dict) or content.keys() != set(known_keys):
        raise ValueError(f"{path}: expected an object with the keys {', '.join(known_keys)}")
    weights, dtype, uaq_scale = content["weights"], content["dtype"], content["uaq_scale"]
    if isinstance(weights, dict):
        try:
            weights = mixed.read(weights)
        except ValueError as error:
            raise ValueError(f"{path}: weights: {printable(error)}") from None
    elif weights is not None and (not isinstance(weights, str) or weights not in formats()):
        raise ValueError(
            f"{path}: weights: {printable(repr(weights))} is none of {', '.join(formats())}"
        )
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{path}: dtype: {printable(repr(dtype))} is none of {', '.join(_DTYPES)}")
    if uaq_scale is not None and (
        isinstance(uaq_scale, bool)
        or not isinstance(uaq_scale, int | float)
        or not 0 < uaq_scale < LARGE
    ):
        raise ValueError(
            f"{path}: uaq_scale: expected a positive number or null, got {printable(repr(uaq_scale))}"
        )
    return Base(weights, dtype, uaq_scale)


def base_of(folder: Path) -> str:
    """Return the model folder of an adapter folder: a `base` inside it, else the one of its
    adapter_config.json, of a hub id the downloaded revision. Never connects. ValueError when the
    model is not on this machine, or is an adapter itself."""
    if (folder / "base").is_dir():
        return str(folder / "base")
    path = folder / "adapter_config.json"
    config = read_adapter_config(path)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base:
        raise ValueError(
            f"{path}: base_model_name_or_path: expected the base model's folder or hub id, got "
            f"{printable(repr(base))}"
        )
    if revision is not None and not isinstance(revision, str):
        raise ValueError(
            f"{path}: revision: expected a commit, branch or tag of the base model, got "
            f"{printable(repr(revision))}"
        )
    try:
        base_folder = resolve(base, revision, connect=False)
    except ValueError:
        download_arguments = f"{base} --revision {revision}" if revision else base
        raise ValueError(
            f"{path}: base_model_name_or_path: {printable(repr(base))} is not on this machine, and "
            "a name that comes with a folder opens no connection. If you want that model: `hf "
            f"download {printable(download_arguments)}`"
        ) from None
    if (base_folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{path}: base_model_name_or_path: {base_folder} is an adapter folder itself; merge it into "
            f"its base first (lowroll export {base_folder} OUT --as merged)"
        )
    return str(base_folder)


def read_adapter_config(path: Path) -> dict[str, Any]:
    """Read a LoRA adapter's config. ValueError for another kind."""
    config = read_json(path)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type: expected LORA")
    return config
