"""The facts in a model folder about the model that a vLLM serves from it. Imports torch: not at
start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lowroll.model.headers import low_bit_format
from lowroll.model.spec import read_config, read_spec
from lowroll.model.tokenizer import eos_id
from lowroll.quant import dense
from lowroll.quant.formats import get_format


@dataclass(frozen=True)
class ServedModel:
    """dtype: of its dense weights. weights, weight_bits: format of the linear ones, and bits of
    one."""

    vocab_size: int
    eos_ids: frozenset[int]
    tied: bool  # the head is the embedding
    dtype: torch.dtype
    weights: str
    weight_bits: float

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def served(folder: Path, dtype_name: str | None = None) -> ServedModel:
    """Read a served model's facts from its folder. dtype_name: that the server computes in; default
    the folder's. ValueError as the readers of folders raise it."""
    config = read_config(folder)
    spec = read_spec(folder)
    name = dtype_name or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{folder / 'config.json'}: dtype: {name} is no dtype of weights")
    weights = low_bit_format(folder) or dense.of(dtype)
    eos = {*spec.eos_ids}
    if (folder / "tokenizer.json").is_file() and (known := eos_id(folder)) is not None:
        eos.add(known)
    return ServedModel(
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(eos),
        tied=spec.tie_embeddings,
        dtype=dtype,
        weights=weights or name,
        weight_bits=float(get_format(weights).bits) if weights else dtype.itemsize * 8.0,
    )
