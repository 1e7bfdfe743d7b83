"""An engine whose policy drops keys, against attention over exactly the keys that it kept
(`fixtures.policies`). The fuzz (`tests.fuzz`) has such policies in half of its engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowroll import Engine, Request
from lowroll.engine.runner import Runner
from lowroll.engine.sequence import StepPlan
from lowroll.kv.policy.dense import DensePolicy
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.types import Group
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.masters import nudge
from tests.fixtures.policies import (
    POLICIES,
    Bounded,
    ChosenH2O,
    ChosenStreaming,
    Kind,
    Liked,
    Parity,
    Recent,
    check_group,
    rkv,
    snapkv,
)


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return hf.load(folder)


def bounded(model: Transformer, kv: Bounded, lookahead: int = 1, **options: Any) -> Engine:
    engine = engine_of(model, kv=kv, **options)
    engine.scheduler.lookahead = lookahead
    return engine


def tokens(groups: list[Group]) -> list[list[int]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


def numbers(groups: list[Group]) -> list[tuple[list[int], list[float]]]:
    return [(r.token_ids, r.logprobs) for group in groups for r in group.rollouts]


STEM = prompt(21, 1)
REQUESTS = [
    Request(STEM + prompt(4, 2), n=8, max_tokens=30, seed=1),
    Request(prompt(3, 3), n=1, max_tokens=40, seed=2, temperature=0.8, ignore_eos=True),
    Request(STEM + prompt(7, 4), n=2, max_tokens=25, seed=3, stop_ids=(9, 17)),
    Request(prompt(9, 5), n=8, max_tokens=20, seed=4, temperature=1.2),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"prefill_chunk": 5, "max_prefill_tokens": 12},
    "small": {"cache_tokens": 112, "max_batch": 6},
}
# every pair of a policy, a way to hold its samples and a lookahead
CASES = [
    (kind, options, (1, 5)[(i + j) % 2])
    for i, kind in enumerate(POLICIES)
    for j, options in enumerate(OPTIONS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "lookahead"), CASES)
def test_every_log_prob_is_that_of_the_keys_that_stay(
    model: Transformer, kind: Kind, options: str, lookahead: int
) -> None:
    """Shared prompts with n = 8 and n = 1, prompts over and under the budget, prompts found in the
    prefix cache beside fresh ones, samples that wait for pages and slots."""
    kv = kind(9, 4)
    engine = bounded(model, kv, lookahead, **OPTIONS[options])
    groups = engine.generate(REQUESTS[:2]) + engine.generate(REQUESTS[2:])
    assert sum(check_group(kv, group, [model]) for group in groups) > 20
    assert (engine.pool.hits > 0) == (kind is not ChosenH2O)  # which must see every query
    assert engine.pool.num_used == engine.scheduler.reserved_pages == 0
    assert {r.behavior.kv_policy for group in groups for r in group.rollouts} == {kv.name}
    assert groups[0].rollouts[0].behavior.kv_budget == 9
    dense = engine_of(model).generate(REQUESTS)
    assert tokens(groups) != tokens(dense)
    with pytest.raises(AssertionError):  # the oracle can tell
        check_group(None, groups[1], [model])


def test_heads_keep_other_keys(model: Transformer) -> None:
    """What one head's choice for all heads would give is not what comes out."""

    class Same(Parity):
        def choose(self, layer, head, held, queries, keys):
            return super().choose(layer, 0, held, queries, keys)

    (group,) = bounded(model, Parity(6, 2)).generate(REQUESTS[1:2])
    check_group(Parity(6, 2), group, [model])
    with pytest.raises(AssertionError):
        check_group(Same(6, 2), group, [model])


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_a_budget_of_the_whole_sequence_is_bitwise_the_dense_engine(
    model: Transformer, kind: Kind
) -> None:
    wanted = [engine_of(model, kv=kv).generate(REQUESTS) for kv in (None, DensePolicy())]
    assert numbers(wanted[0]) == numbers(wanted[1])
    assert numbers(engine_of(model, kv=kind(54, 1)).generate(REQUESTS)) == numbers(wanted[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_a_sample_keeps_the_same_keys_in_any_company(model: Transformer, kind: Kind) -> None:
    """Alone, in a crowd, in waves, without its siblings, and with other steps between two looks."""
    together = tokens(bounded(model, kind(9, 4), 5).generate(REQUESTS))
    alone = [tokens(bounded(model, kind(9, 4), 3).generate([r])) for r in REQUESTS]
    assert [row for rows in alone for row in rows] == together
    assert tokens(bounded(model, kind(9, 4), 1, max_batch=3).generate(REQUESTS)) == together
    only = replace(REQUESTS[0], n=1)
    assert tokens(bounded(model, kind(9, 4), 16).generate([only])) == together[:1]


@pytest.mark.parametrize(
    ("kind", "hits"), [(ChosenStreaming, 3), (Liked, 2), (snapkv, 2), (rkv, 2), (ChosenH2O, 0)]
)
def test_a_policy_sees_the_last_queries_of_a_prompt_that_the_prefix_cache_has(
    model: Transformer, kind: Kind, hits: int
) -> None:
    """All three full pages are there, but a policy may have to see the queries of the last three
    tokens, or of all."""
    kv, request = kind(9, 4), Request(prompt(13, 6), n=2, max_tokens=20, ignore_eos=True)
    engine = bounded(model, kv)
    first, second = (engine.generate([request])[0] for _ in range(2))
    assert engine.pool.hits == hits and tokens([first]) == tokens([second])
    assert check_group(kv, second, [model]) > 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_weights_change_between_compactions(folder: Path, model: Transformer, kind: Kind) -> None:
    """Older keys stay, and go on being kept or dropped."""
    kv = kind(9, 4)
    later = nudge(hf.load(folder), 5, size=0.05)
    engine = bounded(model, kv, 3)
    handles = [engine.add(request) for request in REQUESTS[:2]]
    done = dict(group for _ in range(4) for group in engine.step())
    engine.update_weights(WeightUpdate.local(later, 1))
    while engine.has_work:
        done |= dict(engine.step())
    groups = [done[handle] for handle in handles]
    assert any(len(r.behavior.policy) == 2 for group in groups for r in group.rollouts)
    assert sum(check_group(kv, group, [model, later]) for group in groups) > 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_aborts_at_any_step_leave_nothing_and_disturb_nobody(
    model: Transformer, kind: Kind
) -> None:
    kv = kind(9, 4)
    want = tokens(bounded(model, kv).generate([REQUESTS[3]]))
    engine = bounded(model, kv, 3, max_batch=9)
    for steps in (0, 1, 2, 3, 5, 8):
        doomed = engine.add(replace(REQUESTS[0], ignore_eos=True))
        for _ in range(steps):
            engine.step()
        kept = engine.add(REQUESTS[3])
        engine.step()
        assert engine.abort(doomed)
        done: dict[int, Group] = {}
        while engine.has_work:
            done |= dict(engine.step())
        assert tokens([done[kept]]) == want
        check_group(kv, done[doomed], [model])
        assert engine.pool.num_used == engine.scheduler.reserved_pages == 0


def test_stop_strings_and_filters_meet_compactions(model: Transformer) -> None:
    """Rows that take one step at a time, and rows that end in the middle of a run of steps."""

    class Letters:
        eos_token_id = 1

        def decode(self, ids: list[int]) -> str:
            return "".join(chr(97 + i % 26) for i in ids)

    kv = Parity(7, 3)
    engine = bounded(model, kv, 5, tokenizer=Letters())
    plain = replace(REQUESTS[1], n=4)
    ended = replace(plain, stop_strings=("a", "bc"), id="other")
    filtered = replace(plain, min_p=0.05, id="third")
    groups = engine.generate([plain, ended, filtered])
    assert {r.finish_reason for r in groups[1].rollouts} >= {"stop"}
    assert sum(check_group(kv, group, [model]) for group in groups[:2]) > 4
    (alone,) = bounded(model, kv, tokenizer=Letters()).generate([filtered])
    assert tokens([alone]) == tokens([groups[2]])


@pytest.mark.slow
def test_full_rows_wait_while_the_others_take_their_steps(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that waits for its compaction runs along dead: it must write nothing, neither to the
    cache nor to the policy's state."""
    waited, run = [], Runner.run

    def watched(runner: Runner, plan: StepPlan, *more: Any) -> Any:
        waited.append(bool(plan.limits) and min(plan.limits) < plan.steps)
        return run(runner, plan, *more)

    monkeypatch.setattr(Runner, "run", watched)
    for kind in POLICIES:
        kv = kind(9, 4)
        lengths = [Request(prompt(3 + i, i), max_tokens=30, ignore_eos=True) for i in range(5)]
        for group in bounded(model, kv, 16).generate(lengths):
            check_group(kv, group, [model])
    assert sum(waited) > 5


@pytest.mark.slow
def test_a_bounded_cache_takes_requests_that_a_dense_one_refuses(model: Transformer) -> None:
    """24 pages of 4: 200 tokens do not fit, 9 + 4 keys beside the prompt do."""
    long = Request(prompt(20), max_tokens=180, ignore_eos=True)
    with pytest.raises(ValueError, match=r"= 200 is over the KV cache of 96 tokens"):
        engine_of(model, cache_tokens=96).generate([long])
    kv = Recent(9, 4)
    engine = bounded(model, kv, cache_tokens=96)
    (group,) = engine.generate([long])
    check_group(kv, group, [model], logprob_bound=2e-5)
    assert engine.pool.peak_used <= 5 + 3 + 4
    with pytest.raises(
        ValueError,
        match=r"max_tokens: 70 prompt tokens \+ max_tokens 20 take 100 tokens of the cache under "
        r"kv 'recent', which is over the KV cache of 96 tokens",
    ):
        engine.generate([Request(prompt(70), max_tokens=20)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", POLICIES)
def test_a_released_cache_and_a_failed_step_leave_a_working_engine(
    model: Transformer, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = kind(9, 4)
    engine = bounded(model, kv, 3)
    want = numbers(engine.generate(REQUESTS))
    engine.release()
    assert numbers(engine.generate(REQUESTS)) == want
    engine.add(REQUESTS[0])
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.cache, "keep", None)
        with pytest.raises(TypeError):
            while engine.has_work:
                engine.step()
    engine.scheduler.finished()
    assert not engine.has_work and engine.pool.num_used == 0
    assert numbers(engine.generate(REQUESTS)) == want
