"""Learner ranks as processes: who is which, which GPU each has, what they say to each other, and what
becomes of all when one is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowroll.config import ConfigError, from_mapping
from lowroll.config.roles import one_process_problems
from lowroll.parallel.ranks import Ranks
from lowroll.runs.launch import devices, group
from lowroll.runs.launch.devices import Placement, own_first, place
from lowroll.runs.preflight import look_at_run, look_at_sft
from lowroll.runs.roles import follow
from lowroll.runs.roles.follow import Begin, Lead, Order, Orders, Reader, same_base
from lowroll.runs.roles.seat import Seat, seat
from lowroll.runs.sft import run_sft
from lowroll.types import RunFailed
from tests.fixtures.batches import batch_of
from tests.fixtures.runs import settings

ROOT = Path(__file__).parents[2]
TWO = {"train": {"gpus": 2}}
SAID = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}


def test_several_ranks_need_processes(model: Path, tmp_path: Path) -> None:
    cfg = from_mapping(settings(model, tmp_path / "run", **TWO))
    (told,) = one_process_problems(cfg)
    assert told.startswith("train.gpus: 2: one process learns on one GPU") and "local" in told
    assert told in look_at_run(cfg).problems
    with pytest.raises(ValueError, match="train.gpus: 2: lowroll sft learns on one GPU"):
        run_sft(cfg)
    assert look_at_sft(cfg).problems[0].startswith("train.gpus: 2: lowroll sft")
    with pytest.raises(ConfigError, match=r"train\.sharding: full shares .* train\.gpus is 1"):
        from_mapping(settings(model, tmp_path / "run", train={"sharding": "full"}))
    assert not (tmp_path / "run").exists()


# -- which rank ------------------------------------------------------------------------------------


def test_the_environment_says_which_rank_this_is() -> None:
    cfg = from_mapping({"model": "m", **TWO})
    own = seat(cfg, SAID)
    assert own == Seat(1, 2, 1, "127.0.0.1", 4000)
    assert seat(cfg, own.variables) == own
    assert seat(cfg, SAID | {"LOCAL_RANK": "0"}) == Seat(1, 2, 0, "127.0.0.1", 4000)
    assert seat(cfg, {"MASTER_ADDR": "far", "MASTER_PORT": "1"}) is None, (
        "a cluster sets these alone"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT: not set, and RANK is"),
        ({"RANK": ""}, "RANK: not set, and WORLD_SIZE is"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE: 4 ranks were started, and train.gpus is 2"),
        ({"RANK": "2"}, "RANK: 2, of 2 ranks"),
        ({"RANK": "-1"}, "RANK: expected a whole number, got '-1'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK: expected a whole number, got 'x'"),
    ],
)
def test_an_environment_that_is_wrong_is_named(said: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        seat(from_mapping({"model": "m", **TWO}), SAID | said)


# -- which GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "each", "wanted"),
    [
        # the learner's; the engines'
        ("", 1, 2, 1, ("", [])),
        ("", 4, 2, 1, ("", [])),
        ("0", 1, 1, 1, ("", [])),
        ("01", 1, 2, 1, ("0", ["1", "1"])),
        ("357", 1, 2, 1, ("3", ["5", "7"])),
        ("01234", 1, 2, 2, ("0", ["12", "34"])),
        ("01", 1, 1, 2, ("0", ["01"])),
        ("01234567", 4, 4, 1, ("0123", ["4", "5", "6", "7"])),
        ("0123", 4, 4, 1, ("0123", ["0", "1", "2", "3"])),
        ("0123", 2, 4, 1, ("01", ["2", "3", "2", "3"])),
        ("01", 2, 1, 1, ("01", ["0"])),
        ("0123", 2, 1, 2, ("01", ["23"])),
    ],
)
def test_ranks_have_the_first_gpus_and_engines_the_others(
    gpus: str, ranks: int, engines: int, each: int, wanted: tuple[str, list[str]]
) -> None:
    placed = place(gpus, ranks, engines, each)
    own, others = wanted
    assert placed.learner == ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})
    assert (
        [placed.engine(i) for i in range(engines)]
        == [{"CUDA_VISIBLE_DEVICES": ",".join(other)} for other in others]
        or not others
        and placed == Placement()
    )


def test_what_is_said_of_devices() -> None:
    assert Placement().line() == "devices: the learner and the engines share one"
    assert place("012", 2, 1).line() == (
        "devices: rank 0: GPU 0; rank 1: GPU 1; engine 0: GPU 2 (the learner's are each on its own)"
    )
    assert place("01", 1, 1).line().startswith("devices: learner: GPU 0; engine 0: GPU 1")
    shared = place("01", 2, 4)
    assert shared.shares == 2 and shared.line().endswith("(the learner's are shared with engines)")


def test_too_few_gpus_are_one_error(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="train.gpus: 3 ranks need a GPU each, and there are 2"):
        place("01", 3)
    with pytest.raises(ValueError, match="tensor_parallel_size: an engine needs 4 GPUs"):
        place("01", 1, 1, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 6")
    assert devices.visible() == ["5", "6"]
    tree = settings(model, tmp_path / "run", launcher="local", train={"gpus": 3})
    devices.of_run(from_mapping(tree))  # on the CPU nobody needs one
    (told,) = [
        line
        for line in look_at_run(from_mapping(tree | {"device": "auto"})).problems
        if "GPU" in line
    ]
    assert told.startswith("train.gpus: 3 ranks need a GPU each, and there are 2 (5, 6;")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    lines = look_at_run(from_mapping(tree)).lines
    assert "devices: the learner and the engines share one" in lines


def test_a_rank_sees_its_own_gpu_first() -> None:
    """And those of the others behind it, which NCCL reaches directly."""
    assert own_first(0, ["4", "7", "9"]) == {"CUDA_VISIBLE_DEVICES": "4,7,9"}
    assert own_first(2, ["4", "7", "9"]) == {"CUDA_VISIBLE_DEVICES": "9,4,7"}
    assert own_first(0, ["4"]) == own_first(0, []) == {}
    with pytest.raises(ValueError, match="LOCAL_RANK: 1, and 1 GPUs are used here"):
        own_first(1, ["4"])


# -- what rank 0 says ------------------------------------------------------------------------------


class Two(Ranks):
    """A rank whose words are kept, or that hears those."""

    size = 2

    def __init__(self, rank: int, words: deque[bytes]) -> None:
        self.rank, self.words = rank, words

    def tell(self, data: bytes | None = None, wait_s: float | None = None) -> bytes:
        if self.leads:
            assert data is not None
            self.words.append(data)
            return data
        return self.words.popleft()


def test_orders_and_batches_arrive_as_they_were_said() -> None:
    words: deque[bytes] = deque()
    lead, orders = Lead(Two(0, words)), Orders(Two(1, words))
    batch = batch_of(7)
    lead.say("learn", 7, batch)
    lead.say("checkpoint", 7)
    lead.say("end")
    assert orders.hear() == Order("learn", 7) and orders.receive(1.0) == batch
    assert orders.hear() == Order("checkpoint", 7)
    assert orders.hear() == Order("end", 0)
    Lead(Ranks()).say("learn", 7, None)  # to nobody


def test_a_rank_with_other_weights_or_settings_is_refused(model: Path, tmp_path: Path) -> None:
    cfg = from_mapping(settings(model, tmp_path / "run", **TWO))
    words: deque[bytes] = deque()
    same_base(Two(0, words), "abc", cfg)
    with pytest.raises(ValueError, match="model: the weights of .* here are not those of rank 0"):
        same_base(Two(1, words), "abd", cfg)
    begin = Begin(1, None, cfg.dump())
    follow._refuse_other(cfg, begin)
    other = from_mapping(settings(model, tmp_path / "run", train={"gpus": 2, "max_steps": 5}))
    with pytest.raises(ValueError, match="max_steps: 5: rank 0 has max_steps: 12"):
        follow._refuse_other(other, begin)


def test_the_folder_of_the_others_writes_nothing(model: Path, tmp_path: Path) -> None:
    home = Reader(from_mapping(settings(model, tmp_path / "run", **TWO)), None)
    home.save(1, {}, {}, {})
    home.publish(lambda path: path.mkdir(parents=True))
    home.keep_batch("offending", batch_of(1))
    home.resume(1, {})
    assert not (tmp_path / "run").exists()


# -- who is to blame -------------------------------------------------------------------------------


def rank_of(number: int, code: int | None, words: str = "", hangs: str | None = None) -> Any:
    """A rank that runs (None) or has ended."""
    how = f"exit code {code}" if code is None or code >= 0 else "killed by SIGKILL"
    return SimpleNamespace(
        role=f"rank {number}",
        alive=lambda: code is None,
        kill=lambda: None,
        look=lambda: None,
        hangs=lambda: hangs,
        code=code or 0,
        ready=code != 2,
        ended=lambda: how,
        last_words=lambda: f"error: {words} (log: rank{number}.log)",
        log=Path(f"rank{number}.log"),
    )


@pytest.mark.parametrize(
    ("ranks", "kind", "told"),
    [
        (
            [rank_of(0, group.LOST, "rank 1 went away"), rank_of(1, -9, "step 3")],
            RunFailed,
            r"^rank 1 has ended \(killed by SIGKILL\): error: step 3 \(log: rank1\.log\)",
        ),
        ([rank_of(0, 1, "disk"), rank_of(1, group.LOST)], RunFailed, r"^rank 0 has ended .*disk"),
        ([rank_of(0, 2, "model: m"), rank_of(1, None)], ValueError, r"^rank 0: model: m \(log"),
        ([rank_of(0, None), rank_of(1, None, hangs="no sign")], RunFailed, r"^rank 1: no sign"),
    ],
)
def test_the_rank_that_ended_by_itself_is_named(
    ranks: list[Any], kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "BLAME_S", 0.0)
    crew = group.Crew.__new__(group.Crew)
    crew.ranks = ranks
    with pytest.raises(kind, match=told):
        crew._look()


def test_ranks_that_end_as_they_should_are_no_failure() -> None:
    crew = group.Crew.__new__(group.Crew)
    crew.ranks = [rank_of(0, 0), rank_of(1, None)]
    crew._look()
    crew.ranks = [rank_of(0, group.STOPPED), rank_of(1, 0)]
    crew._look()


# -- whole runs ------------------------------------------------------------------------------------


def lost(folder: Path, level: int, losses: str, **changes: Any) -> str:
    """What a run of two ranks that loses processes prints; it ends as one that nobody disturbed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.losses", str(folder), str(level), losses]
        + [json.dumps(changes)],
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
