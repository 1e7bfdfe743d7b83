"""The learner's kernels, log-probs and AdamW: run by Triton's interpreter against float64, and
compiled for Hopper."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused.swiglu import silu_mul, silu_mul_backward
from lowroll.kernels.training import adamw, logprobs, swiglu_lora
from lowroll.kernels.training.adamw import Tensors
from lowroll.kernels.training.logprobs import logit_gradient, token_log_probs
from lowroll.kernels.training.swiglu_lora import silu_mul_adapted
from lowroll.model import logprobs as model_logprobs
from lowroll.model import lora
from lowroll.model.adapter import Adapter
from lowroll.model.attention import varlen
from lowroll.model.learner_linear import LearnerLinear
from tests.fixtures.compiled import arguments, built, compiled
from tests.fixtures.interpreted import both_paths
from tests.fixtures.learner import tiny_model
from tests.fixtures.tensors import normal

# -- log-probs -------------------------------------------------------------------------------------


@both_paths
@pytest.mark.parametrize("vocab", [1, 61, 4096, 9000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_statistics_and_gradient(path: str, vocab: int, temperature: float) -> None:
    logits = normal(3, vocab) * 4
    logits[1, ::3] = -torch.inf
    logits[1, 0] = 3.0
    targets, scale = torch.tensor([0, 0, vocab - 1]), normal(3, seed=1)
    truth = torch.log_softmax(logits.double() / temperature, -1)
    p, onehot = truth.exp(), torch.zeros(3, vocab).scatter_(1, targets[:, None], 1.0)
    gradient = torch.empty(3, vocab)
    logp, entropy = token_log_probs(logits, targets, temperature, gradient, scale)
    torch.testing.assert_close(
        logp.double(), truth.gather(1, targets[:, None])[:, 0], rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(
        entropy.double(), torch.special.entr(p).sum(-1), rtol=1e-5, atol=2e-6
    )
    torch.testing.assert_close(
        gradient.double(),
        (onehot - p) * scale[:, None].double() / temperature,
        rtol=1e-4,
        atol=1e-7,
    )
    token_log_probs(logits, targets, temperature, gradient)
    torch.testing.assert_close(gradient.double(), (onehot - p) / temperature, rtol=1e-4, atol=1e-7)
    again = torch.empty(3, vocab)
    logit_gradient(logits, targets, logp, torch.ones(3), temperature, again)
    torch.testing.assert_close(again, gradient, rtol=1e-5, atol=1e-7)


@both_paths
def test_a_confident_token_keeps_its_gradient_in_half_precision(path: str) -> None:
    """onehot - p is rounded, not p: with p = 1 - 1e-4 it is 1e-4 and not 0."""
    logits = torch.tensor([[0.0, -9.21034, -60.0]])
    gradient = torch.empty(1, 3, dtype=torch.float16)
    token_log_probs(logits, torch.tensor([0]), 1.0, gradient)
    torch.testing.assert_close(
        gradient.float(), torch.tensor([[1e-4, -1e-4, 0.0]]), rtol=2e-3, atol=1e-7
    )


@both_paths
def test_what_is_not_finite_shows(path: str) -> None:
    logits = torch.zeros(3, 9)
    logits[0, 4], logits[1, 4] = torch.nan, torch.inf
    logp, _ = token_log_probs(logits, torch.tensor([0, 0, 0]))
    assert logp[:2].isnan().all() and logp[2].item() == pytest.approx(-2.1972246)


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("learns", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_gradients_are_those_of_materialised_logits(
    monkeypatch: pytest.MonkeyPatch, learns: tuple[bool, bool], chunk: int, kept: int
) -> None:
    monkeypatch.setattr(model_logprobs, "_kept", lambda hidden: kept)
    leaves = [
        normal(7, 8).requires_grad_(learns[0]),
        normal(13, 8, seed=1).requires_grad_(learns[1]),
    ]
    targets, weights = torch.arange(7) % 13, normal(7, seed=2)
    logp, entropy = model_logprobs.token_log_probs(*leaves, targets, 0.8, chunk)
    truth = torch.log_softmax(leaves[0].double() @ leaves[1].double().t() / 0.8, -1)
    torch.testing.assert_close(logp.double(), truth[torch.arange(7), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        entropy.double(), -(truth.exp() * truth).sum(-1), rtol=1e-5, atol=1e-5
    )
    assert not entropy.requires_grad and logp.requires_grad == any(learns)
    learning = [leaf for leaf in leaves if leaf.requires_grad]
    if learning:
        got = torch.autograd.grad((logp * weights).sum(), learning)
        want = torch.autograd.grad((truth[torch.arange(7), targets] * weights).sum(), learning)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_read_once_and_made_again_for_a_second_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    leaves = [x.to(dtype).requires_grad_() for x in (normal(7, 8), normal(13, 8, seed=1))]
    made = []
    monkeypatch.setattr(
        model_logprobs.kernels, "logit_gradient", lambda *args: made.append(logit_gradient(*args))
    )

    def gradients(kept: int) -> list[list[Tensor]]:
        monkeypatch.setattr(model_logprobs, "_kept", lambda hidden: kept)
        logp, _ = model_logprobs.token_log_probs(*leaves, torch.arange(7), 0.8, 2)
        loss = (logp * normal(7, seed=2)).sum()
        return [list(torch.autograd.grad(loss, leaves, retain_graph=True)) for _ in range(2)]

    want, again = gradients(0)
    assert len(made) == 8
    got, late = gradients(3)
    assert len(made) == 8 + 1 + 4
    assert all(torch.equal(a, b) for a, b in zip(late, again, strict=True))
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * b.norm()


@both_paths
def test_the_gradient_of_a_plain_sum_is_that_of_equal_weights(path: str) -> None:
    """Autograd hands a sum's gradient on as one number with stride 0."""
    hidden, weight, targets = normal(7, 8), normal(13, 8, seed=1).requires_grad_(), torch.arange(7)
    logp, _ = model_logprobs.token_log_probs(hidden, weight, targets, chunk=3)
    (got,) = torch.autograd.grad(logp.sum(), [weight])
    truth = torch.log_softmax(hidden.double() @ weight.double().t(), -1)[torch.arange(7), targets]
    (want,) = torch.autograd.grad(truth.sum(), [weight])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# -- SwiGLU with an update -------------------------------------------------------------------------


