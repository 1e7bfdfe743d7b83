"""Groups taken as they end: oversampling, levels, staleness, partial rollouts, and thousands of random
schedules held against the ledger. No torch."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.ledger import GroupPlan
from lowroll.orchestrator.ledger_check import Audit, check
from lowroll.orchestrator.ledger_file import Journal, read
from lowroll.orchestrator.rollout_buffer import RolloutsStalled
from lowroll.orchestrator.settings import SamplingSettings, Settings
from lowroll.orchestrator.staleness import stale_in_flight
from lowroll.orchestrator.temperature import TemperatureSchedule
from lowroll.transport.codec import decode_batch, encode_batch
from lowroll.types import ScoreError
from tests.fixtures.fakes import FakeEnv, LaggingEngine, Versions, build, vowels

PLAIN = Settings(
    batch_size=8, rollouts_per_example=2, seed=1, sampling=SamplingSettings(max_tokens=12)
)


def made(engine=None, weights=None, envs=None, rule=vowels, **changes):
    return build(
        replace(PLAIN, **changes),
        envs=envs,
        engine=engine or LaggingEngine(),
        rule=rule,
        weights=weights,
    )


def followed(engine, **changes):
    weights = Versions(engine)
    return made(engine, weights, **changes), weights


def ids(batch):
    return [f"train/a/{s.prompt.info['index']}/{s.prompt.id}" for s in batch.samples[::2]]


def reproducible(batch):
    stats = {k: v for k, v in batch.stats.items() if not k.startswith(("time/", "perf/"))}
    return replace(batch, stats=stats)


# -- one step


def test_a_batch_has_the_first_that_are_back_in_planned_order():
    engine = LaggingEngine(seed=3)
    orchestrator = made(engine, oversampling_factor=2.0)
    batch = orchestrator.step(1, 0)
    assert len(engine.asked) == 8 and len(batch.samples) == 8
    assert ids(batch) == sorted(ids(batch), key=[one for one, _ in engine.asked].index)
    assert [sample.group for sample in batch.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    lengths = {one: max(engine.length(r, i) for i in range(2)) for one, r in asked(orchestrator)}
    assert max(lengths[one] for one in ids(batch)) <= max(lengths.values())
    assert batch.stats["rollout/num_groups"] == 4 and decode_batch(encode_batch(batch)) == batch


def asked(orchestrator):
    source = orchestrator.source
    draws = [source.again(GroupPlan("a", position, 0, 1.0)) for position in range(8)]
    return [(draw.request.id, draw.request) for draw in draws]


def test_at_level_0_the_surplus_is_given_up_and_counted():
    engine = LaggingEngine(seed=3)
    orchestrator = made(engine, oversampling_factor=1.5)
    for step in (1, 2, 3):
        engine.version = step - 1
        batch = orchestrator.step(step, step - 1)
        assert engine.flights == {}
        assert batch.stats["rollout/dropped_oversampled"] == 2
        assert batch.stats["rollout/staleness_0"] == 1 and batch.stats["rollout/open_groups"] == 0
    ledger = orchestrator.state()["ledger"]
    assert (ledger["planned"], ledger["consumed"], ledger["dropped"]) == (18, 12, 6)
    assert len(engine.asked) == len(set(engine.asked)) == 18


@pytest.mark.parametrize("forgets", [False, True])
def test_partial_rollouts_go_on_into_the_next_batch(forgets):
    engine = LaggingEngine(seed=3, forgets=forgets)
    orchestrator = made(engine, oversampling_factor=1.5, partial="keep")
    first = orchestrator.step(1, 0)
    assert first.stats["rollout/open_groups"] == 2 == len(orchestrator.ledger.open)
    assert first.stats["rollout/dropped_oversampled"] == 0
    owed = [one.id for one in orchestrator.rollout_buffer.opened(orchestrator.ledger)]
    engine.version = 1
    second = orchestrator.step(2, 1)
    assert len(engine.asked) == 6 + 4  # nothing is asked twice
    assert set(ids(second)[:2]) <= {*owed, *ids(second)} and ids(second)[0] in owed
    assert second.stats["rollout/carried_groups"] >= 1
    assert second.stats["rollout/staleness_1"] > 0
    assert second.stats["rollout/mixed_fraction"] > 0
    shares = [v for k, v in second.stats.items() if k.startswith("rollout/staleness_")]
    assert sum(shares) == pytest.approx(1.0)


def test_the_choice_of_short_responses_is_seen():
    engine = LaggingEngine(pace=1, longest=40)
    orchestrator = made(
        engine, oversampling_factor=2.0, partial="keep", sampling=SamplingSettings(max_tokens=40)
    )
    batches = []
    for step in range(1, 9):
        engine.version = step - 1
        batches.append(orchestrator.step(step, step - 1))
    assert (
        batches[0].stats["rollout/length_mean"] < 20 < batches[0].stats["rollout/length_max"] + 20
    )
    carried = [b.stats.get("rollout/carried_length_mean", 0) for b in batches[1:]]
    fresh = batches[0].stats["rollout/length_mean"]
    assert max(carried) > fresh  # what was left behind is what was long
    assert all(b.stats["rollout/open_length_mean"] > 0 for b in batches)


# -- levels


@pytest.mark.parametrize("level", [1, 2, 3])
def test_with_a_factor_of_one_a_batch_lags_by_its_level_at_most(level):
    engine = LaggingEngine(seed=level)
    orchestrator, weights = followed(engine, max_async_level=level)
    for step in range(1, 12):
        weights.newest = max(weights.newest, 0)
        batch = orchestrator.step(step)
        lags = [int(k.rsplit("_", 1)[1]) for k in batch.stats if "/staleness_" in k]
        assert max(lags) == min(level, step - 1) and min(lags) >= 0
        assert ids(batch) == [f"train/a/{i}/train-{i}" for i in range(4 * step - 4, 4 * step)]
    assert weights.asked == [max(0, step - 1 - level) for step in range(1, 12)]


def test_newer_weights_are_taken_in_flight_and_strict_does_not():
    for strict in (False, True):
        engine = LaggingEngine(seed=5, pace=1)
        orchestrator, weights = followed(engine, max_async_level=2, strict_async_level=strict)
        steps = iter(range(10**6))

        def learner(phase, done, total, weights=weights, steps=steps, now=orchestrator):
            if phase == "generate" and next(steps) % 3 == 2:
                weights.newest = min(weights.newest + 1, now.last_step)

        orchestrator.on_phase = learner
        mixed = [orchestrator.step(step).stats["rollout/mixed_fraction"] for step in range(1, 9)]
        assert (max(mixed) > 0) is not strict
        if strict:
            assert [v for _, v in engine.asked[::4]] == [max(0, step - 3) for step in range(1, 9)]


def test_a_group_survives_so_many_updates_and_dies_at_the_next():
    class Stuck(LaggingEngine):
        def length(self, request, index):
            return 10**6 if "/a/0/" in request.id else 3

    engine = Stuck(pace=3)
    orchestrator, weights = followed(
        engine, max_async_level=1, oversampling_factor=1.25, max_off_policy_steps=3
    )
    stale = {}
    for step in range(1, 8):
        weights.newest = step - 1
        batch = orchestrator.step(step)
        stale[step] = batch.stats["rollout/dropped_stale"]
        flying = [request.id for request, _ in engine.flights.values()]
        assert ("train/a/0/train-0" in flying) == (step <= 4)
    # asked under version 0: the updates to 1, 2 and 3 leave it, the one to 4 (step 5) ends it
    assert stale == {1: 0, 2: 0, 3: 0, 4: 0, 5: 1, 6: 0, 7: 0}


def test_a_replayed_group_does_not_get_old():
    class Stuck(LaggingEngine):
        def length(self, request, index):
            return 10**6 if "/a/0/" in request.id else 3

    engine = Stuck(pace=3)
    orchestrator = made(engine, oversampling_factor=1.25, max_off_policy_steps=1, partial="replay")
    for step in range(1, 6):
        engine.version = step - 1
        assert orchestrator.step(step, step - 1).stats["rollout/dropped_stale"] == 0
    assert [request.id for request, _ in engine.flights.values()] == ["train/a/0/train-0"]


def test_what_waits_too_long_is_dropped_when_the_batch_is_made():
    engine = LaggingEngine(seed=2, pace=None)  # everything is back at once
    orchestrator, weights = followed(
        engine, max_async_level=1, oversampling_factor=3.0, max_off_policy_steps=1
    )
    orchestrator.step(1)
    assert len(orchestrator.rollout_buffer.ready(orchestrator.ledger)) > 0
    weights.newest = 3
    batch = orchestrator.step(4)
    assert batch.stats["rollout/dropped_stale"] > 0
    assert min(s.rollout.behavior.policy[0].version for s in batch.samples) >= 2


def test_a_rollout_of_weights_that_the_learner_does_not_have_is_refused():
    engine = LaggingEngine(version=5)
    with pytest.raises(InvalidRollout, match="version 5 while the learner is at 0"):
        made(engine, oversampling_factor=1.5).step(1, 0)


def test_an_answer_that_nobody_asked_for_is_refused():
    class Twice(LaggingEngine):
        def step(self):
            return [pair for pair in super().step() for _ in range(2)]

    with pytest.raises(InvalidRollout, match="never asked, or answered twice"):
        made(Twice(), oversampling_factor=1.5).step(1, 0)


def test_engines_that_answer_nothing_are_named():
    class Silent(LaggingEngine):
        def step(self):
            return []

    with pytest.raises(
        RolloutsStalled, match="waited 0.01 s for one of 6 requests .* 'train/a/0/train-0'"
    ):
        made(Silent(), oversampling_factor=1.5, stall_s=0.01).step(1, 0)


# -- temperature


def test_a_group_of_another_temperature_says_so():
    engine = LaggingEngine(seed=3)
    orchestrator = made(
        engine,
        oversampling_factor=2.0,
        partial="keep",
        temperature_schedule=TemperatureSchedule(1.0, 0.5, 6),
    )
    seen = set()
    for step in range(1, 6):
        engine.version = step - 1
        batch = orchestrator.step(step, step - 1)
        for sample in batch.samples:
            assert sample.temperature != batch.temperature
            seen.add(sample.temperature)
        assert decode_batch(encode_batch(batch)) == batch
    assert None in seen and 1.0 in seen


# -- a step that fails, and restarts


def test_a_failed_step_leaves_the_open_groups_as_they_were():
    engine = LaggingEngine(seed=3)
    orchestrator = made(engine, oversampling_factor=1.5, partial="keep")
    orchestrator.step(1, 0)
    before = json.loads(json.dumps(orchestrator.state()))
    channel, orchestrator.channel = orchestrator.channel, None
    with pytest.raises(AttributeError):
        orchestrator.step(2, 0)
    assert orchestrator.state() == before and engine.flights == {}
    orchestrator.channel = channel
    batch = orchestrator.step(2, 0)
    assert len(batch.samples) == 8
    counts = Counter(one for one, _ in engine.asked)
    assert max(counts.values()) <= 3  # before the failure, in it, and after it
    ledger = orchestrator.state()["ledger"]
    assert ledger["planned"] == ledger["consumed"] + len(ledger["open"]) == 10


def test_a_restart_asks_for_the_same_open_groups_under_the_same_ids():
    engine = LaggingEngine(seed=3)
    orchestrator = made(engine, oversampling_factor=1.5, partial="keep")
    batch = orchestrator.step(1, 0)
    state = json.loads(json.dumps(batch.orchestrator))
    assert state == json.loads(json.dumps(orchestrator.state())) and state["step"] == 1
    owed = [one.draw.request for one in orchestrator.rollout_buffer.opened(orchestrator.ledger)]
    other = LaggingEngine(seed=9, version=1)
    resumed = made(other, oversampling_factor=1.5, partial="keep")
    resumed.restore(state)
    assert resumed.state() == state
    assert [one.draw.request for one in resumed.rollout_buffer.opened(resumed.ledger)] == owed
    second = resumed.step(2, 1)
    assert [one for one, _ in other.asked[:2]] == [request.id for request in owed]
    assert resumed.ledger.planned == 10 and not set(ids(second)) & set(ids(batch))


def test_what_was_back_from_weights_that_are_others_now_is_drawn_again(tmp_path):
    """The trainer has learned again what they were drawn from, and it came out with other bytes."""
    engine = LaggingEngine(seed=3, pace=None)
    orchestrator, weights = followed(engine, max_async_level=2, oversampling_factor=2.0)
    orchestrator.journal = orchestrator.rollout_buffer.journal = Journal(tmp_path / "ledger.jsonl")
    orchestrator.step(1)
    old = [one.id for one in orchestrator.rollout_buffer.ready(orchestrator.ledger)]
    assert len(old) == 4
    taken = weights.at_least

    def goes_back(version, most):
        orchestrator.rollout_buffer.retract(-1)
        return taken(version, most)

    weights.at_least = goes_back
    asked = len(engine.asked)
    batch = orchestrator.step(2)
    assert {one for one, _ in engine.asked[asked:]} >= set(old)
    assert set(old) & set(ids(batch))
    assert check(tmp_path / "ledger.jsonl") == []


def test_recall_and_retract_draw_again():
    engine = LaggingEngine(seed=3, pace=None)
    orchestrator, weights = followed(engine, max_async_level=1, oversampling_factor=2.0)
    orchestrator.step(1)
    assert orchestrator.rollout_buffer.recall() == orchestrator.rollout_buffer.in_flight == 0
    ready = orchestrator.rollout_buffer.ready(orchestrator.ledger)
    assert len(ready) == 4 and orchestrator.rollout_buffer.retract(0) == 0
    assert orchestrator.rollout_buffer.retract(-1) == 4 and not orchestrator.rollout_buffer.ready(
        orchestrator.ledger
    )
    asked = len(engine.asked)
    orchestrator.step(2)
    assert len(engine.asked) == asked + 8  # the four again, and four new ones
    slow = LaggingEngine(seed=3, pace=1)
    orchestrator = made(slow, oversampling_factor=2.0, partial="keep")
    orchestrator.step(1, 0)
    flying = orchestrator.rollout_buffer.in_flight
    assert flying > 0 and orchestrator.rollout_buffer.recall() == flying and not slow.flights
    orchestrator.step(2, 0)
    counts = Counter(one for one, _ in slow.asked)
    assert sorted(counts.values())[-flying:] == [2] * flying


def test_another_engine_counts_its_handles_anew():
    first, second = LaggingEngine(seed=3, pace=1), LaggingEngine(seed=4, pace=1)
    orchestrator = made(first, oversampling_factor=2.0, partial="keep", max_off_policy_steps=0)
    orchestrator.step(1, 0)
    assert orchestrator.rollout_buffer.recall(for_good=True) > 0
    orchestrator.engine = orchestrator.rollout_buffer.engine = second
    batch = orchestrator.step(2, 0)
    assert len(batch.samples) == 8 and batch.stats["rollout/dropped_stale"] == 0
    assert len(set(second.asked)) == len(second.asked)


def test_a_recalled_group_begins_its_age_anew():
    engine = LaggingEngine(pace=1, longest=12)
    orchestrator = made(engine, oversampling_factor=2.0, partial="keep", max_off_policy_steps=1)
    orchestrator.step(1, 0)
    engine.version = 1
    assert stale_in_flight(orchestrator.rollout_buffer, 1) == []
    orchestrator.rollout_buffer.recall()
    orchestrator.rollout_buffer.send(orchestrator.ledger)
    flying = orchestrator.rollout_buffer.in_flight
    assert stale_in_flight(orchestrator.rollout_buffer, 2) == []
    assert len(stale_in_flight(orchestrator.rollout_buffer, 3)) == flying > 0


def test_a_surplus_that_is_back_waits_and_the_earliest_planned_go_first():
    engine = LaggingEngine(pace=None)  # all end at once, in any order
    orchestrator = made(engine, oversampling_factor=2.0, partial="keep")
    for step in range(1, 5):
        batch = orchestrator.step(step, 0)
        assert ids(batch) == [f"train/a/{i}/train-{i}" for i in range(4 * step - 4, 4 * step)]


def test_what_comes_back_together_is_scored_in_planned_order():
    seen = []

    def rule(prompt, text):
        seen.append(prompt.info["index"])
        return vowels(prompt, text)

    made(LaggingEngine(seed=1, pace=None), oversampling_factor=2.0, rule=rule).step(1, 0)
    assert seen == sorted(seen) and len(seen) == 16


def test_progress_and_buffer_can_be_left_behind():
    pools = {"easy_threshold": 0.9}
    orchestrator = made(envs=[FakeEnv("a", period=40)], oversampling_factor=1.5, **pools)
    orchestrator.step(1, 0)
    orchestrator.ledger.pools.place("a", "train-30", [1.0], orchestrator.settings)
    state = json.loads(json.dumps(orchestrator.state()))
    resumed = made(envs=[FakeEnv("a", period=40)], oversampling_factor=1.5, **pools)
    resumed.restore(state, skip_progress=True)
    assert resumed.ledger.cursors == {"a": 0} and resumed.ledger.pools.count("easy") == 1
    resumed.restore(state, skip_buffer=True)
    assert resumed.ledger.cursors != {"a": 0} and resumed.ledger.pools.count("easy") == 0


def test_what_was_consumed_is_in_the_ledger_of_one_that_began_again(tmp_path):
    path = tmp_path / "l.jsonl"
    settings = replace(PLAIN, oversampling_factor=1.5)
    first = build(settings, engine=LaggingEngine(), rule=vowels, journal=Journal(path))
    state = first.step(1, 0).orchestrator
    first.journal.close()
    again = build(settings, engine=LaggingEngine(), rule=vowels, journal=Journal(path))
    again.restore(json.loads(json.dumps(state)))
    again.committed(1)  # it was killed when all had been sent, before the last commit
    again.journal.close()
    assert check(path) == []
    assert Audit(read(path)[0]).consumed == 1


# -- random schedules


class World:
    """A run whose parts may die at any moment: what survives are the frames that were sent, and the
    ledger's file. The learner takes the frames in order, and commits some of them."""

    def __init__(self, seed, path):
        self.noise = random.Random(seed)
        level = self.noise.choice([0, 0, 1, 2])
        partials = ["none", "keep", "replay"]
        self.changes = {
            "max_async_level": level,
            "strict_async_level": self.noise.random() < 0.3,
            "max_off_policy_steps": self.noise.choice([level, level + 1, 8]),
            "oversampling_factor": self.noise.choice([1.0, 1.25, 1.5, 3.0]),
            "partial": self.noise.choice(partials),
            "dynamic_sampling": self.noise.random() < 0.4,
            "online_difficulty_filtering": self.noise.random() < 0.3,
            "no_signal": "go_on",
            "max_rounds": 3,
            "max_error_rate": 0.9,
            "easy_threshold": self.noise.choice([None, 0.9]),
            "hash_keys": self.noise.choice([(), ("prompt",)]),
        }
        self.path = path
        self.frames = {}
        self.learnt = 0
        self.committed = 0
        self.start()

    def start(self):
        noise = self.noise
        self.engine = LaggingEngine(
            noise.random(),
            noise.choice([1, 3, None]),
            noise.choice([0, 0.02]),
            noise.random() < 0.3,
        )
        if self.changes["max_async_level"] == self.changes["oversampling_factor"] - 1 == 0:
            self.changes["oversampling_factor"] = 1.25  # a stream
        self.weights = Versions(self.engine, self.learnt)
        self.orchestrator = build(
            replace(PLAIN, **self.changes),
            envs=[FakeEnv("a", period=self.noise.choice([200])), FakeEnv("b")],
            engine=self.engine,
            rule=partial(rewarded),
            weights=self.weights,
            journal=Journal(self.path),
        )
        self.orchestrator.channel = self
        self.orchestrator.on_phase = self.meanwhile
        if self.frames:
            self.orchestrator.restore(json.loads(self.frames[max(self.frames)][1]))

    def send(self, batch):
        if self.noise.random() < 0.05:
            raise TimeoutError("no room")
        names = sorted({f"{s.prompt.env}/{s.prompt.info['index']}" for s in batch.samples})
        assert len(names) == batch.stats["rollout/num_groups"]
        self.frames[batch.step] = (names, json.dumps(batch.orchestrator))

    def meanwhile(self, phase, done, total):
        """The learner goes on, or somebody dies."""
        if self.noise.random() < 0.2 and self.learnt < max(self.frames, default=0):
            self.learnt += 1
            self.weights.newest = max(self.weights.newest, self.learnt)
        if self.noise.random() < 0.01:
            raise KeyboardInterrupt

    def run(self, steps):
        while (step := max(self.frames, default=0) + 1) <= steps:
            level = self.changes["max_async_level"]
            self.learnt = max(self.learnt, step - 1 - level)  # what the step waits for
            self.weights.newest = max(self.weights.newest, self.learnt)
            try:
                self.orchestrator.step(step)
            except (ConnectionError, TimeoutError, KeyboardInterrupt):
                if self.noise.random() < 0.5:
                    self.die()
            if self.noise.random() < 0.2 and self.learnt > self.committed:
                self.committed = self.learnt
                self.orchestrator.committed(self.committed)
            if self.noise.random() < 0.08:
                self.die()

    def die(self):
        self.orchestrator.journal.close()
        if self.noise.random() < 0.3:
            with self.path.open("ab") as file:
                file.write(b'{"event": "plan')  # torn
        self.start()


