"""Optimizers of named parameters, rate schedules, and gradient clipping.

AdamW (Loshchilov & Hutter 2019, algorithm 2), with g the clipped gradient:

    m <- b1 m + (1-b1) g      v <- b2 v + (1-b2) g^2      mh = m / (1-b1^t)      vh = v / (1-b2^t)
    p <- p - lr * wd * p - lr * mh / (sqrt(vh) + eps)

Only matrices decay. Clipping scales all gradients by min(1, max_norm / norm), with norm the 2-norm
over every parameter.

A bfloat16 parameter would lose an update of 1e-5 of its size. So it is the rounding of a float32
master, which also accumulates gradients; a shard (`parallel.sharding`) is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowroll.checkpoint.store import check_pieces
from lowroll.kernels.training import adamw
from lowroll.kernels.training.adamw import Addresses, Tensors
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.trainer import adamw8bit
from lowroll.trainer.muon import Muon

COUNTERS = ("num_steps", "num_updates", "refused_in_a_row")


@dataclass(frozen=True)
class OptimSettings:
    """Settings of the `train` section; `total_steps` is its max_steps."""

    learning_rate: float = 1e-5
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 100
    min_lr_ratio: float = 0.0  # of learning_rate, reached at total_steps
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0  # None measures without clipping
    optimizer: str = "adamw"


DECAYS = {  # remaining share of the way from full to minimal rate at progress p
    "constant": lambda p: 1.0,
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
}


def learning_rate(settings: OptimSettings, step: int) -> float:
    """Return the rate of training step `step`, counted from 0: a linear warm-up, then the decay to
    min_lr_ratio at total_steps."""
    full_rate = settings.learning_rate
    warmup_steps = settings.warmup_steps
    if step < warmup_steps:
        return full_rate * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, settings.total_steps - warmup_steps))
    decay = DECAYS[settings.lr_scheduler_type]
    return full_rate * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * decay(progress))


class Optimizer:
    """An optimizer of named parameters. `backward()` accumulates gradients, `update()` applies
    them.

    `matrices` has the rows of each stacked matrix that Muon may train. All `ranks` call `update`
    together.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        settings: OptimSettings,
        matrices: Mapping[str, tuple[int, ...]] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if not params:
            raise ValueError("params: nothing to train")
        self.settings = settings
        self.params = dict(params)
        self.ranks = ranks
        self.parts = {name for name, p in self.params.items() if ranks.is_part(p)}
        # on CUDA: the first gradient since the last update, in the parameter's dtype
        self._waiting: dict[str, Tensor] = {}
        # the float32 tensors that are updated: shards, parameters, or copies of low-precision ones
        self.masters: dict[str, Tensor] = {}
        self.lows: dict[str, nn.Parameter] = {}  # parameters with a separate master
        for name, p in self.params.items():
            if name in self.parts:
                self.masters[name] = ranks.part(p)
                continue
            self.masters[name] = _make_master(name, p, self._waiting)
            if self.masters[name] is not p:
                self.lows[name] = p
        self.num_steps = 0
        self.num_updates = 0  # AdamW's t
        self.refused_in_a_row = 0
        rows: dict[str, tuple[int, ...]] = {}
        if settings.optimizer == "muon":
            if not matrices:
                raise ValueError("optimizer: muon needs matrices to train, and was given none")
            rows = dict(matrices)
        self.muon = Muon(
            {name: m for name, m in self.masters.items() if name in rows},
            rows,
            settings.weight_decay,
            ranks if self.parts else ALONE,
        )
        self.others = {name: m for name, m in self.masters.items() if name not in rows}
        self.adamw = self._make_adamw()
        self.rate = settings.learning_rate
        self._fused: Tensors | None = None

    def _make_adamw(self) -> Any:
        settings = self.settings
        matrices = [m for m in self.others.values() if m.ndim >= 2]
        vectors = [m for m in self.others.values() if m.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": params, "weight_decay": weight_decay}
            for params, weight_decay in ((matrices, settings.weight_decay), (vectors, 0.0))
            if params
        ]
        if not groups:
            groups = [{"params": []}]
        hyperparameters = settings.learning_rate, settings.betas, settings.eps
        if not self.in_8_bits:
            return torch.optim.AdamW(groups, *hyperparameters)
        sizes = {id(m): self.params[name].numel() for name, m in self.others.items()}
        return adamw8bit.make(groups, *hyperparameters, sizes)

    @property
    def in_8_bits(self) -> bool:
        return self.settings.optimizer == "adamw8bit"

    def begin_step(self) -> float:
        """Begin a training step: set and return its learning rate."""
        self.rate = rate = learning_rate(self.settings, self.num_steps)
        self.num_steps += 1
        for group in self.adamw.param_groups:
            group["lr"] = rate
        return rate

    @torch.no_grad()
    def update(self, refuse: bool = False) -> dict[str, float]:
        """Clip the gradients, apply and clear them. Return optim/grad_norm (before clipping),
        optim/update_norm and optim/skipped.

        When the norm is not finite, or with `refuse` (a non-finite loss), no update is applied and
        the refusal is counted.
        """
        gradients = self._gradients()
        norm = torch.linalg.vector_norm(self._norms(gradients))
        addresses = None
        if self._fused is not None:  # before norm.item() waits for the device
            addresses = self._fused.addresses(self._own(gradients))
        metrics = {"optim/grad_norm": norm.item(), "optim/update_norm": 0.0, "optim/skipped": 1.0}
        if refuse or not math.isfinite(metrics["optim/grad_norm"]):
            self.refused_in_a_row += 1
        else:
            self.num_updates += 1
            self.refused_in_a_row = 0
            metrics |= {
                "optim/update_norm": self._apply(norm, gradients, addresses),
                "optim/skipped": 0.0,
            }
            # autograd does not see the kernels' writes
            torch.autograd.graph.increment_version(list(self.params.values()))
        self.zero_grad()
        return metrics

    def _gradients(self) -> list[Tensor]:
        """Return every parameter's gradient, in the order of `masters`, summed over the ranks;
        float32, except in the fused step of a single rank."""
        all_waiting = self._waiting.keys() == self.masters.keys() == self.others.keys()
        if self.ranks.size == 1 and all_waiting and self._fuses():
            return [self._waiting[name] for name in self.masters]
        for name, gradient in self._waiting.items():
            self.masters[name].grad = gradient.float()
        self._waiting.clear()
        for name in self.parts:
            sharded_gradient = self.params[name].grad
            self.params[name].grad = None
            self.masters[name].grad = None
            if sharded_gradient is not None:
                self.masters[name].grad = self.ranks.part(sharded_gradient)
        gradients: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients[name] = master.grad
        self.ranks.forget()
        # the backward pass has already summed those of shards
        self.ranks.add([g for name, g in gradients.items() if name not in self.parts])
        return list(gradients.values())

    def _norms(self, gradients: list[Tensor]) -> Tensor:
        norms_P = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32))
        if not self.parts:
            return norms_P
        is_sharded_P = torch.tensor([name in self.parts for name in self.masters])
        whole_norms_P = self.ranks.total(norms_P.square()).sqrt()
        return torch.where(is_sharded_P.to(norms_P.device), whole_norms_P, norms_P)

    def _own(self, gradients: list[Tensor]) -> list[Tensor]:
        return [g for name, g in zip(self.masters, gradients, strict=True) if name in self.others]

    def _apply(self, norm: Tensor, gradients: list[Tensor], at: Addresses | None) -> float:
        """Clip, update the masters, round them to the parameters, and return the update's
        2-norm."""
        is_fused = self._fuses()
        unfused = {} if is_fused else self.others
        most = self.settings.max_grad_norm
        clipped_here = self.muon.params | unfused
        if most is not None and clipped_here:
            nn.utils.clip_grads_with_norm_(clipped_here.values(), most, norm)
        moved = self.muon.step(self.rate)  # squared
        if unfused:
            self.adamw.step()
        for name in clipped_here.keys() & self.lows.keys():
            self.lows[name].copy_(self.masters[name])
        if not is_fused:
            return math.hypot(self._total(moved).sqrt().item(), self._adamw_norm())
        clip = torch.ones_like(norm)
        if most is not None:
            clip = (most / (norm + 1e-6)).clamp(max=1.0)
        fused = self._fused_adamw()
        if at is None:
            at = fused.addresses(self._own(gradients))
        moved = moved + fused.step(
            at,
            clip,
            rate=self.rate,
            betas=self.settings.betas,
            eps=self.settings.eps,
            t=self.num_updates,
        )
        return self._total(moved).sqrt().item()

    def _total(self, squares: Tensor) -> Tensor:
        return self.ranks.total(squares) if self.parts else squares

    def _fuses(self) -> bool:
        return (
            bool(self.others)
            and not self.in_8_bits
            and all(adamw.supports(m) for m in self.others.values())
        )

    def _fused_adamw(self) -> Tensors:
        groups = {id(m): group for group in self.adamw.param_groups for m in group["params"]}
        if self._fused is None:
            for m in self.others.values():
                if m not in self.adamw.state:
                    self.adamw.state[m] = {
                        "exp_avg": torch.zeros_like(m),
                        "exp_avg_sq": torch.zeros_like(m),
                    }
            states = [self.adamw.state[m] for m in self.others.values()]
            self._fused = Tensors(
                list(self.others.values()),
                [moments["exp_avg"] for moments in states],
                [moments["exp_avg_sq"] for moments in states],
                [self.lows.get(name) for name in self.others],
                [groups[id(m)]["weight_decay"] for m in self.others.values()],
            )
        return self._fused

    def _adamw_norm(self) -> float:
        if not self.others:
            return 0.0
        if self.in_8_bits:
            squared_norm = torch.tensor(self.adamw.moved, dtype=torch.float64)
            self.adamw.moved = 0.0
            return math.sqrt(self._total(squared_norm))
        bias1, bias2 = (1 - beta**self.num_updates for beta in self.settings.betas)
        rate = self.adamw.param_groups[0]["lr"]
        norms = []
        for master in self.others.values():
            moments = self.adamw.state[master]
            scratch = (moments["exp_avg_sq"] / bias2).sqrt_().add_(self.settings.eps)
            direction = torch.div(moments["exp_avg"], scratch, out=scratch)
            norms.append(torch.linalg.vector_norm(direction) * (rate / bias1))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.parts:
            norm = self._total(norm.square()).sqrt()
        return norm.item()

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        self._waiting.clear()
        for master in self.masters.values():
            master.grad = None

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's parameters in the dtype of forward passes."""
        return {
            name: self.ranks.part(p.detach()).to(self.ranks.dtype(p))
            for name, p in self.params.items()
            if self.keeps(name)
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return this rank's live moments and float32 masters, and the counters."""
        tensors = {}
        for name, master in self.masters.items():
            if not self.keeps(name):
                continue
            if self._has_master(name):
                tensors[f"{name}.master"] = master.detach()
            moments = self.adamw.state.get(master, {})
            if name in self.muon.momentum:
                moments = {"momentum": self.muon.momentum[name]}
            if moments:
                tensors |= {f"{name}.{kind}": moments[kind] for kind in self._moments(name)}
        counters = {name: getattr(self, name) for name in COUNTERS}
        if self.in_8_bits and self.parts:
            counters["shards"] = self.ranks.size
        return tensors, counters

    def keeps(self, name: str) -> bool:
        """Return whether this rank saves a parameter's state."""
        return self.ranks.leads or name in self.parts

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Restore the shares of all ranks, bitwise, also from another number of ranks.

        ValueError, before any change, when names or shapes differ, or the blocks of sharded 8-bit
        moments cannot be cut to the new shards.
        """
        shards = state.get("shards", 1)
        counters = [*COUNTERS]
        if self.in_8_bits and "shards" in state:
            counters.append("shards")
        check_pieces("optimizer state", state, counters)
        expected = {}
        for name, p in self.params.items():
            if state["num_updates"]:
                for kind, shape_and_dtype in self._moments(name, shards).items():
                    expected[f"{name}.{kind}"] = shape_and_dtype
            if self._has_master(name):
                expected[f"{name}.master"] = (p.shape, torch.float32)
        check_saved("optimizer state", tensors, expected)
        for name in COUNTERS:
            setattr(self, name, state[name])
        self.adamw.state.clear()
        self._fused = None
        self.muon.momentum.clear()
        for name, master in self.masters.items():
            if self._has_master(name):
                master.copy_(self.ranks.cut(tensors[f"{name}.master"], self.params[name]))
            if self.num_updates:
                saved = {kind: tensors[f"{name}.{kind}"] for kind in self._moments(name)}
                self._revive(name, master, saved, shards)

    def _revive(self, name: str, master: Tensor, saved: dict[str, Tensor], shards: int) -> None:
        p = self.params[name]
        local_moments = {}
        for kind, whole in saved.items():
            if kind.startswith("absmax"):
                part = adamw8bit.cut(whole, p, self.ranks, shards)
            else:
                part = self.ranks.cut(whole, p)
            local_moments[kind] = part.to(master.device, copy=True)
        if name not in self.others:
            self.muon.momentum[name] = local_moments["momentum"]
        elif self.in_8_bits:
            adamw8bit.revive(self.adamw, master, local_moments, self.num_updates)
        else:
            self.adamw.state[master] = {
                "step": torch.tensor(float(self.num_updates))
            } | local_moments

    def _has_master(self, name: str) -> bool:
        return self.ranks.dtype(self.params[name]) != torch.float32

    def _moments(self, name: str, shards: int = 1) -> dict[str, tuple[torch.Size, torch.dtype]]:
        p = self.params[name]
        if name not in self.others:
            return {"momentum": (p.shape, torch.float32)}
        if self.in_8_bits:
            return adamw8bit.moments(p, shards)
        return dict.fromkeys(("exp_avg", "exp_avg_sq"), (p.shape, torch.float32))


def check_saved(
    where: str,
    saved: Mapping[str, Tensor],
    expected: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Raise ValueError unless the saved tensors have the expected names, shapes and dtypes."""
    if differing := sorted(expected.keys() ^ saved.keys()):
        problem = "missing" if differing[0] in expected else "unknown"
        raise ValueError(f"{where}: {differing[0]} is {problem} ({len(differing)} such names)")
    for name, (shape, dtype) in expected.items():
        if saved[name].shape != shape or saved[name].dtype != dtype:
            raise ValueError(
                f"{where}: {name} is {saved[name].dtype} {list(saved[name].shape)}, expected "
                f"{dtype} {list(shape)}"
            )


def _make_master(name: str, param: nn.Parameter, waiting: dict[str, Tensor]) -> Tensor:
    """Return the float32 tensor that the optimizer updates: the parameter, or a copy whose `grad` a
    hook fills. On CUDA the hook leaves the first gradient unconverted in `waiting`, which saves
    half of the memory, until a second one comes."""
    if param.dtype == torch.float32:
        return param
    master = param.detach().float().clone()

    def take_gradient(p: Tensor) -> None:
        gradient = p.grad
        p.grad = None
        assert gradient is not None
        if p.is_cuda and master.grad is None and name not in waiting:
            waiting[name] = gradient
            return
        if name in waiting:
            master.grad = waiting.pop(name).float()
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad = master.grad.add_(gradient.float())

    param.register_post_accumulate_grad_hook(take_gradient)
    return master
