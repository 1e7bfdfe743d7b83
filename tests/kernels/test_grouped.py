"""The kernels of a mixture of experts: in Triton's interpreter against plain torch, and compiled
for Hopper."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels import nvcc
from lowroll.kernels.fused import swiglu
from lowroll.kernels.moe import grouped, route, routed
from lowroll.kernels.moe.grouped import GroupedTiling
from lowroll.kernels.moe.scores import Routing, SigmoidRouting
from lowroll.kernels.moe.stack import Stack
from lowroll.kernels.quantize import rows
from lowroll.model import experts
from lowroll.model.experts import EngineExperts, Experts, LearnerExperts
from lowroll.model.spec import spec_from_config
from tests.fixtures.compiled import arguments, built, spills_of
from tests.fixtures.experts import TENSORS, encoded, rounded, stack_of
from tests.fixtures.learner import mixture
from tests.fixtures.tensors import normal

# -- routing ---------------------------------------------------------------------------------------


class RoutingCase(NamedTuple):
    tokens: int
    experts: int
    choices: int
    groups: int = 0  # of experts whose sigmoids are corrected; 0: a softmax
    groups_kept: int = 0
    bias: bool = False


ROUTING_CASES = [
    RoutingCase(1, 6, 2),
    RoutingCase(19, 128, 8),
    RoutingCase(5, 20, 3),
    RoutingCase(3, 1, 1),
    RoutingCase(9, 7, 3, bias=True),
    RoutingCase(1, 6, 2, groups=1, groups_kept=1),
    RoutingCase(19, 128, 8, groups=1, groups_kept=1),
    RoutingCase(5, 24, 3, groups=4, groups_kept=2),
    RoutingCase(17, 256, 8, groups=8, groups_kept=4),
    RoutingCase(9, 7, 3, groups=1, groups_kept=1, bias=True),
]


@pytest.mark.interpreted
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("case", ROUTING_CASES, ids=str)
def test_choices_and_their_gradients_are_those_of_plain_torch(
    case: RoutingCase, renormalize: bool
) -> None:
    """The same bits without a gradient, with a frozen router, and where the slots are sorted along.
    A bias learns; a correction chooses, and neither weighs nor learns."""
    x_TD, router_ED = normal(case.tokens, 40), normal(case.experts, 40, seed=1) * 0.3
    leaves = [x.requires_grad_() for x in (x_TD, router_ED)]
    bias_E = normal(case.experts, seed=3).requires_grad_() if case.bias else None
    leaves += [] if bias_E is None else [bias_E]
    sigmoids = None
    if case.groups:
        correction_E = (normal(case.experts, seed=5) * 0.2).requires_grad_()
        sigmoids = SigmoidRouting(correction_E, case.groups, case.groups_kept, 2.5)
    routing = Routing(case.choices, renormalize, bias_E, sigmoids)

    want_TS, order_TS = route.choose_by(F.linear(x_TD, router_ED, bias_E), routing)
    weights_TS, experts_TS = route.choose(x_TD, router_ED, routing)
    assert experts_TS.dtype == torch.int32 and torch.equal(experts_TS.long(), order_TS)
    torch.testing.assert_close(weights_TS, want_TS, rtol=1e-5, atol=1e-6)
    slope_TS = normal(case.tokens, case.choices, seed=2)
    got = torch.autograd.grad((weights_TS * slope_TS).sum(), leaves, retain_graph=True)
    want = torch.autograd.grad((want_TS * slope_TS).sum(), leaves)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if sigmoids is not None:
        correction = [sigmoids.correction_E]
        assert torch.autograd.grad(weights_TS.sum(), correction, allow_unused=True) == (None,)

    with torch.no_grad():
        again_TS, same_TS = route.choose(x_TD, router_ED, routing)
        sorted_TS, slots = route.choose_and_sort(x_TD, router_ED, routing)
    assert torch.equal(again_TS, weights_TS) and torch.equal(same_TS, experts_TS)
    assert torch.equal(sorted_TS, weights_TS)
    assert torch.equal(slots.slot_P, route.sort_slots(experts_TS, case.experts).slot_P)
    frozen_TS = route.choose(x_TD, router_ED.detach(), routing)[0]
    assert torch.equal(torch.autograd.grad((frozen_TS * slope_TS).sum(), x_TD)[0], got[0])


@pytest.mark.interpreted
def test_the_weights_of_experts_whose_sigmoids_are_zero_are_finite() -> None:
    """And equal scores: the lowest expert and the lowest group come first."""
    x_TD, router_ED = torch.full((2, 32), -100.0), torch.ones(8, 32)
    routing = Routing(3, True, sigmoids=SigmoidRouting(torch.zeros(8), 4, 2))
    weights_TS, experts_TS = route.choose(x_TD, router_ED, routing)
    assert weights_TS.eq(0).all() and experts_TS.tolist() == [[0, 1, 2]] * 2


@pytest.mark.interpreted
def test_equal_experts_are_taken_from_the_lowest() -> None:
    router_ED = torch.zeros(7, 32)
    router_ED[[2, 4, 6], 0] = 1.0
    weights_TS, experts_TS = route.choose(torch.ones(2, 32), router_ED, Routing(4, True))
    assert experts_TS.tolist() == [[2, 4, 6, 0]] * 2
    torch.testing.assert_close(weights_TS.sum(1), torch.ones(2))
    nan = torch.full((1, 32), float("nan"))
    weights_TS, experts_TS = route.choose(nan, router_ED, Routing(4, True))
    assert weights_TS.isnan().all() and 0 <= int(experts_TS.min()) and int(experts_TS.max()) < 7


@pytest.mark.interpreted
@pytest.mark.parametrize(("slots", "num_experts"), [(1, 4), (30, 5), (1500, 6)])
def test_sorting_is_torchs_stable_one(
    slots: int, num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts_TS = torch.randint(
        0, num_experts - 1, (slots, 1), generator=torch.Generator().manual_seed(0)
    ).int()
    got = route.sort_slots(experts_TS, num_experts)
    monkeypatch.setattr(route, "MOST_SLOTS", 0)
    want = route.sort_slots(experts_TS, num_experts)
    for name in ("slot_P", "place_P", "ends_E"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.bounds == want.bounds and got.bounds[-1] == (slots, slots)  # the last has no slots


@pytest.mark.interpreted
@pytest.mark.parametrize("tokens", [1, 3])
def test_choosing_and_sorting_at_once_is_the_one_and_then_the_other(tokens: int) -> None:
    router_ED = normal(21, 100, seed=1) * 0.3
    for x_TD in (normal(tokens, 100), torch.full((tokens, 100), float("nan"))):
        weights_TS, experts_TS = route.choose(x_TD, router_ED, Routing(5, True))
        want, (got_TS, got) = (
            route.sort_slots(experts_TS, 21),
            route.choose_and_sort(x_TD, router_ED, Routing(5, True)),
        )
        torch.testing.assert_close(got_TS, weights_TS, rtol=0, atol=0, equal_nan=True)
        for name in ("slot_P", "place_P", "ends_E"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.interpreted
def test_sums_over_slots() -> None:
    y_PD, weights_TS = normal(15, 70), normal(5, 3, seed=1)
    want = (y_PD.view(5, 3, 70) * weights_TS[..., None]).sum(1)
    torch.testing.assert_close(
        route.combine(y_PD, weights_TS, torch.float32), want, rtol=1e-6, atol=1e-6
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gathering_and_summing_by_place_have_the_gradients_of_plain_torch(
    dtype: torch.dtype,
) -> None:
    experts_TS = torch.tensor([[2, 0], [1, 2], [0, 2], [2, 3], [3, 1]]).int()
    groups = route.sort_slots(experts_TS, 4)
    x_TD, scale_PD, grad_TD = (
        normal(5, 70).to(dtype),
        normal(10, 70, seed=1).to(dtype),
        normal(5, 70, seed=2).to(dtype),
    )
    got, want, bound = [], [], 1e-2 if dtype == torch.float16 else 1e-5
    for results, plain in ((got, False), (want, True)):
        x, w = x_TD.clone().requires_grad_(), normal(5, 2, seed=3).requires_grad_()
        rows = x.repeat_interleave(2, 0)[groups.slot_P] if plain else route.gather(x, groups, 2)
        y = rows * scale_PD
        out = (
            (y[groups.place_P].view(5, 2, 70) * w[..., None]).sum(1).to(dtype)
            if plain
            else route.combine(y, w, dtype, groups)
        )
        out.backward(grad_TD)
        results.extend([rows.detach(), out.detach(), x.grad, w.grad])
    for a, b in zip(got, want, strict=True):
        assert a is not None and b is not None and a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


# -- products --------------------------------------------------------------------------------------


@pytest.mark.interpreted
def test_the_learners_products_take_matrices_that_lie_either_way() -> None:
    groups, x_PK = (
        route.sort_slots(torch.tensor([[2], [0], [2], [2], [0]]), 3),
        normal(5, 48).half(),
    )
    w_ENK = (normal(3, 40, 48, seed=1) * 0.2).half()
    want = torch.stack(
        [w_ENK[e].float() @ x for e, x in zip((0, 0, 2, 2, 2), x_PK.float(), strict=True)]
    )
    for w_EKN in (w_ENK.transpose(1, 2), w_ENK.transpose(1, 2).contiguous()):
        got = grouped.product(x_PK, w_EKN, groups)
        assert got.dtype == torch.float16 and (got.float() - want).abs().max() < 0.01


@pytest.mark.interpreted
def test_a_global_scale_a_row_is_read_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [
        encoded(normal(32, 32, seed=seed) * size, "nvfp4") for seed, size in ((0, 1.0), (1, 7.0))
    ]
    rows = {
        name: torch.cat([part.tensors[name] for part in parts]) for name in TENSORS["nvfp4"][:2]
    }
    scale_N = torch.cat([part.tensors["weight_global_scale"].expand(32) for part in parts])
    groups, x_PK = route.sort_slots(torch.tensor([[0], [1]]), 2), normal(2, 32, seed=5)
    stack = Stack("nvfp4", 2, rows["weight_packed"], rows["weight_scale"], scale_N)
    monkeypatch.setattr(grouped, "tiles", lambda stack, slots: GroupedTiling(16, 16, 32))
    got = grouped._launch(*grouped._operand(x_PK, stack), stack, groups, torch.float32)
    want = torch.stack([part.dequantize() @ x for part, x in zip(parts, x_PK, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.interpreted
@pytest.mark.parametrize("format", TENSORS)
def test_a_mixture_of_experts_is_the_formula(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering, SwiGLU, scattering and the sum, against plain torch on what the codes stand for.
    Experts have more rows than a tile, and features and places that no tile divides."""
    monkeypatch.setattr(grouped, "tiles", lambda stack, slots: GroupedTiling(16, 128, 64))
    tokens, hidden, wide, count, choices = 30, 128, 96, 3, 2
    x_TD, router_ED = normal(tokens, hidden), normal(count, hidden, seed=1)
    gate_up = encoded(normal(count * 2 * wide, hidden, seed=2) * 0.2, format)
    down = encoded(normal(count * hidden, wide, seed=3) * 0.2, format)
    got = grouped.experts(
        x_TD, router_ED, stack_of(gate_up, count), stack_of(down, count), Routing(choices, True)
    )
    p_TE = (x_TD @ router_ED.t()).softmax(-1)
    best = p_TE.topk(choices, dim=-1)
    w_EFD = gate_up.dequantize(torch.float32).view(count, 2 * wide, hidden)
    w_EDF = down.dequantize(torch.float32).view(count, hidden, wide)
    want = torch.zeros(tokens, hidden)
    for t in range(tokens):
        for p, e in zip(best.values[t] / best.values[t].sum(), best.indices[t], strict=True):
            gate, up = (w_EFD[e] @ rounded(x_TD[t : t + 1], format)[0]).chunk(2)
            want[t] += p * (w_EDF[e] @ rounded((F.silu(gate) * up)[None], format)[0])
    bound = (
        0.02 if format in ("int8", "fp8") else 1e-4
    )  # a code of the hidden row may round the other way
    assert (got - want).abs().max() < bound * want.abs().max()


