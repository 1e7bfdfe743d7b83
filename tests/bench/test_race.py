"""The race to a score: what its table says of what the sides did, what they are given, and whole races
of a tiny model, with TRL where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import race, race_lowroll, race_table, race_trl
from bench.experiment import Place
from bench.peer import PeerFailed
from bench.race import Trial, fastest, fitting
from bench.race_table import Reached, reached
from docs import tables
from lowroll.config import from_mapping
from lowroll.runs import demo
from lowroll.types import Prompt
from tests.fixtures.runs import TINY

RECORDS = [
    {"step": 0, "score": 0.25},
    {"step": 1, "seconds": 4.0, "tokens": 100, "reward": 0.5, "kl": 1e-3},
    {"step": 2, "seconds": 2.0, "tokens": 120, "reward": 0.5, "kl": 3e-3, "score": 0.5},
    {"step": 3, "seconds": 3.0, "tokens": 90, "reward": 0.75},
    {"step": 4, "seconds": 1.0, "tokens": 80, "reward": 0.75, "score": 0.375},
]
SMALL = {
    "env": [{"id": "arithmetic", "args": {"template": "{text}", "max_steps": 2, "max_operand": 9}}],
    "batch_size": 8,
    "rollouts_per_example": 4,
    "rollout": {"max_tokens": 6},
    "train": {"learning_rate": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 1},
    "eval": {"num_examples": 3, "interval": 1},
    "sft": {"steps": 1, "batch_size": 2, "num_examples": 4},
}
FAKE = """
import json, sys
asked = json.loads(sys.stdin.readline())
def say(**line): print(json.dumps(line), flush=True)
say(ready=True, about={"setting": asked["setting"], "micro": asked["micro"]})
for step in range(asked["steps"]):
    if MODE == "dies" and asked["interval"]: sys.exit("the peer lost its way")
    say(step=step + 1, seconds=2.0, tokens=30, reward=0.5, score=0.125 * step)
