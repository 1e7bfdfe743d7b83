"""A weight update as a value from a learner, and the engine's end, which takes it whole or not at
all (docs/architecture.md).

    engine.update_weights(WeightUpdate.local(master, version=3, noise=noise))    in one process
    engine.update_weights(WeightUpdate.local(master, version=3).as_stream())     by another route

The digest covers what travels; that in a BehaviorTag is of the quantized weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lowroll.kernels import checksum
from lowroll.model import hf, lora, scaling, shards
from lowroll.model.files import some
from lowroll.model.names import hf_names, part_rows
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.weights.exploration_noise import Noise, noisy_norms
from lowroll.weights.publish import (
    drawn_noise,
    fingerprint,
    norms_without_noise,
    publish,
    set_parameter,
)
from lowroll.weights.sync.base import Kind
from lowroll.weights.sync.changes import Changes, apply

Device = torch.device | str
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """The weights of policy `version`."""

    version: int
    # full: every weight, dense, under its Hugging Face name. adapter: LoRA's A and B under PEFT's
    # names. codes: a low-bit model's stored tensors, or with `changes` what differs in them.
    kind: Kind
    # starts the stream again; yielded tensors stay valid until the update has been taken
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    digest: str | None = None  # of the stream (`content_digest`), if stated
    noise: Noise | None = None  # for the norms; the engine draws it
    lora_alpha: float | None = None  # of an adapter; its rank is in the shapes
    # s of update-aware scaling (`model.scaling`), in the weights or in an adapter's base
    input_scale: float = 1.0
    # the learner's model, in its own process; read when the update is taken
    master: Transformer | None = None
    changes: Changes | None = None

    @classmethod
    def local(cls, master: Transformer, version: int, noise: Noise | None = None) -> WeightUpdate:
        """Return the update of a learner in this process: its adapter, else its weights."""
        kind: Kind = "full"
        tensors: Callable[[], Iterable[tuple[str, Tensor]]] = partial(dense, master)
        alphas = {linear.adapter.alpha for _, linear in master.linears() if linear.adapter}
        stored_format = master.weight_format
        if alphas:
            kind, tensors = "adapter", lambda: lora.state(master).items()
        elif stored_format is not None and not get_format(stored_format).dense:
            kind, tensors = "codes", lambda: hf.state(master).items()
        return cls(
            version,
            kind,
            tensors,
            noise=noise,
            # None where layers differ: the engine then names one
            lora_alpha=alphas.pop() if len(alphas) == 1 else None,
            input_scale=scaling.applied(master) or 1.0,
            master=master,
        )

    def as_stream(self) -> WeightUpdate:
        """Return the same update as a stream, with its digest."""
        return replace(self, digest=self.content_digest(), master=None)

    def content_digest(self) -> str:
        """Return the fingerprint of all tensors and other inputs of the policy."""
        numbers = {} if self.lora_alpha is None else {"lora_alpha": self.lora_alpha}
        return fingerprint(dict(self.tensors()), numbers | {"input_scale": self.input_scale})


def dense(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight of a dense model under its Hugging Face name, as views."""
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for name, linear in model.linears():
        if isinstance(linear.weight, QTensor):
            weights[f"{name}.weight"] = linear.weight.tensors["weight"]
    for name, parts, shape in hf_names(model.spec):
        rows = [part_rows(model.spec, part, shape[0]) for part in parts]
        yield from zip(parts, weights[name].detach().split(rows), strict=True)


class UpdateReceiver:
    """The engine's end, for its model and the one beside it (`publish.beside`)."""

    def __init__(self, rollout: Transformer, large_batch_model: Transformer | None = None) -> None:
        self.rollout = rollout
        self.large_batch_model = large_batch_model
        ranks = (linear.adapter.rank for _, linear in rollout.linears() if linear.adapter)
        self.max_rank = max(ranks, default=0)  # 0 for an engine without adapters
        adapted = self.max_rank > 0
        self.kind: Kind = "adapter" if adapted else "full"
        takes_changes = not adapted and large_batch_model is None
        self.kinds = frozenset[Kind]({self.kind, "codes"} if takes_changes else {self.kind})
        self.takes_noise = not norms_without_noise(rollout)
        # clean copies, because an adapter comes without its base
        self._norms = {
            f"{name}.weight": norm.weight.clone()
            for name, norm in noisy_norms(rollout)
            if adapted and f"{name}.weight" not in rollout.shared
        }

    def take(self, update: WeightUpdate) -> None:
        """Refill the engine's storages in place. ValueError, before anything is written, as
        `arrivals`, `check_content` and `publish`."""
        if update.master is not None:
            publish(update.master, self.rollout, update.noise, self.large_batch_model)
            return
        self._check_kind(update)
        if update.changes is not None:
            self._change(update, update.changes)
        elif update.kind == "full":
            rollout = self.rollout
            staging = gather(update, rollout.spec, rollout.dtype, rollout.device)
            publish(staging, rollout, update.noise, self.large_batch_model)
        else:
            self._write_adapter(update)

    def _check_kind(self, update: WeightUpdate) -> None:
        takes_changes = update.changes is not None and "codes" in self.kinds
        expected_kind = "codes" if takes_changes else self.kind
        if update.kind != expected_kind:
            raise ValueError(
                f"update: kind {update.kind!r}: this engine takes streams of kind {self.kind!r}"
            )
        scale = scaling.applied(self.rollout) or 1.0
        if update.input_scale != scale:
            raise ValueError(
                f"update: input_scale: the weights carry s = {update.input_scale}, and the "
                f"engine's model {scale}"
            )
        if update.kind == "adapter" and update.lora_alpha is None:
            raise ValueError("update: lora_alpha: not said")

    @torch.no_grad()
    def _change(self, update: WeightUpdate, changes: Changes) -> None:
        rollout = self.rollout
        drawn = drawn_noise(update.noise, rollout)
        stream = {name: tensor.to(rollout.device) for name, tensor in update.tensors()}
        targets = dict(rollout.named_parameters())
        for name, clean in apply(rollout, stream, changes).items():
            targets[name].copy_(clean.float() + drawn[name] if name in drawn else clean)

    @torch.no_grad()
    def _write_adapter(self, update: WeightUpdate) -> None:
        rollout = self.rollout
        rank = _rank(update, self.max_rank)
        wanted = lora.wanted(rollout, rank)
        arrived = dict(arrivals(update, wanted, rollout.device, lora.are_whole_targets))
        check_content(update, arrived)
        drawn = drawn_noise(update.noise, rollout)
        alpha = update.lora_alpha
        assert alpha is not None
        for name, linear in rollout.linears():
            if linear.adapter is not None:
                linear.adapter.hold(rank, alpha, lora.pairs(name, linear.adapter, arrived))
        norms = dict(rollout.named_parameters())
        for name, clean in self._norms.items():
            norms[name].copy_(clean + drawn[name] if name in drawn else clean)
        for _, linear in rollout.linears():
            if linear.adapter is not None:
                linear.adapter.renew()