@pytest.mark.interpreted
@pytest.mark.parametrize("format", ["fp32", "int8", "nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("tokens", [1, 7])
def test_biases_and_clamped_gates_are_the_formula(
    format: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's fused kernels against an expert at a time in plain torch, with gates and ups on
    both sides of the limit."""
    module = module_of(hidden=128, wide=64, kind=EngineExperts, clamped=True)
    for linear in (module.gate_up, module.down):
        linear.set_weight(encoded(linear.weight, format))
    x_TD = 2 * normal(tokens, 128, seed=9)
    with torch.no_grad():
        got = module(x_TD)
        for owner in (experts, swiglu, route):
            monkeypatch.setattr(owner, "triton_supports", lambda x: False)
        gate_up = F.linear(x_TD, module.gate_up.codes.dequantize(torch.float32))
        assert (gate_up.abs() > 1).any() and (gate_up.abs() < 1).any()
        want = module(x_TD)
    bound = 0.02 if format == "int8" else 1e-4
    assert (got - want).abs().max() < bound * want.abs().max()


def test_the_clamped_gate_by_hand() -> None:
    """gate 3 and up -9 are clamped to 2 and -2; the gradient stops there, and only there."""
    gate_up_TG = torch.tensor([[3.0, -1.0, -9.0, 0.5]], requires_grad=True)
    y_TF = swiglu.clamped_swiglu(gate_up_TG, 2.0, 1.5)
    sigmoid = torch.tensor([3.0, -1.5]).sigmoid()
    torch.testing.assert_close(y_TF, torch.stack([-2 * sigmoid[0], -1.5 * sigmoid[1]])[None])
    y_TF.sum().backward()
    gate = 1.5 * (sigmoid[1] - 1.5 * sigmoid[1] * (1 - sigmoid[1]))
    want = torch.stack([torch.tensor(0.0), gate, torch.tensor(0.0), -sigmoid[1]])
    torch.testing.assert_close(gate_up_TG.grad, want[None])


def module_of(
    dtype: torch.dtype = torch.float32,
    hidden: int = 64,
    wide: int = 32,
    kind: type[Experts] = LearnerExperts,
    clamped: bool = False,
) -> Experts:
    """Random experts of Qwen3-MoE, or of GPT-OSS, with biases and a clamped gate."""
    special: dict[str, Any] = mixture(5, wide) | {"intermediate_size": 8}
    if clamped:
        special = {
            "architectures": ["GptOssForCausalLM"],
            "num_local_experts": 5,
            "intermediate_size": wide,
            "sliding_window": 8,
            "swiglu_limit": 1.0,
        }
    spec = spec_from_config(
        {
            "vocab_size": 8,
            "hidden_size": hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": 8,
            "num_experts_per_tok": 2,
            **special,
        }
    )
    module = kind(spec, "cpu", dtype)
    with torch.no_grad():
        for seed, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=seed) * 0.3)
    return module


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("format", "dtype", "clamped"),
    [
        (None, torch.float32, False),
        (None, torch.float16, False),
        ("int8", torch.float16, False),
        ("fp8", torch.float32, False),
        ("nvfp4", torch.float16, False),
        ("int4", torch.float32, False),
        (None, torch.float16, True),
        ("mxfp4", torch.float16, True),
    ],
)
def test_a_learner_has_the_same_bits_with_gradients_and_without_and_an_aligned_one_the_engines(
    format: str | None, dtype: torch.dtype, clamped: bool
) -> None:
    learner = module_of(dtype, clamped=clamped)
    engine = module_of(dtype, kind=EngineExperts, clamped=clamped)
    x_TD = normal(7, 64, seed=9).to(dtype)
    for ours, theirs in zip(
        (learner.gate_up, learner.down), (engine.gate_up, engine.down), strict=True
    ):
        if format:
            ours.aligned = encoded(ours.weight, format)
        theirs.set_weight(ours.aligned or encoded(ours.weight, "fp32"))
    want = learner(x_TD)
    with torch.no_grad():
        again, got = learner(x_TD), engine(x_TD)
    assert want.requires_grad and torch.equal(again, want)
    assert torch.equal(got, want) if format else (got - want).abs().max() < 4e-3 * want.abs().max()


@pytest.mark.interpreted
@pytest.mark.parametrize("format", ["w4a8", "fp8_block", "int4_asym", "nf4"])
def test_formats_without_a_kernel_of_their_own_round_activations_as_in_a_dense_layer(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each expert's own product, an expert at a time."""
    module = module_of(hidden=128, wide=128, kind=EngineExperts)
    x_TD = normal(7, 128, seed=9)
    for linear in (module.gate_up, module.down):
        linear.set_weight(encoded(linear.weight, format))
    monkeypatch.setattr(
        rows, "triton_supports", lambda x: False
    )  # the interpreter rounds to e4m3 wrongly
    with torch.no_grad():
        got = module(x_TD)
        for owner in (experts, swiglu, route):
            monkeypatch.setattr(owner, "triton_supports", lambda x: False)
        want = module(x_TD)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


# -- the machine code ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "types", "features"),
    [
        ("dense", {}, 64),
        ("w8a8", {"x_ptr": "*fp8e4nv", "w_ptr": "*fp8e4nv"}, 128),
        ("w8a8", {"x_ptr": "*i8", "w_ptr": "*i8"}, 128),
        ("nvfp4", {"w_ptr": "*i64", "ws_ptr": "*u8"}, 256),
        ("mxfp4", {"w_ptr": "*i64", "ws_ptr": "*u8"}, 512),
        ("int4", {"w_ptr": "*i64", "ws_ptr": "*fp32"}, 256),
    ],
)
def test_it_compiles_for_hopper_without_spills(
    kind: str, types: dict[str, str], features: int
) -> None:
    compiled = compile_for_hopper(kind, types, features)
    ptx = compiled.asm["ptx"]
    assert "wgmma" in ptx and "cp.async" in ptx
    assert "st.local" not in ptx and compiled.metadata.shared <= 227 * 1024


@pytest.mark.slow
def test_where_a_token_lies_is_counted_in_64_bits() -> None:
    """Half a million tokens of 4,096 features, or shares of 512 experts' logits, are beyond
    2^31."""
    pytest.importorskip("triton")

    types = arguments(
        {
            "*bf16": "x_ptr w_ptr",
            "*fp32": "part_ptr weights_ptr",
            "*i32": "experts_ptr",
            "i32": "tokens features num_experts",
            "fp32": "scale",
        }
    )
    constants = {
        "PARTS": 2,
        "GROUPS": 1,
        "GROUPS_KEPT": 1,
        "BLOCK_G": 1,
        "BLOCK_T": 16,
        "BLOCK_E": 128,
        "BLOCK_K": 64,
        "CHOICES": 2,
        "RENORMALIZE": True,
        "BLOCK_S": 2,
        "EARLY": False,
    }
    for kernel, pointers in (
        (route._logits_kernel, ("x_ptr", "part_ptr")),
        (route._choose_kernel, ("part_ptr", "weights_ptr", "experts_ptr")),
    ):
        names = kernel.arg_names
        code = built(
            kernel,
            {name: kind for name, kind in types.items() if name in names},
            {name: value for name, value in constants.items() if name in names},
        ).asm["ttir"]
        for name in pointers:
            at = re.search(rf"(%\w+) = tt.splat %{name} ", code)
            offsets = re.findall(
                rf"tt.addptr (?:%{name}|{at[1] if at else 'none'}), .*[, x](i\d\d)>? loc", code
            )
            assert offsets and set(offsets) == {"i64"}, (kernel.__name__, name, offsets)


@pytest.mark.slow
def test_the_choice_of_eight_groups_compiles_without_spills() -> None:
    pytest.importorskip("triton")
    pointers = {"part_ptr": "*fp32", "weights_ptr": "*fp32", "experts_ptr": "*i32"}
    constants = {
        "GROUPS": 8,
        "GROUPS_KEPT": 4,
        "CHOICES": 8,
        "RENORMALIZE": True,
        "PARTS": route.PARTS,
        "BLOCK_E": 256,
        "BLOCK_G": 8,
        "BLOCK_S": 8,
        "EARLY": True,
    }
    types = {"correction_ptr": "*fp32", "scale": "fp32", "tokens": "i32", "num_experts": "i32"}
    ptx = built(route._choose_kernel, pointers | types, constants, ("tokens",), num_warps=1)
    assert "st.local" not in ptx.asm["ptx"]


def compile_for_hopper(kind: str, types: dict[str, str], features: int) -> Any:
    pytest.importorskip("triton")

    signature = arguments(
        {
            "*bf16": "x_ptr w_ptr bias_ptr y_ptr",
            "*fp32": "xs_ptr ws_ptr g_ptr",
            "*i64": "slot_ptr",
            "*i32": "ends_ptr",
            "i32": "slots num_experts",
        }
    )
    constants = {
        "channels": 768,
        "features": 2048,
        "KIND": kind,
        "CHOICES": 8,
        "SWIGLU": True,
        "LIMIT": 7.0,
        "ALPHA": 1.702,
        "TO_SLOTS": False,
        "G_ROWS": False,
        "BLOCKED": 16 if kind.endswith("4") else 0,
        "PTX": True,
        "BLOCK_E": 128,
        "BLOCK_P": 16,
        "BLOCK_N": 64,
        "BLOCK_K": features,
        "EARLY": False,
    }
    return built(
        grouped._multiply_kernel,
        signature | types,
        constants,
        ("slots",),
        num_warps=4,
        num_stages=3,
    )


@pytest.mark.slow
@pytest.mark.skipif(nvcc.compiler() is None, reason="needs nvcc")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["nvfp4", pytest.param("int4", marks=pytest.mark.long)])
def test_streamed_codes_compile_without_spills(kind: str, tmp_path: Path) -> None:
    values = {"FORMAT": str(routed.FORMATS[kind])}
    said, spills = spills_of(routed.SOURCE, values, tmp_path / "out.cubin", "-cubin")
    assert spills and set(spills) == {("0", "0")}, said


def test_streamed_codes_are_for_few_rows_of_packed_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, bytes_, odd = (
        stack_of(encoded(normal(8 * 32, features), format), 8)  # 192: no whole chunks of 128
        for features, format in ((256, "nvfp4"), (256, "fp8"), (192, "nvfp4"))
    )
    monkeypatch.setattr(routed, "supports_device", lambda kind, device: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    x_TD = torch.empty(1, 256, dtype=torch.bfloat16)
    assert [routed.supports(packed, x_TD, slots) for slots in (1, 8 * 32, 8 * 32 + 1)] == [
        True,
        True,
        False,
    ]
    assert not any(
        routed.supports(stack, x, 1)
        for stack, x in ((bytes_, x_TD), (odd, x_TD), (packed, x_TD.half()))
    )


def test_streamed_codes_fit_into_shared_memory_or_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """226 KiB: 32 rows of 2048 features and the rings of eight warps fit, 32 of 4096 do not, 16 of
    those do."""
    monkeypatch.setattr(routed, "supports_device", lambda kind, device: True)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    for features, slots, taken in (
        (2048, 256, True),
        (4096, 256, False),
        (4096, 80, True),
        (14336, 8, False),
    ):
        stack = Stack("nvfp4", 8, torch.empty(8, features // 2, dtype=torch.uint8))
        assert (
            routed.supports(stack, torch.empty(1, features, dtype=torch.bfloat16), slots) == taken
        ), (features, slots)
