"""Learner ranks as processes: who is which, which GPU each has, what they say to each other, and what
becomes of all when one is lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowroll.checkpoint.disk_space import NO_ROOM
from lowroll.checkpoint.store import Store
from lowroll.config import ConfigError, from_mapping
from lowroll.config.process_checks import one_process_problems
from lowroll.metrics.record import read
from lowroll.parallel.ranks import Ranks
from lowroll.runs import preflight
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.learner import refuse_others
from lowroll.runs.memory.plan import Planner, Share
from lowroll.runs.preflight import look_at_run, look_at_sft
from lowroll.runs.roles import devices, rank_follower
from lowroll.runs.roles import ranks as ranks_module
from lowroll.runs.roles.devices import Placement, own_first, place
from lowroll.runs.roles.rank_follower import (
    Begin,
    Order,
    OrderReceiver,
    OrderSender,
    ReadOnlyFolder,
)
from lowroll.runs.roles.ranks import RankEnvironment, RankSupervisor
from lowroll.runs.roles.role import Exit, Role
from lowroll.runs.sft import run_sft
from lowroll.types import RunFailed
from tests.fixtures.batches import batch_of
from tests.fixtures.processes import alive
from tests.fixtures.roles import heart, outcome, reached, started, write
from tests.fixtures.runs import copy_stopped_after, settings, train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "several_gpus.md").read_text()
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
    own = RankEnvironment.read(cfg, SAID)
    assert own == RankEnvironment(1, 2, 1, "127.0.0.1", 4000)
    assert RankEnvironment.read(cfg, own.variables) == own
    assert RankEnvironment.read(cfg, SAID | {"LOCAL_RANK": "0"}) == RankEnvironment(
        1, 2, 0, "127.0.0.1", 4000
    )
    assert RankEnvironment.read(cfg, {"MASTER_ADDR": "far", "MASTER_PORT": "1"}) is None, (
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
        RankEnvironment.read(from_mapping({"model": "m", **TWO}), SAID | said)


def test_the_line_for_slurm_says_which_rank_each_task_is() -> None:
    (line,) = re.findall(r"srun --ntasks 4 (bash -c '.*')$", PAGE, re.MULTILINE)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    meet = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    shown = line.replace("lowroll train run.yaml train.gpus=4", "env")
    done = subprocess.run(
        shlex.split(shown),
        env=os.environ | slurm | meet,
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(one.partition("=")[::2] for one in done.stdout.splitlines())
    assert RankEnvironment.read(
        from_mapping({"model": "m", "train": {"gpus": 4}}), said
    ) == RankEnvironment(3, 4, 1, "node1", 29400)


def test_the_page_says_what_placement_does() -> None:
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d) \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for gpus, ranks, engines, own, others in rows:
        placed = place([str(i) for i in range(int(gpus))], int(ranks), int(engines))
        if gpus == "1":
            assert placed == Placement() and own == others == "0"
            continue
        assert list(placed.ranks) == listed(own)
        assert [one for (one,) in placed.engines] == listed(others)


def listed(words: str) -> list[str]:
    first, _, last = words.partition(" to ")
    return [str(i) for i in range(int(first), int(last) + 1)] if last else words.split(", ")


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


def test_the_memory_of_a_rank_is_its_share(model: Path, tmp_path: Path) -> None:
    """Of the learner; of engines those that are on its GPU. Alone it is the plan that it was."""
    cfg = from_mapping(
        settings(model, tmp_path / "run", train={"gpus": 4}, rollout={"max_tokens": 6})
    )
    assert cfg.is_sharded and not from_mapping({"model": "m"}).is_sharded
    assert not from_mapping({"model": "m", "train": {"gpus": 4, "lora": True}}).is_sharded
    assert preflight.share_of(cfg, place("0123", 4, 4)) == Share(4, 1)
    assert preflight.share_of(cfg, place("01234567", 4, 4)) == Share(4, 0)
    assert preflight.share_of(cfg, Placement()) == Share(4, 1)
    compute = Compute.of(cfg)
    planner = Planner(compute, models.outline("model", cfg.model, compute), [], {}, None)
    whole, quarter, apart, two = (
        replace(planner, share=share).plan(cfg).phases
        for share in (Share(), Share(4, 1), Share(4, 0), Share(4, 2))
    )
    assert whole == planner.plan(cfg).phases
    assert "blocks, put together" not in whole["learn"]
    for part in ("learner's weights", "optimiser", "gradients"):
        assert quarter["learn"][part] == -(-whole["learn"][part] // 4) > 0
    assert quarter["learn"]["rollouts' weights"] == whole["learn"]["rollouts' weights"] > 0
    assert two["learn"]["rollouts' weights"] == 2 * quarter["learn"]["rollouts' weights"]
    assert "rollouts' weights" not in apart["learn"] and "generate" not in apart


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
    sender, orders = OrderSender(Two(0, words)), OrderReceiver(Two(1, words))
    batch = batch_of(7)
    sender.send("learn", 7, batch)
    sender.send("checkpoint", 7)
    sender.send("end")
    assert orders.next_order() == Order("learn", 7) and orders.receive(1.0) == batch
    assert orders.next_order() == Order("checkpoint", 7)
    assert orders.next_order() == Order("end", 0)
    OrderSender(Ranks()).send("learn", 7, None)  # to nobody


def test_a_rank_with_other_weights_or_settings_is_refused(model: Path, tmp_path: Path) -> None:
    cfg = from_mapping(settings(model, tmp_path / "run", **TWO))
    words: deque[bytes] = deque()
    refuse_others(Two(0, words), "abc", cfg)
    with pytest.raises(ValueError, match="model: the weights of .* here are not those of rank 0"):
        refuse_others(Two(1, words), "abd", cfg)
    begin = Begin(1, None, cfg.dump())
    rank_follower.check_settings(cfg, begin)
    other = from_mapping(settings(model, tmp_path / "run", train={"gpus": 2, "max_steps": 5}))
    with pytest.raises(ValueError, match="max_steps: 5: rank 0 has max_steps: 12"):
        rank_follower.check_settings(other, begin)


def test_the_folder_of_the_others_writes_nothing(model: Path, tmp_path: Path) -> None:
    home = ReadOnlyFolder(from_mapping(settings(model, tmp_path / "run", **TWO)), None)
    home.save(1, {}, {}, {})
    home.publish(lambda path: path.mkdir(parents=True))
    home.keep_batch("offending", batch_of(1))
    home.resume(1, {})
    assert not (tmp_path / "run").exists()


# -- who is to blame -------------------------------------------------------------------------------


def rank_of(number: int, code: int | None, words: str = "", hangs: str | None = None) -> Any:
    """A rank that runs (None) or has ended."""
    how = f"exit code {code}" if code is None or code >= 0 else "killed by SIGKILL"
    process: Any = SimpleNamespace(
        is_alive=lambda: code is None,
        kill=lambda: None,
        wrote=lambda report: False,
        exit=None if code is None else Exit(code, how, f"error: {words} (log: rank{number}.log)"),
        log=Path(f"rank{number}.log"),
    )
    rank = Role(f"rank {number}", [], process, Path("nowhere"))
    rank.is_ready = code != 2
    rank.find_hang = lambda: hangs  # type: ignore[method-assign]
    return rank


@pytest.mark.parametrize(
    ("ranks", "kind", "told"),
    [
        (
            [rank_of(0, ranks_module.LOST, "rank 1 went away"), rank_of(1, -9, "step 3")],
            RunFailed,
            r"^rank 1 has ended \(killed by SIGKILL\): error: step 3 \(log: rank1\.log\)",
        ),
        (
            [rank_of(0, 1, "disk"), rank_of(1, ranks_module.LOST)],
            RunFailed,
            r"^rank 0 has ended .*disk",
        ),
        ([rank_of(0, 2, "model: m"), rank_of(1, None)], ValueError, r"^rank 0: model: m \(log"),
        (
            [rank_of(0, NO_ROOM, "full"), rank_of(1, ranks_module.LOST)],
            OSError,
            r"rank 0: error: full",
        ),
        ([rank_of(0, None), rank_of(1, None, hangs="no sign")], RunFailed, r"^rank 1: no sign"),
    ],
)
def test_the_rank_that_ended_by_itself_is_named(
    ranks: list[Any], kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "BLAME_S", 0.0)
    crew = RankSupervisor.__new__(RankSupervisor)
    crew.ranks = ranks
    with pytest.raises(kind, match=told):
        crew.check()


def test_ranks_that_end_as_they_should_are_no_failure() -> None:
    crew = RankSupervisor.__new__(RankSupervisor)
    crew.ranks = [rank_of(0, 0), rank_of(1, None)]
    crew.check()
    crew.ranks = [rank_of(0, ranks_module.STOPPED), rank_of(1, 0)]
    crew.check()


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


LONG = pytest.mark.long
# Two ranks add the same gradients in another order, so each entry is off by some 2^-24 of the largest
# addend. Adam's first step is 5e-3 g / |g|, whatever the size of g: what nearly cancels is off by most
# (7e-6 here). After some steps a code of the rollouts rounds the other way, and the runs part.
BOUND = 2e-5


def far(mine: Path, other: Path, step: int) -> float:
    """The largest difference of weights between two runs after a step."""
    first, second = (
        Store(run / "checkpoints").load(step).tensors["model"] for run in (mine, other)
    )
    assert first.keys() == second.keys()
    return max((first[name][:] - second[name][:]).abs().max().item() for name in first)


def tree_of(folder: Path) -> dict[str, Any]:
    """The settings of the run that nobody disturbed."""
    found: dict[str, Any] = json.loads((folder / "whole.yaml").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_learn_what_one_learns_and_a_lost_one_is_made_good(tmp_path: Path) -> None:
    """At level 0, where one process has the same rollouts; the run goes on as one process, too."""
    assert lost(tmp_path, 0, "one").count("good") == 1
    whole, tree = tmp_path / "whole" / "run", tree_of(tmp_path)
    alone = tree | {"train": tree["train"] | {"gpus": 1}}
    one = train(alone | {"output_dir": str(tmp_path / "one")}).folder
    assert 0 < far(whole, one, 1) < BOUND
    copy_stopped_after(whole, 2, tmp_path / "back")
    back = train(alone | {"output_dir": str(tmp_path / "back")}, resume=True).folder
    assert 0 < far(back, whole, 4) < BOUND
    assert read(back)[:2] == read(whole)[:2]


@LONG
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("level", "changes"),
    [(0, {}), (1, {}), (0, {"sharding": "none"}), (0, {"lora": True, "lora_rank": 2})],
    ids=["level 0", "level 1", "whole models", "lora"],
)
@pytest.mark.parametrize("losses", ["some", "phases"])
def test_a_rank_that_is_lost_in_any_phase_is_made_good(
    level: int, changes: dict[str, Any], losses: str, tmp_path: Path
) -> None:
    """Weights, rollouts, records and state are those of the run that nobody disturbed (level 0)."""
    told = lost(tmp_path, level, losses, **changes)
    assert told.count("good") == {"some": 3, "phases": 16}[losses], told


@LONG
@pytest.mark.timeout(600)
def test_ranks_that_torchrun_started_are_those_of_the_launcher(model: Path, tmp_path: Path) -> None:
    runs = {"launched": tmp_path / "launched", "torchrun": tmp_path / "torchrun"}
    for name, run in runs.items():
        tree = settings(model, run, train={"gpus": 2, "max_steps": 3, "warmup_steps": 1})
        file = write(tree, tmp_path / f"{name}.yaml")
        if name == "launched":
            with started(tmp_path / "log", "grpo", str(file), "launcher=local") as launcher:
                assert launcher.wait(timeout=300) == 0, (tmp_path / "log").read_text()
            continue
        with (
            started(tmp_path / "engine.log", "serve", str(file), "serve.port=0"),
            started(tmp_path / "orchestrator.log", "orchestrate", str(file)),
        ):
            (line,) = re.findall(r"^    torchrun (.*)$", PAGE, re.MULTILINE)
            words = line.replace("run.yaml", str(file)).split()
            done = subprocess.run(
                [sys.executable, "-m", "torch.distributed.run", *words],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert outcome(runs["launched"]) == outcome(runs["torchrun"])


@LONG
@pytest.mark.timeout(600)
def test_a_run_of_one_process_goes_on_with_two_ranks(model: Path, tmp_path: Path) -> None:
    steps = {"max_steps": 5, "warmup_steps": 1}
    one = train(settings(model, tmp_path / "one", train=steps)).folder
    copy_stopped_after(one, 1, tmp_path / "two")
    file = write(
        settings(model, tmp_path / "two", train={"gpus": 2, **steps}), tmp_path / "run.yaml"
    )
    words = ("grpo", str(file), "launcher=local", "--resume")
    with started(tmp_path / "log", *words) as launcher:
        assert launcher.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    assert 0 < far(tmp_path / "two", one, 2) < BOUND  # later steps have no signal
    assert far(tmp_path / "two", one, 5) < BOUND


@LONG
@pytest.mark.timeout(600)
def test_a_signal_lets_the_ranks_finish_their_step(model: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    tree = settings(model, run, train={"gpus": 2, "max_steps": 1000}, ckpt={"interval": 1000})
    file = write(tree, tmp_path / "run.yaml")
    with started(log, "grpo", str(file), "launcher=local") as launcher:
        reached(run, "trainer", 2, launcher)
        launcher.terminate()
        assert launcher.wait(timeout=200) == 143, log.read_text()
    assert list((run / "checkpoints").glob("step_*"))
    assert all(not alive(heart(run, role)["pid"]) for role in ("trainer", "trainer-rank1"))


@LONG
def test_mistakes_are_one_line_before_anything_is_made(model: Path, tmp_path: Path) -> None:
    file = write(settings(model, tmp_path / "run", **TWO), tmp_path / "run.yaml")
    for env, told in (
        (
            SAID | {"WORLD_SIZE": "3"},
            "error: WORLD_SIZE: 3 ranks were started, and train.gpus is 2",
        ),
        ({"RANK": "0"}, "error: WORLD_SIZE: not set, and RANK is"),
    ):
        with started(tmp_path / "log", "train", str(file), **env) as rank:
            assert rank.wait(timeout=100) == 2
        assert told in (tmp_path / "log").read_text()
    assert not (tmp_path / "run").exists()
