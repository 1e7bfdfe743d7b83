"""Matrices packed for oneDNN: the same product, never a stale one, and never inside autograd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import lowroll
from lowroll import Engine, Request
from lowroll.model import hf
from lowroll.quant import dense
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.tiny import hf_folder

SHAPE = (640, 512)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture
def everything_packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dense, "PACK_FROM", 0)
    yield


def needs_packing(name: str) -> None:
    if not dense.packs(DTYPES[name]):
        pytest.skip("this torch or CPU has no packed product for the dtype")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64, 130])
def test_packed_product_is_the_product(name: str, rows: int) -> None:
    needs_packing(name)
    torch.manual_seed(0)
    q, bias = lowroll.quantize(torch.randn(SHAPE), name), torch.randn(SHAPE[0])
    x = torch.randn(rows, 2 * SHAPE[1])[:, ::2]  # strided on purpose
    got = q.linear(x, bias)
    assert "onednn" in q.packed and got.dtype == torch.float32
    rounded = x.to(DTYPES[name]).double()
    exact = rounded @ q.tensors["weight"].double().t() + bias.to(DTYPES[name]).double()
    bound = {"fp32": 2e-6, "bf16": 2**-8}[name] * (1 + exact.abs().max())
    assert (got.double() - exact).abs().max() < bound


def test_codes_that_change_are_packed_again() -> None:
    torch.manual_seed(1)
    q, w, x = (
        lowroll.quantize(torch.randn(SHAPE), "fp32"),
        torch.randn(SHAPE),
        torch.randn(3, SHAPE[1]),
    )
    q.linear(x)
    torch.testing.assert_close(q.quantize_(w).linear(x), F.linear(x, w), rtol=1e-5, atol=1e-4)


def test_a_gradient_goes_through_the_plain_product() -> None:
    torch.manual_seed(2)
    q, x = (
        lowroll.quantize(torch.randn(SHAPE), "fp32"),
        torch.randn(3, SHAPE[1], requires_grad=True),
    )
    q.linear(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], q.tensors["weight"].sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_takes_a_packed_head(
    everything_packed: None, tmp_path: object, tied: bool
) -> None:
    """After `update_weights`, nothing multiplies with what it packed before."""
    first, second = (
        hf.load(hf_folder(tmp_path / str(seed), seed=seed, tie_word_embeddings=tied))
        for seed in (0, 1)
    )
    request = Request(list(range(2, 12)), n=2, max_tokens=12, seed=3)
    engine = Engine(first, "fp32", device="cpu", cache_tokens=256)
    engine.generate([request])
    engine.update_weights(WeightUpdate.local(second, 1))
    rollouts = engine.generate([request])[0].rollouts
    want = lowroll.score(second, [request.prompt_ids + r.token_ids for r in rollouts], [10, 10])
    for rollout, logp in zip(rollouts, want, strict=True):
        torch.testing.assert_close(torch.tensor(rollout.logprobs), logp, rtol=0, atol=1e-4)
