"""Stages: what is in force at which step, mistakes with their lines, and runs whose context
grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowroll.cli import eval as eval_command
from lowroll.cli.main import main
from lowroll.config import ConfigError, from_mapping, load
from lowroll.metrics import report
from lowroll.runs.session import RunResult
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

STAGES = [
    {"step": 2, "max_tokens": 6, "rollouts_per_example": 8, "batch_size": 16},
    {"step": 4, "max_tokens": 9},
]


def staged(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    tree = {"stages": STAGES, "rollout": {"max_tokens": 3}, "algorithm": "dr_grpo", **changes}
    return settings(model, out, **{**tree, "train": {"max_steps": 5, **changes.get("train", {})}})


def test_what_is_in_force_at_a_step() -> None:
    cfg = from_mapping(
        {"model": "m", "stages": STAGES, "dapo": {"overlong_max": 64, "overlong_cache": 16}}
        | {
            "stages": [
                {**stage, "overlong_max": stage["max_tokens"], "overlong_cache": 2}
                for stage in STAGES
            ]
        }
    )
    seen = [
        (
            now.rollout.max_tokens,
            now.rollouts_per_example,
            now.num_groups,
            now.dapo.overlong_max,
            now.dapo.overlong_cache,
        )
        for now in (cfg.at(step) for step in (1, 2, 3, 4, 99))
    ]
    assert seen == [
        (64, 8, 8, 64, 16),
        (6, 8, 2, 6, 2),
        (6, 8, 2, 6, 2),
        (9, 8, 2, 9, 2),
        (9, 8, 2, 9, 2),
    ]
    assert cfg.at(4).train == cfg.train and cfg.at(1) == cfg
    assert from_mapping({"model": "m"}).at(7) == from_mapping({"model": "m"})
    constant = from_mapping({"model": "m", "algorithm": "dr_grpo", "stages": STAGES})
    assert [constant.at(step).objective_options["max_length"] for step in (1, 2, 4)] == [64, 6, 9]


MISTAKES = [
    ("stages: [{step: 1}]", "run.yaml:2: stages[0].step: must be >= 2, got 1"),
    (
        "stages: [{step: 5, max_token: 8}]",
        "run.yaml:2: stages[0].max_token: unknown key (did you mean max_tokens?)",
    ),
    ("stages: [{max_tokens: 8}]", "run.yaml:2: stages[0].step: this key is required"),
    (
        "stages:\n- {step: 5}\n- {step: 5}",
        "run.yaml:4: stages[1].step: stages[1].step (5) must come after step 5",
    ),
    (
        "stages:\n- {step: 5}\n- {step: 9, batch_size: 20}",
        "run.yaml:4: stages[1].batch_size: from stages[1] on: batch_size (20) is not a multiple of "
        "rollouts_per_example "
        "(8)",
    ),
    (
        "rollout: {cache_tokens: 128}\nstages:\n- {step: 5, max_tokens: 100}\n- {step: 9,\n  "
        "max_tokens: 128}",
        "run.yaml:6: stages[1].max_tokens: from stages[1] on: rollout.cache_tokens (128) cannot "
        "hold a prompt and its "
        "response of up to 128 tokens (rollout.max_tokens)",
    ),
    (
        "train: {minibatches: 8}\nstages: [{step: 5, rollouts_per_example: 16}]",
        "run.yaml:3: stages[0].rollouts_per_example: from stages[0] on: the 4 groups of a batch "
        "(batch_size / "
        "rollouts_per_example) cannot be split into 8 equal minibatches",
    ),
    (
        "dapo: {overlong_max: 64, overlong_cache: 8}\nstages: [{step: 5, max_tokens: 128}]",
        "run.yaml:3: stages[0].max_tokens: stages[0] changes max_tokens, so it needs overlong_max "
        "too (dapo.overlong_max "
        "is set)",
    ),
    (
        "batch_size: 20\nstages: [{step: 5, max_tokens: 128}]",  # not said twice
        "run.yaml:2: batch_size: batch_size (20) is not a multiple of rollouts_per_example (8)",
    ),
]


@pytest.mark.parametrize("text, line", MISTAKES)
def test_mistakes_name_the_stage(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).replace(f"{tmp_path}/", "") == line


def test_overrides_the_plan_and_a_run_that_ends_before_a_stage(
    tmp_path: Path, unseen: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nstages: [{step: 4, max_tokens: 128, rollouts_per_example: 16}]\n")
    assert main(["grpo", str(path), "train.max_steps=5", "stages.0.step=3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# from step 3: 4 prompts x 16 rollouts of up to 128 tokens" in out
    assert f"at most {2 * 64 * 64 + 3 * 64 * 128:,} tokens" in out
    assert load(path, ["train.max_steps=3"]).notes[-1] == (
        "stages[0]: step 4 comes after the run's last step, 3: it never begins"
    )


def test_evaluation_takes_the_last_stages_length_unless_told(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nstages: [{step: 4, max_tokens: 128}]\n")
    for words, length in (([], 128), (["--max-tokens", "5"], 5), (["train.max_steps=3"], 64)):
        cfg = eval_command.settings(
            eval_command.parser().parse_intermixed_args([str(path), *words])
        )
        assert cfg.at(cfg.train.max_steps).rollout.max_tokens == length


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(
        staged(
            model,
            tmp_path_factory.mktemp("staged") / "run",
            train={"minibatches": 1},
            rollout={"max_tokens": 3, "weights": "fp32"},
        )
    )


@pytest.mark.slow
def test_a_run_grows(whole: RunResult) -> None:
    assert [
        (
            r["rollout/stage"],
            r["rollout/max_tokens"],
            r["rollout/num_samples"],
            r["rollout/num_groups"],
        )
        for r in whole.records
    ] == [(1, 3, 8, 2), (2, 6, 16, 2), (2, 6, 16, 2), (3, 9, 16, 2), (3, 9, 16, 2)]
    assert all(
        record["rollout/length_max"] == record["rollout/max_tokens"] for record in whole.records
    )
    assert "6 from step 2, 9 from step 4" in report.write_report(whole.folder).read_text()


@pytest.mark.slow
def test_the_constant_reduction_divides_by_the_stages_length(model: Path, tmp_path: Path) -> None:
    """sum / S over sum / (S L), on the same tokens because the weights stand still: the gradients'
    ratio is L."""
    norms = []
    for reduce in ("seq-mean-token-sum", "constant"):
        result = train(
            staged(
                model,
                tmp_path / reduce,
                batch_size=64,
                loss={"reduce": reduce},
                guard={"action": "tighten", "patience": 1, "ess_below": 1.0},
                stages=[{"step": 2, "max_tokens": 6}, {"step": 3, "max_tokens": 9}],
                train={
                    "max_steps": 3,
                    "minibatches": 1,
                    "learning_rate": 1e-12,
                    "weight_decay": 0.0,
                },
            )
        )
        norms.append([record["optim/grad_norm"] for record in result.records])
        assert [record["guard/tightened"] for record in result.records] == [
            1,
            2,
            3,
        ]  # it leaves the length alone
    assert [whole / part for whole, part in zip(*norms, strict=True)] == pytest.approx(
        [3, 6, 9], rel=1e-4
    )


@pytest.mark.slow
def test_resume_on_both_sides_of_a_stage_is_bitwise(
    model: Path, whole: RunResult, tmp_path: Path
) -> None:
    want = fingerprint(whole.folder)
    for step in (1, 2, 3, 4):
        copy_stopped_after(whole.folder, step, tmp_path / f"cut{step}")
        tree = staged(
            model,
            tmp_path / f"cut{step}",
            train={"minibatches": 1},
            rollout={"max_tokens": 3, "weights": "fp32"},
        )
        assert fingerprint(train(tree, resume=True).folder) == want, f"resumed after step {step}"


@pytest.mark.slow
def test_a_stage_may_not_change_on_resume(model: Path, whole: RunResult, tmp_path: Path) -> None:
    copy_stopped_after(whole.folder, 1, tmp_path / "cut")
    tree = staged(
        model,
        tmp_path / "cut",
        train={"minibatches": 1},
        rollout={"max_tokens": 3, "weights": "fp32"},
    )
    said = r"configuration is not that of the checkpoint: stages\[1\].max_tokens was 9 and is 8"
    with pytest.raises(ValueError, match=said):
        train({**tree, "stages": [STAGES[0], {"step": 4, "max_tokens": 8}]}, resume=True)


@pytest.mark.slow
def test_a_stage_that_is_the_run_itself_changes_nothing(model: Path, tmp_path: Path) -> None:
    three = {"max_steps": 3, "lr_scheduler_type": "constant"}
    plain = fingerprint(train(settings(model, tmp_path / "plain", train=three)).folder)
    same = fingerprint(
        train(
            settings(
                model,
                tmp_path / "same",
                train=three,
                stages=[{"step": 2, "max_tokens": 6, "batch_size": 8, "rollouts_per_example": 4}],
            )
        ).folder
    )
    for part in ("final", "model.safetensors", "optimizer.safetensors"):
        assert plain.get(part) == same.get(part)
    assert plain["final"] == same["final"]


def test_the_largest_stage_is_checked_against_the_model_before_anything_runs(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match="the stage that begins at step 4: rollout.max_tokens: 256 leaves no room"
    ):
        train(staged(model, tmp_path / "run", stages=[STAGES[0], {"step": 4, "max_tokens": 256}]))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_length_penalty_follows_its_stage(model: Path, tmp_path: Path) -> None:
    """A response of the full length loses 1 in every stage: L_max moves with the limit."""
    result = train(
        staged(
            model,
            tmp_path / "run",
            dapo={"overlong_max": 3, "overlong_cache": 1},
            stages=[{"step": 2, "max_tokens": 6, "overlong_max": 6}],
            train={"max_steps": 2},
        )
    )
    for step, limit in ((1, 3), (2, 6)):
        for sample in read_rollouts(result.folder / "rollouts" / f"step_{step:06d}.jsonl").samples:
            length = len(sample.rollout.token_ids)
            assert sample.reward == pytest.approx(
                sample.score.reward - max(0, length - (limit - 1))
            )


@pytest.mark.slow
def test_a_file_of_advantages_is_run_once_whatever_the_stages(model: Path, tmp_path: Path) -> None:
    """Else one that is edited meanwhile changes a run that has stages, and no other."""
    file, loads = tmp_path / "mine.py", tmp_path / "loads"
    file.write_text(
        f"open({str(loads)!r}, 'a').write('x')\n\n\ndef mine(rewards, lengths):\n    return rewards\n"
    )
    train(
        settings(
            model,
            tmp_path / "run",
            advantage_function={"import_path": f"{file}:mine"},
            stages=[{"step": 2, "max_tokens": 4}],
            train={"max_steps": 2},
        )
    )
    assert loads.read_text() == "x"
