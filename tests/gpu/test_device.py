"""On a CUDA device: the CPU's answers, within float32 or bfloat16 bounds, and bitwise where they
are integers.

The CPU side of each comparison is what the other tests hold against transformers and hand-computed
numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowroll
from lowroll import Engine, Request
from lowroll.kernels.matmul import w8a8_cuda
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.model import hf, lora
from lowroll.model.attention import AttentionInputs, varlen
from lowroll.model.logprobs import token_log_probs
from lowroll.model.transformer import Transformer
from lowroll.quant import fp8
from lowroll.quant.formats import get_format
from lowroll.types import Group
from lowroll.weights.publish import digest, quantize_base, rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.tiny import COMMON, FAMILIES, hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

LENGTHS = [40, 1, 17, 17, 3]
IDS = torch.randint(
    2, COMMON["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)
)


def forward(model: Transformer) -> Tensor:
    """Logits [T, V] of the packed sequences, on the CPU."""
    pos = torch.cat([torch.arange(n) for n in LENGTHS]).to(model.device)
    hidden = model(IDS.to(model.device), pos, model.causal(LENGTHS))
    return model.logits(hidden).float().cpu()


def log_likelihood(model: Transformer) -> Tensor:
    pos = torch.cat([torch.arange(n) for n in LENGTHS]).to(model.device)
    hidden = model(IDS.to(model.device), pos, model.causal(LENGTHS))
    logp, _ = token_log_probs(hidden, model.lm_head_weight, IDS.roll(-1).to(model.device), chunk=7)
    return logp.mean()


def requests() -> list[Request]:
    return [
        Request(
            IDS[i : i + 3 + 5 * i].tolist(),
            n=1 + i % 3,
            max_tokens=16,
            seed=i,
            ignore_eos=True,
            temperature=[1.0, 0.0, 0.8][i % 3],
            top_k=20 * (i % 2),
            top_p=0.9 if i == 3 else 1.0,
        )
        for i in range(6)
    ]


def rollouts(groups: list[Group]) -> tuple[list[list[int]], Tensor]:
    """Token ids of every rollout, and all their log-probs in one row."""
    rows = [r for g in groups for r in g.rollouts]
    return [r.token_ids for r in rows], torch.tensor([x for r in rows for x in r.logprobs])


# -- float32: the CPU's answers --------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_learner_forward_and_gradient_in_float32(family: str, tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m", family)
    cpu, gpu = hf.load(path, "cpu", torch.float32), hf.load(path, "cuda", torch.float32)
    with torch.no_grad():
        assert (forward(gpu) - forward(cpu)).abs().max() < 2e-4
    for model in (cpu, gpu):
        log_likelihood(model).backward()
    for (name, p), (_, q) in zip(cpu.named_parameters(), gpu.named_parameters(), strict=True):
        if not p.requires_grad:  # a router's correction
            assert p.grad is None and q.grad is None and torch.equal(p, q.cpu())
            continue
        atol = 1e-5 if cpu.spec.delta is None else 2e-4  # states sum over all tokens
        torch.testing.assert_close(
            q.grad.cpu(), p.grad, rtol=1e-3, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("weights", ["fp32", "int8", "int8_rotated"])
def test_engine_in_float32_draws_the_cpus_tokens(folder: Path, weights: str) -> None:
    """The noise is counter-based and made of integers, so the same request draws the same tokens on
    both devices."""
    engines = [
        Engine(
            folder,
            weights=weights,
            device=device,
            dtype=torch.float32,
            cache_tokens=2048,
            page_size=4,
            max_batch=7,
            prefill_chunk=8,
        )
        for device in ("cpu", "cuda")
    ]
    (want_ids, want), (got_ids, got) = (rollouts(engine.generate(requests())) for engine in engines)
    assert got_ids == want_ids
    assert (got - want).abs().max() < (1e-3 if weights == "fp32" else 0.05)


def test_digests_do_not_depend_on_the_device(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for name in lowroll.formats():
            cpu, gpu = (
                quantize_base(hf.load(folder, device, dtype), name) for device in ("cpu", "cuda")
            )
            assert digest(cpu) == digest(gpu), name


# -- INT8: the same integers -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(96, 64), (33, 7), (130, 257), (8, 1024)])
@pytest.mark.parametrize("rows", [1, 5, 17, 40])
def test_int8_products_are_the_cpus_integers(shape: tuple[int, int], rows: int) -> None:
    torch.manual_seed(0)
    w, x, bias = torch.randn(shape), torch.randn(rows, shape[1]) * 3, torch.randn(shape[0])
    x[0] = 0
    q, q_gpu = lowroll.quantize(w, "int8"), lowroll.quantize(w.cuda(), "int8")
    for name, t in q.tensors.items():
        assert torch.equal(q_gpu.tensors[name].cpu(), t), name
    codes, codes_gpu = quantize_rows(x, "int8"), quantize_rows(x.cuda(), "int8")
    assert torch.equal(codes_gpu.codes_MK.cpu(), codes.codes_MK)
    assert torch.equal(codes_gpu.scale_M1.cpu(), codes.scale_M1)
    sums = codes.codes_MK.double() @ q.tensors["codes"].double().t()  # exact: integers below 2^53
    want = sums.float() * q.tensors["scale"].flatten() * codes.scale_M1 + bias
    assert torch.equal(q_gpu.linear(x.cuda(), bias.cuda()).cpu(), want)
    torch.testing.assert_close(
        q_gpu.linear(x.cuda(), bias.cuda()).cpu(), q.linear(x, bias), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_row_alone_is_row_in_batch_bitwise(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    q = lowroll.quantize(torch.randn(200, 320, device="cuda"), "int8")
    x, bias = (
        (torch.randn(67, 320, device="cuda") * 3).to(dtype),
        torch.randn(200, device="cuda").to(dtype),
    )
    batch = q.linear(x, bias)
    assert all(torch.equal(q.linear(x[i : i + 1], bias)[0], batch[i]) for i in range(67))
    assert torch.equal(q.linear(x.flip(0), bias).flip(0), batch)


# -- the other low-bit formats: the same bytes, the same values ------------------------------------

LOW_BIT = [name for name in lowroll.formats() if not get_format(name).dense]


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("shape", [(96, 256), (33, 7), (130, 257), (1, 1)])
def test_low_bit_codes_values_and_products_are_the_cpus(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    w, x, bias = (
        torch.randn(shape) * torch.rand(shape[0], 1),
        torch.randn(37, shape[1]) * 3,
        torch.randn(shape[0]),
    )
    w[0], x[0] = 0, 0
    for size in (1.0, 1e-37, 1e30):
        q, q_gpu = lowroll.quantize(w * size, name), lowroll.quantize((w * size).cuda(), name)
        for part, t in q.tensors.items():
            assert torch.equal(q_gpu.tensors[part].cpu().view(torch.uint8), t.view(torch.uint8)), (
                part
            )
        assert torch.equal(q_gpu.dequantize().cpu(), q.dequantize())
    q, q_gpu = lowroll.quantize(w, name), lowroll.quantize(w.cuda(), name)
    for rows in (1, 17, 37):
        got, want = q_gpu.linear(x[:rows].cuda(), bias.cuda()).cpu(), q.linear(x[:rows], bias)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("shape", [(96, 256), (33, 7), (130, 1030), (1, 1)])
def test_fp8_products_are_the_devices(shape: tuple[int, int]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no e4m3 product")
    assert w8a8_cuda.scaled_mm_supports(torch.device("cuda", 0))
    torch.manual_seed(0)
    codes_NK, codes_MK = (
        fp8.to_e4m3(torch.randn(shape).cuda() * 99),
        fp8.to_e4m3(torch.randn(5, shape[1]).cuda() * 99),
    )
    exact = codes_MK.double() @ codes_NK.double().t()
    bound = 1e-3 * codes_MK.double().norm(dim=-1, keepdim=True) * codes_NK.double().norm(dim=-1)
    assert (
        (w8a8_cuda.e4m3_sums(codes_MK, codes_NK, torch.float32).double() - exact).abs() <= bound
    ).all()


# -- bfloat16: within its bound --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 40), (4, 2, 12)]
)
@pytest.mark.parametrize("window", [0, 1, 5, 17])
def test_varlen_attention_in_bfloat16(heads: int, kv_heads: int, size: int, window: int) -> None:
    """Forward and gradients against float32 attention over the same bfloat16 values, one sequence
    at a time."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(LENGTHS), n, size, generator=generator).bfloat16()
        for n in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(q.shape, generator=generator).bfloat16()
    exact = [x.float().requires_grad_() for x in (q, k, v)]

    def sees(length: int) -> Tensor:
        t = torch.arange(length)
        return (t <= t[:, None]) & (t > t[:, None] - (window or length))

    pieces = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in rows), attn_mask=sees(len(rows[0])), enable_gqa=True
        )
        for rows in zip(*(x.split(LENGTHS) for x in exact), strict=True)
    ]
    want = torch.cat([piece[0].transpose(0, 1) for piece in pieces])
    want.backward(upstream.float())
    low = [x.cuda().requires_grad_() for x in (q, k, v)]
    got = varlen(LENGTHS, "cuda", [window])(0, AttentionInputs(*low))
    got.backward(upstream.cuda())
    assert got.dtype == torch.bfloat16 and got.shape == q.shape
    assert (got.float().cpu() - want).abs().max() < 0.02
    for mine, theirs in zip(low, exact, strict=True):
        # of q it is zero, but for rounding, where a window is one key
        bound = 0.02 * theirs.grad.norm() + 1e-3
        assert (mine.grad.float().cpu() - theirs.grad).norm() < bound


