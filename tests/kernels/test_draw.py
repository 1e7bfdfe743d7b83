"""The draw in its three ways, Triton's by the interpreter: C++, plain torch and Triton take the token
that an oracle of its own finds, and tokens are distributed and coupled as they should be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.sampling import avx2, tile_statistics
from lowroll.kernels.sampling import draw as drawing
from lowroll.kernels.sampling.draw import distribution, draw, winners
from lowroll.kernels.sampling.filters import Filters, keep
from lowroll.kernels.sampling.gumbel_noise import STREAM, gumbel
from lowroll.kernels.sampling.tile_statistics import TILE
from lowroll.kernels.support import no
from tests.fixtures import gumbel as oracle

WAYS = [pytest.param("triton", marks=pytest.mark.interpreted), "avx2", "torch"]
compiled = pytest.mark.skipif(
    not avx2.supports_device(torch.device("cpu")), reason="needs AVX2 and a C++ compiler"
)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    assert request.param == "triton" or not triton_supports(torch.zeros(1))
    if request.param == "avx2" and not avx2.supports_device(torch.device("cpu")):
        pytest.skip("needs AVX2 and a C++ compiler")
    if request.param == "torch":
        monkeypatch.setattr(avx2, "supports_device", lambda device: no("is not asked"))
    return str(request.param)


def keys_of(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and positions of 64 bits."""
    g = torch.Generator().manual_seed(seed)
    keys_B, positions_B = torch.randint(-(2**63), 2**63 - 1, (2, rows), generator=g)
    return keys_B, positions_B


def filters_of(rows: int, tokens: int, top_k: int = 0, top_p: float = 1.0) -> Filters:
    return Filters(
        torch.full((rows,), top_k or tokens),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), -math.inf, dtype=torch.float64),
    )


def check(
    logp_BV: Tensor, keys_B: Tensor, positions_B: Tensor, found: tuple[Tensor, Tensor]
) -> None:
    """Tokens have the best score, and their log-probs are those of the distribution, float64."""
    tokens_B, logprobs_B = found
    assert tokens_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    for b, token in enumerate(tokens_B.tolist()):
        place = int(keys_B[b]), int(positions_B[b])
        assert oracle.short_of_best(logp_BV[b], *place, token) < 1e-5
        assert float(logprobs_B[b]) == pytest.approx(float(logp_BV[b, token]), abs=3e-6)


@pytest.mark.parametrize("tokens", [1, 255, 257, 1023, 1025, 3000])
def test_noise_is_that_of_whole_numbers(tokens: int) -> None:
    keys_B, positions_B = keys_of(4, tokens)
    got_BV = gumbel(keys_B, positions_B, tokens)
    for b in range(4):
        want_V = oracle.noise(int(keys_B[b]), int(positions_B[b]), tokens)
        torch.testing.assert_close(got_BV[b].double(), want_V, rtol=0, atol=2e-6)


def test_noise_is_gumbels_and_that_of_neighbours_has_nothing_in_common() -> None:
    noise_BV = gumbel(torch.tensor([5, 5, 6]), torch.tensor([7, 8, 7]), 1 << 18)
    assert abs(noise_BV.mean() - 0.5772157) < 0.01 and abs(noise_BV.var() - 1.644934) < 0.02
    even_BV = (-(-noise_BV).exp()).exp()
    for even_V in even_BV:  # chi-square, 19 degrees: p = 7e-4
        counts = torch.histc(even_V, bins=20, min=0, max=1)
        assert ((counts - (1 << 18) / 20) ** 2 / ((1 << 18) / 20)).sum() < 45
    several = torch.cat([even_BV, even_BV[0].roll(1)[None], even_BV[0].roll(256)[None]])
    assert (torch.corrcoef(several) - torch.eye(5)).abs().max() < 0.01


