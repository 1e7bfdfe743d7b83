"""Kernel namespaces, and their first process.

    python jail.py '{"binds", "links", "masks", "namespaces", "disk_mb", "inside"}'

A child enters new user, mount, pid, network, ipc, uts and cgroup namespaces; this process stays
outside and writes their user maps. Started by root, the program is user 65534 outside, as limits do
not hold for root. The child's child, process 1 there, makes a root of read-only bound folders and a
/tmp, drops every capability, and becomes `inside`, which refuses the machine's own `namespaces`.
Each process dies with its parent. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# mount, user, pid, network, ipc, uts, cgroup
NAMESPACES = 0x20000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000 | 0x2000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_CAPBSET_DROP = 1, 24
CAPABILITIES_VERSION = 0x20080522
OUTSIDE, INSIDE = 65534, 1000  # user ids of the program outside and inside
DEVICES = ("null", "zero", "full", "random", "urandom")
ROOT_KB = 256
libc = ctypes.CDLL(None, use_errno=True)


def must(answer: int, what: str) -> None:
    """Raise OSError with the call's name when a system call failed."""
    if answer < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2); OSError when it fails."""
    return_code = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    must(return_code, f"mount on {target}")


def die_with_parent() -> None:
    must(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def check_namespaces(outside: dict[str, str]) -> None:
    """Raise OSError when this process shares one of these namespaces (links in /proc/self/ns)."""
    for name, link in outside.items():
        if os.readlink(f"/proc/self/ns/{name}") == link:
            raise OSError(f"the {name} namespace is the machine's own")


# -- the root ------------------------------------------------------------------------------------


def make_root(plan: dict[str, Any]) -> None:
    """Enter a root with the plan's binds, links and devices, and a writable /tmp."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={ROOT_KB}k,mode=755")
    os.mkdir("/tmp/old")
    os.chdir("/tmp")
    must(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"old"), "pivot_root")
    os.chdir("/")
    os.mkdir("/tmp")
    size = f"size={plan['disk_mb']}m,nr_inodes=4096,mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    for path in plan["binds"]:
        bind(path)
        protect(path)
    for path, target in plan["links"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in plan["masks"]:
        mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    for name in DEVICES:
        bind(f"/dev/{name}")
    must(libc.umount2(b"/old", MNT_DETACH), "umount of the old root")
    os.rmdir("/old")
    mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def bind(path: str) -> None:
    source = Path("/old" + path)
    if source.is_dir():
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    mount(str(source), path, flags=MS_BIND | MS_REC)


def protect(path: str) -> None:
    """Make a mount tree read-only, without setuid or devices."""
    attributes = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    return_code = libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, ctypes.byref(attributes), 32
    )
    must(return_code, f"read-only {path}")


# -- the users -----------------------------------------------------------------------------------


def write_users(pid: int, user: int, group: int) -> None:
    folder = Path(f"/proc/{pid}")
    if user == 0:
        folder.joinpath("uid_map").write_text(f"0 0 1\n{INSIDE} {OUTSIDE} 1\n")
        folder.joinpath("gid_map").write_text(f"0 0 1\n{INSIDE} {OUTSIDE} 1\n")
        return
    folder.joinpath("setgroups").write_text("deny")
    folder.joinpath("uid_map").write_text(f"{INSIDE} {user} 1\n")
    folder.joinpath("gid_map").write_text(f"{INSIDE} {group} 1\n")


def give_up_power(was_root: bool) -> None:
    """Switch to the program's user and drop all capabilities for good."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break
    if was_root:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)
    must(libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


# -- the processes -------------------------------------------------------------------------------


def main() -> int:
    """Start the child in new namespaces, write its user maps, and return its exit status.

    Only a process outside may write the maps: the child sends a byte when it has entered its user
    namespace, and waits for one.
    """
    plan = json.loads(sys.argv[1])
    user, group = os.geteuid(), os.getegid()
    die_with_parent()
    with suppress(OSError):  # some machines mount /proc read-only
        Path("/proc/self/oom_score_adj").write_text("1000")  # killed first when memory runs out
    own_socket, child_socket = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        own_socket.close()
        _leave(child_socket, plan, was_root=user == 0)
    child_socket.close()
    own_socket.settimeout(10.0)
    if own_socket.recv(1):
        write_users(pid, user, group)
        own_socket.send(b"!")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _leave(outside: socket.socket, plan: dict[str, Any], was_root: bool) -> None:
    """Enter new namespaces, start process 1 in them, and exit with its status."""
    die_with_parent()
    must(libc.unshare(NAMESPACES), "unshare")
    outside.send(b"!")
    outside.settimeout(10.0)
    if not outside.recv(1):
        os._exit(1)
    outside.close()
    pid = os.fork()  # only a child is in the new pid namespace
    if pid:
        for stream in (0, 1, 2):
            os.close(stream)
        os._exit(min(255, abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))))
    check_namespaces(plan["namespaces"])
    socket.sethostname("sandbox")
    make_root(plan)
    give_up_power(was_root)
    die_with_parent()  # the change of user cleared the setting
    os.chdir("/tmp")
    os.umask(0o077)
    runpy.run_path(plan["inside"], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
