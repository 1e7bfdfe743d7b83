"""A matrix in the fewest bytes that stand for the same floats: the bits of its products, and what has
no such form."""

from __future__ import annotations

import pytest
import torch

from lowroll import Engine, Request
from lowroll.kernels.matmul import ordered
from lowroll.kernels.support import YES
from lowroll.model import initialize
from lowroll.model import transformer as module
from lowroll.model.exact import why_not
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import quantize
from lowroll.runs.demo import CONFIG
from lowroll.weights import aligned_forward
from lowroll.weights.sync.changes import Shadow
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.live import Live

CPU = torch.device("cpu")
MAKERS = {
    ordered.BFLOAT16: lambda w_NK: w_NK.bfloat16().float(),
    ordered.BLOCKS: lambda w_NK: quantize(w_NK, "q8_0").dequantize(),
}


@pytest.fixture(autouse=True)
def needs_the_kernel() -> None:
    if not (found := ordered.supports_device(CPU)):
        pytest.skip(found.why_not)


@pytest.fixture(params=["AVX-512", "AVX2"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one of the library's two instruction sets."""
    wide = request.param == "AVX-512"
    if wide and not ordered.has_avx512():
        pytest.skip("needs AVX-512")
    monkeypatch.setattr(ordered, "has_avx512", lambda: wide)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.usefixtures("lanes")
def test_bits_are_those_of_the_floats(kind: int) -> None:
    torch.manual_seed(0)
    for shape in ((1, 32), (300, 576), (7, 64), (2100, 96)):
        w_NK = MAKERS[kind](torch.randn(shape) * torch.randn(shape[0], 1).exp())
        compact = ordered.compact(w_NK)
        assert compact is not None and compact.kind == kind
        assert compact.rows.nbytes < w_NK.nbytes
        for num_rows in (1, 3, 4, 17):
            x_MK = torch.randn(num_rows, shape[1])
            assert torch.equal(ordered.compact_product(x_MK, compact), ordered.product(x_MK, w_NK))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q8_0"])
@pytest.mark.usefixtures("lanes")
def test_blocks_are_multiplied_as_they_are_stored(name: str) -> None:
    """With the bits of the dense copy, which an engine does not make."""
    torch.manual_seed(0)
    for shape in ((1, 32), (300, 576), (7, 64), (13, 96)):
        w_NK = torch.randn(shape) * torch.randn(shape[0], 1).exp()
        w_NK[0, :32] = 0.0  # a scale of 0
        codes = quantize(w_NK, name)
        dense_NK, bias_N = codes.dequantize(), torch.randn(shape[0])
        for num_rows in (1, 3, 4, 17):
            x_MK = torch.randn(num_rows, 2 * shape[1])[:, : shape[1]]
            for bias in (None, bias_N):
                with torch.inference_mode():
                    y_MN = codes.linear(x_MK, bias, exact=True)
                expected_MN = ordered.product(x_MK, dense_NK, bias)
                assert torch.equal(y_MN.view(torch.int32), expected_MN.view(torch.int32))
        assert not any(key.startswith("dense") for key in codes.packed)


def test_blocks_that_are_no_whole_groups_have_a_dense_copy() -> None:
    codes, x_MK = quantize(torch.randn(5, 40), "q4_1"), torch.randn(2, 40)
    with torch.inference_mode():
        y_MN = codes.linear(x_MK, None, exact=True)
    assert torch.equal(y_MN, ordered.product(x_MK, codes.dequantize()))


def test_new_weights_are_decoded_anew() -> None:
    codes, x_MK = quantize(torch.randn(8, 64), "q4_1"), torch.randn(2, 64)
    with torch.inference_mode():
        codes.linear(x_MK, None, exact=True)
    other = torch.randn(8, 64)
    codes.quantize_(other)
    with torch.inference_mode():
        y_MN = codes.linear(x_MK, None, exact=True)
    assert torch.equal(y_MN, ordered.product(x_MK, quantize(other, "q4_1").dequantize()))


def test_other_matrices_have_no_compact_form() -> None:
    torch.manual_seed(0)
    exact = torch.randn(1200, 64).bfloat16().float()
    late = exact.clone()
    late[1150, 3] += 1e-4  # behind the first chunk
    zero = MAKERS[ordered.BLOCKS](torch.randn(4, 64))
    zero[1, 5] = -0.0  # whole numbers have one zero; bfloat16 has too few digits
    for w_NK in (torch.randn(200, 64), late, exact[:, :48], zero):
        assert ordered.compact(w_NK.contiguous()) is None


@pytest.mark.parametrize("kind", MAKERS)
def test_no_second_float32_copy_is_made(kind: int) -> None:
    w_NK = MAKERS[kind](torch.randn(20 * ordered.AT_ONCE, 64))
    with Live() as live:
        compact = ordered.compact(w_NK)
        assert compact is not None and live.live == compact.rows.nbytes
        assert live.peak < 0.75 * w_NK.nbytes


def test_an_exact_engine_draws_the_same_with_and_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = spec_from_config({**CONFIG, "vocab_size": 264, "head_dim": 32})
    if reason := why_not(spec, CPU, torch.float32):
        pytest.skip(reason)
    model = initialize(Transformer(spec), seed=0)
    with torch.no_grad():
        model.lm_head_weight.copy_(model.lm_head_weight.bfloat16())
    requests = [Request([5, 6, 7], max_tokens=12, seed=3, id="a")]
    drawn = []
    for most in (module.COMPACT_HEAD_ROWS, 0):
        monkeypatch.setattr(module, "COMPACT_HEAD_ROWS", most)
        engine = Engine(model, "fp32", device="cpu", exact=True, cache_tokens=256)
        (group,) = engine.generate(requests)
        drawn.append((group.rollouts[0].token_ids, group.rollouts[0].logprobs))
        assert engine.model.head is not None
        assert ("compact" in engine.model.head.packed) == (most > 0)
    assert drawn[0] == drawn[1]


def test_an_interpreted_kernel_multiplies_the_head_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(learner(True), "int8", device="cpu", exact=True, cache_tokens=256)
    hidden_TD = torch.randn(2, engine.model.spec.hidden_size)
    assert engine.model._compact_head(hidden_TD) is not None
    monkeypatch.setattr(module, "triton_supports", lambda _: YES)
    assert engine.model._compact_head(hidden_TD) is None


def learner(tied: bool) -> Transformer:
    """A model of int8 codes, whose head is of bfloat16 numbers."""
    spec = spec_from_config(
        {**CONFIG, "vocab_size": 264, "head_dim": 32, "tie_word_embeddings": tied}
    )
    if reason := why_not(spec, CPU, torch.float32):
        pytest.skip(reason)
    model = initialize(Transformer(spec), seed=0).requires_grad_(True)
    change_head(model, 0)
    return aligned_forward.align(model, "int8")


@torch.no_grad()
def change_head(model: Transformer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values_VD = torch.randn(model.lm_head_weight.shape, generator=generator)
    model.lm_head_weight.copy_((values_VD / 50).bfloat16())


def drawn(engine: Engine, num_requests: int) -> list[tuple[list[int], list[float]]]:
    """The tokens and log-probs of the first two of so many requests, which end together."""
    requests = [
        Request([5, 6, 7 + i], max_tokens=6, seed=i, id=str(i), ignore_eos=True)
        for i in range(num_requests)
    ]
    groups = engine.generate(requests)
    return [(g.rollouts[0].token_ids, g.rollouts[0].logprobs) for g in groups[:2]]


@pytest.mark.parametrize("kind", ["full", "codes"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_changed_head_is_read_anew(kind: str, tied: bool) -> None:
    """Two rows read the compact form, and six the floats."""
    model = learner(tied)
    engine = Engine(model, "int8", device="cpu", exact=True, cache_tokens=512)
    shadow = Shadow(model, "int8", torch.float32)
    shadow.renew(0)
    before = drawn(engine, 2)
    assert engine.model.head is not None and engine.model.head.packed["compact"] is not None
    change_head(model, 1)
    stream, changes = shadow.changes()
    codes = WeightUpdate(1, "codes", stream.items, changes=changes)
    engine.update_weights(codes if kind == "codes" else WeightUpdate.local(model, 1))
    few, many = drawn(engine, 2), drawn(engine, 6)
    assert engine.model.head.packed["compact"] is not None
    assert few == many and few != before


def test_changes_of_codes_keep_the_form_of_a_head_that_stays() -> None:
    model = learner(tied=True)
    engine = Engine(model, "int8", device="cpu", exact=True, cache_tokens=512)
    shadow = Shadow(model, "int8", torch.float32)
    shadow.renew(0)
    before = drawn(engine, 2)
    assert engine.model.head is not None
    compact = engine.model.head.packed["compact"]
    with torch.no_grad():
        for _, linear in model.linears():
            linear.weight.mul_(-1)
    aligned_forward.refresh(model)
    stream, changes = shadow.changes()
    engine.update_weights(WeightUpdate(1, "codes", stream.items, changes=changes))
    assert engine.model.head.packed["compact"] is compact
    assert drawn(engine, 2) != before