@pytest.mark.parametrize("vocab", [3, 300, TILE + 1, 3 * TILE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_token_has_the_best_score(vocab: int, dtype: torch.dtype, way: str) -> None:
    rows, g = 12, torch.Generator().manual_seed(vocab)
    logits_BV = (torch.randn(rows, vocab, generator=g) * 2 - torch.arange(vocab) / vocab).to(dtype)
    logits_BV[:, 1] = -math.inf
    keys_B, positions_B = keys_of(rows, vocab)
    temperature_B, greedy_B = torch.linspace(0.5, 1.5, rows), torch.arange(rows) % 5 == 4
    found = draw(logits_BV, keys_B, positions_B, temperature_B, greedy_B)
    assert torch.equal(found[0][greedy_B], logits_BV[greedy_B].argmax(-1))
    scale_B1 = torch.where(greedy_B, 1.0, temperature_B)[:, None].double()
    logp_BV = (logits_BV.double() / scale_B1).log_softmax(-1)
    drawn_B = ~greedy_B
    some = (x[drawn_B] for x in (logp_BV, keys_B, positions_B))
    check(*some, (found[0][drawn_B], found[1][drawn_B]))


@pytest.mark.parametrize("knobs", [{"top_k": 3}, {"top_p": 0.2}, {"top_k": 40, "top_p": 0.6}])
def test_the_best_score_of_what_stays(knobs: dict, way: str) -> None:
    """Over nearly equal logits the best of all is seldom one that stays: its tile is read again."""
    rows, tokens = 5, 2 * TILE + 300
    logits_BV = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(1)) * 0.2
    keys_B, positions_B = keys_of(rows, 1)
    asked = filters_of(rows, tokens, **knobs)
    kept_BV = keep(logits_BV, asked).mask(logits_BV)
    assert not kept_BV.gather(1, draw(logits_BV, keys_B, positions_B)[0][:, None]).all()
    found = draw(logits_BV, keys_B, positions_B, None, None, asked)
    logp_BV = logits_BV.double().masked_fill(~kept_BV, -math.inf).log_softmax(-1)
    check(logp_BV, keys_B, positions_B, found)


@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}])
@pytest.mark.parametrize("way", ["avx2", "torch"], indirect=True)
def test_counts_are_the_distributions(knobs: dict, way: str) -> None:
    rows, asked = (40_000 if way == "avx2" else 6000), dict(knobs)
    temperature_B = torch.full((rows,), asked.pop("temperature", 1.0))
    logits_V = torch.tensor([2.0, 1.5, -0.5, 1.0, 0.5, -math.inf, -1.0, -4.0, 0.9, 0.0])
    logits_BV = logits_V.expand(rows, -1)
    filters = filters_of(rows, 10, **asked) if asked else None
    given = logits_BV, torch.full((rows,), 17), torch.arange(rows), temperature_B, None, filters
    counts_V = draw(*given)[0].bincount(minlength=10)
    want_V = distribution(logits_BV, temperature_B, None, filters)[0].double().exp() * rows
    possible_V = want_V > 0
    assert int(counts_V[~possible_V].sum()) == 0
    chi2 = ((counts_V - want_V) ** 2 / want_V)[possible_V].sum()
    degrees = int(possible_V.sum()) - 1
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees) + 6  # far beyond p = 1e-4


