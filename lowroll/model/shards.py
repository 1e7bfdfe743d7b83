"""Streaming of safetensors files to a device, and writing them. Headers must have been checked
(`model.headers`).
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from lowroll.checkpoint.atomic_files import naming

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1 << 30
THREADS = 8
PIECE = 16 << 20  # bytes of one read
AHEAD = 2 << 30  # bytes on the device
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorLocation:
    path: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _PendingBatch(NamedTuple):
    tensors: dict[str, Tensor]
    pieces: list[Future[None | torch.cuda.Event]]
    nbytes: int


def stream(
    files: dict[str, Path],
    batches: Sequence[Sequence[str]],
    device: torch.device | str,
) -> Iterator[dict[str, Tensor]]:
    """Yield each batch's tensors by name, on the device and in the files' dtype, usable on the
    current stream. Tensors of one dtype are contiguous in a batch. ValueError names a truncated
    file."""
    locations = _locate_tensors(files, {name for batch in batches for name in batch})
    reader = _Reader(torch.device(device))
    pending: deque[_PendingBatch] = deque()
    pool = ThreadPoolExecutor(THREADS, "shards")
    try:
        for batch in batches:
            pending.append(reader.begin(pool, {name: locations[name] for name in batch}))
            while pending and sum(begun.nbytes for begun in pending) > AHEAD:
                yield reader.finish(pending.popleft())
        while pending:
            yield reader.finish(pending.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        # after an error, no copy may still write to freed memory
        if reader.device.type == "cuda":
            torch.cuda.synchronize(reader.device)
            torch.cuda.empty_cache()


def join(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack the parts in `dtype`, without a copy if they came in one batch and this dtype."""
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    if all(part.dtype == dtype for part in parts) and _are_contiguous(parts):
        row_major_strides = torch.empty(shape, device="meta").stride()
        return parts[0].as_strided(shape, row_major_strides)
    stacked = torch.empty(shape, dtype=dtype, device=parts[0].device)
    for part, rows in zip(parts, stacked.split([len(part) for part in parts]), strict=True):
        rows.copy_(part)
    return stacked


def _are_contiguous(parts: Sequence[Tensor]) -> bool:
    storages = {part.untyped_storage().data_ptr() for part in parts}
    starts = [part.storage_offset() for part in parts]
    ends = [part.storage_offset() + part.numel() for part in parts]
    return len(storages) == 1 and starts[1:] == ends[:-1]


def _locate_tensors(files: dict[str, Path], wanted: set[str]) -> dict[str, TensorLocation]:
    locations = {}
    for path in sorted({files[name] for name in wanted}):
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name in wanted and files[name] == path:
                start, stop = entry["data_offsets"]
                locations[name] = TensorLocation(
                    path,
                    8 + size + start,
                    stop - start,
                    _DTYPES[entry["dtype"]],
                    tuple(entry["shape"]),
                )
    return locations


class _Reader:
    """A reader of file pieces, from any thread. own: each thread's open files, and for a GPU its
    stream and two pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.own = device, threading.local()

    def begin(
        self,
        pool: ThreadPoolExecutor,
        batch: dict[str, TensorLocation],
    ) -> _PendingBatch:
        starts, size = {}, 0
        for name, location in batch.items():
            itemsize = location.dtype.itemsize
            starts[name] = -(-size // itemsize) * itemsize
            size = starts[name] + location.nbytes
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        ready = None
        # this stream may still use the memory's old content
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        tensors, pieces = {}, []
        for name, location in batch.items():
            target = buffer[starts[name] : starts[name] + location.nbytes]
            tensors[name] = target.view(location.dtype).view(location.shape)
            pieces += [
                pool.submit(
                    self.read,
                    location.path,
                    location.start + offset,
                    target[offset : offset + PIECE],
                    ready,
                )
                for offset in range(0, location.nbytes, PIECE)
            ]
        return _PendingBatch(tensors, pieces, size)

    def finish(self, batch: _PendingBatch) -> dict[str, Tensor]:
        """Wait for the reads; the current stream waits for the copies."""
        for piece in batch.pieces:
            copied = piece.result()
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
        return batch.tensors

    def read(
        self, path: Path, start: int, target_B: Tensor, ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Read bytes of a file. On a GPU they arrive by the returned event."""
        if ready is None:
            self.fill(path, start, target_B)
            return None
        if not hasattr(self.own, "stream"):
            self.own.stream = torch.cuda.Stream(self.device)
            self.own.staging = deque(
                (torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
                for _ in range(2)
            )
        pinned_B, last_copy = self.own.staging.popleft()
        last_copy.synchronize()
        pinned_B_part = pinned_B[: len(target_B)]
        self.fill(path, start, pinned_B_part)
        with torch.cuda.stream(self.own.stream):
            self.own.stream.wait_event(ready)
            target_B.copy_(pinned_B_part, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self.own.stream)
        self.own.staging.append((pinned_B, copied))
        return copied

    def fill(self, path: Path, start: int, host_B: Tensor) -> None:
        """Read bytes into a host tensor. ValueError for a file that ends early."""
        if not hasattr(self.own, "files"):
            self.own.files = dict[Path, FileIO]()
        if path not in self.own.files:
            self.own.files[path] = open(path, "rb", buffering=0)
        file = self.own.files[path]
        view = memoryview((ctypes.c_char * len(host_B)).from_address(host_B.data_ptr())).cast("B")
        file.seek(start)
        num_read = 0
        while num_read < len(host_B):
            with naming(path):
                count = file.readinto(view[num_read:])
            if not count:
                raise ValueError(
                    f"{path}: ends at byte {start + num_read}, in the middle of a tensor"
                )
            num_read += count


def write(tensors: dict[str, Tensor], target: Path) -> None:
    shards = _split_into_shards(tensors)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        file_by_tensor = {name: file for file, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": size}, "weight_map": file_by_tensor}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def store(name: str) -> None:  # safetensors releases the GIL
        save_file(shards[name], target / name, metadata={"format": "pt"})

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(store, shards))


def _split_into_shards(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    free_bytes = SHARD_BYTES
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > free_bytes:
            shards.append({})
            free_bytes = SHARD_BYTES
        shards[-1][name] = tensor
        free_bytes -= tensor.nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": part
        for number, part in enumerate(shards, 1)
    }
