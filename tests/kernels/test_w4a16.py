"""4-bit weights times bf16 activations: the dequantizer in the interpreter, the bit tricks, and
what nvcc makes of it.

What the compiled kernel computes is tested on a GPU (test_gpu_w4a16.py).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowroll.kernels import build, nvcc
from lowroll.kernels.attention import paged
from lowroll.kernels.matmul import streamed, w4a16
from lowroll.kernels.moe import routed
from lowroll.kernels.support import Support
from lowroll.quant.formats import QTensor, get_format, quantize
from lowroll.quant.groups import E2M1_LEVELS
from tests.fixtures.compiled import spills_of

KINDS = ("nvfp4", "mxfp4", "int4", "int4_asym")
SHAPES = ((5, 128), (9, 384), (16, 256))


def matrix(kind: str, shape: tuple[int, int]) -> QTensor:
    generator = torch.Generator().manual_seed(shape[0])
    w_NK = (
        torch.randn(shape, generator=generator)
        * torch.randn(shape[0], 1, generator=generator).exp()
    )
    w_NK[0] = 0
    form = get_format(kind)
    return QTensor(kind, shape, form.encode(w_NK))


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_bits_are_those_of_plain_torch(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        q = matrix(kind, shape)
        if kind == "nvfp4" and shape[0] % 2:  # parts with global scales of their own
            q.tensors["weight_global_scale"] = torch.linspace(0.3, 900.0, shape[0])
        if kind == "nvfp4":  # every scale there is
            codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
            q.tensors["weight_scale"] = codes.repeat(shape[0])[
                : q.tensors["weight_scale"].numel()
            ].view(shape[0], -1)
        if kind == "mxfp4":
            q.tensors["weight_scale"][1:3] = torch.tensor([0, 254], dtype=torch.uint8)[:, None]
        got_NK = w4a16.dequantize(kind, q.tensors, shape, dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(w4a16, "supports_dequantize", lambda *_: False)
            assert torch.equal(got_NK, q.dequantize(dtype)), (kind, shape)


def test_e2m1_bits_times_a_scale_are_exact_in_bf16() -> None:
    """One mask, one multiplication, one mask: the pairs of a word, each code times 2^-126, at both
    places of a pair."""
    levels = torch.tensor(E2M1_LEVELS, dtype=torch.float64)
    for multiplier, mask, at in ((0x1040, 0x000F000F, 0), (0x0104, 0x00F000F0, 4)):
        word = torch.tensor(
            [
                low << at | high << at + 16 | 0xFFFFFFFF & ~mask
                for low, high in itertools.product(range(16), repeat=2)
            ],
            dtype=torch.int64,
        )
        pair = (word & mask) * multiplier & 0x81C081C0
        halves = torch.stack((pair & 0xFFFF, pair >> 16), dim=-1)
        value = (
            (halves << 16)
            .where(halves < 0x8000, (halves << 16) - (1 << 32))
            .int()
            .view(torch.float32)
            .double()
        )
        wanted = torch.cartesian_prod(levels, levels) * 2.0**-126
        assert torch.equal(value, wanted)
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    product = levels[:, None] * scale * 2.0**-8
    assert (
        torch.equal(product.bfloat16().double(), product)
        and (scale * 2.0**118).bfloat16().isfinite().all()
    )
    assert torch.equal((scale * 2.0**118).bfloat16().double(), scale * 2.0**118)


def test_int4_bits_are_exact_in_bf16() -> None:
    """0x4300 | code is 128 + code, less 128 + zero point."""
    codes = torch.arange(16, dtype=torch.int16)
    value = (codes | 0x4300).view(torch.bfloat16)
    assert torch.equal(value.float(), 128.0 + codes)
    assert torch.equal((value[:, None] - value).float(), (codes[:, None] - codes).float())


@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_is_as_it_was(kind: str) -> None:
    q = quantize(torch.randn(8, 256, generator=torch.Generator().manual_seed(1)), kind)
    x_MK = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert not w4a16.supports(kind, x_MK, q.shape)
    assert torch.equal(
        q.linear(x_MK), torch.nn.functional.linear(x_MK, q.dequantize(torch.bfloat16))
    )


# -- the compiler ----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/lowroll/kernels"


def fake_nvcc(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "cuda/bin/nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
    nvcc.compiler.cache_clear()


def test_a_failed_build_says_what_nvcc_said(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(
        tmp_path, '[ "$1" = --version ] && exit 0; echo "line 3: nonsense" >&2; exit 2', monkeypatch
    )
    with pytest.raises(RuntimeError, match="(?s)streamed.cu: nvcc failed .2.:.*line 3: nonsense"):
        nvcc.library(streamed.SOURCE, (9, 0), {"FORMAT": "0"})
    assert cache.stat().st_mode & 0o777 == 0o700 and not list(cache.iterdir())
    nvcc.compiler.cache_clear()


def test_a_build_has_a_deadline(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, '[ "$1" = --version ] && exit 0; exec sleep 60', monkeypatch)
    monkeypatch.setattr(nvcc, "DEADLINE_S", 0.2)
    with pytest.raises(RuntimeError, match="streamed.cu: nvcc did not end within 0.2 s"):
        nvcc.library(streamed.SOURCE, (9, 0), {"FORMAT": "0"})
    nvcc.compiler.cache_clear()


def asked(monkeypatch: pytest.MonkeyPatch) -> Support:
    """Return whether nvcc compiles for a device of capability 9.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return nvcc.supports_device.__wrapped__(torch.device("cuda", 0))


