"""The isolation of programs on this machine, which is verified once a process.

`inside` refuses programs unless isolated, and a test program reports what it sees. No isolation
program from PATH is trusted.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lowroll.envs.sandbox import filter
from lowroll.envs.sandbox.cases import Case, CaseResults, SandboxLimits
from lowroll.envs.sandbox.run import Isolation, SandboxError, run_in

HERE = Path(__file__).parent
INSIDE, JAIL = HERE / "inside.py", HERE / "jail.py"
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
PYTHON_FLAGS = ("-S", "-s", "-P", "-B")
NAMES = (
    "user",
    "mnt",
    "pid",
    "net",
    "ipc",
    "uts",
    "cgroup",
)
DEFAULT = SandboxLimits()
USER = 1000  # of the program, inside the sandbox


class SandboxMissing(ValueError):
    """A machine on which no isolation works. The message has the fix."""


def python() -> str:
    """Return the interpreter's path behind virtual environments' links."""
    return os.path.realpath(sys.executable)


def _layout() -> dict[str, Any]:
    """Return what a program sees.

    `binds`: paths of the machine. `links`: (path, target) of library folders that are links.
    `masks`: folders inside the binds, which become empty.
    """
    library = sysconfig.get_paths()["stdlib"]
    binds = [python(), str(INSIDE)]
    links = []
    for path in (str(Path(sys.base_prefix, "lib")), library, *LIBRARIES, "/etc/ld.so.cache"):
        if os.path.islink(path) and path in LIBRARIES:
            links.append((path, os.readlink(path)))
        elif os.path.exists(path) and not _is_in_one_of(binds, path):
            binds.append(path)
    packages = {Path(library, name) for name in ("site-packages", "dist-packages")}
    packages |= {Path("/usr/lib/python3/dist-packages"), Path(sysconfig.get_paths()["purelib"])}
    masks = [str(path) for path in sorted(packages) if path.is_dir() and _is_in_one_of(binds, path)]
    return {"binds": binds, "links": links, "masks": masks}


def _is_in_one_of(folders: Sequence[str], path: str | Path) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _jail_command(disk_mb: int) -> list[str]:
    namespaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMES}
    plan = {**_layout(), "namespaces": namespaces, "disk_mb": disk_mb, "inside": str(INSIDE)}
    return [python(), *PYTHON_FLAGS, str(JAIL), json.dumps(plan)]


NAMESPACES = Isolation("namespaces", _jail_command)


@cache
def found() -> Isolation:
    """Return the working isolation. SandboxMissing has the attempts and fixes."""
    if not sys.platform.startswith("linux") or filter.program() is None:
        raise SandboxMissing(
            "no sandbox for programs: it needs Linux on x86_64 or aarch64, and this is "
            f"{sys.platform} on {os.uname().machine}"
        )
    fault = _try(NAMESPACES)
    if fault is not None:
        raise SandboxMissing(
            f"no sandbox for programs, so none is run: {fault}. What helps: {_advice()}"
        )
    return NAMESPACES


def run_cases(
    source: str,
    cases: Sequence[Case],
    limits: SandboxLimits = DEFAULT,
    stop_at_failure: bool = False,
) -> CaseResults:
    """Run a program like `run_in`, with the working isolation."""
    return run_in(found(), source, cases, limits, stop_at_failure)


# prints a file of the machine, its parent, user and other processes
PROOF = """
import os
print(os.path.exists(input()), os.getppid(), os.getuid(), os.path.exists("/proc"))
"""


def _try(walls: Isolation) -> str | None:
    limits = SandboxLimits(total_seconds=30.0, wall_seconds=30.0)
    with tempfile.NamedTemporaryFile(prefix="lowroll-") as host_file:
        case = Case(host_file.name, f"False 1 {USER} False")
        try:
            verdict = run_in(walls, PROOF, [case], limits)
        except SandboxError as error:
            return str(error)
    if verdict.all_passed:
        return None
    return f"{walls.name}: a program in it was not isolated, or ended with {verdict.results[0]}"


def _advice() -> str:
    if _reads("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "sudo sysctl kernel.unprivileged_userns_clone=1"
    if _reads("/proc/sys/user/max_user_namespaces") == "0":
        return "sudo sysctl user.max_user_namespaces=10000"
    if _reads("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root in a container"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "start the container with --security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined (and as root with --cap-add SYS_ADMIN)"
        )
    return "a kernel from 5.12 on with user namespaces"


def _reads(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
