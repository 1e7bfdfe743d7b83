"""The numbers of an evaluation against independent oracles, and majorities by the environment's own
comparison."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest

from lowroll.envs.answers.equality import equal
from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.eval_statistics import interval, majority
from lowroll.orchestrator.examples import Example, ExampleResponse, draw, score, votes
from lowroll.orchestrator.prompt_source import draw_at
from lowroll.orchestrator.settings import SamplingSettings
from lowroll.runs.results import EngineAnswers, rows_of, shown
from lowroll.types import Group, Prompt, Score, ScoreError
from tests.fixtures.fakes import FakeEngine, FakeEnv, FakeTokenizer


def test_an_interval_is_numpys_of_the_same_resamples() -> None:
    rng = random.Random(5)
    sets = [[rng.random() for _ in range(size)] for size in (7, 30)]
    again = random.Random(11)
    means = [
        numpy.mean([numpy.mean(again.choices(values, k=len(values))) for values in sets])
        for _ in range(400)
    ]
    low, high = interval(sets, seed=11, level=0.8, resamples=400)
    assert [low, high] == pytest.approx(list(numpy.quantile(means, [0.1, 0.9])), abs=1e-12)
    assert interval(sets, seed=11) == interval(sets, seed=11) != interval(sets, seed=12)


def test_an_interval_is_as_wide_as_the_normal_one() -> None:
    """Of a share of 0.3 in 400 examples: 1.96 standard errors either way."""
    low, high = interval([[1.0] * 120 + [0.0] * 280], seed=1)
    error = (0.3 * 0.7 / 400) ** 0.5
    assert low == pytest.approx(0.3 - 1.96 * error, abs=0.006)
    assert high == pytest.approx(0.3 + 1.96 * error, abs=0.006)
    assert interval([[0.5]]) == (0.5, 0.5) and interval([[1.0] * 9]) == (1.0, 1.0)
    for nothing in ([], [[]], [[1.0], []]):
        with pytest.raises(ValueError, match="interval: expected values"):
            interval(nothing)


def test_a_majority_is_found_by_counting() -> None:
    for classes in itertools.product([None, 0, 1, 2], repeat=4):
        voting = [found for found in classes if found is not None]
        best = None
        for found in voting:  # the first of those that nobody beats
            if best is None and all(voting.count(found) >= voting.count(x) for x in voting):
                best = found
        assert majority(classes) == best
    assert majority([]) is None


class Compared(FakeEnv):
    """Answers are equal as `answers.equal` has it; "" is none."""

    def matching(self, prompt: Prompt, text: str) -> Prompt:
        return Prompt(prompt.id, prompt.env, prompt.messages, {"gold": text})


class Apart(FakeEnv):
    """Answers are not compared."""

    def matching(self, prompt: Prompt, text: str) -> None:
        return None


class Judge:
    """Scores by `equal` with the gold answer of the prompt, "!" cannot be scored; counts."""

    def __init__(self) -> None:
        self.asked = 0

    def score(self, items: Sequence[Any], on_progress: Any = None) -> list[Any]:
        self.asked += len(items)
        return [self.one(prompt.info["gold"], text) for prompt, text in items]

    def one(self, gold: str, text: str) -> Score | ScoreError:
        if "!" in gold + text:
            return ScoreError("exception", "!")
        return Score(float(text != "" and equal(gold, text)), {"has_answer": float(text != "")})


def examples(*answers: Sequence[str], gold: str = "1/2") -> list[Example]:
    return [
        Example(
            str(i),
            Prompt(str(i), "e", [], {"gold": gold}),
            [ExampleResponse(t, 1, "stop") for t in one],
        )
        for i, one in enumerate(answers)
    ]


def test_what_failed_or_was_aborted_is_not_scored_and_is_counted() -> None:
    fine, broken, cut = (
        ExampleResponse("1/2", 1, "stop"),
        ExampleResponse("1/2", 1, "stop"),
        ExampleResponse("", 1, "abort"),
    )
    broken.failed, broken.messages = "the door is shut", [{"role": "assistant", "content": "1/2"}]
    (example,) = found = examples([])
    example.responses += [fine, broken, cut]
    judge = Judge()
    score(found, judge, lambda _: None)
    assert judge.asked == 1 and example.rewards == [1.0]
    assert broken.score == ScoreError("exception", "the door is shut")
    assert cut.score == ScoreError("invalid", "aborted after 1 tokens")
    (row,) = rows_of([EngineAnswers("e", {}, found, None, 1.0)])
    assert row["env_failed"] == 1 and row["unscored"] == pytest.approx(2 / 3)
    head, (line,) = shown([row])
    assert line[head.index("env failed")] == "1"


def won(*answers: Sequence[str]) -> list[bool]:
    found, judge = examples(*answers), Judge()
    score(found, judge, lambda _: None)
    result = votes(found, Compared("e"), judge)
    assert result is not None
    return result


def test_answers_vote_by_what_they_are_equal_to() -> None:
    cases = {
        ("0.5", "3", "\\frac12", "3", "1/2"): True,  # three spellings of one number
        ("3", "3", "0.5", "1/2"): False,  # a tie: the first seen
        ("0.5", "3", "3", "1/2"): True,
        ("", "", "0.5"): True,  # no answer has no vote
        ("", ""): False,
        ("!", "!", "0.5"): True,  # nor has what could not be scored
        ("7",): False,
    }
    assert won(*cases) == list(cases.values())
    assert votes([], Compared("e"), Judge()) is None
    assert votes(examples(["1"]), Apart("e"), Judge()) is None


def brute(answers: Sequence[str]) -> bool:
    """The first answer that nobody's class is larger than, by comparing all pairs."""
    classes: list[list[str]] = []
    for text in filter(None, answers):
        home = next((one for one in classes if equal(one[0], text)), None)
        classes.append([text]) if home is None else home.append(text)
    largest = max(map(len, classes), default=0)
    best = next((one for one in classes if len(one) == largest), None)
    return best is not None and equal("1/2", best[0])


