"""An engine's end of a direct way (`weights.device_link`). Where the trainer is comes from the
server's own options, never from a request."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowroll.parallel.store import tcp_store
from lowroll.transport.broadcasts import Broadcast, Replaced
from lowroll.weights.device_link import Group, Lines, LinkFailed, opened
from lowroll.weights.parcel import Layout, unpack

TRIES = 2  # then the trainer is asked for files
CONNECT_S = 10.0


class Collector:
    """Fetches versions from the trainer at host:port, to `device`. One at a time. file: in which
    the trainer says where it is; looked at whenever it is to be reached anew. token: that the
    trainer asks for (`device_link.secret`)."""

    def __init__(
        self,
        host: str,
        port: int,
        device: torch.device,
        timeout_s: float = 1200.0,
        file: Path | None = None,
        token: str = "",
    ) -> None:
        self.host = host
        self.port = port
        self.file = file
        self.token = token
        self.device = device
        self.timeout_s = timeout_s
        self._lines: Lines | None = None
        self._group: tuple[int, Group] | None = None
        self._lock = threading.Lock()

    def fetch(self, broadcast: Broadcast, layout: Layout) -> dict[str, Tensor]:
        """Fetch the tensors of a version, by name; they are not checked yet. Replaced when the
        trainer has written files instead, after two tries; LinkFailed when it cannot be asked."""
        with self._lock:
            for _ in range(TRIES):
                try:
                    return unpack(layout, self._fetch(broadcast, layout))
                except (LinkFailed, RuntimeError):
                    self.close()
            try:
                self._ask({"write": [broadcast.version, broadcast.digest]})
            except LinkFailed:
                self.close()
                raise
            raise Replaced(f"{broadcast.path}: version {broadcast.version} comes as files")

    def close(self) -> None:
        """Leave the group and the trainer. Idempotent."""
        if self._group is not None:
            self._group[1].end()
        if self._lines is not None:
            self._lines.close()
        self._lines = self._group = None

    def _fetch(self, broadcast: Broadcast, layout: Layout) -> list[Tensor]:
        answer = self._ask({"want": [broadcast.version, broadcast.digest]})
        assert self._lines is not None
        if "handles" in answer:
            if self.device.type != "cuda":
                raise LinkFailed("cuda_ipc: this engine is on a CPU")
            buckets = opened(
                answer["handles"], str(answer.get("device")), layout.sizes, self.device
            )
        else:
            buckets = self._receive(answer, layout)
        self._lines.send({"have": broadcast.version}, self.timeout_s)
        return buckets

    def _receive(self, answer: dict[str, Any], layout: Layout) -> list[Tensor]:
        try:
            number, rank, size, port = (
                int(answer[name]) for name in ("group", "rank", "size", "store")
            )
        except (KeyError, TypeError, ValueError):
            raise LinkFailed(f"{self.host}:{self.port}: no word of a trainer's") from None
        if self._group is None or self._group[0] != number:
            assert self._lines is not None
            mine = self._lines.socket.getsockname()[0]
            store = tcp_store(self.host, port, None, self.timeout_s)
            group = Group(store, number, rank, size, self.device, mine, self.timeout_s)
            self._group = number, group
        buckets = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in layout.sizes]
        for bucket in buckets:
            self._group[1].broadcast(bucket)
        return buckets

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._lines is None:
            try:
                if self.file is not None:
                    said = json.loads(self.file.read_bytes())
                    self.host, self.port = str(said["host"]), int(said["port"])
                place = (self.host, self.port)
                self._lines = Lines(socket.create_connection(place, CONNECT_S))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise LinkFailed(f"the trainer at {self.host}:{self.port}: {error}") from None
        self._lines.send({"token": self.token, **message}, CONNECT_S)
        answer = self._lines.receive(self.timeout_s)
        if "error" in answer:
            raise LinkFailed(f"the trainer at {self.host}:{self.port}: {answer['error']}")
        return answer
