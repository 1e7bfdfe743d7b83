"""Engines of models whose layers have states: Qwen3.5's gated delta nets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lowroll
from lowroll import Engine, Request
from lowroll.model import hf
from lowroll.types import Rollout
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import prompt
from tests.fixtures.tiny import hf_folder

FORMATS = {"fp32": 2e-4, "int4": 2e-4, "nvfp4": 2e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("recurrent") / "m", "qwen3.5")


def engine_of(folder: Path, weights: str = "fp32", **options: object) -> Engine:
    return Engine(folder, weights, device="cpu", **{"cache_tokens": 2048, **options})  # type: ignore[arg-type]


def largest_gap(engine: Engine, prompt_ids: list[int], rollouts: list[Rollout]) -> float:
    """The largest difference between recorded log-probs and those of one forward pass."""
    sequences = [prompt_ids + r.token_ids for r in rollouts]
    scores = lowroll.score(engine.model, sequences, [len(prompt_ids)] * len(sequences))
    return max(
        float((torch.tensor(r.logprobs) - score).abs().max())
        for r, score in zip(rollouts, scores, strict=True)
    )


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 3}, {"max_batch": 3}, {"page_size": 1}])
def test_recorded_is_what_one_pass_computes(
    folder: Path, weights: str, options: dict[str, int]
) -> None:
    """Groups of one and of eight, admitted in waves, with prompts in one piece and in chunks."""
    engine = engine_of(folder, weights, **options)
    requests = [
        Request(prompt(length, seed), n=n, max_tokens=17, seed=seed, ignore_eos=True)
        for seed, (length, n) in enumerate([(11, 8), (1, 1), (64, 2), (7, 5)])
    ]
    for request, group in zip(requests, engine.generate(requests), strict=True):
        gap = largest_gap(engine, list(request.prompt_ids), group.rollouts)
        assert gap < FORMATS[weights]


def test_what_came_before_leaves_no_trace(folder: Path) -> None:
    """The second prompt begins as the first, and neither pages nor slots of others are seen."""
    engine, fresh = engine_of(folder, max_batch=2), engine_of(folder, max_batch=2)
    first = Request(prompt(40, 1), n=3, max_tokens=9, seed=1)
    second = Request(prompt(32, 1) + prompt(5, 2), n=2, max_tokens=9, seed=2, ignore_eos=True)
    engine.generate([first])
    after = engine.generate([second])[0]
    alone = fresh.generate([second])[0]
    assert [r.token_ids for r in after.rollouts] == [r.token_ids for r in alone.rollouts]
    assert [r.logprobs for r in after.rollouts] == [r.logprobs for r in alone.rollouts]


def test_samples_go_on_under_new_weights_but_are_not_replayed(folder: Path, tmp_path: Path) -> None:
    other = hf.load(hf_folder(tmp_path / "other", "qwen3.5", seed=1))
    engine = engine_of(folder, max_batch=4)
    handle = engine.add(Request(prompt(9), n=4, max_tokens=30, seed=5, ignore_eos=True))
    for _ in range(8):
        engine.step()
    with pytest.raises(ValueError, match="in_flight: replay .* has states in place of keys"):
        engine.update_weights(WeightUpdate.local(other, 1), in_flight="replay")
    engine.update_weights(WeightUpdate.local(other, 1), in_flight="keep")
    finished = dict(group for _ in range(60) for group in engine.step())
    for rollout in finished[handle].rollouts:
        assert [span.version for span in rollout.behavior.policy] == [0, 1]
        assert len(rollout.token_ids) == 30
