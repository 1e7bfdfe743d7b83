"""Rows sorted by expert times 4-bit matrices, for few rows an expert: `routed.cu` for torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.kernels import nvcc
from lowroll.kernels.build import fields
from lowroll.kernels.launch import aligned, early
from lowroll.kernels.matmul.streamed import FORMATS
from lowroll.kernels.moe.route import Groups
from lowroll.kernels.moe.stack import Stack
from lowroll.kernels.support import NO_CUDA, Support, cuda_supports, no

SOURCE = Path(__file__).with_name("routed.cu")
MOST = {"int4": 16}  # average slots of an expert; beyond, Triton is faster. Others: 32
CAPABILITY = (9, 0)  # or later
MEMORY = 226 * 1024  # bytes of a block's shared memory, without its places


class RoutedTiling(NamedTuple):
    """Places of a tile in eights, stages of a warp's ring, warps, and warps that share channels."""

    eights: int
    stages: int
    warps: int
    split: int


def tiles(slots: int, stack: Stack) -> RoutedTiling:
    """Choose the tiling by the format and the average slots of an expert."""
    num_experts = stack.num_experts
    if slots <= num_experts:
        num_sharing = 1
        if 16 * slots <= num_experts:
            num_sharing = 4
        elif 8 * slots <= num_experts:
            num_sharing = 2
        return RoutedTiling(1, 4, 4, num_sharing)
    if slots <= 6 * num_experts:
        return RoutedTiling(1, 3, 8, 1)
    if slots <= 10 * num_experts or stack.kind == "int4":
        return RoutedTiling(2, 4, 4, 1)
    return RoutedTiling(4, 3, 8, 1)


def shared_memory_supports(size: RoutedTiling, stack: Stack) -> bool:
    ring = size.stages * 2048 + (2048 if stack.kind == "nvfp4" else 1024)
    return stack.features * 16 * size.eights + size.warps * ring <= MEMORY


class RoutedArguments(ctypes.Structure):
    _fields_ = [
        *fields(ctypes.c_void_p, "weight", "scale", "global_", "x", "y", "slot", "ends"),
        *fields(ctypes.c_int, "slots", "experts", "rows", "K", "choices", "swiglu", "to_slots"),
        *fields(ctypes.c_int, "global_per_row", "early", "split"),
    ]


def supports(stack: Stack, x: Tensor, slots: int) -> Support:
    if not stack.packed:
        return no("takes nvfp4, mxfp4 and int4")
    if stack.bias_N is not None:
        return no("adds no biases")
    if not x.is_cuda:
        return NO_CUDA
    if x.dtype != torch.bfloat16:
        return no("takes activations in bfloat16")
    if stack.features % 128:
        return no("takes in features in multiples of 128")
    if slots > MOST.get(stack.kind, 32) * stack.num_experts:
        return no("takes 32 slots an expert on average, at most; 16 of int4")
    if not shared_memory_supports(tiles(slots, stack), stack):
        return no("rows of this length do not fit into shared memory")
    return supports_device(stack.kind, x.device)


@cache
def supports_device(kind: str, device: torch.device) -> Support:
    if not (support := cuda_supports(device, CAPABILITY)):
        return support
    capability = torch.cuda.get_device_capability(device)
    return nvcc.supports(
        lambda: _library(kind, capability), f"experts in {kind} are multiplied by Triton"
    )


def multiply(
    x: Tensor,
    stack: Stack,
    groups: Groups,
    *,
    choices: int = 0,
    swiglu: bool = False,
    to_slots: bool = False,
) -> Tensor:
    """Return [P, N] in bfloat16; arguments as of the kernel in `grouped`. RuntimeError when the
    launch fails."""
    library = _library(stack.kind, torch.cuda.get_device_capability(x.device))
    slots = len(groups.slot_P)
    channels = stack.channels // 2 if swiglu else stack.channels
    tiling = tiles(slots, stack)
    x = aligned(x)
    y = torch.empty((slots, channels), dtype=x.dtype, device=x.device)
    scale, global_ = stack.scale_N1, stack.global_scale
    assert scale is not None
    if stack.codes_NK.data_ptr() % 16 or not all(
        t.is_contiguous() for t in (stack.codes_NK, scale)
    ):
        raise ValueError(
            f"{stack.kind}: expected contiguous tensors that begin at multiples of 16 bytes"
        )
    arguments = RoutedArguments(
        stack.codes_NK.data_ptr(),
        scale.data_ptr(),
        None if global_ is None else global_.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        groups.slot_P.data_ptr(),
        groups.ends_E.data_ptr(),
        slots,
        stack.num_experts,
        channels,
        stack.features,
        choices,
        swiglu,
        to_slots,
        global_ is not None and global_.numel() > 1,
        early(),
        tiling.split,
    )
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream(x.device).cuda_stream
        variant = 1000 * tiling.eights + 100 * tiling.stages + tiling.warps
        if error := library.routed_multiply(
            ctypes.byref(arguments), variant, ctypes.c_void_p(stream)
        ):
            raise RuntimeError(
                f"{stack.kind}: routed_multiply failed: {library.routed_error(error).decode()}"
            )
    return y


@cache
def _library(kind: str, capability: tuple[int, int]) -> ctypes.CDLL:
    library = nvcc.library(SOURCE, capability, {"FORMAT": str(FORMATS[kind])})
    library.routed_multiply.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    library.routed_multiply.restype = ctypes.c_int
    library.routed_error.argtypes, library.routed_error.restype = [ctypes.c_int], ctypes.c_char_p
    return library
