"""The models that an engine runs: their device, format and dtype, loaded from a folder, or copied
from a model or shared with it."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from lowroll.model import hf
from lowroll.model.device import dtype_on, pick_device
from lowroll.model.folder import resolve
from lowroll.model.headers import exact_format
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.quant.table import DEFAULT
from lowroll.weights.publish import beside, rollout_copy, rollout_load

log = logging.getLogger(__name__)


class LoadedModels(NamedTuple):
    """An engine's models. folder: where they came from; None for a loaded model."""

    model: Transformer
    large_batch_model: Transformer | None
    weights: str
    folder: Path | None


def load_models(
    model: Transformer | str | Path,
    weights: str | None,
    large_batch_weights: str | None,
    device: str | torch.device,
    dtype: torch.dtype | None,
    noisy: bool,
) -> LoadedModels:
    """Return the models of an engine; arguments as of `NativeEngine`. ValueError names the wrong
    one."""
    folder = None if isinstance(model, Transformer) else resolve(model)
    device = _resolve_device(model, device)
    weights = weights or _own_format(model, folder, dtype, device)
    dtype = _pick_dtype(weights, dtype, device)
    if isinstance(model, Transformer) and model.device != device:
        raise ValueError(f"device: the model is on {model.device} and the engine on {device}")
    if large_batch_weights is None and folder is not None:
        return LoadedModels(
            rollout_load(folder, weights, device, dtype, noisy), None, weights, folder
        )
    master = model if isinstance(model, Transformer) else hf.load(model, device, dtype)
    few_rows_model = rollout_copy(master, weights, dtype, noisy)
    if large_batch_weights is None:
        return LoadedModels(few_rows_model, None, weights, folder)
    many_rows_model = beside(master, few_rows_model, get_format(large_batch_weights).name)
    return LoadedModels(few_rows_model, many_rows_model, weights, folder)


def _resolve_device(model: Transformer | str | Path, device: str | torch.device) -> torch.device:
    if isinstance(model, Transformer) and str(device) == "auto":
        device = model.device
    return pick_device(device)


def _own_format(
    model: Transformer | str | Path,
    folder: Path | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> str:
    if isinstance(model, Transformer):
        return model.weight_format or DEFAULT
    assert folder is not None
    return exact_format(folder, dtype or dtype_on(device)) or DEFAULT


def _pick_dtype(weights: str, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    warn_if_slow(device, weights)
    format_dtype = get_format(weights).dtype
    if format_dtype is not None and dtype not in (None, format_dtype):
        raise ValueError(f"dtype: weights={weights!r} computes in {format_dtype}, not in {dtype}")
    return format_dtype or dtype or dtype_on(device)


@cache
def warn_if_slow(device: torch.device, weights: str) -> None:
    """Warn once of a format that is slower than float32 on a device."""
    if reason := get_format(weights).slower_than_float32(device):
        log.warning("weights: %s is slower than float32 on this machine: %s", weights, reason)
