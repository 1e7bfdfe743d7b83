"""What a request has drawn so far: a look between two steps shows the beginning of what comes out,
and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowroll.engine.base import PartialSample
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.types import Group, Request, Rollout
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tiny import hf_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return hf.load(hf_folder(tmp_path_factory.mktemp("models") / "m"))


def copied(drawn: PartialSample) -> PartialSample:
    """A look that does not grow."""
    top = None if drawn.top_logprobs is None else list(drawn.top_logprobs)
    return replace(
        drawn, token_ids=list(drawn.token_ids), logprobs=list(drawn.logprobs), top_logprobs=top
    )


def begins(drawn: PartialSample, rollout: Rollout) -> bool:
    """Whether a look shows how a rollout began, or all of it if it says that it has ended."""
    length = len(drawn.token_ids)
    top = None if rollout.top_logprobs is None else rollout.top_logprobs[:length]
    ended = (drawn.finish_reason, drawn.stop_reason)
    if drawn.finish_reason is None:
        right = ended == (None, None)
    else:
        right = ended == (rollout.finish_reason, rollout.stop_reason)
        right &= length == len(rollout.token_ids)
    return (
        right
        and drawn.token_ids == rollout.token_ids[:length]
        and drawn.logprobs == rollout.logprobs[:length]
        and drawn.top_logprobs == top
    )


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("n", [1, 8])
def test_every_look_is_the_beginning_of_the_end(model: Transformer, n: int, top: int) -> None:
    request = Request(prompt(9), n=n, max_tokens=12, seed=3, top_logprobs=top)
    engine = engine_of(model, max_batch=5, lookahead=2)
    handle = engine.add(request)
    looks: list[list[PartialSample]] = []
    done: dict[int, Group] = {}
    while engine.has_work:
        looks.append([copied(drawn) for drawn in engine.so_far(handle)])
        done |= dict(engine.step())
    assert engine.so_far(handle) == []
    for sample, rollout in enumerate(done[handle].rollouts):
        lengths = [len(look[sample].token_ids) for look in looks]
        assert lengths[0] == 0 and lengths == sorted(lengths)
        assert (rollout.top_logprobs is None) == (top == 0)
        for look in looks:
            assert begins(look[sample], rollout)
    assert len({sum(len(drawn.token_ids) for drawn in look) for look in looks}) > 5
    assert n == 1 or any(drawn.finish_reason for drawn in looks[-1])
    (alone,) = engine_of(model).generate([request])
    assert [r.token_ids for r in alone.rollouts] == [r.token_ids for r in done[handle].rollouts]


def test_an_aborted_request_shows_what_it_had_until_it_is_returned(model: Transformer) -> None:
    engine = engine_of(model)
    kept, doomed = (engine.add(Request(prompt(5), n=2, seed=i, ignore_eos=True)) for i in (1, 2))
    for _ in range(3):
        engine.step()
    assert engine.abort(doomed)
    looks = engine.so_far(doomed)
    assert [(len(d.token_ids), d.finish_reason) for d in looks] == [(3, "abort")] * 2
    assert [d.finish_reason for d in engine.so_far(kept)] == [None, None]
    ((handle, group),) = engine.step()
    assert handle == doomed and all(map(begins, looks, group.rollouts))
    assert engine.so_far(doomed) == []


def test_only_the_handles_of_requests_are_known(model: Transformer) -> None:
    engine = engine_of(model)
    handle = engine.add(Request(prompt(5)))
    for wrong in (-1, handle + 1):
        with pytest.raises(ValueError, match=f"^handle: {wrong} is of no request"):
            engine.so_far(wrong)


def test_the_lookahead_is_a_number_of_steps_that_the_device_can_take(model: Transformer) -> None:
    for wrong in (0, 17):
        with pytest.raises(ValueError, match=f"^lookahead: expected 1..16 steps, got {wrong}"):
            engine_of(model, lookahead=wrong)
    for given, lookahead, gather in ((None, 1, 0), (1, 1, 0), (4, 4, 3), (16, 16, 15)):
        scheduler = engine_of(model, lookahead=given).scheduler
        assert (scheduler.lookahead, scheduler.gather) == (lookahead, gather)
