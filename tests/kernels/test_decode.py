"""Decode attention, and how the draw compiles: what Triton does, run by its interpreter, against float64
oracles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowroll.kernels.sampling.tile_statistics
from lowroll.kernels import nvcc
from lowroll.kernels.attention import avx2, decode, paged
from lowroll.kernels.attention.decode import write_pages
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.sampling.tile_statistics import BLOCK, TILE
from lowroll.kernels.support import no
from tests.fixtures.compiled import arguments, built, spills_of
from tests.fixtures.decode import Case
from tests.fixtures.interpreted import both_paths

WAYS = [pytest.param("triton", marks=pytest.mark.interpreted), "avx2", "torch"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that attends: the C++ one takes rows of any size, and torch all that it is given."""
    if request.param == "avx2":
        if not avx2.supports_device(torch.device("cpu")):
            pytest.skip("needs AVX2 and a C++ compiler")
        monkeypatch.setattr(avx2, "LEAST", 1)
    if request.param == "torch":
        monkeypatch.setattr(avx2, "supports", lambda *_: no("is not asked"))
    return str(request.param)


def case_of(way: str, *args: Any, **more: Any) -> Case:
    """Return a case that a way can read: caches of plain torch hold no NaN."""
    if way == "avx2" and torch.float16 in args:
        pytest.skip("takes float32")
    return Case(*args, **more).without_nan() if way == "torch" else Case(*args, **more)


