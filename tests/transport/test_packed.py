"""Long lists as bytes: which bytes, the same numbers behind them, and what is refused."""

from __future__ import annotations

import base64
import json
import math
import struct
from dataclasses import replace

import pytest

from lowroll.transport import codec, packed
from lowroll.transport.codec import CodecError
from lowroll.types import Batch, Sample
from tests.fixtures.batches import batch_of, exactly, sample_of


def with_lists(**lists: object) -> Sample:
    sample = sample_of()
    rollout = {name: lists.pop(name) for name in ("token_ids", "logprobs") if name in lists}
    return replace(sample, rollout=replace(sample.rollout, **rollout), **lists)


def test_the_bytes_of_a_sample_are_those_of_its_numbers() -> None:
    sample = with_lists(prompt_ids=[1, 258], loss_mask=[0, 1, 1])
    line = json.loads(packed.encode_sample(sample))
    numbers = {name: base64.b64decode(line[name]) for name in line if name != "sample"}
    assert numbers == {
        "prompt_ids": bytes([1, 0, 0, 0, 2, 1, 0, 0]),
        "token_ids": bytes([5, 0, 0, 0, 6, 0, 0, 0, 2, 0, 0, 0]),
        "logprobs": struct.pack("<3d", *sample.rollout.logprobs),
        "loss_mask": bytes([0, 1, 1]),
    }
    told = line["sample"]
    assert told["prompt_ids"] == told["loss_mask"] == told["rollout"]["token_ids"] == []
    assert told["rollout"]["logprobs"] == [] and told["text"] == "two"


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_every_number_comes_back_as_it_was(count: int) -> None:
    odd = [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, 1.7976931348623157e308]
    sample = with_lists(
        prompt_ids=[2**31 - 1, -(2**31)] * count,
        token_ids=list(range(count)),
        logprobs=odd * count,
        loss_mask=[0, 255] * count,
    )
    before = exactly(sample)
    batch = Batch(3, [sample], 0.5, {"reward/mean": 1.0})
    data = packed.encode_batch(batch)
    assert exactly(packed.decode_batch(data)) == exactly(batch)
    assert exactly(sample) == before  # writing it takes nothing from it
    assert packed.encode_batch(packed.decode_batch(data)) == data


def test_a_whole_number_is_a_log_prob_as_in_the_log() -> None:
    batch = batch_of(1)
    batch.samples[0].rollout.logprobs = [0, -3, -0.5]
    as_text = codec.decode_batch(codec.encode_batch(batch))
    assert exactly(packed.decode_batch(packed.encode_batch(batch))) == exactly(as_text)


@pytest.mark.parametrize(
    "field, bad, told",
    [
        ("prompt_ids", 2**31, r"sample\.prompt_ids: .*"),
        ("token_ids", True, r"sample\.rollout\.token_ids: expected int, got bool"),
        ("token_ids", 1.0, r"sample\.rollout\.token_ids: expected int, got float"),
        ("token_ids", None, r"sample\.rollout\.token_ids: expected int, got NoneType"),
        ("logprobs", "x", r"sample\.rollout\.logprobs: expected float or int, got str"),
        ("logprobs", 10**400, r"sample\.rollout\.logprobs: "),
        ("loss_mask", 256, r"sample\.loss_mask: ubyte format"),
        ("loss_mask", -1, r"sample\.loss_mask: ubyte format"),
    ],
)
def test_a_number_that_does_not_fit_is_named(field: str, bad: object, told: str) -> None:
    with pytest.raises(CodecError, match=told):
        packed.encode_sample(with_lists(**{field: [1, bad]}))


def damaged(**changes: object) -> bytes:
    line = json.loads(packed.encode_sample(sample_of()))
    return json.dumps(line | changes).encode()


@pytest.mark.parametrize(
    "line, told",
    [
        (damaged(token_ids="AQAAAAE="), r"sample\.token_ids: 5 bytes are no whole numbers"),
        (damaged(logprobs="AQAAAA=="), r"sample\.logprobs: 4 bytes are no whole numbers"),
        (damaged(loss_mask="?"), r"sample\.loss_mask: not base64"),
        (damaged(more=1), "unknown field 'more'"),
        (codec.encode_sample(sample_of()), "unknown field"),
    ],
)  # fmt: skip
def test_lines_that_are_none_are_refused(line: bytes, told: str) -> None:
    with pytest.raises(CodecError, match=told):
        packed.decode_sample(line)


@pytest.mark.parametrize("field", ["prompt_ids", "loss_mask", "token_ids", "logprobs"])
def test_numbers_as_text_are_refused(field: str) -> None:
    line = json.loads(packed.encode_sample(sample_of()))
    (line["sample"] if field in line["sample"] else line["sample"]["rollout"])[field] = [1]
    with pytest.raises(CodecError, match="numbers as text"):
        packed.decode_sample(json.dumps(line).encode())
