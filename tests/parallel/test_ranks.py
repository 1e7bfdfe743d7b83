"""What learner ranks tell each other, and what becomes of those that wait for one that is lost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from lowroll.parallel.ranks import ALONE, Group, Ranks
from tests.fixtures.ranks import together

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


def of(rank: int, size: int, lockstep: bool = False) -> Group:
    """A rank that deals, and has met nobody."""
    group = Group.__new__(Group)
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


def speak(group: Group) -> dict[str, object]:
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
