"""What top-k, top-p and min-p leave: Triton's search, run by its interpreter, and the sort of plain
torch, against lists and loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowroll.kernels.sampling import filters
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters, keep

both = pytest.mark.parametrize(
    "path",
    [pytest.param("triton", marks=[pytest.mark.interpreted, pytest.mark.slow]), "plain"],
)
OFF = (0, 1.0, 0.0)
# Triton's masses are float32's: an exponent of up to 2^8 is rounded by 2^-16, exp2 and sums by less
ROUNDING = 2.0**-15
KNOBS = [OFF, (50, 0.95, 0.0), (0, 0.8, 0.0), (7, 1.0, 0.3), (400, 0.9, 0.0), (1, 0.5, 0.1)]


def of(knobs: list[tuple[int, float, float]], tokens: int) -> Filters:
    """Filters of rows (top_k, top_p, min_p) as a request has them."""
    top_k, top_p, min_p = zip(*knobs, strict=True)
    floors = [math.log(p) if p else -math.inf for p in min_p]
    return Filters(
        torch.tensor([min(k or tokens, tokens) for k in top_k]),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(floors, dtype=torch.float64),
    )


def oracle(
    logits: list[float],
    temperature: float,
    knobs: tuple[int, float, float],
    rounding: float = 0.0,
) -> set[int]:
    """The ids that stay. rounding: of the mass that top-p needs, a share of it."""
    top_k, top_p, min_p = knobs
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    largest = logits[order[0]]
    weight = {i: math.exp((logits[i] - largest) / temperature) for i in order}
    total, mass, kept = math.fsum(weight.values()), 0.0, set()
    for i in order:
        if top_p == 1 or mass < top_p * total * (1 + rounding):
            kept.add(i)
        mass += weight[i]
    return {i for i in kept if weight[i] >= min_p and weight[i] > 0}


def of_kind(kind: str, rows: int, tokens: int) -> Tensor:
    g = torch.Generator().manual_seed(tokens)
    logits_BV = torch.randn(rows, tokens, generator=g) * 2
    if kind == "rounded":  # many are equal
        return (logits_BV * 2).round() / 2
    if kind == "equal":
        return logits_BV * 0 - 3
    if kind == "banned":  # most are impossible: k finds fewer
        few = torch.rand(rows, tokens, generator=g) < 0.9
        return logits_BV.masked_fill(few, -math.inf).index_fill(1, torch.tensor([1]), 0.5)
    return logits_BV * (8 if kind == "sharp" else 1)


def check(
    kind: str,
    tokens: int,
    knobs: list[tuple[int, float, float]] = KNOBS,
    rounding: float = ROUNDING,
) -> None:
    """Compare what stays with the oracle, for a mass before each number that is off by up to
    `rounding`, either way."""
    logits_BV = of_kind(kind, len(knobs), tokens)
    temperature_B = torch.linspace(0.5, 1.5, len(knobs))
    mask_BV = keep(logits_BV, of(knobs, tokens), temperature_B).mask(logits_BV)
    for row, (logits_V, temperature, knob) in enumerate(
        zip(logits_BV.tolist(), temperature_B.tolist(), knobs, strict=True)
    ):
        got = {i for i in mask_BV[row].nonzero()[:, 0].tolist() if logits_V[i] > -math.inf}
        least, most = (oracle(logits_V, temperature, knob, by) for by in (-rounding, rounding))
        if knob == OFF:
            least = most = {i for i, x in enumerate(logits_V) if x > -math.inf}
        assert least <= got <= most, (kind, knob)


@both
@pytest.mark.parametrize("kind", ["spread", "sharp", "rounded", "equal", "banned"])
def test_what_stays_is_what_lists_and_loops_keep(kind: str, path: str) -> None:
    if path == "plain":
        check(kind, 300, rounding=0.0)
    else:
        check(kind, 300, KNOBS[1:4])


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spread", "rounded"])
def test_an_interval_is_narrowed_until_it_fits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than are read at a time, and more numbers than are searched at once."""
    monkeypatch.setattr(filters, "NEAR", 64)
    monkeypatch.setattr(filters, "GROUP", 2)
    check(kind, 2500, [(1200, 1.0, 0.0), (0, 0.9, 0.0), (300, 0.95, 0.01), (0, 0.3, 0.0)])


@both
def test_of_equal_ones_the_lower_ids_stay(path: str) -> None:
    p = torch.tensor([0.1, 0.25, 0.4, 0.25]).log().expand(5, 4)
    knobs = [(2, 1.0, 0.0), (0, 0.6, 0.0), (0, 0.66, 0.0), (3, 0.45, 0.0), (0, 1.0, 0.5)]
    mask = keep(p, of(knobs, 4)).mask(p)
    kept = [row.nonzero()[:, 0].tolist() for row in mask]
    # behind the 3 of top-k, 0.4 is 0.444 of the mass: not 0.45
    assert kept == [[1, 2], [1, 2], [1, 2, 3], [1, 2], [1, 2, 3]]
    # a temperature at which logits that differ become equal: the order is theirs all the same
    near = torch.tensor([[1.0, math.nextafter(1.0, 2.0) + 2e-7, 1.0]])
    kept_of = keep(near, of([(1, 1.0, 0.0)], 3), torch.tensor([1e4])).mask(near)
    assert kept_of.tolist() == [[False, True, False]]


@both
def test_a_p_that_float32_does_not_hold_leaves_the_likeliest(path: str) -> None:
    logits_BV = of_kind("spread", 2, 300)
    kept_BV = keep(logits_BV, of([(0, 1e-300, 0.0), (9, 1e-50, 0.5)], 300)).mask(logits_BV)
    assert kept_BV.sum(1).tolist() == [1, 1]
    assert kept_BV.long().argmax(1).tolist() == logits_BV.argmax(1).tolist()


@both
def test_a_row_has_the_same_bits_whatever_is_beside_it(path: str) -> None:
    logits_BV, keys_B = of_kind("spread", 5, 300), torch.arange(5)
    temperature_B, greedy_B = torch.linspace(0.6, 1.2, 5), torch.arange(5) == 2
    knobs = [OFF, (5, 0.9, 0.0), (5, 0.9, 0.1), (0, 0.8, 0.0), OFF]
    filters_B = of(knobs, 300)
    tokens_B, logprobs_B = draw(logits_BV, keys_B, keys_B, temperature_B, greedy_B, filters_B)
    plain = draw(logits_BV, keys_B, keys_B, temperature_B, greedy_B)
    for row in range(5):
        if row in (0, 2, 4):  # without filters, and greedy: as if nobody had any
            want = plain[0][row], plain[1][row]
        else:
            at = slice(row, row + 1)
            one = of(knobs[at], 300)
            alone = draw(
                logits_BV[at], keys_B[at], keys_B[at], temperature_B[at], greedy_B[at], one
            )
            want = alone[0][0], alone[1][0]
        assert (tokens_B[row], logprobs_B[row]) == want, row


@pytest.mark.parametrize("rows", [1, 3])
def test_half_numbers_are_filtered_as_their_floats(rows: int) -> None:
    logits_BV = of_kind("spread", rows, 200).bfloat16()
    filters_B = of([(9, 0.9, 0.0)] * rows, 200)
    half, wide = keep(logits_BV, filters_B), keep(logits_BV.float(), filters_B)
    assert torch.equal(half.mask(logits_BV), wide.mask(logits_BV.float()))
