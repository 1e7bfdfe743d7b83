"""`--dry-run` fails when the run would, in a few seconds, writes nothing, and its memory plan is
that of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from lowroll.cli.main import main
from lowroll.config import from_mapping, load
from lowroll.runs.preflight import look_at_run

WORDS = {"template": "{text}", "max_words": 1, "min_len": 3, "max_len": 5}


def tree(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "output_dir": str(out),
        "device": "cpu",
        "score": {"workers": 1},
        "env": [{"id": "reverse-text", "args": WORDS}],
        "batch_size": 8,
        "rollouts_per_example": 4,
        "rollout": {"max_tokens": 6},
        **changes,
    }


SCORER = """from lowroll.envs import Environment
from lowroll.types import Score


class Env(Environment):
    def prompt(self, index, split="train"):
        return self.ask(f"task {index}", index, split, {})

    def score(self, prompt, text):
        return %s

    def gold(self, prompt):
        return "yes"

    def perturbed(self, prompt):
        return "no"
"""


@pytest.mark.slow
def test_a_dry_run_fails_where_the_run_would(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text(SCORER % "1 / 0")
    Path("strict.py").write_text(SCORER % "Score(0.25)")
    Path("silent.py").write_text(
        (SCORER % "None").replace('return "yes"', "raise NotImplementedError")
    )
    Path("old").mkdir()
    Path("old/metrics.jsonl").write_text('{"step": 1}\n')
    Path("old/config.yaml").write_text(
        "# lowroll grpo: the settings of the run in this folder\nmodel: m\n"
    )
    Path("run.yaml").write_text(json.dumps(tree(model, tmp_path / "out")))
    before = sorted(tmp_path.rglob("*"))

    def errors(*overrides: str) -> str:
        assert main(["grpo", "run.yaml", *overrides, "--dry-run"]) == 2, overrides
        out, err = capsys.readouterr()
        assert "\n# model " in out  # the plan is printed all the same
        return "".join(line + "\n" for line in err.splitlines() if line.startswith("error: "))

    two = errors(
        "env.0.id=reverse_text", "env.0.args={}", "train.lora=true", "train.lora_target_modules=[x]"
    )
    assert "unknown environment 'reverse_text' (did you mean 'reverse-text'?)" in two
    assert "error: lora_target_modules: expected" in two  # every problem in one look
    assert "error: score.workers: 100000 is more than the " in errors("score.workers=100000")
    assert "max_wordz" in errors("env.0.args={max_wordz: 2}")
    scorer = errors("env=[{id: raises.py}]")
    assert (
        "raises.py': its scorer fails on 8 of 8 of its own answers" in scorer
        and "ZeroDivisionError" in scorer
    )
    assert "neither a folder, nor a hub id" in errors("model=nowhere")
    assert "train.tokens_per_microbatch: 8 tokens are too few: the" in errors(
        "train.tokens_per_microbatch=8"
    )
    assert "leaves no room for a prompt" in errors(
        "rollout.max_tokens=4096", "train.tokens_per_microbatch=8192"
    )
    crowded = errors("rollout.cache_tokens=1000000000000")
    assert "memory: the run needs" in crowded and "with rollout.cache_tokens: null" in crowded
    assert "already holds a run; continue it with --resume" in errors("output_dir=old")
    assert "no CUDA device" in errors("device=cuda") or torch.cuda.is_available()
    assert "score.workers: 100000 is more than" in errors("score.workers=100000")
    assert "output_dir: run.yaml/out cannot be written: " in errors("output_dir=run.yaml/out")
    assert "none.py does not exist" in errors("advantage_function={import_path: none.py:mine}")
    assert "8 of 8 responses (invalid: " in errors(
        "env=[{id: silent.py}]"
    )  # though it knows no answer of its own
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    try:
        assert "model.safetensors: damaged" in errors()
    finally:
        weights.write_bytes(whole)
    assert main(["grpo", "run.yaml", "env=[{id: strict.py}]", "--dry-run"]) == 0
    assert "8 of 8 of its own answers score below 1" in capsys.readouterr().err
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts
    ] == before


def test_sft_has_one_too(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        json.dumps(
            tree(model, tmp_path / "out", sft={"num_examples": 16, "steps": 3, "batch_size": 4})
        )
    )
    assert main(["sft", str(path), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# the run would start")
    assert "# 16 demonstrations of" in out and "3 steps of 4" in out and "# memory on cpu: " in out
    (tmp_path / "again.yaml").write_text(out)
    assert load(tmp_path / "again.yaml").sft.steps == 3
    (tmp_path / "bad.jsonl").write_text('{"messages": [1]}\n')
    for override, told in (
        ("sft.data=nowhere.jsonl", "sft.data: nowhere.jsonl: no such file"),
        (f"sft.data={tmp_path}/bad.jsonl", "bad.jsonl:1: messages[0]"),
        ("env.0.id=reverse_text", "did you mean 'reverse-text'?"),
    ):
        assert main(["sft", str(path), override, "--dry-run"]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_of_the_hub_is_looked_at_without_its_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "snapshot"
    shutil.copytree(model, small, ignore=shutil.ignore_patterns("*.safetensors"))
    asked: list[list[str]] = []

    def snapshot_download(
        name: str, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert not local_files_only
        asked.append(allow_patterns)
        return str(small)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr("lowroll.model.folder.why_hub_is_silent", lambda: "")
    found = look_at_run(from_mapping(tree(Path("owner/name"), tmp_path / "out")))
    assert found.problems == [] and not any("fails on" in note for note in found.notes), found.notes
    assert found.notes == ["model: owner/name is a hub id; its weights are not looked at"]
    assert any(line.startswith("memory on cpu: ") for line in found.lines)
    assert asked and all("*.safetensors" not in patterns for patterns in asked)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"algorithm": "ppo", "rollouts_per_example": 1, "critic": {"model": "nowhere"}},
            "critic.model: 'nowhere' is neither a folder",
        ),
        (
            {
                "correction": "aipo",
                "loss": {"aipo": {"teacher_tau": 0.1}},
                "train": {"teacher": "nowhere"},
            },
            "train.teacher: 'nowhere' is",
        ),
        (
            {"eval": {"interval": 1, "env": {"id": "gsm8k", "args": {"path": "only.jsonl"}}}},
            "has no test split",
        ),
        (
            {
                "eval": {"interval": 1, "env": {"id": "chain"}},
                "rollout": {"max_tokens": 6, "max_model_len": 30},
            },
            "rollout.max_model_len: 30 tokens are too few: the shortest of the first 64 held-out "
            "prompts of env 'chain'",
        ),
        ({"env": {"id": "gsm8k", "args": {"path": "bad.jsonl"}}}, "bad.jsonl:1: "),
    ],
)
def test_what_a_run_reads_beside_its_model(
    changes: dict[str, Any], told: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("only.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    Path("bad.jsonl").write_text("{}\n")
    (problem,) = look_at_run(from_mapping(tree(model, tmp_path / "out", **changes))).problems
    assert told in problem


IDS = """def right(completions, completion_ids, trainer_state, **rest):
    assert len(completion_ids) == len(completions) and all(completion_ids), completion_ids
    assert trainer_state.max_steps == 3
    return [1.0 for _ in completions]
"""


def test_a_reward_function_is_tried_with_token_ids(model: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(IDS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abc", "answer": "cba"}\n' * 8)
    settings = tree(model, tmp_path / "out", train={"max_steps": 3})
    del settings["env"]
    settings |= {
        "data": {"path": str(tmp_path / "rows.jsonl"), "held_out": 0},
        "reward_funcs": [f"{tmp_path / 'rewards.py'}:right"],
    }
    found = look_at_run(from_mapping(settings))
    assert found.problems == [] and not any("fails on" in note for note in found.notes), found.notes
