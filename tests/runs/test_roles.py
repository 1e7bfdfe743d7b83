"""Engine, orchestrator and trainer as processes of their own: bit for bit one process at level 0,
over either transport, through kills, stops and resumption."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lowroll.checkpoint.lock import RunLock, RunLockedError
from lowroll.cli import serve
from lowroll.config import from_mapping
from lowroll.config.surogate.roles import GIVEN
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import Recorder, add_evaluation, read, read_evaluations
from lowroll.orchestrator import ledger_check
from lowroll.orchestrator.loop import logged
from lowroll.runs.folder import RunFolder
from lowroll.runs.preflight import look_at_run
from lowroll.runs.roles.engine import arguments_of
from lowroll.runs.roles.heartbeat import GONE_S, Heartbeat, HeartbeatMonitor
from lowroll.runs.roles.local import LocalProcess, processes
from lowroll.runs.roles.orchestrator import Orchestration, orchestrate
from lowroll.runs.roles.role import MOST_RESTARTS, RestartBudget, Role
from lowroll.runs.roles.run_paths import RunPaths
from lowroll.runs.roles.supervisor import Display, Supervisor
from lowroll.runs.stop import Stop
from lowroll.transport.base import Cursor, PeerSilent
from lowroll.transport.rollout_log import write_rollouts
from lowroll.transport.spool import Spool
from lowroll.types import printable
from lowroll.weights.sync.base import Broadcasts
from tests.fixtures.batches import batch_of
from tests.fixtures.processes import eventually, of_sessions
from tests.fixtures.roles import (
    DEADLINE_S,
    by_hand,
    forked,
    gate,
    heart,
    outcome,
    reached,
    strike,
    write,
)
from tests.fixtures.runs import copy_stopped_after, settings, train

LORA = {"lora": True, "lora_rank": 4}
STEPS = {"max_steps": 4, "learning_rate": 1e-2, "minibatches": 2}
EVALUATED = {"interval": 2, "num_examples": 4, "temperature": 1.0}
ZMQ = {"type": "zmq", "port": 0}
NOISE = {"sigma_start": 0.05, "num_stages": 3}
LONG = pytest.mark.long


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"eval": EVALUATED},
        {"rollout_transport": ZMQ, "train": {**STEPS, **LORA}, "noise": NOISE},
        pytest.param({"rollout_transport": ZMQ, "train": {**STEPS, **LORA}}, marks=LONG),
        pytest.param(
            {
                "dtype": "bfloat16",
                "rollout_transport": ZMQ,
                "rollout": {"max_tokens": 6, "cache_tokens": 1024, "weights": "bf16"},
            },
            marks=LONG,
        ),
        pytest.param({"train": {**STEPS, **LORA}, "noise": NOISE}, marks=LONG),
        {
            "train": {**STEPS, **LORA},
            "rollout": {"max_tokens": 6, "weights": "int8_rotated", "exact": True},
        },
    ],
    ids=["int8-evaluated", "lora-noise-zmq", "lora-zmq", "bf16-zmq", "lora-noise", "exact"],
)
def test_roles_by_hand_are_one_process_bit_for_bit(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    tree = {"train": STEPS, **changes}
    train(settings(model, tmp_path / "one", **tree))
    file = write(settings(model, tmp_path / "roles", **tree), tmp_path / "run.yaml")
    torch = by_hand(file, tmp_path)
    assert not torch, "the orchestrator has loaded torch"
    assert outcome(tmp_path / "roles") == outcome(tmp_path / "one")
    assert ledger_check.check(tmp_path / "roles" / "orchestrator" / "ledger.jsonl", None) == []


@pytest.mark.slow
@pytest.mark.long
def test_whole_models_go_from_device_to_device(model: Path, tmp_path: Path) -> None:
    """By gloo on a CPU, which nccl stands for there."""
    tree = {"train": {**STEPS, "max_steps": 2}}
    train(settings(model, tmp_path / "one", **tree))
    run = tmp_path / "roles"
    direct = {"type": "nccl", "host": "127.0.0.1", "port": 0}
    file = write(settings(model, run, weight_broadcast=direct, **tree), tmp_path / "run.yaml")
    by_hand(file, tmp_path)
    assert outcome(run) == outcome(tmp_path / "one")
    size = (run / "final" / "model.safetensors").stat().st_size
    assert all(record["perf/broadcast_bytes"] < size / 2 for record in read(run)), "as files"
    last = Broadcasts(run / "broadcasts").newest()
    assert last is not None and last.way == "filesystem", "nobody is left to ask for it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=LONG), {"train": {"uaq_scale": 1.5}}],
    ids=["", "scaled"],
)
def test_what_an_aligned_learner_changes_travels_alone(
    model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    tree = {"train": {**STEPS, "forward": "aligned", **changes.get("train", {})}}
    train(settings(model, tmp_path / "one", **tree))
    run = tmp_path / "roles"
    by_hand(write(settings(model, run, **tree), tmp_path / "run.yaml"), tmp_path)
    assert outcome(run) == outcome(tmp_path / "one")
    fractions = [record.get("perf/changed_bytes_fraction") for record in read(run)]
    assert fractions[0] is None and len([found for found in fractions if found]) == 3


@pytest.mark.slow
def test_a_run_goes_on_from_one_process_to_roles_and_back(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "whole", train={**STEPS, "max_steps": 5})
    train(tree)
    whole = tmp_path / "whole"
    copy_stopped_after(whole, 3, tmp_path / "roles")
    file = write({**tree, "output_dir": str(tmp_path / "roles")}, tmp_path / "run.yaml")
    by_hand(file, tmp_path, "--resume")
    assert outcome(tmp_path / "roles") == outcome(whole)
    copy_stopped_after(tmp_path / "roles", 4, tmp_path / "back")
    train({**tree, "output_dir": str(tmp_path / "back")}, resume=True)
    assert outcome(tmp_path / "back") == outcome(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "losses",
    [
        [(2, "trainer", "kill")],
        pytest.param(
            [
                (2, "trainer", "kill"),
                (3, "orchestrator", "kill"),
                (4, "engine-0", "kill"),
                (5, "orchestrator", "stop"),
            ],
            marks=LONG,
        ),
    ],
    ids=["one", "all"],
)
def test_roles_that_are_lost_are_started_again(
    model: Path, tmp_path: Path, losses: list[tuple[int, str, str]]
) -> None:
    """By real children; of the others and of the points between them there are the tests below, and
    `tests.torture --suites roles`."""
    longer = {"train": {**STEPS, "max_steps": 3 + len(losses)}, "rollout_transport": ZMQ}
    train(settings(model, tmp_path / "one", **longer))
    run, log = tmp_path / "roles", tmp_path / "launcher.log"
    file = write(settings(model, run, **longer), tmp_path / "run.yaml")
    words = ("grpo", str(file), "launcher=local")
    with forked(log, *words, LOWROLL_SILENT_S="5") as launcher:
        for step, role, how in losses:
            strike(reached(run, role, step, launcher), how)
            said = "killed by SIGKILL" if how == "kill" else "gives no sign of life"
            named = lambda role=role, said=said: any(  # noqa: E731
                role in line and said in line for line in log.read_text().splitlines()
            )
            assert eventually(named, 60), log.read_text()
        assert launcher.wait(timeout=300) == 0, log.read_text()
    assert outcome(run) == outcome(tmp_path / "one")
    assert ledger_check.check(run / "orchestrator" / "ledger.jsonl", None) == []


@pytest.mark.slow
def test_one_of_several_engines_is_started_again_alone(model: Path, tmp_path: Path) -> None:
    """What exact engines draw at level 0 is what one process draws, whatever happens to one."""
    run, log = tmp_path / "killed", tmp_path / "killed.log"
    opened = gate(tmp_path / "gated.py", run)
    tree = settings(model, run, train={**STEPS, **LORA}, rollout={"exact": True})
    tree["env"][0]["id"] = str(tmp_path / "gated.py")
    train({**tree, "output_dir": str(tmp_path / "one")})
    tree["rollout"]["engines"] = 2
    file = write(tree, tmp_path / "run.yaml")
    with forked(log, "grpo", str(file), "launcher=local") as launcher:
        strike(reached(run, "engine-1", 2, launcher), "kill")
        assert eventually(lambda: heart(run, "engine-1").get("attempt") == 2, DEADLINE_S)
        opened.touch()
        assert launcher.wait(timeout=300) == 0, log.read_text()
    assert outcome(run) == outcome(tmp_path / "one")
    attempts = [heart(run, role)["attempt"] for role in ("engine-0", "engine-1", "trainer")]
    assert attempts == [1, 2, 1]
    assert "engine-1 has ended (killed by SIGKILL)" in log.read_text()
    for role in ("engine-0", "engine-1"):
        assert "serving model at" in (run / "logs" / f"{role}.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
def test_a_loss_at_a_named_point_is_made_good(level: int, tmp_path: Path) -> None:
    """In a process that has imported everything once (`tests.torture`)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fixtures.losses", str(tmp_path), str(level)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("good") == 8, done.stdout


