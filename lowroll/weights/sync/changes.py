"""Changes of the tensors that an engine holds. Of an aligned learner, whose codes are the engine's
(`weights.aligned`), only they travel.

    {name}            a tensor whole: a norm that takes noise, or one of which most has changed
    {name}.gaps       int16 [n], read as unsigned: steps between the entries that changed, from -1 on
    {name}.values     [n] their new bits, in the tensor's own dtype

Entries are in row-major order; of packed codes an entry is what is stored. Every 65,535th is
included, so that no gap is longer. Names are those of `publish.digest`. An engine applies changes to
the bits that they are based on, and restores its tensors when the result has another digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels import checksum
from lowroll.model.names import dtype_of
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.weights.noise import noisy_norms
from lowroll.weights.publish import fingerprint
from lowroll.weights.sync.base import Gap

STRIDE = 65535  # the longest gap
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Changes:
    """The base and the result of changes. Digests are of what an engine holds, without noise:
    `before` of all but the norms that take noise, `after` of all."""

    since: int
    before: str
    after: str


class Shadow:
    """A copy of what engines hold, on the learner's device. ValueError for a learner whose codes are
    not the engines'."""

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
        self.version: int | None = None  # None: engines hold no version yet
        self._tensors: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._now().values())

    def renew(self, version: int) -> None:
        """Record that engines hold the present weights as this version."""
        for name, tensor in self._now().items():
            if name in self._tensors:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = tensor.clone()
        self.version = version

    def changes(self) -> tuple[dict[str, Tensor], Changes]:
        """Return the changes of the learner's weights since that version, on the CPU."""
        assert self.version is not None
        now, whole = self._now(), norm_names(self.model)
        stream: dict[str, Tensor] = {}
        for name, tensor in now.items():
            stream |= difference(name, self._tensors[name], tensor, name in whole)
        before = fingerprint({n: t for n, t in self._tensors.items() if n not in whole}, {})
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
    """Return the stream that turns `old` into `new`. whole: always the whole tensor."""
    if not whole:
        at = (_bits(old) != _bits(new)).nonzero().flatten()
        if at.numel() == 0:
            return {}
        named = STRIDE * torch.arange(1, int(at[-1]) // STRIDE + 1, device=at.device) - 1
        at = torch.cat([at, named]).unique()
        if at.numel() * (2 + new.element_size()) < new.nbytes:
            gaps = at.diff(prepend=at.new_tensor([-1])).to(torch.int32).to(torch.int16)
            values = _bits(new)[at].view(new.dtype)
            return {f"{name}.gaps": gaps.cpu(), f"{name}.values": values.cpu()}
    return {name: new.detach().cpu().contiguous()}


def apply(
    rollout: Transformer, stream: Mapping[str, Tensor], changes: Changes
) -> dict[str, Tensor]:
    """Apply changes to an engine's storages in place, and return the norms that take noise. Gap when
    they are of other weights, ValueError when they do not fit; the engine's tensors are unchanged
    then."""
    whole = norm_names(rollout)
    targets = _targets(rollout)
    mine = {name: tensor for name, tensor in targets.items() if name not in whole}
    if (found := fingerprint(mine, {})) != changes.before:
        raise Gap(
            f"update: codes: they change weights {changes.before} of version {changes.since}, and "
            f"the engine holds {found}"
        )
    norms = _norms(stream, targets, whole, rollout)
    writes = _writes({n: t for n, t in stream.items() if n not in whole}, mine)
    undo = [_Write(write.bits, write.at, write.bits[write.at].clone()) for write in writes.values()]
    for write in writes.values():
        write.bits[write.at] = write.values
    after = fingerprint(mine | norms, {})
    if after != changes.after:
        for write in undo:
            write.bits[write.at] = write.values
        raise ValueError(
            f"update: digest: {changes.after} was stated, and what has come of it has {after}"
        )
    for name, linear in rollout.linears():
        assert isinstance(linear.weight, QTensor)
        if any(f"{name}.weight.{part}" in writes for part in linear.weight.tensors):
            linear.weight.renew()
    if rollout.head is not None:
        rollout.head.renew()
    return norms


def _targets(rollout: Transformer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, linear in rollout.linears():
        assert isinstance(linear.weight, QTensor)
        tensors |= {f"{name}.weight.{part}": t for part, t in linear.weight.tensors.items()}
    linears = {f"{name}.weight" for name, _ in rollout.linears()}
    tensors |= {n: p.detach() for n, p in rollout.named_parameters() if n not in linears}
    return tensors


def _norms(
    stream: Mapping[str, Tensor], targets: Mapping[str, Tensor], whole: set[str], model: Transformer
) -> dict[str, Tensor]:
    norms: dict[str, Tensor] = {}
    for name in whole:
        arrived = stream.get(name)
        if arrived is None or arrived.shape != targets[name].shape:
            raise ValueError(f"update: codes: {name} is missing or of another shape")
        if arrived.dtype != model.dtype:
            raise ValueError(f"update: codes: {name}: {arrived.dtype}, not {model.dtype}")
        norms[name] = arrived.to(targets[name].device)
    return norms


class _Write(NamedTuple):
    """The changed entries of a tensor. bits: all of its entries, as integers in one row."""

    bits: Tensor
    at: Tensor
    values: Tensor


def _writes(stream: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, _Write]:
    """Return the write of each changed tensor. ValueError for what does not fit."""
    writes: dict[str, _Write] = {}
    floats: dict[str, Tensor] = {}
    unused = set(stream)
    for name, target in targets.items():
        keys = {f"{name}.gaps", f"{name}.values", name} & stream.keys()
        unused -= keys
        if not keys:
            continue
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
        values = values.to(target.device)
        if values.dtype in _FLOATS:
            floats[name] = values.contiguous()
        writes[name] = _Write(_bits(target), at, _bits(values))
    if unused:
        raise ValueError(f"update: codes: the engine has no {min(unused)}")
    for name, is_finite in zip(
        floats, checksum.finite(checksum.amax([*floats.values()])), strict=True
    ):
        if not is_finite:
            raise ValueError(f"update: codes: {name} holds a non-finite value")
    return writes


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
