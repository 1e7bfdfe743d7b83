"""The guard: every alarm on made-up metrics, the bounds by hand, and whole runs that change course
and resume."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import lowroll
from lowroll.config import from_mapping
from lowroll.config.auto import AUTO
from lowroll.metrics.live import LiveView, guard_words
from lowroll.metrics.record import read, reproducible
from lowroll.metrics.report import write_report
from lowroll.objectives.objective import select
from lowroll.quant.formats import get_format
from lowroll.quant.table import EIGHT_BITS, FORMATS, OWN
from lowroll.runs.assembly import engines
from lowroll.runs.assembly.trainer import guard as build_guard
from lowroll.runs.evaluate import evaluate
from lowroll.trainer.guard import (
    ALARMS,
    BASELINE,
    MAX_TIGHTENED,
    Guard,
    GuardSettings,
    rescale,
)
from lowroll.trainer.mismatch_probe import Probe
from lowroll.trainer.step import LearnSettings
from lowroll.transport.rollout_log import read_rollouts
from tests.fixtures.runs import ALWAYS, copy_stopped_after, fingerprint, settings, train

QUIET = {
    "mismatch/ess": 0.99,
    "mismatch/kl_k3": 1e-3,
    "mismatch/weight_max": 1.5,
    "optim/skipped": 0.0,
    "correction/rejected_fraction": 0.01,
    "correction/rejected_sequence_fraction": 0.02,
}
STEADY = {"lr_scheduler_type": "constant", "warmup_steps": 0}


def guard(**changes: Any) -> Guard:
    return Guard(GuardSettings(**changes), "int4")


def rung(watch: Guard, **changes: float) -> set[str]:
    values, _ = watch.look({**QUIET, **changes})
    return {name for name in ALARMS if values[f"guard/{name}"]}


# alarms


@pytest.mark.parametrize(
    ("name", "alarm", "quiet", "loud"),
    [
        ("mismatch/ess", "ess", 0.3, 0.29),
        ("mismatch/weight_max", "ratio", 1e3, 1001.0),
        ("correction/rejected_fraction", "rejected", 0.5, 0.51),
        ("correction/rejected_sequence_fraction", "rejected", 0.5, 0.51),
        ("optim/skipped", "nonfinite", 0.0, 1.0),
        ("mismatch/ess", "nonfinite", 0.3, math.nan),
        ("mismatch/kl_k3", "nonfinite", 1e-3, math.inf),
        ("mismatch/weight_max", "nonfinite", 1.0, math.nan),
    ],
)
def test_alarms_of_a_single_step(name: str, alarm: str, quiet: float, loud: float) -> None:
    assert rung(guard()) == rung(guard(), **{name: quiet}) == set()
    assert rung(guard(), **{name: loud}) == {alarm}
    off = GuardSettings(ess_below=None, ratio_above=None, rejected_above=None, nonfinite=False)
    assert rung(Guard(off, "int4"), **{name: loud}) == set()
    values, told = guard().look({**QUIET, name: loud})
    assert told[0].startswith(f"{alarm}: ") and "guard/fallbacks" in values


def test_the_trend_of_the_kl() -> None:
    """Five steps at 1e-3 (mean 1e-3), then 0.1 a step: the average passes 0.01 with the second
    one."""
    watch = guard()
    for kl in (0.5e-3, 1.5e-3, 1e-3, 1e-3, 1e-3):
        assert rung(watch, **{"mismatch/kl_k3": kl}) == set()
    assert watch.baseline == pytest.approx(1e-3)
    assert rung(watch, **{"mismatch/kl_k3": 0.05}) == set() and watch.average == pytest.approx(
        0.0059
    )
    assert rung(watch, **{"mismatch/kl_k3": 0.1}) == {"kl"} and watch.average == pytest.approx(
        0.01531
    )
    low = guard()  # a growth that stays below the floor is none
    for step in range(200):
        assert rung(low, **{"mismatch/kl_k3": 1e-9 if step < BASELINE else 1.9e-3}) == set()
    missing = guard()
    for step in range(20):
        assert rung(missing, **{"mismatch/kl_k3": 1e-3 if step < 9 else math.nan}) <= {"nonfinite"}
    assert missing.average == pytest.approx(1e-3)
    off = guard(kl_growth=None, kl_above=None)
    assert all(rung(off, **{"mismatch/kl_k3": kl}) == set() for kl in [1e-3] * 9 + [1.0] * 9)


def test_a_run_that_starts_too_far_away_is_told_from_its_first_step_on() -> None:
    """Growth is silent there: SmolLM2 in int4 has 0.6 to 1.4 nats, in nvfp4 0.33, in int8 0.05."""
    for kl, loud in ((1.4, True), (0.33, True), (0.1001, True), (0.1, False), (0.05, False)):
        for bound, expected in ((0.1, loud), (None, False), (2.0, False)):
            watch = guard(kl_above=bound)
            assert all(
                rung(watch, **{"mismatch/kl_k3": kl}) == ({"kl"} if expected else set())
                for _ in range(20)
            )
    _, (told,) = guard().look({**QUIET, "mismatch/kl_k3": 1.4})
    assert told.startswith("kl: mismatch/kl_k3 averages 1.4 nats a token, above 0.1: ")
    assert "rollout.weights {max_kl: 0.02}" in told and "lowroll diagnose" in told
    watch = guard(action="fallback", patience=2)
    assert [rung(watch, **{"mismatch/kl_k3": kl}) for kl in (1.4, 1.4, 0.05)] == [{"kl"}] * 2 + [
        set()
    ]
    assert (watch.weights, watch.average) == (EIGHT_BITS, 0.05)  # other rollouts, another average
    spike = guard()  # one token in a batch is no level: the average of five quiet steps forgets it
    assert [rung(spike, **{"mismatch/kl_k3": kl}) for kl in (*[0.02] * 5, 0.5, 0.02)] == [set()] * 7


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 0.1),
        ({"guard": {"kl_above": None}}, None),
        ({"rollout": {"weights": "int8", "top_p": 0.9}}, None),
        ({"rollout": {"weights": "int8", "top_k": 5}}, None),
        ({"rollout": {"weights": "int8", "min_tokens": 2}}, None),
        ({"noise": {}}, None),
    ],
)
def test_a_distance_that_was_asked_for_is_no_alarm(
    changes: dict[str, Any], bound: float | None
) -> None:
    watch = build_guard(from_mapping({"model": "m", **changes}))
    assert watch is not None and watch.settings.kl_above == bound
    assert watch.settings.kl_growth == 10.0


def test_a_baseline_belongs_to_its_stage() -> None:
    """Noise that the user asked for is no growth; a shift within a stage is; and a falling sigma
    lowers the bound."""
    watch, sigma = guard(action="fallback", kl_above=None), "rollout/noise_sigma"
    for level, noise in ((1e-4, 0.0), (0.2, 5e-2), (0.1, 3e-2), (1e-3, 5e-3)):
        for _ in range(10):
            assert rung(watch, **{"mismatch/kl_k3": level, sigma: noise}) == set()
        assert watch.baseline == pytest.approx(level) and watch.stage == [noise, 0.0]
    for _ in range(20):  # twenty times its own baseline, a tenth of the second one
        rung(watch, **{"mismatch/kl_k3": 0.02, sigma: 5e-3})
    assert (watch.weights, watch.fallbacks) == (EIGHT_BITS, 1)
    longer = guard()
    for stage, level in ((1.0, 1e-4), (2.0, 1e-2)):
        assert all(
            rung(longer, **{"mismatch/kl_k3": level, "rollout/stage": stage}) == set()
            for _ in range(10)
        )
    old = {name: value for name, value in watch.state().items() if name != "stage"}
    with pytest.raises(
        ValueError, match="^guard state: stage is missing"
    ):  # it may not begin a new baseline
        guard().restore(old)


def test_an_action_needs_patience_and_a_streak() -> None:
    watch = guard(action="fallback", patience=3)
    loud = {"mismatch/ess": 0.1}
    for change in (loud, loud, {}, loud, loud):
        rung(watch, **change)
        assert watch.weights == "int4"
    values, told = watch.look({**QUIET, **loud})
    assert (watch.weights, watch.fallbacks, watch.num_seen, values["guard/fallbacks"]) == (
        EIGHT_BITS,
        1,
        0,
        1.0,
    )
    assert told[-1] == "fell back from int4 to int8_rotated rollouts for the following steps"
    told = [line for _ in range(9) for line in watch.look({**QUIET, **loud})[1]]
    assert (watch.weights, watch.fallbacks) == (
        "dense",
        2,
    ) and "nothing is left to fall back to" in told[-1]


def test_the_ladder_leads_up_to_dense() -> None:
    for name in FORMATS:
        above = get_format(name).fallback
        assert (above == "") == get_format(name).dense
        assert above in ("", OWN) or get_format(above).bits > get_format(name).bits
    watch = Guard(GuardSettings(action="fallback", patience=1), "nf4", to_dense=True)
    rung(watch, **{"mismatch/ess": 0.1})
    assert watch.weights == "dense"


def test_tightening_ends() -> None:
    watch = guard(action="tighten", patience=1)
    told = [watch.look({**QUIET, "mismatch/ess": 0.1})[1][-1] for _ in range(MAX_TIGHTENED + 1)]
    assert (
        watch.tightened == MAX_TIGHTENED
        and told[0] == "tightened the objective's bounds (power 0.5)"
    )
    assert "the bounds stay" in told[-1] and watch.weights == "int4"


def test_state_is_all_that_decides() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            **QUIET,
            "mismatch/kl_k3": x,
            "mismatch/ess": 0.2 + x,
            "rollout/noise_sigma": 0.1 ** (i // 8),
        }
        for i, x in enumerate(
            (torch.rand(60, generator=generator, dtype=torch.float64) ** 4).tolist()
        )
    ]
    whole = guard(action="fallback", patience=2)
    seen = []
    for cut, row in enumerate(rows):
        seen.append((whole.look(row), json.dumps(whole.state())))
        again = guard(action="fallback", patience=2)
        again.restore(json.loads(seen[-1][1]))
        if cut + 1 < len(rows):
            values, told = again.look(rows[cut + 1])
            rows_after = (values, told, again.state())
            other = guard(action="fallback", patience=2)
            other.restore(json.loads(seen[-1][1]))
            assert (*other.look(rows[cut + 1]), other.state()) == rows_after
    resumed = guard(action="fallback", patience=2)
    resumed.restore(json.loads(seen[29][1]))
    assert [(resumed.look(row), json.dumps(resumed.state())) for row in rows[30:]] == seen[30:]
    assert whole.fallbacks


# bounds


def test_rescale_by_hand() -> None:
    options = {
        "eps_low": 0.2,
        "eps_high": 0.28,
        "cap": 4.0,
        "dual_clip": None,
        "reduce": "token-mean",
        "eps_negative": 7e-4,
        "veto": 1e-4,
        "token_rs": (0.25, 4.0),
        "xi_cap": None,
        "icepop": None,
        "reject": {"token_k1": (0.25, 2.25), "seq_mean_k3": 0.02},
        "weight": "token",
        "kl_tau": 0.1,
        "sequence_mask_low": 0.0,
    }
    half = rescale(options, 0.5)
    assert half == {
        **options,
        "eps_low": 0.1,
        "eps_high": 0.14,
        "cap": 2.0,
        "eps_negative": 3.5e-4,
        "veto": pytest.approx(1e-2),
        "token_rs": (0.5, 2.0),
        "reject": {"token_k1": (0.5, 1.5), "seq_mean_k3": 0.01},
    }
    assert rescale(options, 1.0) == options
    assert rescale(options, 2.0, ("veto",)) == {**options, "veto": pytest.approx(1e-8)}
    assert rescale({"eps_low": 0.8}, 2.0) == {"eps_low": 1.0}
    for correction in ("acr", "tbpo", "sparse", "aipo", "ipo", "reweight", "decoupled"):
        cfg = from_mapping({"model": "m", "correction": correction})
        tighter = rescale(cfg.objective_options, 0.5)
        LearnSettings(select("grpo", correction), tighter)
        assert tighter != cfg.objective_options and tighter.keys() == cfg.objective_options.keys()


# the first look


def packed(advantages: list[float], behavior: list[float], segments: list[int]) -> Any:
    return SimpleNamespace(
        advantages_N=torch.tensor(advantages),
        behavior_N=torch.tensor(behavior),
        mask_N=torch.ones(len(behavior), dtype=torch.bool),
        segments_N=torch.tensor(segments),
    )


def test_the_share_that_an_objective_would_silence() -> None:
    """w = 1, 4, 1/4, 1 over two responses; advantages 1, 1, -1 and, where it is 0, as if 1."""
    learner_N = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    batch = packed([1, 1, -1, 0], [-2, -2 - math.log(4), -2 + math.log(4), -2], [0, 0, 1, 1])

    def silent(correction: str, **options: Any) -> tuple[float, float]:
        values = Probe(
            batch, learner_N, -learner_N, LearnSettings(select("grpo", correction), options)
        ).silent(options)
        return values["spread/silent_fraction"], values["spread/silent_sequence_fraction"]

    assert silent("acr") == silent("none") == silent("tbpo") == silent("decoupled") == (0, 0)
    assert silent("is") == (0.5, 0)  # rho = 4 is above 1.2, and 1/4 with A < 0 below 0.8
    assert silent("reweight", veto=0.5) == (0.5, 0.5)
    assert silent("reweight", icepop=(0.5, 5.0)) == (0.25, 0)
    assert silent("reweight", normalize=True, reject={"seq_mean_k1": (0.9, 1.1)}) == (1, 1)
    assert silent("aipo", token_mask_high=3.0) == (0.25, 0)
    assert silent("aipo", token_mask_high=3.0, adv_tau=0.0, teacher_tau=1.0, kl_tau=0.1) == (
        0.25,
        0,
    )
    assert silent("ipo", kl_tau=1.0, width=0.2) == (0.25, 0)  # d = 0, .10, -.41, 0
    assert Probe(batch, learner_N, -learner_N, LearnSettings(select("grpo", "acr"))).spread[
        "spread/sequence_std"
    ] == pytest.approx(math.log(2))


def test_a_band_that_is_narrower_than_the_spread_is_named() -> None:
    batch = packed([1, 1], [-2.01, -1.99], [0, 1])
    learner_N = torch.tensor([-2.0, -2.0])
    for correction, said in (("tbpo", True), ("acr", False)):
        cfg = from_mapping({"model": "m", "correction": correction})
        found = Probe(
            batch, learner_N, -learner_N, LearnSettings(select("grpo", correction))
        ).findings(cfg.objective_options)
        assert "std 0.01 a token and 0.01 a sequence" in found[0]
        assert (len(found) == 2) == said
    assert (
        "25.0 times closer"
        in Probe(batch, learner_N, -learner_N, LearnSettings(select("grpo", "tbpo"))).findings(
            {"eps_high": 4e-4}
        )[1]
    )


@pytest.mark.slow
def test_a_first_look_widens_what_auto_chose_and_no_more(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-p keeps less than half of the mass of this untrained model: a veto of 0.6 rejects every
    response."""
    cut = next(row for row in AUTO if row.price.startswith("truncated"))
    rows = tuple(replace(row, sets={"veto": 0.6}) if row is cut else row for row in AUTO)
    monkeypatch.setattr("lowroll.config.auto.AUTO", rows)
    tree = settings(
        model, tmp_path / "auto", rollout={"top_p": 0.4}, train={"max_steps": 2, **STEADY}
    )
    first = train(tree).records[0]
    assert "veto 0.36 in the place of what auto chose" in caplog.text
    assert (
        first["spread/silent_sequence_fraction"]
        == first["correction/rejected_sequence_fraction"]
        == 0
    )
    caplog.clear()
    own = settings(
        model,
        tmp_path / "own",
        rollout={"top_p": 0.4},
        correction="reweight",
        loss={"reweight": {"veto": 0.6}},
        train={"max_steps": 1, **STEADY},
    )
    record = train(own).records[0]
    assert record["spread/silent_fraction"] == record["correction/rejected_fraction"] == 1
    assert "silences 100 % of the tokens" in caplog.text
    copy_stopped_after(tmp_path / "auto", 1, tmp_path / "cut")
    assert fingerprint(
        train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True).folder
    ) == fingerprint(tmp_path / "auto")


