"""One pass over the bytes of many tensors in one launch: checksums, and the search for values that are not finite.

    checksum   sum_i mix(w_i) (2 i + 1)  mod 2^64        w_i: the 8-byte words, zeros after the last byte
               mix(w) = v ^ (v >> 29),  v = (w ^ (w >> 32)) * -7046029254386353131       (2^64 / golden ratio, odd)
    finite     no value of a floating-point tensor has all bits of its exponent set

Shifts are arithmetic. A model has some hundred weights, and a launch for each (or a dozen, as in plain torch) would
take longer than reading them: a program reads one block of one tensor, which it finds through a table of addresses.
Sums are of integers, so their order does not matter and the checksum is the CPU's, bit for bit; flags are only ever
raised. The host waits once, for the result of all tensors.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:                  # a machine without Triton has no CUDA device to use it on
    triton = None

GOLDEN = -7046029254386353131
BLOCK_WORDS = 1 << 15                # words that one program reads
STEP_WORDS = 1 << 11                 # of them at a time
_CPU_WORDS = 1 << 20                 # words of one step in plain torch


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """One int64 of every tensor's bytes in row-major order, the same on every device. Waits for the device once."""
    return _by_device(tensors, _device_checksums, _checksum)


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Has every tensor neither NaN nor infinity? Floating-point tensors of 2, 4 or 8 bytes a value; one wait."""
    return [bool(x) for x in _by_device(tensors, _device_finite, _is_finite)]


def uses_triton(tensor: Tensor) -> bool:
    """Do Triton kernels run on this tensor: on CUDA, and anywhere under Triton's interpreter."""
    return triton is not None and (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def _by_device(tensors: Sequence[Tensor], on_device: Callable[[list[Tensor]], Tensor],
               on_cpu: Callable[[Tensor], Tensor]) -> list[int]:
    found: dict[int, int] = {}
    devices = {t.device for t in tensors}
    for device in sorted(devices, key=str):
        mine = {i: t.detach() for i, t in enumerate(tensors) if t.device == device}
        one = next(iter(mine.values()))
        values = on_device(list(mine.values())) if uses_triton(one) else torch.stack([on_cpu(t) for t in mine.values()])
        found.update(zip(mine, values.tolist(), strict=True))
    return [found[i] for i in range(len(tensors))]


# -- plain torch ------------------------------------------------------------------------------------------------------

def _checksum(tensor: Tensor) -> Tensor:
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 8))
    words = raw.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CPU_WORDS):
        block = words[start:start + _CPU_WORDS]
        block = (block ^ (block >> 32)) * GOLDEN
        block = block ^ (block >> 29)
        weights = torch.arange(2 * start + 1, 2 * (start + block.numel()), 2, device=tensor.device)
        total += (block * weights).sum()
    return total


def _is_finite(tensor: Tensor) -> Tensor:
    """By the two extremes, which a NaN takes over: one pass, a tenth of `isfinite().all()`."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(tensor.aminmax()).isfinite().all()


# -- one launch -------------------------------------------------------------------------------------------------------

def _device_checksums(tensors: list[Tensor]) -> Tensor:
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    _sweep(_checksum_kernel, tensors, sums)
    return sums


def _device_finite(tensors: list[Tensor]) -> Tensor:
    flags = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    columns = torch.tensor([_EXPONENTS[t.dtype] for t in tensors]).t()
    _sweep(_finite_kernel, tensors, flags, *columns)
    return flags == 0


def _sweep(kernel: Any, tensors: list[Tensor], out: Tensor, *columns: Tensor) -> None:
    """Launch `kernel` with one program a block. Blocks of all tensors lie one after the other."""
    device = out.device
    tensors = [_aligned(t) for t in tensors]
    blocks = [-(-t.nbytes // (8 * BLOCK_WORDS)) for t in tensors]
    counts = torch.tensor(blocks)
    table = torch.stack([torch.tensor([t.data_ptr() for t in tensors]), torch.tensor([t.nbytes for t in tensors]),
                         counts.cumsum(0) - counts, *columns])
    owner = torch.repeat_interleave(torch.arange(len(tensors), dtype=torch.int32), counts)
    if len(owner):
        kernel[(len(owner),)](table.to(device), owner.to(device), out, len(tensors),
                              BLOCK=BLOCK_WORDS, STEP=STEP_WORDS, num_warps=4)


def _aligned(tensor: Tensor) -> Tensor:
    """Row-major, and at an address from which 16 bytes can be read at once."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _repeated(bits: int, size: int) -> int:
    """The bits of one value in every value of an 8-byte word, as int64."""
    word = sum(bits << (8 * size * i) for i in range(8 // size))
    return word - (1 << 64) if word >> 63 else word


# every value's exponent bits in a word, and the lowest of them: added, they carry into the sign bit if all are set
_EXPONENTS = {dtype: (_repeated(bits, size), _repeated(bits & -bits, size))
              for dtype, bits, size in ((torch.bfloat16, 0x7F80, 2), (torch.float16, 0x7C00, 2),
                                        (torch.float32, 0x7F800000, 4), (torch.float64, 0x7FF << 52, 8))}

if triton is not None:
    @triton.jit
    def _block(table, owner, count, BLOCK: tl.constexpr):
        """(the tensor of this program, its address, its bytes, the first word of the block)."""
        tensor = tl.load(owner + tl.program_id(0))
        address, size = tl.load(table + tensor), tl.load(table + count + tensor)
        first = (tl.program_id(0) - tl.load(table + 2 * count + tensor)) * BLOCK
        return tensor, address, size, first

    @triton.jit
    def _last_word(address, size):
        """The word that the last bytes of a tensor fill in part, with zeros behind them; 0 when there is none."""
        lane = tl.arange(0, 8)
        at = size // 8 * 8 + lane
        byte = tl.load(address.to(tl.pointer_type(tl.uint8)) + at, mask=at < size, other=0)
        return tl.sum(byte.to(tl.int64) << (8 * lane).to(tl.int64), axis=0)

    @triton.jit
    def _mix(word):
        word = (word ^ (word >> 32)) * -7046029254386353131
        return word ^ (word >> 29)

    @triton.jit
    def _checksum_kernel(table, owner, sums, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
        tensor, address, size, first = _block(table, owner, count, BLOCK)
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        whole = size // 8
        total = tl.zeros([STEP], dtype=tl.int64)
        for start in range(0, BLOCK, STEP):
            at = tl.multiple_of(first + start, STEP) + tl.arange(0, STEP)
            total += _mix(tl.load(words + at, mask=at < whole, other=0)) * (2 * at + 1)
        last = _mix(_last_word(address, size)) * (2 * whole + 1)
        here = (whole >= first) & (whole < first + BLOCK)
        tl.atomic_add(sums + tensor, tl.sum(total, axis=0) + tl.where(here, last, 0), sem="relaxed")

    @triton.jit
    def _finite_kernel(table, owner, flags, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
        tensor, address, size, first = _block(table, owner, count, BLOCK)
        exponent, low = tl.load(table + 3 * count + tensor), tl.load(table + 4 * count + tensor)
        words = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        sums = tl.zeros([STEP], dtype=tl.int64)
        for start in range(0, BLOCK, STEP):
            at = tl.multiple_of(first + start, STEP) + tl.arange(0, STEP)
            sums |= (tl.load(words + at, mask=at < size // 8, other=0) & exponent) + low
        last = (_last_word(address, size) & exponent) + low
        odd = tl.max((((sums | last) & (exponent + low)) != 0).to(tl.int32), axis=0)
        tl.atomic_or(flags + tensor, odd, mask=odd != 0, sem="relaxed")
