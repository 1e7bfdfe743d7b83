"""The kernels of every product, the fastest first, and which of them run on a device.

Product functions try kernels in this order, which tests/kernels check; `lowroll doctor` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from lowroll.kernels import nvcc
from lowroll.kernels.attention import avx2 as attention_avx2
from lowroll.kernels.attention import paged
from lowroll.kernels.fused import avx2 as fused_avx2
from lowroll.kernels.launch import triton_supports_device
from lowroll.kernels.matmul import (
    float32_by_int8,
    gemv,
    streamed,
    w4_avx2,
    w4a16,
    w8a8_cuda,
    w8a8_onednn,
    w8a8_vnni,
)
from lowroll.kernels.moe import grouped, routed
from lowroll.kernels.sampling import avx2 as sampling_avx2
from lowroll.kernels.support import YES, Support, cuda_supports, no


class Kernel(NamedTuple):
    """A kernel, named by its file or torch's function. takes: its calls; "" is every remaining
    one."""

    name: str
    language: str  # CUDA C++, C++, Triton, oneDNN or torch
    takes: str
    supports_device: Callable[[torch.device], Support]


class DeviceSupport(NamedTuple):
    kernel: Kernel
    support: Support


def _cuda_kernel(
    name: str,
    takes: str,
    capability: tuple[int, int],
    *,
    only: bool = False,
    within_triton: bool = False,
) -> Kernel:
    def supports_device(device: torch.device) -> Support:
        if within_triton and not (support := triton_supports_device(device)):
            return support
        return cuda_supports(device, capability, only) and nvcc.supports_device(device)

    return Kernel(name, "CUDA C++", takes, supports_device)


def _paged_kernel(numbers: str) -> Kernel:
    takes = f"{paged.FEWEST} rows or more, {numbers}, heads of 64 or 128"
    return _cuda_kernel(
        "attention/paged.cu", takes, paged.CAPABILITY, only=True, within_triton=True
    )


def _triton_kernel(name: str, takes: str = "") -> Kernel:
    return Kernel(name, "Triton", takes, triton_supports_device)


def _torch_kernel(name: str = "plain torch") -> Kernel:
    return Kernel(name, "torch", "", lambda device: YES)


def _scaled_mm(device: torch.device) -> Support:
    return cuda_supports(device) and w8a8_cuda.scaled_mm_supports(device)


PRODUCTS: dict[str, tuple[Kernel, ...]] = {
    "decode attention": (
        _paged_kernel("16-bit numbers"),
        _triton_kernel("attention/decode"),
        Kernel(
            "attention/avx2.cpp",
            "C++",
            f"float32, rows of {attention_avx2.LEAST} numbers or more",
            attention_avx2.supports_device,
        ),
        _torch_kernel(),
    ),
    "decode attention, 8-bit cache": (
        _paged_kernel("16-bit queries"),
        _triton_kernel("attention/decode8"),
        _torch_kernel(),
    ),
    "scores of a bounded cache": (
        _triton_kernel("kv_eviction/score", "keys in bfloat16, float16 or float32"),
        _torch_kernel(),
    ),
    "choice of the keys that stay": (_triton_kernel("kv_eviction/choose"), _torch_kernel()),
    "move of the keys that stay": (_triton_kernel("kv_eviction/move"), _torch_kernel()),
    "queries of a bounded cache": (_triton_kernel("kv_eviction/recording"), _torch_kernel()),
    "attention that keys are given": (
        _triton_kernel("kv_eviction/recording", "keys in bfloat16, float16 or float32"),
        _torch_kernel(),
    ),
    "writes to the KV cache": (_triton_kernel("attention/decode"), _torch_kernel()),
    "bf16 product": (
        _triton_kernel("matmul/gemv", f"up to {gemv.MOST[torch.bfloat16]} rows"),
        _torch_kernel("torch's product, packed for oneDNN on a CPU"),
    ),
    "int8 product": (
        _triton_kernel("matmul/gemv", f"up to {gemv.MOST[torch.int8]} rows"),
        _triton_kernel("matmul/w8a8_triton"),
        Kernel(
            "matmul/w8a8_vnni.cpp",
            "C++",
            f"{w8a8_vnni.LEAST} features or more, in {w8a8_vnni.MULTIPLE}s; beside AMX up to "
            f"{w8a8_vnni.MOST_BESIDE_AMX} rows",
            w8a8_vnni.supports_device,
        ),
        Kernel("matmul/w8a8_onednn", "oneDNN", "", w8a8_onednn.supports_device),
        Kernel("torch._int_mm", "torch", "", cuda_supports),
        _torch_kernel("float32 products of 1,024 columns, which are exact"),
    ),
    "learner's product of int8 codes": (
        Kernel(
            "matmul/float32_by_int8.cpp",
            "C++",
            f"matrices of {float32_by_int8.LEAST:,} weights or more, on a CPU with AMX",
            float32_by_int8.supports_device,
        ),
        _torch_kernel("the dequantized matrix"),
    ),
    "fp8 product": (
        _triton_kernel("matmul/gemv", f"{gemv.MOST[torch.float8_e4m3fn]} row"),
        Kernel("torch._scaled_mm", "torch", "", _scaled_mm),
        _torch_kernel("float32 product"),
    ),
    "4-bit product (nvfp4, mxfp4, int4)": (
        _cuda_kernel(
            "matmul/streamed.cu",
            f"up to {w4a16.STREAM_ROWS} rows in bfloat16, {w4a16.BROAD_ROWS} on Hopper",
            streamed.CAPABILITY,
        ),
        Kernel(
            "matmul/w4_avx2.cpp",
            "C++",
            f"{w4_avx2.LEAST} weights or more, rows of whole {w4_avx2.MULTIPLE}s",
            w4_avx2.supports_device,
        ),
        _triton_kernel(
            "matmul/w4a16", "matrices of whole blocks: dequantized, then torch's product"
        ),
        _torch_kernel("torch's product of the dequantized matrix"),
    ),
    "mixture of experts in the engine": (
        _cuda_kernel(
            "moe/routed.cu",
            "4-bit weights and bfloat16, few tokens an expert",
            routed.CAPABILITY,
            within_triton=True,
        ),
        _triton_kernel("moe/grouped"),
        _torch_kernel("one expert at a time"),
    ),
    "mixture of experts in the learner": (
        _triton_kernel("moe/grouped", "forward, in 16-bit numbers"),
        Kernel("torch.grouped_mm", "torch", "bfloat16", grouped.grouped_mm_supports_device),
        _torch_kernel("one expert at a time"),
    ),
    "routing to experts": (_triton_kernel("moe/route"), _torch_kernel()),
    "activations to int8 or fp8": (_triton_kernel("quantize/rows"), _torch_kernel()),
    "weights to int8 or fp8": (_triton_kernel("quantize/quantize8"), _torch_kernel()),
    "weights to 4 bits": (_triton_kernel("quantize/quantize4"), _torch_kernel()),
    "norm": (_triton_kernel("fused/norm"), _torch_kernel()),
    "rotation": (
        _triton_kernel("fused/rope"),
        Kernel(
            "fused/avx2.cpp",
            "C++",
            f"float32, rows of {fused_avx2.LEAST} numbers; a learner's if no QK-norm",
            fused_avx2.supports_device,
        ),
        _torch_kernel(),
    ),
    "SwiGLU": (_triton_kernel("fused/swiglu"), _torch_kernel()),
    "penalties and bans": (_triton_kernel("sampling/penalties"), _torch_kernel()),
    "filters of sampling": (_triton_kernel("sampling/filters"), _torch_kernel()),
    "sampling": (
        _triton_kernel("sampling/draw"),
        Kernel("sampling/avx2.cpp", "C++", "", sampling_avx2.supports_device),
        _torch_kernel(),
    ),
    "end of a decode step": (_triton_kernel("sampling/advance"), _torch_kernel()),
    "log-probs of the learner": (_triton_kernel("training/logprobs"), _torch_kernel()),
    "SwiGLU of an adapter": (
        _triton_kernel("training/swiglu_lora", "ranks up to 256"),
        _torch_kernel(),
    ),
    "AdamW": (_triton_kernel("training/adamw"), _torch_kernel()),
    "checksums": (_triton_kernel("checksum"), _torch_kernel()),
}


def answers(product: str, device: torch.device) -> list[DeviceSupport]:
    """Return a product's kernels, up to the one for every remaining call, and the device's
    support."""
    device_supports: list[DeviceSupport] = []
    for kernel in PRODUCTS[product]:
        support = _query_support(kernel, device)
        device_supports.append(DeviceSupport(kernel, support))
        if support and not kernel.takes:
            break
    return device_supports


def _query_support(kernel: Kernel, device: torch.device) -> Support:
    try:
        return kernel.supports_device(device)
    except RuntimeError as error:  # such as no free memory
        return no(f"asking the device failed: {str(error).splitlines()[0]}")
