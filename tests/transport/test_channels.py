"""All rollout channels: the choice of one never changes a byte, and no garbage comes through."""

from __future__ import annotations

import random
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowroll.transport.codec import decode_batch, encode_batch
from lowroll.transport.frame import check_frame, unpack_batch
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.transport.spool import Spool
from lowroll.types import Batch
from tests.fixtures.any_batch import batches
from tests.fixtures.batches import batch_of, exactly
from tests.fixtures.frames import Fuzz, over


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(batches, min_size=1, max_size=3))
def test_a_batch_is_the_same_through_every_channel(drawn: list[Batch]) -> None:
    sent = [replace(batch, step=step) for step, batch in enumerate(drawn, 1)]
    memory = MemoryRolloutChannel(len(sent))
    for batch in sent:
        memory.send(batch)
    data = [encode_batch(memory.receive(0)) for _ in sent]
    frames = []
    for transport in ("filesystem", "zmq"):
        with tempfile.TemporaryDirectory() as folder:
            received = over(transport, Path(folder), sent)
            assert [exactly(batch) for batch in received] == [exactly(batch) for batch in sent]
            assert [encode_batch(batch) for batch in received] == data
            frames.append([Spool(Path(folder)).get(batch.step) for batch in sent])
    assert frames[0] == frames[1]
    payloads = [check_frame(one, step, "") for step, one in enumerate(frames[0], 1)]
    assert [exactly(unpack_batch(one)) for one in payloads] == list(map(exactly, sent))


@pytest.mark.slow
def test_no_garbage_is_accepted_and_nothing_falls_over(tmp_path: Path) -> None:
    with ExitStack() as stack:
        trials = Fuzz(tmp_path, random.Random(0), stack).trials()
        assert [problem for problem, _ in zip(trials, range(1000), strict=False) if problem] == []


def test_large_lists_are_looked_at_as_closely_as_small_ones() -> None:
    """The codec checks lists at once; one item that is another is found and named all the same."""
    batch = batch_of(1)
    rollout = batch.samples[0].rollout
    many = 1000
    rollout.token_ids, rollout.logprobs = list(range(many)), [-1 / (i + 1) for i in range(many)]
    rollout.top_logprobs = [[(i, -0.5), (i + 1, -1.5)] for i in range(many)]
    assert exactly(decode_batch(encode_batch(batch))) == exactly(batch)
    for field, bad, place in [
        ("token_ids", True, r"token_ids\[500\]: expected int, got bool"),
        ("token_ids", 1.0, r"token_ids\[500\]: expected int, got float"),
        ("logprobs", "x", r"logprobs\[500\]: expected float, got str"),
        ("top_logprobs", [(1, -0.5), (2,)], r"top_logprobs\[500\]\[1\]: expected 2 items, got 1"),
        ("top_logprobs", [(1, -0.5), [2, 0.5]], r"top_logprobs\[500\]\[1\]: expected tuple"),
        ("top_logprobs", [(1, -0.5), (True, 0.5)], r"top_logprobs\[500\]\[1\]: expected int"),
    ]:
        values = list(getattr(rollout, field))
        values[500] = bad
        spoiled = replace(batch, samples=[replace(batch.samples[0], rollout=replace(rollout))])
        setattr(spoiled.samples[0].rollout, field, values)
        with pytest.raises(ValueError, match=place):
            encode_batch(spoiled)
    for number in (float("inf"), float("-inf"), 1e308, -1e308, 3):
        values = [*rollout.logprobs[:500], number, number, *rollout.logprobs[500:]]
        spoiled = replace(batch, samples=[replace(batch.samples[0], rollout=replace(rollout))])
        spoiled.samples[0].rollout.logprobs = values
        assert decode_batch(encode_batch(spoiled)).samples[0].rollout.logprobs == values