@pytest.mark.skipif(nvcc.compiler() is None, reason="needs nvcc")
def test_an_nvcc_that_works_is_known_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch) and re.fullmatch(r"\d+\.\d+", nvcc.version())
    assert nvcc.supports_device(torch.device("cpu")).why_not == "needs a CUDA device"


def test_an_nvcc_that_fails_says_why_and_keeps_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, 'echo "unsupported GNU version" >&2; exit 1', monkeypatch)
    found = asked(monkeypatch)
    assert not found and "unsupported GNU version" in found.why_not
    assert nvcc.version() == "" and not cache.exists()
    nvcc.compiler.cache_clear()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [(streamed, ("nvfp4",)), (routed, ("nvfp4",)), (paged, (128, torch.bfloat16))],
)
def test_a_cache_that_cannot_be_written_costs_speed_and_no_more(
    module: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(nvcc, "compiler", lambda: Path("/usr/bin/true"))
    found = module.supports_device.__wrapped__(*arguments, torch.device("cuda", 0))
    assert not found and "cannot be built" in found.why_not


def test_a_folder_of_someone_else_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="expected a folder of the user's own"):
        build.cache_folder()


@pytest.mark.long
@pytest.mark.skipif(nvcc.compiler() is None, reason="needs nvcc")
@pytest.mark.timeout(300)
def test_compiled_for_hopper_nothing_spills_and_the_workspace_is_large_enough(
    tmp_path: Path,
) -> None:
    shared = ("--shared", "-Xcompiler", "-fPIC")
    said, spills = spills_of(streamed.SOURCE, {"FORMAT": "0"}, tmp_path / "out.so", *shared)
    # a word outside of the loops is what `broad` has no register for
    assert len(spills) >= 4 and all(int(stores) <= 4 for stores, _ in spills), said
    assert "serialized" not in said, said  # products that wait for each other
    library, needed = ctypes.CDLL(str(tmp_path / "out.so")), (ctypes.c_longlong * 3)()
    for processors, rows, num_out in itertools.product(
        (78, 132, 148),
        (1, 8, 16, 32, 33, 64, 65, 96, 128, 129, 256, 1000),
        (1, 128, 255, 4608, 152_064, 1 << 21, 1 << 22, 1 << 23),
    ):
        problem = streamed.StreamedArguments(M=rows, N=num_out, K=3584)
        library.streamed_linear(
            ctypes.byref(problem), processors, needed, None
        )  # asks, launches nothing
        assert needed[0] <= processors * streamed.PARTIAL
        assert needed[1] <= streamed.TILES or not streamed.workspace_supports(rows, num_out)
        arranged = needed[2] // (2 * problem.K)  # rows of x in whole tiles
        if rows > 64 and num_out % 8 == 0:
            assert rows <= arranged < rows + 128 and arranged % 32 == 0
        needed[2] = 0


def test_products_that_the_workspace_has_no_room_for_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """65,536 counters: two for 256 rows of weights and 64 of activations."""
    monkeypatch.setattr(streamed, "supports_device", lambda kind, device: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for rows, num_out, taken in (
        (64, 1 << 23, True),
        (64, (1 << 23) + 1, False),
        (65, 1 << 22, True),
        (65, (1 << 22) + 1, False),
        (1, 1 << 24, False),
        (128, 152_064, True),
    ):
        x_MK = torch.empty(rows, 128, dtype=torch.bfloat16)
        assert (
            streamed.supports("nvfp4", x_MK, (num_out, 128))
            == w4a16.supports("nvfp4", x_MK, (num_out, 128))
            == taken
        )
    many_MK = torch.empty(
        1 << 14, 128, dtype=torch.bfloat16
    )  # are dequantized, without the workspace
    assert w4a16.supports("nvfp4", many_MK, (152_064, 128)) and not streamed.supports(
        "nvfp4", many_MK, (152_064, 128)
    )
