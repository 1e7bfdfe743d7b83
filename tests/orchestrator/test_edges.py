"""The orchestrator at its edges: every bound of its settings from both sides, defaults, alarms,
clocks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from lowroll.orchestrator import loop as orchestrator_loop
from lowroll.orchestrator import prompt_source as orchestrator_source
from lowroll.orchestrator.alarms import alarms
from lowroll.orchestrator.errors import ErrorWindow, InvalidRollout, ScoringFailed, describe
from lowroll.orchestrator.evaluate import check_errors
from lowroll.orchestrator.groups import check_group, credit
from lowroll.orchestrator.ledger import Ledger
from lowroll.orchestrator.prompt_source import PromptDraw, PromptSource
from lowroll.orchestrator.settings import Settings
from lowroll.orchestrator.staleness import require_fresh
from lowroll.orchestrator.temperature import TemperatureSchedule
from lowroll.types import (
    BehaviorTag,
    Group,
    PolicySpan,
    Prompt,
    Request,
    Rollout,
    Sample,
    Score,
    ScoreError,
)
from tests.fixtures.fakes import FakeEnv, FakeTokenizer, build


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("reward/zero_std_fraction", 0.8),
        ("rollout/truncated_fraction", 0.8),
        ("reward/error_rate", 0.02),
    ],
)
def test_an_alarm_is_what_lies_above_its_limit(name: str, limit: float) -> None:
    assert alarms({name: limit}) == [] and alarms({}) == []
    (line,) = alarms({name: limit + 1e-6})
    assert line.startswith(f"{name} is {limit:g} (alarm above {limit:g}): ")


def test_a_schedule_of_two_steps_has_its_start_and_its_end() -> None:
    for shape in ("linear", "cosine"):
        schedule = TemperatureSchedule(1.0, 0.5, 2, shape)  # type: ignore[arg-type]
        assert (schedule(0), schedule(1), schedule(2)) == (1.0, 0.5, 0.5)
        assert TemperatureSchedule(1.0, 0.5, 0, shape)(0) == 0.5  # type: ignore[arg-type]


def test_the_seconds_of_a_step_add_up_over_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(start=100)
    monkeypatch.setattr(orchestrator_loop.time, "monotonic", lambda: float(next(clock)))
    assert {
        name: seconds for name, seconds in build().step(1).stats.items() if name.startswith("time/")
    } == {"time/generate": 1.0, "time/score": 1.0}
    batch = build(
        Settings(8, 4, dynamic_sampling=True, max_rounds=3),
        rule=lambda prompt, text: 0.5 if prompt.info["index"] < 1 else len(text),
    ).step(1)
    assert (
        batch.stats["rollout/rounds"]
        == 2
        == batch.stats["time/generate"]
        == batch.stats["time/score"]
    )


# -- what an engine may return


def answer(**changes: object) -> tuple[PromptDraw, Group]:
    request = Request([1, 2], n=2, max_tokens=3, id="r")
    rollout = Rollout(
        [5, 6, 7], [-0.1, 0.0, -3.0], "length", BehaviorTag((PolicySpan(4, "d"),), "int8")
    )
    other = replace(rollout, **changes)
    return PromptDraw(Prompt(id="p", env="a", messages=[]), request), Group(
        request, [rollout, other]
    )


def test_a_whole_group_passes_and_a_certain_token_may_round_above_0() -> None:
    for changes in (
        {},
        {"logprobs": [-0.1, 1e-4, -3.0]},
        {"token_ids": [], "logprobs": [], "finish_reason": "abort"},
        {"token_ids": [5], "logprobs": [-1e30], "finish_reason": "stop"},
    ):
        check_group(*answer(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": [-0.1, 1.1e-4, -3.0]}, "sample 1 token 1: log-prob 0.00011"),
        ({"logprobs": [-0.1, -math.inf, -3.0]}, "sample 1 token 1: log-prob -inf"),
        ({"logprobs": [-0.1]}, "3 tokens but 1"),
        ({"token_ids": [5] * 4, "logprobs": [-1.0] * 4}, "4 tokens, more than max_tokens=3"),
        ({"token_ids": [], "logprobs": []}, "no tokens but finish reason 'length'"),
        ({"behavior": BehaviorTag((), "int8")}, "names no policy version"),
    ],
)
def test_a_spoiled_rollout_is_named(changes: dict, says: str) -> None:
    with pytest.raises(InvalidRollout, match=f"request 'r'.*{says}"):
        check_group(*answer(**changes))


def test_a_round_s_tokens_are_of_the_learner_s_version() -> None:
    draw, answered = answer()
    samples = [Sample(draw.prompt, [1, 2], one, "", Score(0.0)) for one in answered.rollouts]
    group = credit(samples, Settings(8, 4), draw.request)
    require_fresh(group, 4)
    for version in (3, 5):
        with pytest.raises(
            InvalidRollout, match=f"version 4 while the learner is at {version}, and at most 0"
        ):
            require_fresh(group, version)


# -- errors of scorers


def test_the_error_rate_is_judged_from_so_many_scores_on_and_above_the_limit_alone() -> None:
    good, bad = Score(1.0), ScoreError("exception", "boom")
    ErrorWindow(0.5, 4, 4).check([bad, bad, bad])  # too few to judge
    ErrorWindow(0.5, 4, 4).check([bad, bad, good, good])  # at the limit
    with pytest.raises(ScoringFailed, match="3 of the last 4 scores are errors"):
        ErrorWindow(0.5, 4, 4).check([bad, bad, bad, good])
    window = ErrorWindow(0.25, 4, 6)
    window.check([good] * 6)
    window.check([bad])
    assert window.state() == "000001"
    window.check([good] * 5)
    assert window.state() == "100000"
    window.check([good])
    assert window.state() == "000000"
    short = ErrorWindow(0.25, 4, 2)  # never shorter than what it judges by
    short.check([good] * 5)
    assert short.state() == "0000"
    with pytest.raises(ValueError, match="a string of 0 and 1"):
        window.restore("012")


def test_errors_among_too_few_scores_are_told_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Score(1.0), ScoreError("exception", "boom")
    window = ErrorWindow(0.25, 4, 6)
    window.check([good, good])
    assert window.unjudged() == ""
    window.check([bad])
    assert window.unjudged() == (
        "1 of all 3 scores are errors; score.max_error_rate (25.0%) was not applied, as it is "
        "judged from 4 scores on"
    )
    window.check([good])
    assert window.unjudged() == ""  # it was judged
    check_errors([good] * 40 + [bad] * 9)
    assert "evaluation: 9 of all 49 scores are errors" in caplog.text
    caplog.clear()
    check_errors([good] * 99 + [bad])
    assert caplog.text == ""


def test_what_does_not_apply_is_no_error() -> None:
    good, bad = Score(1.0), ScoreError("exception", "boom")
    nothing = ScoreError("inapplicable", "None")
    window = ErrorWindow(0.25, 4, 6)
    window.check([nothing] * 9 + [good, good, good, nothing])
    assert window.state() == "000"
    with pytest.raises(ScoringFailed, match="2 of the last 5 scores are errors"):
        window.check([bad, nothing, bad])
    check_errors([nothing] * 60)
    check_errors([nothing] * 60 + [good])
    with pytest.raises(ScoringFailed, match="all 1 scores of the evaluation are errors"):
        check_errors([nothing] * 60 + [bad])


def test_errors_are_listed_by_how_often_and_then_by_name() -> None:
    errors = [ScoreError(kind, f"{kind}\n") for kind in ("timeout", "memory", "crash", "memory")]
    assert describe(errors) == "2 memory, 1 crash, 1 timeout; first: timeout: timeout\\n"
    assert describe([ScoreError("crash", "x" * 501)]).endswith(": " + "x" * 500)


# -- prompts


def test_prompts_at_the_limit_pass_and_too_many_longer_ones_blame_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orchestrator_source, "MAX_PASSED_OVER", 3)

    class Env(FakeEnv):
        def prompt(self, index: int, split: str = "train") -> Prompt:
            self.content = "x" * (5 if index in long else 4)
            return super().prompt(index, split)

    def draws(count: int) -> tuple[list[PromptDraw], Ledger]:
        ledger = Ledger()
        return PromptSource(
            Settings(4, 2, max_prompt_tokens=4), {"a": Env("a")}, FakeTokenizer()
        ).draw(ledger, count, 1.0), ledger

    long = {0, 1, 3, 4}  # never three in a row
    drawn, ledger = draws(3)
    assert [draw.prompt.info["index"] for draw in drawn] == [2, 5, 6]
    assert (ledger.draws, ledger.cursors, ledger.planned, ledger.passed_over) == (7, {"a": 7}, 3, 4)
    long = {1, 2, 3}
    with pytest.raises(
        ValueError, match="max_prompt_tokens: 3 prompts in a row have more than 4 tokens"
    ):
        draws(2)


def test_a_ledger_takes_counts_and_nothing_else() -> None:
    state = {
        "draws": 5,
        "cursors": {"a": 5},
        "planned": 4,
        "consumed": 3,
        "dropped": 1,
        "passed_over": 1,
        "duplicates": 2,
        "pooled": 1,
        "open": [],
        "pools": {"easy": {"a": ["x", "w"]}, "hard": {}},
    }
    assert Ledger.of(state, {"a"}).state() == state
    zero = dict.fromkeys(state, 0) | {"cursors": {"a": 0}, "open": [], "pools": state["pools"]}
    waits = {"env": "a", "position": 3, "step": 1, "temperature": 0.5}
    owed = state | {"open": [waits], "dropped": 0}
    assert Ledger.of(owed, {"a"}).state() == owed
    assert Ledger.of(zero, {"a"}).state() == zero
    for change, says in (
        ({"draws": -1}, "ledger.draws"),
        ({"draws": True}, "ledger.draws"),
        ({"draws": 1.0}, "draws"),
        ({"cursors": {"a": -1}}, "ledger.cursors.a"),
        ({"cursors": {"b": 1}}, "ledger.cursors"),
        ({"cursors": 3}, "ledger.cursors"),
        ({"planned": 5}, "ledger.planned"),
        ({"duplicates": None}, "ledger.duplicates"),
        ({"open": [waits]}, "ledger.planned: expected consumed . dropped . open"),
        ({"open": 3}, "ledger.open: expected a list"),
        ({"open": [3]}, "ledger.open: expected"),
        ({"open": [waits | {"env": "b"}]}, "ledger.open: no environment named 'b'"),
        ({"open": [waits | {"position": -1}]}, "ledger.open.position"),
        ({"open": [waits | {"temperature": 0}]}, "ledger.open.temperature"),
        ({"pools": {"easy": {}}}, "ledger.pools"),
        ({"pools": {"easy": {"a": [3]}, "hard": {}}}, "ledger.pools"),
    ):
        with pytest.raises(ValueError, match=says):
            counts = {"dropped": 0} if says.startswith("ledger.open") else {}
            Ledger.of(state | counts | change, {"a"})
