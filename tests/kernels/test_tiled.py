"""Attention and products with one order of sums, and log-probs as they are drawn: what Triton does, run by
its interpreter. numpy's order goes by the shape of a product, so rows are compared in tiles of one shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lowroll.kernels.attention import tiled
from lowroll.kernels.batch_invariant import attention as invariant
from lowroll.kernels.matmul import tiled as matmul
from lowroll.kernels.sampling import token_logprobs
from lowroll.kernels.sampling.draw import draw
from lowroll.model.attention import AttentionInputs
from lowroll.model.logprobs import token_log_probs
from lowroll.model.shared_prompts import PromptGroup, exact_grouped
from tests.fixtures.exact import check, exact_model
from tests.fixtures.prompt_groups import alone
from tests.fixtures.tiny import hf_folder

pytestmark = pytest.mark.interpreted
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("programs", [1, 264])
@pytest.mark.parametrize(
    "case",
    [
        ([5, 70, 1, 33], 4, 2, 16, 8, torch.float32),
        ([300, 257], 2, 1, 24, 16, torch.float32),
        ([5, 9], 7, 1, 40, 1, torch.float16),
    ],
)
def test_a_query_has_the_same_bits_however_it_comes(
    case: tuple, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed as a learner has it, over pages, as a later chunk, and decoded."""
    monkeypatch.setattr(tiled, "PROGRAMS", programs)
    lengths, heads, kv_heads, d, page, dtype = case
    g = torch.Generator().manual_seed(sum(lengths))
    total, scale = sum(lengths), d**-0.5
    q, k, v = (torch.randn(total, n, d, generator=g).to(dtype) for n in (heads, kv_heads, kv_heads))
    sizes = torch.tensor(lengths, dtype=torch.int32)
    starts, zeros = (sizes.cumsum(0) - sizes).int(), torch.zeros_like(sizes)
    queries = tiled.queries_of(heads, kv_heads, d, q.element_size())
    most = total // queries + len(lengths)
    packed = tiled.attend(q, k, v, None, tiled.tile(sizes, zeros, starts, queries, most), scale)
    parts = zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True)
    want = [
        F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in part), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for part in parts
    ]
    bound = 2e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(packed.double(), torch.cat(want), atol=bound, rtol=0)

    width = -(-max(lengths) // page)
    table = torch.randperm(len(lengths) * width, generator=g).view(-1, width).int()
    keys, values = (torch.zeros(table.numel(), page, kv_heads, d, dtype=dtype) for _ in "kv")
    for s, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        at = torch.arange(length)
        slots = table[s].long()[at // page] * page + at % page
        keys.flatten(0, 1)[slots] = k[start : start + length]
        values.flatten(0, 1)[slots] = v[start : start + length]
    rows = torch.arange(len(lengths), dtype=torch.int32)
    cut = sizes // 2
    tiles = tiled.tile(sizes - cut, cut, rows, queries, most)
    spans = zip(starts.tolist(), cut.tolist(), lengths, strict=True)
    behind = torch.cat([torch.arange(s + c, s + n) for s, c, n in spans])
    assert torch.equal(tiled.attend(q[behind], keys, values, table, tiles, scale), packed[behind])
    last = sizes.cumsum(0) - 1
    own = [keys.clone(), values.clone()]
    for cache in own:  # decoding writes the new key and value itself
        cache.flatten(0, 1)[_slots(table, sizes - 1, page)] = 9.0
    some = [*range(len(lengths)), 0]
    lengths_B = torch.cat([sizes, torch.zeros(1, dtype=torch.int32)])  # the last row is dead
    at = last[some]
    found = tiled.decode(q[at], k[at], v[at], *own, table[some], lengths_B, scale)
    assert torch.equal(found[:-1], packed[last]) and not found[-1].any()
    assert torch.equal(own[0], keys) and torch.equal(own[1], values)


@pytest.mark.parametrize(
    "shape",
    [(4, 2, 16, torch.float32), (4, 4, 80, torch.float16), (7, 1, 128, torch.float16)],
)
def test_a_response_sees_its_prompt_with_the_bits_of_a_whole_sequence(
    shape: tuple[int, int, int, torch.dtype],
) -> None:
    """Also where a share of 256 keys begins in the prompt and ends in the response."""
    groups = [PromptGroup(5, (3, 0, 70)), PromptGroup(200, (90, 1)), PromptGroup(256, (2, 30))]
    rows, lengths = alone(groups)
    tokens = max(rows) + 1
    g = torch.Generator().manual_seed(0)
    heads, kv_heads, d, dtype = shape
    q, k, v = (
        torch.randn(tokens, n, d, generator=g).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    shared = exact_grouped(groups)(0, AttentionInputs(q, k, v))
    sizes = torch.tensor(lengths, dtype=torch.int32)
    whole = invariant.packed(sizes, len(rows))(q[rows], k[rows], v[rows])
    assert torch.equal(shared[rows], whole)


def _slots(table: torch.Tensor, at: torch.Tensor, page: int) -> torch.Tensor:
    return table.long().gather(1, (at // page)[:, None].long())[:, 0] * page + at % page


@pytest.mark.parametrize("multiprocessors", [0, 132], ids=["one program", "a program a part"])
@pytest.mark.parametrize("sizes", [(70, 40, 2100), (3, 300, 100), (1, 5, 16)])
def test_products(
    sizes: tuple[int, int, int], multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, N, K = sizes
    x, w, bias, added = (torch.randn(*shape) for shape in ((M, K), (N, K), (N,), (M, N)))
    whole = matmul.product(x, w, bias, None, added)
    want = x.double() @ w.double().t() + bias + added
    torch.testing.assert_close(whole.double(), want, atol=2e-6 * K, rtol=0)
    monkeypatch.setattr(matmul, "MULTIPROCESSORS", multiprocessors)
    assert torch.equal(matmul.product(x, w, bias, None, added), whole)
    half = matmul.product(x.half(), w.half(), dtype=torch.float32)
    torch.testing.assert_close(half, x.half().float() @ w.half().float().t(), atol=1e-2, rtol=1e-3)


def test_products_of_other_operands() -> None:
    with pytest.raises(ValueError, match="expected one dtype"):
        matmul.product(torch.zeros(2, 3), torch.zeros(4, 3).half())
    with pytest.raises(ValueError, match="do not fit"):
        matmul.product(torch.zeros(2, 3), torch.zeros(4, 2))
    assert matmul.product(torch.zeros(0, 3), torch.zeros(4, 3)).shape == (0, 4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_log_prob_is_the_one_that_was_drawn(temperature: float) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5000, generator=g) * 4
    numbers = torch.arange(6)
    tokens, logps = draw(logits, numbers, numbers + 7, torch.full((6,), temperature))
    assert torch.equal(token_logprobs.log_probs(logits, tokens, temperature), logps)
    assert token_logprobs.log_probs(logits[:0], tokens[:0], temperature).shape == (0,)


@pytest.mark.parametrize(
    "adapter", [pytest.param(False, marks=pytest.mark.long), True], ids=["full", "lora"]
)
def test_an_engine_and_a_learner(adapter: bool, tmp_path: Path) -> None:
    """The same path as on a GPU: recorded is recomputed up to numpy's order of sums."""
    folder = hf_folder(tmp_path / "m", "qwen3", **SIZES)
    model = exact_model(folder, "int8", adapter)
    assert check(model, "int8", 46, bound=2e-5) > 10


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_gradient_is_the_plain_one(adapter: bool, tmp_path: Path) -> None:
    """With dense weights, whose forward is the plain one up to rounding."""
    folder = hf_folder(tmp_path / "m", "qwen3", **SIZES)
    lengths, g = [5, 17, 3], torch.Generator().manual_seed(0)
    ids, factors = torch.randint(2, 60, (25,), generator=g), torch.randn(25, generator=g)
    positions = torch.cat([torch.arange(n) for n in lengths])
    found = []
    for exact in (True, False):
        model = exact_model(folder, "fp32", adapter)
        for module in model.modules():
            if hasattr(module, "exact"):
                module.exact = exact
        if not adapter:
            model.requires_grad_(True)
        hidden = model(ids, positions, model.causal(lengths))
        head = model.lm_head_weight
        logp, _ = token_log_probs(hidden, head, ids.roll(-1), 0.7, chunk=4, exact=exact)
        (logp * factors).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    mine, theirs = found
    assert mine.keys() == theirs.keys() and len(mine) >= 4
    for name, grad in mine.items():
        assert grad is not None
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-4, msg=name)
