"""Conversations: turns, what follows them, what counts, how they end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from lowroll.engine.native import NativeEngine
from lowroll.model.spec import spec_from_config
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator import groups as grouping
from lowroll.orchestrator.conversations import Conversations, Dialogue
from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.prompt_source import PromptDraw
from lowroll.orchestrator.settings import Settings
from lowroll.orchestrator.stats import rollout_stats, staleness_stats, turn_stats
from lowroll.runs import demo
from lowroll.types import PolicySpan, Prompt, Score, ScoreError, Turn
from tests.fixtures.fakes import FakeEngine, LaggingEngine, tagged
from tests.fixtures.runs import TINY
from tests.fixtures.talks import Answers, turn_by_turn

PROMPT = Prompt("p", "e", [{"role": "user", "content": "hi"}])
MORE = [{"role": "user", "content": "more"}]


class Letters:
    """A token is a character; new messages follow as they are, behind a bar."""

    def encode_turn(self, messages, after, said):
        return [ord(mark) for one in messages for mark in "|" + one["content"]]

    def turn(self, token_ids, tools=False):
        return {"role": "assistant", "content": self.decode(token_ids)}

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


def dialogue(n=2, **changes):
    given = {"prompt_ids": [5, 6], "n": n, "max_tokens": 8, "id": "q", "prompt": PROMPT}
    return Dialogue(**{**given, "max_turns": 3, **changes})


def says(*texts, finish="stop", version=0):
    """An engine whose turn i says texts[i]."""

    def respond(request, index):
        turn = int(request.id.split("/")[2]) if "/" in request.id else 0
        ids = [ord(mark) for mark in texts[min(turn, len(texts) - 1)]]
        cut = len(ids) > request.max_tokens
        ids = ids[: request.max_tokens]
        return tagged(ids, [-1.0] * len(ids), "length" if cut else finish, version + turn)

    return FakeEngine(respond=respond)


def held(engine, reply, asked=None):
    answers = Answers(reply)
    return Conversations(engine, answers, Letters()).generate([asked or dialogue()])[0]


def test_a_conversation_is_one_rollout_with_its_turns() -> None:
    engine = says("ab", "cd", "ef")
    group = held(engine, lambda *_: MORE)
    for rollout, talk in zip(group.rollouts, group.conversations, strict=True):
        assert Letters().decode(rollout.token_ids) == "ab|morecd|moreef"
        assert rollout.turns == (Turn(0, 2, "stop"), Turn(7, 9, "stop"), Turn(14, 16, "stop"))
        assert rollout.drawn == [1] * 2 + [0] * 5 + [1] * 2 + [0] * 5 + [1] * 2
        assert rollout.logprobs == [-1.0 * m for m in rollout.drawn] and rollout.num_drawn == 6
        assert [one["content"] for one in talk.messages] == ["ab", "more", "cd", "more", "ef"]
        assert talk.ended == "turns"
    ids = [[(one.id, one.n) for one in asked] for asked in engine.asked]
    assert ids == [[("q", 2)], [("q/0/1", 1), ("q/1/1", 1)], [("q/0/2", 1), ("q/1/2", 1)]]
    assert engine.asked[1][0].prompt_ids == [5, 6, *map(ord, "ab|more")]
    assert type(engine.asked[0][0]) is type(engine.asked[1][0]) is not Dialogue


def test_spans_of_later_turns_stand_where_their_tokens_do() -> None:
    rollout = held(says("ab", "cd", "ef"), lambda *_: MORE).rollouts[0]
    policy = (PolicySpan(0, "d", 0), PolicySpan(1, "d", 7), PolicySpan(2, "d", 14))
    assert rollout.behavior.policy == policy
    same = held(FakeEngine(respond=lambda *_: tagged([97])), lambda *_: MORE).rollouts[0]
    assert same.behavior.policy == (PolicySpan(0, "d", 0),)
    assert staleness_stats([rollout], 2) == {
        "rollout/staleness_0": pytest.approx(1 / 3),
        "rollout/staleness_1": pytest.approx(1 / 3),
        "rollout/staleness_2": pytest.approx(1 / 3),
        "rollout/mixed_fraction": 1.0,
        "rollout/kept_prefix_mean": 4.0,
    }


@pytest.mark.parametrize(
    ("asked", "reply", "ended", "finish", "text"),
    [
        ({}, lambda *_: None, "done", "stop", "ab"),
        ({"max_turns": 1}, lambda *_: MORE, "turns", "stop", "ab"),
        ({"max_tokens": 1}, lambda *_: MORE, "length", "length", "a"),
        ({"max_sequence_tokens": 9}, lambda *_: MORE, "tokens", "length", "ab"),
        ({"max_sequence_tokens": 10}, lambda *_: MORE, "tokens", "length", "ab|morec"),
        (
            {"max_sequence_tokens": 11, "max_turns": 2},
            lambda *_: MORE,
            "turns",
            "stop",
            "ab|morecd",
        ),
        ({}, lambda *_: ScoreError("timeout", "late"), "error", "stop", "ab"),
    ],
)
def test_how_a_conversation_ends(asked, reply, ended, finish, text) -> None:
    group = held(says("ab", "cd"), reply, dialogue(**asked))
    assert [talk.ended for talk in group.conversations] == [ended] * 2
    rollout = group.rollouts[0]
    assert rollout.finish_reason == finish and Letters().decode(rollout.token_ids) == text


def test_nothing_but_what_was_drawn_counts() -> None:
    drawn = PromptDraw(PROMPT, dialogue())
    group = held(says("ab", "cde"), lambda *_: MORE, dialogue(max_turns=2))
    grouping.check_group(drawn, group)

    class Both:
        def score(self, items, on_progress=None):
            assert [said for _, said in items] == [
                [*PROMPT.messages, {"role": "assistant", "content": "ab"}, *MORE, last]
                for last in [{"role": "assistant", "content": "cde"}] * 2
            ]
            return [Score(1.0), Score(0.0)]

    samples = grouping.score([drawn], [group], Both(), Letters())[0]
    grouping.credit(samples, Settings(batch_size=2, rollouts_per_example=2), dialogue())
    assert [sample.text for sample in samples] == ["cde", "cde"]
    assert [sample.loss_mask for sample in samples] == [[1] * 2 + [0] * 5 + [1] * 3] * 2
    stats = rollout_stats(group.rollouts)
    assert stats["rollout/tokens"] == 10 and stats["rollout/entropy_estimate"] == 1.0
    turns = turn_stats(samples)
    assert turns["rollout/turns_mean"] == 2 and turns["rollout/env_tokens_mean"] == 5
    assert turns["reward/after_2_turns"] == 0.5 and turns["rollout/ended_turns_fraction"] == 1


def test_an_environment_that_fails_is_an_error_of_its_sample_alone() -> None:
    broken = ScoreError("exception", "e: broken")
    replies = iter([broken, None])
    group = held(says("ab"), lambda *_: next(replies))

    class Rest:
        def score(self, items, on_progress=None):
            assert len(items) == 1
            return [Score(1.0)]

    samples = grouping.score([PromptDraw(PROMPT, dialogue())], [group], Rest(), Letters())[0]
    assert [sample.score for sample in samples] == [broken, Score(1.0)]
    grouping.credit(samples, Settings(batch_size=2, rollouts_per_example=2), dialogue())
    assert samples[0].loss_mask == [0, 0] and samples[0].reward is None


@pytest.mark.parametrize("turns", [(), (Turn(1, 2, "stop"),), (Turn(0, 1, "stop"),)])
def test_turns_that_do_not_hold_are_refused(turns) -> None:
    group = held(says("ab"), lambda *_: None)
    group.rollouts[0].turns = turns
    with pytest.raises(InvalidRollout, match="turn"):
        grouping.check_group(PromptDraw(PROMPT, dialogue()), group)


def test_log_probs_between_turns_are_refused() -> None:
    group = held(says("ab", "cd"), lambda *_: MORE)
    group.rollouts[0].logprobs[3] = -0.1
    with pytest.raises(InvalidRollout, match="before turn 1 have log-probs"):
        grouping.check_group(PromptDraw(PROMPT, dialogue()), group)


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_holds_the_conversations_that_rounds_hold(seed) -> None:
    """By add and step, out of order, with some given up and asked again."""
    noise = random.Random(seed)
    engine = LaggingEngine(seed, pace=None if seed % 2 else 3, forgets=seed % 3 == 0)
    asked = [dialogue(n=noise.choice([1, 3]), id=f"q{i}", seed=i) for i in range(5)]

    def reply(prompt, messages):
        return None if len(messages[-1]["content"]) % 4 == 0 else MORE

    talks = Conversations(engine, Answers(reply), Letters())
    flights = {talks.add(one): one for one in asked}
    found = {}
    for _ in range(2000):
        if flights and noise.random() < 0.05:
            handle = noise.choice(sorted(flights))
            talks.abort(handle)
            one = flights.pop(handle)
            flights[talks.add(one)] = one
        for handle in list(flights):
            assert len(talks.so_far(handle)) == flights[handle].n
        for handle, group in talks.step():
            found[flights.pop(handle).id] = group
        if not flights:
            break
    assert not talks._open and not talks._whose
    for one in asked:
        for rollout, talk in zip(found[one.id].rollouts, found[one.id].conversations, strict=True):
            grouping.check_group(PromptDraw(PROMPT, one), found[one.id])
            assert talk.ended in ("done", "turns")
            said = [Letters().decode(rollout.token_ids[t.start : t.end]) for t in rollout.turns]
            assert said == [m["content"] for m in talk.messages if m["role"] == "assistant"]
            assert all(len(text) % 4 for text in said[:-1])


def test_plain_requests_pass_through() -> None:
    engine = says("ab")
    talks = Conversations(engine, Answers(lambda *_: MORE), Letters())
    plain = dialogue().first
    assert talks.generate([plain])[0].conversations is None
    mixed = talks.generate([plain, dialogue(id="other")])
    assert mixed[0].rollouts[0].turns is None and len(mixed[1].rollouts[0].turns) == 3


@pytest.mark.parametrize(
    ("name", "n", "seed"),
    [("fp32", 1, 0), ("fp32", 8, 1), ("bf16", 8, 2), ("int8", 8, 3)],
)
def test_an_engine_says_what_a_fresh_one_says_turn_by_turn(name, n, seed) -> None:
    """Random conversations, against plain requests to a fresh engine, a sample at a time."""
    torch.manual_seed(seed)
    chat = ChatTokenizer(demo.build_tokenizer())
    spec = spec_from_config({**TINY, "vocab_size": 261})
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    model = Transformer(spec, "cpu", dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    noise = random.Random(seed)
    stops = tuple(range(5, 261, 5)) if seed % 2 else (1, *range(5, 261, 3))

    def reply(prompt, messages):
        rng = random.Random(str(messages))
        if rng.random() < 0.2:
            return None
        return [{"role": rng.choice(["user", "system"]), "content": "x" * rng.randint(1, 9)}]

    def engine():
        return NativeEngine(
            model, weights=name, tokenizer=chat.tokenizer, page_size=4, cache_tokens=8192
        )

    asked = []
    for i in range(3):
        messages = [{"role": "user", "content": "abc" * noise.randint(1, 4)}]
        asked.append(
            Dialogue(
                prompt_ids=chat.encode_chat(messages),
                n=n,
                max_tokens=6,
                seed=i,
                id=f"c{i}",
                stop_ids=stops,
                prompt=replace(PROMPT, messages=messages),
                max_turns=3,
            )
        )
    one = engine()
    groups = Conversations(one, Answers(reply), chat).generate(asked)
    turns, near = 0, 0.1 if name == "bf16" else 1e-4
    for request, group in zip(asked, groups, strict=True):
        for sample in {0, n - 1}:
            rollout = group.rollouts[sample]
            turns += len(rollout.turns)
            ids, logprobs, drawn = turn_by_turn(engine(), request, sample, Answers(reply), chat)
            assert rollout.token_ids == ids and rollout.drawn == drawn
            assert rollout.logprobs == pytest.approx(logprobs, abs=near)
    assert turns > 3
    assert one.stats().prefix_hits > 0  # of the turns before
