"""The import of Triton, and when its kernels run: the one guard for machines that have none.

Programmatic dependent launch (CUDA, from capability 9.0 on). Within `overlapping` a kernel may
start when every block of the one before it on the stream runs or has ended, and lets the one after
it start as soon as it runs itself: launch latency, prologues and the first weights lie under the
end of the kernel before. What keeps the order of a stream:

1. `after_others` waits until the kernel before has ended and its writes are seen. Ahead of it a
   kernel reads weights and what the step before left (lengths, page tables), and writes nothing:
   results, workspaces and counters may still be read by the kernel before. A matrix that is made
   within the step (dequantized, copied) must not be read ahead.
2. Every kernel that starts early also waits, in every one of its blocks that does anything, before
   it ends. So when B has ended, A before it had, and the C that waits for B alone waits for all: of
   kernels further apart only what rule 1 allows ahead runs at the same time. Memory that the
   allocator passes on in stream order is safe for that reason.
3. A kernel launched plainly (cuBLAS, torch) starts after the end of the one before it and of
   everything earlier. One of these stands between the last write of what is read ahead and the
   first kernel that reads it, if only the embedding. `prefetch` fetches to the L2 cache, where a
   later write is seen: it is right even without that.
4. No kernel keeps one before it from ending: it starts only when no block of that one waits for
   room any more.

Kernels are written as `@jit` functions of module level, with `tl` from here. Without Triton both
are placeholders that are never called. With TRITON_INTERPRET=1 (tests) Triton runs kernels on CPU
tensors, in numpy.
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
    """Do Triton's kernels run on this tensor, rather than plain torch?"""
    if triton is None:
        return NO_TRITON
    return YES if x.is_cuda or INTERPRETED else NO_CUDA


def triton_supports_device(device: torch.device) -> Support:
    """Do Triton's kernels run there?"""
    if triton is None:
        return NO_TRITON
    return YES if device.type == "cuda" or INTERPRETED else NO_CUDA


def early_start_supports(device: torch.device) -> Support:
    """Can kernels start early there?"""
    return cuda_supports(device, (9, 0))


def block(size: int) -> int:
    """The power of two that covers `size` elements."""
    return 1 << max(0, size - 1).bit_length()


def warps(elements: int, each: int = 512) -> int:
    """Warps of a program that holds so many elements, about `each` a warp: 1, 2, 4, ... 32."""
    return min(32, block(max(1, elements // each)))


@contextmanager
def overlapping(device: torch.device) -> Iterator[None]:
    """Let kernels launched within start while the one before ends, where the device can do that
    (see the top).

    For a step of decoding: a chain of short kernels on one stream, without gradients, that begins
    with a plain launch.
    """
    token = _OVERLAPPING.set(bool(early_start_supports(device)))
    try:
        yield
    finally:
        _OVERLAPPING.reset(token)


def captured(run: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches, in the memory of `pool` (another graph's, or None for its own).

    Other threads may allocate, copy and wait for a stream meanwhile, as one does that receives
    weights. None may wait for the whole device: CUDA refuses that, and the capture is lost. So it is
    where garbage is collected meanwhile and an engine is freed, since its cache waits for the device
    (`kv.virtual_memory`): automatic collection is off until the capture ends.
    """
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    finally:
        if collects:
            gc.enable()
    return graph


def early() -> bool:
    """Is a kernel that is launched now to start early?"""
    return _OVERLAPPING.get()


def early_start() -> dict[str, bool]:
    """The keywords of a launch, early or plain: for kernels that call `after_others(EARLY)`."""
    return {"EARLY": True, "launch_pdl": True} if early() else {"EARLY": False}


# -- Triton: what a kernel with EARLY begins with --------------------------------------------------


@jit
def let_others_start(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def after_others(EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the end of the one before."""
    let_others_start(EARLY)
    if EARLY:
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(at, EARLY: tl.constexpr):
    """Fetch what lies at these addresses into the L2 cache, for a load after the wait. A line is
    128 bytes."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
