"""A sample that is logged and sent is written once: the same bytes, or fresh ones where it is another
object."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lowroll.transport import codec, encode_batch, write_rollouts
from lowroll.transport.codec import Lines
from lowroll.transport.rollout_log import without_evictions
from lowroll.transport.spool import Spool
from lowroll.types import Batch, Evictions
from tests.fixtures.batches import sample_of


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The responses of the samples that were written, one by one."""
    found: list[str] = []
    real = codec.encode_sample

    def encode(sample: object) -> bytes:
        found.append(sample.text)  # type: ignore[attr-defined]
        return real(sample)  # type: ignore[arg-type]

    monkeypatch.setattr(codec, "encode_sample", encode)
    return found


def batch_of(count: int) -> Batch:
    samples = [replace(sample_of(), text=str(i)) for i in range(count)]
    return Batch(1, samples, 1.0, {"reward/mean": 0.5})


def test_log_and_frame_have_the_bytes_of_two_writings(tmp_path: Path, written: list[str]) -> None:
    batch, lines = batch_of(3), Lines()
    dropped = replace(batch.samples[0], group=-1, text="dropped")
    logged = replace(batch, samples=[*batch.samples, dropped])
    plain, spool = Spool(tmp_path / "plain"), Spool(tmp_path / "spool")
    plain.put(batch)
    expected = write_rollouts(tmp_path / "a", logged).read_bytes()
    written.clear()
    spool.line = lines.again
    assert write_rollouts(tmp_path / "b", logged, lines.first).read_bytes() == expected
    spool.put(replace(batch, stats=dict(batch.stats)))
    assert spool.path(1).read_bytes() == plain.path(1).read_bytes()
    assert written == ["0", "1", "2", "dropped"]


def test_another_object_is_written_again(written: list[str]) -> None:
    """What is logged without evictions is sent with them, and a line is good for one frame."""
    batch, lines = batch_of(2), Lines()
    batch.samples[1].rollout.evictions = Evictions(1, 1, (0,), b"x")
    for sample in without_evictions(batch).samples:
        lines.first(sample)
    expected = encode_batch(batch)
    written.clear()
    assert encode_batch(batch, lines.again) == expected and written == ["0", "1"]
    lines.first(batch.samples[0])
    batch.samples[0].text = "changed since"
    lines.clear()
    assert b"changed since" in encode_batch(batch, lines.again)
