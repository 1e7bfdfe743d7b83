"""Rows that decode in the pass over prompts draw what they draw apart from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowroll import Engine
from lowroll.engine.runner import Runner
from lowroll.engine.sequence import StepPlan
from lowroll.kv.policy.table import make
from lowroll.model import hf, lora
from lowroll.model.transformer import Transformer
from lowroll.types import Group, Request, Rollout
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tiny import hf_folder

PACES = [
    {"lookahead": 4},
    {"lookahead": 4, "gather": 0, "max_prefill_tokens": 12},
    {"lookahead": 4, "gather": 0, "max_prefill_tokens": 12, "one_pass": True},
    {"lookahead": 1, "gather": 2, "max_prefill_tokens": 20, "one_pass": True, "prefill_chunk": 5},
]
STEM = prompt(9, 1)
REQUESTS = [
    Request(STEM + prompt(3, 2), n=8, max_tokens=12, seed=1, stop_ids=(9, 17)),
    Request(prompt(5, 3), n=1, max_tokens=20, seed=2, top_p=0.9, top_logprobs=2),
    Request(STEM + prompt(2, 4), n=1, max_tokens=15, seed=3, repetition_penalty=1.2),
    Request(prompt(6, 5), n=3, max_tokens=9, seed=4, temperature=0.0, min_tokens=4),
    Request(STEM, n=1, max_tokens=14, seed=5, top_logprobs=1),
    Request(prompt(18, 6), n=2, max_tokens=6, seed=6),
]


@pytest.fixture
def model(tmp_path: Path) -> Transformer:
    return hf.load(hf_folder(tmp_path / "m"), "cpu", torch.float32)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of the turns in which rows and prompts ran: in one pass or not, and how many rows."""
    seen: list[tuple[bool, int]] = []
    run = Runner.run

    def watched(runner: Runner, plan: StepPlan, *args: object) -> object:
        if plan.prefills and plan.decodes:
            seen.append((runner.one_pass, len(plan.decodes)))
        return run(runner, plan, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "run", watched)
    return seen


def one_by_one(engine: Engine, update: WeightUpdate | None = None) -> list[Group]:
    """Requests that come every second turn; the third is aborted in the fifth turn, and the weights
    change in the eighth."""
    handles: list[int] = []
    done: dict[int, Group] = {}
    turns = 0
    while len(done) < len(REQUESTS):
        if turns % 2 == 0 and len(handles) < len(REQUESTS):
            handles.append(engine.add(REQUESTS[len(handles)]))
        if turns == 4:
            engine.abort(handles[2])
        if turns == 7 and update is not None:
            engine.update_weights(update)
        done |= dict(engine.step())
        turns += 1
    assert engine.pool.num_used == engine.scheduler.reserved_pages == 0
    return [done[handle] for handle in handles]


def same(ours: list[Group], theirs: list[Group]) -> None:
    def rollouts(groups: list[Group]) -> list[Rollout]:
        return [rollout for group in groups for rollout in group.rollouts]

    for one, other in zip(rollouts(ours), rollouts(theirs), strict=True):
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert (one.top_logprobs is None) == (other.top_logprobs is None)
        for told, wanted in zip(one.top_logprobs or [], other.top_logprobs or [], strict=True):
            assert [i for i, _ in told] == [i for i, _ in wanted]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("pace", PACES[1:])
def test_the_pace_changes_no_token(
    model: Transformer, adapted: bool, pace: dict, beside: list[tuple[bool, int]]
) -> None:
    if adapted:
        model = lora.attach(model, 4, 8.0, lora.TARGETS)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".adapter.b." in name:
                    weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    wanted = [engine_of(model, **PACES[0]).generate([request])[0] for request in REQUESTS]
    beside.clear()
    engine = engine_of(model, max_batch=7, **pace)
    same(engine.generate(REQUESTS), wanted)
    found = one_by_one(engine)
    whole = [i for i in range(len(REQUESTS)) if i != 2]
    same([found[i] for i in whole], [wanted[i] for i in whole])
    assert beside and {one for one, _ in beside} == {pace.get("one_pass", False)}
    assert max(rows for _, rows in beside) > 1


def test_new_weights_on_the_way_are_everybodys(model: Transformer) -> None:
    """A token is of the weights of its turn: the first of each sample stays, and the tags say which
    drew which."""
    again = replace(REQUESTS[1], top_logprobs=0)
    engine = engine_of(model, lookahead=1, gather=0, one_pass=True)
    handle = engine.add(again)
    for _ in range(4):
        engine.step()
    late = engine.add(REQUESTS[5])
    engine.update_weights(WeightUpdate.local(model, 1))
    done: dict[int, Group] = {}
    while len(done) < 2:
        done |= dict(engine.step())
    (rollout,) = done[handle].rollouts
    assert [(span.version, span.start) for span in rollout.behavior.policy] == [(0, 0), (1, 4)]
    assert all(r.behavior.policy[0].version == 1 for r in done[late].rollouts)
    (wanted,) = engine_of(model).generate([again])[0].rollouts
    assert rollout.token_ids == wanted.token_ids


def test_what_watches_and_two_models_stay_apart(model: Transformer) -> None:
    dense, bounded = (
        engine_of(model, one_pass=True, kv=kv) for kv in (None, make("streaming", budget=12))
    )
    assert dense.runner.one_pass and not bounded.runner.one_pass
    assert not engine_of(
        model, weights="int4", large_batch_weights="int8", one_pass=True
    ).runner.one_pass
