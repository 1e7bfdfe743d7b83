"""On a CUDA device of capability 9.0 and more: decoding whose kernels start early draws what it
draws without."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from bench.shapes import SHAPES, random_model
from lowroll import Engine, Request
from lowroll.engine import decoder, prefill_graphs
from lowroll.kernels import launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
SHAPE = {**SHAPES["qwen2.5-1.5b"], "num_hidden_layers": 3, "vocab_size": 8192}


def requests(num_rows: int) -> list[Request]:
    g = torch.Generator().manual_seed(num_rows)
    return [
        Request(
            torch.randint(8000, (20 + 3 * i,), generator=g).tolist(),
            n=min(8, num_rows),
            max_tokens=40,
            ignore_eos=True,
            seed=i,
        )
        for i in range(max(1, num_rows // 8))
    ]


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int8", "int8_rotated", "nvfp4", "int4"])
def test_tokens_and_log_probs_are_those_of_plain_launches(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs capability 9.0")
    engine = Engine(random_model(SHAPE, "cuda"), weights=weights, cache_tokens=8192, max_batch=64)
    seen = list[bool]()

    def rollouts(num_rows: int) -> list[tuple[list[int], list[float]]]:
        engine.pool.clear_prefixes()
        groups = engine.generate(requests(num_rows))
        return [(r.token_ids, r.logprobs) for group in groups for r in group.rollouts]

    monkeypatch.setattr(
        "lowroll.kernels.fused.norm.early_start",
        lambda: seen.append(launch.early()) or launch.early_start(),
    )
    early = {rows: [rollouts(rows) for _ in range(3)] for rows in (1, 2, 16, 32, 64)}
    assert any(seen)
    assert engine.runner.short is not None
    engine.runner.decoder.forget()
    engine.runner.short.forget()
    for module in (decoder, prefill_graphs):
        monkeypatch.setattr(module, "overlapping", lambda device: nullcontext())
    seen.clear()
    for rows, runs in early.items():
        plain = rollouts(rows)
        assert all(run == plain for run in runs), f"{rows} rows"
    assert not any(seen)
