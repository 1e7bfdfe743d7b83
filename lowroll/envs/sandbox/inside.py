"""The sandbox's first process, which runs a program once a case and reports.

    in    one JSON object, to the end of the input: {"source", "cases": [{"input", "fn_name"}],
          "limits", "filter"}
    out   {"ready": true}, then a line a case, in order: {"case", "status", "output", "message",
          "seconds"}; "status" is "ended", "timeout", "crash", "output" or "compile"

No expected output is in the sandbox, so no verdict can be read or forged. The program runs in a
child without these pipes and cannot lift its limits or filter. As process 1 of its namespace, this
process cannot be signalled or traced from inside, and kills everything else after a case. It first
checks its namespaces (`missing_walls`), as outside that kill would end all of the user's processes.
Only the standard library is imported.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import json
import math
import os
import re
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from importlib import import_module
from typing import Any

PROGRAM = "/tmp/program.py"
RESULT = 3  # descriptor of a function's result
COMPILE = 65  # exit status of a program that does not compile
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
FILTER_MODE = 2
LAST_WORDS = 300  # bytes of standard error
STACK_MB = 64
IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w, \t]+)", re.MULTILINE)
# imported before the first case if the program uses them, to share them with the forks
KNOWN = frozenset(
    "bisect collections copy dataclasses datetime decimal fractions functools heapq io itertools "
    "json math operator queue random re statistics string typing".split()
)
HOST_FILES = (
    "/proc/self",
    "/sys/kernel",
    "/etc/passwd",
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "isolation.py"),
)
ANY_PORT = 9  # nothing is sent to it
libc = ctypes.CDLL(None, use_errno=True)


class SockFprog(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def prctl(option: int, value: int, more: Any = 0) -> None:
    """Call prctl(2); OSError where the kernel refuses."""
    if libc.prctl(option, ctypes.c_ulong(value), more, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option} is refused")


# -- the walls -----------------------------------------------------------------------------------


def missing_walls() -> list[str]:
    """Return the missing kinds of isolation, in words."""
    missing = []
    if os.getpid() != 1 or os.getppid() != 0:
        missing.append(f"it is process {os.getpid()}, not process 1 of a namespace of its own")
    elif not _is_alone():
        missing.append("there are other processes in its namespace")
    visible_files = [path for path in HOST_FILES if os.path.lexists(path)]
    if visible_files:
        missing.append(f"it sees the machine's {', '.join(visible_files)}")
    if _has_network():
        missing.append("it has a network")
    return missing


def _is_alone() -> bool:
    """Return whether no other process can be signalled. Signal 0 only tests."""
    try:
        os.kill(-1, 0)
    except ProcessLookupError:
        return True
    return False


def _has_network() -> bool:
    if any(name != "lo" for _, name in socket.if_nameindex()):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", ANY_PORT))
        except OSError:
            return False
    return True


# -- the program ---------------------------------------------------------------------------------


def be_the_program(request: dict[str, Any], case: dict[str, Any], pipes: tuple[int, ...]) -> None:
    """Set the child's limits, run the program, and end."""
    code = 1
    try:
        _connect_pipes(pipes, case["fn_name"] is not None)
        _set_limits(request["limits"], bytes.fromhex(request["filter"]))
        code = _run(case)
    except SyntaxError as error:
        traceback.print_exc(limit=-2)
        code = COMPILE if error.filename == PROGRAM else 1
    except SystemExit as error:
        code = _exit_status(error.code)
    except BaseException:
        traceback.print_exc(limit=-4)
    finally:
        _end(code)


def _connect_pipes(pipes: tuple[int, ...], is_function: bool) -> None:
    stdin, output, stderr = pipes
    os.dup2(stdin, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY) if is_function else output, 1)
    os.dup2(stderr, 2)
    if is_function:
        os.dup2(output, RESULT)
    os.closerange(RESULT + is_function, 1 << 10)