say(end=True, peak_bytes=7, folder=asked["model"])
"""


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("score", "found"),
    [
        (0.25, Reached(0.0, 0, 0)),
        (0.2500001, Reached(6.0, 220, 2)),
        (0.5, Reached(6.0, 220, 2)),
        (0.51, None),
    ],
)
def test_the_first_evaluation_at_or_above_the_score_counts(
    score: float, found: Reached | None
) -> None:
    assert reached(RECORDS, score) == found
    assert reached([], score) is None


def made(side: str, seed: int, records: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """What is stored of a run."""
    curves = race_table.columns(records)
    return {"variant": side, "seed": seed, "curves": curves, "peak_bytes": 2e9, **more}


def test_records_are_read_back_as_they_were_stored() -> None:
    assert race_table.records_of(made("trl", 0, RECORDS)) == RECORDS


def test_the_summary_is_that_of_hand_worked_runs() -> None:
    slower = [{**one, "seconds": 2 * one.get("seconds", 0.0)} for one in RECORDS]
    runs = [
        made("lowroll dense", 0, RECORDS, judged=0.5),
        made("lowroll dense", 1, slower, judged=0.25),
        {"variant": "trl", "seed": 0, "failed": "no wheel"},
    ]
    ours, peer = race_table.summary(runs, 0.5)
    assert ours == (
        "lowroll dense",
        "9 (6 to 12), 2 of 2 runs",
        "220",
        "0.250; 0.375",
        "0.375 (0.250 to 0.500)",
        "2.5; 3",  # of 2, 3, 1, 4, 6, 2: without first steps
        "2.00",
        "2.0e-03",
    )
    assert peer[:2] == ("trl", "not run: no wheel") and len(peer) == len(race_table.HEAD)


def test_the_summary_counts_runs_that_do_not_reach_the_score() -> None:
    runs = [
        made("trl", 0, RECORDS, judged=0.5),
        made("trl", 1, RECORDS[:2], judged=0.5),
        {"variant": "trl", "seed": 2, "failed": "lost"},
    ]
    (row,) = race_table.summary(runs, 0.5)
    assert row[1] == "6, 1 of 3 runs"
    (never,) = race_table.summary(runs, 0.9)
    assert never[1] == "-, 0 of 3 runs" and never[2] == "-"


def test_the_documents_have_the_race_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "run `python -m bench.race`" in tables.race()
    machine = {"device": "cpu", "cpu": "a processor", "threads": 2, "torch": "2.13"}
    about = {"date": "2026-11-27", "machine": machine, "steps": 4, "score": 0.5, "before": 0.25}
    trials = [Trial("fp32", 8, 3.0)._asdict(), Trial("bf16", 8, None, "no kernel")._asdict()]
    runs = [
        made("lowroll dense", 0, RECORDS, judged=0.5, about={"dtype": "float32", "threads": 2}),
        {"variant": "trl", "seed": 0, "failed": "no wheel"},
    ]
    whole = {**about, "seconds": 60, "trials": trials, "runs": runs}
    (tmp_path / "race.json").write_text(json.dumps(whole))
    shown = tables.race()
    assert "a processor, 2 threads" in shown and "| seconds to 0.5 |" in shown
    assert "| lowroll dense (dtype float32) | 6, 1 of 1 runs | 220 |" in shown
    assert "| trl | not run: no wheel |" in shown
    assert "`fp32`, 8 rows a pass: 3 s a step" in shown
    assert "`bf16`, 8 rows a pass: not run: no kernel" in shown
    shape = {**whole, "warm_start": {"shape": "qwen2.5-1.5b"}}
    (tmp_path / "race-gpu-qwen2.5-1.5b.json").write_text(json.dumps(shape))
    both = tables.race()
    assert both.count("| seconds to 0.5 |") == 2 and "qwen2.5-1.5b, random weights" in both


def test_another_side_is_first_in_each_seed() -> None:
    sides = ["a", "b", "c"]
    assert [race.turn(sides, seed)[0] for seed in range(4)] == ["a", "b", "c", "a"]
    assert sorted(race.turn(sides, 2)) == sides


def test_a_run_of_lowroll_is_timed_without_its_evaluations() -> None:
    records = [
        {
            "step": 1,
            "time/step": 9.0,
            "time/eval": 4.0,
            "time/generate": 3.0,
            "time/learn": 1.5,
            "time/publish": 0.5,
            "rollout/tokens": 50.0,
            "reward/mean": 0.5,
            "mismatch/kl_k3": 0.25,
            "eval/e/reward_before": 0.125,
        },
        {"step": 2, "time/step": 3.0, "rollout/tokens": 40.0, "reward/mean": 1.0},
        {
            "step": 3,
            "time/step": 3.0,
            "time/eval": 1.0,
            "rollout/tokens": 40.0,
            "reward/mean": 1.0,
            "eval/e/reward": 0.75,
        },
    ]
    unknown = {"generate": None, "learn": None, "publish": None}
    assert list(race_lowroll.lines(records, "e")) == [
        {"step": 0, "score": 0.125},
        {"step": 1, "seconds": 5.0, "tokens": 50, "reward": 0.5, "kl": 0.25}
        | {"generate": 3.0, "learn": 1.5, "publish": 0.5},
        {"step": 2, "seconds": 3.0, "tokens": 40, "reward": 1.0, "kl": None, **unknown},
        {"step": 3, "seconds": 2.0, "tokens": 40, "reward": 1.0, "kl": None, **unknown}
        | {"score": 0.75},
    ]


def test_k3_is_zero_for_equal_probabilities_and_the_formula_elsewhere() -> None:
    same = torch.tensor([-1.0, -2.0])
    assert not race_trl.k3(same, same).any()
    half = race_trl.k3(torch.tensor([0.5]).log(), torch.tensor([1.0]).log())
    assert float(half) == pytest.approx(0.5 - float(torch.tensor(0.5).log()) - 1)


# -- TRL's settings --------------------------------------------------------------------------------


def test_a_setting_gets_the_largest_micro_batch_that_fits() -> None:
    def attempt(setting: str, micro: int) -> float:
        if setting == "bf16":
            raise PeerFailed("no such kernel")
        if micro > 4:
            raise PeerFailed("CUDA out of memory")
        return 3.0

    trials = list(fitting(attempt, "bf16 vllm", 16))
    assert [(one.micro, one.seconds) for one in trials] == [(16, None), (8, None), (4, 3.0)]
    (lost,) = fitting(attempt, "bf16", 16)
    assert lost.seconds is None and lost.failed == "no such kernel"
    best = fastest([lost, *trials, Trial("fp32", 16, 4.0)])
    assert best == Trial("bf16 vllm", 4, 3.0)
    with pytest.raises(PeerFailed, match="bf16, 16 rows: no such kernel"):
        fastest([lost])


def test_a_device_has_its_own_settings() -> None:
    assert race.common("cpu", {}) == race.SETTINGS
    assert race.common("cuda", {"batch_size": 8})["batch_size"] == 8
    assert race.common("cuda", {})["rollout"] == race.SETTINGS["rollout"]
    assert race.common("cuda", {})["batch_size"] > race.SETTINGS["batch_size"]
    assert race.candidates("cpu") == ["fp32", "bf16"]
    assert race.candidates("cuda") == ["bf16", "bf16 vllm"]


def test_vllm_is_found_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    monkeypatch.setenv("LOWROLL_VLLM_PATH", "unpacked")
    place = race.Launcher("cuda", "python")
    there, without = place.environment(True), place.environment(False)
    assert there["PYTHONPATH"].split(":") == ["unpacked", "mine"]
    assert there["VLLM_USE_FLASHINFER_SAMPLER"] == "1"
    assert there["HF_HUB_OFFLINE"] == without["HF_HUB_OFFLINE"] == "1" and len(without) == 1


def test_trl_receives_what_the_configuration_says(subject: Path, tmp_path: Path) -> None:
    change = {
        **SMALL,
        "batch_size": 64,
        "loss": {"eps_low": 0.1, "eps_high": 0.3},
        "train": {"betas": [0.8, 0.9], "eps": 1e-7, "minibatches": 2},
    }
    tree = race.settings("trl", 3, Place(5, subject.parent, "cpu", change))
    order = race.plain(from_mapping(tree), tmp_path) | {"micro": 8, "device": "cuda"}
    found = race_trl.arguments(order, race_trl.SETTINGS["bf16 vllm"])
    assert found["max_steps"] == 10 and found["gradient_accumulation_steps"] == 4
    assert (found["epsilon"], found["epsilon_high"], found["beta"]) == (0.1, 0.3, 0.0)
    assert (found["adam_beta1"], found["adam_beta2"], found["adam_epsilon"]) == (0.8, 0.9, 1e-7)
    assert (found["generation_batch_size"], found["num_generations"]) == (64, 4)
    assert found["max_completion_length"] == 6 < found["vllm_max_model_length"]
    assert found["use_vllm"] and found["bf16"] and not found["use_cpu"]
    assert not found["shuffle_dataset"] and not found["gradient_checkpointing"]


# -- what both sides are given ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model to start from."""
    return demo.build_model(tmp_path_factory.mktemp("race") / "model", 0, TINY)


