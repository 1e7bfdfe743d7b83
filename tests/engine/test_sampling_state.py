"""What rows ask of a draw, as it lies on the device: after any life of slots it is what the requests
say and their tokens are."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowroll.engine.sampler import shaped
from lowroll.engine.sampling_state import DrawMode, SamplingState, draw_of
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.kernels.sampling.penalties import SEEN, add, shape
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.types import Request
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.scheduling import NEED
from tests.fixtures.tiny import hf_folder

V, SLOTS = 23, 5
ASKS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"min_tokens": 4},
    {"min_tokens": 4, "repetition_penalty": 0.8},
    {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
]


def sample(dice: random.Random, slot: int) -> Sequence:
    stops = tuple(sorted(dice.sample(range(V), dice.choice([0, 2]))))
    request = Request([dice.randrange(V) for _ in range(3)], **dice.choice(ASKS))
    drawn = [dice.randrange(V) for _ in range(dice.randrange(1, 6))]
    return Sequence(LiveGroup(0, request, stops, NEED), 0, 0, drawn, slot=slot, until=99)


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_shaped_as_the_tokens_say(seed: int) -> None:
    """Slots change hands, rows pause, tokens come from elsewhere: against lists of ids."""
    dice = random.Random(seed)
    state = SamplingState(SLOTS, SLOTS, V, torch.device("cpu"))
    live = [sample(dice, slot) for slot in range(SLOTS)]
    for _ in range(30):
        rows = dice.sample(live, dice.randrange(1, SLOTS + 1))
        drawing = draw_of(rows)
        state.upload(rows, len(rows), drawing)
        if drawing is DrawMode.MARKED:
            slots_B = torch.tensor([s.slot for s in rows])
            marked = state.marked(slots_B)
            logits_BV = torch.randn(len(rows), V)
            want_BV = shaped(logits_BV, rows)
            next_B = torch.tensor([s.length for s in rows])
            assert torch.equal(shape(logits_BV.clone(), marked, next_B), want_BV)
            state.drew(rows, 2)
            for s in rows:  # the device marks what it draws; more is drawn elsewhere
                new = [dice.randrange(V) for _ in range(dice.choice([2, 2, 3]))]
                if s.request.repetition_penalty != 1:
                    tokens_N = torch.tensor(new[:2])
                    add(marked.marks_SV, SEEN, torch.full((2,), s.slot), tokens_N)
                s.token_ids += new
        for slot in dice.sample(range(SLOTS), dice.randrange(3)):
            live[slot] = sample(dice, slot)


def test_filters_are_those_of_the_requests_and_dead_rows_have_none() -> None:
    state = SamplingState(4, 4, V, torch.device("cpu"))
    ask = Request([1], top_k=3, top_p=0.5, min_p=0.1)
    asks = [ask, replace(ask, top_k=99, top_p=1.0, min_p=0.0)]
    rows = [Sequence(LiveGroup(0, r, (), NEED), 0, 0, [5], slot=i) for i, r in enumerate(asks)]
    state.upload(rows, 4, DrawMode.FILTERED)
    filters = state.filters(4)
    assert filters.top_k_B.tolist() == [3, V, V, V] and filters.top_p_B.tolist() == [0.5, 1, 1, 1]
    assert filters.log_min_p_B.tolist() == [math.log(0.1)] + [-math.inf] * 3
    assert state.marked(torch.zeros(4, dtype=torch.int64)).penalty_B.tolist() == [1] * 4


# -- in an engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return hf.load(hf_folder(tmp_path_factory.mktemp("models") / "m"))


BASE = Request(prompt(9), n=3, max_tokens=14, ignore_eos=True)
MIX = [
    BASE,
    replace(BASE, seed=1, repetition_penalty=1.5, top_p=0.9),
    replace(BASE, seed=2, min_tokens=9, stop_ids=(3, 4, 5, 6, 7, 8)),
    replace(BASE, seed=3, repetition_penalty=1.3, min_tokens=5, stop_ids=(3, 9), temperature=0.0),
    replace(BASE, seed=4, top_k=4, min_p=0.02),
]


@pytest.mark.slow
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_row_keeps_its_tokens_whatever_is_beside_it(model: Transformer, one_pass: bool) -> None:
    """Alone, among others, in waves of few slots, beside prompts that come later."""
    engine = engine_of(model, lookahead=4)
    alone = [engine.generate([request])[0] for request in MIX]
    few = engine_of(model, lookahead=4, max_batch=4, one_pass=one_pass)
    handles = {few.add(request): i for i, request in enumerate(MIX[:2])}
    few.step()
    few.step()
    handles |= {few.add(request): i + 2 for i, request in enumerate(MIX[2:])}
    while few.has_work:
        for handle, group in few.step():
            for rollout, want in zip(group.rollouts, alone[handles[handle]].rollouts, strict=True):
                assert rollout.finish_reason == want.finish_reason
                assert rollout.token_ids == want.token_ids
                assert rollout.logprobs == pytest.approx(want.logprobs, abs=1e-5)


def test_a_replay_draws_what_a_fresh_engine_draws(model: Transformer) -> None:
    """Drafts are checked with the penalties and bans of their places, and marked when they end."""
    engine, fresh = (engine_of(model, lookahead=3) for _ in range(2))
    handles = [engine.add(request) for request in MIX]
    for _ in range(3):
        engine.step()
    engine.scheduler.rewind()
    done = {}
    while engine.has_work:
        done |= dict(engine.step())
    assert engine.stats().replays == 15
    for handle, want in zip(handles, fresh.generate(MIX), strict=True):
        for rollout, other in zip(done[handle].rollouts, want.rollouts, strict=True):
            assert rollout.token_ids == other.token_ids
            assert rollout.logprobs == pytest.approx(other.logprobs, abs=1e-5)
