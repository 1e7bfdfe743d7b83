"""On a CUDA device: attention over 8-bit codes against the CPU, in Triton and in CUDA, captured
steps, and engines with an 8-bit cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowroll import Engine, Request
from lowroll.kernels.attention import paged
from lowroll.kernels.attention.decode8 import paged_decode8
from lowroll.kernels.attention.quantized_cache import Codes, encode
from lowroll.kv.fp8 import Float8Cache
from lowroll.kv.policy.table import make
from tests.fixtures.decode8 import Case8
from tests.fixtures.engines import prompt
from tests.fixtures.policies import distributions
from tests.fixtures.tiny import hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def cuda(case: Case8) -> list:
    q, k, v, cache, *rest, scale = case.arguments()
    return [*(x.cuda() for x in (q, k, v)), Codes(*(x.cuda() for x in cache))] + [
        *(x.cuda() for x in rest),
        scale,
    ]


CASES = [
    ([300, 0, 1, 16, 17, 64, 65, 640], 28, 4, 128, 16),
    ([5000, 17], 8, 1, 64, 32),
    ([50, 0, 1, 33] * 10, 16, 8, 64, 16),
    ([300, 0, 1, 16, 17, 64, 65, 33, 0, 128, 129, 500, 31, 32, 2, 90, 48], 28, 4, 128, 16),
    ([0] * 8 + [70] * 8 + [0, 257, 256], 12, 4, 64, 32),
    ([640, 1, 2, 15] * 5, 6, 1, 128, 32),
    ([100] * 70, 10, 2, 128, 16),
    ([33, 90], 7, 7, 80, 4),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("lengths, heads, kv_heads, head_dim, page", CASES)
@pytest.mark.parametrize("kernel", ["triton", "cuda"])
def test_rows_attend_to_what_is_stored(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case8(lengths, heads, kv_heads, head_dim, page, dtype)
    inputs = cuda(case)
    if kernel == "triton":
        monkeypatch.setattr(paged, "FEWEST", 1 << 30)
    elif not paged.supports(*inputs[:3], inputs[3].keys_TGd):
        pytest.skip("Triton's")
    want, cache = case.oracle()
    got = paged_decode8(*inputs)
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(got, paged_decode8(*inputs))
    for device, host in zip(inputs[3], cache, strict=True):
        assert torch.equal(device.cpu(), host), "the codes of the new tokens, and nothing else"


@pytest.mark.parametrize("rows, head_dim", [(24, 128), (160, 128), (40, 64)])
def test_shared_pages_change_no_bit(rows: int, head_dim: int) -> None:
    lengths = [0 if row % 11 == 5 else 150 + 37 * (row % 5) for row in range(rows)]
    case = Case8(lengths, 14, 2, head_dim, 16, torch.bfloat16)
    alone, together = case.table.clone(), case.table.clone()
    for row in range(rows):
        leader = row // 8 * 8 + (lengths[row // 8 * 8] == 0)
        same = 3 + leader // 8 % 6
        together[row, :same] = case.table[leader, :same]
        for buffer in case.cache:
            buffer[alone[row, :same].long()] = buffer[case.table[leader, :same].long()]
    outs = []
    for table in (alone, together):
        case.table = table
        outs.append(paged_decode8(*cuda(case)))
    assert torch.equal(*outs) and not outs[0].isnan().any()
    want, _ = case.oracle()
    torch.testing.assert_close(outs[1].cpu().double(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [4, 16, 200])
def test_one_graph_serves_every_length(rows: int) -> None:
    case = Case8([200] * rows, 28, 4, 128, 16, torch.bfloat16)
    inputs = cuda(case)
    lengths = inputs[6]
    paged_decode8(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged_decode8(*inputs)
    for now in ([1, 2, 3, 4], [0, 200, 13, 0], [64, 2, 65, 129]):
        lengths.copy_(torch.tensor(now * (rows // 4)))
        graph.replay()
        assert torch.equal(captured, paged_decode8(*inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_cpus(dtype: torch.dtype) -> None:
    k, v = (torch.randn(2, 300, 4, 128) * torch.logspace(-9, 9, 300)[:, None, None]).to(dtype)
    channels = torch.stack([torch.randperm(128)[:16] for _ in range(4)])
    there = encode(k.cuda(), v.cuda(), channels.cuda())
    for a, b in zip(encode(k, v, channels), there, strict=True):
        assert torch.equal(a, b.cpu())


REQUESTS = [
    Request(prompt(49, 1), n=8, max_tokens=60, seed=1),
    Request(prompt(5, 3), n=1, max_tokens=90, seed=2, temperature=0.8, ignore_eos=True),
    Request(prompt(30, 5), n=8, max_tokens=70, seed=4, ignore_eos=True),
]
LARGE = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.mark.parametrize("policy", [None, "rkv", "h2o", "streaming"])
def test_captured_steps_are_the_cpus(policy: str | None, tmp_path: Path) -> None:
    """float32: most samples draw the same tokens as on the CPU (a code next to the middle may go
    either way), and steps one by one, after a release, give the same bits."""
    folder = hf_folder(tmp_path / "m", "qwen3", **LARGE)
    kv = None if policy is None else make(policy, budget=40, buffer=20)
    options = {"weights": "fp32", "kv": kv, "cache_tokens": 4096, "kv_dtype": "fp8"}
    engine = Engine(folder, device="cuda", **options)
    numbers = [
        [(r.token_ids, r.logprobs) for group in engine.generate(REQUESTS) for r in group.rollouts]
    ]
    assert engine.runner.decoder.replays > 0
    engine.release()
    numbers += [
        [(r.token_ids, r.logprobs) for group in engine.generate(REQUESTS) for r in group.rollouts]
    ]
    assert numbers[0] == numbers[1]
    host = Engine(folder, device="cpu", **options).generate(REQUESTS)
    same = [
        ids == r.token_ids
        for (ids, _), r in zip(
            numbers[0], (r for group in host for r in group.rollouts), strict=True
        )
    ]
    assert sum(same) >= 0.7 * len(same)
    eager = Engine(folder, device="cuda", cuda_graphs=False, **options)
    assert [
        (r.token_ids, r.logprobs) for group in eager.generate(REQUESTS) for r in group.rollouts
    ] == numbers[0]


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_recorded_log_probs_are_those_of_the_stored_codes(weights: str, tmp_path: Path) -> None:
    """Far nearer to a prefill whose keys and values pass through their codes than to `score`, which
    sees no cache; what is left is 16 bits' noise, and the codes that it moves."""
    folder = hf_folder(tmp_path / "m", "qwen3", **LARGE)
    engine = Engine(folder, weights=weights, device="cuda", cache_tokens=8192, kv_dtype="fp8")
    cache = engine.runner.cache
    assert isinstance(cache, Float8Cache)

    def rounded(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return cache._decode(layer, encode(k, v, cache.channels_LGF[layer]))

    of_codes, exact = [], []
    for group in engine.generate(
        [Request(prompt(49, i), n=8, max_tokens=60, seed=i) for i in range(4)]
    ):
        prompt_ids = group.request.prompt_ids
        for rollout in group.rollouts:
            ids = prompt_ids + rollout.token_ids
            models = [engine.model] * (len(ids) - 1)
            with torch.inference_mode():
                logits_TV, _ = distributions(None, ids, len(prompt_ids), models, rounded)
            drawn_T1 = torch.tensor(rollout.token_ids)[:, None]
            want_T = logits_TV.cpu().float().log_softmax(-1).gather(1, drawn_T1)[:, 0]
            recorded_T = torch.tensor(rollout.logprobs)
            (scored_T,) = engine.score([ids], [len(prompt_ids)])
            of_codes.append((want_T - recorded_T).abs())
            exact.append((scored_T.cpu() - recorded_T).abs())
    assert torch.cat(of_codes).mean() < 0.6 * torch.cat(exact).mean() < 0.12
