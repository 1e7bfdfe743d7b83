"""The codec loses nothing and refuses everything else; channels keep order, deadlines and
identity."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings

from lowroll import types
from lowroll.transport.base import ChannelClosed, DeadlineExceeded
from lowroll.transport.codec import (
    CodecError,
    decode_batch,
    decode_sample,
    encode_batch,
    encode_sample,
)
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.transport.rollout_log import (
    read_rollouts,
    rollout_files,
    truncate_rollouts,
    without_evictions,
    write_rollouts,
)
from lowroll.types import (
    Batch,
    Evictions,
    Prompt,
    Sample,
)
from tests.fixtures.any_batch import batches
from tests.fixtures.batches import batch_of, exactly, sample_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@settings(max_examples=150)
@given(batches)
def test_decode_gives_back_exactly_what_was_encoded(batch: Batch) -> None:
    data = encode_batch(batch)
    back = decode_batch(data)
    assert exactly(back) == exactly(batch)
    assert encode_batch(back) == data
    for sample in batch.samples:
        assert exactly(decode_sample(encode_sample(sample))) == exactly(sample)


def test_every_double_survives() -> None:
    rng = random.Random(0)
    numbers = [
        float.fromhex("0x1p-1074"),
        5e-324,
        1.7976931348623157e308,
        0.1,
        -0.0,
        1 / 3,
        math.inf,
        -math.inf,
    ]
    numbers += [math.ldexp(rng.random(), rng.randrange(-1070, 1020)) for _ in range(2000)]
    sample = sample_of()
    sample.rollout.logprobs = numbers
    assert [x.hex() for x in decode_sample(encode_sample(sample)).rollout.logprobs] == [
        x.hex() for x in numbers
    ]
    sample.rollout.logprobs = [math.nan]
    assert math.isnan(decode_sample(encode_sample(sample)).rollout.logprobs[0])


def test_lines_are_plain_json_that_a_person_can_read() -> None:
    lines = encode_batch(batch_of()).decode().splitlines()
    header, first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert header == {
        "kind": "batch",
        "format": 1,
        "num_samples": 2,
        "step": 12,
        "temperature": 1.0,
        "stats": {"reward/mean": 1.0},
    }
    assert first["rollout"]["logprobs"] == [-0.1, -1e-300, "-inf"]
    assert first["score"] == {"type": "Score", "reward": 1.0, "metrics": {"format": 0.5}}
    assert second["score"] == {"type": "ScoreError", "kind": "timeout", "message": "10 s"}
    assert first["rollout"]["behavior"]["policy"] == [{"version": 3, "digest": "ab12", "start": 0}]


def test_whole_numbers_in_float_fields_become_floats() -> None:
    back = decode_sample(encode_sample(sample_of(advantage=0, reward=1)))
    assert exactly((back.advantage, back.reward)) == "(0.0, 1.0)"


def changed(change: typing.Callable[[dict], object]) -> bytes:
    value = json.loads(encode_sample(sample_of()))
    change(value)
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(bonus=1), r"sample: Object contains unknown field `bonus`"),
        (
            lambda s: s["rollout"].pop("logprobs"),
            r"sample\.rollout: Object missing required field `logprobs`",
        ),
        (
            lambda s: s["rollout"]["logprobs"].append("0.5"),
            r"sample\.rollout\.logprobs\[3\]: Invalid enum value '0\.5'",
        ),
        (
            lambda s: s["rollout"]["logprobs"].append(True),
            r"logprobs\[3\]: Expected `.*float.*`, got `bool`",
        ),
        (lambda s: s["rollout"]["logprobs"].append(None), r"logprobs\[3\]"),
        (
            lambda s: s["rollout"]["token_ids"].append(1.0),
            r"token_ids\[3\]: Expected `int`, got `float`",
        ),
        (
            lambda s: s["rollout"]["token_ids"].append(True),
            r"token_ids\[3\]: Expected `int`, got `bool`",
        ),
        (
            lambda s: s["rollout"].update(finish_reason="done"),
            r"finish_reason: Invalid enum value 'done'",
        ),
        (lambda s: s["rollout"].update(finish_reason=[]), r"finish_reason"),
        (
            lambda s: s["rollout"].update(stop_reason=1.5),
            r"stop_reason: Expected `int \| str \| null`, got `float`",
        ),
        (
            lambda s: s["rollout"]["behavior"].update(policy={}),
            r"behavior\.policy: Expected `array`, got `object`",
        ),
        (
            lambda s: s["rollout"]["behavior"]["policy"][0].update(version="3"),
            r"policy\[0\]\.version: Expected `int`",
        ),
        (lambda s: s["rollout"]["behavior"].update(kv_budget="512"), r"kv_budget"),
        (lambda s: s["score"].pop("type"), r"score: Object missing required field `type`"),
        (
            lambda s: s["score"].update(type="ScoreError"),
            r"score: Object contains unknown field `reward`",
        ),
        (lambda s: s["score"].update(type=["Score"]), r"score\.type: Expected `str`"),
        (lambda s: s["score"].update(reward=10**400), r"score\.reward: Number out of range"),
        (lambda s: s.update(score=1.0), r"score: Expected `object`, got `float`"),
        (
            lambda s: s["prompt"].update(messages="hi"),
            r"prompt\.messages: Expected `array`, got `str`",
        ),
        (
            lambda s: s["prompt"]["messages"].append("hi"),
            r"messages\[1\]: Expected `object`, got `str`",
        ),
        (lambda s: s.update(reward="high"), r"reward"),
        (lambda s: s.clear(), r"missing required field"),
    ],
)
def test_ill_formed_samples_are_refused_with_the_field(
    change: typing.Callable[[dict], object], message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        decode_sample(changed(change))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b"{",
        b'{"prompt":NaN}',
        b'{"a":1,"a":2}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"9" * 5000,
        b'{"group": -Infinity}',
        "not json\u2028".encode(),
    ],
)
def test_garbage_is_a_typed_error(line: bytes) -> None:
    with pytest.raises(CodecError):
        decode_sample(line)


def test_lines_that_another_writer_of_json_wrote_read_the_same() -> None:
    """Logs of earlier versions have Python's decimals (1e+16, 1e-05) in the place of msgspec's."""
    numbers = [1e16, 1e-5, -1e-300, 0.1, -0.0, 123456789.125]
    rollout = dataclasses.replace(sample_of().rollout, logprobs=numbers)
    sample = sample_of(rollout=rollout, text="é\n")
    line = json.dumps(json.loads(encode_sample(sample)), ensure_ascii=False, separators=(",", ":"))
    assert "1e+16,1e-05,-1e-300" in line
    assert exactly(decode_sample(line.encode() + b"\n")) == exactly(sample)


def test_torn_and_miscounted_batches_are_refused() -> None:
    data = encode_batch(batch_of())
    for cut in range(len(data)):
        with pytest.raises(CodecError):
            decode_batch(data[:cut])
    header, first, second = data.splitlines(keepends=True)
    for wrong, message in [
        (header + first, "num_samples is 2, 1 samples follow"),
        (data + second, "3 samples follow"),
        (header + second + b"{}\n", "line 3: sample: Object missing"),
        (first + second, "not the header"),
        (data.replace(b'"format":1', b'"format":2'), "format 2"),
        (data + b"\n", "3 samples"),
        (data.replace(b'"step":12', b'"step":12.0'), r"line 1: batch\.step: Expected `int`"),
        (data.replace(b'"step":12,', b""), "line 1: batch: Object missing required field `step`"),
    ]:
        with pytest.raises(CodecError, match=message):
            decode_batch(wrong)
    with pytest.raises(CodecError, match="over the limit of 10"):
        decode_batch(data, max_bytes=10)


def test_random_bytes_in_a_batch_never_escape_as_another_error() -> None:
    rng = random.Random(0)
    data = encode_batch(batch_of())
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode_batch(bytes(damaged))  # a change inside a text or a number is a valid batch
        except CodecError:
            pass


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            sample_of(prompt=Prompt("p", "e", [], {"span": (1, 2)})),
            r"sample\.prompt\.info\.span: a tuple is not JSON",
        ),
        (sample_of(prompt=Prompt("p", "e", [], {"x": [math.nan]})), r"info\.x\[0\]: nan"),
        (sample_of(prompt=Prompt("p", "e", [], {"x": {3: 4}})), r"info\.x: key: expected str"),
        (sample_of(text="\ud800"), "Unicode"),
        (sample_of(prompt_ids=[1, 2.0]), r"prompt_ids\[1\]: expected int"),
        (sample_of(prompt_ids=(1, 2)), r"prompt_ids: expected list, got tuple"),
        (sample_of(advantage="0"), r"advantage: expected float, got str"),
        (sample_of(advantage=2**53 + 1), r"advantage: expected float, got int"),
        (sample_of(advantage=10**400), r"advantage: expected float, got int"),
        (sample_of(score=None), r"score: NoneType is none of Score, ScoreError"),
        (
            sample_of(rollout=dataclasses.replace(sample_of().rollout, finish_reason="eos")),
            r"finish_reason: 'eos'",
        ),
    ],
)
def test_what_json_would_change_is_refused_when_encoding(sample: Sample, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        encode_sample(sample)


def test_the_codec_knows_every_field_of_the_nouns() -> None:
    """A field added to a noun is carried at once, and its absence is noticed."""
    evictions = Evictions(1, 2, (3,), b"\xff\0")
    turns = (types.Turn(0, 1, "stop", 7),)
    rollout = dataclasses.replace(
        sample_of().rollout, evictions=evictions, top_logprobs=[], turns=turns
    )
    said = {"messages": [{"role": "user", "content": "a"}], "ended": "done"}
    sample = sample_of(rollout=rollout, temperature=0.5, **said)
    assert decode_sample(encode_sample(sample)) == sample
    value = json.loads(encode_sample(sample))
    tagged = {name: x for name, x in value["rollout"]["evictions"].items() if name != "type"}
    for kind, part in (
        (types.Sample, value),
        (types.Prompt, value["prompt"]),
        (types.Rollout, value["rollout"]),
        (types.BehaviorTag, value["rollout"]["behavior"]),
        (types.Evictions, tagged),
        (types.Turn, value["rollout"]["turns"][0]),
    ):
        assert set(part) == {field.name for field in dataclasses.fields(kind)}


def test_what_was_not_recorded_leaves_no_trace_in_a_message() -> None:
    """A file from before the field was there reads as it did, and has the same bytes."""
    line = encode_sample(sample_of())
    assert b"evictions" not in line and decode_sample(line).rollout.evictions is None
    assert b"top_logprobs" not in line and decode_sample(line).rollout.top_logprobs is None
    with pytest.raises(
        CodecError, match=r"sample\.rollout\.evictions: Expected `object`, got `null`"
    ):
        decode_sample(changed(lambda v: v["rollout"].update(evictions=None)))


def test_likeliest_tokens_travel_as_pairs() -> None:
    told = [[(7, -0.25), (3, -1.5)], [], [(0, 0.0)]]
    rollout = dataclasses.replace(sample_of().rollout, top_logprobs=told)
    line = encode_sample(sample_of(rollout=rollout))
    assert b'"top_logprobs":[[[7,-0.25],[3,-1.5]],[],[[0,0.0]]]' in line
    assert decode_sample(line).rollout.top_logprobs == told
    value = json.loads(line)
    for pair in ([7], [7, -0.25, 1], ["7", -0.25], [7, None], 7):
        value["rollout"]["top_logprobs"] = [[pair]]
        with pytest.raises(CodecError, match=r"rollout\.top_logprobs\[0\]\[0\]"):
            decode_sample(json.dumps(value).encode())
    for wrong in ([[(7,)]], [[[7, -0.25]]], [[(7, -0.25, 1)]]):
        rollout = dataclasses.replace(rollout, top_logprobs=wrong)
        with pytest.raises(CodecError, match=r"rollout\.top_logprobs\[0\]\[0\]"):
            encode_sample(sample_of(rollout=rollout))


@pytest.mark.parametrize("numbers", ["!", "YQ", "YQ==\n", 5, None, "é"])
def test_bytes_are_strict_base64(numbers: object) -> None:
    rollout = dataclasses.replace(sample_of().rollout, evictions=Evictions(1, 1, (0,), b"a"))
    line = encode_sample(sample_of(rollout=rollout))
    assert b'"numbers":"YQ=="' in line
    value = json.loads(line)
    value["rollout"]["evictions"]["numbers"] = numbers
    with pytest.raises(CodecError, match="numbers"):
        decode_sample(json.dumps(value).encode())


def test_the_log_for_people_leaves_out_what_caches_dropped() -> None:
    batch = batch_of()
    assert without_evictions(batch) is batch
    evictions = Evictions(1, 2, (3,), b"abc")
    batch.samples[1].rollout.evictions = evictions
    shorter = without_evictions(batch)
    assert encode_batch(shorter) == encode_batch(batch_of())
    assert batch.samples[1].rollout.evictions is evictions


def test_memory_channel_passes_what_the_codec_would(tmp_path: Path) -> None:
    """The choice of channel never changes a byte: memory and file hand over the same batch."""
    channel = MemoryRolloutChannel()
    channel.send(batch_of())
    received = channel.receive(0)
    assert encode_batch(received) == encode_batch(
        read_rollouts(write_rollouts(tmp_path, batch_of()))
    )
    assert exactly(received) == exactly(decode_batch(encode_batch(received)))


def test_batches_arrive_once_and_in_order_across_threads() -> None:
    channel = MemoryRolloutChannel(capacity=2)
    sender = threading.Thread(
        target=lambda: ([channel.send(batch_of(step)) for step in range(50)], channel.close())
    )
    sender.start()
    assert [channel.receive(30).step for _ in range(50)] == list(range(50))
    with pytest.raises(ChannelClosed, match="closed and empty"):
        channel.receive(30)
    sender.join()
    with pytest.raises(ChannelClosed, match="step 7"):
        channel.send(batch_of(7))


def test_waits_end_and_name_what_they_waited_for() -> None:
    channel = MemoryRolloutChannel(capacity=1, send_deadline_s=0.01)
    with pytest.raises(DeadlineExceeded, match="0.01 s for a batch of rollouts"):
        channel.receive(0.01)
    channel.send(batch_of(1))
    with pytest.raises(
        DeadlineExceeded, match="room in the rollout channel for the batch of step 2"
    ):
        channel.send(batch_of(2))
    assert channel.receive(0).step == 1  # the refused batch did not enter
    with pytest.raises(DeadlineExceeded):
        channel.receive(0)
    for deadline in (-1, math.inf, math.nan, None, True):
        with pytest.raises(ValueError, match="deadline_s"):
            channel.receive(deadline)


def test_rollout_files_are_replaced_whole_and_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "rollouts"
    for step in (1, 2, 12):
        assert write_rollouts(folder, batch_of(step)).name == f"step_{step:06d}.jsonl"
    (folder / "step_x.jsonl").write_text("foreign")
    again = Batch(2, [sample_of(5)], 0.7)
    write_rollouts(folder, again)
    assert read_rollouts(folder / "step_000002.jsonl") == again

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            write_rollouts(folder, batch_of(2))
    assert read_rollouts(folder / "step_000002.jsonl") == again
    with pytest.raises(CodecError, match="info"):
        write_rollouts(folder, Batch(2, [sample_of(prompt=Prompt("p", "e", [], {"x": {1}}))], 1.0))
    (folder / "step_000013.jsonl").write_text("somebody else's, though named like ours")
    truncate_rollouts(folder, 2)
    assert [step for step, _ in rollout_files(folder)] == [1, 2, 13]
    assert sorted(path.name for path in folder.iterdir()) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
        "step_000013.jsonl",
        "step_x.jsonl",
    ]
    (folder / "step_000001.jsonl").write_bytes(b"{}\n")
    with pytest.raises(CodecError, match=r"step_000001\.jsonl: line 1"):
        read_rollouts(folder / "step_000001.jsonl")


def test_no_damage_to_a_rollout_file_is_read_as_rollouts(tmp_path: Path) -> None:
    """Flips, cuts, zeroed tails, and lines that are gone, doubled or exchanged; a file under
    another step's name."""
    path = write_rollouts(tmp_path, Batch(3, [sample_of(i) for i in range(4)], 0.7))
    whole, rng = path.read_bytes(), random.Random(0)
    for trial in range(200):
        data, lines, at = (
            bytearray(whole),
            whole.splitlines(keepends=True),
            rng.randrange(len(whole)),
        )
        if trial % 4 == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif trial % 4 == 1:
            del data[at:]
        elif trial % 4 == 2:
            data[at:] = bytes(len(data) - at)
        else:
            i, j = rng.sample(range(1, 5), 2)
            lines[i : i + 1] = rng.choice([[], [lines[i]] * 2, [lines[j]]])
            data = bytearray(b"".join(lines))
        path.write_bytes(data)
        with pytest.raises(CodecError, match=r"step_000003\.jsonl: "):
            read_rollouts(path)
    older = encode_batch(Batch(3, [sample_of(1)], 0.7))  # of a lowroll without checksums
    path.write_bytes(older)
    assert read_rollouts(path).samples == [sample_of(1)]
    with pytest.raises(CodecError, match=r"step_000004\.jsonl: holds the rollouts of step 3"):
        read_rollouts(path.rename(tmp_path / "step_000004.jsonl"))


def test_the_room_opens_without_torch() -> None:
    code = "import sys, lowroll.transport; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
