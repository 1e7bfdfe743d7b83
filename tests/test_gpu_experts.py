"""The kernels of a mixture of experts on a CUDA device: against float32, in a graph, without waiting, repeatable."""
from __future__ import annotations

import pytest
import torch
from test_kernels_grouped import normal, rounded, stack_of
from torch import Tensor

from lowroll.kernels import grouped, route
from lowroll.kernels.grouped import Stack
from lowroll.model.experts import Experts
from lowroll.model.spec import spec_from_config
from lowroll.quant.formats import quantize

pytestmark = pytest.mark.gpu
HIDDEN, WIDE, COUNT, CHOICES = 256, 128, 40, 4
FORMATS = ("bf16", "int8", "fp8", "nvfp4", "mxfp4", "int4")


def stacks(format: str) -> tuple[Stack, Stack, Tensor, Tensor]:
    """Gate-up and down, and what their codes stand for."""
    weights = [quantize((normal(*shape, seed=seed) * 0.1).bfloat16().cuda(), format)
               for seed, shape in ((1, (COUNT * 2 * WIDE, HIDDEN)), (2, (COUNT * HIDDEN, WIDE)))]
    made = [Stack("dense", COUNT, q.tensors["weight"]) if format == "bf16" else stack_of(q, COUNT) for q in weights]
    dense = [q.dequantize(torch.float32).view(COUNT, -1, q.shape[1]) for q in weights]
    return made[0], made[1], dense[0], dense[1]


@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_near_float32(format: str, tokens: int) -> None:
    gate_up, down, w_EFD, w_EDF = stacks(format)
    x_TD, router_ED = normal(tokens, HIDDEN).bfloat16().cuda(), normal(COUNT, HIDDEN, seed=3).bfloat16().cuda()
    got = grouped.experts(x_TD, router_ED, gate_up, down, CHOICES, True)
    weights_TS, experts_TS = route.choose(x_TD, router_ED, CHOICES, True)
    logits_TE = x_TD.double() @ router_ED.double().t()
    best = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :CHOICES]
    assert (experts_TS.long() == best).float().mean() > 0.99
    want = torch.zeros(tokens, HIDDEN, device="cuda")
    x = rounded(x_TD, format).float()
    for choice in range(CHOICES):
        gate, up = torch.bmm(w_EFD[experts_TS[:, choice].long()], x[..., None]).squeeze(-1).chunk(2, dim=-1)
        h = rounded((torch.nn.functional.silu(gate) * up).bfloat16(), format).float()
        y = torch.bmm(w_EDF[experts_TS[:, choice].long()], h[..., None]).squeeze(-1)
        want += weights_TS[:, choice, None] * y
    bound = {"int8": 0.02, "fp8": 0.06}.get(format, 0.01)     # a hidden row's codes may round the other way
    assert (got.float() - want).norm() < bound * want.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_replays_what_runs_without_one_and_nothing_waits(format: str) -> None:
    gate_up, down, _, _ = stacks(format)
    x_TD, router_ED = normal(9, HIDDEN).bfloat16().cuda(), normal(COUNT, HIDDEN, seed=3).bfloat16().cuda()
    grouped.experts(x_TD, router_ED, gate_up, down, CHOICES, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped.experts(x_TD, router_ED, gate_up, down, CHOICES, True)
    for seed in (4, 5):
        x_TD.copy_(normal(9, HIDDEN, seed=seed))
        graph.replay()
        assert torch.equal(out, grouped.experts(x_TD, router_ED, gate_up, down, CHOICES, True))


def test_the_learner_in_bfloat16_is_near_the_cpu_in_float32() -> None:
    spec = spec_from_config({
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8, "hidden_size": HIDDEN, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8, "num_experts": COUNT,
        "num_experts_per_tok": CHOICES, "moe_intermediate_size": WIDE, "norm_topk_prob": True})
    cpu, gpu = Experts(spec, "cpu", torch.float32), Experts(spec, "cuda", torch.bfloat16)
    with torch.no_grad():
        for seed, (p, q) in enumerate(zip(cpu.parameters(), gpu.parameters(), strict=True)):
            q.copy_(normal(*p.shape, seed=seed) * 0.1)
            p.copy_(q)
    x_TD = normal(50, HIDDEN, seed=9).bfloat16()
    want, got = cpu(x_TD.float()), gpu(x_TD.cuda())
    assert (got.cpu().float() - want).norm() < 0.01 * want.norm()
    grad_TD = normal(50, HIDDEN, seed=10).bfloat16()
    want.backward(grad_TD.float())
    got.backward(grad_TD.cuda())
    for (name, p), (_, q) in zip(cpu.named_parameters(), gpu.named_parameters(), strict=True):
        assert (q.grad.cpu().float() - p.grad).norm() < 0.03 * p.grad.norm(), name
    with torch.no_grad():
        assert (gpu(x_TD.cuda()) - got).float().norm() < 0.01 * want.norm()      # kernels against torch's products
