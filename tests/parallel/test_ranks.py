"""What learner ranks tell each other, and what becomes of those that wait for one that is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from lowroll.parallel import ranks as groups
from lowroll.parallel.ranks import ALONE, RankGroup, RankLost, Ranks
from lowroll.runs.roles.local import reserve_port
from lowroll.transport.base import DeadlineExceeded, TransportError
from tests.fixtures.ranks import Raised, together

ODD = [-0.0, float("nan"), float("-inf"), 1e-45, -3.5]  # values whose bits must arrive


def test_one_process_alone_changes_nothing() -> None:
    alone = Ranks()
    values = {3: torch.tensor([0.5, -1.0])}
    gradient = torch.tensor([1.0, 2.0])
    alone.add([gradient])
    assert alone.leads and alone.deal([3.0, 1.0, 2.0]) == [0, 1, 2]
    assert alone.gather([values], {3: 2}) == [values] and alone.tell(b"batch") == b"batch"
    assert gradient.tolist() == [1.0, 2.0] and alone.total(gradient) is gradient
    assert (ALONE.rank, ALONE.size, ALONE.lockstep) == (0, 1, False)


def of(rank: int, size: int, lockstep: bool = False) -> RankGroup:
    """A rank that deals, and has met nobody."""
    group = RankGroup.__new__(RankGroup)
    group.rank, group.size, group.lockstep = rank, size, lockstep
    return group


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("costs", [[], [1.0], [5.0, 1.0, 1.0, 1.0, 4.0, 2.0, 2.0], [1.0] * 8])
def test_every_pass_is_dealt_once(size: int, costs: list[float]) -> None:
    free = [of(rank, size).deal(costs) for rank in range(size)]
    assert sorted(sum(free, [])) == list(range(len(costs)))
    assert all(mine == sorted(mine) for mine in free)
    tied = [of(rank, size, True).deal(costs) for rank in range(size)]
    assert sorted(i for mine in tied for i in mine if i is not None) == list(range(len(costs)))
    assert {len(mine) for mine in tied} == {-(-len(costs) // size)}


def test_ranks_are_dealt_equal_work() -> None:
    costs = [5.0, 1.0, 1.0, 1.0, 4.0, 2.0, 2.0]
    loads = [sum(costs[i] for i in of(rank, 2).deal(costs)) for rank in (0, 1)]
    assert loads == [8.0, 8.0]
    turns = zip(*(of(rank, 2, True).deal(costs) for rank in (0, 1)), strict=True)
    assert [[None if i is None else costs[i] for i in turn] for turn in turns] == [
        [5.0, 4.0],
        [2.0, 2.0],
        [1.0, 1.0],
        [None, 1.0],
    ]


def speak(group: RankGroup) -> dict[str, object]:
    """Every word of the seam once."""
    rank, size = group.rank, group.size
    sizes = {7: 2, 0: len(ODD), 3: 1}
    found = {i: torch.tensor(ODD[: sizes[i]]) for at, i in enumerate(sizes) if at % size == rank}
    kinds = group.gather([found, {i: -x for i, x in found.items()}], sizes)
    gradients = [torch.full((3, 2), float(rank + 1)), torch.tensor(10.0**rank), torch.zeros(0)]
    group.add(gradients)
    squares = torch.tensor(2.0)
    said = [group.tell(text if group.leads else None) for text in (b"batch \x00", b"")]
    group.meet("the end")
    return {
        "kinds": [{i: x.view(torch.int32).tolist() for i, x in kind.items()} for kind in kinds],
        "gradients": [g.tolist() for g in gradients],
        "kept": group.total(squares) is squares,
        "said": said,
        "listens": _listening(),
    }


def _listening() -> set[str]:
    """The addresses, in hexadecimals, at which this process listens, of IPv4 and IPv6."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            mine |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_ranks_tell_each_other(size: int) -> None:
    ranks = together(size, speak)
    assert all(isinstance(found, dict) for found in ranks), ranks
    bits = {
        i: torch.tensor(ODD[:n]).view(torch.int32).tolist() for i, n in ((7, 2), (0, 5), (3, 1))
    }
    negative = {
        i: (-torch.tensor(ODD[:n])).view(torch.int32).tolist() for i, n in ((7, 2), (0, 5), (3, 1))
    }
    for found in ranks:
        assert found["kinds"] == [bits, negative]
        assert found["gradients"] == [
            [[size * (size + 1) / 2] * 2] * 3,
            sum(10.0**r for r in range(size)),
            [],
        ]
        assert found["kept"] and found["said"] == [b"batch \x00", b""]
        assert found["listens"] == {"0100007F"}, "loopback alone"