# whole runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"forward": "aligned"}},
        {"rollout": {"weights": "nvfp4"}, "noise": {"num_stages": 3}},
    ],
    ids=["dense", "aligned", "noise"],
)
def test_a_run_falls_back_and_resumes_bitwise(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    more = {"max_steps": 6, **STEADY, **changes.get("train", {})}
    tree = settings(
        model,
        tmp_path / "whole",
        **{"rollout": {"weights": "int4"}, **changes, "train": more},
        guard={"action": "fallback", **ALWAYS},
        eval={"interval": 3, "num_examples": 2},
    )
    result = train(tree)
    formats = [
        read_rollouts(result.folder / "rollouts" / f"step_{step:06d}.jsonl")
        .samples[0]
        .rollout.behavior.weights
        for step in range(1, 7)
    ]
    low = tree["rollout"]["weights"]
    assert formats == [low, low, EIGHT_BITS, EIGHT_BITS, "fp32", "fp32"]
    assert [record["guard/fallbacks"] for record in result.records] == [0, 1, 1, 2, 2, 2]
    assert [record["rollout/weight_bits"] for record in result.records] == [
        get_format(f).bits for f in formats
    ]
    kl = [record["mismatch/kl_k3"] for record in result.records]
    if changes == {}:
        assert kl[4] < 1e-9 < kl[2] < kl[0]
    whole = fingerprint(result.folder)
    for step in (1, 3, 5) if changes == {} else (3,):
        copy_stopped_after(tmp_path / "whole", step, tmp_path / f"cut{step}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == whole, f"resumed after step {step}"


@pytest.mark.slow
def test_noise_that_was_asked_for_is_no_reason_to_fall_back(model: Path, tmp_path: Path) -> None:
    """KL grows by far more than kl_growth when the silent stage ends, and the rollouts stay what
    they are."""
    tree = settings(
        model,
        tmp_path / "whole",
        noise={"sigma_start": 5e-2, "sigma_end": 1e-3, "num_stages": 2},
        guard={"action": "fallback", "kl_growth": 4.0, "kl_floor": 1e-9},
        train={"max_steps": 18, **STEADY},
    )
    tree["train"]["learning_rate"] = 1e-5
    records = train(tree).records
    kl = [record["mismatch/kl_k3"] for record in records]
    assert min(kl[9:]) > 8 * max(kl[:9])
    assert all(record["guard/kl"] == record["guard/fallbacks"] == 0 for record in records)
    for step in (9, 16):
        shutil.copytree(tmp_path / "whole", tmp_path / f"cut{step}")
        for later in range(step + 1, 19):
            shutil.rmtree(tmp_path / f"cut{step}" / "checkpoints" / f"step_{later:06d}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == fingerprint(tmp_path / "whole")


@pytest.mark.slow
def test_a_second_format_goes_with_the_first(model: Path, tmp_path: Path) -> None:
    """What falls back from int4 must not go on in int8 for prompts and many rows."""
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "int4", "large_batch_weights": "int8"},
        guard={"action": "fallback", **ALWAYS},
        train={"max_steps": 5, **STEADY},
    )
    result = train(tree)
    formats = [
        read_rollouts(path).samples[0].rollout.behavior.weights
        for path in sorted((result.folder / "rollouts").iterdir())
    ]
    assert formats == ["int4+int8", "int4+int8", EIGHT_BITS, EIGHT_BITS, "fp32"]
    assert result.records[-1]["mismatch/kl_k3"] < 1e-9 < 1e-6 < result.records[0]["mismatch/kl_k3"]


def test_an_evaluation_compares_formats_and_not_their_bulk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    engine = engines.make

    def watched(*args: Any, **options: Any) -> lowroll.Engine:
        made = engine(*args, **options)
        asked.append(made.behavior.weights)
        return made

    monkeypatch.setattr(engines, "make", watched)
    cfg = from_mapping(
        settings(
            model,
            tmp_path / "run",
            rollout={"weights": "int4", "large_batch_weights": "int8"},
            eval={"num_examples": 1},
        )
    )
    evaluate(cfg)
    assert asked == ["fp32", "int4+int8"]


@pytest.mark.slow
def test_lora_falls_back_to_the_learners_own_function(model: Path, tmp_path: Path) -> None:
    """The base stays rounded; dense rollouts of it are the learner up to the order of sums."""
    for forward in ("dense", "aligned"):
        result = train(
            settings(
                model,
                tmp_path / forward,
                rollout={"weights": "w4a8"},
                guard={"action": "fallback", **ALWAYS},
                train={
                    "max_steps": 3,
                    "lora": True,
                    "lora_rank": 4,
                    **STEADY,
                    "forward": forward,
                    "learning_rate": 1e-3,
                },
            )
        )
        assert result.records[2]["guard/fallbacks"] == result.records[1]["guard/fallbacks"] == 1
        assert result.records[2]["mismatch/kl_k3"] < 1e-9
    assert read(tmp_path / "dense")[0]["mismatch/kl_k3"] > 1e-8


@pytest.mark.slow
def test_a_run_tightens_and_resumes_bitwise(model: Path, tmp_path: Path) -> None:
    tree = settings(
        model,
        tmp_path / "whole",
        guard={"action": "tighten", **ALWAYS, "patience": 1},
        loss={"cap": 1.0001},
        train={"max_steps": 4, **STEADY},
    )
    result = train(tree)
    assert [record["guard/tightened"] for record in result.records] == [1, 2, 3, 3]
    assert (
        max(record["correction/weight_max"] for record in result.records[3:])
        <= 1.0001**0.125 + 1e-7
    )
    for step in (1, 3):
        copy_stopped_after(tmp_path / "whole", step, tmp_path / f"cut{step}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == fingerprint(result.folder)


@pytest.mark.slow
def test_a_guard_that_never_fires_changes_nothing(model: Path, tmp_path: Path) -> None:
    rows = {}
    for name, section in (
        ("without", None),
        ("default", {}),
        ("fallback", {"action": "fallback"}),
        ("warns", {"action": "warn", **ALWAYS}),
    ):
        result = train(settings(model, tmp_path / name, guard=section, train={"max_steps": 4}))
        files = {
            file: value
            for file, value in fingerprint(result.folder).items()
            if file not in ("metrics", "state.json")
        }
        rows[name] = (
            files,
            [
                {k: v for k, v in reproducible(r).items() if not k.startswith("guard/")}
                for r in result.records
            ],
        )
        assert any("guard/ratio" in r for r in result.records) == (section is not None)
        assert any(r.get("guard/ratio") for r in result.records) == (name == "warns")
    assert all(row == rows["without"] for row in rows.values())


@pytest.mark.slow
def test_a_guard_may_be_given_an_action_on_resume(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "int4"},
        guard=ALWAYS,
        train={"max_steps": 2, **STEADY},
    )
    assert train(tree).records[-1]["guard/fallbacks"] == 0
    assert "guard: step 2: ratio: mismatch/weight_max is" in caplog.text
    tree["train"]["max_steps"] = 5
    records = train({**tree, "guard": {**ALWAYS, "action": "fallback"}}, resume=True).records
    assert [record["guard/fallbacks"] for record in records] == [0, 0, 0, 1, 1]
    tree["train"]["max_steps"] = 6
    with pytest.raises(ValueError, match="guard: the run went on with int8_rotated rollouts"):
        train({**tree, "guard": None}, resume=True)
    assert (
        train({**tree, "guard": {"action": "warn"}}, resume=True).records[-1]["guard/fallbacks"]
        == 1
    )
    last = read_rollouts(tmp_path / "run" / "rollouts" / "step_000006.jsonl").samples[0]
    assert last.rollout.behavior.weights == EIGHT_BITS


# what people see


def test_the_report_and_the_live_view_tell(tmp_path: Path) -> None:
    steps = [
        {"guard/ess": 0.0, "guard/kl": 0.0, "guard/tightened": 0.0, "guard/fallbacks": 0.0},
        {"guard/ess": 1.0, "guard/kl": 1.0, "guard/tightened": 0.0, "guard/fallbacks": 1.0},
        {"guard/ess": 0.0, "guard/kl": 0.0, "guard/tightened": 0.0, "guard/fallbacks": 1.0},
    ]
    lengths = {"mismatch/length_64/kl_k3": 1e-3, "mismatch/length_128/kl_k3": 2e-3}
    records = [{"step": i + 1, "reward/mean": 0.5, **row, **lengths} for i, row in enumerate(steps)]
    assert [guard_words(record) for record in records] == [
        [],
        ["guard: ess", "guard: kl", "fell back 1x"],
        ["fell back 1x"],
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    page = write_report(tmp_path).read_text()
    assert "<th>step 2</th><td>guard: ess, guard: kl, fell back 1x</td>" in page
    assert "<th>step 3</th><td>fell back 1x</td>" in page and "<th>step 1</th>" not in page
    assert "Mismatch by length" in page and ">128<" in page
    for terminal in (False, True):
        console = Console(record=True, force_terminal=terminal, width=200)
        with LiveView(3, "run", console) as view:
            view.note("spread [of] 0.1")
            view.step(records[1])
        shown = console.export_text()
        assert "spread [of] 0.1" in shown and "guard: ess" in shown and "fell back 1x" in shown