def test_prompts_are_those_of_the_run_in_its_order(subject: Path, tmp_path: Path) -> None:
    place = Place(3, subject.parent, "cpu", SMALL)
    tree = race.settings("trl", 5, place)
    order = race.plain(from_mapping(tree), tmp_path / "trl")
    train, test = (race_trl.read(order[split]) for split in ("train", "test"))
    assert [row.prompt.id for row in train] == [f"train/{i}" for i in range(3 * 2)]
    assert [row.prompt.id for row in test] == [f"test/{i}" for i in range(3)]
    longest = max(len(row.ids) for row in train + test)
    assert order["fields"]["vllm_max_model_length"] == longest + 6 and order["rates"] == [
        1e-3,
        1e-3,
        5e-4,
    ]
    other = race.plain(from_mapping(race.settings("trl", 6, place)), tmp_path / "other")
    assert race_trl.read(other["train"]) != train


def test_prompts_with_other_token_ids_are_refused() -> None:
    row = race_trl.RacePrompt(Prompt("train/0", "e", [{"role": "user", "content": "1"}]), [1, 2])
    says = lambda ids: SimpleNamespace(apply_chat_template=lambda *_, **__: {"input_ids": ids})
    race_trl.check_ids(says([1, 2]), [row])
    with pytest.raises(ValueError, match="train/0: it has other token ids"):
        race_trl.check_ids(says([1, 3]), [row])


