"""An engine's end of the direct route; `weights.sync.server` lists its messages."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowroll.parallel.store import tcp_store
from lowroll.weights.sync.base import Broadcast, LinkFailed, Replaced
from lowroll.weights.sync.buckets import JOIN_S, BucketGroup, BucketLayout, copy_by_ipc, unpack

TRIES = 2  # before it requests files
CONNECT_S = 10.0
MOST_LINE = 8 << 20  # bytes of a trainer's line, which may hold handles


class WeightClient:
    """A client that fetches versions from a trainer to `device`, one at a time. file: has the
    trainer's address. token: `base.transfer_token`."""

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
        self._socket: socket.socket | None = None
        self._group: tuple[int, BucketGroup] | None = None
        self._lock = threading.Lock()

    def fetch(self, broadcast: Broadcast, layout: BucketLayout) -> dict[str, Tensor]:
        """Fetch the tensors of a version, unverified. Replaced when after TRIES the trainer has
        written files instead. Raises LinkFailed."""
        with self._lock:
            for _ in range(TRIES):
                try:
                    return unpack(layout, self._fetch(broadcast, layout))
                except (LinkFailed, OSError, RuntimeError):
                    self.close()
            try:
                self._ask({"write": [broadcast.version, broadcast.digest]})
            except LinkFailed:
                self.close()
                raise
            raise Replaced(f"{broadcast.path}: version {broadcast.version} comes as files")

    def close(self) -> None:
        """Leave the group and disconnect. Idempotent."""
        if self._group is not None:
            self._group[1].abort()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._group = None

    def _fetch(self, broadcast: Broadcast, layout: BucketLayout) -> list[Tensor]:
        answer = self._ask({"want": [broadcast.version, broadcast.digest]})
        if "handles" in answer:
            uuid = str(answer.get("device"))
            buckets = copy_by_ipc(answer["handles"], uuid, layout.sizes, self.device)
        else:
            buckets = self._receive(answer, layout)
        self._send({"have": broadcast.version})
        return buckets

    def _receive(self, answer: dict[str, Any], layout: BucketLayout) -> list[Tensor]:
        try:
            number, rank, size, port = (
                int(answer[name]) for name in ("group", "rank", "size", "store")
            )
        except (KeyError, TypeError, ValueError):
            raise LinkFailed(f"{self.host}:{self.port}: not an answer of a trainer's") from None
        if self._group is None or self._group[0] != number:
            assert self._socket is not None
            own_host = self._socket.getsockname()[0]
            store = self._connect_to_store(port)
            group = BucketGroup(store, number, rank, size, self.device, own_host, self.timeout_s)
            self._group = number, group
        _, group = self._group
        buckets = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in layout.sizes]
        for bucket in buckets:
            group.broadcast(bucket)
        return buckets

    def _connect_to_store(self, port: int) -> Any:
        """Connect to the group's store, in a thread that may be left behind: torch ignores its
        timeout when a store accepts and says nothing."""
        deadline_s = min(JOIN_S, self.timeout_s)
        connected: Future[Any] = Future()

        def connect() -> None:
            try:
                connected.set_result(tcp_store(self.host, port, None, deadline_s))
            except (RuntimeError, OSError, ValueError) as error:
                connected.set_exception(error)

        threading.Thread(target=connect, name="weight-store", daemon=True).start()
        try:
            return connected.result(deadline_s)
        except TimeoutError:
            raise LinkFailed(
                f"{self.host}:{port}: the store of the trainer's group does not answer within "
                f"{deadline_s:g} s"
            ) from None

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._socket is None:
                self._socket = self._connect()
            self._send({"token": self.token, **message})
            with self._socket.makefile("rb") as lines:  # the trainer sends nothing after an answer
                line = lines.readline(MOST_LINE)
            if not line:
                raise ValueError("it has closed the connection")
            answer: dict[str, Any] = dict(json.loads(line))
            if "error" in answer:
                raise ValueError(answer["error"])
            return answer
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise LinkFailed(f"the trainer at {self.host}:{self.port}: {error}") from None

    def _connect(self) -> socket.socket:
        if self.file is not None:
            stated = json.loads(self.file.read_bytes())
            self.host, self.port = str(stated["host"]), int(stated["port"])
        connection = socket.create_connection((self.host, self.port), CONNECT_S)
        connection.settimeout(self.timeout_s)
        return connection

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None
        self._socket.sendall(json.dumps(message).encode() + b"\n")
