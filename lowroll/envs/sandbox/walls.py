"""What keeps a program in the sandbox on this machine, and what to do where nothing does.

Bubblewrap is taken where it is installed, else the same namespaces are made by `jail`. Root takes
`jail` at once, since it makes the program another user: no limit counts root's own processes. Which
of them works is tried, once for each process, by running a program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lowroll.envs.sandbox import filter

HERE = Path(__file__).parent
INSIDE, JAIL = HERE / "inside.py", HERE / "jail.py"
# the same order of sets in every run; a home that can be written to
ENV = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
PYTHON_FLAGS = ("-S", "-s", "-P", "-B")
USER = "1000"


class SandboxMissing(ValueError):
    """Nothing isolates a program on this machine. The message says how to get it."""


@dataclass(frozen=True)
class Walls:
    """A way to isolate: its name, and the command that starts `inside` in it."""

    name: str
    command: Callable[[int], list[str]]  # by the size of /tmp in MB


def python() -> str:
    """The interpreter itself, behind the links of virtual environments."""
    return os.path.realpath(sys.executable)


def _layout() -> dict[str, Any]:
    """What of this machine a program sees: the interpreter, its library and the shared ones.
    Nothing of anybody's installed packages."""
    library = sysconfig.get_paths()["stdlib"]
    binds = [python(), str(INSIDE)]
    links = []
    for path in (str(Path(sys.base_prefix, "lib")), library, *LIBRARIES, "/etc/ld.so.cache"):
        if os.path.islink(path) and path in LIBRARIES:
            links.append((path, os.readlink(path)))
        elif os.path.exists(path) and not any(Path(path).is_relative_to(bound) for bound in binds):
            binds.append(path)
    packages = {Path(library, name) for name in ("site-packages", "dist-packages")}
    packages |= {Path("/usr/lib/python3/dist-packages"), Path(sysconfig.get_paths()["purelib"])}
    masks = [
        str(path)
        for path in sorted(packages)
        if path.is_dir() and any(path.is_relative_to(bound) for bound in binds)
    ]
    return {"binds": binds, "links": links, "masks": masks}


def _jail(disk_mb: int) -> list[str]:
    plan = {**_layout(), "disk_mb": disk_mb, "inside": str(INSIDE)}
    return [python(), *PYTHON_FLAGS, str(JAIL), json.dumps(plan)]


def _bubblewrap(disk_mb: int) -> list[str]:
    plan = _layout()
    words = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--uid",
        USER,
        "--gid",
        USER,
    ]
    words += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--as-pid-1"]
    words += ["--cap-drop", "ALL"]
    words += ["--perms", "1777", "--size", str(disk_mb << 20), "--tmpfs", "/tmp"]
    for path in plan["binds"]:
        words += ["--ro-bind", path, path]
    for path, target in plan["links"]:
        words += ["--symlink", target, path]
    for path in plan["masks"]:
        words += ["--perms", "0755", "--size", "4096", "--tmpfs", path]
    for name in ("null", "zero", "full", "random", "urandom"):
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--remount-ro", "/", "--chdir", "/tmp", "--"]
    return [*words, python(), *PYTHON_FLAGS, str(INSIDE)]


BUBBLEWRAP, NAMESPACES = Walls("bubblewrap", _bubblewrap), Walls("namespaces", _jail)


@cache
def found() -> Walls:
    """The walls of this machine. SandboxMissing, with what was tried and what helps."""
    if not sys.platform.startswith("linux") or filter.program() is None:
        raise SandboxMissing(
            "no sandbox for programs: it needs Linux on x86_64 or aarch64, and this is "
            f"{sys.platform} on {os.uname().machine}"
        )
    why = []
    for walls in _candidates():
        problem = _try(walls)
        if problem is None:
            return walls
        why.append(problem)
    raise SandboxMissing(
        f"no sandbox for programs, so none is run: {'; '.join(why)}. What helps: {_advice()}"
    )


def _candidates() -> list[Walls]:
    if os.geteuid() == 0 or shutil.which("bwrap") is None:
        return [NAMESPACES]
    return [BUBBLEWRAP, NAMESPACES]


def _try(walls: Walls) -> str | None:
    """Why it does not work here; None when it does."""
    from lowroll.envs.sandbox.cases import Case, Limits
    from lowroll.envs.sandbox.run import SandboxError, run_in

    limits = Limits(total_seconds=30.0, wall_seconds=30.0)
    try:
        verdict = run_in(walls, "print(input())", [Case("walls", "walls")], limits)
    except SandboxError as error:
        return str(error)
    return (
        None if verdict.all_passed else f"{walls.name}: a program ended with {verdict.results[0]}"
    )


def _advice() -> str:
    """The line that gives this machine what it lacks."""
    if _reads("/proc/sys/kernel/unprivileged_userns_clone") == "0":
        return "sudo sysctl kernel.unprivileged_userns_clone=1"
    if _reads("/proc/sys/user/max_user_namespaces") == "0":
        return "sudo sysctl user.max_user_namespaces=10000"
    if _reads("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "sudo apt install bubblewrap (with its AppArmor profile), or sudo sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return (
            "start the container with --security-opt seccomp=unconfined --security-opt "
            "apparmor=unconfined (and as root with --cap-add SYS_ADMIN)"
        )
    return "sudo apt install bubblewrap, and a kernel from 5.12 on with user namespaces"


def _reads(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
