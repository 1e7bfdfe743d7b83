"""Sums of int8 codes by float32 products: the integers themselves, for any codes and shapes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.kernels.matmul import w8a8_float32, w8a8_onednn
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.quant import int8

CPU = torch.device("cpu")


def of_kind(kind: str, rows: int, num_in: int) -> Tensor:
    if kind == "least":
        return torch.full((rows, num_in), -128, dtype=torch.int8)
    if kind == "largest":
        return torch.full((rows, num_in), 127, dtype=torch.int8)
    if kind == "odd":  # sums need every bit
        return torch.full((rows, num_in), 127, dtype=torch.int8).index_fill_(
            1, torch.arange(0, num_in, 2), 125
        )
    return torch.randint(-128, 128, (rows, num_in), dtype=torch.int8)


@pytest.mark.parametrize("kind", ["least", "largest", "odd", "random"])
@pytest.mark.parametrize("num_in", [1, 7, 1023, 1024, 1025, 2048, 4099])
@pytest.mark.parametrize("rows", [1, 37])
def test_sums_are_the_integers_rounded_once(kind: str, num_in: int, rows: int) -> None:
    x_MK, w_NK = of_kind(kind, rows, num_in), of_kind("random", 19, num_in)
    w_NK[0], w_NK[1] = -128, 127
    got_MN = w8a8_float32.multiply(x_MK, w8a8_float32.split(w_NK))
    want_MN = x_MK.to(torch.int64) @ w_NK.to(torch.int64).t()
    assert got_MN.dtype == torch.float32 and torch.equal(got_MN, want_MN.to(torch.float32))


def test_a_part_is_as_long_as_float32_allows() -> None:
    """No sum of `COLUMNS` products is above 2^24; one of twice as many can be, and is rounded."""
    assert w8a8_float32.COLUMNS * 128 * 128 <= 2**24
    codes = torch.full((1, 2 * w8a8_float32.COLUMNS + 1), 127, dtype=torch.int8)
    codes[0, -1] = 1
    whole = codes.float() @ codes.float().t()
    assert int(whole) != int(codes.long() @ codes.long().t())


@pytest.mark.parametrize("shape", [(48, 80), (33, 1025), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_format_has_the_same_bits_by_it_and_by_onednn(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not w8a8_onednn.supports_device(CPU):
        pytest.skip("this CPU's oneDNN int8 kernel is not exact")
    q, bias = lowroll.quantize(torch.randn(shape), "int8"), torch.randn(shape[0])
    rows = quantize_rows(torch.randn(9, shape[1]).to(dtype), "int8")
    by_onednn = int8.Int8().product(rows, q, bias).dense()
    monkeypatch.setattr(w8a8_onednn, "supports_device", lambda device: False)
    assert torch.equal(int8.Int8().product(rows, q, bias).dense(), by_onednn)
    q.quantize_(torch.randn(shape))  # and never a stale one
    renewed = int8.Int8().product(rows, q, None).dense(torch.float32)
    sums = rows.codes_MK.double() @ q.tensors["codes"].double().t()
    want = sums.float() * q.tensors["scale"].flatten() * rows.scale_M1
    assert torch.equal(renewed, want)


PRODUCT = """
import torch, lowroll
torch.set_num_threads(1)
w, x = torch.ones(64, 256), torch.ones(4, 256)
w[::2] *= -1
x[::2] *= -1
q = lowroll.quantize(w, "int8")
exact = x.double() @ q.dequantize().double().t()
print(float((q.linear(x).double() - exact).abs().max()))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize("isa", [("avx2", "AVX2"), ("avx512", "AVX512_CORE")], ids="-".join)
def test_an_int8_layer_does_not_saturate_on_a_cpu_without_vnni(isa: tuple[str, str]) -> None:
    """Pairs of such products do not fit the 16 bits in which these instructions add them."""
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    run = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        env={**os.environ, **dict(zip(names, isa, strict=True))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-4
