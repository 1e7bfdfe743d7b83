"""The kernels of a mixture of experts on a CUDA device: against float32, in a graph, without
waiting, repeatable.

NEAR: how far a layer may lie from the same one without a rounding between its products. Played on a
CPU, rounding gate, up, silu, their product, each slot's output and the sum to bfloat16 moves it by
0.0045 of its norm in the formats that keep activations, by 0.009 in int8 and 0.018 in fp8, where it
also turns codes of hidden rows over. Scales of int4 that Triton rounds to bfloat16 add 0.003, coarse
sums of e4m3 0.001. Twice that is allowed, and an expert too few or taken for another moves a layer by
a half and more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowroll.kernels.fused.swiglu import clamped_swiglu
from lowroll.kernels.moe import grouped, route, routed
from lowroll.kernels.moe.scores import Routing
from lowroll.kernels.moe.stack import Stack
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.experts import EngineExperts, Experts, LearnerExperts, _low_bit_product
from lowroll.model.logprobs import token_log_probs
from lowroll.model.spec import spec_from_config
from lowroll.quant.formats import quantize
from tests.fixtures.experts import rounded, stack_of
from tests.fixtures.tensors import normal
from tests.fixtures.tiny import hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
HIDDEN, WIDE, COUNT, CHOICES = 256, 128, 40, 4
TOKENS = (1, 64, 700)  # a size of tile each
FORMATS = ("bf16", "int8", "int8_rotated", "fp8", "nvfp4", "mxfp4", "int4")
NEAR = dict.fromkeys(FORMATS, 0.01) | {"int8": 0.02, "int8_rotated": 0.02, "fp8": 0.04}


def stacks(format: str) -> tuple[Stack, Stack, Tensor, Tensor]:
    """Gate-up and down, and what their codes stand for."""
    weights = [
        quantize((normal(*shape, seed=seed) * 0.1).bfloat16().cuda(), format)
        for seed, shape in ((1, (COUNT * 2 * WIDE, HIDDEN)), (2, (COUNT * HIDDEN, WIDE)))
    ]
    made = [
        Stack("dense", COUNT, q.tensors["weight"]) if format == "bf16" else stack_of(q, COUNT)
        for q in weights
    ]
    dense = [q.dequantize(torch.float32).view(COUNT, -1, q.shape[1]) for q in weights]
    return made[0], made[1], dense[0], dense[1]


@pytest.fixture(scope="module", autouse=True)
def compiled(built: None) -> None:
    """Compile at once what the tests would compile one after the other."""

    def run(case: tuple[str, int]) -> None:
        gate_up, down, _, _ = stacks(case[0])
        x_TD = torch.zeros(case[1], HIDDEN, device="cuda", dtype=torch.bfloat16)
        grouped.experts(x_TD, x_TD.new_zeros(COUNT, HIDDEN), gate_up, down, Routing(CHOICES, True))

    if torch.cuda.is_available():
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, [(format, tokens) for format in FORMATS for tokens in TOKENS]))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_near_float32(format: str, tokens: int) -> None:
    gate_up, down, w_EFD, w_EDF = stacks(format)
    x_TD, router_ED = (
        normal(tokens, HIDDEN).bfloat16().cuda(),
        normal(COUNT, HIDDEN, seed=3).bfloat16().cuda(),
    )
    got = grouped.experts(x_TD, router_ED, gate_up, down, Routing(CHOICES, True))
    weights_TS, experts_TS = route.choose(x_TD, router_ED, Routing(CHOICES, True))
    logits_TE = x_TD.double() @ router_ED.double().t()
    best = logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :CHOICES]
    assert (experts_TS.long() == best).float().mean() > 0.99
    want = torch.zeros(tokens, HIDDEN, device="cuda")
    x = rounded(x_TD, format).float()
    for choice in range(CHOICES):
        gate, up = (
            torch.bmm(w_EFD[experts_TS[:, choice].long()], x[..., None])
            .squeeze(-1)
            .chunk(2, dim=-1)
        )
        h = rounded((torch.nn.functional.silu(gate) * up).bfloat16(), format).float()
        y = torch.bmm(w_EDF[experts_TS[:, choice].long()], h[..., None]).squeeze(-1)
        want += weights_TS[:, choice, None] * y
    assert (got.float() - want).norm() < NEAR[format] * want.norm()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("format", ["bf16", "mxfp4"])
def test_biases_and_clamped_gates_are_near_float32(format: str, tokens: int) -> None:
    gate_up, down, w_EFD, w_EDF = stacks(format)
    router_bias_E, gate_up_bias_N, down_bias_N = (
        normal(size, seed=seed).bfloat16().cuda()
        for size, seed in ((COUNT, 5), (COUNT * 2 * WIDE, 6), (COUNT * HIDDEN, 7))
    )
    gate_up, down = replace(gate_up, bias_N=gate_up_bias_N), replace(down, bias_N=down_bias_N)
    x_TD = normal(tokens, HIDDEN).bfloat16().cuda()
    router_ED = normal(COUNT, HIDDEN, seed=3).bfloat16().cuda()
    clamp = (1.0, 1.702)
    routing = Routing(CHOICES, True, router_bias_E)
    got = grouped.experts(x_TD, router_ED, gate_up, down, routing, clamp)
    weights_TS, experts_TS = route.choose(x_TD, router_ED, routing)
    want = torch.zeros(tokens, HIDDEN, device="cuda")
    for choice in range(CHOICES):
        expert_T = experts_TS[:, choice].long()
        gate_up_TG = torch.bmm(w_EFD[expert_T], x_TD.float()[..., None]).squeeze(-1)
        gate_up_TG += gate_up_bias_N.float().view(COUNT, -1)[expert_T]
        h_TF = clamped_swiglu(gate_up_TG, *clamp)
        y_TD = torch.bmm(w_EDF[expert_T], h_TF[..., None]).squeeze(-1)
        y_TD += down_bias_N.float().view(COUNT, -1)[expert_T]
        want += weights_TS[:, choice, None] * y_TD
    assert (got.float() - want).norm() < NEAR[format] * want.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_replays_what_runs_without_one_and_nothing_waits(format: str) -> None:
    gate_up, down, _, _ = stacks(format)
    x_TD, router_ED = (
        normal(9, HIDDEN).bfloat16().cuda(),
        normal(COUNT, HIDDEN, seed=3).bfloat16().cuda(),
    )
    grouped.experts(x_TD, router_ED, gate_up, down, Routing(CHOICES, True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped.experts(x_TD, router_ED, gate_up, down, Routing(CHOICES, True))
    for seed in (4, 5):
        x_TD.copy_(normal(9, HIDDEN, seed=seed))
        graph.replay()
        assert torch.equal(
            out, grouped.experts(x_TD, router_ED, gate_up, down, Routing(CHOICES, True))
        )


def test_the_learner_in_bfloat16_is_near_the_cpu_in_float32() -> None:
    gpu, cpu = layer("cuda", torch.bfloat16), layer("cpu", torch.float32)
    x_TD = normal(50, HIDDEN, seed=9).bfloat16()
    want, got = cpu(x_TD.float()), gpu(x_TD.cuda())
    assert (got.cpu().float() - want).norm() < 0.01 * want.norm()
    grad_TD = normal(50, HIDDEN, seed=10).bfloat16()
    want.backward(grad_TD.float())
    got.backward(grad_TD.cuda())
    for (name, p), (_, q) in zip(cpu.named_parameters(), gpu.named_parameters(), strict=True):
        assert (q.grad.cpu().float() - p.grad).norm() < 0.03 * p.grad.norm(), name
    with torch.no_grad():
        assert torch.equal(gpu(x_TD.cuda()), got)


def layer(device: str, dtype: torch.dtype, kind: type[Experts] = LearnerExperts) -> Experts:
    spec = spec_from_config(
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 8,
            "hidden_size": HIDDEN,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 8,
            "num_experts": COUNT,
            "num_experts_per_tok": CHOICES,
            "moe_intermediate_size": WIDE,
            "norm_topk_prob": True,
        }
    )
    experts = kind(spec, device, dtype)
    with torch.no_grad():
        for seed, p in enumerate(experts.parameters()):
            p.copy_((normal(*p.shape, seed=seed) * 0.1).bfloat16())
    return experts


@pytest.mark.parametrize("format", FORMATS)
def test_an_aligned_learner_has_the_engines_bits_with_gradients_and_without(format: str) -> None:
    """But for few rows of 4-bit codes, which the engine streams and the learner does not."""
    learner = layer("cuda", torch.bfloat16)
    engine = layer("cuda", torch.bfloat16, EngineExperts)
    for ours, theirs in ((learner.gate_up, engine.gate_up), (learner.down, engine.down)):
        ours.aligned = quantize(ours.weight.detach(), format)
        theirs.set_weight(ours.aligned)
    for tokens in (9, 700):
        x_TD = normal(tokens, HIDDEN, seed=9).bfloat16().cuda()
        with_gradients = learner(x_TD)
        with torch.no_grad():
            assert with_gradients.requires_grad and torch.equal(learner(x_TD), with_gradients)
            got = engine(x_TD)
            streams = all(
                routed.supports(linear.stack(x_TD), x_TD, tokens * CHOICES)
                for linear in (engine.gate_up, engine.down)
            )
        assert (
            (got - with_gradients).float().norm() < 0.01 * got.float().norm()
            if streams
            else torch.equal(got, with_gradients)
        )


@pytest.mark.parametrize("format", ["w4a8", "fp8_block"])
def test_formats_without_a_kernel_round_activations(format: str) -> None:
    """Against each expert's own product, which is that of a dense layer."""
    engine = layer("cuda", torch.bfloat16, EngineExperts)
    x_TD = normal(9, HIDDEN, seed=9).bfloat16().cuda()
    for linear in (engine.gate_up, engine.down):
        linear.set_weight(quantize(linear.weight.detach(), format))
    with torch.no_grad():
        groups = route.sort_slots(engine.router(x_TD)[1], COUNT)
        x_PK = route.gather(x_TD, groups, CHOICES)
        got, want = (
            engine.gate_up.multiply(x_PK, groups),
            _low_bit_product(x_PK, engine.gate_up.weight, groups, COUNT, exact=False),
        )
        assert (got - want).float().norm() < 3e-3 * want.float().norm()


