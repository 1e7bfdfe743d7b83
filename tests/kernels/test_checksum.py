"""Checksums and the search for non-finite values in one launch, in Triton's interpreter and
compiled for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowroll.kernels import checksum
from lowroll.kernels.launch import triton_supports
from tests.fixtures.compiled import built

pytest.importorskip("triton")
M64 = (1 << 64) - 1


def tensors() -> list[Tensor]:
    """Sizes that end within a word, within a block and on their borders; views that are shifted or
    transposed."""
    torch.manual_seed(0)
    return [
        torch.randn(37, 91).bfloat16(),
        torch.randn(5),
        torch.randn(1),
        torch.randn(40, 64).t(),
        torch.empty(0),
        torch.randn(33)[1:],
        torch.randn(3, dtype=torch.float64),
        torch.randn(1024),
        torch.randn(2052).half(),
        torch.randn(3).bfloat16(),
    ]


def expected(tensor: Tensor) -> int:
    """The formula, one word at a time, in whole numbers."""
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 8)
    total = 0
    for i in range(len(raw) // 8):
        word = int.from_bytes(raw[8 * i : 8 * i + 8], "little", signed=True)
        word = (word ^ (word >> 32)) * checksum.GOLDEN & M64
        word -= (word >> 63) << 64
        total += (word ^ (word >> 29)) * (2 * i + 1)
    total &= M64
    return total - ((total >> 63) << 64)


def check_checksums() -> None:
    codes = [
        torch.randint(-128, 128, (777,), dtype=torch.int8),
        torch.randn(63, 33).to(torch.float8_e4m3fn),
    ]
    assert checksum.checksums(tensors() + codes) == [expected(t) for t in tensors() + codes]
    assert checksum.checksums([]) == [] and checksum.checksums([torch.empty(0)]) == [0]


def check_amax() -> None:
    """Also of values that are not finite, and of the largest ones that are."""
    good = [t for t in tensors() if t.dtype != torch.float64]
    good += [
        torch.full((9,), sign * torch.finfo(t.dtype).max, dtype=t.dtype)
        for t in good
        for sign in (1, -1)
    ]
    wanted = [t.double().abs().max() if t.numel() else torch.zeros(()).double() for t in good]
    found = checksum.amax(good)
    assert all(t.dtype == torch.float32 and t.shape == (1,) for t in found)
    assert checksum.finite(found) == [True] * len(good)
    assert torch.equal(torch.cat(found).double(), torch.stack(wanted))
    for i, tensor in enumerate(good[:9]):
        for at, value in (
            (0, float("nan")),
            (tensor.numel() // 2, float("inf")),
            (-1, -float("inf")),
        ):
            if tensor.numel():
                bad = tensor.contiguous().clone()
                bad.view(-1)[at] = value
                found = checksum.amax([good[i - 1], bad, good[i + 1]])
                assert checksum.finite(found) == [True, False, True]


def check_a_tensor_of_many_programs() -> None:
    """The sum and the maximum of a tensor are put together from its blocks."""
    tensor = torch.randn(checksum.BLOCK_BYTES + 3)  # five programs
    assert checksum.checksums([tensor[:7], tensor, tensor[:9]])[1] == int(
        checksum._checksum(tensor)
    )
    for at in (0, len(tensor) // 2, len(tensor) - 1):
        tensor[at] = 100.0 + at
        assert float(checksum.amax([tensor[:7], tensor, tensor[:9]])[1]) == 100.0 + at


CHECKS = [check_checksums, check_amax, check_a_tensor_of_many_programs]


@pytest.mark.parametrize("check", CHECKS[:2])
def test_in_plain_torch(check) -> None:
    check()


@pytest.mark.interpreted
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_supports(torch.empty(0))
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 4096)  # the interpreter takes its time
    monkeypatch.setattr(checksum, "STEP_BYTES", 2048)
    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "size"), [("_checksum_kernel", 8), ("_amax_kernel", 2), ("_amax_kernel", 4)]
)
def test_compiled_for_a_gpu_nothing_spills(kernel: str, size: int) -> None:
    function = getattr(checksum, kernel)
    types = dict(
        zip(function.arg_names, ("*i64", "*i32", "*i64" if size == 8 else "*i32"), strict=False)
    )
    constants = {
        "SIZE": size,
        "BLOCK": checksum.BLOCK_BYTES // size,
        "STEP": checksum.STEP_BYTES // size,
    }
    sass = built(function, types, constants, loose=tuple(types), num_warps=4).asm["sass"]
    assert "STL" not in sass and "LDG.E.128" in sass
