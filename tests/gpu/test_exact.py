"""On a CUDA device: what an exact engine records is what an exact learner computes, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from lowroll.engine.native import NativeEngine
from lowroll.kernels.attention import tiled
from lowroll.kernels.batch_invariant import rows
from lowroll.kernels.fused import rope, swiglu
from lowroll.kernels.matmul import tiled as matmul
from lowroll.kernels.quantize.rows import KINDS, QuantizedRows, quantize_rows
from lowroll.kernels.sampling import token_logprobs
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters
from lowroll.metrics.record import read
from lowroll.model.attention import AttentionInputs, varlen
from lowroll.model.logprobs import token_log_probs
from lowroll.types import Request
from tests.fixtures.exact import check, exact_model
from tests.fixtures.runs import settings, train
from tests.fixtures.tiny import hf_folder

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048}
SHAPES = [(28, 4, 128), (9, 3, 64), (4, 4, 80), (16, 1, 256)]  # query heads, key-value heads, size


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_query_has_the_same_bits_however_it_comes(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Decoded alone and among many, of a prompt, of a chunk, and packed as a learner has it."""
    heads, kv_heads, d = shape
    lengths, page = [1, 17, 300, 1300, 513], 16
    total, scale = sum(lengths), d**-0.5
    q = drawn(total, heads, d, dtype=dtype)
    k, v = (drawn(total, kv_heads, d, dtype=dtype, seed=i) for i in (1, 2))
    sizes = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    starts = (sizes.cumsum(0) - sizes).int()
    queries = tiled.queries_of(heads, kv_heads, d, q.element_size())
    zeros, numbers = torch.zeros_like(sizes), torch.arange(5, dtype=torch.int32, device=DEVICE)
    tiles = tiled.tile(sizes, zeros, starts, queries, total // queries + 5)
    packed = tiled.attend(q, k, v, None, tiles, scale)
    plain = varlen(lengths, DEVICE)(0, AttentionInputs(q, k, v))
    assert (packed - plain).abs().max() < (1e-4 if dtype == torch.float32 else 2e-2)
    width = -(-max(lengths) // page)
    table = torch.randperm(5 * width, device=DEVICE).view(5, width).int()
    keys, values = (
        torch.zeros(5 * width, page, kv_heads, d, dtype=dtype, device=DEVICE) for _ in "kv"
    )
    for s, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        at = torch.arange(length, device=DEVICE)
        slots = table[s].long()[at // page] * page + at % page
        keys.flatten(0, 1)[slots] = k[start : start + length]
        values.flatten(0, 1)[slots] = v[start : start + length]
    tiles = tiled.tile(sizes, zeros, numbers, queries, total // queries + 5)
    assert torch.equal(tiled.attend(q, keys, values, table, tiles, scale), packed)
    cut = (sizes // 2).int()  # the second halves, as later chunks
    spans = zip(starts.tolist(), lengths, strict=True)
    behind = torch.cat([torch.arange(s + n // 2, s + n) for s, n in spans])
    tiles = tiled.tile(sizes - cut, cut, numbers, queries, total // queries + 5)
    later = tiled.attend(q[behind], keys, values, table, tiles, scale)
    assert torch.equal(later, packed[behind])
    last = (sizes.cumsum(0) - 1).long()
    for some in ([3], [0, 1, 2, 3, 4], [2] * 40, [4, 3] * 300):
        own = [keys.clone(), values.clone()]
        at = last[some]
        found = tiled.decode(q[at], k[at], v[at], *own, table[some], sizes[some], scale)
        assert torch.equal(found, packed[at]), some
        assert torch.equal(own[0], keys) and torch.equal(own[1], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(96, 200), (896, 4864), (3584, 512), (576, 49152), (8, 64)])
def test_a_row_has_the_same_product_in_any_batch(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    num_in, num_out = sizes
    x, w = drawn(1100, num_in, dtype=dtype), drawn(num_out, num_in, dtype=dtype, seed=1)
    bias = drawn(num_out, dtype=dtype, seed=2)
    whole = matmul.product(x, w, bias, torch.float32)
    want = x.double() @ w.double().t() + bias.double()
    assert (whole - want).abs().max() < 1e-5 * num_in
    for count in (1, 2, 16, 17, 33, 64, 65, 200, 513):
        for start in (0, 1100 - count):
            some = slice(start, start + count)
            assert torch.equal(matmul.product(x[some], w, bias, torch.float32), whole[some]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 1536, 3584, 100])
def test_a_norm_has_the_same_bits_with_and_without_a_gradient(
    size: int, dtype: torch.dtype
) -> None:
    x, update = (drawn(600, size, dtype=dtype, seed=i) for i in (0, 1))
    weight = drawn(size, dtype=dtype, seed=2)
    for added in (update, None):
        total, normed = rows.add_rms_norm(x.clone().requires_grad_(True), added, weight, 1e-6)
        assert isinstance(normed, torch.Tensor)
        for some in (slice(None), slice(3, 4), slice(7, 24)):
            part = None if added is None else added[some]
            for kind in (None, *KINDS):
                alone = rows.add_rms_norm(x[some], part, weight, 1e-6, kind)
                assert torch.equal(alone[0], total[some])
                if kind is None:
                    assert torch.equal(alone[1], normed[some])
                else:
                    same(alone[1], quantize_rows(normed[some].detach(), kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_rounded_alike_alone_and_on_the_way(dtype: torch.dtype) -> None:
    for size in (1536, 4864, 100):
        gate_up = drawn(600, 2 * size, dtype=dtype)
        whole = swiglu.silu_mul(gate_up.clone().requires_grad_(True))
        assert isinstance(whole, torch.Tensor)
        for some in (slice(None), slice(3, 4), slice(7, 24)):
            assert torch.equal(swiglu.silu_mul(gate_up[some]), whole[some])
            for kind in KINDS:
                same(
                    swiglu.silu_mul(gate_up[some], kind), quantize_rows(whole[some].detach(), kind)
                )


def same(a: object, b: QuantizedRows) -> None:
    assert isinstance(a, QuantizedRows)
    assert torch.equal(a.codes_MK.view(torch.uint8), b.codes_MK.view(torch.uint8))
    assert torch.equal(a.scale_M1, b.scale_M1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rotated_alike(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, d = 9, 3, 64
    qkv = drawn(600, (heads + 2 * kv_heads) * d, dtype=dtype)
    cos, sin = (drawn(600, 1, d // 2, dtype=torch.float32, seed=i) for i in (1, 2))
    q_norm, k_norm = (drawn(d, dtype=dtype, seed=i) if normed else None for i in (3, 4))
    how = (heads, kv_heads, d, q_norm, k_norm, 1e-6)
    whole = rope.rotate_heads(qkv.clone().requires_grad_(True), cos, sin, *how)
    for some in (slice(0, 1), slice(7, 24)):
        for a, b in zip(
            rope.rotate_heads(qkv[some], cos[some], sin[some], *how), whole, strict=True
        ):
            assert torch.equal(a, b[some])


@pytest.mark.parametrize("vocab", [67, 300, 5000, 49152, 151_936])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_the_log_prob_is_the_one_that_was_drawn(vocab: int, temperature: float) -> None:
    """Rows in memory, a single one, and one row for many."""
    rows = 4000 if vocab < 1000 else 200
    logits = drawn(rows, vocab, dtype=torch.float32) * 4
    keys, positions = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE) + 7
    temperatures = torch.full((rows,), temperature, device=DEVICE)
    greedy = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    filters = Filters(
        torch.full((rows,), vocab, device=DEVICE),
        torch.ones(rows, dtype=torch.float64, device=DEVICE),
        torch.full((rows,), -math.inf, dtype=torch.float64, device=DEVICE),
    )
    for asked in (None, filters):  # rows without any, beside others that have some
        noise = keys, positions, temperatures, greedy
        tokens, logps = draw(logits, *noise, asked)
        assert torch.equal(token_logprobs.log_probs(logits, tokens, temperature), logps)
        for row in range(0, rows, 41):
            tokens, logps = draw(logits[row : row + 1].expand(rows, -1), *noise, asked)
            found = token_logprobs.log_probs(
                logits[row : row + 1].repeat(rows, 1), tokens, temperature
            )
            assert torch.equal(found, logps)


FORMATS = [
    "bf16",
    "int8",
    "int8_rotated",
    "fp8",
    "fp8_block",
    "int4",
    "nvfp4",
    "mxfp4",
    "nf4",
    "w4a8",
]


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3", "llama-biases", "qwen2-tied"])
@pytest.mark.parametrize("format", FORMATS)
def test_recorded_is_recomputed_in_every_mix(
    format: str, family: str, adapter: bool, tmp_path: Path
) -> None:
    folder = hf_folder(tmp_path / "m", family, **SIZES)
    model = exact_model(folder, format, adapter, DEVICE, torch.bfloat16)
    assert sum(check(model, format, seed) for seed in range(4)) > 100


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3", **SIZES)
    model = exact_model(folder, "int8_rotated", False, DEVICE, dtype)
    assert sum(check(model, "int8_rotated", seed) for seed in range(4)) > 100


@pytest.mark.parametrize("graphs", [False, True])
def test_a_request_does_not_see_who_is_beside_it(graphs: bool, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3", **SIZES)
    asked = Request(list(range(5, 60)) * 13, n=2, max_tokens=70, seed=4, id="mine")
    others = [Request([9 + i, 3, 5], n=5, max_tokens=20 + i, seed=i) for i in range(12)]

    def engine(**options: object) -> NativeEngine:
        held = {"exact": True, "cache_tokens": 16384, "cuda_graphs": graphs, **options}
        return NativeEngine(folder, "int8", device=DEVICE, **held)  # type: ignore[arg-type]

    alone = engine().generate([asked])[0]
    busy = engine(prefill_chunk=7, page_size=16)
    busy.generate(others)
    for position in (0, 6, 12):
        found = busy.generate([*others[:position], asked, *others[position:]])[position]
        for mine, theirs in zip(found.rollouts, alone.rollouts, strict=True):
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("weights", ["int8_rotated", "dense", "nvfp4"])
def test_a_run_has_no_mismatch(weights: str, lora: bool, model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", device=DEVICE, dtype="bfloat16")
    tree["train"] |= {"max_steps": 4, "minibatches": 1, "lora": lora, "tokens_per_microbatch": 40}
    tree["rollout"] |= {"weights": weights, "exact": True}
    records = read(train(tree).folder)
    assert len(records) == 4
    for record in records:
        assert record["mismatch/logp_diff_max"] == 0 and record["mismatch/weight_max"] == 1


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("weights", ["int8", "int8_rotated", "fp8"])
def test_the_default(weights: str, lora: bool, model: Path, tmp_path: Path) -> None:
    """Learners with an adapter and engines multiply INT8 codes exactly, as that is as fast."""
    tree = settings(model, tmp_path / "run", device=DEVICE, dtype="bfloat16")
    tree["train"] |= {"max_steps": 3, "minibatches": 1, "lora": lora, "forward": "aligned"}
    tree["rollout"] |= {"weights": weights}
    records = read(train(tree).folder)
    exact = all(record["mismatch/logp_diff_max"] == 0 for record in records)
    assert exact == (lora and weights != "fp8")


@pytest.mark.parametrize("format", ["bf16", "int8_rotated"])
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_gradient_is_nearly_the_plain_one(format: str, adapter: bool, tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3", **SIZES)
    lengths = [50, 170, 30]
    ids = torch.randint(2, 60, (250,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    factors, found = drawn(250, dtype=torch.float32, seed=5), []
    for exact in (True, False):
        model = exact_model(folder, format, adapter, DEVICE, torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "exact"):
                module.exact = exact
        if not adapter:
            model.requires_grad_(True)
        hidden = model(ids, positions, model.causal(lengths))
        head = model.lm_head_weight
        logp, _ = token_log_probs(hidden, head, ids.roll(-1), 0.7, chunk=40, exact=exact)
        (logp * factors).sum().backward()
        grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        found.append(torch.cat(grads))
    mine, theirs = found
    assert mine.shape == theirs.shape
    assert (mine - theirs).norm() < 0.1 * theirs.norm()
