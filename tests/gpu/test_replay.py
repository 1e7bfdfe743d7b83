"""On a CUDA device: what captured engines recorded, replayed by the learner, and the attention that
replays it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowroll import Engine, Request, score
from lowroll.kv.policy.table import make
from lowroll.model import hf
from lowroll.model.attention import AttentionInputs
from lowroll.model.evicted_attention import replayed
from tests.fixtures.engines import prompt
from tests.fixtures.evictions import random_evictions, sees
from tests.fixtures.policies import masked_attention
from tests.fixtures.tiny import hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

LARGE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
STEM = prompt(40, 1)
REQUESTS = [
    Request(STEM + prompt(9, 2), n=8, max_tokens=60, seed=1),
    Request(prompt(5, 3), n=1, max_tokens=90, seed=2, ignore_eos=True),
    Request(STEM + prompt(3, 4), n=2, max_tokens=50, seed=3, stop_ids=(9, 17)),
]
POLICIES: dict[str, dict[str, Any]] = {
    "streaming": {"sinks": 2},
    "h2o": {},
    "snapkv": {"window": 3, "kernel": 3},
    "rkv": {"window": 3, "kernel": 3},
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_log_probs_are_the_recorded_ones(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Sixteen steps between two looks; in float32 within 1e-4."""
    model = hf.load(hf_folder(tmp_path / "m", **LARGE), "cuda", dtype)
    weights = "fp32" if dtype == torch.float32 else "bf16"
    engine = Engine(
        model,
        weights,
        kv=make(name, budget=14, buffer=6, **POLICIES[name]),
        cache_tokens=4096,
        record_evictions=True,
    )
    groups = engine.generate(REQUESTS[:2]) + engine.generate(REQUESTS[2:])
    rollouts = [r for g in groups for r in g.rollouts]
    sequences = [g.request.prompt_ids + r.token_ids for g in groups for r in g.rollouts]
    lens = [len(g.request.prompt_ids) for g in groups for _ in g.rollouts]
    assert sum(len(r.evictions.after) for r in rollouts if r.evictions is not None) > 40
    gaps = []
    for evictions in ([r.evictions for r in rollouts], None):
        scores = score(model, sequences, lens, evictions=evictions)
        pairs = zip(rollouts, scores, strict=True)
        gaps.append(torch.cat([(torch.tensor(r.logprobs) - x.cpu()).abs() for r, x in pairs]))
    replay, dense = (float(gap.mean()) for gap in gaps)
    if dtype == torch.float32:
        assert float(gaps[0].max()) < 1e-4
    assert replay < 0.05 * dense


LENGTHS = [300, 64, 411, 150]
PROMPTS = [120, 64, 20, 90]


def inputs(dtype: torch.dtype) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (8, 2, 2)]
    return [torch.randn(shape, generator=g).to("cuda", dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_gradient_are_those_of_a_mask_and_repeat_bitwise(dtype: torch.dtype) -> None:
    evictions = [
        random_evictions(length, start, budget=50, buffer=10, seed=length)
        for length, start in zip(LENGTHS, PROMPTS, strict=True)
    ]
    weight = torch.randn(sum(LENGTHS), 8, 64, device="cuda").to(dtype)
    found = []
    for _ in range(2):
        qkv = inputs(dtype)
        got = replayed(LENGTHS, evictions, "cuda")(1, AttentionInputs(*qkv))
        (got * weight).sum().backward()
        found.append([got.detach(), *(x.grad for x in qkv)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)
    qkv = [x.detach().double().float().requires_grad_() for x in inputs(dtype)]
    parts = zip(*(x.split(LENGTHS) for x in qkv), evictions, LENGTHS, strict=True)
    want = torch.cat(
        [masked_attention(q, k, v, sees(one, n, 1, 2).cuda()) for q, k, v, one, n in parts]
    )
    (want * weight.float()).sum().backward()
    bound = 1e-4 if dtype == torch.float32 else 0.02
    for x, y in zip(found[0], [want.detach(), *(x.grad for x in qkv)], strict=True):
        gap = (x.float() - y).norm() / y.norm()
        assert float(gap) < bound
