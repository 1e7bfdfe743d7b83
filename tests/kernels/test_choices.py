"""Which kernel runs, for every product: shapes, dtypes and machines against a written table.

`choices.txt` beside this file has a line for each case: what is launched, in order. The machine is
pretended: tensors lie on the CPU and say that they are on CUDA, a launch is written down instead of
made, and the device says what capability it has. Plain torch runs as it is; a product that launches
nothing of its own is "torch", and the matrix products of torch that take part are named.

    python -m tests.kernels.test_choices > tests/kernels/choices.txt        when a choice changes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from lowroll.kernels import checksum, dispatch, launch, nvcc
from lowroll.kernels.attention import paged
from lowroll.kernels.attention.decode import paged_decode, write_pages
from lowroll.kernels.attention.decode8 import paged_decode8
from lowroll.kernels.attention.quantized_cache import Codes
from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.fused.rope import rotate_heads
from lowroll.kernels.fused.swiglu import silu_mul
from lowroll.kernels.kv_eviction import score
from lowroll.kernels.kv_eviction.choose import best_and_last
from lowroll.kernels.kv_eviction.move import move
from lowroll.kernels.kv_eviction.recording import add_attended, add_supports, remember
from lowroll.kernels.matmul import streamed, w8a8_cuda, w8a8_triton
from lowroll.kernels.moe import grouped, route, routed
from lowroll.kernels.moe.scores import Routing
from lowroll.kernels.moe.stack import Stack
from lowroll.kernels.quantize.rows import E4M3, QuantizedRows, quantize_rows
from lowroll.kernels.sampling.advance import advance
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters, keep
from lowroll.kernels.sampling.penalties import Marked, shape
from lowroll.kernels.support import YES, no
from lowroll.kernels.training.logprobs import logit_gradient, token_log_probs
from lowroll.kernels.training.swiglu_lora import silu_mul_adapted
from lowroll.quant.formats import get_format

pytest.importorskip("triton")

TABLE = Path(__file__).with_name("choices.txt")
CUDA = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CACHED = (
    streamed.supports_device,
    routed.supports_device,
    paged.supports_device,
    w8a8_triton.copy_engine_supports,
)


class Machine(NamedTuple):
    name: str
    capability: tuple[int, int] | None  # None: no CUDA device
    nvcc: bool = True
    triton: bool = True
    torch_low_bit: bool = True  # torch's own e4m3 and grouped products are right


MACHINES = (
    Machine("cpu", None),
    Machine("h100", (9, 0)),
    Machine("h100 without nvcc", (9, 0), nvcc=False),
    Machine("h100 without triton", (9, 0), triton=False),
    Machine("b200", (10, 0)),
    Machine("a100", (8, 0), torch_low_bit=False),
)


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    is_cuda = True
    device = CUDA


class Pretended(TorchFunctionMode):
    """Make on the CPU what is made on the CUDA device, and record torch's matrix products."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        made_there = any(_is_cuda(value) for value in (*args, *kwargs.values()))
        args = tuple("cpu" if _is_cuda(value) else value for value in args)
        kwargs = {name: "cpu" if _is_cuda(value) else value for name, value in kwargs.items()}
        if function is F.linear:
            self.seen.append(f"F.linear {str(args[0].dtype).removeprefix('torch.')}")
        found = function(*args, **kwargs)
        return found.as_subclass(OnCuda) if made_there else found


def _is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