def test_majorities_of_random_answers_are_those_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(3)
    pool = ["0.5", "1/2", "2/4", "3", "3.0", "x", ""]
    answers = [[rng.choice(pool) for _ in range(rng.choice([1, 8]))] for _ in range(40)]
    together = won(*answers)
    assert together == [brute(one) for one in answers]
    monkeypatch.setattr("lowroll.orchestrator.examples.TOGETHER", 9)  # many calls of the scorer
    assert won(*answers) == together


def test_scores_are_kept_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowroll.orchestrator.examples.TOGETHER", 4)
    found, judge, kept, told = examples(*[["0.5", "3"]] * 5), Judge(), [], []
    score(found, judge, lambda part: kept.append(len(part)), lambda *at: told.append(at))
    assert kept == [2, 2, 1] and told == [(2, 5), (4, 5), (5, 5)] and judge.asked == 10
    assert [one.solved for one in found] == [[True, False]] * 5
    found = examples(["0.5"])
    found[0].responses[0].finish_reason = "abort"
    score(found, judge, lambda part: None)
    assert isinstance(found[0].responses[0].score, ScoreError) and found[0].rewards == []


# -- drawing ---------------------------------------------------------------------------------------


def draws(count: int) -> list[Any]:
    env, tokenizer = FakeEnv("e"), FakeTokenizer()
    return [
        draw_at(env, "e", i, "test", tokenizer, SamplingSettings(max_tokens=4), 2, 0)
        for i in range(count)
    ]


class Stepped(FakeEngine):
    """Answers two requests a step, the last ones first."""

    def __init__(self, spoil: Callable[[Group], Group] = lambda group: group) -> None:
        super().__init__()
        self.waiting: dict[int, Any] = {}
        self.aborted: list[int] = []
        self.spoil = spoil

    def add(self, request: Any) -> int:
        self.waiting[len(self.waiting)] = request
        return len(self.waiting) - 1

    def step(self) -> list[tuple[int, Group]]:
        handles = sorted(self.waiting)[-2:]
        groups = self.generate([self.waiting.pop(handle) for handle in handles])
        by_id = {group.request.id: group for group in groups}
        return [
            (handle, self.spoil(by_id[asked])) for handle, asked in zip(handles, by_id, strict=True)
        ]

    def abort(self, handle: int) -> bool:
        self.aborted.append(handle)
        return True


def test_examples_are_kept_as_they_end() -> None:
    kept: list[list[str]] = []
    told: list[tuple[int, int]] = []
    asked = draws(5)
    draw(
        asked,
        Stepped(),
        FakeTokenizer(),
        lambda ended: kept.append([one.id for one in ended]),
        lambda *at: told.append(at),
    )
    assert sorted(id for part in kept for id in part) == sorted(one.request.id for one in asked)
    assert [len(part) for part in kept] == [2, 2, 1] and told == [(2, 5), (4, 5), (5, 5)]


def test_what_is_not_asked_or_not_whole_is_no_answer() -> None:
    def half(group: Group) -> Group:
        return Group(group.request, group.rollouts[:1])

    engine = Stepped(half)
    with pytest.raises(InvalidRollout, match="1 rollouts, expected 2"):
        draw(draws(5), engine, FakeTokenizer(), lambda _: None)
    assert len(engine.aborted) == 4
    with pytest.raises(KeyError):  # what the keeper raises goes through, and the rest is given up
        draw(draws(3), engine := Stepped(), FakeTokenizer(), lambda _: {}["full"])
    assert engine.aborted == [0]
