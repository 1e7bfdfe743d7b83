"""Checksums and largest magnitudes of many tensors in one launch and one pass.

    checksum   sum_i mix(w_i) (2 i + 1)  mod 2^64     w_i: 8-byte words, zeros after the last byte
               mix(w) = v ^ (v >> 29),  v = (w ^ (w >> 32)) * -7046029254386353131
                                                      (2^64 / golden ratio, odd)
    amax       max_i |x_i|, NaN where there is one

Shifts are arithmetic. Sums and maxima are of integers, so CPU and GPU agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.launch import aligned, jit, tl, triton_supports

GOLDEN = -7046029254386353131
BLOCK_BYTES = 1 << 18  # read by one program
STEP_BYTES = 1 << 14  # of it at a time
_CPU_WORDS = 1 << 20  # words of a step in plain torch


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return an int64 of each tensor's bytes in row-major order. Waits for each device once."""
    tensors = [t.detach() for t in tensors]
    return _run_by_group(tensors, lambda t: t.device, lambda group: _checksums(group).tolist())


def amax(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor's largest |value|, float32 [1] on its device; NaN if it has one, 0 if
    empty. bfloat16, float16 and float32, without a wait."""
    tensors = [t.detach() for t in tensors]
    return _run_by_group(
        tensors, lambda t: (t.device, t.dtype), lambda group: _amax(group).float().split(1)
    )


def finite(extents: Sequence[Tensor]) -> list[bool]:
    """Return whether each result of `amax` is finite. Waits for each device once."""
    return _run_by_group(
        extents, lambda t: t.device, lambda group: torch.cat(group).isfinite().tolist()
    )


def _run_by_group(
    tensors: Sequence[Tensor],
    key: Callable[[Tensor], Any],
    run: Callable[[list[Tensor]], Iterable[Any]],
) -> list[Any]:
    indices: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(key(tensor), []).append(i)
    results: dict[int, Any] = {}
    for group in indices.values():
        results.update(zip(group, run([tensors[i] for i in group]), strict=True))
    return [results[i] for i in range(len(tensors))]


# -- plain torch -----------------------------------------------------------------------------------


def _checksum(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    words = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CPU_WORDS):
        block = words[start : start + _CPU_WORDS]
        block = (block ^ (block >> 32)) * GOLDEN
        block = block ^ (block >> 29)
        weights = torch.arange(2 * start + 1, 2 * (start + block.numel()), 2, device=tensor.device)
        total += (block * weights).sum()
    return total


def _largest_magnitude(tensor: Tensor) -> Tensor:
    """Reduce to both extremes, which propagate NaN: one pass, no copy."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    low, high = tensor.aminmax()
    return torch.maximum(-low, high)


# -- one launch ------------------------------------------------------------------------------------


def _checksums(tensors: list[Tensor]) -> Tensor:
    if not triton_supports(tensors[0]):
        return torch.stack([_checksum(t) for t in tensors])
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    _launch_over_blocks(_checksum_kernel, tensors, sums)
    return sums


def _amax(tensors: list[Tensor]) -> Tensor:
    if not triton_supports(tensors[0]):
        return torch.stack([_largest_magnitude(t) for t in tensors])
    integer_dtype = {2: torch.int16, 4: torch.int32}[tensors[0].itemsize]
    bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    _launch_over_blocks(_amax_kernel, [t.view(integer_dtype) for t in tensors], bits)
    return bits.to(integer_dtype).view(tensors[0].dtype)


def _launch_over_blocks(kernel: Any, tensors: list[Tensor], out: Tensor) -> None:
    tensors = [aligned(t) for t in tensors]
    counts = torch.tensor([-(-t.nbytes // BLOCK_BYTES) for t in tensors])
    first_programs = (counts.cumsum(0) - counts).tolist()
    tensor_table = torch.tensor(
        [
            (t.data_ptr(), t.nbytes, first_program)
            for t, first_program in zip(tensors, first_programs, strict=True)
        ]
    )
    tensor_of_program = torch.repeat_interleave(
        torch.arange(len(tensors), dtype=torch.int32), counts
    )
    if len(tensor_of_program):
        item_size = 8 if kernel is _checksum_kernel else tensors[0].itemsize
        kernel[(len(tensor_of_program),)](
            tensor_table.to(out.device),
            tensor_of_program.to(out.device),
            out,
            SIZE=item_size,
            BLOCK=BLOCK_BYTES // item_size,
            STEP=STEP_BYTES // item_size,
            num_warps=4,
        )


# -- Triton ----------------------------------------------------------------------------------------


@jit
def _locate_block(table, owner, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    tensor = tl.load(owner + tl.program_id(0))
    integer: tl.constexpr = tl.int64 if SIZE == 8 else tl.int32 if SIZE == 4 else tl.int16
    values = tl.multiple_of(tl.load(table + 3 * tensor).to(tl.pointer_type(integer)), 16)
    block_start = (tl.program_id(0) - tl.load(table + 3 * tensor + 2)) * BLOCK
    return (
        tensor,
        values,
        tl.load(table + 3 * tensor + 1) // SIZE,
        tl.multiple_of(block_start, BLOCK),
    )


@jit
def _mix(word):
    word = (word ^ (word >> 32)) * -7046029254386353131
    return word ^ (word >> 29)


@jit
def _last_word(table, tensor):
    """Return the word of a tensor's last bytes, zero-padded; 0 if its words are whole."""
    size, lane = tl.load(table + 3 * tensor + 1), tl.arange(0, 8)
    byte_offs = size // 8 * 8 + lane
    byte = tl.load(
        tl.load(table + 3 * tensor).to(tl.pointer_type(tl.uint8)) + byte_offs,
        mask=byte_offs < size,
        other=0,
    )
    return tl.sum(byte.to(tl.int64) << (8 * lane).to(tl.int64), axis=0)


@jit
def _checksum_kernel(
    table, owner, sums, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    tensor, words, size, block_start = _locate_block(table, owner, SIZE, BLOCK)
    total = tl.zeros([STEP], dtype=tl.int64)
    if block_start + BLOCK <= size:  # unmasked loads are wider
        for start in range(0, BLOCK, STEP):
            offs = block_start + start + tl.arange(0, STEP)
            total += _mix(tl.load(words + offs)) * (2 * offs + 1)
        tl.atomic_add(sums + tensor, tl.sum(total, axis=0), sem="relaxed")
    else:
        for start in range(0, BLOCK, STEP):
            offs = block_start + start + tl.arange(0, STEP)
            total += _mix(tl.load(words + offs, mask=offs < size, other=0)) * (2 * offs + 1)
        last = tl.where(size >= block_start, _mix(_last_word(table, tensor)) * (2 * size + 1), 0)
        tl.atomic_add(sums + tensor, tl.sum(total, axis=0) + last, sem="relaxed")


@jit
def _amax_kernel(table, owner, bits, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    tensor, values, size, block_start = _locate_block(table, owner, SIZE, BLOCK)
    magnitude_mask: tl.constexpr = 0x7FFF if SIZE == 2 else 0x7FFFFFFF
    largest_bits = tl.zeros([STEP], dtype=values.dtype.element_ty)
    if block_start + BLOCK <= size:
        for start in range(0, BLOCK, STEP):
            largest_bits = tl.maximum(
                largest_bits,
                tl.load(values + block_start + start + tl.arange(0, STEP)) & magnitude_mask,
            )
    else:
        for start in range(0, BLOCK, STEP):
            offs = block_start + start + tl.arange(0, STEP)
            largest_bits = tl.maximum(
                largest_bits, tl.load(values + offs, mask=offs < size, other=0) & magnitude_mask
            )
    tl.atomic_max(bits + tensor, tl.max(largest_bits.to(tl.int32), axis=0), sem="relaxed")
