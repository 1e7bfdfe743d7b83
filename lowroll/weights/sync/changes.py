"""Changes of the tensors that an engine holds: all that an aligned learner sends, whose codes are
the engine's (`weights.aligned_forward`).

    {name}            a tensor whole: a norm that takes noise, or one of which most has changed
    {name}.gaps       int16 [n], read as unsigned: steps between changed entries, from -1 on
    {name}.values     [n] their new bits, in the tensor's own dtype

Entries are in row-major order, in storage units of packed codes. Every 65,535th is included, so
that no gap is longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels import checksum
from lowroll.model.names import dtype_of
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.weights.exploration_noise import noisy_norms
from lowroll.weights.publish import fingerprint, renew_head
from lowroll.weights.sync.base import Gap

STRIDE = 65535  # the longest gap
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Changes:
    """The base version of changes, and digests of what an engine holds without noise: `before` of
    all but the norms that take noise, `after` of all."""

    since: int
    before: str
    after: str


class Shadow:
    """A copy of what engines hold, on the learner's device. ValueError when its codes
    are others."""

    def __init__(self, model: Transformer, format: str, dtype: torch.dtype) -> None:
        for name, linear in model.linears():
            if linear.aligned is None or linear.aligned.format != get_format(format).of(name).name:
                raise ValueError(
                    f"{name}: changed codes are those of a learner aligned to {format}"
                )
            if linear.adapter is not None:
                raise ValueError(f"{name}: it has an adapter, which travels alone")
        self.model = model
        self.dtype = dtype
        self.version: int | None = None  # None: engines hold none
        self._tensors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._now().values())

    def renew(self, version: int) -> None:
        """Record that engines hold the present weights."""
        for name, tensor in self._now().items():
            if name in self._tensors:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = tensor.clone()
        self.version = version

    def changes(self) -> tuple[dict[str, Tensor], Changes]:
        """Return the changes of the learner's weights since that version, on the CPU."""
        assert self.version is not None
        now, noisy_names = self._now(), norm_names(self.model)
        stream: dict[str, Tensor] = {}
        for name, tensor in now.items():
            stream |= difference(name, self._tensors[name], tensor, whole=name in noisy_names)
        before = fingerprint({n: t for n, t in self._tensors.items() if n not in noisy_names}, {})
        return stream, Changes(self.version, before, fingerprint(now, {}))

    def _now(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        codes = {f"{n}.weight": linear.aligned for n, linear in self.model.linears()}
        for name, p in self.model.named_parameters():
            if name not in codes:
                tensors[name] = p.detach().to(dtype_of(name, self.dtype))
        for name, q in codes.items():
            assert q is not None
            tensors |= {f"{name}.{part}": tensor for part, tensor in q.tensors.items()}
        return tensors


def norm_names(model: Transformer) -> set[str]:
    return {f"{name}.weight" for name, _ in noisy_norms(model)}


def difference(name: str, old: Tensor, new: Tensor, whole: bool) -> dict[str, Tensor]:
    """Return the part of the stream that turns `old` into `new`, on the CPU: nothing for equal
    tensors, else the changed entries or the whole tensor, whichever is smaller. whole: always the
    tensor."""
    if not whole:
        changed = (_bits(old) != _bits(new)).nonzero().flatten()
        if changed.numel() == 0:
            return {}
        positions = _with_every_stride(changed)
        if positions.numel() * (2 + new.element_size()) < new.nbytes:
            gaps = positions.diff(prepend=positions.new_tensor([-1]))
            # a gap above 32767 wraps to a negative int16; `_positions` reads it as unsigned
            gaps = gaps.to(torch.int32).to(torch.int16)
            values = _bits(new)[positions].view(new.dtype)
            return {f"{name}.gaps": gaps.cpu(), f"{name}.values": values.cpu()}
    return {name: new.detach().cpu().contiguous()}


def _with_every_stride(changed: Tensor) -> Tensor:
    num_strides = int(changed[-1]) // STRIDE
    strides = STRIDE * torch.arange(1, num_strides + 1, device=changed.device) - 1
    return torch.cat([changed, strides]).unique()


def apply(
    rollout: Transformer, stream: Mapping[str, Tensor], changes: Changes
) -> dict[str, Tensor]:
    """Apply changes to an engine's storages in place, except to the norms that take noise: return
    those, clean.

    Raises Gap, or ValueError when they do not fit or lead to another digest. The engine's tensors
    are unchanged then.
    """
    noisy_names = norm_names(rollout)
    targets = _targets(rollout)
    without_noise = {name: t for name, t in targets.items() if name not in noisy_names}
    if (found := fingerprint(without_noise, {})) != changes.before:
        raise Gap(
            f"update: codes: they change weights {changes.before} of version {changes.since}, and "
            f"the engine holds {found}"
        )
    norms = _norms(stream, targets, noisy_names, rollout)
    writes = _writes({n: t for n, t in stream.items() if n not in noisy_names}, without_noise)
    old_values = {name: write.bits[write.at].clone() for name, write in writes.items()}
    for write in writes.values():
        write.bits[write.at] = write.values
    after = fingerprint(without_noise | norms, {})  # reads the storages that were just written
    if after != changes.after:
        for name, write in writes.items():
            write.bits[write.at] = old_values[name]
        raise ValueError(
            f"update: digest: {changes.after} was stated, and what has come of it has {after}"
        )
    _renew_derived(rollout, writes.keys())
    return norms


def _renew_derived(rollout: Transformer, changed: Set[str]) -> None:
    for name, linear in rollout.linears():
        assert isinstance(linear.weight, QTensor)
        if any(f"{name}.weight.{part}" in changed for part in linear.weight.tensors):
            linear.weight.renew()
    renew_head(rollout, changed)


def _targets(rollout: Transformer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, linear in rollout.linears():
        assert isinstance(linear.weight, QTensor)
        tensors |= {f"{name}.weight.{part}": t for part, t in linear.weight.tensors.items()}
    linears = {f"{name}.weight" for name, _ in rollout.linears()}
    tensors |= {n: p.detach() for n, p in rollout.named_parameters() if n not in linears}
    return tensors


def _norms(
    stream: Mapping[str, Tensor], targets: Mapping[str, Tensor], names: set[str], model: Transformer
) -> dict[str, Tensor]:
    norms: dict[str, Tensor] = {}
    for name in names:
        arrived = stream.get(name)
        if arrived is None or arrived.shape != targets[name].shape:
            raise ValueError(f"update: codes: {name} is missing or of another shape")
        if arrived.dtype != model.dtype:
            raise ValueError(f"update: codes: {name}: {arrived.dtype}, not {model.dtype}")
        norms[name] = arrived.to(targets[name].device)
    return norms


class _Write(NamedTuple):
    """The changed entries of a tensor: its storage as a row of integers, positions, and new
    integers."""

    bits: Tensor
    at: Tensor
    values: Tensor


def _writes(stream: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, _Write]:
    writes: dict[str, _Write] = {}
    floats: dict[str, Tensor] = {}
    unused = set(stream)
    for name, target in targets.items():
        keys = {f"{name}.gaps", f"{name}.values", name} & stream.keys()
        if not keys:
            continue
        unused -= keys
        at, values = _changed_entries(name, keys, stream, target)
        if values.dtype in _FLOATS:
            floats[name] = values.contiguous()
        writes[name] = _Write(_bits(target), at, _bits(values))
    if unused:
        raise ValueError(f"update: codes: the engine has no {min(unused)}")
    amax = checksum.amax(list(floats.values()))
    for name, is_finite in zip(floats, checksum.finite(amax), strict=True):
        if not is_finite:
            raise ValueError(f"update: codes: {name} holds a non-finite value")
    return writes


def _changed_entries(
    name: str, keys: Set[str], stream: Mapping[str, Tensor], target: Tensor
) -> tuple[Tensor, Tensor]:
    if keys == {name} and stream[name].shape == target.shape:
        at = torch.arange(target.numel(), device=target.device)
        values = stream[name].flatten()
    elif keys == {f"{name}.gaps", f"{name}.values"}:
        at = _positions(name, stream[f"{name}.gaps"], target)
        values = stream[f"{name}.values"]
    else:
        raise ValueError(f"update: codes: {name}: another shape, or half of it is missing")
    if values.dtype != target.dtype or values.shape != at.shape:
        raise ValueError(f"update: codes: {name}: values of {values.dtype}, {values.shape}")
    return at, values.to(target.device)


def _positions(name: str, gaps: Tensor, target: Tensor) -> Tensor:
    if gaps.dtype != torch.int16 or gaps.ndim != 1 or not gaps.numel():
        raise ValueError(f"update: codes: {name}: gaps of {gaps.dtype}, {tuple(gaps.shape)}")
    steps = gaps.to(target.device).to(torch.int64) & 0xFFFF
    at = steps.cumsum(0) - 1
    if int(steps.min()) < 1 or int(at[-1]) >= target.numel():
        raise ValueError(f"update: codes: {name}: its gaps lead out of the tensor")
    return at


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).view(-1)
