"""The formats, sizes and features that lowroll supports of a model, by its config.json."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from lowroll.kv import support as caches
from lowroll.model import exact, scaling
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format
from lowroll.model.names import hf_names, is_linear
from lowroll.model.spec import ModelSpec, read_spec
from lowroll.quant import mixed
from lowroll.quant.formats import get_format
from lowroll.weights import blockwise, exploration_noise

SHOWN = ("bf16", "int8", "int4")  # formats whose sizes are shown


def refusals(spec: ModelSpec) -> dict[str, str]:
    """Return why features refuse a model on any machine, by feature."""
    reasons = {
        "exact": exact.why_no_model(spec),
        "calibration": blockwise.why_not(spec),
        "uaq_scale": scaling.why_not(spec),
        "noise": exploration_noise.why_not(spec),
        "bounded and 8-bit caches": caches.why_not(spec),
    }
    return {feature: reason for feature, reason in reasons.items() if reason is not None}


def weight_bytes(spec: ModelSpec, format: str) -> float:
    """Return a model's bytes with linear layers in a format and bfloat16 for the rest."""
    linear = sum(prod(shape) for _, parts, shape in hf_names(spec) if is_linear(parts[0]))
    return (linear * get_format(format).bits + (spec.num_parameters - linear) * 16) / 8


def describe(model: str, device: torch.device, dtype: torch.dtype) -> str:
    """Describe a folder or hub id in a line: family, parameters, bytes, and unsupported features.
    ValueError as in `read_spec` and `resolve`."""
    folder = resolve(model, weights=False, key="MODEL")
    spec = read_spec(folder)
    reasons = refusals(spec)
    if "exact" not in reasons and (reason := exact.why_not(spec, device, dtype)) is not None:
        reasons["exact"] = reason
    sizes = ", ".join(f"{weight_bytes(spec, name) / 1e9:.3g} GB in {name}" for name in SHOWN)
    missing = "; ".join(f"{feature}: {reason}" for feature, reason in reasons.items())
    return (
        f"{model}: {spec.architecture}, {spec.num_parameters:,} parameters, stored "
        f"{_stored_format(folder)}; rollouts in every format ({sizes}); "
        + (f"not supported: {missing}" if missing else "every feature is supported")
    )


def _stored_format(folder: Path) -> str:
    name = low_bit_format(folder)
    return "dense" if name is None else f"in {mixed.title(name)}"