def rewarded(prompt, text):
    kind = prompt.info["index"] % 5
    if kind == 0:
        return 0.0
    if kind == 1:
        return 1.0
    return ScoreError("timeout", "slow") if len(text) % 11 == 10 else len(text) % 3 / 2


@pytest.mark.parametrize("block", range(8))
def test_no_group_is_lost_or_used_twice_whatever_dies(block, tmp_path):
    deaths = 0
    for seed in range(block * 40, block * 40 + 40):
        path = tmp_path / f"{seed}.jsonl"
        world = World(seed, path)
        world.run(9)
        events, _ = read(path)
        learned = {step: names for step, (names, _) in world.frames.items()}
        assert check(events) == [], (seed, world.changes)
        audit = Audit(events)
        short = {
            step: sorted("/".join(one.split("/")[1:3]) for one in ids)
            for step, ids in audit.batches.items()
        }
        assert short == learned, (seed, world.changes)
        ledger = world.orchestrator.ledger
        counts = audit.counts
        assert (counts["batched"], counts["dropped"], counts["open"]) == (
            ledger.consumed,
            ledger.dropped,
            len(ledger.open),
        ), (seed, world.changes)
        used = [one for names in learned.values() for one in names]
        assert len(used) == len(set(used)) == ledger.consumed
        world.orchestrator.journal.close()
        deaths += sum(event["event"] == "rolled_back" for event in events)
    assert deaths > 20


def test_with_one_thread_a_schedule_repeats_itself():
    def batches():
        engine = LaggingEngine(seed=4)
        orchestrator, weights = followed(engine, max_async_level=2, oversampling_factor=1.5)
        found = []
        for step in range(1, 7):
            weights.newest = max(0, step - 2)
            found.append(reproducible(orchestrator.step(step)))
        return found

    assert batches() == batches()
