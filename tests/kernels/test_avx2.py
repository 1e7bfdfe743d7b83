"""4-bit weights on a CPU: products from the codes against float64, and what happens without a
compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowroll import Engine, Request
from lowroll.kernels import build, cxx
from lowroll.kernels.matmul import w4_avx2
from lowroll.model import initialize
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format, quantize
from lowroll.runs.demo import CONFIG

CPU = torch.device("cpu")
KINDS = ("nvfp4", "mxfp4", "mxfp4_floor", "int4", "int4_asym")
SHAPES = (
    (1, 64),
    (17, 192),
    (40, 320),
    (19, 1088),
)  # a last group, block and tile that are not full


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel takes matrices of any size."""
    if not (found := w4_avx2.supports_device(CPU)):
        pytest.skip(found.why_not)
    monkeypatch.setattr(w4_avx2, "LEAST", 1)
    w4_avx2.supports_matrix.cache_clear()
    yield
    w4_avx2.supports_matrix.cache_clear()


@pytest.fixture
def unasked() -> Iterator[None]:
    """Forget what the machine has answered, before the test and after it."""
    caches = (cxx.compiler, cxx.supports, w4_avx2.supports_matrix, cxx._function)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


def weight(kind: str, rows: int, columns: int) -> QTensor:
    """Channels of many sizes, one of them of zeros."""
    w_NK = torch.randn(rows, columns) * torch.randn(rows, 1).exp()
    w_NK[rows // 2, : columns // 2] = 0
    return quantize(w_NK, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_dequantized_matrix(kind: str, small: None) -> None:
    torch.manual_seed(0)
    for rows, columns in SHAPES:
        q, bias_N = weight(kind, rows, columns), torch.randn(rows)
        size_N = q.dequantize().norm(dim=1)
        for num_rows in (1, 5, 8, 9, 33):
            x_MK = torch.randn(num_rows, columns)
            want_MN = x_MK.double() @ q.dequantize().double().t() + bias_N
            got_MN = q.linear(x_MK, bias_N)
            assert ((got_MN - want_MN).abs() < 2e-4 * size_N + 1e-5).all(), (rows, columns)
    assert not q.packed  # no floats are kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_in_any_batch_and_on_any_threads(kind: str, small: None) -> None:
    q, x_MK = weight(kind, 40, 320), torch.randn(41, 320)
    whole_MN = q.linear(x_MK)
    for size in (1, 3, 8, 9):
        assert torch.equal(torch.cat([q.linear(some) for some in x_MK.split(size)]), whole_MN)
    torch.set_num_threads(3 - min(torch.get_num_threads(), 2))
    assert torch.equal(q.linear(x_MK), whole_MN)


def test_activations_are_rounded_to_16_bits_of_the_largest_of_256(small: None) -> None:
    q = quantize(torch.eye(512), "mxfp4")
    x_MK = torch.randn(2, 512)
    x_MK[0, 300], x_MK[1] = 1000.0, 0.0
    got_MN = q.linear(x_MK)
    step_K = torch.tensor([x_MK[0, :256].abs().max(), 1000.0]).repeat_interleave(256) / 32767
    assert torch.allclose(got_MN[0], torch.round(x_MK[0] / step_K) * step_K, rtol=1e-5, atol=1e-7)
    assert (got_MN[0] - x_MK[0])[256:].abs().max() > 1e-3  # beside the large one
    assert (got_MN[0] - x_MK[0])[:256].abs().max() < 1e-4
    assert not got_MN[1].any()


def test_int8_activations_are_multiplied_as_they_are(small: None) -> None:
    form, q, x_MK = get_format("w4a8"), weight("w4a8", 24, 256), torch.randn(9, 256)
    want_MN = form.rounded(x_MK).double() @ q.dequantize().double().t()
    assert torch.allclose(q.linear(x_MK).double(), want_MN, rtol=1e-5, atol=1e-5)
    assert not q.packed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(value: float, small: None) -> None:
    q, x_MK = weight("int4", 40, 640), torch.randn(10, 640)
    want_MN = q.linear(x_MK)
    x_MK[3, 600] = value
    got_MN = q.linear(x_MK)
    assert got_MN[3].isnan().all()
    assert torch.equal(got_MN[[0, 1, 2, *range(4, 10)]], want_MN[[0, 1, 2, *range(4, 10)]])


def test_bfloat16_activations_and_views_are_taken(small: None) -> None:
    q, x_MK = weight("nvfp4", 16, 128), torch.randn(6, 256)[:, ::2]
    y_MN = q.linear(x_MK.bfloat16(), torch.ones(16).bfloat16())
    assert y_MN.dtype == torch.bfloat16
    want_MN = x_MK.bfloat16().float() @ q.dequantize().t() + 1
    assert torch.allclose(y_MN.float(), want_MN, rtol=0.02, atol=0.02 * want_MN.abs().max())


def test_parts_with_global_scales_of_their_own(small: None) -> None:
    form = get_format("nvfp4")
    parts = [quantize(torch.randn(rows, 128) * rows, "nvfp4") for rows in (8, 24)]
    q, x_MK = form.stack(parts), torch.randn(3, 128)
    assert len(q.tensors["weight_global_scale"]) == 32
    assert torch.equal(q.linear(x_MK), torch.cat([part.linear(x_MK) for part in parts], dim=1))


def test_what_is_left_to_torch_has_a_reason() -> None:
    x_MK = torch.randn(2, 512)
    shape = (512, 512)
    assert w4_avx2.LEAST == 512 * 512
    assert "weights or more" in w4_avx2.supports("int4", x_MK, (511, 512)).why_not
    assert "multiples of 64" in w4_avx2.supports("int4", x_MK, (9000, 500)).why_not
    assert "knows" in w4_avx2.supports("", x_MK, shape).why_not
    assert "row" in w4_avx2.supports("int4", x_MK[:0], shape).why_not
    assert "gradient" in w4_avx2.supports("int4", x_MK.requires_grad_(), shape).why_not
    assert w4_avx2.supports_device(torch.device("meta")).why_not == "runs on a CPU"


def test_without_a_compiler_the_matrix_is_kept_as_floats(
    unasked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    found = w4_avx2.supports("int4", torch.randn(2, 512), (512, 512))
    assert not found and found.why_not.startswith(("no C++ compiler", "needs a CPU"))
    q, x_MK = weight("int4", 512, 512), torch.randn(2, 512)
    assert torch.equal(q.linear(x_MK), x_MK @ q.dequantize().t())
    assert list(q.packed) == ["dense torch.float32"]


@pytest.mark.skipif(not w4_avx2.supports_device(CPU), reason="the kernel does not run here")
def test_a_compiler_that_fails_is_told_once(
    tmp_path: Path,
    unasked: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = tmp_path / "c++"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0; echo "line 3: nonsense" >&2; exit 2\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        found = [w4_avx2.supports("int4", torch.randn(2, 512), (512, 512)) for _ in range(2)]
    assert not any(found) and "line 3: nonsense" in found[0].why_not
    assert len(caplog.records) == 1 and "kept as floats" in caplog.text
    assert not list(build.cache_folder().iterdir())


@pytest.mark.skipif(not w4_avx2.supports_device(CPU), reason="the kernel does not run here")
@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_an_engine_holds_codes_and_draws_what_its_dequantized_weights_would(kind: str) -> None:
    config = {**CONFIG, "hidden_size": 512, "num_hidden_layers": 1, "vocab_size": 261}
    model, plain = (initialize(Transformer(spec_from_config(config)), seed=0) for _ in range(2))
    engine = Engine(model, kind, device="cpu", cache_tokens=256)
    for (_, coded), (_, dense) in zip(engine.model.linears(), plain.linears(), strict=True):
        dense.set_weight(torch.nn.Parameter(coded.weight.dequantize()))
    reference = Engine(plain, "fp32", device="cpu", cache_tokens=256)
    requests = [Request([7, 8, 9], n=3, max_tokens=6, seed=1, ignore_eos=True)]
    for rollout in engine.generate(requests)[0].rollouts:
        logp_T = reference.runner.score([7, 8, 9, *rollout.token_ids], 3, 1.0)[0]
        assert torch.allclose(logp_T, torch.tensor(rollout.logprobs), atol=2e-5)
    large = [q for _, layer in engine.model.linears() if (q := layer.weight).shape[0] >= 512]
    assert large and not any(q.packed for q in large if q.shape[0] * q.shape[1] >= w4_avx2.LEAST)