@pytest.mark.parametrize("programs", [1, 6])
@pytest.mark.parametrize(
    "case",
    [
        ([45, 0, 1, 16, 17], 6, 2, 24, 4, torch.float32),
        ([130, 2], 7, 1, 16, 16, torch.float16),
        ([33, 34], 4, 4, 40, 1, torch.float32),
        ([70], 17, 1, 32, 8, torch.float16),
    ],
)
def test_attention_over_pages(
    case: tuple, programs: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    case_of(way, *case).check(2e-3 if case[-1] == torch.float16 else 1e-5)


# lengths, query heads, key-value heads, head size, page, window: around pages, blocks and windows
WINDOWED = [
    ([0, 1, 2, 45, 17], 6, 2, 24, 4, 1),
    ([0, 1, 4, 5, 6, 130], 3, 1, 16, 4, 5),
    ([15, 16, 17, 18, 90, 0], 8, 8, 32, 16, 16),
    ([16, 17, 18, 81, 1], 8, 1, 16, 16, 17),
    ([64, 65, 66, 200], 3, 3, 40, 8, 64),
    ([63, 64, 65, 129, 300], 14, 2, 24, 16, 65),
    ([30, 2, 0], 4, 2, 16, 4, 200),
]


@pytest.mark.parametrize("programs", [1, 30, 400])
@pytest.mark.parametrize("case", WINDOWED)
def test_rows_attend_within_a_window(
    case: tuple, programs: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with more splits than a window has blocks."""
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    case_of(way, *case[:-1], window=case[-1]).check(1e-5)


@pytest.mark.parametrize("programs", [1, 30])
@pytest.mark.parametrize("case", [*WINDOWED, ([45, 0, 1, 16, 17], 6, 2, 24, 4, 0)])
def test_sinks_take_part_in_the_softmax(
    case: tuple, programs: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in whatever splits, in windows and without; a row without keys stays 0."""
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    case_of(way, *case[:-1], window=case[-1], sinks=True).check(1e-5)


@pytest.mark.parametrize("way", WAYS[:2], indirect=True)
@pytest.mark.parametrize("programs", [1, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_outside_a_window_are_not_read(
    programs: int, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages may be anyone's: numbers beyond the window, and whole pages of NaN."""
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    case, other = (case_of(way, [140, 9, 33], 6, 2, 16, 4, dtype, window=21) for _ in range(2))
    for row, length in enumerate([140, 9, 33]):
        other.forget(row, length - 21)
    assert torch.equal(case.run(), other.run())


def test_a_window_that_hides_nothing_changes_no_bit(way: str) -> None:
    plain, wide = (case_of(way, [9, 0, 70], 4, 2, 16, 4, window=window) for window in (0, 70))
    assert torch.equal(plain.run(), wide.run())


@pytest.mark.parametrize("way", WAYS[:2], indirect=True)
@pytest.mark.parametrize("window", [0, 6])
def test_strided_heads_and_a_wider_table_change_nothing(window: int, way: str) -> None:
    plain, wide = (Case([9, 20], 4, 2, 16, 4, window=window) for _ in range(2))
    far = 1 << 30 if way == "avx2" else 0
    wide.table = torch.cat([wide.table, torch.full((2, 3), far, dtype=torch.int32)], 1)
    wide.q, wide.k, wide.v = torch.cat([wide.q, wide.k, wide.v], 1).split([4, 2, 2], 1)
    assert torch.equal(plain.run(), wide.run())


@both_paths
def test_write_pages_skips_negative_slots(path: str) -> None:
    assert triton_supports(torch.zeros(1)) == (path == "triton")
    k, v = torch.randn(7, 3, 20), torch.randn(7, 6, 20)[:, :3]
    keys, values = torch.zeros(4, 4, 3, 20), torch.ones(4, 4, 3, 20)
    slots = torch.tensor([3, -1, 15, 0, 4, -1, 9])
    write_pages(keys, values, slots, k, v)
    for cache, new, old in ((keys, k, 0.0), (values, v, 1.0)):
        want = torch.full((16, 3, 20), old)
        for t in (0, 2, 3, 4, 6):
            want[slots[t]] = new[t]
        assert torch.equal(cache.flatten(0, 1), want)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (1024, False), (128, True)])
@pytest.mark.parametrize("rows", [1, 256])
def test_attention_compiles_for_hopper_without_spills(rows: int, window: int, sinks: bool) -> None:
    pytest.importorskip("triton")
    splits, length, stages, warps = decode._launch(rows, 4, 256)
    types = arguments(
        {
            "*bf16": "q_ptr k_ptr v_ptr keys_ptr values_ptr" + " sinks_ptr" * sinks,
            "*i32": "table_ptr lengths_ptr",
            "*fp32": "lse_ptr",
            "i32": "rows splits q_stride k_stride v_stride table_stride",
            "fp32": "scale",
        }
    )
    types["out_ptr"] = "*fp32" if splits > 1 else "*bf16"
    constants = dict(
        H=28,
        G=4,
        d=128,
        PAGE=16,
        D=128,
        R=16,
        BLOCK=length,
        SPLIT=splits > 1,
        WINDOW=window,
        STAGES=stages,
        **({} if sinks else {"sinks_ptr": None}),
    )
    kernel = built(decode._decode_kernel, types, constants, ("rows", "splits"), num_warps=warps)
    sass = kernel.asm["sass"]
    assert "STL " not in sass and "STL." not in sass, "registers spill"
    assert "LDGSTS.E.BYPASS.128" in sass, "16 bytes a load, past the L1 cache"
    assert "HMMA" in sass
    assert kernel.metadata.shared <= 75 * 1024, "three programs and more fit on an SM"


NOISE = {"keys_ptr": "*i64", "positions_ptr": "*i64", "best_ptr": "*fp32", "winner_ptr": "*i32"}
PEAKS = {"peaks_ptr": "*fp32", "parts_ptr": "*fp32"}


def pass_over_logits(asked: dict[str, str], aligned: bool) -> Any:
    floats = "logits_ptr temperature_ptr largest_ptr mass_ptr"
    types = arguments({"*fp32": floats, "i32": "tokens tiles stride"}) | asked
    constants = dict.fromkeys(("greedy_ptr", *NOISE, *PEAKS))
    constants |= {"TILE": TILE, "BLOCK": BLOCK, "ALIGNED": aligned, "EARLY": False}
    left = {name: value for name, value in constants.items() if name not in types}
    kernel = lowroll.kernels.sampling.tile_statistics._masses_kernel
    return built(kernel, types, left, ("tiles", "stride"), num_warps=4)


@pytest.mark.slow
def test_the_pass_over_the_logits_compiles_for_hopper() -> None:
    pytest.importorskip("triton")
    sass = pass_over_logits(NOISE, aligned=True).asm["sass"]
    assert "STL " not in sass and "STL." not in sass and "LDG.E.128" in sass


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False])
def test_masses_are_summed_in_one_order_whatever_else_is_asked(aligned: bool) -> None:
    """The learner asks for no noise, and a batch with filters for peaks: their log-probs have the
    same bits."""
    pytest.importorskip("triton")
    found = set()
    for asked in ({}, NOISE, {**NOISE, **PEAKS, "greedy_ptr": "*i1"}):
        text = pass_over_logits(asked, aligned).asm["ttgir"]
        layouts = dict(re.findall(r"(#\w+) = (#ttg\.blocked<.*>)", text))
        reduced = re.findall(rf"\(tensor<{TILE}xf32, (#\w+)>\) ->", text)
        assert len(reduced) == 2, "the largest and the mass"
        found |= {layouts[name] for name in reduced}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.skipif(nvcc.compiler() is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("head", "codes"),
    [
        (64, "0"),
        (128, "1"),
        pytest.param(64, "1", marks=pytest.mark.long),
        pytest.param(128, "0", marks=pytest.mark.long),
    ],
)
def test_the_kernel_of_many_rows_compiles_without_spills(
    head: int, codes: str, tmp_path: Path
) -> None:
    values = {"HEAD": str(head), "HALF": "0", "CODES": codes}
    said, spills = spills_of(paged.SOURCE, values, tmp_path / "out.cubin", "-cubin")
    assert len(spills) == 8 and all(pair == ("0", "0") for pair in spills), said
