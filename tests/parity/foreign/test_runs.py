"""Runs whose rollouts are a real vLLM's, on the CPU: the learner gives its tokens the log-probs that
vLLM gave them, after every update; a vLLM that dies costs a step, and a resumed run begins with the
newest weights. `make vllm`.

Bounds are in nats. In float32 both engines agree to rounding; vLLM's INT4 product has bfloat16
alone, whose spread is what is allowed there.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lowroll.engine.remote import EngineLost
from lowroll.metrics.record import read
from lowroll.runs import demo
from lowroll.runs.rollouts import RolloutEngine
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Group, RunFailed
from tests.fixtures.runs import TINY, settings, train

EXACT = 1e-4
STEPS = 3
LORA = {"lora": True, "lora_rank": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """head_dim 32: 16 ends vLLM's CPU attention. Untied: it keeps the old head of a tied model.
    Wide enough for a group of INT4."""
    sizes = {"head_dim": 32, "tie_word_embeddings": False, "hidden_size": 128}
    wide = {"intermediate_size": 128, "num_attention_heads": 4}
    folder = tmp_path_factory.mktemp("runs") / "model"
    return demo.build_model(folder, 0, {**TINY, **sizes, **wide})


def tree(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    rollout = {
        "engine": "vllm",
        "weights": "dense",
        "vllm": {"serve_args": ["--enforce-eager"]},
        "cache_tokens": None,
        **changes.pop("rollout", {}),
    }
    steps = {"max_steps": STEPS, "warmup_steps": 0, "tokens_per_microbatch": 128}
    learning = {**steps, "lr_scheduler_type": "constant", **changes.pop("train", {})}
    return settings(model, out, rollout=rollout, train=learning, **changes)


def versions(folder: Path) -> list[set[int]]:
    """The policy versions that the rollouts of each step say they were drawn from."""
    found = []
    for path in sorted((folder / "rollouts").iterdir()):
        batch = read_rollouts(path)
        found.append({span.version for s in batch.samples for span in s.rollout.behavior.policy})
    return found


def test_a_full_run_survives_the_death_of_its_engine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, plain, calls = tmp_path / "run", RolloutEngine.generate, []

    def generate(self: RolloutEngine, requests: Any, on_progress: Any = None) -> list[Group]:
        calls.append(len(requests))
        if len(calls) == STEPS:
            os.killpg(self.engine.process.pid, signal.SIGKILL)
        return plain(self, requests, on_progress)

    monkeypatch.setattr(RolloutEngine, "generate", generate)
    with pytest.raises(RunFailed, match="vLLM has ended"):
        train(tree(model, out))
    assert len(read(out)) == STEPS - 1
    records = train(tree(model, out, train={"max_steps": STEPS + 1}), resume=True).records
    assert [record["step"] for record in records] == list(range(1, STEPS + 2))
    for record in records:
        assert record["mismatch/logp_diff_max"] < EXACT
    assert versions(out) == [{step} for step in range(STEPS + 1)]
    assert (out / "logs" / "vllm.log").is_file()


def test_an_adapter_run(model: Path, tmp_path: Path) -> None:
    """With evaluations between, of one response a prompt, which draw with the same adapter."""
    changes: dict[str, Any] = {
        "batch_size": 32,
        "rollouts_per_example": 8,
        "train": LORA,
        "eval": {"interval": 2, "num_examples": 3},
    }
    records = train(tree(model, tmp_path / "run", **changes)).records
    for record in records:
        assert record["mismatch/logp_diff_max"] < EXACT
    assert sum(record["weights/normalized_update"] for record in records) > 0
    assert records[-1]["eval/reverse-text/length_mean"] > 0
    assert versions(tmp_path / "run") == [{0}, {1}, {2}]


def test_an_adapter_on_the_rollouts_own_base(model: Path, tmp_path: Path) -> None:
    """vLLM loads the very codes that the learner's adapter stands on. Skips, in vLLM's words, where
    it has no such kernel."""
    rollout = {"weights": "int4"}
    run = tree(model, tmp_path / "run", rollout=rollout, dtype="bfloat16", train=LORA)
    try:
        records = train(run).records
    except EngineLost as error:
        if "has no attribute 'cpu_gemm" not in str(error):
            raise
        pytest.skip(f"vLLM has no kernel here: {error}")
    for record in records:
        assert record["mismatch/logp_diff_mean"] < 0.02 and record["rollout/weight_bits"] < 5
