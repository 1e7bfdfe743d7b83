"""Tensors as they travel from device to device: their bytes one after the other, in buckets.

A parcel is a copy, so the learner goes on while engines fetch it. Its layout is JSON and lies in the
version's folder; the buckets never touch a disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BUCKET_BYTES = 256 << 20  # what travels in one piece; a tensor is never cut
_ALIGNMENT = 16
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}
_MOST_BYTES = 1 << 44


@dataclass(frozen=True)
class Place:
    """The place of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The layout of a parcel: the place of each tensor, the size of each bucket, and the content's
    digest (`WeightUpdate.content_digest`)."""

    places: tuple[Place, ...]
    sizes: tuple[int, ...]
    digest: str

    def to_json(self) -> dict[str, Any]:
        places = [
            [p.name, str(p.dtype).removeprefix("torch."), list(p.shape), p.bucket, p.offset]
            for p in self.places
        ]
        return {"digest": self.digest, "sizes": list(self.sizes), "places": places}

    @classmethod
    def from_json(cls, stated: Any) -> Layout:
        """Return the layout that `to_json` wrote. ValueError for what it would not write."""
        try:
            places = tuple(
                Place(str(name), _DTYPES[dtype], tuple(map(int, shape)), int(bucket), int(offset))
                for name, dtype, shape, bucket, offset in stated["places"]
            )
            found = cls(places, tuple(map(int, stated["sizes"])), str(stated["digest"]))
        except (KeyError, TypeError, ValueError):
            raise ValueError("layout: not that of a parcel") from None
        inside = all(
            min(p.shape, default=0) >= 0
            and 0 <= p.bucket < len(found.sizes)
            and 0 <= p.offset <= p.offset + p.nbytes <= found.sizes[p.bucket] < _MOST_BYTES
            and p.offset % _ALIGNMENT == 0
            for p in places
        )
        if not inside or min(found.sizes, default=0) < 0:
            raise ValueError("layout: a tensor that does not lie in its bucket")
        return found


def pack(
    tensors: Mapping[str, Tensor], digest: str, device: torch.device
) -> tuple[Layout, list[Tensor]]:
    """Return a layout, and the buckets on a device, uint8 each."""
    places: list[Place] = []
    sizes: list[int] = []
    for name, tensor in tensors.items():
        size = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not sizes or sizes[-1] + size > BUCKET_BYTES:
            sizes.append(0)
        places.append(Place(name, tensor.dtype, tuple(tensor.shape), len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    layout = Layout(tuple(places), tuple(sizes), digest)
    buckets = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    for name, view in unpack(layout, buckets).items():
        view.copy_(tensors[name].detach())
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # readers are on other streams, and in other processes
    return layout, buckets


def unpack(layout: Layout, buckets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name, as views of the buckets."""
    return {
        p.name: buckets[p.bucket][p.offset : p.offset + p.nbytes].view(p.dtype).view(p.shape)
        for p in layout.places
    }