def test_log_probs_of_a_model_have_the_same_bits_with_gradients_and_without(tmp_path: Path) -> None:
    model = hf.load(
        hf_folder(tmp_path / "moe", "qwen3-moe", hidden_size=64, moe_intermediate_size=32),
        "cuda",
        torch.bfloat16,
    ).requires_grad_(True)
    lengths, ids_T = (
        [40, 9, 70],
        torch.randint(2, 67, (119,), generator=torch.Generator().manual_seed(0)).cuda(),
    )
    pos_T = torch.cat([torch.arange(n) for n in lengths]).cuda()

    def log_probs() -> Tensor:
        return token_log_probs(
            model(ids_T, pos_T, varlen(lengths, "cuda")), model.lm_head_weight, ids_T.roll(-1)
        )[0]

    with_gradients = log_probs()
    with torch.no_grad():
        assert with_gradients.requires_grad and torch.equal(log_probs(), with_gradients)


@pytest.mark.parametrize(
    "tiles", [(1, 4, 4, 1), (1, 4, 4, 4), (1, 3, 8, 1), (2, 4, 4, 2), (4, 3, 8, 1)]
)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "int4"])
def test_streamed_codes_are_multiplied_as_what_they_stand_for(
    format: str, tiles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that no tile divides, an expert without rows and one with several tiles; both halves of
    a mixture."""
    rows, features, count, choices = 88, 384, 5, 3
    q = quantize((normal(count * rows, features, seed=1) * 0.1).bfloat16().cuda(), format)
    stack, w_ENK = stack_of(q, count), q.dequantize(torch.float32).view(count, rows, features)
    if format == "nvfp4":  # a global scale a row
        scale_N = q.tensors["weight_global_scale"].expand(count * rows).contiguous()
        stack = Stack("nvfp4", count, stack.codes_NK, stack.scale_N1, scale_N)
    experts_TS = torch.tensor([[3, 0, 1]] * 21 + [[3, 4, 0]] * 17, dtype=torch.int32, device="cuda")
    groups, x_TD = (
        route.sort_slots(experts_TS, count),
        normal(38, features, seed=2).bfloat16().cuda(),
    )
    if not (found := routed.supports_device(format, x_TD.device)):
        pytest.skip(found.why_not)
    x_PK, e_P = x_TD[groups.slot_P // choices], experts_TS.flatten()[groups.slot_P].long()
    want_PN = torch.bmm(w_ENK[e_P], x_PK.float()[..., None]).squeeze(-1)
    gate_PF, up_PF = want_PN.chunk(2, dim=-1)
    monkeypatch.setattr(routed, "tiles", lambda slots, stack: routed.RoutedTiling(*tiles))
    got_PN = routed.multiply(x_PK, stack, groups, to_slots=True)[groups.slot_P]
    got_PF = routed.multiply(x_TD, stack, groups, choices=choices, swiglu=True)
    for got, want in ((got_PN, want_PN), (got_PF, torch.nn.functional.silu(gate_PF) * up_PF)):
        assert (got.float() - want).norm() < 0.01 * want.norm()
