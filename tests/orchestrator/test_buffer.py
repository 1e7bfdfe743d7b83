"""Which prompts are drawn and learnt from: pools by difficulty, duplicates, filters by mean reward,
advantages of a file's own. No torch."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from lowroll.advantages import custom
from lowroll.orchestrator.errors import NoSignal
from lowroll.orchestrator.prompt_source import fingerprint
from lowroll.orchestrator.settings import SamplingSettings, Settings
from lowroll.types import Prompt, Score
from tests.fixtures.fakes import FakeEngine, FakeEnv, LaggingEngine, build, vowels

BASE = Settings(batch_size=4, rollouts_per_example=2, sampling=SamplingSettings(max_tokens=4))


def made(rule=vowels, envs=None, **changes):
    return build(replace(BASE, **changes), envs=envs or [FakeEnv("a", period=8)], rule=rule)


def by_index(rewards):
    return lambda prompt, text: rewards[prompt.info["index"] % 8]


def drawn(batch):
    return [sample.prompt.info["index"] for sample in batch.samples[::2]]


# -- pools


def test_easy_and_hard_prompts_are_not_drawn_again():
    rewards = [1.0, 0.0, 0.5, 0.75, 0.25, 0.7, 0.3, 0.5]
    orchestrator = made(by_index(rewards), easy_threshold=0.75, hard_threshold=0.25)
    batches = [orchestrator.step(step) for step in range(1, 7)]
    assert [drawn(batch) for batch in batches] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [10, 13],
        [14, 15],
    ]
    assert orchestrator.state()["ledger"]["pools"] == {
        "easy": {"a": ["train-0", "train-3"]},
        "hard": {"a": ["train-1", "train-4"]},
    }
    assert [batch.stats["rollout/pooled_prompts"] for batch in batches] == [0, 0, 0, 0, 4, 0]
    assert (batches[2].stats["rollout/easy_pool"], batches[2].stats["rollout/hard_pool"]) == (2, 2)
    assert batches[0].stats["rollout/easy_pool"] == 1  # after the step
    assert orchestrator.ledger.pooled == 4 and orchestrator.ledger.planned == 12


def test_the_pools_survive_a_restart():
    changes = {"easy_threshold": 0.75, "hard_threshold": 0.25}
    rule = by_index([1.0, 0.0, 0.5, 0.75, 0.25, 0.7, 0.3, 0.5])
    whole = made(rule, **changes)
    for step in (1, 2, 3):
        whole.step(step)
    resumed = made(rule, **changes)
    resumed.restore(json.loads(json.dumps(whole.state())))
    for step in range(4, 9):
        assert resumed.step(step).samples == whole.step(step).samples
    assert resumed.state() == whole.state()


def test_prompts_that_never_come_again_are_in_no_pool():
    orchestrator = made(lambda prompt, text: 1.0, [FakeEnv("a")], easy_threshold=0.5)
    orchestrator.step(1)
    assert orchestrator.state()["ledger"]["pools"] == {"easy": {}, "hard": {}}


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.1, 1), (0.5, 2), (0.6, 2), (1.0, 4)])
def test_a_share_of_the_easy_ones_goes_back(share, count):
    orchestrator = made(
        lambda prompt, text: 1.0 if prompt.info["index"] < 4 else 0.5,
        easy_threshold=0.9,
        easy_fraction=share,
        hard_fraction=1.0,
    )
    orchestrator.step(1)
    orchestrator.step(2)
    assert orchestrator.ledger.pools.count("easy") == 4
    before = orchestrator.ledger.pools.copy()
    assert orchestrator.promote() == {"easy": count, "hard": 0}
    assert orchestrator.ledger.pools.count("easy") == 4 - count
    chosen = []
    for seed in (1, 2, 3, 4, 5, 6, 7, 8):
        other = made(easy_threshold=0.9, easy_fraction=share, buffer_seed=seed)
        other.ledger.pools = before.copy()
        other.promote()
        chosen.append(str(other.ledger.pools.state()))
        assert str(other.ledger.pools.state()) == chosen[-1]
    assert (len(set(chosen)) > 1) is (0 < count < 4)  # by the seed


def test_pools_that_hold_every_prompt_are_named():
    orchestrator = made(lambda prompt, text: 1.0, easy_threshold=1.0)
    for step in range(1, 5):
        orchestrator.step(step)
    before = orchestrator.state()
    with pytest.raises(NoSignal, match=r"too easy, too hard or a duplicate \(8 in the easy pool"):
        orchestrator.step(5)
    assert orchestrator.state() == before


# -- duplicates


class Rows(FakeEnv):
    def prompt(self, index, split="train"):
        row = index % self.period
        prompt = super().prompt(index, split)
        return replace(prompt, info={"index": index, "kind": row % 3, "row": row % 5})


def test_all_but_the_first_of_the_same_prompts_are_passed_over():
    for keys, first in (
        (("row",), [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]),
        (("kind",), [0, 1, 2, 8, 9, 10, 16, 17, 18, 24]),
        (("kind", "row"), list(range(10))),
        (("task", "prompt"), list(range(10))),
    ):
        envs = [Rows("a", period=8)]
        orchestrator = made(envs=envs, hash_keys=keys)
        found = [i for step in range(1, 6) for i in drawn(orchestrator.step(step))]
        assert found == first
        state = json.loads(json.dumps(orchestrator.state()))
        resumed = made(envs=envs, hash_keys=keys)
        resumed.restore(state)  # in the middle of a pass: what came before is read again
        assert resumed.step(6).samples == orchestrator.step(6).samples
        assert resumed.state() == orchestrator.state()
    assert made(envs=[FakeEnv("a", 2, "same")], hash_keys=("prompt",)).step(1)
    constant = made(envs=[FakeEnv("a", 4, "same")], hash_keys=("prompt",))
    batch = constant.step(1)
    assert drawn(batch) == [0, 4] and batch.stats["rollout/duplicate_prompts"] == 3


def test_a_fingerprint_is_of_the_named_keys_and_names_one_that_is_missing():
    prompt = Prompt(id="p", env="a", messages=[{"role": "user", "content": "x"}], info={"k": 1})
    same = replace(prompt, id="q", info={"k": 2})
    assert fingerprint(prompt, ("task", "prompt")) == fingerprint(same, ("task", "prompt"))
    assert fingerprint(prompt, ("k",)) != fingerprint(same, ("k",))
    assert fingerprint(replace(prompt, env="b"), ("task",)) != fingerprint(prompt, ("task",))
    with pytest.raises(ValueError, match="hash_keys: prompt 'p' of environment 'a' has no 'z'"):
        fingerprint(prompt, ("z",))


def test_the_buffers_seed_decides_the_mix_and_not_the_noise():
    envs = [FakeEnv("a"), FakeEnv("b")]
    one, two = (made(envs=envs, batch_size=64, buffer_seed=seed) for seed in (None, 9))
    mixes = [[s.prompt.env for s in run.step(1).samples[::2]] for run in (one, two)]
    assert mixes[0] != mixes[1]
    seeds = [{r.id: r.seed for r in run.engine.asked[0]} for run in (one, two)]
    assert all(seeds[0][one] == seeds[1][one] for one in seeds[0].keys() & seeds[1].keys())


# -- rewards


@pytest.mark.parametrize("stream", [False, True])
def test_groups_of_mean_0_and_1_are_replaced(stream):
    rewards = [0.0, 1.0, 0.5, 0.2, 0.0, 0.9, 1.0, 0.1]
    settings = replace(BASE, online_difficulty_filtering=True, max_rounds=4)
    engine = FakeEngine()
    if stream:
        settings, engine = replace(settings, oversampling_factor=1.5), LaggingEngine(pace=None)
    orchestrator = build(settings, [FakeEnv("a", period=8)], engine, by_index(rewards))
    batch = orchestrator.step(1)
    assert drawn(batch) == [2, 3]
    ledger = orchestrator.ledger
    assert ledger.planned == ledger.consumed + ledger.dropped and ledger.consumed == 2
    if stream:
        names = ("rollout/dropped_too_hard", "rollout/dropped_too_easy")
        assert [batch.stats[name] for name in names] == [2, 1]  # 0 and 4, and 1


def test_a_filter_that_leaves_nothing_is_bounded_and_named():
    for changes in ({}, {"oversampling_factor": 2.0}):
        settings = replace(BASE, online_difficulty_filtering=True, max_rounds=3, **changes)
        engine = LaggingEngine(pace=None) if changes else FakeEngine()
        orchestrator = build(settings, [FakeEnv("a")], engine, lambda prompt, text: 1.0)
        with pytest.raises(NoSignal, match="online difficulty filtering: all .* constant rewards"):
            orchestrator.step(1)
        assert orchestrator.ledger.planned == 0


def test_without_verification_nothing_is_scored(caplog):
    def never(prompt, text):
        raise AssertionError("the scorer was called")

    with caplog.at_level(logging.WARNING):
        orchestrator = made(never, skip_verification=True, canary_interval=1)
    assert "NOTHING IS SCORED" in caplog.text
    batch = orchestrator.step(1)
    assert [s.score for s in batch.samples] == [Score(0.0)] * 4
    assert [s.advantage for s in batch.samples] == [0.0] * 4
    assert "reward/canary_failures" not in batch.stats


# -- advantages of a file's own

CODE = """
def doubled(rewards, lengths, factor=2.0):
    return [factor * (r or 0.0) + 0.001 * n for r, n in zip(rewards, lengths)]

