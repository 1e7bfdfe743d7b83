"""The protocol between the two ends of a direct way: lines of JSON on a socket, and how buckets are
sent.

    engine -> trainer    {"token": secret, "want": [version, manifest digest]}
    trainer -> engine    {"group": number, "rank", "size", "store": port}  and the buckets follow, or
                         {"device": uuid, "handles": [...]}                of the buckets' memory, or
                         {"error": why}
    engine -> trainer    {"have": version}  and the trainer may forget it
    engine -> trainer    {"token": secret, "write": [version, manifest digest]}    it came to nothing: as files, please
    trainer -> engine    {"written": version}

The engine checks what arrives against the digest in the version's folder, so a byte is never taken
on the word of a socket. What travels is not encrypted, nor is it by NCCL: a trusted network.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowroll.transport.base import TransportError

MOST_LINE = 8 << 20
JOIN_S = 30.0  # until all members of a group have found each other


def secret(admin: str) -> str:
    """Return the secret that both ends send, made from the token that allows a client to give an
    engine weights: the lines are not encrypted, and a reader of them must not be able to command an
    engine."""
    return hashlib.sha256(f"weights {admin}".encode()).hexdigest()[:32]


class LinkFailed(TransportError):
    """Weights did not come over a direct way; the message says why."""


class Lines:
    """A socket that speaks in lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._left = b""

    def send(self, message: dict[str, Any], deadline_s: float) -> None:
        """Send a message as a line. LinkFailed when the other side is gone or does not read."""
        try:
            self.socket.settimeout(deadline_s)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LinkFailed(f"the other side of {self.name}: {error}") from None

    def receive(self, deadline_s: float) -> dict[str, Any]:
        """Return the next line. LinkFailed at the end, after the deadline, and for what is no
        object."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self._left:
            try:
                self.socket.settimeout(max(1e-3, end - time.monotonic()))
                arrived = self.socket.recv(1 << 16)
            except TimeoutError:
                raise LinkFailed(f"{self.name}: silent for {deadline_s:g} s") from None
            except OSError as error:
                raise LinkFailed(f"{self.name}: {error}") from None
            if not arrived:
                raise LinkFailed(f"{self.name} has closed the connection")
            self._keep(arrived, MOST_LINE)
        line, _, self._left = self._left.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise LinkFailed(f"{self.name}: not a line of ours")
        return message

    def take_in(self, most: int) -> None:
        """Keep what has arrived by now, without waiting. LinkFailed at the end, and for more than
        `most` bytes that are no line."""
        try:
            self.socket.setblocking(False)
            arrived = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkFailed(f"{self.name}: {error}") from None
        if not arrived:
            raise LinkFailed(f"{self.name} has closed the connection")
        self._keep(arrived, most)

    def _keep(self, arrived: bytes, most: int) -> None:
        self._left += arrived
        if len(self._left) > most and b"\n" not in self._left[:most]:
            raise LinkFailed(f"{self.name}: a line of more than {most} bytes")

    @property
    def has_line(self) -> bool:
        """Return whether a line is there for `receive` already."""
        return b"\n" in self._left

    @property
    def is_gone(self) -> bool:
        """Return whether the other side has closed the connection."""
        try:
            self.socket.setblocking(False)
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def name(self) -> str:
        with suppress(OSError, ValueError):
            host, port, *_ = self.socket.getpeername()
            return f"{host}:{port}"
        return "a peer that has gone"

    def close(self) -> None:
        self.socket.close()


class Group:
    """Processes that a trainer (rank 0) sends buckets to: NCCL between GPUs, gloo on CPUs."""

    def __init__(
        self, store: Any, number: int, rank: int, size: int, device: torch.device, host: str,
        deadline_s: float,
    ) -> None:  # fmt: skip
        own = dist.PrefixStore(f"group-{number}", store)
        joining = timedelta(seconds=min(JOIN_S, deadline_s))
        own.set_timeout(joining)
        self._span = timedelta(seconds=deadline_s)
        torch_groups: Any = dist  # its types know neither option
        options: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = torch_groups.ProcessGroupNCCL.Options()
            options._timeout = self._span
            self._group = torch_groups.ProcessGroupNCCL(own, rank, size, options)
        else:
            gloo = torch_groups.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=host)]
            options._timeout = joining
            self._group = gloo(own, rank, size, options)

    def broadcast(self, bucket: Tensor) -> None:
        """Broadcast from rank 0 to all, in place. RuntimeError when it does not end in time."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._span
        self._group.broadcast([bucket], options).wait(self._span)
        if bucket.device.type == "cuda":
            torch.cuda.current_stream(bucket.device).synchronize()

    def end(self) -> None:
        """Abort the group, also with a peer that hangs."""
        with suppress(RuntimeError, AttributeError):
            self._group.abort()


def handles(buckets: Sequence[Tensor]) -> list[list[Any]]:
    """Return the handles of buckets on a GPU, for one other process of this host: numbers, and
    bytes as base64."""
    shared = [bucket.untyped_storage()._share_cuda_()[1:] for bucket in buckets]
    return [
        [base64.b64encode(p).decode() if isinstance(p, bytes) else p for p in one] for one in shared
    ]


def opened(stated: Any, uuid: str, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return copies, on `device`, of the buckets whose handles are given. LinkFailed when they
    cannot be opened here."""
    index = next((i for i in range(torch.cuda.device_count()) if device_uuid(i) == uuid), None)
    if index is None:
        raise LinkFailed(f"cuda_ipc: this engine does not see the learner's GPU {uuid}")
    copies = []
    try:
        for one, size in zip(stated, sizes, strict=True):
            handle, nbytes, offset, counter, counter_offset, event, sync = one
            storage = torch.UntypedStorage._new_shared_cuda(
                index,
                base64.b64decode(handle, validate=True),
                int(nbytes),
                int(offset),
                base64.b64decode(counter, validate=True),
                int(counter_offset),
                base64.b64decode(event, validate=True),
                bool(sync),
            )
            there = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
            there.set_(storage, 0, (size,), (1,))
            copies.append(there.to(device, copy=True))
        # not for the whole device, on which the engine's thread may capture a graph
        torch.cuda.current_stream(device).synchronize()
    except (TypeError, ValueError, RuntimeError, binascii.Error) as error:
        raise LinkFailed(f"cuda_ipc: {error}") from None
    return copies


def device_uuid(index: int | None) -> str:
    """Return the UUID of a GPU, which does not depend on its number in this process."""
    return str(torch.cuda.get_device_properties(index or 0).uuid)