def gather(
    update: WeightUpdate, spec: ModelSpec, dtype: torch.dtype, device: Device
) -> Transformer:
    """Return a dense model of a full stream on a device; matrices keep the stream's dtype.
    ValueError as by `UpdateReceiver.take`."""
    staging = Transformer(spec, "meta", dtype)
    parts_of = {parameter: parts for parameter, parts, _ in hf_names(spec)}
    parameter_of = {part: parameter for parameter, parts in parts_of.items() for part in parts}
    arrived: dict[str, dict[str, Tensor]] = {parameter: {} for parameter in parts_of}
    for part, tensor in arrivals(update, dense_shapes(spec), device):
        parameter = parameter_of[part]
        tensors = arrived[parameter]
        tensors[part] = tensor
        if len(tensors) == len(parts_of[parameter]):
            in_order = {name: tensors[name] for name in parts_of[parameter]}
            set_parameter(staging, parameter, _join(in_order))
            tensors.clear()
    check_content(update, dict(dense(staging)))
    return staging


def dense_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every dense tensor, by its Hugging Face name."""
    return {
        part: (part_rows(spec, part, shape[0]), *shape[1:])
        for _, parts, shape in hf_names(spec)
        for part in parts
    }


def _rank(update: WeightUpdate, max_rank: int) -> int:
    shapes = (t.shape for name, t in update.tensors() if name.endswith(".lora_A.weight"))
    shape = next(shapes, None)
    rank = max_rank if not shape else shape[0]
    if not 0 < rank <= max_rank:
        raise ValueError(
            f"update: the adapter has rank {rank}, and this engine has room for {max_rank} "
            "(max_lora_rank, --lora-rank)"
        )
    return rank


def arrivals(
    update: WeightUpdate,
    wanted: Mapping[str, tuple[int, ...]],
    device: Device,
    may_lack: Callable[[Set[str], Set[str]], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a stream on a device. wanted: their shapes. may_lack(missing, all):
    whether a stream may lack tensors. ValueError for one that is unknown, repeated, missing, or of
    another shape or dtype."""
    unseen = set(wanted)
    for name, tensor in update.tensors():
        _check(name, tensor, wanted, unseen)
        unseen.remove(name)
        yield name, tensor.detach().to(device).contiguous()
    if unseen and not (may_lack and may_lack(unseen, wanted.keys())):
        raise ValueError(f"update: missing tensors: {some(sorted(unseen))}")


def _check(
    name: str, tensor: Tensor, wanted: Mapping[str, tuple[int, ...]], unseen: Set[str]
) -> None:
    what = f"update: {some([name])}"
    if name not in wanted:
        raise ValueError(f"{what}: the engine's model has no such tensor")
    if name not in unseen:
        raise ValueError(f"{what}: it comes twice")
    if tuple(tensor.shape) != wanted[name]:
        raise ValueError(f"{what}: shape {list(tensor.shape)} instead of {list(wanted[name])}")
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{what}: {tensor.dtype} is no float32, bfloat16 or float16")


def check_content(update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for a value that is not finite, or another digest."""
    extents = checksum.amax(list(tensors.values()))
    for name, finite in zip(tensors, checksum.finite(extents), strict=True):
        if not finite:
            raise ValueError(f"update: {name} holds a non-finite value")
    if update.digest is None:
        return
    found = replace(update, tensors=tensors.items).content_digest()
    if found != update.digest:
        raise ValueError(
            f"update: digest: {update.digest} was stated, and what has arrived has {found}"
        )


def _join(parts: Mapping[str, Tensor]) -> Tensor:
    dtypes = {part.dtype for part in parts.values()}
    if len(dtypes) > 1:
        raise ValueError(f"update: {some(parts)}: parts of one matrix have different dtypes")
    return shards.join(list(parts.values()), dtypes.pop())
