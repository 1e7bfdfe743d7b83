"""Products of float32 whose sums have one order: the bits of an output depend on its row and column
alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowroll.kernels.matmul import ordered

CPU = torch.device("cpu")
runs_here = pytest.mark.skipif(
    not ordered.supports_device(CPU), reason=ordered.supports_device(CPU).why_not
)
needs_avx512 = pytest.mark.skipif(not ordered.has_avx512(), reason="needs a CPU with AVX-512")
BATCHES = (1, 2, 3, 5, 6, 7, 8, 16, 17, 63, 200)
FEATURES_IN = (1, 7, 16, 17, 31, 64, 576, 1536)
FEATURES_OUT = (1, 3, 4, 5, 16, 33, 1000)


@pytest.fixture(params=[pytest.param(True, marks=needs_avx512, id="avx512"), "avx2"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two kernels."""
    monkeypatch.setattr(ordered, "has_avx512", lambda: request.param is True)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_order(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """The sums in the order that the kernel states. float64 holds a product of integers, and its sum
    with a float32 of them, exactly: a fused multiply-add is one rounding of it."""
    pad = (0, -x_MK.shape[1] % 16)
    x, w = (torch.nn.functional.pad(t, pad).double().unflatten(1, (-1, 16)) for t in (x_MK, w_NK))
    lanes = torch.zeros(len(x), len(w), 16)
    for i in range(x.shape[1]):
        lanes = (lanes.double() + x[:, None, i] * w[None, :, i]).float()
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


@runs_here
@pytest.mark.parametrize("K", FEATURES_IN)
def test_products_are_those_of_float64(K: int, wide: None) -> None:
    for M, N in ((1, 33), (6, 1000), (63, 5), (200, 16)):
        x, w, bias = normal(M, K), normal(N, K), normal(N)
        want = x.double() @ w.double().t()
        bound = 1e-6 * (x.double().abs() @ w.double().abs().t() + 1)
        assert ((ordered.product(x, w) - want).abs() < bound).all()
        got = ordered.product(x, w, bias)
        assert torch.equal(got, ordered.product(x, w) + bias)


@runs_here
@pytest.mark.parametrize("K", FEATURES_IN)
def test_the_order_of_a_sum_is_the_one_stated(K: int, wide: None) -> None:
    g = torch.Generator().manual_seed(K)
    x, w = (torch.randint(-(1 << 18), 1 << 18, (n, K), generator=g).float() for n in (7, 9))
    got = ordered.product(x, w)
    assert torch.equal(got, in_order(x, w))
    if K >= 64:  # numbers that show another order
        assert not torch.equal(got, in_order(x.flip(1), w.flip(1)))
        exact = x.double() @ w.double().t()
        assert not torch.equal(got, exact.float())


@runs_here
@pytest.mark.parametrize("K", FEATURES_IN)
def test_a_row_is_the_same_alone_and_anywhere_in_any_batch(K: int, wide: None) -> None:
    x = normal(max(BATCHES), K)
    for N in FEATURES_OUT:
        w, bias = normal(N, K), normal(N)
        whole = ordered.product(x, w, bias)
        for M in BATCHES:
            for first in {0, 1, len(x) // 2, len(x) - M}:
                some = slice(first, first + M)
                assert torch.equal(ordered.product(x[some], w, bias), whole[some]), (M, first)


@runs_here
@pytest.mark.parametrize("K", (17, 576))
def test_a_column_is_the_same_alone_and_anywhere_in_any_matrix(K: int, wide: None) -> None:
    x, w, bias = normal(17, K), normal(1000, K), normal(1000)
    whole = ordered.product(x, w, bias)
    for N in FEATURES_OUT:
        for first in {0, 1, 500, 1000 - N}:
            some = slice(first, min(first + N, 1000))
            assert torch.equal(ordered.product(x, w[some], bias[some]), whole[:, some]), (N, first)


@runs_here
@pytest.mark.parametrize("K", (40, 576))
def test_threads_strides_and_alignment_change_no_bit(K: int, wide: None) -> None:
    x, w, bias = normal(600, K), normal(1000, K), normal(1000)
    torch.set_num_threads(1)
    want = ordered.product(x, w, bias)
    apart = [torch.cat([t[:, :5], t, t[:, :8]], 1)[:, 5:-8] for t in (x, w)]
    assert not any(t.is_contiguous() or t.data_ptr() % 64 == 0 for t in apart)
    turned = [t.t().contiguous().t() for t in (x, w)]
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for given in ((x, w), apart, turned):
            assert torch.equal(ordered.product(*given, bias), want), number
        for M in (1, 4, 9):  # tasks of other sizes
            assert torch.equal(ordered.product(x[:M], w, bias), want[:M]), number
        assert torch.equal(ordered.product(x, w, bias.repeat_interleave(2)[::2]), want)


@runs_here
@needs_avx512
def test_avx2_and_avx512_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for K in FEATURES_IN:
        for M, N in ((1, 1000), (3, 33), (17, 5), (200, 16)):
            x, w, bias = normal(M, K), normal(N, K), normal(N)
            found = []
            for width in (True, False):
                monkeypatch.setattr(ordered, "has_avx512", lambda: width)
                found.append(ordered.product(x, w, bias))
            assert torch.equal(*found)


def either_way(
    x: Tensor, w: Tensor, bias: Tensor | None, patch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Their product with lanes that are parts of a sum, and with lanes that are columns."""
    found = []
    for across in (False, True):
        patch.setattr(ordered, "goes_across", lambda *sizes, across=across: across)
        found.append(ordered.product(x, w, bias))
    return found


def bits(y: Tensor) -> Tensor:
    """One pattern for every NaN: which of two an addition keeps is not part of the order."""
    return y.masked_fill(y.isnan(), float("nan")).view(torch.int32)


# Whose products and sums are zeros of both signs and denormals, too.
TINY = (0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30, 1e-38, -1e-41, 1e-45)
NOT_FINITE = (3e38, float("inf"), float("-inf"), float("nan"))


@runs_here
@pytest.mark.parametrize("numbers", (None, TINY, TINY + NOT_FINITE), ids=("normal", "tiny", "any"))
def test_lanes_across_the_columns_have_the_same_bits(
    numbers: tuple[float, ...] | None, wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        if numbers is None:
            return torch.randn(*shape, generator=g)
        return torch.tensor(numbers)[torch.randint(len(numbers), shape, generator=g)]

    for K in range(ordered.DEEPEST + 2):  # beyond the last, there is one way
        for M, N in ((1, 1), (2, 33), (5, 64), (9, 100), (130, 17)):
            x, w = draw(M, K), draw(N, K)
            for bias in (None, draw(N), torch.full((N,), -0.0)):
                along, across = either_way(x, w, bias, monkeypatch)
                assert torch.equal(bits(along), bits(across)), (M, N, K)


@runs_here
def test_a_sum_of_nothing_but_negative_zeros_keeps_its_sign_unless_zeros_follow(
    wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product is below the smallest number: its lane is -0 until the 0 behind K is added."""
    for K in range(1, ordered.DEEPEST + 1):
        x, w, bias = torch.full((3, K), 1e-30), torch.full((40, K), -1e-30), torch.full((40,), -0.0)
        for y in either_way(x, w, bias, monkeypatch):
            assert (y == 0).all() and (y.signbit() == (K % 16 == 0)).all(), K


@runs_here
def test_what_is_not_finite_passes_through_and_spoils_nothing_else(wide: None) -> None:
    x, w = normal(9, 100), normal(11, 100)
    want = ordered.product(x, w)
    x[2, 99], x[5, 3], w[4, 50] = float("nan"), float("inf"), float("-inf")
    got = ordered.product(x, w)
    assert got[2].isnan().all() and (got[5] == w[:, 3].sign() * float("inf")).sum() >= 10
    torch.testing.assert_close(got, x @ w.t(), rtol=1e-4, atol=1e-4, equal_nan=True)
    rows, columns = [0, 1, 3, 4, 6, 7, 8], [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert torch.equal(got[rows][:, columns], want[rows][:, columns])


@runs_here
def test_nothing_gives_nothing_and_empty_sums_the_bias() -> None:
    assert ordered.product(normal(0, 16), normal(5, 16)).shape == (0, 5)
    assert ordered.product(normal(3, 16), normal(0, 16)).shape == (3, 0)
    bias = normal(5)
    assert torch.equal(ordered.product(normal(3, 0), normal(5, 0), bias), bias.expand(3, 5))


def test_other_devices_have_a_reason() -> None:
    assert ordered.supports_device(torch.device("meta")).why_not == "runs on a CPU"


def test_other_numbers_and_shapes_are_refused() -> None:
    x, w = torch.ones(2, 8), torch.ones(3, 8)
    for given, words in (
        ((x.bfloat16(), w), "expected float32"),
        ((x, w.double()), "expected float32"),
        ((x, w[:, :7]), r"\[2, 8\], \[3, 7\] do not fit"),
        ((x, w, torch.ones(2)), "do not fit"),
    ):
        with pytest.raises(ValueError, match=words):
            ordered.product(*given)