def test_learner_forward_in_bfloat16(folder: Path) -> None:
    gpu = hf.load(folder, "cuda")
    assert gpu.dtype == torch.bfloat16
    with torch.no_grad():
        want, got = forward(hf.load(folder)), forward(gpu)
    assert (got - want).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("weights", ["bf16", "int8", "int8_rotated"])
def test_decode_equals_prefill_in_bfloat16(folder: Path, weights: str) -> None:
    """P3 and P4 in the precision that a GPU run uses; `auto` finds the device."""
    engine = Engine(folder, weights=weights, cache_tokens=2048, prefill_chunk=8)
    assert engine.model.device.type == "cuda" and engine.model.dtype == torch.bfloat16
    groups = engine.generate([Request(IDS[:21].tolist(), n=8, max_tokens=24, seed=2)])
    ids, recorded = rollouts(groups)
    again = lowroll.score(
        engine.model, [groups[0].request.prompt_ids + row for row in ids], [21] * 8
    )
    gap = (recorded - torch.cat(again).cpu()).abs()
    mean, most = {"bf16": (0.02, 0.2)}.get(
        weights, (0.05, 0.5)
    )  # a rounding of bf16 moves an int8 code
    assert gap.mean() < mean and gap.max() < most


# -- the corridor ----------------------------------------------------------------------------------


