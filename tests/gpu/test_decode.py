"""On a CUDA device: decode attention and the draw against the CPU, captured in graphs whose inputs
change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowroll.kernels.attention.decode import paged_decode, write_pages
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.tile_statistics import TILE
from tests.fixtures.decode import Case
from tests.fixtures.gumbel import short_of_best

pytestmark = pytest.mark.gpu


def cuda(case: Case) -> list[Tensor]:
    return [
        x.cuda() for x in (case.q, case.k, case.v, case.keys, case.values, case.table, case.lengths)
    ]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "lengths, heads, kv_heads, head_dim, page",
    [
        ([300, 0, 1, 16, 17, 64, 65], 28, 4, 128, 16),
        ([900], 12, 2, 80, 4),
        ([50] * 150, 16, 8, 64, 16),
        ([33, 90], 8, 1, 256, 32),
        ([40, 41, 42], 4, 4, 16, 1),
        ([300, 0, 1, 16, 17, 64, 65, 33, 0, 128, 129, 500, 31, 32, 2, 90, 48], 28, 4, 128, 16),
        ([0] * 8 + [70] * 8 + [0, 257, 256], 12, 2, 64, 32),
        ([100] * 70, 10, 2, 128, 16),
    ],
)
def test_attention_is_the_cpus(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    case = Case(lengths, heads, kv_heads, head_dim, page, dtype)
    inputs = cuda(case)
    got = paged_decode(*inputs, case.scale)
    again = paged_decode(*inputs, case.scale)
    for x in ("q", "k", "v", "keys", "values"):
        setattr(case, x, getattr(case, x).float().nan_to_num(0))
    torch.testing.assert_close(got.cpu().float(), case.run(), rtol=tolerance, atol=tolerance)
    assert torch.equal(got, again)
    for device, host in zip(inputs[3:5], (case.keys, case.values), strict=True):
        assert torch.equal(device.cpu().float().nan_to_num(0), host)


FEW = [300, 0, 1, 5, 6, 16, 17, 18, 64, 65, 66], 24, 8, 128, 16
WIDE = [900], 8, 1, 256, 16
MANY = [0, 130, 17, 64, 65, 1] * 50, 8, 4, 64, 16


@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        *((FEW, torch.bfloat16, window) for window in (1, 16, 17)),
        (FEW, torch.float32, 5),
        (WIDE, torch.bfloat16, 64),
        (WIDE, torch.float32, 1000),
        (MANY, torch.bfloat16, 64),
        (MANY, torch.float32, 5),
    ],
)  # a kernel is compiled for each
def test_rows_attend_within_a_window(
    shape: tuple[list[int], int, int, int, int], dtype: torch.dtype, window: int
) -> None:
    """Few rows in many splits, and many rows in one; keys outside the window are NaN."""
    case, page = Case(*shape, dtype, window=window), shape[-1]
    for row, length in enumerate(shape[0]):
        hidden = torch.arange(max(0, length - window))
        at = case.table[row, hidden // page].long(), hidden % page
        case.keys[at], case.values[at] = math.nan, math.nan
    got = paged_decode(*cuda(case), case.scale, window)
    for x in ("q", "k", "v", "keys", "values"):
        setattr(case, x, getattr(case, x).float().nan_to_num(0))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu().float(), case.run(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 17])
@pytest.mark.parametrize("shape", [FEW, MANY])
def test_sinks_take_part_in_the_softmax(
    shape: tuple[list[int], int, int, int, int], window: int, dtype: torch.dtype
) -> None:
    """Few rows in many splits, and many rows in one, which Hopper's kernel would take without."""
    case = Case(*shape, dtype, window=window, sinks=True)
    assert case.sinks is not None
    got = paged_decode(*cuda(case), case.scale, window, case.sinks.cuda())
    for x in ("q", "k", "v", "keys", "values", "sinks"):
        setattr(case, x, getattr(case, x).float().nan_to_num(0))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.cpu().float(), case.run(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [4, 200])
