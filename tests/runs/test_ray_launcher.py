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
from lowroll.runs.launch import ray as launcher
from lowroll.runs.launch.bundle import Away, Bundle, Lost
from lowroll.runs.launch.fleet import Fleet
from lowroll.runs.launch.role_actor import RoleActor
from lowroll.runs.launch.role_process import ActorRole
from lowroll.runs.roles.run_paths import RunPaths
from tests.fixtures.processes import eventually

HERE = {"here": "10.0.0.7", "host": "gpu-1", "node": "n1"}


class FakeBundle:
    """A place whose actor is an object here; `lost` is why it does not answer."""

    def __init__(self, owner: Any) -> None:
        self.actor: Any = owner
        self.told = HERE
        self.lost, self.away = "", False
        self.node = False
        self.left = 0

    def take(self) -> bool:
        return True

    def ask(self, method: str, *words: Any) -> Any:
        if self.lost:
            raise Lost(self.lost)
        return getattr(self.actor, method)(*words)

    def node_is_lost(self) -> bool:
        return self.node

    def leave(self) -> None:
        self.left += 1


def owned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ActorRole, FakeBundle]:
    owner = RoleActor()
    owner.variables = {"all": dict(os.environ), "engine-0": {"MARK": "1"}}  # type: ignore[dict-item]
    bundle = FakeBundle(owner)
    bundle.actor.ended = SimpleNamespace(remote=lambda: "asked")

    def answer(_: str) -> Any:
        if bundle.away:
            raise Away("for now")
        if bundle.lost:
            raise Lost(bundle.lost)
        return RoleActor.ended(owner)

    monkeypatch.setattr("lowroll.runs.launch.role_process.answer", answer)
    place = RunPaths(tmp_path)
    made = ActorRole(
        "engine-0",
        ["no-such-command"],
        place.heart("engine-0"),
        place.log("engine-0"),
        bundle,  # type: ignore[arg-type]
        place.lock("engine-0"),
    )
    return made, bundle


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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stranger = tmp_path / "auth_probe.py"
    stranger.write_text(
        "import os, sys; assert sys.argv[1] == 'far:1' and 'RAY_AUTH_TOKEN' not in os.environ\n"
        f"assert os.environ['RAY_AUTH_MODE'] == 'disabled'\n{program}"
    )
    monkeypatch.setattr(launcher, "AUTH_PROBE", stranger)
    monkeypatch.setattr(launcher, "STRANGER_S", 1.0 if "sleep" in program else 60.0)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    if not program:
        with pytest.raises(ValueError, match=f"ray.address: auto: .*{said}"):
            launcher._refuse_open("auto", "far:1")
        return
    launcher._refuse_open("auto", "far:1")
    told = capsys.readouterr()
    assert (said or "") in told.out + told.err and bool(said) == bool(told.out + told.err)


def test_secrets_travel_by_a_file_of_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HF_TOKEN": "h", "MINE": "m", "OTHER": "o", "VLLM_API_KEY": "v"}.items():
        monkeypatch.setenv(name, value)
    place = RunPaths(tmp_path)
    place.roles.mkdir()
    cfg = from_mapping({"model": "m", "ray": {"pass_env": ["MINE"]}})
    with launcher._variables(cfg, place) as (path, word):
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
    assert missing["here"] == "10.0.0.7" and "does not see the run folder" in missing["wrong"]
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
    bundle = Bundle.__new__(Bundle)
    bundle.role, bundle.told, bundle._since, bundle.deadline_s = "trainer", {}, 0.0, 600.0
    bundle.actor, bundle._meeting = object(), None
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    wrong = HERE | {"wrong": "does not see the run folder"}
    monkeypatch.setattr("lowroll.runs.launch.bundle.answer", lambda _: wrong)
    with pytest.raises(
        ValueError, match=r"10\.0\.0\.7 \(gpu-1\), where the trainer is placed, does"
    ):
        bundle.take()
    assert not bundle.told


