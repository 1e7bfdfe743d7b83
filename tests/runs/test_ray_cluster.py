"""`launcher: ray` on a cluster of three fake nodes (`make test-ray`): a run is bit for bit that of
`launcher: local`, and strangers are refused. `tests.torture --suites rays` has the losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fixtures.ray_cluster import LET_IN, OPEN, Apart, listening
from tests.fixtures.roles import DEADLINE_S, heart, outcome, reached, started, write
from tests.fixtures.runs import settings

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    # importing it would fix its mode of authentication
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Apart]:
    with Apart() as made:
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
    model: Path, tmp_path: Path, cluster: Apart, whole: dict[str, str]
) -> None:
    run, command = words(model, tmp_path, f"ray.address={cluster.address}")
    with started(tmp_path / "log", *command, **LET_IN) as launcher:
        assert launcher.wait(timeout=DEADLINE_S) == 0, (tmp_path / "log").read_text()
    assert outcome(run) == whole
    assert not (run / "roles" / "variables.json").exists()


def test_engines_and_ranks_on_a_cluster_are_those_of_one_machine(
    model: Path, tmp_path: Path, cluster: Apart
) -> None:
    """Two engines and two ranks: the number of engines and their places are all the same."""
    more = {"train": {"max_steps": 3, "gpus": 2}, "rollout": {"engines": 2}}
    runs = {}
    for name, extra in (("local", {}), ("ray", {"ray": {"address": cluster.address}})):
        folder = tmp_path / name
        folder.mkdir()
        tree = settings(model, folder / "run", **more) | extra
        file = write(tree, folder / "run.yaml")
        with started(folder / "log", "grpo", str(file), f"launcher={name}", **LET_IN) as launcher:
            assert launcher.wait(timeout=DEADLINE_S) == 0, (folder / "log").read_text()
        runs[name] = outcome(folder / "run")
        said = heart(folder / "run", "trainer-rank1"), heart(folder / "run", "engine-1")
        assert all(one["phase"] == "ended" for one in said)
    assert runs["local"] == runs["ray"]


@pytest.mark.parametrize("token", ["", "x" * 64])
def test_who_has_not_the_token_is_refused(
    model: Path, tmp_path: Path, cluster: Apart, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of Ray's that asks nobody, and our own command."""
    address = cluster.address
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
    with Apart(0, OPEN) as cluster:
        for mode, told in (("token", "asks nobody for a token"), ("disabled", "warning: RAY_AUTH")):
            env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
            env |= {"RAY_AUTH_TOKEN": "x" * 64} if mode == "token" else {"RAY_AUTH_MODE": mode}
            run, command = words(
                model, tmp_path, f"ray.address={cluster.address}", "ray.node_deadline=2"
            )
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
        pid = reached(run, "trainer", 2, launcher)
        (session,) = {path.name for path in Path("/tmp").glob("lowroll-ray-*")} - before
        assert (Path("/tmp") / session).stat().st_mode & 0o777 == 0o700
        assert listening(session) and listening(session) <= LOOPBACK
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=DEADLINE_S) == 143, log.read_text()
    assert not Path(f"/proc/{pid}").exists() and not listening(session)
    assert not (Path("/tmp") / session).exists()
