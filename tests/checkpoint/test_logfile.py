"""What the log of a child says: its last error, and its warnings as they come."""

from __future__ import annotations

from pathlib import Path

from lowroll.checkpoint.logfile import Warnings, last_error


def test_the_last_error_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "No such file" in last_error(log)
    log.write_text("")
    assert last_error(log) == "(nothing)"
    log.write_text("ValueError: of an earlier start\n")
    since = log.stat().st_size
    with log.open("a") as out:
        out.write("hello\n")
    assert last_error(log, since) == "hello"
    with log.open("a") as out:
        out.write("  RuntimeError: no room\nEngineDeadError: See stack trace\nbye\n\n")
    assert last_error(log, since) == "RuntimeError: no room"
    log.write_text("x\nerror: model: no such folder\x1b[2J\nended\n")
    assert last_error(log).startswith("error: model: no such folder") and "\x1b" not in last_error(
        log
    )


def test_warnings_come_once_a_kind(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        with (tmp_path / name).open("a") as out:
            out.write(text)

    write("orchestrator_1.log", "2026-01-01 10:00:00,1 WARNING lowroll.x: of another launch\n")
    warnings = Warnings(tmp_path, "orchestrator")
    assert warnings.new() == []
    write(
        "orchestrator_1.log", "2026-01-01 10:00:00,2 WARNING lowroll.x: step 1: all equal (0.9)\n"
    )
    write(
        "orchestrator_1.log", "2026-01-01 10:00:00,2 INFO lowroll.x: nothing\nWARNING in a text\n"
    )
    write(
        "orchestrator_2.log", "2026-01-01 10:00:00,3 ERROR lowroll.y: engine fenced\n2026-01-01 1"
    )
    write("attempt_1.log", "2026-01-01 10:00:00,3 ERROR lowroll.y: of another role\n")
    assert warnings.new() == ["step 1: all equal (0.9)", "engine fenced"]
    assert warnings.new() == []
    write("orchestrator_2.log", "0:00:00,4 WARNING lowroll.x: step 2: all equal (1e-3)\n")
    write("orchestrator_2.log", "2026-01-01 10:00:00,5 WARNING lowroll.x: step 2: too long\n")
    assert warnings.new() == ["step 2: too long"]