@contextmanager
def pretended(machine: Machine) -> Iterator[list[str]]:
    """The names of what is launched within, on this machine."""
    from triton.runtime.jit import JITFunction

    seen: list[str] = []

    def launched(kernel: JITFunction, *args: Any, **options: Any) -> None:
        module = kernel.__module__.removeprefix("lowroll.kernels.")
        fetched = any(type(value).__name__ == "TensorDescriptor" for value in args)
        by = " by the copy engine" if fetched else ""
        seen.append(f"{module}.{kernel.__name__.strip('_')}{by}")

    def writes(name: str, like: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append(name)
            return like(*args, **kwargs)

        return call

    def grouped_mm(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        shape = (len(offs), len(a), b.shape[1]) if b.ndim == 2 else (len(a), b.shape[2])
        return a.new_zeros(shape)

    low_bit = YES if machine.torch_low_bit else no("it is not right here")
    for known in CACHED:
        known.cache_clear()
    with (
        patch.object(JITFunction, "run", launched),
        patch.object(launch, "triton", launch.triton if machine.triton else None),
        patch.object(torch.cuda, "get_device_capability", lambda *_: machine.capability),
        patch.object(nvcc, "supports", lambda *_: machine.nvcc),
        patch.object(nvcc, "supports_device", lambda _: YES if machine.nvcc else nvcc.NO_NVCC),
        patch.object(w8a8_cuda, "scaled_mm_supports", lambda _: low_bit),
        patch.object(grouped, "grouped_mm_supports_device", lambda _: low_bit),
        patch.object(w8a8_triton, "_turns", lambda _: None),
        patch.object(paged, "decode", writes("paged.cu", lambda q, *_: torch.empty_like(q))),
        patch.object(paged, "decode8", writes("paged.cu", lambda q, *_: torch.empty_like(q))),
        patch.object(
            streamed,
            "linear",
            writes("streamed.cu", lambda kind, tensors, x, out, bias: x.new_empty(len(x), out)),
        ),
        patch.object(
            routed, "multiply", writes("routed.cu", lambda x, stack, groups, **_: x.new_zeros(1, 1))
        ),
        patch.object(
            torch,
            "_int_mm",
            writes("_int_mm", lambda a, b: a.new_zeros(len(a), b.shape[1], dtype=torch.int32)),
        ),
        patch.object(
            torch,
            "_scaled_mm",
            writes(
                "_scaled_mm",
                lambda a, b, *_, out_dtype, **__: a.new_zeros(len(a), b.shape[1], dtype=out_dtype),
            ),
        ),
        patch.object(F, "grouped_mm", writes("grouped_mm", grouped_mm)),
        Pretended(seen) if machine.capability else patch.object(w8a8_cuda, "WIDE", w8a8_cuda.WIDE),
    ):
        try:
            yield seen
        finally:
            for known in CACHED:
                known.cache_clear()


# -- the cases: name, and a call with a function that places tensors on the machine's device --------

Put = Callable[[torch.Tensor], Any]


def attention(
    rows: int,
    heads: int,
    kv_heads: int,
    d: int,
    page: int,
    dtype: torch.dtype,
    odd: bool = False,
    sinks: bool = False,
) -> Callable[[Put], object]:
    def call(put: Put) -> object:
        wide = torch.zeros(rows, (heads + 2 * kv_heads) * d + odd, dtype=dtype)
        q, k, v = wide[:, : (heads + 2 * kv_heads) * d].split(
            [heads * d, kv_heads * d, kv_heads * d], dim=1
        )
        cache = torch.zeros(2, page, kv_heads, d, dtype=dtype)
        return paged_decode(
            put(q.unflatten(1, (heads, d))),
            put(k.unflatten(1, (kv_heads, d))),
            put(v.unflatten(1, (kv_heads, d))),
            put(cache),
            put(cache.clone()),
            put(torch.zeros(rows, 1, dtype=torch.int32)),
            put(torch.ones(rows, dtype=torch.int32)),
            1.0,
            0,
            put(torch.zeros(heads, dtype=dtype)) if sinks else None,
        )

    return call


def coded_attention(rows: int, dtype: torch.dtype) -> Callable[[Put], object]:
    def call(put: Put) -> object:
        q, k = torch.zeros(rows, 8, 128, dtype=dtype), torch.zeros(rows, 1, 128, dtype=dtype)
        widths = (128, 128, 16, 2)
        return paged_decode8(
            put(q),
            put(k),
            put(k.clone()),
            Codes(*(put(torch.zeros(2, 16, 1, width, dtype=torch.uint8)) for width in widths)),
            put(torch.arange(16)[None]),
            put(torch.zeros(rows, 1, dtype=torch.int32)),
            put(torch.ones(rows, dtype=torch.int32)),
            1.0,
        )

    return call


def written(put: Put) -> object:
    cache, x = torch.zeros(2, 16, 1, 64), torch.zeros(3, 1, 64)
    return write_pages(put(cache), put(cache.clone()), put(torch.arange(3)), put(x), put(x))


def low_bit(codes: torch.dtype, rows: int, out: int, width: int, dtype: torch.dtype) -> Any:
    def call(put: Put) -> object:
        x = QuantizedRows(put(torch.zeros(rows, width).to(codes)), put(torch.zeros(rows, 1)), dtype)
        return w8a8_cuda.multiply(
            x, put(torch.zeros(out, width).to(codes)), put(torch.ones(out)), None
        )

    return call


def format_linear(
    format: str, rows: int, width: int, dtype: torch.dtype, kept: bool = False, grad: bool = False
) -> Any:
    def call(put: Put) -> object:
        q = get_format(format).quantize(torch.zeros(256, width))
        q.tensors = {name: put(tensor) for name, tensor in q.tensors.items()}
        if kept:
            q.packed[f"dense {dtype}"] = put(torch.zeros(256, width, dtype=dtype))
        x = put(torch.zeros(rows, width, dtype=dtype))
        return q.linear(x.requires_grad_() if grad else x)

    return call


def dequantized(format: str, width: int, dtype: torch.dtype) -> Any:
    def call(put: Put) -> object:
        q = get_format(format).quantize(torch.zeros(16, width))
        q.tensors = {name: put(tensor) for name, tensor in q.tensors.items()}
        return q.dequantize(dtype)

    return call


def requantized(format: str) -> Any:
    def call(put: Put) -> object:
        q = get_format(format).quantize(torch.zeros(16, 256))
        q.tensors = {name: put(tensor) for name, tensor in q.tensors.items()}
        return q.quantize_(put(torch.zeros(16, 256)), put(torch.zeros(1)))

    return call


def stack(kind: str, experts: int, width: int, put: Put) -> Stack:
    """Matrices of 128 rows."""
    rows = 128 * experts
    if kind in ("bf16", "fp32"):
        return Stack(
            "dense", experts, put(torch.zeros(rows, width, dtype=FP32 if kind == "fp32" else BF16))
        )
    if kind in ("int8", "fp8"):
        codes = put(torch.zeros(rows, width).to(torch.int8 if kind == "int8" else E4M3))
        return Stack("w8a8", experts, codes, put(torch.zeros(rows, 1)), rows=kind)
    q = get_format(kind).quantize(torch.zeros(rows, width))
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    return Stack(kind, experts, *(put(q.tensors[name]) for name in names if name in q.tensors))


def mixture(
    kind: str,
    tokens: int,
    experts: int = 4,
    dtype: torch.dtype = BF16,
    width: int = 128,
    clamped: bool = False,
):
    def call(put: Put) -> object:
        x = put(torch.zeros(tokens, width, dtype=dtype))
        if not launch.triton_supports(x):
            return "an expert at a time"
        router = put(torch.zeros(experts, width, dtype=dtype))
        gate_up, down = stack(kind, experts, width, put), stack(kind, experts, width, put)
        if not clamped:
            return grouped.experts(x, router, gate_up, down, Routing(2, True))
        routing = Routing(2, True, put(torch.zeros(experts, dtype=dtype)))
        return grouped.experts(x, router, gate_up, down, routing, (7.0, 1.702))

    return call


def served(kind: str, dtype: torch.dtype, width: int = 128) -> Any:
    """Not a launch: whether the kernels multiply these matrices at all."""

    def call(put: Put) -> object:
        return f"runs: {bool(grouped.supports(stack(kind, 2, width, put), dtype))}"

    return call


def slots(tokens: int) -> Any:
    return lambda put: route.sort_slots(put(torch.zeros(tokens, 2, dtype=torch.int64)), 4)


def experts_product(dtype: torch.dtype, width: int, turned: bool) -> Any:
    def call(put: Put) -> object:
        w = (
            torch.zeros(2, 64, width, dtype=dtype)
            if turned
            else torch.zeros(2, width, 64, dtype=dtype)
        )
        groups = route.Groups(
            *(put(torch.tensor([0, 1])) for _ in range(2)), put(torch.tensor([1, 2]))
        )
        x = put(torch.zeros(2, width, dtype=dtype))
        return grouped.product(x, put(w).transpose(1, 2) if turned else put(w), groups)

    return call


def experts_outer(dtype: torch.dtype, width: int) -> Any:
    def call(put: Put) -> object:
        groups = route.Groups(
            *(put(torch.tensor([0, 1])) for _ in range(2)), put(torch.tensor([1, 2]))
        )
        return grouped.outer(
            put(torch.zeros(2, 64, dtype=dtype)), put(torch.zeros(2, width, dtype=dtype)), groups
        )

    return call


def norm(rows: str | None, tokens: int = 3) -> Any:
    return lambda put: add_rms_norm(
        put(torch.zeros(tokens, 64)), put(torch.zeros(tokens, 64)), put(torch.ones(64)), 1e-6, rows
    )


def heads(put: Put) -> object:
    angles = put(torch.zeros(3, 1, 8))
    return rotate_heads(put(torch.zeros(3, 64)), angles, angles, 2, 1, 16, None, None, 1e-6)


def gate(tokens: int, size: int, rows: str | None) -> Any:
    return lambda put: silu_mul(put(torch.zeros(tokens, 2 * size, dtype=BF16)), rows)


def adapted(rank: int, dtype: torch.dtype) -> Any:
    return lambda put: silu_mul_adapted(
        put(torch.zeros(3, 32, dtype=dtype)),
        put(torch.zeros(3, rank, dtype=dtype)),
        put(torch.zeros(32, rank, dtype=dtype)),
        rank,
    )


def drawn(put: Put) -> object:
    keys = put(torch.zeros(2, dtype=torch.int64))
    return draw(put(torch.zeros(2, 300)), keys, keys.clone())


def filtered(put: Put) -> object:
    keys, shares = put(torch.ones(2, dtype=torch.int64)), put(torch.ones(2, dtype=torch.float64))
    return keep(put(torch.zeros(2, 300)), Filters(keys, shares, shares.clone()))


def marked(put: Put) -> object:
    one, penalty = put(torch.zeros(2, dtype=torch.int64)), put(torch.ones(2, dtype=torch.float64))
    marks = put(torch.zeros(2, 300, dtype=torch.uint8))
    return shape(put(torch.zeros(2, 300)), Marked(marks, one, penalty, one.clone()), one.clone())


def advanced(put: Put) -> object:
    ids, results = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 2, dtype=torch.int64)
    return advance(
        put(ids),
        put(torch.zeros(2)),
        put(torch.zeros(1, dtype=torch.int64)),
        put(results),
        put(torch.zeros(4, 2)),
        *(put(ids.clone()) for _ in range(4)),
        put(torch.zeros(2, dtype=torch.int32)),
    )


def scored(window: int, dtype: torch.dtype = BF16) -> Any:
    """A bounded cache is scored, where a kernel does that."""

    def call(put: Put) -> object:
        ring = put(torch.zeros(1, 2, window, 8, 64, dtype=dtype))
        if not score.supports(ring, 1):
            return "a layer at a time"
        keys = [put(torch.zeros(3, 16, 1, 64, dtype=dtype))]
        slots, lengths = (put(torch.ones(1, dtype=x)) for x in (torch.int64, torch.int32))
        table = put(torch.zeros(1, 2, dtype=torch.int32))
        important = score.importance(ring, keys, slots, table, lengths)
        return score.join(
            important, score.redundancy(keys, table, lengths, False), lengths, window, 7
        )

    return call


def stays(put: Put) -> object:
    return best_and_last(put(torch.zeros(2, 1, 1, 32)), put(torch.tensor([20])), 4, 2)


def moved(put: Put) -> object:
    buffers = [put(torch.zeros(3, 16, 1, 64)) for _ in range(2)]
    kept, slots = torch.arange(4).expand(2, 1, 1, 4), torch.arange(4)[None]
    return move([buffers], put(torch.zeros(1, 2, dtype=torch.int32)), put(kept), put(slots))


def watched(put: Put) -> object:
    ring, ones = torch.zeros(2, 8, 8, 64), torch.ones(1, dtype=torch.int64)
    return remember(put(ring), put(ones), put(ones), put(torch.zeros(1, 8, 64)))


def given(dtype: torch.dtype) -> Any:
    def call(put: Put) -> object:
        keys, one = put(torch.zeros(3, 16, 1, 64).to(dtype)), put(torch.ones(1, dtype=torch.int32))
        if not add_supports(keys, 8):
            return "plain"
        table, q = put(torch.zeros(1, 2, dtype=torch.int32)), put(torch.zeros(1, 8, 64))
        return add_attended(put(torch.zeros(2, 1, 32)), q, keys, one.long(), table, one)

    return call


def log_probs(put: Put) -> object:
    targets, scores = put(torch.zeros(2, dtype=torch.int64)), put(torch.zeros(2, 50))
    token_log_probs(scores, targets)
    one = put(torch.zeros(2))
    return logit_gradient(scores, targets, one, one, 1.0, put(torch.zeros(2, 50)))


CASES: dict[str, Callable[[Put], object]] = {
    **{
        f"attention {rows} rows, {h}/{g} heads of {d}, page {page}, {str(dtype)[6:]}{', odd' * odd}": (
            attention(rows, h, g, d, page, dtype, odd)
        )
        for rows, h, g, d, page, dtype, odd in (
            (1, 8, 1, 128, 16, BF16, False),
            (15, 8, 1, 128, 16, BF16, False),
            (16, 8, 1, 128, 16, BF16, False),
            (16, 8, 1, 64, 16, FP16, False),
            (16, 8, 1, 128, 16, FP32, False),
            (16, 8, 1, 96, 16, BF16, False),
            (16, 9, 1, 128, 16, BF16, False),
            (64, 16, 2, 128, 32, BF16, False),
            (16, 8, 1, 128, 8, BF16, False),
            (16, 8, 1, 128, 16, BF16, True),
        )
    },
    "attention 16 rows with sinks": attention(16, 8, 1, 64, 16, BF16, sinks=True),
    **{
        f"coded attention {rows} rows, {str(dtype)[6:]}": coded_attention(rows, dtype)
        for rows, dtype in ((15, BF16), (16, BF16), (16, FP32))
    },
    "write pages": written,
    "score bfloat16 of 8": scored(8),
    "score float32 of 8": scored(8, FP32),
    "score bfloat16 of 17": scored(17),
    "stays": stays,
    "moved": moved,
    "watched": watched,
    "given bfloat16": given(BF16),
    "given uint8": given(torch.uint8),
    **{
        f"int8 product {rows} x {out} x {width}": low_bit(torch.int8, rows, out, width, BF16)
        for rows, out, width in (
            (1, 64, 64),
            (2, 64, 64),
            (3, 64, 64),
            (1, 64, 72),
            (96, 64, 64),
            (33, 64, 64),
        )
    },
    **{
        f"fp8 product {rows} x {out} x {width} {str(dtype)[6:]}": low_bit(
            E4M3, rows, out, width, dtype
        )
        for rows, out, width, dtype in (
            (1, 64, 64, BF16),
            (1, 64, 72, BF16),
            (2, 64, 64, BF16),
            (1023, 64, 64, BF16),
            (1024, 64, 64, BF16),
            (1024, 72, 64, BF16),
            (1024, 64, 64, FP16),
        )
    },
    **{
        f"{format} {rows} rows of {width} {str(dtype)[6:]}": format_linear(
            format, rows, width, dtype
        )
        for format in (
            "nvfp4",
            "mxfp4",
            "mxfp4_floor",
            "int4",
            "int4_asym",
            "w4a8",
            "nf4",
            "fp8_block",
            "bf16",
        )
        for rows, width, dtype in (
            (1, 128, BF16),
            (128, 128, BF16),
            (129, 128, BF16),
            (256, 512, BF16),
            (257, 512, BF16),
            (1, 96, BF16),
            (1, 128, FP16),
        )
    },
    **{
        f"nvfp4 {rows} rows, dense kept": format_linear("nvfp4", rows, 128, BF16, kept=True)
        for rows in (32, 33, 129)
    },
    "nvfp4 with a gradient": format_linear("nvfp4", 4, 128, BF16, grad=True),
    **{
        f"dequantize {format} rows of {width} {str(dtype)[6:]}": dequantized(format, width, dtype)
        for format in ("nvfp4", "mxfp4", "mxfp4_floor", "int4", "int4_asym", "w4a8", "nf4")
        for width, dtype in ((128, BF16), (128, FP32), (72, FP32))
    },
    **{
        f"quantize {format}": requantized(format)
        for format in (
            "int8",
            "fp8",
            "fp8_block",
            "int4",
            "int4_asym",
            "w4a8",
            "nvfp4",
            "mxfp4",
            "mxfp4_floor",
            "nf4",
        )
    },
    **{
        f"quantize rows {kind}": (
            lambda put, kind=kind: quantize_rows(put(torch.zeros(2, 32)), kind)
        )
        for kind in ("int8", "fp8")
    },
    **{
        f"experts {kind} {tokens} tokens": mixture(kind, tokens)
        for kind in ("bf16", "int8", "fp8", "nvfp4", "mxfp4", "int4")
        for tokens in (1, 2, 32, 33, 64, 65)
    },
    "experts nvfp4 float16": mixture("nvfp4", 2, dtype=FP16),
    "experts nvfp4 rows of 96": mixture("nvfp4", 2, width=96),
    "experts mxfp4 with clamped gates": mixture("mxfp4", 2, clamped=True),
    **{
        f"experts {kind} kernels with {str(dtype)[6:]}, rows of {width}": served(kind, dtype, width)
        for kind in ("bf16", "fp32", "int8", "nvfp4", "mxfp4")
        for dtype in (BF16, FP32)
        for width in (128, 48)
    },
    **{f"sort slots of {tokens} tokens": slots(tokens) for tokens in (4, 1 << 13, (1 << 13) + 1)},
    **{
        f"experts' product {str(dtype)[6:]} {width}{' turned' * turned}": experts_product(
            dtype, width, turned
        )
        for dtype in (BF16, FP16, FP32)
        for width, turned in ((64, True), (64, False), (60, False))
    },
    **{
        f"experts' outer {str(dtype)[6:]} {width}": experts_outer(dtype, width)
        for dtype, width in ((BF16, 64), (FP32, 64), (BF16, 60))
    },
    "norm": norm(None),
    "norm to int8": norm("int8"),
    "norm of nothing": norm(None, 0),
    "heads": heads,
    **{
        f"gate {tokens} rows of {size} to {rows}": gate(tokens, size, rows)
        for tokens, size, rows in (
            (3, 64, None),
            (95, 64, "int8"),
            (96, 64, "int8"),
            (96, 1 << 15, "fp8"),
            (96, (1 << 15) + 8, "fp8"),
        )
    },
    **{
        f"gate with an update of rank {rank} {str(dtype)[6:]}": adapted(rank, dtype)
        for rank, dtype in ((8, BF16), (256, BF16), (257, BF16), (128, FP32), (129, FP32))
    },
    "draw": drawn,
    "filters": filtered,
    "marks": marked,
    "advance": advanced,
    "log-probs": log_probs,
    "checksum": lambda put: checksum.checksums([put(torch.zeros(8))]),
    "amax": lambda put: checksum.amax([put(torch.zeros(8))]),
}


def chosen(machine: Machine, case: str) -> str:
    """Return what a case launches on a machine, in a line."""

    def put(tensor: torch.Tensor) -> Any:
        return tensor if machine.capability is None else tensor.as_subclass(OnCuda)

    with pretended(machine) as seen:
        found = CASES[case](put)
    if isinstance(found, str):
        return found
    steps = [step for i, step in enumerate(seen) if i == 0 or seen[i - 1] != step]
    return ", ".join(steps) or "torch"


def lines() -> Iterator[str]:
    for case in CASES:
        yield case
        by_choice: dict[str, list[str]] = {}
        for machine in MACHINES:
            by_choice.setdefault(chosen(machine, case), []).append(machine.name)
        for choice, names in by_choice.items():
            yield f"    {', '.join(names)}: {choice}"


@pytest.mark.slow
def test_every_product_runs_by_the_kernels_of_the_table() -> None:
    assert list(lines()) == TABLE.read_text().splitlines()


# -- what `dispatch` tells people is what runs ------------------------------------------------------

# the cases of a product: how their names begin
CASES_OF = {
    "decode attention": ("attention ",),
    "decode attention, 8-bit cache": ("coded attention ",),
    "writes to the KV cache": ("write pages",),
    "scores of a bounded cache": ("score ",),
    "choice of the keys that stay": ("stays",),
    "move of the keys that stay": ("moved",),
    "queries of a bounded cache": ("watched",),
    "attention that keys are given": ("given ",),
    "bf16 product": ("bf16 ",),
    "int8 product": ("int8 product",),
    "fp8 product": ("fp8 product",),
    "4-bit product (nvfp4, mxfp4, int4)": ("nvfp4 ", "mxfp4 ", "int4 ", "int4_asym "),
    "mixture of experts in the engine": (
        "experts nvfp4 1 ",
        "experts nvfp4 65 ",
        "experts int4 33 ",
    ),
    "mixture of experts in the learner": ("experts' ",),
    "routing to experts": ("experts bf16 1 ", "experts bf16 2 ", "sort slots of 4 "),
    "activations to int8 or fp8": ("quantize rows",),
    "weights to int8 or fp8": ("quantize int8", "quantize fp8"),
    "weights to 4 bits": ("quantize nvfp4", "quantize mxfp4", "quantize int4", "quantize w4a8"),
    "norm": ("norm",),
    "rotation": ("heads",),
    "SwiGLU": ("gate 3",),
    "filters of sampling": ("filters",),
    "penalties and bans": ("marks",),
    "sampling": ("draw",),
    "end of a decode step": ("advance",),
    "log-probs of the learner": ("log-probs",),
    "SwiGLU of an adapter": ("gate with",),
    "checksums": ("checksum", "amax"),
}
# no case reaches them: tests of their own do
APART = {
    "AdamW",
    "matmul/w8a8_vnni.cpp",
    "matmul/w8a8_onednn",
    "matmul/w4_avx2.cpp",
    "matmul/float32_by_int8.cpp",
    "learner's product of int8 codes",
    "attention/avx2.cpp",
    "fused/avx2.cpp",
    "sampling/avx2.cpp",
}


def ours(product: str, machine: Machine) -> set[str]:
    """Return what the cases of a product launch, by the names of `dispatch`, without torch's own."""
    steps = {
        step.removesuffix(" by the copy engine")
        for case in CASES
        if case.startswith(CASES_OF[product])
        for step in chosen(machine, case).split(", ")
    }
    files = {kernel.name for kernel in dispatch.PRODUCTS[product]}
    named = {
        step if step.endswith(".cu") else step.rpartition(".")[0].replace(".", "/")
        for step in steps
    }
    return {name for name in files if name in named or name.rpartition("/")[2] in named}


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_kernels_of_the_record_are_those_that_run(machine: Machine) -> None:
    device = CUDA if machine.capability else torch.device("cpu")
    assert CASES_OF.keys() == dispatch.PRODUCTS.keys() - APART
    with pretended(machine):
        told = {product: dispatch.answers(product, device) for product in CASES_OF}
    for product, answers in told.items():
        used = {
            kernel.name
            for kernel, support in answers
            if support and kernel.language != "torch" and kernel.name not in APART
        }
        assert used == ours(product, machine), product
        assert all(support.why_not for _, support in answers if not support)


if __name__ == "__main__":
    print("\n".join(lines()))
