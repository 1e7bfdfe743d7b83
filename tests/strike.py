"""Commands in processes of their own that are killed, or whose disk fails, at a chosen point.

A process is forked from one that has imported everything, so an attempt costs what the command
costs. Where it strikes:

    after SECONDS         SIGKILL from outside, anywhere
    at a fault point      the names that the code passes (`lowroll.checkpoint.faults`): what lies between two calls
    at a call             the K-th time that the process opens, makes, renames, removes or fsyncs something under a
                          folder, counted by Python's audit events: every file, without a name in
                          the code
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowroll.checkpoint.faults import VARIABLE, observers
from lowroll.cli.main import main

MOST_BYTES = 2 << 30  # of memory that an attempt may take
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
leave: list[Path] = []  # where an attempt says what it has imported
ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}


@dataclass
class Outcome:
    """How an attempt ended. `code` is the exit code, negative for a signal; what went wrong of
    itself is in `odd`."""

    code: int
    text: str
    seconds: float
    odd: str = ""

    @property
    def trouble(self) -> str:
        """What no attempt may do, whatever is done to it."""
        if self.odd:
            return self.odd
        if "Traceback" in self.text or "Logging error" in self.text or self.code not in (0, 1, 2):
            return f"exit code {self.code}: {self.text[-1500:]}"
        if self.code and not any(line.startswith("error: ") for line in self.text.splitlines()):
            return f"exit code {self.code} without an error line: {self.text[-500:]}"
        return ""


def attempt(
    words: list[str],
    before: Callable[[], object] | None = None,
    kill_after: float | None = None,
    meanwhile: Callable[[], object] | None = None,
    deadline: float = 60.0,
) -> Outcome:
    """Run a lowroll command in a fork. before: called in it; meanwhile: called here, again and
    again."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as shown:
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become(words, before, shown.fileno())
        odd, ended = "", (0, 0)
        while not ended[0]:
            seconds = time.monotonic() - began
            if (
                kill_after is not None
                and seconds > kill_after
                or (odd := odd or _excess(pid, seconds, deadline))
            ):
                with suppress(ProcessLookupError):  # it ended just now
                    os.killpg(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)
                break
            if meanwhile is not None:
                meanwhile()
            time.sleep(0.005)
            ended = os.waitpid(pid, os.WNOHANG)
        shown.seek(0)
        return Outcome(
            os.waitstatus_to_exitcode(ended[1]),
            shown.read().decode(errors="replace"),
            time.monotonic() - began,
            odd,
        )


def warm_up(words: list[str], folder: Path) -> Outcome:
    """Run a command, and import here what it has imported: later attempts need not."""
    names = folder / "modules"
    done = attempt(words, lambda: leave.append(names))
    for name in names.read_text().split():
        try:
            importlib.import_module(name)
        except ImportError:  # a part of a module, under a name of its own
            continue
    return done


def _become(words: list[str], before: Callable[[], object] | None, output: int) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if before is not None:
            before()
        code = main(words)
    except SystemExit as error:  # argparse
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for path in leave:
            path.write_text("\n".join(sys.modules))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _excess(pid: int, seconds: float, deadline: float) -> str:
    if seconds > deadline:
        return f"hangs: not done after {deadline:.0f} s"
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # it has just ended
        return ""
    taken = pages * os.sysconf("SC_PAGE_SIZE")
    return f"takes {taken >> 20} MiB of memory" if taken > MOST_BYTES else ""


def arm(point: str, action: str) -> Callable[[], object]:
    """Strike at a fault point."""
    return lambda: os.environ.update({VARIABLE: f"{point}:{action}"})


def calls(under: Path, number: int, action: str, count: Path | None = None) -> Callable[[], object]:
    """Strike at the `number`-th call of the process that concerns something under a folder. count:
    where to keep how many there are."""
    seen, pid, folder = [0], [0], str(under)

    def pass_by(what: str) -> None:
        if os.getpid() != pid[0]:  # a worker that the command has started
            return
        seen[0] += 1
        if count is not None:
            with_count(count, seen[0])
        if seen[0] == number:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(ERRORS[action], os.strerror(ERRORS[action]), what)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and arguments and isinstance(arguments[0], str | Path):
            what = os.path.abspath(arguments[0])
            if what.startswith(folder):
                pass_by(what)

    def install() -> None:
        pid[0] = os.getpid()
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            try:
                what = os.readlink(f"/proc/self/fd/{descriptor}")
            except OSError:
                what = ""
            if what.startswith(folder):
                pass_by(what)
            fsync(descriptor)

        os.fsync = synced
        sys.addaudithook(hook)

    return install


def with_count(path: Path, value: int) -> None:
    """Keep a number in a file, by calls that are not counted themselves."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, str(value).encode())
    os.close(descriptor)


def passed(words: list[str], under: Path, folder: Path) -> tuple[list[str], int]:
    """The fault points that a command passes, and how many of its calls concern something under a
    folder. Kept in another folder."""
    points, number = folder / "points", folder / "calls"
    count = calls(under, 1 << 40, "kill", number)

    def watch() -> None:
        file = points.open("a")
        observers.append(lambda name: print(name, file=file, flush=True))
        count()

    done = attempt(words, watch)
    assert done.code == 0, done.text
    return list(dict.fromkeys(points.read_text().splitlines())), int(number.read_text())
