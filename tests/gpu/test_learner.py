"""The learner on a CUDA device: its kernels against float64, its steps against the CPU's, and no
bit that wanders."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.model import lora
from lowroll.model.attention import MOST_STACKS, AttentionInputs, varlen
from lowroll.model.learner_linear import LearnerLinear
from lowroll.model.logprobs import token_log_probs
from lowroll.model.transformer import Transformer
from lowroll.objectives.objective import select
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, learn
from tests.fixtures.learner import make_batch, tiny_model

pytestmark = pytest.mark.gpu


def error(got: Tensor, want: Tensor) -> float:
    got, want = (x.detach().double().cpu() for x in (got, want))
    return float((got - want).norm() / want.norm())


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("learns", [False, True])
def test_log_probs_of_half_precision_have_float32_logits(learns: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(150, 96, device="cuda").bfloat16(),
        torch.randn(5003, 96, device="cuda").bfloat16(),
    )
    hidden.requires_grad_()
    weight.requires_grad_(learns)
    targets, slope = torch.randint(0, 5003, (150,), device="cuda"), torch.randn(150, device="cuda")
    logp, entropy = token_log_probs(hidden, weight, targets, 0.9, chunk=32)
    truth = torch.log_softmax(hidden.double() @ weight.double().t() / 0.9, -1)
    want = truth.gather(1, targets[:, None])[:, 0]
    assert (logp - want).abs().max() < 1e-4
    assert (entropy + (truth.exp() * truth).sum(-1)).abs().max() < 1e-4
    leaves = [hidden, weight] if learns else [hidden]
    got = torch.autograd.grad((logp * slope).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((want * slope).sum(), leaves), strict=True):
        assert error(a, b) < 4e-3


@pytest.mark.parametrize(
    "lengths", [[1100] * 2, [1030, 9, 1030], [40, 40, 7], [3, 9, 27, 1, 50, 64, 2]]
)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_of_packed_sequences(lengths: list[int], kv_heads: int) -> None:
    assert (len(set(lengths)) > MOST_STACKS) == (len(lengths) == 7)
    torch.manual_seed(0)
    leaves = [
        torch.randn(sum(lengths), n, 64, device="cuda").bfloat16().requires_grad_()
        for n in (4, kv_heads, kv_heads)
    ]
    slope = torch.randn(sum(lengths), 4, 64, device="cuda")
    got = varlen(lengths, "cuda")(0, AttentionInputs(*leaves))
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    want = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in row), is_causal=True, enable_gqa=True
            ).transpose(0, 1)
            for row in zip(*(x.split(lengths) for x in exact), strict=True)
        ]
    )
    assert error(got, want) < 5e-3
    for a, b in zip(
        torch.autograd.grad((got * slope).sum(), leaves),
        torch.autograd.grad((want * slope.double().cpu()).sum(), exact),
        strict=True,
    ):
        assert error(a, b) < 1e-2


@pytest.mark.parametrize("parts", [{"q_proj": 48, "k_proj": 16, "v_proj": 16}, {"down_proj": 64}])
@pytest.mark.parametrize("bias", [True, False])
def test_an_adapted_product_in_half_precision(parts: dict[str, int], bias: bool) -> None:
    torch.manual_seed(0)
    linear = LearnerLinear(96, parts, bias, "cuda", torch.bfloat16).requires_grad_(False)
    linear.weight.normal_(0, 0.1)
    if linear.bias is not None:
        linear.bias.normal_()
    linear.adapter = lora.Adapter(8, 16.0)
    for part, size in parts.items():
        linear.adapter.a[part] = torch.nn.Parameter(torch.randn(8, 96, device="cuda") * 0.1)
        linear.adapter.b[part] = torch.nn.Parameter(torch.randn(size, 8, device="cuda"))
    x, slope = (
        torch.randn(50, 96, device="cuda").bfloat16().requires_grad_(),
        torch.randn(50, 80, device="cuda"),
    )
    masters = [*linear.adapter.a.values(), *linear.adapter.b.values()]
    y = linear(x)
    got = torch.autograd.grad((y * slope[:, : y.shape[1]]).sum(), [x, *masters])
    exact = [t.detach().double().cpu().requires_grad_() for t in (x, *masters)]
    updates = [
        b @ a * 2.0 for a, b in zip(exact[1 : 1 + len(parts)], exact[1 + len(parts) :], strict=True)
    ]
    want = F.linear(
        exact[0],
        linear.weight.double().cpu() + torch.cat(updates),
        None if linear.bias is None else linear.bias.double().cpu(),
    )
    assert error(y, want) < 6e-3
    for a, b in zip(
        got,
        torch.autograd.grad((want * slope.double().cpu()[:, : y.shape[1]]).sum(), exact),
        strict=True,
    ):
        assert error(a, b) < 1e-2


# -- whole steps -----------------------------------------------------------------------------------


def learned(
    device: str, dtype: torch.dtype, adapter: bool, steps: int = 3
) -> tuple[Transformer, list[dict]]:
    model = tiny_model().to(device, dtype)
    if adapter:
        lora.attach(model, 4, 8.0)
    optimizer = Optimizer(
        model.trainable_parameters(), OptimSettings(learning_rate=1e-2, weight_decay=0.1, eps=1e-3)
    )
    settings = LearnSettings(
        select("grpo", "tis"), minibatches=2, tokens_per_microbatch=40, kl_coef=0.1 * adapter
    )
    batch = make_batch(tiny_model())
    return model, [learn(model, batch, optimizer, settings) for _ in range(steps)]


@pytest.mark.parametrize("adapter", [False, True])
def test_steps_in_float32_are_the_cpus(adapter: bool) -> None:
    (cpu, want), (gpu, got) = (
        learned(device, torch.float32, adapter) for device in ("cpu", "cuda")
    )
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name] == pytest.approx(theirs[name], rel=2e-2, abs=2e-3) for name in theirs)
    for (name, p), q in zip(
        gpu.trainable_parameters().items(), cpu.trainable_parameters().values(), strict=True
    ):
        torch.testing.assert_close(
            p.cpu(), q, rtol=2e-2, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("adapter", [False, True])
def test_steps_in_half_precision_repeat_bit_for_bit(adapter: bool) -> None:
    (first, a), (second, b) = (learned("cuda", torch.bfloat16, adapter) for _ in range(2))
    assert a == b
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_masters_round_to_the_parameters() -> None:
    model = tiny_model().to("cuda", torch.bfloat16)
    optimizer = Optimizer(model.trainable_parameters(), OptimSettings(learning_rate=1e-2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learn(model, make_batch(tiny_model()), optimizer, LearnSettings(select("grpo")))
    for name, p in model.named_parameters():
        assert torch.equal(p, optimizer.masters[name].bfloat16()) and p.grad is None
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