def test_lora_shares_its_base_and_is_updated_in_place_on_the_device(folder: Path) -> None:
    learner = lora.attach(quantize_base(hf.load(folder, "cuda"), "int8"), rank=4, alpha=8.0)
    assert all(p.is_cuda for p in learner.parameters())
    engine = Engine(learner, weights="int8", cache_tokens=2048)
    mine = {name: p.data_ptr() for name, p in learner.named_parameters()}
    theirs = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    assert mine.keys() == theirs.keys() and all(
        (mine[n] == theirs[n]) == (".adapter." not in n) for n in mine
    )
    assert all(
        a.weight is b.weight
        for (_, a), (_, b) in zip(learner.linears(), engine.model.linears(), strict=True)
    )
    before = forward(engine.model)
    with torch.no_grad():
        for p in learner.trainable_parameters().values():
            p += 0.3 * torch.randn_like(p)
        stamp = engine.behavior.policy[0].digest
        assert engine.update_weights(WeightUpdate.local(learner, 1)).policy[0].digest != stamp
        assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == theirs
        assert torch.equal(
            forward(rollout_copy(learner, "int8", learner.dtype)), forward(engine.model)
        )
    assert not torch.equal(forward(engine.model), before)


def test_a_full_fine_tuning_step_reaches_the_engine(folder: Path) -> None:
    master = hf.load(folder, "cuda", torch.float32).requires_grad_(True)
    engine = Engine(master, weights="int8", dtype=torch.float32, cache_tokens=2048)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-2)
    (-log_likelihood(master)).backward()
    optimizer.step()
    engine.update_weights(WeightUpdate.local(master, 1))
    fresh = Engine(master, weights="int8", dtype=torch.float32, cache_tokens=2048)
    assert digest(engine.model) == digest(fresh.model)
    assert rollouts(engine.generate(requests()))[0] == rollouts(fresh.generate(requests()))[0]