def short(rewards, lengths):
    return [0.0]

def infinite(rewards, lengths):
    return [float("inf")] * len(rewards)

def text(rewards, lengths):
    return ["1"] * len(rewards)

def raises(rewards, lengths):
    return rewards[99]

constant = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_a_files_own_advantages_are_the_batches(file):
    estimator = custom.load(f"{file}:doubled", {"factor": 3.0})
    assert estimator([1.0, None], [10, 20]) == pytest.approx([3.01, 0.02])
    orchestrator = made(advantage="custom", estimator=estimator)
    for sample in orchestrator.step(1).samples:
        expected = 3.0 * sample.reward + 0.001 * len(sample.rollout.token_ids)
        assert sample.advantage == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "advantage mine.py:short: 1 numbers for 2 rollouts"),
        ("infinite", r"advantage mine.py:infinite: \[0\] is inf, not a finite number"),
        ("text", r"advantage mine.py:text: \[0\] is '1', not a number"),
        ("raises", "advantage mine.py:raises: IndexError"),
    ],
)
def test_what_a_function_returns_is_checked(file, name, says):
    with pytest.raises(ValueError, match=says):
        made(advantage="custom", estimator=custom.load(f"{file}:{name}")).step(1)


def test_a_function_that_is_not_there_is_named(file, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("1 +")
    for path, kwargs, says in (
        (f"{file}:nothing", None, "has no function 'nothing'"),
        (f"{file}:constant", None, "has no function 'constant'"),
        (f"{file}:doubled", {"scale": 1}, "unexpected keyword argument 'scale'"),
        (f"{tmp_path}/none.py:f", None, "does not exist"),
        (f"{broken}:f", None, "cannot be imported: SyntaxError"),
        ("mine:f", None, "expected path/to/file.py:function"),
        (f"{file}", None, "expected path/to/file.py:function"),
    ):
        with pytest.raises(ValueError, match=says):
            custom.load(path, kwargs)
