"""Switches of the rollout engine that a configuration has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowroll import machine
from lowroll.engine import cache_size
from lowroll.engine.native import NativeEngine
from lowroll.kv.capacity import UNKNOWN_FREE
from lowroll.metrics.record import read
from lowroll.runs.grpo import Run
from lowroll.types import Request
from tests.fixtures.runs import settings, train


def engine_of(model: Path, **options: Any) -> NativeEngine:
    return NativeEngine(model, "fp32", device="cpu", max_batch=4, **options)


PROMPT = list(range(3, 40))


@pytest.mark.parametrize("on", [True, False])
def test_prefix_caching(on: bool, model: Path) -> None:
    engine = engine_of(model, cache_tokens=256, prefix_caching=on)
    drawn = [
        engine.generate([Request(prompt_ids=PROMPT, id=name, seed=1, n=2, max_tokens=4)])[0]
        for name in ("a", "a")
    ]
    assert drawn[0].rollouts[0].token_ids == drawn[1].rollouts[0].token_ids
    assert (engine.stats().prefix_hits > 0) == on


def test_a_context_shorter_than_the_models(model: Path) -> None:
    engine = engine_of(model, cache_tokens=256, max_model_len=40)
    assert engine.capabilities.context_length == 40
    with pytest.raises(ValueError, match="over the model's context of 40 tokens"):
        engine.generate([Request(prompt_ids=PROMPT, id="a", max_tokens=4)])
    assert engine.generate([Request(prompt_ids=PROMPT, id="a", max_tokens=3)])
    assert engine_of(model, cache_tokens=64, max_model_len=10**9).context < 10**9


def test_a_share_of_the_memory_is_the_cache(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = 2 * 2 * 1 * 16 * 4  # bytes of a token: K and V, 2 layers, 1 head of 16, float32
    monkeypatch.setattr(machine, "total_memory", lambda: 1000 * each)
    monkeypatch.setattr(cache_size, "free_memory", lambda device: 900 * each)
    for share, tokens in ((0.25, 250), (0.5, 500), (0.95, 900)):
        found = engine_of(model, memory_share=share).stats().cache_tokens
        assert found == tokens // 16 * 16, share
    assert engine_of(model).stats().cache_tokens < 250  # a quarter of what is free
    assert UNKNOWN_FREE > 0


def test_the_settings_reach_the_engine(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[dict[str, Any]] = []
    build = NativeEngine.__init__

    def watched(engine: NativeEngine, *args: Any, **options: Any) -> None:
        build(engine, *args, **options)
        asked.append(options)

    monkeypatch.setattr(NativeEngine, "__init__", watched)
    rollout = {"prefix_caching": False, "cuda_graphs": False, "gpu_memory_utilization": 0.25}
    tree = settings(model, tmp_path / "run", rollout={**rollout, "cache_tokens": None})
    tree["train"]["max_steps"] = 2
    train(tree)
    wanted = {"prefix_caching": False, "cuda_graphs": False, "memory_share": 0.25}
    assert wanted.items() <= asked[0].items()
    assert Run and len(read(tmp_path / "run")) == 2


def test_longer_prompts_than_the_longest_sequence_are_passed_over(
    model: Path, tmp_path: Path
) -> None:
    tree = settings(model, tmp_path / "run", rollout={"max_model_len": 9})
    tree["train"] |= {"max_steps": 1, "warmup_steps": 0}
    with pytest.raises(ValueError, match=r"rollout\.max_model_len: 9 tokens are too few"):
        train(tree)


def test_lines_of_some_steps(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = settings(model, tmp_path / "run", logging_steps=3)
    tree["train"] |= {"max_steps": 4, "warmup_steps": 0}
    train(tree)
    said = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "step " in line]
    assert said == ["3/4", "4/4"]
    assert len(read(tmp_path / "run")) == 4
