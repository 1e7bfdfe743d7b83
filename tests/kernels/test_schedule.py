"""How tiles are dealt to blocks (schedule.cuh), compiled for the CPU: every chunk is computed once,
and no block waits for one that never arrives."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from lowroll.kernels import cxx
from tests.fixtures.published import shapes

# What `broad` and `relay` do with a Run: the parts of a block in order, then the tiles that it adds up with others.
SOURCE = """
#include "schedule.cuh"
extern "C" int parts(int chunks, int tiles, int shared, int block, int blocks, int* out) {
    Run run(chunks, tiles, shared, block, blocks);
    int count = 0;
    while (run.next()) {
        out[3 * count] = run.tile, out[3 * count + 1] = run.from, out[3 * count + 2] = run.until;
        ++count;
    }
    return count;
}
extern "C" int joined(int chunks, int tiles, int shared, int block, int blocks, int* out) {
    const Run run(chunks, tiles, shared, block, blocks);
    int count = 0;
    for (int tile = run.unit / chunks; tile * chunks < run.end; ++tile) {
        out[3 * count] = tile, out[3 * count + 1] = run.owner_of(tile * chunks);
        out[3 * count + 2] = run.owner_of((tile + 1) * chunks - 1);
        ++count;
    }
    return count;
}
"""
COLUMNS, DEPTH = 256, 128  # rows of the weights of a tile, k of a chunk
PROCESSORS = (132, 114, 78)  # H100 SXM and H200, H100 PCIe, GH200 slices
Triples = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Triples]:
    compiler = cxx.compiler()
    if compiler is None:
        pytest.skip(cxx.NO_COMPILER.why_not)
    folder = tmp_path_factory.mktemp("schedule")
    (folder / "schedule.cpp").write_text(SOURCE)
    headers = Path(cxx.__file__).parent
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-x", "c++", "-I", headers]
    subprocess.run(
        [*command, folder / "schedule.cpp", "-o", folder / "schedule.so"], check=True, timeout=120
    )
    library = ctypes.CDLL(str(folder / "schedule.so"))
    out = (ctypes.c_int * 100_000)()

    def call(name: str, *arguments: int) -> Triples:
        count = getattr(library, name)(*arguments, out)
        values = out[: 3 * count]
        return list(zip(values[::3], values[1::3], values[2::3], strict=True))

    return call


def cases() -> list[tuple[int, int, int]]:
    """(chunks of a tile, tiles, blocks) of published shapes, and all small ones."""
    found = set(product(range(1, 9), range(1, 13), (1, 2, 3, 7, 8)))
    for (num_out, num_in), processors in product(shapes(), PROCESSORS):
        chunks = num_in // DEPTH
        for row_tiles in range(1, 9):  # of 64, 96 or 128 rows of x
            tiles = -(-num_out // COLUMNS) * row_tiles
            found.add((chunks, tiles, min(chunks * tiles, processors)))
    return sorted(case for case in found if case[2] <= case[0] * case[1])


def test_every_chunk_is_computed_once_and_every_wait_ends(
    schedule: Callable[..., Triples],
) -> None:
    few = 0  # cases with fewer shared chunks than blocks
    for chunks, tiles, blocks in cases():
        case, shared = (chunks, tiles, blocks), tiles % blocks
        few += 0 < shared * chunks < blocks
        computed = [0] * (chunks * tiles)
        arrived = [0] * shared
        waits: dict[int, set[tuple[int, int]]] = {}
        for block in range(blocks):
            parts = schedule("parts", chunks, tiles, shared, block, blocks)
            for tile, begin, end in parts:
                assert 0 <= begin < end <= chunks, case
                for chunk in range(begin, end):
                    computed[tile * chunks + chunk] += 1
                arrived_here = tile < shared and end - begin < chunks
                if arrived_here:
                    arrived[tile] += 1
            # the workspace holds sums of a block's first and last shared tile, no third
            partial = [tile for tile, begin, end in parts if end - begin < chunks]
            assert len(partial) <= 2, case
            joined = schedule("joined", chunks, tiles, shared, block, blocks)
            assert {tile for tile, _, _ in joined} == {
                tile for tile, _, _ in parts if tile < shared
            }, case
            for tile, first, last in joined:
                waits.setdefault(tile, set()).add((first, last))
        assert computed == [1] * (chunks * tiles), case
        for tile, asked in waits.items():
            ((first, last),) = asked  # all blocks of a tile mean the same ones
            assert arrived[tile] == (last - first + 1 if first != last else 0), case
    assert few > 20


def test_the_tiles_left_over_of_a_1_5b_model(schedule: Callable[..., Triples]) -> None:
    """gate_up of Qwen2.5-1.5B: 140 tiles for 132 blocks leave 8 of 12 chunks, which 96 blocks
    share. Counting the 36 others, which have none, once made a product wait for ever."""
    owners = [block for block in range(132) if schedule("parts", 12, 140, 8, block, 132)[0][0] < 8]
    assert owners == list(range(96))
    assert schedule("joined", 12, 140, 8, 0, 132) == [(0, 0, 11)]