@both_paths
@pytest.mark.parametrize(
    "shape", [(5, 7, 3, 1), (70, 130, 16, 2), (33, 129, 5, 2), (64, 128, 16, 1)]
)
def test_the_gate_of_an_adapted_product(path: str, shape: tuple[int, int, int, int]) -> None:
    tokens, size, rank, parts = shape
    gate_up, low = normal(tokens, 2 * size), normal(tokens, parts * rank, seed=1)
    b = normal(2 * size, parts * rank, seed=2) * 0.3
    if parts == 2:  # block-diagonal
        b[:size, rank:] = b[size:, :rank] = 0
    gate_up.requires_grad_()
    slope = normal(tokens, size, seed=3)
    got = silu_mul_adapted(gate_up, low, b, rank)
    whole = (gate_up.detach().double() + low.double() @ b.double().t()).requires_grad_()
    gate, up = whole.chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-5)
    for a, c in zip(
        torch.autograd.grad((got * slope).sum(), [gate_up]),
        torch.autograd.grad((want * slope.double()).sum(), [whole]),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=2e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize(("rank", "dtype"), [(129, torch.float32), (257, torch.float16)])
def test_updates_of_large_ranks_are_plain_products(
    rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile has no room for them: a model's gate and the function itself go another way."""
    assert swiglu_lora.supports(rank - 1, dtype) and not swiglu_lora.supports(rank, dtype)
    monkeypatch.setattr(swiglu_lora, "_silu_mul_adapted_kernel", None)
    monkeypatch.setattr(swiglu_lora, "_silu_mul_adapted_backward_kernel", None)
    gate_up, low, b = (
        normal(*shape, seed=i).to(dtype) for i, shape in enumerate([(5, 14), (5, rank), (14, rank)])
    )
    gate, up = (gate_up.float() + low.float() @ b.float().t()).chunk(2, dim=-1)
    got = silu_mul_adapted(gate_up.requires_grad_(), low, b, rank)
    torch.testing.assert_close(
        got.float(), torch.nn.functional.silu(gate) * up, rtol=1e-2, atol=0.3
    )
    got.float().sum().backward()
    linear = LearnerLinear(6, {"gate_proj": 4, "up_proj": 4}, False, dtype=dtype)
    linear.requires_grad_(False)
    linear.weight.normal_()
    linear.adapter = Adapter(rank, 1.0)
    linear.adapter.a["up_proj"], linear.adapter.b["up_proj"] = (
        torch.nn.Parameter(normal(*shape)) for shape in ((rank, 6), (4, rank))
    )
    y_TN, update = linear.base_and_update(normal(3, 6).to(dtype))
    assert update is None and torch.equal(y_TN, linear(normal(3, 6).to(dtype)))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this machine has not")
def test_the_largest_update_of_a_tile_fits_into_shared_memory() -> None:
    constants = {"TOKENS": swiglu_lora.TOKENS, "FEATURES": swiglu_lora.FEATURES, "RANK": 256}
    for function in (
        swiglu_lora._silu_mul_adapted_kernel,
        swiglu_lora._silu_mul_adapted_backward_kernel,
    ):
        types = {
            name: "i32" if name in ("num_tokens", "size", "columns", "rank") else "*bf16"
            for name in function.arg_names
            if name not in constants
        }
        made = built(function, types, constants, num_warps=8)
        assert (
            made.metadata.shared <= 113 * 1024 and "STL" not in made.asm["sass"]
        )  # two programs at a time


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "targets", [lora.TARGETS, ("up_proj", "q_proj"), ("gate_proj", "down_proj"), ()]
)
def test_a_model_learns_by_its_kernels_as_without(targets: tuple[str, ...]) -> None:
    """The update that the gate adds is neither lost nor added twice, forward and backward; and
    without an adapter."""
    found = []
    for plain in (False, True):
        model = lora.attach(tiny_model(), 4, 8.0, targets) if targets else tiny_model()
        for p in model.trainable_parameters().values():
            p.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(p.numel()))
        with (
            patch("lowroll.model.linear.triton_supports", lambda x, plain=plain: not plain),
            patch("lowroll.model.learner_linear.triton_supports", lambda x, plain=plain: not plain),
        ):
            hidden = model(torch.arange(9), torch.arange(9), varlen([9]))
            (hidden * normal(*hidden.shape)).sum().backward()
        found.append([hidden.detach(), *(p.grad for p in model.trainable_parameters().values())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.interpreted
def test_an_adapted_gate_is_made_again_beside_its_gradient() -> None:
    gate_up, low, b = normal(5, 2 * 70), normal(5, 6, seed=1), normal(2 * 70, 6, seed=2)
    slope, update = normal(5, 70, seed=3), swiglu_lora.Update(low, b, 3)
    want = silu_mul_adapted(gate_up.requires_grad_(), low, b, 3)
    want.backward(slope)
    grad, again = update.gate_backward(gate_up.detach(), slope)
    assert torch.equal(again, want) and torch.equal(update.gate(gate_up.detach()), want)
    assert torch.equal(grad, gate_up.grad)


@pytest.mark.interpreted
def test_the_gate_is_made_again_beside_its_gradient() -> None:
    gate_up, grad, again = normal(5, 2 * 70), normal(5, 70, seed=1), torch.empty(5, 70)
    silu_mul_backward(gate_up, grad, again)
    assert torch.equal(again, silu_mul(gate_up))


# -- AdamW -----------------------------------------------------------------------------------------

SHAPES = [(70, 70), (5,), (4096,), (1, 9000)]
DECAYS = [0.1, 0.0, 0.1, 0.05]


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adamw_in_one_launch_is_torchs(dtype: torch.dtype) -> None:
    masters = [normal(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    truth = [torch.nn.Parameter(m.double()) for m in masters]
    firsts, seconds = ([torch.zeros_like(m) for m in masters] for _ in range(2))
    lows = [m.half() if i % 2 else None for i, m in enumerate(masters)]
    torchs = torch.optim.AdamW(
        [{"params": [p], "weight_decay": d} for p, d in zip(truth, DECAYS, strict=True)],
        lr=1e-2,
        betas=(0.9, 0.99),
        eps=1e-8,
    )
    tensors = Tensors(masters, firsts, seconds, lows, DECAYS)
    for t in (1, 2, 3):
        gradients = [normal(*shape, seed=10 * t + i).to(dtype) for i, shape in enumerate(SHAPES)]
        gradients[0] = gradients[0].t()  # strides that the kernel does not read
        gradients[1] = torch.cat([torch.zeros(1).to(dtype), gradients[1]])[
            1:
        ]  # and a slice off its 16 bytes
        before = [p.detach().clone() for p in truth]
        for p, g in zip(truth, gradients, strict=True):
            p.grad = g.double() * 0.5
        torchs.step()
        at = tensors.addresses(gradients)
        moved = tensors.step(at, torch.tensor(0.5), rate=1e-2, betas=(0.9, 0.99), eps=1e-8, t=t)
        for m, p, low in zip(masters, truth, lows, strict=True):
            torch.testing.assert_close(m.double(), p.detach(), rtol=1e-6, atol=2e-6)
            assert low is None or torch.equal(low, m.half())
        wanted = sum(
            ((p - b * (1 - 1e-2 * d)) ** 2).sum()
            for p, b, d in zip(truth, before, DECAYS, strict=True)
        )
        assert moved.item() == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.interpreted
def test_adamws_moments_weigh_a_gradient_by_what_the_betas_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1 - 0.999 in float32 is off by 1.3e-5 of itself, a number rounded once by 6e-8.

    A device gets its numbers in float32; the interpreter would keep Python's.
    """

    class OnDevice:
        def __getitem__(self, grid: tuple[int, ...], kernel: Any = adamw._adamw_kernel) -> Any:
            return lambda *args, **named: kernel[grid](
                *(torch.tensor(x).item() if isinstance(x, float) else x for x in args), **named
            )

    monkeypatch.setattr(adamw, "_adamw_kernel", OnDevice())
    master, first, second = normal(70), torch.zeros(70), torch.zeros(70)
    truth = torch.nn.Parameter(master.double())
    torchs = torch.optim.AdamW([truth], lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    tensors = Tensors([master], [first], [second], [None], [1e-2])
    for t in (1, 2, 3):
        truth.grad = normal(70, seed=t).double()
        torchs.step()
        at = tensors.addresses([normal(70, seed=t)])
        tensors.step(at, torch.tensor(1.0), rate=1e-3, betas=(0.9, 0.999), eps=1e-8, t=t)
    for got, want in (
        (first, torchs.state[truth]["exp_avg"]),
        (second, torchs.state[truth]["exp_avg_sq"]),
    ):
        torch.testing.assert_close(
            got.double(), want, rtol=1e-6, atol=1e-7 * float(want.abs().max())
        )


@pytest.mark.parametrize(
    "odd", [torch.zeros(4, dtype=torch.float64), torch.zeros(4, 4).t()[:, 1:], torch.zeros(9)[1:]]
)
def test_adamw_refuses_tensors_that_it_cannot_write(odd: Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous float32"):
        Tensors([odd], [torch.zeros(4)], [torch.zeros(4)], [None], [0.0])
    zeros, halves = torch.zeros(4, 4), torch.zeros(20).half()
    for low, match in (
        (halves[1:17].view(4, 4), "contiguous float16"),
        (halves[:8].view(2, 4), "like its master"),
        (halves[:16].view(4, 4).t(), "contiguous float16"),
    ):
        with pytest.raises(ValueError, match=match):
            Tensors([zeros], [zeros], [zeros], [low], [0.0])
    with pytest.raises(ValueError, match="one dtype"):
        Tensors(
            [torch.zeros(4)] * 2,
            [torch.zeros(4)] * 2,
            [torch.zeros(4)] * 2,
            [torch.zeros(4).half(), torch.zeros(4).bfloat16()],
            [0.0] * 2,
        )
    with pytest.raises(ValueError, match="gradients"):
        Tensors(
            [torch.zeros(4)], [torch.zeros(4)], [torch.zeros(4)], [torch.zeros(4).half()], [0.0]
        ).addresses([torch.zeros(4).double()])


# -- compiled for Hopper ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this machine has not")
@pytest.mark.parametrize("kernel", ["token_log_probs", "adamw"])
def test_nothing_spills(kernel: str) -> None:
    from triton import language

    function: Any = getattr(
        {"token_log_probs": logprobs, "adamw": adamw}[kernel], f"_{kernel}_kernel"
    )
    constants: dict[str, Any] = {"BLOCK": logprobs.LANES}
    pointers = {
        "*fp32": "logits_ptr scale_ptr logp_ptr entropy_ptr",
        "*i64": "targets_ptr",
        "*bf16": "gradient_ptr",
        "i32": "vocab logits_stride gradient_stride",
    }
    if kernel == "adamw":
        constants = {
            "COLUMNS": 6,
            "GRADIENT": language.float32,
            "LOW": language.bfloat16,
            "BLOCK": adamw.BLOCK,
        }
        pointers = {
            "*i64": "table_ptr start_ptr",
            "*fp32": "decay_ptr clip_ptr moved_ptr",
            "*i32": "tensor_ptr",
        }
    types = dict.fromkeys(function.arg_names, "fp32") | arguments(pointers)
    types = {name: types[name] for name in function.arg_names if name not in constants}
    sass = built(function, types, constants, num_warps=adamw.WARPS if kernel == "adamw" else 8).asm[
        "sass"
    ]
    assert "STL" not in sass, f"{kernel} spills"
    assert "LDG.E.128" in sass, f"{kernel} reads its tensors by single words"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton, which this machine has not")
def test_the_gates_spill_nothing() -> None:
    gate_up = normal(64, 2 * 18944).bfloat16().requires_grad_()
    call = lambda: silu_mul_adapted(
        gate_up, normal(64, 32).bfloat16(), normal(2 * 18944, 32).bfloat16(), 16
    )
    for name, listing in compiled(lambda: call().sum().backward()):
        assert "STL" not in listing, f"{name} spills"
        assert "HMMA" in listing or "HGMMA" in listing, f"{name} multiplies on no tensor core"
