"""The device and dtype of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowroll.config import RunConfig
from lowroll.model.device import pick_device
from lowroll.quant import dense
from lowroll.quant.table import OWN

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Compute:
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, cfg: RunConfig) -> Compute:
        """Return the settings' device and dtype. ValueError for a missing CUDA."""
        device = pick_device(cfg.device)
        if cfg.dtype != "auto":
            return cls(device, _DTYPES[cfg.dtype])
        return cls(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    def format(self, weights: str) -> str:
        """Return the format of `weights`: `dense` is the run's own dtype."""
        if weights != OWN:
            return weights
        name = dense.of(self.dtype)
        if name is None:
            raise ValueError(
                f"dtype: no dense format has {self.dtype}; convert the folder to bfloat16 or float32"
            )
        return name
