"""`train.forward: fp8`: the learner multiplies in a format that the rollouts are not in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowroll.config import ConfigError, from_mapping
from lowroll.metrics.record import read
from tests.fixtures.runs import fingerprint, settings, train

LORA = {"lora": True, "lora_rank": 2}


def tree(
    model: Path, out: Path, forward: str, weights: str = "dense", **more: Any
) -> dict[str, Any]:
    return settings(
        model,
        out,
        correction="tis",
        rollout={"weights": weights},
        train={
            "forward": forward,
            "max_steps": 2,
            "minibatches": 1,
            "warmup_steps": 0,
            "lr_scheduler_type": "constant",
            **more,
        },
    )


@pytest.mark.parametrize("more", [{}, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("forward", ["fp8", "nvfp4"])
def test_the_learner_rounds_and_the_rollouts_do_not(
    forward: str, more: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    plain = read(train(tree(model, tmp_path / "plain", "dense", **more)).folder)
    rounded = train(tree(model, tmp_path / "low", forward, **more)).folder
    first, told = plain[0], read(rounded)[0]
    assert told["reward/mean"] == first["reward/mean"]  # the same rollouts
    assert abs(first["mismatch/kl_k3"]) < 1e-8 < told["mismatch/kl_k3"]
    other = tree(model, tmp_path / "again", forward, **more)
    other["train"]["max_steps"] = 1
    train(other)
    other["train"]["max_steps"] = 2
    again = train(other, resume=True).folder
    assert fingerprint(again) == fingerprint(rounded)


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "more"), [("dense", LORA), ("fp8", {})])
def test_gradients_that_round_leave_the_first_batch_as_it_is(
    forward: str, more: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Its rollouts, log-probs and objective; the gradient's length differs a little. A run that was
    stopped ends as one that was not."""
    plain = read(train(tree(model, tmp_path / "plain", forward, **more)).folder)
    rounds = more | {"backward": "fp8"}
    rounded = train(tree(model, tmp_path / "low", forward, **rounds)).folder
    first, told = plain[0], read(rounded)[0]
    for name in ("reward/mean", "policy/objective", "mismatch/kl_k3", "policy/entropy"):
        assert told[name] == first[name], name
    norms = told["optim/grad_norm"], first["optim/grad_norm"]
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=0.1)
    again = tree(model, tmp_path / "again", forward, **rounds)
    again["train"]["max_steps"] = 1
    train(again)
    again["train"]["max_steps"] = 2
    assert fingerprint(train(again, resume=True).folder) == fingerprint(rounded)


@pytest.mark.parametrize("more", [{}, LORA], ids=["all weights", "lora"])
def test_beside_rollouts_of_the_same_format_it_is_the_aligned_forward(
    more: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    found = [
        fingerprint(train(tree(model, tmp_path / forward, forward, "fp8", **more)).folder)
        for forward in ("aligned", "fp8")
    ]
    assert found[0] == found[1]


def test_an_adapters_base_is_multiplied_as_it_is() -> None:
    low = {"model": "m", "rollout": {"weights": "nf4"}, "train": {**LORA, "forward": "fp8"}}
    with pytest.raises(ConfigError, match=r"train\.forward: the adapter's base is nf4"):
        from_mapping(low)
    low["train"] = LORA
    assert from_mapping(low).forward_weights is None
