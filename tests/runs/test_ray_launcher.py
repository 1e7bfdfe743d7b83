"""What the launcher on a Ray cluster decides, without a cluster: what roles ask for, what an actor
does, and what the end of an actor or of its node means. `test_ray_cluster` has real ones."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowroll.checkpoint.lock import RunLock
from lowroll.config import ConfigError, from_mapping
from lowroll.runs.roles import ray as launcher
from lowroll.runs.roles.ray_actor import ActorAway, ActorLost, ActorProcess, Bundle, RoleActor
from lowroll.runs.roles.run_paths import RunPaths
from lowroll.runs.roles.supervisor import Supervisor
from tests.fixtures.processes import eventually

HERE = {"address": "10.0.0.7", "host": "gpu-1", "node": "n1"}


class FakeActorProcess(ActorProcess):
    """A process whose actor is an object here; `lost` is why it does not answer."""

    lost, away = "", False
    node_lost = False
    left = 0

    def ask(self, method: str, *words: Any) -> Any:
        if self.lost:
            raise ActorLost(self.lost)
        return getattr(self.actor, method)(*words)

    def is_node_lost(self) -> bool:
        return self.node_lost

    def leave(self) -> None:
        self.left += 1


def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeActorProcess:
    owner = RoleActor()
    owner.variables = {"all": dict(os.environ), "engine-0": {"MARK": "1"}}
    paths, bundle = RunPaths(tmp_path), Bundle(None, 0, 1.0, 0.0)
    met, log, lock = ("", "", ""), paths.log("engine-0"), paths.lock("engine-0")
    made = FakeActorProcess("engine-0", bundle, met, 600.0, log, lock)
    made.actor, made.node, made.address = owner, HERE, HERE["address"]
    monkeypatch.setattr(owner, "ends", SimpleNamespace(remote=lambda: "asked"))

    def answer(_: str) -> Any:
        if made.away:
            raise ActorAway("for now")
        if made.lost:
            raise ActorLost(made.lost)
        return RoleActor.ends(owner)

    monkeypatch.setattr("lowroll.runs.roles.ray_actor.answer", answer)
    return made


@pytest.mark.parametrize(
    ("changes", "gpus", "wanted"),
    [
        ({}, 0, {"trainer": (1, 0), "orchestrator": (1, 0), "engine-0": (1, 0)}),
        ({}, 4, {"trainer": (1, 1), "orchestrator": (1, 0), "engine-0": (1, 1)}),
        ({"device": "cpu"}, 4, {"trainer": (1, 0), "orchestrator": (1, 0), "engine-0": (1, 0)}),
        (
            {"train": {"gpus": 2}, "rollout": {"engines": 2}, "ray": {"engine_gpus": 0.5}},
            4,
            {"trainer": (1, 2), "orchestrator": (1, 0), "engine-0": (1, 0.5), "engine-1": (1, 0.5)},
        ),
        (
            {"ray": {"trainer_cpus": 8, "trainer_gpus": 0.0, "engine_cpus": 3}},
            4,
            {"trainer": (8, 0), "orchestrator": (1, 0), "engine-0": (3, 1)},
        ),
        (
            {"client": {"base_url": ["http://far:8000"]}},
            1,
            {"trainer": (1, 1), "orchestrator": (1, 0)},
        ),
    ],
)
def test_what_each_role_asks_the_cluster_for(
    changes: dict[str, Any], gpus: float, wanted: dict[str, tuple[float, float]]
) -> None:
    assert launcher.demands(from_mapping({"model": "m", **changes}), gpus) == wanted


@pytest.mark.parametrize("address", ["", "far", "far:", ":1", "far:0", "far:x", "far:70000"])
def test_an_address_that_leads_nowhere_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="ray.address"):
        from_mapping({"model": "m", "ray": {"address": address}})
    assert from_mapping({"model": "m", "ray": {"address": "far:6379"}}).ray.address == "far:6379"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weight_broadcast": {"type": "cuda_ipc"}}, "weight_broadcast.type: cuda_ipc needs"),
        (
            {"rollout": {"engine": "vllm", "weights": "dense"}},
            "a vLLM that a role starts is reached",
        ),
    ],
)
def test_what_two_machines_cannot_do_is_refused(changes: dict[str, Any], said: str) -> None:
    tree = {"model": "m", "launcher": "ray", **changes}
    with pytest.raises(ConfigError, match=said):
        from_mapping({**tree, "ray": {"address": "auto"}})
    from_mapping(tree)  # one machine can
    (note,) = [
        note
        for note in from_mapping({"model": "m", "ray": {"address": "auto"}}).notes
        if note.startswith("ray:")
    ]
    assert "no effect, launcher is none" in note


def test_a_package_that_is_missing_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):  # put back
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'lowroll\[ray\]'"):
        launcher.package(None)
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", "asks nobody for a token: .* RAY_AUTH_MODE=token .* RAY_AUTH_MODE=disabled"),
        ("raise SystemExit('InvalidAuthToken')", None),
        ("raise SystemExit('odd')", "was not to be found out: odd"),
        ("import time; time.sleep(60)", "was not to be found out: no answer"),
    ],
)
def test_a_cluster_that_asks_for_no_token_is_refused(
    program: str,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    probe = (
        "import os, sys; assert sys.argv[1] == 'far:1' and 'RAY_AUTH_TOKEN' not in os.environ\n"
        f"assert os.environ['RAY_AUTH_MODE'] == 'disabled'\n{program}"
    )
    monkeypatch.setattr(launcher, "AUTH_PROBE", probe)
    monkeypatch.setattr(launcher, "AUTH_PROBE_S", 1.0 if "sleep" in program else 60.0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    if not program:
        with pytest.raises(ValueError, match=f"ray.address: auto: .*{said}"):
            launcher.refuse_open("auto", "far:1")
        return
    launcher.refuse_open("auto", "far:1")
    told = capsys.readouterr()
    assert (said or "") in told.out + told.err and bool(said) == bool(told.out + told.err)


def test_secrets_travel_by_a_file_of_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_TOKEN": "h", "MINE": "m", "OTHER": "o", "VLLM_API_KEY": "v"}.items():
        monkeypatch.setenv(name, value)
    paths = RunPaths(tmp_path)
    paths.roles.mkdir()
    cfg = from_mapping({"model": "m", "ray": {"pass_env": ["MINE"]}})
    with launcher.role_variables(cfg, paths) as (path, word):
        assert os.stat(path).st_mode & 0o777 == 0o600
        found = json.loads(Path(path).read_text())
        assert found["word"] == word and found["engine-0"] == {"LOWROLL_ENGINE_ROLE": "engine-0"}
        given = found["all"]
        assert (given["HF_TOKEN"], given["MINE"], given["VLLM_API_KEY"]) == ("h", "m", "v")
        assert "OTHER" not in given and "PATH" not in given
        assert len(given["LOWROLL_TOKEN"]) == len(given["LOWROLL_ADMIN_TOKEN"]) == 32
    assert not Path(path).exists()


def test_an_actor_says_why_a_role_cannot_run_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_node_id=lambda: "n1")
    fake = SimpleNamespace(
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7"),
        get_runtime_context=lambda: context,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)  # type: ignore[arg-type]
    here, file = str(tmp_path), tmp_path / "roles" / "variables.json"
    missing = RoleActor().meet(here, str(file), "w")
    assert missing["address"] == "10.0.0.7" and "does not see the run folder" in missing["wrong"]
    file.parent.mkdir()
    file.write_text('{"word": "another"}')
    assert "which is not the run folder" in RoleActor().meet(here, str(file), "w")["wrong"]
    file.write_text('{"word": "w", "all": {}}')
    assert (
        "where this command was started" in RoleActor().meet("/no/where", str(file), "w")["wrong"]
    )
    assert "wrong" not in RoleActor().meet(here, str(file), "w")


def test_a_node_that_does_not_see_the_folder_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = ActorProcess(
        "trainer", Bundle(None, 0, 1.0, 0.0), ("", "", ""), 600.0, Path("log"), Path("lock")
    )
    process.actor = object()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    wrong = HERE | {"wrong": "does not see the run folder"}
    monkeypatch.setattr("lowroll.runs.roles.ray_actor.answer", lambda _: wrong)
    with pytest.raises(
        ValueError, match=r"10\.0\.0\.7 \(gpu-1\), where the trainer is placed, does"
    ):
        process.is_placed()
    assert not process.node


def test_a_process_that_an_actor_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets nothing of Ray's, its end is told with its last words, and a mistake is a user's."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    one = owned(tmp_path, monkeypatch)
    one.actor.variables["all"].pop("RAY_AUTH_TOKEN", None)
    one.start(["no-such-command"])
    assert one.pid and one.wrote({"pid": one.pid, "host": "gpu-1"})
    assert not one.wrote({"pid": one.pid, "host": "gpu-2"}), "numbers are of a machine"
    assert one.wrote({"pid": 1, "parent": one.pid, "host": "gpu-1"}), "of a rank that it started"
    env = dict(
        pair.split("=", 1)
        for pair in Path(f"/proc/{one.pid}/environ").read_text().split("\0")
        if "=" in pair
    )
    assert env["MARK"] == "1" and "RAY_AUTH_TOKEN" not in env
    assert eventually(lambda: not one.is_alive(), 60)
    one.kill()
    assert one.exit is not None
    assert one.exit.code == 2 and one.exit.cause == "exit code 2"
    assert "unknown command 'no-such-command'" in one.exit.error
    assert str(one.log.absolute()) in one.exit.error and not one.left, "the actor stays"


def pass_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock an hour forward."""
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)