def test_one_graph_serves_every_length_in_a_window(rows: int) -> None:
    case = Case([200] * rows, 28, 4, 128, 16, torch.bfloat16)
    case.keys.nan_to_num_(0)
    case.values.nan_to_num_(0)
    inputs = cuda(case)
    paged_decode(*inputs, case.scale, 20)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged_decode(*inputs, case.scale, 20)
    for now in ([1, 2, 3, 4], [0, 200, 13, 20], [64, 2, 65, 129]):
        inputs[-1].copy_(torch.tensor(now * (rows // 4)))
        graph.replay()
        assert torch.equal(captured, paged_decode(*inputs, case.scale, 20))


@pytest.mark.parametrize("rows, head_dim", [(24, 128), (160, 128), (40, 64)])
def test_shared_pages_change_no_bit(rows: int, head_dim: int) -> None:
    """Siblings that share their prompt's pages, against the same rows with pages of their own."""
    lengths = [0 if row % 11 == 5 else 150 + 37 * (row % 5) for row in range(rows)]
    case = Case(lengths, 14, 2, head_dim, 16, torch.bfloat16)
    alone, together = case.table.clone(), case.table.clone()
    for row in range(rows):
        leader = row // 8 * 8 + (
            lengths[row // 8 * 8] == 0
        )  # groups of 8, of which one begins with a dead row
        same = (
            (3 + leader // 8 % 6) if row < rows - 8 else row % 8
        )  # the last eight share unequal numbers
        together[row, :same] = case.table[leader, :same]
        case.keys[alone[row, :same].long()] = case.keys[case.table[leader, :same].long()]
        case.values[alone[row, :same].long()] = case.values[case.table[leader, :same].long()]
    q, k, v, keys, values, _, lengths_B = cuda(case)
    got = [
        paged_decode(q, k, v, keys.clone(), values.clone(), table.cuda(), lengths_B, case.scale)
        for table in (alone, together)
    ]
    assert torch.equal(*got) and not got[0].isnan().any()
    case.table, case.keys, case.values = (
        together,
        case.keys.nan_to_num(0),
        case.values.nan_to_num(0),
    )
    torch.testing.assert_close(got[1].cpu().float(), case.run().float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [4, 16, 200])
def test_one_graph_serves_every_length(rows: int) -> None:
    case = Case([200] * rows, 28, 4, 128, 16, torch.bfloat16)
    q, k, v, keys, values, table, lengths = cuda(case)
    paged_decode(q, k, v, keys, values, table, lengths, case.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged_decode(q, k, v, keys, values, table, lengths, case.scale)
    for now in ([1, 2, 3, 4], [0, 200, 13, 0], [64, 2, 65, 129]):
        lengths.copy_(torch.tensor(now * (rows // 4)))
        graph.replay()
        assert torch.equal(
            captured, paged_decode(q, k, v, keys, values, table, lengths, case.scale)
        )


def test_prompts_are_written() -> None:
    k, v = torch.randn(2, 37, 4, 128).bfloat16().cuda()
    keys, values = torch.zeros(2, 5, 16, 4, 128).bfloat16().cuda()
    slots = torch.randperm(80)[:37].cuda()
    slots[5] = -1
    write_pages(keys, values, slots, k, v)
    live = slots >= 0
    for cache, new in ((keys, k), (values, v)):
        assert torch.equal(cache.flatten(0, 1)[slots[live]], new[live])
        assert int((cache.flatten(0, 1) != 0).any(-1).any(-1).sum()) == 36


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [11, 300, 10 * TILE + 7, 151936])
def test_draws_have_the_best_score(vocab: int, dtype: torch.dtype) -> None:
    rows = 24
    g = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=g) * 3).to(dtype)
    logits[3], logits[4, 7], logits[5, 9] = -math.inf, math.nan, math.inf
    keys, positions = (torch.randint(-(2**62), 2**62, (rows,), generator=g) for _ in range(2))
    temperature, greedy = torch.rand(rows, generator=g) + 0.5, torch.arange(rows) % 8 == 7
    for options in ((temperature, greedy), (temperature, None), (None, None)):
        given = logits, keys, positions, *options
        found = draw(*(None if x is None else x.cuda() for x in given))
        tokens, logprobs = (x.cpu() for x in found)
        assert logprobs.isnan().nonzero().flatten().tolist() == [3, 4, 5]
        assert tokens[3:6].tolist() == [0, 0, 0]
        scale = torch.ones(rows) if options[0] is None else temperature
        scale = scale if options[1] is None else torch.where(greedy, 1.0, scale)
        logp = (logits.double() / scale[:, None]).log_softmax(-1)
        want = logp.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), want, rtol=0, atol=5e-6, equal_nan=True)
        for row in {*range(rows)} - {3, 4, 5}:
            if options[1] is not None and greedy[row]:
                assert tokens[row] == logits[row].argmax()
                continue
            place = int(keys[row]), int(positions[row])
            assert short_of_best(logp[row], *place, int(tokens[row])) < 2e-5


def test_the_noise_has_the_shape_that_it_should() -> None:
    """Equal logits: halves, words and places of a block are drawn alike."""
    rows, vocab = 1 << 16, 8192
    at = torch.arange(rows).cuda()
    tokens, _ = draw(torch.zeros(1, vocab).cuda().expand(rows, -1), at, at)
    for cells, count in ((tokens // 256, 32), (tokens % 256, 256)):
        counts = cells.cpu().bincount(minlength=count)
        assert ((counts - rows / count) ** 2 / (rows / count)).sum() < count + 5 * (
            2 * count
        ) ** 0.5
