"""The import of Triton where it exists, and early launches.

Programmatic dependent launch (CUDA, capability 9.0 and later): within `overlapping` a kernel may
start early, once every block of its predecessor runs or has ended, which hides launch latency,
prologues and the first weights. Rules that keep the order of a stream:

1. `after_others` waits until the predecessor has ended and its writes are visible. Before it, a
kernel reads only weights and results of earlier steps (lengths, page tables), and writes nothing:
the predecessor may still read results, workspaces and counters.

2. Every early kernel also waits, in every block that does anything. So the end of B implies the end
of A before it, and C, which waits for B alone, waits for all. This also makes memory safe that the
allocator reuses.

3. A kernel launched plainly (cuBLAS, torch) starts after the end of everything earlier. One of
these must stand between the last write of what is read ahead and its first reader. `prefetch` is
exempt: the L2 cache sees later writes.

Kernels are `@jit` functions at module level; without Triton `jit` and `tl` are placeholders. With
TRITON_INTERPRET=1 (tests) kernels run on CPU tensors, in numpy.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.support import NO_CUDA, NO_TRITON, YES, Support, cuda_supports

triton: Any = import_module("triton") if find_spec("triton") else None
tl: Any = import_module("triton.language") if triton else None
jit: Callable[..., Any] = (
    triton.jit if triton else lambda function=None, **options: function or (lambda f: f)
)
constexpr: Callable[[Any], Any] = tl.constexpr if tl else lambda value: value  # read by kernels

_OVERLAPPING: ContextVar[bool] = ContextVar("overlapping", default=False)

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"


def triton_supports(x: Tensor) -> Support:
    """Return whether Triton's kernels run on this tensor."""
    if triton is None:
        return NO_TRITON
    return YES if x.is_cuda or INTERPRETED else NO_CUDA


def triton_supports_device(device: torch.device) -> Support:
    if triton is None:
        return NO_TRITON
    return YES if device.type == "cuda" or INTERPRETED else NO_CUDA


def block(size: int) -> int:
    """Return the power of two that covers `size`."""
    return 1 << max(0, size - 1).bit_length()


def warps(elements: int, each: int = 512) -> int:
    """Return the warps for so many elements: a power of two up to 32."""
    return min(32, block(max(1, elements // each)))


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x with unit stride along rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return x contiguous and aligned to 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@contextmanager
def overlapping(device: torch.device) -> Iterator[None]:
    """Launch the kernels of the block early, where the device can: a chain of short kernels on one
    stream, without gradients, that begins with a plain launch."""
    token = _OVERLAPPING.set(bool(cuda_supports(device, (9, 0))))
    try:
        yield
    finally:
        _OVERLAPPING.reset(token)


def captured(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Return a graph of what `run` launches, in the memory of `pool` (None: its own).

    Other threads may allocate, copy and wait for a stream, but a wait for the whole device aborts
    the capture. Freeing an engine's cache waits so (`kv.virtual_memory`): garbage collection is
    off.
    """
    graph = torch.cuda.CUDAGraph()
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    finally:
        if gc_was_enabled:
            gc.enable()
    return graph


def early() -> bool:
    return _OVERLAPPING.get()


def early_start() -> dict[str, bool]:
    """Return launch keywords for a kernel that calls `after_others(EARLY)`."""
    return {"EARLY": True, "launch_pdl": True} if early() else {"EARLY": False}


# -- Triton: what a kernel with EARLY begins with --------------------------------------------------


@jit
def let_others_start(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def after_others(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the end of the previous one."""
    let_others_start(EARLY)
    if EARLY:
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(at, EARLY: tl.constexpr):
    """Prefetch lines of 128 bytes into the L2 cache."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
