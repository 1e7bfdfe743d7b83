"""A seccomp filter of the system calls denied in the sandbox, with EPERM.

It is a deny list: programs need most other calls, and namespaces contain them. Denied are access to
other processes, namespaces and mounts, kernel modules, keys, clocks, BPF and io_uring, memory that
no process limit counts (memfd, System V), sockets other than local ones (a virtual machine's
`vsock` ignores network namespaces), and limits of other processes.
"""

from __future__ import annotations

import platform
import struct

ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_SET, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # in struct seccomp_data
X32 = 0x40000000  # numbers of x86-64's other calling convention
NEW_NAMESPACES = 0x7E020080  # CLONE_NEW*
AF_UNIX = 1

# the same number on both: io_uring, mounts by descriptor, pidfd_getfd, memfd_secret
BOTH = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 447)
X86_64 = {
    # ptrace process_vm_readv process_vm_writev kcmp personality syslog
    "denied": (101, 310, 311, 312, 135, 103)
    # mount umount2 pivot_root chroot unshare setns sethostname setdomainname
    + (165, 166, 155, 161, 272, 308, 170, 171)
    # swapon swapoff reboot init_module delete_module finit_module kexec_load kexec_file_load
    + (167, 168, 169, 175, 176, 313, 246, 320)
    # acct settimeofday clock_settime quotactl iopl ioperm modify_ldt lookup_dcookie
    + (163, 164, 227, 179, 172, 173, 154, 212)
    # add_key request_key keyctl bpf perf_event_open userfaultfd fanotify_init vmsplice
    + (248, 249, 250, 321, 298, 323, 300, 278)
    # name_to_handle_at open_by_handle_at memfd_create migrate_pages move_pages
    + (303, 304, 319, 256, 279)
    # shmget shmat shmctl semget semop semctl shmdt msgget msgsnd msgrcv msgctl mq_open
    + (29, 30, 31, 64, 65, 66, 67, 68, 69, 70, 71, 240),
    "clone": (56,),
    "clone3": (435,),
    "socket": (41,),
    "prlimit": (302,),
}
AARCH64 = {
    "denied": (117, 270, 271, 272, 92, 116)
    + (40, 39, 41, 51, 97, 268, 161, 162)
    + (224, 225, 142, 105, 106, 273, 104, 294)
    + (89, 170, 112, 60, 18)
    + (217, 218, 219, 280, 241, 282, 262, 75)
    + (264, 265, 279, 238, 239)
    + (194, 196, 195, 190, 193, 191, 197, 186, 189, 188, 187, 180, 192),
    "clone": (220,),
    "clone3": (435,),
    "socket": (198,),
    "prlimit": (261,),
}
MACHINES = {"x86_64": (0xC000003E, X86_64), "aarch64": (0xC00000B7, AARCH64)}


def program() -> bytes | None:
    """Return the filter, an array of `struct sock_filter`; None for an unknown architecture. It
    refuses other calling conventions, whose numbers mean other calls."""
    if platform.machine() not in MACHINES:
        return None
    architecture, calls = MACHINES[platform.machine()]
    lines = [
        _line(LOAD, ARCHITECTURE),
        _line(JUMP_EQUAL, architecture, yes=1, no=0),
        _line(RETURN, KILL),
        _line(LOAD, NUMBER),
        _line(JUMP_AT_LEAST, X32, yes=0, no=1),
        _line(RETURN, KILL),
    ]
    for number in (*BOTH, *calls["denied"]):
        lines += [_line(JUMP_EQUAL, number, yes=0, no=1), _line(RETURN, ERROR | EPERM)]
    # makes the C library fall back to clone, whose flags a filter can read
    lines += [_line(JUMP_EQUAL, calls["clone3"][0], yes=0, no=1), _line(RETURN, ERROR | ENOSYS)]
    lines += _argument_test(calls["clone"][0], 0, JUMP_SET, NEW_NAMESPACES, allowed=False)
    lines += _argument_test(calls["socket"][0], 0, JUMP_EQUAL, AF_UNIX, allowed=True)
    lines += _argument_test(calls["prlimit"][0], 0, JUMP_EQUAL, 0, allowed=True)
    return b"".join([*lines, _line(RETURN, ALLOW)])


def _line(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _argument_test(number: int, argument: int, test: int, value: int, allowed: bool) -> list[bytes]:
    outcomes = [ALLOW, ERROR | EPERM] if allowed else [ERROR | EPERM, ALLOW]
    return [
        _line(JUMP_EQUAL, number, 0, 4),
        _line(LOAD, ARGUMENTS + 8 * argument),
        _line(test, value, 0, 1),
        *(_line(RETURN, outcome) for outcome in outcomes),
    ]