# -- whole races -----------------------------------------------------------------------------------


def raced(subject: Path, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """The status of a race of two steps, and what it stored."""
    options = ["--steps", "2", "--device", "cpu", "--subject", str(subject), "--out", str(out)]
    status = race.main([*options, "--change", json.dumps(SMALL), *words])
    stored: dict[str, Any] = json.loads((out / "race.json").read_text())
    return status, stored


def faked(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str = "") -> None:
    """Put a fake in TRL's place."""
    script, real = folder / "peer.py", race.Launcher.command
    script.write_text(f"MODE = {mode!r}\n{FAKE}")
    fake = [sys.executable, str(script)]
    monkeypatch.setattr(
        race.Launcher, "command", lambda self, side: fake if side == "trl" else real(self, side)
    )


@pytest.mark.slow
def test_a_race_keeps_every_record_of_both_sides(
    subject: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(tmp_path, monkeypatch)
    status, stored = raced(subject, tmp_path, "--only", "trl", "lowroll int8_rotated")
    assert status == 0
    ours, peer = stored["runs"]
    assert ours["variant"] == "lowroll int8_rotated" and peer["variant"] == "trl"
    assert ours["curves"]["step"] == [0, 1, 2] and peer["curves"]["step"] == [1, 2]
    assert all(score is not None for score in ours["curves"]["score"])
    assert all(seconds > 0 for seconds in ours["curves"]["seconds"][1:])
    assert ours["about"]["rollouts"] == "int8_rotated" and ours["peak_bytes"] > 1e7
    assert peer["curves"]["seconds"] == [2.0, 2.0] and peer["peak_bytes"] == 7
    assert peer["judged"] == stored["before"]  # the fake ends with the model that it began with
    assert [one["setting"] for one in stored["trials"]] == ["fp32", "bf16"]
    assert peer["about"]["micro"] == 8


@pytest.mark.slow
def test_runs_that_are_stored_are_not_made_again(
    subject: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race that failed in part is completed; another device, model or setting begins anew."""
    faked(tmp_path, monkeypatch, "dies")
    words = ["--peer-setting", "bf16", "--only", "trl", "lowroll dense"]
    status, first = raced(subject, tmp_path, *words)
    assert status == 1 and [one["setting"] for one in first["trials"]] == ["bf16"]
    kept = first["runs"][0]
    assert kept["variant"] == "lowroll dense"
    faked(tmp_path, monkeypatch)
    monkeypatch.setattr(race, "fitting", None)  # no setting is tried again
    status, then = raced(subject, tmp_path, *words)
    assert status == 0 and then["runs"][0] == kept and then["trials"] == first["trials"]
    assert then["runs"][1]["variant"] == "trl" and "failed" not in then["runs"][1]
    with pytest.raises(ValueError, match=r"its runs of TRL have .*\('bf16', 8\).*\('fp32', 8\)"):
        race.refuse_two_settings(then["runs"], [Trial("fp32", 8, 1.0)])
    about = {**then, "machine": {**then["machine"], "device": "1 x another"}}
    path = tmp_path / "race.json"
    assert race.earlier(path, then)["runs"] == then["runs"]
    for other in (about, {**then, "before": 0.9}, {**then, "steps": 3}):
        assert race.earlier(path, other) == {"runs": [], "trials": [], "seconds": 0}


@pytest.mark.slow
def test_a_peer_that_fails_is_stored_with_the_reason(
    subject: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faked(tmp_path, monkeypatch, "dies")
    status, stored = raced(subject, tmp_path, "--only", "trl")
    (run,) = stored["runs"]
    assert status == 1 and "the peer lost its way" in run["failed"] and "curves" not in run


@pytest.mark.slow
def test_a_race_begins_with_random_weights_of_a_shape(
    subject: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tokenizer that knows fewer tokens than the shape has, on a task whose reward is a matter
    of degree."""
    wide = {**race.SHAPES["smollm2-135m"], "hidden_size": 32, "intermediate_size": 64}
    wide |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    wide |= {"vocab_size": 512}
    monkeypatch.setitem(race.SHAPES, "smollm2-135m", wide)
    faked(tmp_path, monkeypatch)
    options = ["--steps", "1", "--device", "cpu", "--out", str(tmp_path), "--model", str(subject)]
    options += ["--shape", "smollm2-135m", "--peer-rows", "4"]
    options += ["--change", json.dumps({key: SMALL[key] for key in SMALL if key != "env"})]
    assert race.main([*options, "--only", "trl", "lowroll dense"]) == 0
    stored = json.loads((tmp_path / "race-smollm2-135m.json").read_text())
    assert stored["warm_start"]["shape"] == "smollm2-135m"
    assert {one["micro"] for one in stored["trials"]} == {4}
    ours = next(run for run in stored["runs"] if run["variant"] == "lowroll dense")
    assert ours["curves"]["tokens"][1] == 8 * 6
    assert 0 < ours["curves"]["reward"][1] < 1


@pytest.mark.slow
def test_sft_makes_the_subject(subject: Path, tmp_path: Path) -> None:
    found = race.warm_start(Place(1, tmp_path, "cpu", SMALL), str(subject))
    assert found["sft_loss"] > 0 and (tmp_path / "model" / "model.safetensors").is_file()


def test_an_unknown_setting_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        race.main(["--peer-setting", "fp64"])
    assert "--peer-setting: invalid choice: 'fp64'" in capsys.readouterr().err


@cache
def trl_python() -> str | None:
    """The Python that has TRL: of LOWROLL_TRL_PYTHON, of `make trl`, or this one."""
    named = os.environ.get("LOWROLL_TRL_PYTHON") or race.PEER_PYTHON
    for python in (str(named), sys.executable):
        words = [python, "-c", "import importlib.metadata as m; m.version('trl')"]
        if Path(python).exists() and not subprocess.run(words, capture_output=True).returncode:
            return python
    return None


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_trl_races(setting: str, subject: Path, tmp_path: Path) -> None:
    if (python := trl_python()) is None:
        pytest.skip("needs TRL: `make trl`, or LOWROLL_TRL_PYTHON")
    words = ["--only", "trl", "--peer-python", python, "--peer-setting", setting]
    status, stored = raced(subject, tmp_path, *words)
    (run,) = stored["runs"]
    assert status == 0, run
    curves = run["curves"]
    assert curves["step"] == [0, 1, 2] and all(score is not None for score in curves["score"])
    assert all(8 <= tokens <= 8 * 6 for tokens in curves["tokens"][1:])
    assert 0 <= curves["kl"][1] < (1e-6 if setting == "fp32" else 1e-2)
    assert run["about"]["setting"] == setting and run["peak_bytes"] > 1e7
