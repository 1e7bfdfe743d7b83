"""Adaptive quantization noise (QeRL, section 3.3; docs/algorithms.md): exploration by seeded
Gaussian noise on the engine's norm weights.

    w' = w + z,    z ~ N(0, sigma^2) a channel,    fresh at every publication

in the input and post-attention norms: the noise multiplies the columns of q, k, v, gate and up by 1
+ z / w. The engine keeps these norms in float32: in bfloat16 a sigma below 5e-4 would not change a
weight of 1. Norms that carry an s of update-aware scaling get s z.

sigma falls in stages, sigma_0 = sigma_start to sigma_{n-1} = sigma_end, with p = i / (n - 1):

    exponential  sigma_start (sigma_end / sigma_start)^p       (QeRL, Eq. 8)
    linear       sigma_start + (sigma_end - sigma_start) p
    cosine       sigma_end + (sigma_start - sigma_end) (1 + cos(pi p)) / 2
    logarithmic  sigma_start + (sigma_end - sigma_start) ln(1 + i) / ln(n)
                 (our reading of a name)

and the run is cut into K equal intervals, the first without noise. Variant `code` (QeRL's program,
and Surogate's): num_stages intervals with n = num_stages - 1; `paper` (Eq. 8): n = num_stages
values after the first interval. The interval of step t of T is floor(t K / T). A draw is a function
of (seed, version, norm).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from lowroll.model import scaling
from lowroll.model.residual_stream import RMSNorm
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Block, Transformer


@dataclass(frozen=True)
class Noise:
    """The noise of one publication."""

    seed: int  # 0 .. 2^63 - 1
    sigma: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(f"sigma: must be finite and not negative, is {self.sigma}")

    def draw(self, name: str, size: int) -> Tensor:
        """Draw z [size] of a norm, float32 on the CPU."""
        generator = torch.Generator().manual_seed(_hash_seed(self.seed, name))
        return torch.randn(size, generator=generator) * self.sigma


# share of the way to sigma_end at stage i of n, for the additive shapes
_SHARES: dict[str, Callable[[int, int], float]] = {
    "linear": lambda i, n: i / (n - 1),
    "cosine": lambda i, n: (1 - math.cos(math.pi * i / (n - 1))) / 2,
    "logarithmic": lambda i, n: math.log(1 + i) / math.log(n),
}


@dataclass(frozen=True)
class NoiseSchedule:
    """The `noise` section, checked by `config`. total_steps: the run's max_steps."""

    sigma_start: float = 1e-2
    sigma_end: float = 1e-4
    num_stages: int = 10
    schedule: str = "exponential"
    variant: str = "code"
    total_steps: int = 100
    seed: int = 0

    @property
    def sigmas(self) -> list[float]:
        """The sigma of every interval."""
        n = self.num_stages if self.variant == "paper" else max(1, self.num_stages - 1)
        return [0.0, *(self._stage(i, n) for i in range(n))]

    def _stage(self, i: int, n: int) -> float:
        start, end = self.sigma_start, self.sigma_end
        if n == 1 or start == end:
            return start
        if self.schedule == "exponential":
            return start * (end / start) ** (i / (n - 1))
        return start + (end - start) * _SHARES[self.schedule](i, n)

    def sigma(self, step: int) -> float:
        """Return the sigma after `step` training steps, constant past the end."""
        intervals = self.num_stages + (self.variant == "paper")
        interval = min(step, self.total_steps) * intervals // self.total_steps
        return self.sigmas[min(interval, len(self.sigmas) - 1)]

    def at(self, version: int) -> Noise:
        """Return the noise of rollouts with policy `version`."""
        return Noise(_hash_seed(self.seed, str(version)), self.sigma(version))


def noisy_norms(model: Transformer) -> Iterator[tuple[str, RMSNorm]]:
    """Yield the norms that take noise, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Block):
            if module.input_norm is not None:
                yield f"{name}.input_norm", module.input_norm
            if module.post_attention_norm is not None:
                yield f"{name}.post_attention_norm", module.post_attention_norm


def why_not(spec: ModelSpec) -> str | None:
    """Return why models of a spec take no noise, or None."""
    if {"input_norm", "post_attention_norm"}.isdisjoint(name for name, _ in spec.norms):
        return (
            f"{spec.architecture} has no norms in front of attention and MLP, which would take it"
        )
    return None


def draw(model: Transformer, noise: Noise | None) -> dict[str, Tensor]:
    """Draw the noise by norm, float32 on the CPU; {} for None or sigma 0."""
    if noise is None or noise.sigma == 0:
        return {}
    norms = list(noisy_norms(model))
    if (reason := why_not(model.spec)) is not None:
        raise ValueError(f"noise: {reason}; write null")
    scale = scaling.applied(model) or 1.0
    return {name: scale * noise.draw(name, norm.weight.numel()) for name, norm in norms}


def share(model: Transformer, noise: Noise | None) -> None:
    """Add the engine's noise to the learner's norms; None or sigma 0 ends it."""
    noise_by_name = draw(model, noise)
    for name, norm in noisy_norms(model):
        norm.noise = noise_by_name[name].to(norm.weight.device) if noise_by_name else None


@contextmanager
def muted(model: Transformer) -> Iterator[Transformer]:
    """Run the learner without shared noise in the block."""
    saved_noise = [(norm, norm.noise) for _, norm in noisy_norms(model)]
    share(model, None)
    try:
        yield model
    finally:
        for norm, norm_noise in saved_noise:
            norm.noise = norm_noise


def _hash_seed(seed: int, name: str) -> int:
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