def fail(group: RankGroup, how: str) -> None:
    """Rank 1 (with `leader`: the rank that leads) is lost after a first meeting."""
    group.meet("the first meeting")
    if how == "stopped":  # all have met: who is late now is not late by its start
        group.deadline_s, groups.ROLL_CALL_S = 2.0, 6.0
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0))
    if group.rank == (0 if how == "leader" else 1):
        if how == "raises":
            raise ValueError("no more memory")
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    if how == "leader":
        group.tell()
    group.add([torch.ones(3)])


@pytest.mark.parametrize(
    ("how", "error", "missing"),
    [
        ("killed", RankLost, r"^rank 1 \(last at the first meeting\) went away; rank \d is at the"),
        ("raises", RankLost, r"^rank 1 \(last at the first meeting\) went away"),
        ("leader", RankLost, r"^rank 0, at which all meet went away; rank \d is at what rank 0"),
        (
            "stopped",
            DeadlineExceeded,
            r"^(waited \d\S* s for )?rank 1 \(last at the first meeting\)",
        ),
    ],
)
def test_who_waits_for_a_lost_rank_says_which(
    how: str, error: type[TransportError], missing: str
) -> None:
    ranks = together(3, fail, how, without=1 if how == "stopped" else None)
    lost = 0 if how == "leader" else 1
    assert ranks[lost] in (None, Raised(ValueError, "no more memory"))
    others = [ranks[rank] for rank in {0, 1, 2} - {lost}]
    assert all(re.match(missing, one.text) for one in others), ranks
    kinds = {one.kind for one in others}  # who waits less long may see that another has given up
    assert kinds == {error} or how == "stopped" and kinds == {error, RankLost}, ranks


def wait_long(group: RankGroup) -> bytes:
    """The rank that leads speaks late: the deadline of all else is shorter."""
    group.deadline_s = 0.2
    if group.leads:
        time.sleep(1.0)
        return group.tell(b"now")
    return group.tell(wait_s=30.0)


def test_the_others_wait_for_the_first_word_as_long_as_they_are_told() -> None:
    assert together(2, wait_long) == [b"now", b"now"]


def test_ranks_that_do_not_come_are_named() -> None:
    began = time.monotonic()
    with reserve_port("127.0.0.1") as meeting:
        port = meeting.getsockname()[1]
        with pytest.raises(
            DeadlineExceeded,
            match=r"^waited 0\.2 s for rank 1, 2 of 3 to start and meet at 127\.0\.0\.1:",
        ):
            RankGroup(0, 3, "127.0.0.1", port, torch.device("cpu"), 0.2)
    with (
        reserve_port("127.0.0.1") as meeting,
        pytest.raises(DeadlineExceeded, match=r"for rank 0 to listen at 127\.0\.0\.1:"),
    ):
        RankGroup(1, 3, "127.0.0.1", meeting.getsockname()[1], torch.device("cpu"), 0.1)
    assert time.monotonic() - began < 100


def test_what_cannot_be_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(TransportError, match=r"^rank 0 cannot listen at 127\.0\.0\.1:\d+: "),
    ):
        RankGroup(0, 2, "127.0.0.1", taken.getsockname()[1], torch.device("cpu"), 1.0)
    with pytest.raises(ValueError, match=r"^rank: must lie in 0 \.\. 1, is 2"):
        RankGroup(2, 2, "127.0.0.1", 1, torch.device("cpu"), 1.0)
    with pytest.raises(ValueError, match="deadline_s"):
        RankGroup(0, 2, "127.0.0.1", 1, torch.device("cpu"), float("nan"))


def test_large_gradients_go_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "BUCKET", 5)
    sizes = [2, 3, 1, 9, 4, 1]
    found = groups.gradient_buckets([torch.zeros(size) for size in sizes])
    assert [[len(x) for x in bucket] for bucket in found] == [[2, 3], [1], [9], [4, 1]]
