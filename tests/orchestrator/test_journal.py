"""The ledger's file and its checker: what a crash leaves, what is damage, and every invariant broken
once. No torch."""

from __future__ import annotations

import pytest

from lowroll.orchestrator.ledger_check import Audit, check
from lowroll.orchestrator.ledger_file import Journal, read


def write(path, *events):
    journal = Journal(path)
    for event in events:
        journal.write(**event)
    journal.close()
    return read(path)[0]


def begun(step=0, open=()):
    return {"event": "begun", "step": step, "open": list(open)}


def planned(*ids, step=1):
    return {"event": "planned", "step": step, "ids": list(ids)}


def asked(*ids, version=0):
    return {"event": "dispatched", "version": version, "ids": list(ids)}


def done(*ids):
    return {"event": "done", "ids": list(ids)}


def batched(step, *ids, oldest=None, learner=None, most=8):
    spans = oldest or [[step - 1, step - 1]] * len(ids)
    return {
        "event": "batched",
        "step": step,
        "ids": list(ids),
        "oldest": spans,
        "learner": step - 1 if learner is None else learner,
        "most": most,
    }


def dropped(*ids, step=1, reason="stale"):
    return {"event": "dropped", "step": step, "reason": reason, "ids": list(ids)}


def back(step):
    return {"event": "rolled_back", "step": step}


def consumed(step):
    return {"event": "consumed", "step": step}


def through(step, *ids):
    """All that happens to some groups of one batch."""
    return [planned(*ids, step=step), asked(*ids), done(*ids), batched(step, *ids)]


SOUND = [begun(), *through(1, "a", "b"), planned("c", step=2), asked("c"), dropped("c", step=2)]


def test_a_sound_ledger_has_no_findings(tmp_path):
    events = write(
        tmp_path / "l.jsonl", *SOUND, *through(2, "d"), consumed(2), planned("e", step=3)
    )
    assert check(tmp_path / "l.jsonl", {1: ["b", "a"], 2: ["d"]}) == check(events) == []
    audit = Audit(events)
    assert audit.counts == {"batched": 3, "dropped": 1, "open": 1} and audit.consumed == 2


def test_what_came_after_a_batch_is_undone_by_a_rollback():
    events = [*SOUND, back(1), planned("c", step=2), asked("c"), done("c"), batched(2, "c")]
    assert check(events, {1: ["a", "b"], 2: ["c"]}) == []
    assert check([*SOUND, back(0), *through(1, "b", "a"), *through(2, "c")]) == []
    # what was open before the batch is open again, and is drawn again
    first = [begun(), planned("a", "z"), asked("a", "z"), done("a"), batched(1, "a")]
    assert (
        check([*first, done("z"), batched(2, "z"), back(1), asked("z"), done("z"), batched(2, "z")])
        == []
    )


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([*SOUND, *through(2, "a")], "a: planned, and it is batched"),  # 1: used twice
        ([*SOUND, batched(2, "a")], "a: batched, and it is batched"),
        ([*SOUND, batched(2, "q")], "q: batched, and it is not planned"),
        ([*SOUND, planned("q"), batched(2, "q")], "q: batched, and it is planned"),
        ([*SOUND, planned("q"), done("q")], "q: done, and it is planned"),
        ([*SOUND, dropped("c")], "c: dropped, and it is dropped"),  # 2
        ([*SOUND, asked("c")], "c: dispatched, and it is dropped"),
        (
            [*SOUND, planned("q"), asked("q"), done("q"), batched(2, "q", oldest=[[0, 1]], most=0)],
            "q: drawn from version 0 for a learner of version 1, which is more than 0 behind",
        ),  # 3
        ([*SOUND, back(0), consumed(1)], "batch 1 is consumed, and none of it stands"),  # 4
        ([*SOUND, back(3)], "rolled back to batch 3, which does not stand"),
        (
            [begun(), planned("z"), asked("z"), back(0), done("z")],
            "z: done, and it is not planned",
        ),
        (  # 5: back before the rollback, used behind it
            [
                *SOUND,
                planned("y", step=2),
                asked("y"),
                batched(2),
                done("y"),
                back(2),
                batched(3, "y"),
            ],
            "y: batched, and it is dispatched",
        ),
        (
            [*SOUND, planned("q"), asked("q"), done("q"), batched(2, "q", oldest=[[1, 2]])],
            "q: drawn from version 2, and its learner is at 1",
        ),
        ([*SOUND, *through(3, "q")], "batch 3 comes after batch 1"),
    ],
)
def test_every_breach_is_found(events, says):
    assert check(SOUND) == []
    assert any(says in found for found in check(events)), check(events)


@pytest.mark.parametrize(
    ("learned", "says"),
    [
        ({1: ["a", "b"], 2: ["d"]}, "step 2: learnt from, and no batch of it stands"),
        ({1: ["a"]}, "step 1: learnt from other groups than its batch has"),
        ({}, "step 1: consumed, and the learner does not know it"),
        ({1: ["a", "b", "a"]}, "a: learnt from 2 times"),
    ],
)
def test_the_second_witness_is_heard(learned, says):
    assert any(says in found for found in check([*SOUND, consumed(1)], learned))


# -- the file


def test_a_torn_last_line_is_taken_away_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "l.jsonl"
    events = write(path, *SOUND)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert read(path)[0] == events[:-1]
        journal = Journal(path)
        journal.write(**SOUND[-1])
        journal.close()
        assert path.read_bytes() == whole


def test_other_damage_is_refused_with_its_line(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, *SOUND)
    lines = path.read_bytes().split(b"\n")
    for change in (
        [lines[0], lines[2], *lines[2:]],  # one line twice
        [lines[0], lines[2], lines[1], *lines[3:]],  # two that changed places
        [lines[0], lines[1][:-20], *lines[2:]],
        [lines[0], b"", *lines[2:]],
        [lines[0], lines[1].replace(b"a", b"e", 1), *lines[2:]],
        [lines[0], b'{"event": "planned", "step": 1, "ids": []}', *lines[2:]],
    ):
        path.write_bytes(b"\n".join(change))
        for opened in (Journal, read, check):
            with pytest.raises(ValueError, match=r"l\.jsonl: line 2: "):
                opened(path)
    with pytest.raises(TypeError, match="planned: expected"):
        Journal(tmp_path / "new.jsonl").write("planned", step=1)


def test_a_ledger_that_is_shorter_than_the_state_is_refused(tmp_path):
    path = tmp_path / "l.jsonl"
    write(path, *SOUND)
    journal = Journal(path)
    with pytest.raises(ValueError, match="no batch of step 4 stands in it .the last one is 1."):
        journal.go_on(4, [])
    journal.go_on(1, [])  # the planned and dropped one is undone
    journal.go_on(1, [])  # nothing to undo
    journal.close()
    assert [event["event"] for event in read(path)[0][-2:]] == ["dropped", "rolled_back"]
    fresh = Journal(tmp_path / "new.jsonl")
    fresh.go_on(7, ["q"])  # a run of before there was a ledger
    fresh.close()
    events = read(tmp_path / "new.jsonl")[0]
    assert events == [begun(7, ["q"])]
    assert check([*events, asked("q"), done("q"), batched(8, "q")]) == []
