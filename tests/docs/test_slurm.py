"""examples/slurm: a job on two nodes that are two names of this machine (tests/fixtures/slurm.py),
with roles that only say what they were started as, and with those of a run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lowroll.metrics.record import read
from lowroll.runs.roles.local import reserve_port
from tests.fixtures import leash
from tests.fixtures.roles import DEADLINE_S, gate, heart, write
from tests.fixtures.runs import settings
from tests.fixtures.slurm import REQUEUED, install

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "examples/slurm" / name for name in ("run.sbatch", "role.sh")]
JOB = "LOWROLL_TEST_JOB"  # the variable by which its processes are known
# a role that writes down its words and variables, and ends with the next code of its file `acts/ROLE-TASK`
# ("9:FILE" when there is such a file); where that says "wait", or there is none, when it is told to
STUB = """#!/bin/bash
trap 'exit 143' TERM
acts=acts/$1-$SLURM_PROCID
act=$(head -n 1 "$acts" 2>/dev/null)
[[ -e $acts ]] && sed -i 1d "$acts"
said=$(echo "$@"; env | grep -E '^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|LOWROLL_)' | sort)
printf '%s\\n\\n' "$said" >>"said-$1-$SLURM_PROCID"
while [[ -z $act || $act == wait || ($act == *:* && ! -e ${act#*:}) ]]; do sleep 0.02; done
exit "${act%%:*}"
"""


@contextmanager
def job(folder: Path, *words: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The batch script as slurmd starts it, killed with all of its processes at the end."""
    mark = leash.new()
    with (folder / "job.log").open("a") as out:
        child = subprocess.Popen(
            ["bash", "run.sbatch", *words], cwd=folder, text=True, stdout=out, stderr=out,
            env=os.environ | env | {JOB: mark},
        )  # fmt: skip
    try:
        yield child
    finally:
        leash.end(mark, JOB)
        child.wait(30.0)


def until(seen: Callable[[], object], child: subprocess.Popen[str], log: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not seen():
        assert time.monotonic() < end and child.poll() is None, log.read_text()
        time.sleep(0.02)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder that the job is submitted from."""
    for file in FILES:
        shutil.copy(file, tmp_path)
    (tmp_path / "acts").mkdir()
    return tmp_path


@pytest.fixture
def port() -> Iterator[str]:
    """The port of the first engine, the same when the job starts again."""
    with reserve_port("127.0.0.1") as held:
        yield str(held.getsockname()[1])


@pytest.fixture
def stubbed(home: Path) -> dict[str, str]:
    """The environment of a job whose roles are the stub."""
    env = install(home)
    (home / "bin/lowroll").write_text(STUB)
    (home / "bin/lowroll").chmod(0o755)
    return env


def test_shellcheck_finds_nothing() -> None:
    tool = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([tool, *FILES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_every_role_is_started_as_the_page_says(home: Path, stubbed: dict[str, str]) -> None:
    """The learner's ranks end together and start together; the orchestrator is started again, too."""
    secrets = home / "secrets"
    secrets.mkdir()
    (secrets / "token").write_text("a" * 32 + "\n")
    (secrets / "admin").write_text("b" * 32 + "\n")
    acts = {"train-0": "9:said-train-1 0", "train-1": "wait 0", "orchestrate-0": "7 0"}
    for role, codes in acts.items():
        (home / "acts" / role).write_text("".join(f"{code}\n" for code in codes.split()))
    with job(home, "run.yaml", "seed=3", **stubbed, GPUS="2", SECRETS=str(secrets)) as child:
        assert child.wait(60.0) == 0, (home / "job.log").read_text()
    words = "run.yaml seed=3 rollout.engines=2 train.gpus=2 ckpt.resume_step=-1"
    tokens = ["LOWROLL_TOKEN=" + "a" * 32, "LOWROLL_ADMIN_TOKEN=" + "b" * 32]

    def said(role: str) -> list[list[str]]:
        starts = (home / f"said-{role}").read_text().split("\n\n")[:-1]
        ours = "LOWROLL_TEST"  # what tests mark their processes with
        return [[x for x in start.splitlines() if not x.startswith(ours)] for start in starts]

    for i in range(2):
        (engine,) = said(f"serve-{i}")
        assert engine[0] == f"serve {words} serve.host=localhost serve.port={8000 + i}"
        assert {f"LOWROLL_ENGINE_ROLE=engine-{i}", *tokens} == set(engine[1:])
        first, second = said(f"train-{i}")
        assert first == second and first[0] == f"train {words}"
        place = {f"RANK={i}", f"LOCAL_RANK={i}", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1"}
        assert {*place, "MASTER_PORT=20007", *tokens} == set(first[1:])
    first, second = said("orchestrate-0")
    assert first == second and first[0] == f"orchestrate {words}"
    assert not (home / REQUEUED).exists()


@pytest.mark.parametrize("sent, requeued", [(signal.SIGUSR1, "7\n"), (signal.SIGTERM, None)])
def test_a_job_that_is_stopped(
    home: Path, stubbed: dict[str, str], sent: signal.Signals, requeued: str | None
) -> None:
    """The time limit is near: the learner may write its checkpoint, and the job is put into the queue
    again. Whoever cancels it wants no more of it."""
    log = home / "job.log"
    with job(home, "run.yaml", **stubbed) as child:
        roles = [home / f"said-{role}-0" for role in ("serve", "orchestrate", "train")]
        until(lambda: all(file.exists() for file in roles), child, log)
        child.send_signal(sent)
        assert child.wait(60.0) == 143, log.read_text()
    found = home / REQUEUED
    assert (found.read_text() if found.exists() else None) == requeued


@pytest.mark.parametrize("role", ["orchestrate", "serve"])
def test_a_role_that_gives_up_ends_the_job(home: Path, stubbed: dict[str, str], role: str) -> None:
    """With 2 the settings are wrong, and no start helps; nobody waits for that role."""
    (home / "acts" / f"{role}-0").write_text("2\n")
    with job(home, "run.yaml", **stubbed) as child:
        assert child.wait(60.0) == {"orchestrate": 2, "serve": 1}[role]
    assert "given up" in (home / "job.log").read_text()
    assert (home / f"said-{role}-0").read_text().count(f"{role} ") == 1
    assert not (home / REQUEUED).exists()


@pytest.mark.parametrize("words, env, told", [
    ([], {}, "usage: sbatch run.sbatch run.yaml"),
    (["run.yaml"], {"LEARNER_NODES": "2"}, "2 nodes, LEARNER_NODES=2: no node is left for engines"),
])  # fmt: skip
def test_what_cannot_run_is_said_before_anything_starts(
    home: Path, stubbed: dict[str, str], words: list[str], env: dict[str, str], told: str
) -> None:
    with job(home, *words, **stubbed, **env) as child:
        assert child.wait(60.0) == 2
    assert told in (home / "job.log").read_text() and not list(home.glob("said-*"))


@pytest.mark.long
def test_a_run_that_is_interrupted_goes_on_when_it_is_requeued(
    home: Path, model: Path, port: str
) -> None:
    """Real roles: stopped before the time limit, and the same job again to its end."""
    opened = gate(home / "gated.py", home / "run")
    tree = settings(
        model, home / "run", train={"max_steps": 4, "learning_rate": 1e-2, "minibatches": 2}
    )
    tree["env"][0]["id"] = str(home / "gated.py")
    write(tree, home / "run.yaml")
    tool = Path(sys.executable).with_name("lowroll")
    env = install(home) | {"PORT": port, "PYTHONPATH": os.pathsep.join(sys.path)}
    (home / "bin/lowroll").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {tool.name} "$@"\n')
    (home / "bin/lowroll").chmod(0o755)
    run, log = home / "run", home / "job.log"
    with job(home, "run.yaml", **env) as child:
        until(lambda: heart(run, "trainer").get("step", 0) >= 2, child, log)
        child.send_signal(signal.SIGUSR1)
        until(lambda: heart(run, "trainer")["phase"] == "ended", child, log)
        opened.touch()
        assert child.wait(DEADLINE_S) == 143, log.read_text()
    assert (home / REQUEUED).read_text() == "7\n"
    assert 1 <= len(read(run)) < 4
    with job(home, "run.yaml", **env) as child:
        assert child.wait(DEADLINE_S) == 0, log.read_text()
    assert [record["step"] for record in read(run)] == [1, 2, 3, 4]
    assert (run / "final/model.safetensors").is_file()
    assert (home / REQUEUED).read_text() == "7\n"
