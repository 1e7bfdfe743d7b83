"""Tensors as buckets of bytes, and their transport between devices: by NCCL, by gloo on CPUs, or
through CUDA IPC. Buckets are a copy, so the learner continues meanwhile."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from lowroll.weights.sync.base import LinkFailed

BUCKET_BYTES = 256 << 20  # a larger tensor has its own bucket and is never cut
JOIN_S = 30.0  # for all members of a group to connect
_ALIGNMENT = 16
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
_MOST_BYTES = 1 << 44


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class TensorSlot(NamedTuple):
    """A tensor's position in the buckets."""

    name: str
    dtype_name: Literal["float32", "bfloat16", "float16"]
    shape: tuple[_Natural, ...]
    bucket: _Natural
    offset: _Natural

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype_name]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class BucketLayout(msgspec.Struct, frozen=True):
    """The slots, the bytes of each bucket, and `WeightUpdate.content_digest`."""

    places: tuple[TensorSlot, ...]
    sizes: tuple[_Natural, ...]
    digest: str

    def to_json(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    @classmethod
    def from_json(cls, stated: Any) -> BucketLayout:
        """Parse the layout that `to_json` wrote. ValueError for anything else."""
        try:
            layout = msgspec.convert(stated, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"layout: {error}") from None
        for slot in layout.places:
            if slot.bucket >= len(layout.sizes) or slot.offset % _ALIGNMENT:
                raise ValueError("layout: a tensor that does not lie in a bucket")
            if not slot.offset + slot.nbytes <= layout.sizes[slot.bucket] < _MOST_BYTES:
                raise ValueError("layout: a tensor that does not lie in its bucket")
        return layout


def pack(
    tensors: Mapping[str, Tensor], digest: str, device: torch.device
) -> tuple[BucketLayout, list[Tensor]]:
    """Copy tensors, in their order, into uint8 buckets on a device, each filled up to BUCKET_BYTES.
    ValueError names a tensor whose dtype is none of weights."""
    slots: list[TensorSlot] = []
    sizes: list[int] = []
    for name, tensor in tensors.items():
        aligned_size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not sizes or sizes[-1] + aligned_size > BUCKET_BYTES:
            sizes.append(0)
        bucket, offset = len(sizes) - 1, sizes[-1]
        dtype_name: Any = str(tensor.dtype).removeprefix("torch.")
        if dtype_name not in _DTYPES:
            raise ValueError(f"{name}: {dtype_name}, expected one of {', '.join(_DTYPES)}")
        slots.append(TensorSlot(name, dtype_name, tuple(tensor.shape), bucket, offset))
        sizes[-1] += aligned_size
    layout = BucketLayout(tuple(slots), tuple(sizes), digest)
    buckets = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    for name, view in unpack(layout, buckets).items():
        view.copy_(tensors[name].detach())
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # readers are on other streams and in other processes
    return layout, buckets


def unpack(layout: BucketLayout, buckets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name, as views of the buckets."""
    return {
        s.name: buckets[s.bucket][s.offset : s.offset + s.nbytes].view(s.dtype).view(s.shape)
        for s in layout.places
    }


class BucketGroup:
    """Processes that receive buckets from a trainer, rank 0.

    number: of the group in the store. host: this process's address, for gloo. deadline_s: of a
    broadcast.
    """

    def __init__(
        self, store: Any, number: int, rank: int, size: int, device: torch.device, host: str,
        deadline_s: float,
    ) -> None:  # fmt: skip
        group_store = dist.PrefixStore(f"group-{number}", store)
        joining = timedelta(seconds=min(JOIN_S, deadline_s))
        group_store.set_timeout(joining)
        self._span = timedelta(seconds=deadline_s)
        torch_groups: Any = dist  # its types lack both options
        options: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = torch_groups.ProcessGroupNCCL.Options()
            options._timeout = self._span
            self._group = torch_groups.ProcessGroupNCCL(group_store, rank, size, options)
        else:
            gloo = torch_groups.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = joining
            self._group = gloo(group_store, rank, size, options)

    def broadcast(self, bucket: Tensor) -> None:
        """Broadcast from rank 0 to all, in place. RuntimeError on a timeout."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._span
        self._group.broadcast([bucket], options).wait(self._span)
        if bucket.device.type == "cuda":
            torch.cuda.current_stream(bucket.device).synchronize()

    def abort(self) -> None:
        """Abort the group, even when a peer hangs."""
        with suppress(RuntimeError, AttributeError):
            self._group.abort()


def ipc_handles(buckets: Sequence[Tensor]) -> list[list[Any]]:
    """Return the IPC handles of GPU buckets for one other process, as numbers and base64."""
    return [
        [
            base64.b64encode(part).decode() if isinstance(part, bytes) else part
            for part in bucket.untyped_storage()._share_cuda_()[1:]
        ]
        for bucket in buckets
    ]


def copy_by_ipc(
    handles: Any, uuid: str, sizes: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Copy the buckets behind `ipc_handles` to a device. LinkFailed when they do not open here."""
    if device.type != "cuda":
        raise LinkFailed("cuda_ipc: this engine is on a CPU")
    index = next((i for i in range(torch.cuda.device_count()) if device_uuid(i) == uuid), None)
    if index is None:
        raise LinkFailed(f"cuda_ipc: this engine does not see the learner's GPU {uuid}")
    copies = []
    try:
        for bucket_handles, size in zip(handles, sizes, strict=True):
            copies.append(_open_bucket(bucket_handles, size, index).to(device, copy=True))
        # not the whole device, on which the engine's thread may capture a graph
        torch.cuda.current_stream(device).synchronize()
    except (TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise LinkFailed(f"cuda_ipc: {error}") from None
    return copies


def _open_bucket(handles: Any, size: int, index: int) -> Tensor:
    handle, nbytes, offset, counter, counter_offset, event, sync = handles
    storage = torch.UntypedStorage._new_shared_cuda(
        index,
        base64.b64decode(handle, validate=True),
        int(nbytes),
        int(offset),
        base64.b64decode(counter, validate=True),
        int(counter_offset),
        base64.b64decode(event, validate=True),
        bool(sync),
    )
    bucket = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
    return bucket.set_(storage, 0, (size,), (1,))


def device_uuid(index: int | None) -> str:
    """Return a GPU's UUID, the same in every process."""
    return str(torch.cuda.get_device_properties(index or 0).uuid)