@pytest.mark.parametrize(("node", "said"), [(False, "its actor was lost"), (True, "its node 10.0")])
def test_the_end_of_an_actor_or_of_its_node_is_told_with_the_roles_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: bool, said: str
) -> None:
    one = owned(tmp_path, monkeypatch)
    one.log.parent.mkdir(parents=True)
    one.pid, one.node_lost = 7, node
    one.log.write_text("RuntimeError: NCCL timed out\n")
    assert one.is_alive()
    one.away = True
    assert one.is_alive(), "Ray does not know yet"
    one.away, one.lost = False, "the actor died because its node has died"
    pass_time(monkeypatch)
    assert not one.is_alive() and one.exit is not None
    assert one.exit.code == -signal.SIGKILL and one.left == 1
    assert said in one.exit.cause and one.lost in one.exit.cause
    assert "RuntimeError: NCCL timed out" in one.exit.error and str(one.log) in one.exit.error
    one.kill()
    one.signal(15)
    assert one.left == 1


def test_a_role_is_not_started_beside_one_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a lost actor ends when it sees that: until then the role is had."""
    one = owned(tmp_path, monkeypatch)
    one.lost = "gone"
    with RunLock(one.lock):
        assert one.is_placed(), "nothing was lost"
        one.start(["x"])
        assert not one.is_alive() and not one.is_placed()
        with monkeypatch.context() as later:
            pass_time(later)
            assert one.is_placed(), "it says so itself"
    assert one.is_placed()


def test_an_engine_that_has_moved_is_found_again(tmp_path: Path) -> None:
    supervisor, killed = Supervisor.__new__(Supervisor), []
    process = SimpleNamespace(address="10.0.0.7", is_port_free=lambda port: True)
    engine: Any = SimpleNamespace(name="engine-0", process=process)
    orchestrator = SimpleNamespace(process=SimpleNamespace(kill=lambda: killed.append(1)))
    supervisor.orchestrator = orchestrator  # type: ignore[assignment]
    supervisor.trainer, supervisor.engines = orchestrator, [engine]  # type: ignore[assignment]
    supervisor.addresses = {"engine-0": ("10.0.0.7", 4000)}
    assert "serve.port=4000" in supervisor.late_words(engine) and not killed
    process.address = "10.0.0.8"
    assert "serve.port=0" in supervisor.late_words(engine) and killed == [1]


def test_roles_listen_at_their_nodes_addresses(tmp_path: Path) -> None:
    supervisor = Supervisor.__new__(Supervisor)
    roles: list[Any] = [
        SimpleNamespace(
            name=f"r{i}", process=SimpleNamespace(address=f"10.0.0.{i}"), is_ready=False
        )
        for i in range(3)
    ]
    supervisor.trainer, supervisor.orchestrator, engine = roles
    supervisor.engines, supervisor.addresses, supervisor.flags = [engine], {}, ["--overwrite"]
    said = [" ".join(supervisor.late_words(role)) for role in roles]
    assert said[0] == "weight_broadcast.host=10.0.0.0 weight_broadcast.port=0 --overwrite"
    assert said[1] == "rollout_transport.host=10.0.0.1"
    assert said[2].startswith("serve.host=10.0.0.2 serve.port=0")
    roles[1].process.address = "127.0.0.1"
    assert supervisor.late_words(supervisor.orchestrator) == []


def test_ray_reads_its_mode_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ray was imported before, without RAY_AUTH_MODE=token"):
        launcher.package(None)
    assert "RAY_AUTH_MODE" not in os.environ
