"""`correction: auto` against what a run measures: it pays for every rollout setting that makes a
gap, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.config import from_mapping
from lowroll.config.rollout import RolloutConfig
from lowroll.model import hf
from lowroll.runs import demo
from tests.fixtures.runs import TINY, settings, train

# every key of `rollout` at a value that is not its default
CHANGES: dict[str, Any] = {
    "engine": "vllm",  # its gap is measured in tests/parity/foreign
    "vllm": {"folder": "weights"},
    "weights": "int8",
    "exact": True,
    "kv": {"policy": "streaming", "budget": 5, "buffer": 1, "sinks": 1},
    "max_tokens": 5,
    "min_tokens": 4,
    "temperature": 0.7,
    "temp_scheduler": {"type": "linear", "start_temperature": 1.4, "end_temperature": 0.6},
    "top_p": 0.8,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "stop": ["a", "e"],
    "page_size": 2,
    "max_batch": 3,
    "large_batch_weights": "int8",
    "keep_dense": True,
    "release_cache": True,
    "cache_tokens": 64,
    "prefill_chunk": 2,
    "max_model_len": 40,
    "seed": 5,
    "cuda_graphs": False,
    "prefix_caching": False,
    "turn_caching": True,
    "gpu_memory_utilization": 0.5,
    "tool_call_parser": "hermes",
    "engines": 2,  # of roles: each has the weights that one has
}
REACHES = 1e-8  # nats: rounding in float32 leaves less than 1e-10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model far from uniform distributions, so that every cut shows."""
    folder = demo.build_model(tmp_path_factory.mktemp("auto") / "model", 0, TINY)
    rough = hf.load(folder)
    with torch.no_grad():
        for _, linear in rough.linears():
            linear.weight.mul_(8)
        rough.norm.weight.mul_(6)
    return hf.save(rough, folder.parent / "rough", tokenizer_from=folder)


def run_once(model: Path, out: Path, rollout: dict[str, Any], **learner: Any) -> tuple[str, float]:
    """The correction that `auto` chose, and the mismatch before any update."""
    tree = settings(
        model,
        out,
        batch_size=16,
        rollout=rollout,
        ckpt={"interval": 9},
        train={"max_steps": 1, "warmup_steps": 0, "minibatches": 1, **learner},
    )
    return from_mapping(tree).correction, train(tree).records[0]["mismatch/kl_k3"]


def test_every_key_is_here() -> None:
    assert CHANGES.keys() == RolloutConfig.model_fields.keys()


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in CHANGES if not key.startswith("engine")])
def test_auto_pays_for_what_makes_a_gap_and_for_nothing_else(
    key: str, model: Path, tmp_path: Path
) -> None:
    correction, gap = run_once(model, tmp_path / "run", {"weights": "fp32", key: CHANGES[key]})
    assert (correction != "none") == (gap > REACHES), (correction, gap)
    assert gap > REACHES or abs(gap) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_auto_pays_for_a_cache_in_8_bits(weights: str, model: Path, tmp_path: Path) -> None:
    """A capped weight where only the cache rounds; else what the weights ask for."""
    found = run_once(model, tmp_path / "run", {"weights": weights, "kv": {"dtype": "fp8"}})
    assert found[0] == ("tis" if weights == "fp32" else "acr") and found[1] > REACHES


@pytest.mark.slow
@pytest.mark.parametrize("learner", [{}, {"lora": True, "lora_rank": 2}], ids=["all", "lora"])
def test_auto_pays_for_a_learner_that_rounds_beside_dense_rollouts(
    learner: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    correction, gap = run_once(
        model, tmp_path / "run", {"weights": "fp32"}, forward="fp8", **learner
    )
    assert correction == "acr" and gap > REACHES
    correction, gap = run_once(
        model, tmp_path / "gradients", {"weights": "fp32"}, backward="fp8", **learner
    )
    assert correction == "none" and gap < 1e-10


@pytest.mark.slow
def test_a_second_format_is_not_the_learners_own(model: Path, tmp_path: Path) -> None:
    """Neither a shared base nor an aligned forward is that of the rows that the second format
    draws."""
    lora = {"lora": True, "lora_rank": 4, "learning_rate": 1e-5}
    for shared, alone, dense in ((lora, "tis", "tis"), ({"forward": "aligned"}, "tbpo", "acr")):
        for second, chosen in ((None, alone), ("int8", "acr"), ("fp8", "acr"), ("bf16", dense)):
            correction, gap = run_once(
                model,
                tmp_path / f"{alone}{second}",
                {"weights": "nvfp4", "large_batch_weights": second},
                **shared,
            )
            assert correction == chosen and (gap > REACHES) == (second is not None), (
                shared,
                second,
                gap,
            )
            assert (
                chosen == "acr" or gap < 1e-4
            )  # bf16 beside a shared base rounds what that stands for
