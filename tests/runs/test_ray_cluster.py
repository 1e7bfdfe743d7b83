"""`launcher: ray` on a cluster of three fake nodes (`make test-ray`): a whole run, and losses of
processes, actors and nodes, are bit for bit those of `launcher: local`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from lowroll.orchestrator import audit
from tests.fixtures.ray_cluster import Nodes, listening, lose, nodes, open_to_all
from tests.fixtures.roles import DEADLINE_S, heart, outcome, started, write
from tests.fixtures.runs import settings

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    # importing it would fix its mode of authentication
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]
TIMES = int(os.environ.get("TIMES", "1"))  # each loss, on a run of its own
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    with nodes() as made:
        yield made


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `launcher: local` computes."""
    folder = tmp_path_factory.mktemp("local")
    file = write(settings(model, folder / "run", train={"max_steps": 4}), folder / "run.yaml")
    with started(folder / "log", "grpo", str(file), "launcher=local") as launcher:
        assert launcher.wait(timeout=DEADLINE_S) == 0, (folder / "log").read_text()
    return outcome(folder / "run")


def words(model: Path, folder: Path, *more: str) -> tuple[Path, list[str]]:
    run = folder / "run"
    file = write(settings(model, run, train={"max_steps": 4}), folder / "run.yaml")
    return run, ["grpo", str(file), "launcher=ray", *more]


def test_a_run_on_a_cluster_is_that_of_one_machine(
    model: Path, tmp_path: Path, cluster: Nodes, whole: dict[str, str]
) -> None:
    run, command = words(model, tmp_path, f"ray.address={cluster.cluster.address}")
    with started(tmp_path / "log", *command) as launcher:
        assert launcher.wait(timeout=DEADLINE_S) == 0, (tmp_path / "log").read_text()
    assert outcome(run) == whole
    assert not (run / "roles" / "variables.json").exists()


def test_engines_and_ranks_on_a_cluster_are_those_of_one_machine(
    model: Path, tmp_path: Path, cluster: Nodes
) -> None:
    """Two engines and two ranks; `rollout.parts` makes the engines' number and places all the same."""
    more = {"train": {"max_steps": 3, "gpus": 2}, "rollout": {"engines": 2, "parts": 2}}
    runs = {}
    for name, extra in (("local", {}), ("ray", {"ray": {"address": cluster.cluster.address}})):
        folder = tmp_path / name
        folder.mkdir()
        tree = settings(model, folder / "run", **more) | extra
        file = write(tree, folder / "run.yaml")
        with started(folder / "log", "grpo", str(file), f"launcher={name}") as launcher:
            assert launcher.wait(timeout=DEADLINE_S) == 0, (folder / "log").read_text()
        runs[name] = outcome(folder / "run")
        said = heart(folder / "run", "trainer-rank1"), heart(folder / "run", "engine-1")
        assert all(one["phase"] == "ended" for one in said)
    assert runs["local"] == runs["ray"]


@pytest.mark.parametrize("at", ["starting", "step 2"])
@pytest.mark.parametrize("role", ["trainer", "orchestrator", "engine-0"])
@pytest.mark.parametrize("how", ["process", "actor", "node"])
@pytest.mark.parametrize("time_", range(TIMES))
def test_what_is_lost_is_made_good(
    model: Path,
    tmp_path: Path,
    cluster: Nodes,
    whole: dict[str, str],
    time_: int,
    how: str,
    role: str,
    at: str,
) -> None:
    run, command = words(model, tmp_path, f"ray.address={cluster.cluster.address}")
    log = tmp_path / "log"
    with started(log, *command) as launcher:
        lose(how, reached(run, role, at, launcher), cluster)
        assert launcher.wait(timeout=DEADLINE_S) == 0, log.read_text()
    said = "killed by SIGKILL" if how == "process" else "was lost"
    told = [line for line in log.read_text().splitlines() if line.startswith(f"{role} has ended")]
    assert any(said in line and "(log: " in line for line in told), log.read_text()
    assert outcome(run) == whole
    assert audit.check(run / "orchestrator" / "ledger.jsonl", None) == []


def reached(run: Path, role: str, at: str, launcher: subprocess.Popen[bytes]) -> int:
    """The process of a role that starts, or once the trainer is at step 2 and it is past its start."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and launcher.poll() is None:
        said = heart(run, role)
        started = said.get("phase") not in (None, "starting", "ended")
        late = started and heart(run, "trainer").get("step", 0) >= 2
        if late if at == "step 2" else said.get("phase") == "starting":
            return int(said["pid"])
        time.sleep(0.01)
    raise AssertionError(f"{role} did not come to {at}")


@pytest.mark.parametrize("token", ["", "x" * 64])
def test_who_has_not_the_token_is_refused(
    model: Path, tmp_path: Path, cluster: Nodes, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of Ray's that asks nobody, and our own command."""
    address = cluster.cluster.address
    monkeypatch.setenv("HOME", str(tmp_path))  # no token in its .ray
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    env |= {"RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
    code = (
        "import ray; from ray._private import ray_constants as c; c.ENABLE_RAY_CLUSTER = False; "
        f"ray.init(address='{address}'); print('in')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode and "in" not in done.stdout.split(), done.stderr
    run, command = words(model, tmp_path, f"ray.address={address}")
    done = subprocess.run(
        [sys.executable, "-m", "lowroll", *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and f"ray.address: {address}" in done.stderr, done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr and not (run / "config.yaml").exists()


def test_a_cluster_that_asks_for_no_token_is_refused(model: Path, tmp_path: Path) -> None:
    """Unless the environment says that this is meant."""
    with open_to_all() as address:
        for mode, told in (("token", "asks nobody for a token"), ("disabled", "warning: RAY_AUTH")):
            env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
            env |= {"RAY_AUTH_TOKEN": "x" * 64} if mode == "token" else {"RAY_AUTH_MODE": mode}
            run, command = words(model, tmp_path, f"ray.address={address}", "ray.node_deadline=2")
            done = subprocess.run(
                [sys.executable, "-m", "lowroll", *command],
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert told in done.stdout + done.stderr, done.stderr
            assert not (run / "config.yaml").exists()
            # no node has room for roles here
            assert done.returncode == (2 if mode == "token" else 1)


def test_a_cluster_of_its_own_is_on_loopback_and_ends_with_the_command(
    model: Path, tmp_path: Path
) -> None:
    before = {path.name for path in Path("/tmp").glob("lowroll-ray-*")}
    run, command = words(model, tmp_path, "train.max_steps=100")
    log = tmp_path / "log"
    with started(log, *command) as launcher:
        pid = reached(run, "trainer", "step 2", launcher)
        (session,) = {path.name for path in Path("/tmp").glob("lowroll-ray-*")} - before
        assert (Path("/tmp") / session).stat().st_mode & 0o777 == 0o700
        assert listening(session) and listening(session) <= LOOPBACK
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=DEADLINE_S) == 143, log.read_text()
    assert not Path(f"/proc/{pid}").exists() and not listening(session)
    assert not (Path("/tmp") / session).exists()
