"""A run whose engine lies elsewhere, with one that stands for vLLM: which weights it is sent and
when, that it is closed whatever happens, and what is refused before anything is started. What a
real vLLM answers is asked in tests/parity/foreign."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowroll.checkpoint.store import Store
from lowroll.metrics.record import read
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.foreign import stand_in
from tests.fixtures.runs import copy_stopped_after, settings, train

LORA = {"lora": True, "lora_rank": 2, "learning_rate": 1e-2}
STEPS = 3


def tree(model: Path, out: Path, engine: str = "vllm", **changes: Any) -> dict[str, Any]:
    rollout = {"engine": engine, "weights": "dense", "cache_tokens": None, "max_tokens": 6}
    train = {"max_steps": STEPS, "warmup_steps": 0, **changes.pop("train", {})}
    rest = {"correction": "tis", "ckpt": {"interval": 2}, "rollout": rollout, **changes}
    return settings(model, out, train=train, **rest)


def tokens(folder: Path, step: int) -> list[Any]:
    batch = read_rollouts(folder / "rollouts" / f"step_{step:06d}.jsonl")
    return [
        (s.rollout.token_ids, s.rollout.logprobs, s.rollout.behavior.policy) for s in batch.samples
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("n", [2, 8])
def test_a_run_over_a_stream_is_the_run_in_one_process(
    n: int, lora: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stand_in(monkeypatch)
    changes: dict[str, Any] = {
        "rollouts_per_example": n,
        "batch_size": 16,
        "train": LORA if lora else {},
        "eval": {"interval": 2, "num_examples": 3},
    }
    far = train(tree(model, tmp_path / "far", **changes)).records
    near = train(tree(model, tmp_path / "near", "native", **changes)).records
    (engine,) = made
    assert engine.versions == [0, 1, 2, 3] and engine.closed == 1
    for step in range(1, STEPS + 1):
        assert tokens(tmp_path / "far", step) == tokens(tmp_path / "near", step)
        assert far[step - 1]["mismatch/logp_diff_max"] < 1e-4
    assert far[-1]["eval/reverse-text/reward"] == near[-1]["eval/reverse-text/reward"]
    assert any(name.startswith("weights/") for name in far[-1]) == lora
    held = [Store(tmp_path / side / "checkpoints").load() for side in ("far", "near")]
    assert held[0].meta["cache_tokens"] is None and held[1].meta["cache_tokens"] is not None


@pytest.mark.slow
def test_ppo_needs_one_rollout_a_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made, one) = stand_in(monkeypatch), {"rollouts_per_example": 1, "algorithm": "ppo"}
    records = train(tree(model, tmp_path / "run", **one)).records
    assert made[0].versions == [0, 1, 2, 3] and len(records) == STEPS


@pytest.mark.slow
def test_a_resumed_run_gives_the_engine_the_newest_weights_first(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stand_in(monkeypatch)
    kept = {"ckpt": {"interval": 1, "keep_last": None}}
    train(tree(model, tmp_path / "whole", **kept))
    copy_stopped_after(tmp_path / "whole", 2, tmp_path / "cut")
    section = {"engine": "vllm", "weights": "dense", "cache_tokens": None, "max_tokens": 6}
    moved = {"rollout": {**section, "vllm": {"max_concurrent": 8, "request_deadline": 9.0}}}
    train(tree(model, tmp_path / "cut", **kept, **moved), resume=True)
    assert made[1].versions == [0, 2, 3] and made[1].closed == 1
    assert tokens(tmp_path / "cut", 3) == tokens(tmp_path / "whole", 3)
    with pytest.raises(ValueError, match=r"rollout\.engine was 'vllm' and is 'native'"):
        train(tree(model, tmp_path / "cut", "native", **kept), resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("update", [0, 1])
def test_the_engine_is_closed_when_a_run_fails(
    update: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its first weights, and in mid-run."""
    made = stand_in(monkeypatch, fails=update)
    with pytest.raises(RuntimeError, match="the engine has ended"):
        train(tree(model, tmp_path / "run"))
    assert [engine.closed for engine in made] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("able", "changes", "told"),
    [
        (
            {"context_length": 100},
            {},
            "train.tokens_per_microbatch: prompts and responses of up to",
        ),
        ({"updates": frozenset()}, {}, "train.lora: updates of kind 'full' are needed"),
        ({"updates": frozenset({"full"})}, {"train": LORA}, "kind 'adapter' are needed"),
        ({"exact_logprobs": False}, {}, "log-probs are not those of the distribution"),
        ({"sampler": frozenset({"temperature"})}, {}, "does not heed max_tokens"),
    ],
)
def test_what_this_vllm_cannot_do_is_refused_before_the_first_step(
    able: dict[str, Any],
    changes: dict[str, Any],
    told: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stand_in(monkeypatch, **able)
    with pytest.raises(ValueError, match=told):
        train(tree(model, tmp_path / "run", **changes))
    assert made[0].closed == 1 and made[0].versions == [] and read(tmp_path / "run") == []
