"""Kernels that start while the one before ends: compiled for Hopper, each waits before it touches
what others wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowroll.kernels import launch
from lowroll.kernels.attention.decode import paged_decode
from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.fused.rope import rotate_heads
from lowroll.kernels.fused.swiglu import WHOLE, silu_mul
from lowroll.kernels.matmul import gemv, w8a8_triton
from lowroll.kernels.moe import grouped
from lowroll.kernels.moe.scores import Routing
from lowroll.kernels.moe.stack import Stack
from lowroll.kernels.quantize.rows import E4M3, QuantizedRows, quantize_rows
from lowroll.kernels.sampling.advance import advance
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters
from lowroll.kernels.sampling.penalties import Marked, shape
from tests.fixtures.compiled import compiled

FP32, INT32, INT64 = torch.float32, torch.int32, torch.int64
MEMORY = re.compile(r"\b(?:LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UTMALDG|LD\.E|ST\.E)\b")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def product(
    multiply: Callable[..., Tensor], num_rows: int, dtype: torch.dtype = torch.int8
) -> Tensor:
    rows = QuantizedRows(empty(num_rows, 3584, dtype=dtype), empty(num_rows, 1, dtype=FP32))
    return multiply(rows, empty(4608, 3584, dtype=dtype), empty(4608, dtype=FP32), empty(4608))


def marked() -> Marked:
    marks = empty(2, 152064, dtype=torch.uint8)
    return Marked(
        marks, empty(2, dtype=INT64), empty(2, dtype=torch.float64), empty(2, dtype=INT64)
    )


def advanced(*of_marks: Marked) -> object:
    return advance(
        empty(2, dtype=INT64),
        empty(2, dtype=FP32),
        empty(1, dtype=INT64),
        empty(16, 2, dtype=INT64),
        empty(16, 2, dtype=FP32),
        *(empty(2, dtype=INT64) for _ in range(4)),
        empty(2, dtype=INT32),
        *of_marks,
    )


CALLS: dict[str, Callable[[], object]] = {
    "norm": lambda: add_rms_norm(empty(2, 3584), empty(2, 3584), empty(3584), 1e-6),
    "norm-int8": lambda: add_rms_norm(empty(2, 3584), None, empty(3584), 1e-6, "int8"),
    "heads": lambda: rotate_heads(
        empty(2, 4608),
        *(empty(2, 1, 64, dtype=FP32) for _ in range(2)),
        28,
        4,
        128,
        empty(128),
        empty(128),
        1e-6,
    ),
    "gate": lambda: silu_mul(empty(2, 37888), "fp8"),
    "gate-whole": lambda: silu_mul(empty(WHOLE, 37888), "int8"),
    "rows": lambda: quantize_rows(empty(2, 3584), "int8"),
    "attention": lambda: paged_decode(
        empty(1, 28, 128),
        empty(1, 4, 128),
        empty(1, 4, 128),
        empty(8, 16, 4, 128),
        empty(8, 16, 4, 128),
        empty(1, 8, dtype=INT32),
        empty(1, dtype=INT32),
        0.1,
    ),
    "draw": lambda: draw(
        empty(2, 152064, dtype=FP32),
        empty(2, dtype=INT64),
        empty(2, dtype=INT64),
        empty(2, dtype=FP32),
        empty(2, dtype=torch.bool),
    ),
    "filters": lambda: draw(
        empty(2, 152064, dtype=FP32),
        empty(2, dtype=INT64),
        empty(2, dtype=INT64),
        empty(2, dtype=FP32),
        empty(2, dtype=torch.bool),
        Filters(empty(2, dtype=INT64), *(empty(2, dtype=torch.float64) for _ in range(2))),
    ),
    "marks": lambda: shape(empty(2, 152064, dtype=FP32), marked(), empty(2, dtype=INT64)),
    "advance-marks": lambda: advanced(marked()),
    "advance": lambda: advanced(),
    "gemv-int8": lambda: product(gemv.multiply, 2),
    "gemv-fp8": lambda: product(gemv.multiply, 1, E4M3),
    "gemv-bf16": lambda: gemv.linear(empty(1, 3584), empty(4608, 3584), empty(4608)),
    "integers": lambda: product(w8a8_triton.multiply, 64),
    "experts": lambda: grouped.experts(
        empty(8, 512),
        empty(16, 512),
        Stack("dense", 16, empty(16 * 512, 512)),
        Stack("dense", 16, empty(16 * 512, 256)),
        Routing(2, True),
    ),
}

# what is read before the wait: a row's length and pages, of the step before; weights
AHEAD = {"_decode_kernel": "LDG.E R", "_gemv_kernel": "LDG.E.128.STRONG.GPU"}


@pytest.fixture
def hopper() -> Iterator[None]:
    with patch("torch.cuda.get_device_capability", lambda device: (9, 0)), torch.no_grad():
        yield


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this machine has not")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_of_decoding_waits_before_it_reads_or_writes(name: str) -> None:
    with launch.overlapping(torch.device("cuda", 0)):
        listings = compiled(CALLS[name])
    for kernel, sass in listings:
        lines = sass.splitlines()
        waits, starts, touches = (
            [i for i, line in enumerate(lines) if re.search(pattern, line)]
            for pattern in ("ACQBULK", "PREEXIT", MEMORY)
        )
        assert len(waits) == 1 and starts[0] < waits[0] < touches[-1], kernel
        ahead = [lines[i] for i in touches if i < waits[0]]
        assert all(AHEAD.get(kernel, "nothing") in line for line in ahead), f"{kernel}: {ahead}"
        assert bool(ahead) == (kernel in AHEAD), f"{kernel} reads nothing ahead"
        assert not any("EXIT" in line and "PREEXIT" not in line for line in lines[: waits[0]]), (
            f"{kernel} may not wait"
        )
        assert "STL" not in sass, f"{kernel} spills"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this machine has not")
@pytest.mark.usefixtures("hopper")
def test_a_kernel_outside_of_decoding_is_launched_plainly() -> None:
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        with launch.overlapping(device):
            assert launch.early() == (device.type == "cuda")
        assert not launch.early() and launch.early_start() == {"EARLY": False}
    ((_, sass),) = compiled(CALLS["norm"])
    assert "ACQBULK" not in sass and "PREEXIT" not in sass and "CCTL" not in sass


def test_an_older_device_starts_nothing_early() -> None:
    with (
        patch("torch.cuda.get_device_capability", lambda device: (8, 9)),
        launch.overlapping(torch.device("cuda", 0)),
    ):
        assert launch.early_start() == {"EARLY": False}


def test_a_step_that_fails_leaves_no_trace() -> None:
    with (
        pytest.raises(KeyError),
        patch("torch.cuda.get_device_capability", lambda device: (9, 0)),
        launch.overlapping(torch.device("cuda", 0)),
    ):
        raise KeyError
    assert not launch.early()


def test_a_graph_is_captured_beside_threads_that_allocate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server receives weights in a thread of its own while the engine's captures: CUDA's default
    would fail both. tests/gpu/test_prompts.py does it."""
    told: list[dict[str, object]] = []

    @contextmanager
    def graph(captured: object, **options: object) -> Iterator[None]:
        told.append(options)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    launch.captured(lambda: told.append({"ran": True}), "memory")
    assert told == [{"pool": "memory", "capture_error_mode": "thread_local"}, {"ran": True}]