@pytest.mark.slow
def test_roles_end_with_their_launcher_and_a_second_one_is_refused(
    model: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "roles", tmp_path / "launcher.log"
    longer = {"train": {**STEPS, "max_steps": 100_000}}
    file = write(settings(model, run, **longer), tmp_path / "run.yaml")
    words = ("grpo", str(file), "launcher=local")

    def ended(*words: str) -> tuple[int, str]:
        other = tmp_path / "other.log"
        other.unlink(missing_ok=True)
        with forked(other, *words) as child:
            return child.wait(timeout=120), other.read_text()

    with forked(log, *words) as launcher:
        pids = [reached(run, role, 1, launcher) for role in ("trainer", "orchestrator", "engine-0")]
        code, said = ended(*words, "--resume")
        assert code == 1 and f"pid {launcher.pid} on" in said, said
        for role, command in (("orchestrator", "orchestrate"), ("trainer", "train")):
            _, said = ended(command, str(file), *(["--resume"] if command == "train" else []))
            pid = heart(run, role)["pid"]
            assert f"is in use by pid {pid} on" in said, said
        launcher.kill()
        launcher.wait(timeout=60)
        assert eventually(lambda: not of_sessions(set(pids)))


@pytest.mark.slow
def test_a_signal_stops_the_roles_with_a_checkpoint(model: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "roles", tmp_path / "launcher.log"
    opened = gate(tmp_path / "gated.py", run)
    tree = settings(
        model, run, train={**STEPS, "max_steps": 6}, ckpt={"interval": 100, "keep_last": None}
    )
    tree["env"][0]["id"] = str(tmp_path / "gated.py")
    train({**tree, "output_dir": str(tmp_path / "one")})
    file = write(tree, tmp_path / "run.yaml")
    words = ("grpo", str(file), "launcher=local")
    with forked(log, *words) as launcher:
        reached(run, "trainer", 2, launcher)
        launcher.terminate()
        assert eventually(lambda: heart(run, "trainer").get("phase") == "ended", DEADLINE_S)
        opened.touch()
        assert launcher.wait(timeout=120) == 143, log.read_text()
    assert list((run / "checkpoints").glob("step_*"))
    with forked(log, *words, "--resume") as launcher:
        assert launcher.wait(timeout=300) == 0, log.read_text()
    found, wanted = outcome(run), outcome(tmp_path / "one")
    assert found == wanted


@pytest.mark.slow
def test_whoever_stops_is_named_by_those_that_wait_for_it(model: Path, tmp_path: Path) -> None:
    """By hand, without a launcher."""
    run = tmp_path / "roles"
    tree = settings(model, run, train={**STEPS, "max_steps": 100_000})
    file, quick = write(tree, tmp_path / "run.yaml"), {"LOWROLL_SILENT_S": "3"}
    logs = {role: tmp_path / f"{role}.log" for role in ("trainer", "orchestrator", "engine-0")}
    with (
        forked(logs["engine-0"], "serve", str(file), "serve.port=0", **quick),
        forked(logs["orchestrator"], "orchestrate", str(file), **quick),
        forked(logs["trainer"], "train", str(file), **quick) as trainer,
    ):
        for role, by, words in (
            ("orchestrator", "trainer", "the orchestrator (process {pid} on "),
            ("trainer", "orchestrator", "the trainer (process {pid} on "),
            ("engine-0", "orchestrator", "engine {url}"),
        ):
            reached(run, role, heart(run, "trainer").get("step", 0) + 1, trainer)
            said = heart(run, role)
            os.kill(said["pid"], signal.SIGSTOP)
            named = words.format(pid=said["pid"], url=said.get("url"))
            seen = eventually(lambda by=by, named=named: named in logs[by].read_text(), 60)
            assert seen, (role, logs[by].read_text())
            os.kill(said["pid"], signal.SIGCONT)
        reached(run, "trainer", heart(run, "trainer")["step"] + 2, trainer)


# -- parts -----------------------------------------------------------------------------------------


def test_the_orchestrators_command_imports_no_torch() -> None:
    code = (
        "import sys; import lowroll.cli.orchestrate, lowroll.runs.roles.orchestrator, "
        "lowroll.runs.roles.supervisor; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_orchestrator_logs_what_it_had_sent_and_not_logged(tmp_path: Path) -> None:
    """As one that was killed between the two leaves it; what is logged already stays."""
    paths, batch = RunPaths(tmp_path), batch_of(1, orchestrator={"step": 1})
    batch.stats["time/generate"] = 2.0
    spool = Spool(paths.spool)
    spool.put(batch)
    cfg = from_mapping({"model": "m", "output_dir": str(tmp_path), "env": [{"id": "arithmetic"}]})
    role: Any = SimpleNamespace(
        paths=paths,
        home=RunFolder(cfg, "grpo"),
        channel=SimpleNamespace(spool=spool),
        batches=SimpleNamespace(restore=lambda *args, **kwargs: None),
        _cursor=lambda: Cursor(1, 0, 1),
    )
    expected = write_rollouts(tmp_path / "other", logged(batch)).read_bytes()
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    for found in (expected, b"another"):
        assert Orchestration._go_on(role) == 1
        assert path.read_bytes() == found
        path.write_bytes(b"another")


def test_a_role_that_was_never_started_is_no_role_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    watch = HeartbeatMonitor(tmp_path / "trainer.json", clock=lambda: now[0])
    assert watch.describe_report() == "nothing"
    now[0] += 31.0
    watch.check()
    with Heartbeat(tmp_path / "trainer.json", "trainer", 1):
        watch.look()
    told = [r.getMessage() for r in caplog.records]
    assert told[0].startswith("no trainer has shown itself for 31 s") and told[1].endswith(
        "is here"
    )


def test_a_role_that_is_silent_is_named_once_and_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    with Heartbeat(tmp_path / "trainer.json", "trainer", 3) as beat:
        watch = HeartbeatMonitor(tmp_path / "trainer.json", clock=lambda: now[0])
        assert not watch.alive, "a file alone is no sign of life"
        beat.update(step=7, phase="learning")
        assert watch.alive
    watch.look()
    now[0] += 31.0
    watch.check()
    watch.check()
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 1 and f"trainer (process {os.getpid()}" in told[0] and "step 7" in told[0]
    now[0] += 1800.0
    with pytest.raises(PeerSilent, match="trainer"):
        watch.check()


def test_the_tokens_of_a_folder_are_made_once_and_for_this_user(tmp_path: Path) -> None:
    one, again = RunPaths(tmp_path).tokens(), RunPaths(tmp_path).tokens()
    assert one == again and one[0] != one[1]
    assert (tmp_path / "roles" / "tokens.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("given", [{"TOKEN": "a" * 32}, {"TOKEN": "a" * 32, "ADMIN_TOKEN": "b"}])
def test_one_token_alone_is_refused(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a role has those of the folder, and the others do not know them."""
    monkeypatch.delenv("LOWROLL_ADMIN_TOKEN", raising=False)
    for name, token in given.items():
        monkeypatch.setenv(f"LOWROLL_{name}", token)
    with pytest.raises(ValueError, match="^LOWROLL_ADMIN_TOKEN: expected at least 16 characters"):
        RunPaths(tmp_path).tokens()


def trainer_in(tmp_path: Path) -> Role:
    process = LocalProcess(os.environ, tmp_path / "log")
    return Role("trainer", ["no-such-command"], process, tmp_path / "h")


def test_a_child_that_ends_too_often_is_given_up(tmp_path: Path) -> None:
    budget, pauses = RestartBudget(), []
    for _ in range(MOST_RESTARTS + 1):
        budget.count_start()
        pauses.append(budget.pause_s())
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    child = trainer_in(tmp_path)
    child.start()
    assert eventually(lambda: not child.process.is_alive(), 60)
    child.process.kill()
    assert child.exit_code == 2
    said = child.describe_exit()
    assert said.startswith("trainer has ended (exit code 2): ")
    assert "unknown command 'no-such-command'" in said and printable(tmp_path / "log") in said


def test_a_child_that_ended_in_its_start_was_never_ready(tmp_path: Path) -> None:
    """Else a user's mistake is started again five times, the trainer with --resume."""
    child = trainer_in(tmp_path)
    child.start()
    assert isinstance(child.process, LocalProcess)
    said = {"role": "trainer", "pid": child.process.pid, "phase": "ended"}
    for beat, (phase, ready) in enumerate(
        [(one, False) for one in ("starting", "meeting", "ended")]
        + [("waiting", True), ("ended", True)]
    ):
        (tmp_path / "h").write_text(json.dumps({**said, "phase": phase, "beat": beat}))
        child.update()
        assert child.is_ready == ready, phase
    child.process.kill()


def test_an_orchestrator_whose_settings_are_refused_was_never_ready(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one process refuses in a line ends a launch at once, too."""
    cfg = from_mapping(settings(model, tmp_path / "run"))
    said: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("env 'chatty': refused")

    pool = SimpleNamespace(server=SimpleNamespace(cache_tokens=64))
    module = "lowroll.runs.roles.orchestrator"
    monkeypatch.setattr(Heartbeat, "update", lambda _, **told: said.append(told.get("phase", "")))
    monkeypatch.setattr(Orchestration, "_meet_trainer", lambda _: None)
    monkeypatch.setattr(Orchestration, "_pool", lambda *_: nullcontext(pool))
    monkeypatch.setattr(f"{module}.check_trainer", lambda *_: cfg)
    monkeypatch.setattr(f"{module}.check_engines", lambda *_: None)
    monkeypatch.setattr(f"{module}.BatchSource", refuse)
    with pytest.raises(ValueError, match="chatty"):
        orchestrate(cfg)
    assert set(said) == {"", "meeting", "ended"}, "in another phase it is ready"


def test_an_engine_takes_the_largest_groups_of_all_stages(model: Path, tmp_path: Path) -> None:
    stages = [{"step": 2, "rollouts_per_example": 80, "batch_size": 160}]
    cfg = from_mapping(settings(model, tmp_path / "run", stages=stages))
    assert arguments_of(cfg, serve.parser().parse_args(["run.yaml"])).max_n == 80


@pytest.mark.parametrize(
    ("phase", "patience"), [("starting", 300.0), ("learning", 30.0), ("ended", 120.0)]
)
def test_a_child_that_starts_or_has_said_its_end_may_take_a_while(
    tmp_path: Path, phase: str, patience: float
) -> None:
    """Libraries from a slow disk; a machine that is busy, or memory of a large model: it must not
    learn its last steps again."""
    now = [0.0]
    child, process = trainer_in(tmp_path), LocalProcess({}, tmp_path / "log")
    child.process = process
    process.child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    child.monitor = HeartbeatMonitor(tmp_path / "h", clock=lambda: now[0])
    try:
        said = {"role": "trainer", "pid": process.pid, "phase": phase, "beat": 1}
        (tmp_path / "h").write_text(json.dumps(said))
        child.update()
        now[0] = patience - 1
        assert child.find_hang() is None
        now[0] = patience + 1
        assert "gives no sign of life" in (child.find_hang() or "")
    finally:
        process.kill()


def test_an_orchestrator_that_is_refused_leaves_what_another_was_given(
    model: Path, tmp_path: Path
) -> None:
    cfg = from_mapping(settings(model, tmp_path / "run")).with_origin(given="mine")
    with RunLock(RunPaths(tmp_path / "run").roles / "orchestrator"), pytest.raises(RunLockedError):
        orchestrate(cfg)
    assert not (tmp_path / "run" / GIVEN).exists()


def test_a_token_that_is_missing_is_told_before_anybody_is_waited_for(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWROLL_TOKEN", "x" * 16)
    monkeypatch.setattr(Orchestration, "_meet_trainer", lambda self: pytest.fail("it waits"))
    with pytest.raises(ValueError, match="LOWROLL_ADMIN_TOKEN"):
        orchestrate(from_mapping(settings(model, tmp_path / "run")))


def test_a_dry_run_refuses_what_the_roles_refuse(model: Path, tmp_path: Path) -> None:
    tree = settings(model, tmp_path / "run", launcher="local", guard={"action": "fallback"})
    assert any("guard.action" in told for told in look_at_run(from_mapping(tree)).problems)


def test_evaluations_of_an_orchestrator_are_read_with_the_records(
    model: Path, tmp_path: Path
) -> None:
    train(settings(model, tmp_path / "run", train={**STEPS, "max_steps": 2}))
    run = tmp_path / "run"
    add_evaluation(run, 0, {"eval/reverse-text/reward_before": 0.25, "time/eval": 1.0})
    add_evaluation(run, 1, {"eval/reverse-text/reward": 0.5, "time/eval": 2.0})
    add_evaluation(run, 9, {"eval/reverse-text/reward": 0.75})
    with (run / "orchestrator" / "evaluations.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "torn')
    first, second = read(run)
    assert first["eval/reverse-text/reward_before"] == 0.25
    assert first["eval/reverse-text/reward"] == 0.5 and first["time/eval"] == 3.0
    assert "eval/reverse-text/reward" not in second
    add_evaluation(run, 2, {"eval/reverse-text/reward": 1.0})
    assert sorted(read_evaluations(run)) == [0, 1, 2, 9]


def test_the_launcher_shows_evaluations_and_warnings(tmp_path: Path) -> None:
    """Those of the orchestrator come after the record of their step, and were shown nowhere."""
    cfg = from_mapping({"model": "m", "output_dir": str(tmp_path), "rollout": {"engines": 3}})
    out = io.StringIO()
    view = LiveView(4, "run", Console(file=out, width=200))
    paths = RunPaths(tmp_path)
    display = Display(cfg, paths, view, resume=False)
    launcher = Supervisor(cfg, paths, tmp_path / "x", processes(cfg, paths), display, Stop())
    assert [child.name for child in launcher.engines] == ["engine-0", "engine-1", "engine-2"]
    launcher.trainer.is_ready = True
    recorder = Recorder(tmp_path)
    recorder.write(1, {"reward/mean": 0.25})
    launcher.show()
    add_evaluation(tmp_path, 1, {"eval/words/reward": 0.75})
    (tmp_path / "logs").mkdir()
    line = "2026-01-01 10:00:00,1 WARNING lowroll.x: engine h is fenced\n"
    (tmp_path / "logs" / "orchestrator_1.log").write_text(line)
    launcher.show()
    recorder.write(2, {"reward/mean": 0.5})
    add_evaluation(tmp_path, 2, {"eval/words/reward": 0.875})
    launcher.show()
    launcher.show()
    told = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert told[0].startswith("step 1/4 reward 0.250")
    assert told[1:3] == ["step 1/4 eval/words/reward 0.750", "orchestrator: engine h is fenced"]
    assert told[3].startswith("step 2/4 reward 0.500") and "eval/words/reward 0.875" in told[3]
    assert len(told) == 4


def test_the_document_says_how_long_roles_wait_for_an_engine() -> None:
    text = (Path(__file__).parents[2] / "docs" / "roles.md").read_text()
    assert f"When no engine is left the run waits {GONE_S:,.0f} s" in text