@compiled
def test_a_wide_vocabulary_is_drawn_evenly() -> None:
    """Halves, blocks and places of a block are as likely as they should be."""
    rows, tokens = 4000, 5 * 1024
    tokens_B, _ = draw(
        torch.zeros(1, tokens).expand(rows, -1), torch.arange(rows), torch.arange(rows)
    )
    for cells_B, count in ((tokens_B // 256, 20), (tokens_B % 256 // 16, 16)):
        counts = cells_B.bincount(minlength=count)
        assert ((counts - rows / count) ** 2 / (rows / count)).sum() < 2.6 * count


@compiled
@pytest.mark.parametrize("size", [0.01, 0.1, 1.0])
def test_logits_that_move_keep_most_tokens(size: float) -> None:
    """Gumbel noise parts two distributions with 2 d / (1 + d) at most, d their total variation; a
    cumulative sum that is cut anew has no such bound."""
    rows, tokens = 20_000, 64
    g = torch.Generator().manual_seed(3)
    logits_V = torch.randn(tokens, generator=g) * 2
    moved_V = logits_V + size * torch.randn(tokens, generator=g)
    noise = torch.arange(rows), torch.arange(rows)
    here_B, there_B = (draw(x.expand(rows, -1), *noise)[0] for x in (logits_V, moved_V))
    distance = float((logits_V.softmax(0) - moved_V.softmax(0)).abs().sum() / 2)
    bound = 2 * distance / (1 + distance)
    parted = float((here_B != there_B).float().mean())
    slack = 4 * math.sqrt(bound / rows)
    assert distance - slack <= parted <= bound + slack


def test_a_row_is_the_same_alone_in_any_order_and_before_impossible_ids(way: str) -> None:
    rows, tokens = 8, TILE + 9
    logits_BV = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(2))
    keys_B, positions_B = keys_of(rows, 2)
    tokens_B, logprobs_B = draw(logits_BV, keys_B, positions_B)
    for row in range(rows):
        at = slice(row, row + 1)
        alone = draw(logits_BV[at], keys_B[at], positions_B[at])
        assert torch.equal(alone[0], tokens_B[at]) and torch.equal(alone[1], logprobs_B[at])
    order = torch.tensor([3, 0, 7, 1, 5, 2, 6, 4])
    mixed = draw(logits_BV[order], keys_B[order], positions_B[order])
    assert torch.equal(mixed[0], tokens_B[order]) and torch.equal(mixed[1], logprobs_B[order])
    padded_BV = torch.nn.functional.pad(logits_BV, (0, 1500), value=-math.inf)
    padded = draw(padded_BV, keys_B, positions_B)
    assert torch.equal(padded[0], tokens_B)
    torch.testing.assert_close(padded[1], logprobs_B, rtol=0, atol=2e-6)


@pytest.mark.interpreted
def test_tiles_of_another_size_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV, (keys_B, positions_B) = torch.randn(4, TILE + 700), keys_of(4, 5)
    want_B, _ = draw(logits_BV, keys_B, positions_B)
    for module in (tile_statistics, drawing):
        monkeypatch.setattr(module, "TILE", 1024)
    assert torch.equal(draw(logits_BV, keys_B, positions_B)[0], want_B)


@compiled
@pytest.mark.parametrize("tokens", [1, 5, 1024, 1025, 5000, 49152])
def test_cpp_and_torch_take_the_same_tokens(tokens: int) -> None:
    rows, g = 20, torch.Generator().manual_seed(tokens)
    for scale in (0.1, 1.0, 8.0):
        logits_BV = torch.randn(rows, tokens, generator=g) * scale
        logits_BV[0, : tokens // 2] = -math.inf
        given = logits_BV, *keys_of(rows, tokens), torch.arange(rows) % 5 == 3
        want_B = winners(*given)
        assert torch.equal(avx2.winners(*given, STREAM), want_B)
        strided_BV = torch.stack([logits_BV, logits_BV], dim=2)[..., 0]
        assert torch.equal(avx2.winners(strided_BV, *given[1:], STREAM), want_B)


@pytest.mark.parametrize("noisy", [False, True])
def test_equal_scores_go_to_the_lower_id(noisy: bool, way: str) -> None:
    """Beside 2^31 no noise is left."""
    logits_BV = torch.zeros(2, 2 * TILE)
    logits_BV[0, [TILE + 3, 5, 9]] = 2.0**31
    logits_BV[1, [2 * TILE - 1, TILE]] = 2.0**31
    greedy_B = None if noisy else torch.tensor([True, True])
    tokens_B, logprobs_B = draw(logits_BV, *keys_of(2, 0), None, greedy_B)
    assert tokens_B.tolist() == [5, TILE]
    assert logprobs_B.tolist() == pytest.approx([-math.log(3), -math.log(2)], abs=1e-6)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_distribution_has_nan_as_log_prob(
    bad: float, filtered: bool, way: str
) -> None:
    logits_BV = torch.randn(4, TILE + 50)
    logits_BV[1:, 7] = bad
    logits_BV[3, 2 * 7] = bad
    if bad == -math.inf:
        logits_BV[1:] = bad
    asked = filters_of(4, TILE + 50, top_k=5) if filtered else None
    greedy_B = torch.tensor([False, False, True, False])
    tokens_B, logprobs_B = draw(logits_BV, *keys_of(4, 0), None, greedy_B, asked)
    assert logprobs_B.isnan().tolist() == [False, True, True, True]
    assert tokens_B[1:].tolist() == [0, 0, 0]


def test_one_possible_id_is_drawn_whatever_its_noise(way: str) -> None:
    logits_BV = torch.full((6, TILE + 5), -math.inf)
    logits_BV[:, TILE + 2] = -80.0
    tokens_B, logprobs_B = draw(logits_BV, *keys_of(6, 9))
    assert tokens_B.tolist() == [TILE + 2] * 6 and logprobs_B.abs().max() < 1e-6
