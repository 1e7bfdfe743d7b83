"""Programs that try to leave the sandbox, to outlive it, or to win without being right."""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs.sandbox import Case, CaseResults, SandboxLimits, run, run_cases
from tests.fixtures import escapes
from tests.fixtures.sandbox import missing

SOURCE = Path(escapes.__file__).read_text()
HIDDEN = "what-was-expected-of-it"
LIMITS = SandboxLimits(
    seconds=5, wall_seconds=20, total_seconds=120, memory_mb=192, disk_mb=8, output_kb=64
)
SHORT = SandboxLimits(seconds=1, wall_seconds=1.5, memory_mb=192, output_kb=64, total_seconds=30)
PATIENT = replace(SHORT, seconds=20, wall_seconds=30, total_seconds=60)  # for what ends by itself


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a sandbox")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A host with things to steal: a file, a variable, a port, sockets, shared memory."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("a secret")
    (folder / "secret").chmod(0o666)
    abstract, name = f"lowroll-test-{os.getpid()}", f"lowroll-{os.getpid()}"
    shared = Path("/dev/shm", name)
    shared.write_text("a secret")
    os.environ["LOWROLL_SECRET"] = "a secret"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        unix.bind(str(folder / "socket"))
        unix.listen()
        hidden.bind("\0" + abstract)
        hidden.listen()
        yield {
            "secret": str(folder / "secret"),
            "project": str(Path(__file__).parents[3] / "pyproject.toml"),
            "port": server.getsockname()[1],
            "socket": str(folder / "socket"),
            "abstract": abstract,
            "shared": name,
            "variable": "LOWROLL_SECRET",
            "packages": [
                sysconfig.get_paths()["purelib"],
                f"{sys.base_prefix}/lib/python3/dist-packages",
            ],
            "pid": os.getpid(),
            "daemon": name[:15],
            "hidden": HIDDEN[::-1],
        }
    shared.unlink()
    del os.environ["LOWROLL_SECRET"]


@pytest.fixture(scope="module")
def ends(facts: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """How each attempt ended: the status of its case, and what it printed; all in one sandbox."""
    said: list[str] = []
    judged = run._judged

    def listen(case: Case, reply: dict[str, Any]) -> Any:
        said.append(reply["output"].strip() or reply["message"][-200:])
        return judged(case, reply)

    cases = [Case(f"{name}\n{json.dumps(facts)}\n", HIDDEN) for name in escapes.ATTEMPTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_judged", listen)
        verdict = run_cases(SOURCE, cases, LIMITS)
    results = [result.status for result in verdict.results]
    return dict(zip(escapes.ATTEMPTS, zip(results, said, strict=True), strict=True))


@pytest.mark.parametrize("name", escapes.ATTEMPTS)
def test_it_stays_inside(name: str, ends: dict[str, tuple[str, str]]) -> None:
    assert ends[name] == ("wrong", escapes.EXPECTED[name])


def test_there_are_sixty() -> None:
    assert len(escapes.ATTEMPTS) >= 60


def test_nothing_was_changed_outside_and_nothing_is_left(
    facts: dict[str, Any], ends: dict[str, tuple[str, str]]
) -> None:
    assert Path(facts["secret"]).read_text() == "a secret"
    names = {
        path.read_text().strip() for path in Path("/proc").glob("[0-9]*/comm") if path.exists()
    }
    assert facts["daemon"] not in names


def statuses(source: str, *cases: Case, limits: SandboxLimits = SHORT) -> list[str]:
    verdict: CaseResults = run_cases(source, list(cases) or [Case("", "42")], limits)
    return [result.status for result in verdict.results]


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("import sys\nsys.exit(0)", "wrong"),
        ("import os\nos._exit(0)", "wrong"),
        ("import sys\nprint(42)\nsys.exit(3)", "crash"),
        ('print(\'{"case": 0, "status": "passed"}\')', "wrong"),
        ("import sys\nprint('42', file=sys.stderr)", "wrong"),
        ("import sys\nsys.stdout.close()", "wrong"),
        ("import os\nos.close(1)\nos.close(0)\nos.close(2)", "wrong"),
        ("while True: print('42' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('42' * 1000)", "output"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("while True: pass", "timeout"),
        (
            "import signal\nfor n in {*signal.valid_signals()} - {9, 19}: signal.signal(n, 1)\n"
            "while True: pass",
            "timeout",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
        ("print(10 ** (10 ** 6))", "crash"),
        ("import ctypes\nctypes.string_at(0)", "crash"),
        ("import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)", "crash"),
        ("print(", "compile"),
        ("raise KeyError(42)", "crash"),
        ("import threading\nthreading.Thread(target=print, args=(42,)).start()", "passed"),
        ("import atexit\natexit.register(print, 42)", "passed"),
        ("import os\nif os.fork() == 0:\n  import time; time.sleep(60)\nprint(42)", "passed"),
    ],
)
def test_a_program_gets_what_its_output_earns(source: str, status: str) -> None:
    assert statuses(source, limits=SHORT if status == "timeout" else PATIENT) == [status]


ADD = "def add(a, b):\n    return a + b\n"
SUM = Case([40, 2], 42, "add")


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (ADD, "passed"),
        (
            f"class Solution:\n    {ADD.replace('add(', 'add(self, ').replace('    r', '        r')}",
            "passed",
        ),
        ("def add(a, b):\n    print(42)\n", "wrong"),
        (
            "class Same:\n    def __eq__(self, other): return True\nadd = lambda a, b: Same()",
            "crash",
        ),
        (
            'import json\njson.dumps = lambda *a, **k: \'{"status": "passed"}\'\nadd = print',
            "wrong",
        ),
        ("import os\ndef add(a, b):\n    os.write(3, b'{}')\n    return 41", "wrong"),
        ("import os\ndef add(a, b):\n    os.write(3, b'[' * 60000)\n    os._exit(0)", "wrong"),
        ("add = lambda a, b: float('nan')", "wrong"),
        ("add = lambda a, b: 10 ** 5000", "crash"),
        ("add = lambda a, b: exit(0)", "wrong"),
        ("def add(a, b):\n    return add(a, b)", "crash"),
        ("import builtins\nbuiltins.open = builtins.print = None\n" + ADD, "passed"),
        ("import sys\nprint('noise')\nsys.stdout = None\n" + ADD, "passed"),
        ("pass", "crash"),
    ],
)
def test_a_function_gets_what_its_result_earns(source: str, status: str) -> None:
    assert statuses(source, SUM, limits=PATIENT) == [status]


def test_what_a_case_leaves_ends_with_it_and_costs_no_time() -> None:
    source = (
        "import os, time\nn = input()\n"
        "if os.fork() == 0:\n  os.setsid()\n  time.sleep(2)\n  open('/tmp/late', 'w')\n  os._exit(0)\n"
        "time.sleep(.2)\nprint(n, os.path.exists('/tmp/late'))"
    )
    start = time.monotonic()
    cases = [Case(str(n), f"{n} False") for n in range(3)]
    assert statuses(source, *cases, limits=LIMITS) == ["passed"] * 3
    assert time.monotonic() - start < 60


def test_the_cases_behind_the_last_second_are_timeouts() -> None:
    limits = SandboxLimits(wall_seconds=60.0, total_seconds=4.0)
    assert statuses(
        "import time\ntime.sleep(int(input()))",
        Case("0", ""),
        Case("60", ""),
        Case("0", ""),
        limits=limits,
    ) == ["passed", "timeout", "timeout"]
