"""What the configuration says of a resumption and of evaluations: ckpt.resume_step, skip_progress,
eval.eval_base_model, skip_eval_on_resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowroll.checkpoint.store import Store
from lowroll.metrics.record import read
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train


def tree(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "train": {"max_steps": 4, "warmup_steps": 0, "lr_scheduler_type": "constant"},
        "eval": {"interval": 2, "num_examples": 2},
    }
    return settings(model, out, **{**base, **changes})


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tree(model, tmp_path_factory.mktemp("whole") / "run")).folder


def prompts(folder: Path, step: int) -> list[str]:
    lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return sorted({json.dumps(json.loads(line).get("prompt_ids")) for line in lines[1:]})


@pytest.mark.parametrize("asked", [-1, 1, 2])
def test_the_run_goes_on_from_the_step_that_is_named(
    asked: int, model: Path, whole: Path, tmp_path: Path
) -> None:
    copy_stopped_after(whole, 3, tmp_path / "cut")
    result = train(tree(model, tmp_path / "cut", ckpt={"resume_step": asked}))
    assert [record["step"] for record in read(result.folder)] == [1, 2, 3, 4]
    found, expected = fingerprint(result.folder), fingerprint(whole)
    assert found == expected
    began = (tmp_path / "cut" / "logs" / "attempt_1.log").read_text()
    if not (tmp_path / "cut" / "logs" / "attempt_2.log").is_file():
        assert f"resumed after step {3 if asked == -1 else asked}" in began
    else:
        again = (tmp_path / "cut" / "logs" / "attempt_2.log").read_text()
        assert f"resumed after step {3 if asked == -1 else asked}" in again


def test_the_newest_of_no_run_is_the_beginning(model: Path, tmp_path: Path) -> None:
    one = tree(model, tmp_path / "run", ckpt={"resume_step": -1}, eval={"interval": None})
    one["train"]["max_steps"] = 1
    assert len(train(one).records) == 1


def test_a_step_without_a_checkpoint_is_refused(model: Path, whole: Path, tmp_path: Path) -> None:
    copy_stopped_after(whole, 2, tmp_path / "cut")
    with pytest.raises(ValueError, match=r"ckpt\.resume_step: .* no checkpoint of step 9, there"):
        train(tree(model, tmp_path / "cut", ckpt={"resume_step": 9}))
    assert Store(tmp_path / "cut" / "checkpoints").steps()[-1] == 2


def test_skip_progress_draws_the_first_prompts_again(
    model: Path, whole: Path, tmp_path: Path
) -> None:
    copy_stopped_after(whole, 2, tmp_path / "cut")
    changed = tree(model, tmp_path / "cut", ckpt={"resume_step": 2, "skip_progress": True})
    folder = train(changed).folder
    assert prompts(folder, 3) == prompts(whole, 1) != prompts(whole, 3)


def test_evaluations_before_a_step(model: Path, whole: Path, tmp_path: Path) -> None:
    def early(folder: Path) -> list[int]:
        return [r["step"] for r in read(folder) if any(k.endswith("_before") for k in r)]

    assert early(whole) == [1]
    base = {"interval": 2, "num_examples": 2}
    without = train(tree(model, tmp_path / "none", eval={**base, "eval_base_model": False}))
    assert early(without.folder) == []
    copy_stopped_after(whole, 3, tmp_path / "cut")
    again = {**base, "skip_eval_on_resume": False}
    assert early(train(tree(model, tmp_path / "cut", eval=again), resume=True).folder) == [1, 4]