def _set_limits(limits: dict[str, float], lines: bytes) -> None:
    """Limit this process for good. `lines` are the seccomp filter's."""
    seconds, memory = math.ceil(limits["seconds"]), int(limits["memory_mb"]) << 20
    disk = int(limits["disk_mb"]) << 20
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_NPROC, limits["processes"] + 2, limits["processes"] + 2),
        (resource.RLIMIT_NOFILE, limits["files"], limits["files"]),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_STACK, STACK_MB << 20, STACK_MB << 20),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        hard_now = resource.getrlimit(kind)[1]
        most = sys.maxsize if hard_now == resource.RLIM_INFINITY else hard_now
        resource.setrlimit(kind, (min(int(soft), most), min(int(hard), most)))
    os.setsid()
    os.chdir("/tmp")
    prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(SockFprog(len(lines) // 8, lines)))


def _run(case: dict[str, Any]) -> int:
    """Run the program, or call its function and write the result, as JSON, to the pipe `RESULT`.
    Return the exit code of a program that ends by itself."""
    sys.argv = [PROGRAM]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # normally from `site`
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    name = case["fn_name"]
    if name is None:
        runpy.run_path(PROGRAM, run_name="__main__")
        return 0
    names = runpy.run_path(PROGRAM, run_name="program")
    function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
    unwritten = json.dumps(function(*case["input"])).encode()
    while unwritten:
        num_written = os.write(RESULT, unwritten)
        unwritten = unwritten[num_written:]
    os._exit(0)  # exit handlers could change the result


def _exit_status(code: Any) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(code: int) -> None:
    try:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(3600)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        code = code or 1
    finally:
        os._exit(code)


# -- who watches it ------------------------------------------------------------------------------


class CaseWatch:
    """A running case and its output."""

    def __init__(self, pid: int, output: int, words: int, limits: dict[str, float]) -> None:
        self.pid, self.output, self.words = pid, output, words
        self.room = int(limits["output_kb"]) << 10
        self.start = time.monotonic()
        self.deadline = self.start + limits["wall_seconds"]
        self.most = limits["seconds"]
        self.said: dict[int, bytearray] = {output: bytearray(), words: bytearray()}
        self.why = ""

    def watch(self) -> dict[str, Any]:
        """Wait for the case, end its processes, and return the reply."""
        pidfd = os.pidfd_open(self.pid)  # readable once the program has ended
        open_descriptors = {pidfd, *self.said}
        while not self.why and pidfd in open_descriptors:
            seconds_left = max(0.0, self.deadline - time.monotonic())
            ready = select.select(open_descriptors, [], [], seconds_left)[0]
            if not ready:
                self.why = "timeout"
            for descriptor in ready:
                if descriptor == pidfd or not self._read(descriptor):
                    open_descriptors.discard(descriptor)
        # reads what the program wrote before it ended; a list, so that every pipe is read
        while not self.why and any([self._read(pipe) for pipe in self.said]):
            pass
        seconds = time.monotonic() - self.start
        status, cpu_seconds = end_all(self.pid)
        for descriptor in (pidfd, *self.said):
            os.close(descriptor)
        return {
            "status": self.why or self._how(status, cpu_seconds),
            "output": bytes(self.said[self.output]).decode(errors="replace"),
            "message": bytes(self.said[self.words][-LAST_WORDS:]).decode(errors="replace"),
            "seconds": seconds,
        }

    def _read(self, pipe: int) -> bool:
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        self.room -= len(data)
        self.said[pipe] += data
        if self.room < 0:
            self.why = "output"
        return bool(data) and not self.why

    def _how(self, status: int, used: float) -> str:
        if os.WIFSIGNALED(status):
            overtime = os.WTERMSIG(status) == signal.SIGXCPU or used >= self.most
            return "timeout" if overtime else "crash"
        code = os.waitstatus_to_exitcode(status)
        return {0: "ended", COMPILE: "compile"}.get(code, "crash")


def end_all(pid: int) -> tuple[int, float]:
    """Kill and reap every other process; return status and CPU seconds of `pid`. RuntimeError
    outside of a namespace."""
    if os.getpid() != 1:
        raise RuntimeError("only process 1 of a namespace may kill all others in it")
    result = (0, 0.0)
    while True:
        try:
            os.kill(-1, signal.SIGKILL)  # again each time, as a process may fork before it dies
        except ProcessLookupError:
            pass  # all others have ended and wait to be reaped
        try:
            ended_pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return result
        if ended_pid == pid:
            result = (status, usage.ru_utime + usage.ru_stime)


def run_case(request: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Run a case in a child process and return its reply."""
    stdin = os.memfd_create("stdin")
    if case["fn_name"] is None:
        with os.fdopen(os.dup(stdin), "wb") as file:
            file.write(case["input"].encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
    output, output_end = os.pipe()
    stderr, stderr_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        be_the_program(request, case, (stdin, output_end, stderr_end))
    for end in (stdin, output_end, stderr_end):
        os.close(end)
    for pipe in (output, stderr):
        os.set_blocking(pipe, False)
    return CaseWatch(pid, output, stderr, request["limits"]).watch()


def main() -> None:
    missing = missing_walls()
    if missing:
        sys.exit(f"it isolates nothing, so no program is run: {'; '.join(missing)}")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores it
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 0)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)

    def say(words: dict[str, Any]) -> None:
        line = json.dumps(words).encode() + b"\n"
        while line:
            line = line[replies.write(line) :]

    say({"ready": True})
    request = json.loads(sys.stdin.buffer.read())
    with open(PROGRAM, "w", encoding="utf-8", errors="replace") as file:
        file.write(request["source"])
    for names in IMPORTS.findall(request["source"]):
        for name in KNOWN.intersection(re.findall(r"\w+", names)):
            import_module(name)
    for number, case in enumerate(request["cases"]):
        say({"case": number, **run_case(request, case)})


if __name__ == "__main__":
    main()
