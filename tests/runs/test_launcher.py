"""Who starts the roles: what a role's end means, and what is said of one that hangs."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowroll.checkpoint.disk_space import NO_ROOM
from lowroll.config import from_mapping
from lowroll.config.process_checks import one_process_notes
from lowroll.runs.preflight import look_at_run
from lowroll.runs.roles import local, supervisor
from lowroll.runs.roles.local import LocalProcess
from lowroll.runs.roles.orchestrator import _check_reached, overheard
from lowroll.runs.roles.role import Exit, Role
from lowroll.runs.roles.supervisor import Supervisor
from lowroll.types import RunFailed
from tests.fixtures.processes import eventually
from tests.fixtures.runs import settings


def role_of(tmp_path: Path, name: str) -> Role:
    process = LocalProcess(os.environ, tmp_path / f"{name}.log")
    return Role(name, ["no-such-command"], process, tmp_path / f"{name}.json")


def supervisor_of(tmp_path: Path, **roles: Any) -> Supervisor:
    """A supervisor of children that were not started, but for the given ones."""
    made = Supervisor.__new__(Supervisor)
    made.trainer = roles.get("trainer") or role_of(tmp_path, "trainer")
    made.orchestrator = roles.get("orchestrator") or role_of(tmp_path, "orchestrator")
    made.engines = [roles.get("engine") or role_of(tmp_path, "engine-0")]
    made.addresses = {}
    made.flags, made.stop = [], SimpleNamespace(signal=15)  # type: ignore[assignment]
    made.display = SimpleNamespace(show=lambda *args, **kwargs: None)  # type: ignore[assignment]
    return made


def test_what_a_role_says_of_the_settings_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    """As in one process: one line, and the exit code of a mistake."""
    launcher = supervisor_of(tmp_path)
    launcher.trainer.start()
    assert eventually(lambda: not launcher.trainer.process.is_alive(), 60)
    with pytest.raises(ValueError, match="^trainer: unknown command 'no-such-command'"):
        launcher.keep_alive(launcher.trainer)


FAILS = """
import errno, sys
from lowroll.cli import main
from lowroll.cli import doctor
def run(_):
    raise OSError(int(sys.argv[1]), "said the test", "/somewhere/file")
