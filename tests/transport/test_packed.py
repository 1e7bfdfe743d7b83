"""Long lists as bytes: which bytes, the same numbers behind them, and what is refused."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace

import msgspec
import pytest

from lowroll.transport import codec
from lowroll.transport.codec import CodecError
from lowroll.transport.frame import (
    PackedSample,
    pack_batch,
    pack_sample,
    unpack_batch,
    unpack_sample,
)
from lowroll.types import Batch, Sample
from tests.fixtures.batches import batch_of, exactly, sample_of


def with_lists(**lists: object) -> Sample:
    sample = sample_of()
    rollout = {name: lists.pop(name) for name in ("token_ids", "logprobs") if name in lists}
    return replace(sample, rollout=replace(sample.rollout, **rollout), **lists)


def test_the_bytes_of_a_sample_are_those_of_its_numbers() -> None:
    sample = with_lists(prompt_ids=[1, 258], loss_mask=[0, 1, 1])
    packed = pack_sample(sample)
    assert (packed.prompt_ids, packed.token_ids, packed.logprobs, packed.loss_mask) == (
        bytes([1, 0, 0, 0, 2, 1, 0, 0]),
        bytes([5, 0, 0, 0, 6, 0, 0, 0, 2, 0, 0, 0]),
        struct.pack("<3d", *sample.rollout.logprobs),
        bytes([0, 1, 1]),
    )
    told = json.loads(packed.sample)
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
    data = pack_batch(batch)
    assert exactly(unpack_batch(data)) == exactly(batch)
    assert exactly(sample) == before  # writing it takes nothing from it
    assert pack_batch(unpack_batch(data)) == data


def test_a_whole_number_is_a_log_prob_as_in_the_log() -> None:
    batch = batch_of(1)
    batch.samples[0].rollout.logprobs = [0, -3, -0.5]
    as_text = codec.decode_batch(codec.encode_batch(batch))
    assert exactly(unpack_batch(pack_batch(batch))) == exactly(as_text)


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
        pack_sample(with_lists(**{field: [1, bad]}))


def damaged(**changes: object) -> PackedSample:
    return msgspec.structs.replace(pack_sample(sample_of()), **changes)


@pytest.mark.parametrize(
    "packed, told",
    [
        (damaged(token_ids=bytes(5)), r"sample\.rollout\.token_ids: 5 bytes are no whole numbers"),
        (damaged(logprobs=bytes(4)), r"logprobs: 4 bytes are no whole numbers"),
        (damaged(sample=b"{}"), "sample: Object missing required field"),
        (damaged(sample=codec.encode_sample(sample_of())), "numbers as text"),
    ],
)
def test_samples_that_are_none_are_refused(packed: PackedSample, told: str) -> None:
    with pytest.raises(CodecError, match=told):
        unpack_sample(packed)


@pytest.mark.parametrize("field", ["prompt_ids", "loss_mask", "token_ids", "logprobs"])
def test_numbers_as_text_are_refused(field: str) -> None:
    line = json.loads(pack_sample(sample_of()).sample)
    (line if field in line else line["rollout"])[field] = [1]
    with pytest.raises(CodecError, match="numbers as text"):
        unpack_sample(damaged(sample=json.dumps(line).encode()))


def test_a_payload_that_is_none_is_refused() -> None:
    data = pack_batch(batch_of(1))
    header, _, samples = data.partition(b"\n")
    more = msgspec.msgpack.encode([[*one, b""] for one in msgspec.msgpack.decode(samples)])
    for wrong in (data[:-1], data + b"x", header, header + b"\n", header + b"\n\x90", b""):
        with pytest.raises(CodecError, match="samples"):
            unpack_batch(wrong)
    with pytest.raises(CodecError, match="Expected `array` of at most length 5, got 6"):
        unpack_batch(header + b"\n" + more)