def test_a_process_that_an_actor_owns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets nothing of Ray's, its end is told with its last words, and a mistake is a user's."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    one, bundle = owned(tmp_path, monkeypatch)
    bundle.actor.variables["all"].pop("RAY_AUTH_TOKEN", None)
    one.start()
    assert one.pid and one.is_mine({"pid": one.pid, "host": "gpu-1"})
    assert not one.is_mine({"pid": one.pid, "host": "gpu-2"}), "numbers are of a machine"
    env = dict(
        pair.split("=", 1)
        for pair in Path(f"/proc/{one.pid}/environ").read_text().split("\0")
        if "=" in pair
    )
    assert env["MARK"] == "1" and "RAY_AUTH_TOKEN" not in env
    assert eventually(lambda: not one.alive(), 60)
    one.kill()
    assert one.code == 2 and one.ended() == "exit code 2"
    assert "unknown command 'no-such-command'" in one.last_words()
    assert str(one.log.absolute()) in one.last_words() and not bundle.left, "the actor stays"


@pytest.mark.parametrize(("node", "said"), [(False, "its actor was lost"), (True, "its node 10.0")])
def test_the_end_of_an_actor_or_of_its_node_is_told_with_the_roles_last_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: bool, said: str
) -> None:
    one, bundle = owned(tmp_path, monkeypatch)
    one.log.parent.mkdir(parents=True)
    one.pid, bundle.node = 7, node
    one.log.write_text("RuntimeError: NCCL timed out\n")
    assert one.alive()
    bundle.away = True
    assert one.alive(), "Ray does not know yet"
    bundle.away, bundle.lost = False, "the actor died because its node has died"
    one._ask_at = 0.0
    assert not one.alive() and one.code == -signal.SIGKILL and bundle.left == 1
    assert said in one.ended() and bundle.lost in one.ended()
    assert "RuntimeError: NCCL timed out" in one.last_words() and str(one.log) in one.last_words()
    one.kill()
    one.signal(15)
    assert bundle.left == 1


def test_a_role_is_not_started_beside_one_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a lost actor ends when it sees that: until then the role is had."""
    one, bundle = owned(tmp_path, monkeypatch)
    bundle.lost = "gone"
    with RunLock(one.lock):
        assert one.placed(), "nothing was lost"
        one.begin(["x"])
        assert not one.alive() and not one.placed()
        one._lost_at -= 3600
        assert one.placed(), "it says so itself"
    one._lost_at = time.monotonic()
    assert one.placed()


def test_an_engine_that_has_moved_is_found_again(tmp_path: Path) -> None:
    fleet, killed = Fleet.__new__(Fleet), []
    engine = SimpleNamespace(role="engine-0", here="10.0.0.7", is_free=lambda port: True)
    fleet.orchestrator = SimpleNamespace(kill=lambda: killed.append(1))  # type: ignore[assignment]
    fleet.at = {"engine-0": ("10.0.0.7", 4000)}
    assert fleet._port(engine) == 4000 and not killed  # type: ignore[arg-type]
    engine.here = "10.0.0.8"
    assert fleet._port(engine) == 0 and killed == [1]  # type: ignore[arg-type]


def test_roles_listen_at_their_nodes_addresses(tmp_path: Path) -> None:
    fleet = Fleet.__new__(Fleet)
    members = [SimpleNamespace(role=f"r{i}", here=f"10.0.0.{i}", ready=False) for i in range(3)]
    fleet.trainer, fleet.orchestrator, engine = members  # type: ignore[assignment]
    fleet.engines, fleet.at, fleet.flags = [engine], {}, ["--overwrite"]  # type: ignore[list-item]
    said = [" ".join(fleet._addresses(member)) for member in members]  # type: ignore[arg-type]
    assert said[0] == "weight_broadcast.host=10.0.0.0 weight_broadcast.port=0 --overwrite"
    assert said[1] == "rollout_transport.host=10.0.0.1"
    assert said[2].startswith("serve.host=10.0.0.2 serve.port=0")
    members[1].here = "127.0.0.1"
    assert fleet._addresses(fleet.orchestrator) == []


def test_ray_reads_its_mode_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ray was imported before, without RAY_AUTH_MODE=token"):
        launcher.package(None)
    assert "RAY_AUTH_MODE" not in os.environ