def test_a_critic_on_a_gpu_judges_and_learns_as_on_the_cpu() -> None:
    from lowroll.trainer.critic import Critic
    from lowroll.trainer.optim import OptimSettings
    from tests.fixtures.learner import make_batch, tiny_model

    batch, seen = make_batch(tiny_model(), groups=2, size=4), []
    for i, sample in enumerate(batch.samples):
        sample.reward = float(i % 3 == 0)
    for device, dtype in (
        ("cpu", torch.float32),
        ("cuda", torch.float32),
        ("cuda", torch.bfloat16),
    ):
        critic = Critic(tiny_model(5).to(device, dtype), OptimSettings(1e-2, eps=1e-3))
        with torch.no_grad():
            critic.weight_D.copy_(
                0.3 * torch.randn(len(critic.weight_D), generator=torch.Generator().manual_seed(5))
            )
        judged = critic.judge(batch.samples, [range(8)])
        metrics = critic.update(batch.samples, range(8), judged)
        seen.append(
            (
                torch.cat([judged.advantages[i].cpu() for i in range(8)]),
                metrics,
                critic.optimizer.masters["head.weight"].detach().cpu(),
            )
        )
    (A, metrics, head), exact, half = seen
    assert torch.allclose(exact[0], A, atol=1e-4) and exact[1] == pytest.approx(
        metrics, rel=1e-3, abs=1e-5
    )
    assert torch.allclose(exact[2], head, atol=1e-5)
    assert half[1]["critic/loss"] == pytest.approx(metrics["critic/loss"], rel=0.1)
    assert float((half[0] - A).abs().max()) < 0.1


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_prefill_scores_are_those_of_the_cpu(folder: Path, weights: str) -> None:
    """The engine's scoring path, and the learner's score of the same tokens where nothing is
    rounded."""
    here, there = (
        Engine(folder, weights=weights, device=device, dtype=torch.float32, cache_tokens=1024)
        for device in ("cuda", "cpu")
    )
    sequences, prompts = [IDS[:30].tolist(), IDS[30:41].tolist()], [9, 3]
    got, want = (torch.cat(engine.score(sequences, prompts, 0.8)) for engine in (here, there))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    assert here.pool.num_used == 0
    if weights == "fp32":
        learner = torch.cat(
            lowroll.score(hf.load(folder, "cuda", torch.float32), sequences, prompts, 0.8)
        ).cpu()
        torch.testing.assert_close(got, learner, atol=1e-3, rtol=0)


def test_8_bit_adamw_is_that_of_the_cpu() -> None:
    """Two updates; a code that rounds the other way moves a weight by a few per cent of an
    update."""
    pytest.importorskip("bitsandbytes")
    from lowroll.trainer.optim import Optimizer, OptimSettings

    ends = []
    for device in ("cuda", "cpu"):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 80 * 64).reshape(80, 64).to(device))
        optimizer = Optimizer(
            {"w": p}, OptimSettings(learning_rate=1e-2, optimizer="adamw8bit", weight_decay=0.1)
        )
        for k in range(2):
            (
                p * torch.linspace(-2, 3 + k, p.numel(), device=device).reshape(p.shape)
            ).sum().backward()
            optimizer.begin_step()
            optimizer.update()
        ends.append(p.detach().cpu())
    torch.testing.assert_close(*ends, atol=1e-3, rtol=0)
