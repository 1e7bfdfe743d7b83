"""y = x W^T for few rows of x: `streamed.cu` for torch, over a QTensor's storages.

Each format has kernels for up to 8, 16, 32, 64, 96 and 128 rows; more rows take several passes.
Other rows do not change a row's product.

Blocks share a device's workspace (34 MiB on an H200), so its products belong on one stream at a
time, and the first, which allocates it, not in a CUDA graph's capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowroll.kernels import nvcc
from lowroll.kernels.build import fields, pointer
from lowroll.kernels.launch import aligned, early
from lowroll.kernels.support import (
    NO_CUDA,
    NO_GRADIENT,
    YES,
    Support,
    cuda_supports,
    needs_gradient,
    no,
)

SOURCE = Path(__file__).with_name("streamed.cu")
FORMATS = {"nvfp4": 0, "mxfp4": 1, "int4": 2, "int4_asym": 3, "bf16": 4}
MULTIPLE = {"bf16": 32}  # of K; 128 for the others
CAPABILITY = (9, 0)  # or later
PARTIAL = 2 * 256 * 128  # floats of a multiprocessor in the workspace: two tiles
TILES = 1 << 16  # counters of the workspace


class StreamedArguments(ctypes.Structure):
    """The struct of `decode.cuh`. tuning: 0 lets the kernel choose tiles."""

    _fields_ = [
        *fields(ctypes.c_void_p, "weight", "scale", "zero", "global_", "bias", "x", "y"),
        *fields(ctypes.c_void_p, "partial", "arrived", "arranged"),
        *fields(ctypes.c_int, "M", "N", "K", "global_per_row", "bias_fp32", "y_fp32"),
        *fields(ctypes.c_int, "early", "tuning"),
    ]


@cache
def supports_device(kind: str, device: torch.device) -> Support:
    if not (support := cuda_supports(device, CAPABILITY)):
        return support
    capability = torch.cuda.get_device_capability(device)
    return nvcc.supports(
        lambda: _library(kind, capability), f"{kind} weights are dequantized for every product"
    )


def supports(kind: str, x_MK: Tensor, shape: tuple[int, int]) -> Support:
    if not x_MK.is_cuda:
        return NO_CUDA
    if x_MK.dtype != torch.bfloat16:
        return no("takes activations in bfloat16")
    if x_MK.ndim != 2 or x_MK.shape[0] == 0:
        return no("takes one row of activations or more")
    if shape[1] % MULTIPLE.get(kind, 128):
        return no("takes in features in multiples of 128, bf16 of 32")
    if not workspace_supports(x_MK.shape[0], shape[0]):
        return no("a product of this size needs a larger workspace")
    if not (support := supports_device(kind, x_MK.device)):
        return support
    return NO_GRADIENT if needs_gradient(x_MK) else YES


def broad_supports(kind: str, shape: tuple[int, int], device: torch.device) -> Support:
    """Return whether a matrix fits `broad.cuh`, whose tiles have up to 128 rows."""
    if kind == "bf16":
        return no("takes 4-bit weights")
    if shape[0] % 8 or shape[1] % (256 if kind == "nvfp4" else 512):
        return no("takes out features in multiples of 8, in features of 512 (nvfp4: 256)")
    return cuda_supports(device, (9, 0), only=True)


def workspace_supports(num_rows: int, num_out: int) -> bool:
    """Return whether the workspace has enough counters: one for 64 rows of 128 channels. Partial
    sums always fit."""
    return -(-num_rows // 64) * 2 * -(-num_out // 256) <= TILES


def linear(
    kind: str,
    tensors: Mapping[str, Tensor],
    x_MK: Tensor,
    num_out: int,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return y_MN in bf16 or float32, with fp32 sums.

    tensors: the format's own (bf16: `weight`). RuntimeError when the kernel cannot be built or
    launched, or for a device's first product within a CUDA graph's capture.
    """
    device = x_MK.device
    library = _library(kind, torch.cuda.get_device_capability(device))
    partial, arrived, num_processors = _workspace(device)
    x_MK = aligned(x_MK)
    y_MN = torch.empty(x_MK.shape[0], num_out, dtype=out_dtype, device=device)
    weight = tensors["weight" if kind == "bf16" else "weight_packed"]
    scale, zero, global_ = (
        tensors.get(name) for name in ("weight_scale", "weight_zero_point", "weight_global_scale")
    )
    if weight.data_ptr() % 16 or not all(
        t is None or t.is_contiguous() for t in (weight, scale, zero, global_)
    ):
        raise ValueError(f"{kind}: expected contiguous tensors that begin at multiples of 16 bytes")
    if bias_N is not None and bias_N.dtype not in (torch.bfloat16, torch.float32):
        bias_N = bias_N.float()
    arguments = StreamedArguments(
        weight.data_ptr(),
        pointer(scale),
        pointer(zero),
        pointer(global_),
        pointer(bias_N),
        x_MK.data_ptr(),
        y_MN.data_ptr(),
        partial.data_ptr(),
        arrived.data_ptr(),
        None,
        x_MK.shape[0],
        num_out,
        x_MK.shape[1],
        global_ is not None and global_.numel() > 1,
        bias_N is not None and bias_N.dtype == torch.float32,
        out_dtype == torch.float32,
        early(),
    )
    needed_sizes = (ctypes.c_longlong * 3)()
    library.streamed_linear(ctypes.byref(arguments), num_processors, needed_sizes, None)
    if needed_sizes[0] > len(partial) or needed_sizes[1] > TILES:
        raise RuntimeError(
            f"{kind}: a product of {x_MK.shape[0]} x {num_out} needs a larger workspace"
        )
    if needed_sizes[2]:
        arranged = torch.empty(needed_sizes[2], dtype=torch.uint8, device=device)
        arguments.arranged = arranged.data_ptr()
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        if error := library.streamed_linear(
            ctypes.byref(arguments), num_processors, None, ctypes.c_void_p(stream)
        ):
            raise RuntimeError(
                f"{kind}: streamed_linear failed: {library.streamed_error(error).decode()}"
            )
    return y_MN


@cache
def _library(kind: str, capability: tuple[int, int]) -> ctypes.CDLL:
    library = nvcc.library(SOURCE, capability, {"FORMAT": str(FORMATS[kind])})
    library.streamed_linear.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    library.streamed_linear.restype = ctypes.c_int
    library.streamed_error.argtypes, library.streamed_error.restype = (
        [ctypes.c_int],
        ctypes.c_char_p,
    )
    return library


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor, int]:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first low-bit product on a device would allocate its workspace: run a step once "
            "before a CUDA graph captures it"
        )
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    partial = torch.empty(num_processors * PARTIAL, dtype=torch.float32, device=device)
    return partial, torch.zeros(TILES, dtype=torch.int32, device=device), num_processors