doctor.run = run
sys.exit(main.main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, NO_ROOM),
        (errno.EDQUOT, NO_ROOM),
        (errno.EIO, 1),
        (errno.EMFILE, 1),
        (errno.ENOENT, 2),
        (errno.EACCES, 2),
    ],
)
def test_what_a_machine_does_is_no_mistake_of_the_user(number: int, code: int) -> None:
    told = subprocess.run(
        [sys.executable, "-c", FAILS, str(number)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == code and told.stderr.startswith("error: ") and "file" in told.stderr


def ended(one: Role, code: int) -> Role:
    """A role whose process has ended so, before it was ready."""
    one.process.exit = Exit(code, f"exit code {code}", "error: said the test")
    return one


def test_a_machine_in_trouble_at_the_very_first_start_ends_no_launch(tmp_path: Path) -> None:
    launcher = supervisor_of(tmp_path)
    one = ended(launcher.orchestrator, 1)
    launcher.keep_alive(one)
    assert one.start_at and not one.is_done


def test_a_full_disk_is_waited_for_whatever_the_number_of_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as in one process."""
    launcher = supervisor_of(tmp_path)
    launcher.disk_deadline_s = 300.0
    one, now = ended(launcher.orchestrator, NO_ROOM), [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for _ in range(30):
        one.budget.count_start()
        launcher.keep_alive(one)
        assert one.start_at == now[0] + supervisor.FULL_DISK_PAUSE_S
        now[0] = one.start_at
        one.start_at = 0.0
    assert "the run ends in 10 s (ckpt.wait_for_space)" in caplog.text
    with pytest.raises(RunFailed, match=r"said the test.*no room within 300 s .*--resume"):
        launcher.keep_alive(one)
    now[0] += 1e4  # and long after there was room
    launcher.keep_alive(one)
    assert one.start_at


def test_the_number_of_a_process_that_was_reaped_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    one = role_of(tmp_path, "trainer")
    one.start()
    process = one.process
    assert isinstance(process, LocalProcess) and process.child is not None
    assert eventually(lambda: not process.is_alive(), 60)
    assert process.child.returncode is None, "its number is kept until its group is killed"
    monkeypatch.setattr(local.os, "killpg", lambda pid, _: killed.append(pid))
    process.kill()
    assert killed == [process.pid] and one.exit_code == 2
    process.kill()
    one.stop(0.0)
    process.signal(signal.SIGTERM)
    assert killed == [process.pid]


def test_a_sign_of_life_without_a_phase_is_none_of_readiness(tmp_path: Path) -> None:
    one = role_of(tmp_path, "trainer")
    one.process.child = SimpleNamespace(pid=7, returncode=0)  # type: ignore[attr-defined]
    for beat, (said, ready) in enumerate([({}, False), ({"phase": "waiting"}, True)]):
        one.monitor.path.write_text(json.dumps({"pid": 7, "beat": beat, **said}))
        one.update()
        assert one.is_ready == ready


def test_an_engine_whose_port_was_taken_gets_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = supervisor_of(tmp_path)
    engine, killed = launcher.engines[0], []
    launcher.orchestrator.process.kill = lambda: killed.append(1)  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert "serve.port=0" in launcher.late_words(engine), "the system chooses"
        engine.is_ready, engine.start_at = True, time.monotonic() + 60
        engine.monitor.path.write_text(json.dumps({"beat": 1, "url": f"http://127.0.0.1:{port}"}))
        launcher.keep_alive(engine)
        assert "serve.port=0" in launcher.late_words(engine) and killed == [1]
        assert f"engine-0: its port {port} was taken by another process" in caplog.text


def test_an_engine_that_is_lost_while_it_starts_again_keeps_its_port(tmp_path: Path) -> None:
    """The orchestrator looks for it there."""
    launcher = supervisor_of(tmp_path)
    engine = launcher.engines[0]
    engine.is_ready, engine.start_at = True, time.monotonic() + 60
    with local.reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        for beat, said in enumerate([{"url": f"http://127.0.0.1:{port}"}, {"phase": "starting"}]):
            engine.monitor.path.write_text(json.dumps({"beat": beat, **said}))
            launcher.keep_alive(engine)
            assert f"serve.port={port}" in launcher.late_words(engine)


def test_a_reserved_port_is_for_those_who_name_it() -> None:
    with local.reserve_port("127.0.0.1") as held, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(held.getsockname())
        socket.create_server(held.getsockname()).close()
        assert local.is_port_free(*held.getsockname())


def test_an_orchestrator_that_had_ended_comes_back_when_the_trainer_waits(tmp_path: Path) -> None:
    trainer = SimpleNamespace(phase="finishing")
    launcher = supervisor_of(tmp_path, trainer=trainer)
    launcher.orchestrator.is_done = True
    launcher.recall_orchestrator()
    assert launcher.orchestrator.is_done
    trainer.phase = "waiting"
    launcher.recall_orchestrator()
    assert (
        not launcher.orchestrator.is_done and launcher.orchestrator.start_at > time.monotonic() - 1
    )


def test_a_trainer_that_hangs_is_named_while_all_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    hangs, ended = iter([None, None, "the trainer (process 7) gives no sign of life"]), []
    trainer = SimpleNamespace(
        is_done=False,
        is_ready=False,
        update=lambda: None,
        find_hang=lambda: next(hangs),
        process=SimpleNamespace(
            signal=lambda number: None,
            is_alive=lambda: True,
            kill=lambda: ended.append("trainer"),
        ),
    )
    launcher = supervisor_of(tmp_path, trainer=trainer)
    launcher.orchestrator.is_done, launcher.engines = True, []
    with caplog.at_level(logging.WARNING):
        assert launcher.run() == 15
    assert ended == ["trainer"]
    assert "no sign of life; it is ended, and --resume goes on" in caplog.text


def test_one_process_says_that_it_has_no_level(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run")
    assert one_process_notes(from_mapping(tree)) == []
    behind = from_mapping({**tree, "asynchrony": {"max_async_level": 2}})
    (note,) = one_process_notes(behind)
    assert "max_async_level: 2 has no effect" in note and note in look_at_run(behind).notes


def test_where_a_token_can_be_overheard() -> None:
    urls = ["http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://far:1"]
    assert overheard([*urls, "http://far:1/v1", "http://10.0.0.7:1"]) == [
        "http://far:1/v1",
        "http://10.0.0.7:1",
    ]


def test_an_engine_whose_address_leads_nowhere_from_here_is_refused() -> None:
    here = {"role": "engine-0", "host": socket.gethostname()}
    for url in ("http://127.0.0.1:8000", "http://0.0.0.0:8000", "unix:/tmp/engine"):
        _check_reached({**here, "url": url})
    there = {"role": "engine-3", "host": "gpu-machine"}
    for url in ("http://10.0.0.2:8000", "http://gpu-machine:8000", "http://[fd00::2]:8000"):
        _check_reached({**there, "url": url})
    for host in ("127.0.0.1", "127.0.1.1", "0.0.0.0", "localhost", "[::1]", "[::]"):  # noqa: S104
        with pytest.raises(ValueError, match="^engine-3: on gpu-machine .*serve.host=ADDRESS"):
            _check_reached({**there, "url": f"http://{host}:8000"})
    with pytest.raises(ValueError, match="^engine-3: its vLLM on gpu-machine"):
        _check_reached({**there, "url": "unix:/tmp/engine"})
