"""The TCP key-value store for the rendezvous of processes."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def tcp_store(host: str, port: int, listening: socket.socket | None, deadline_s: float) -> Any:
    """Return the store on a listening socket, which it takes over (torch's own would listen at all
    addresses); without a socket, a client of the store at host:port. deadline_s: of each request.
    """
    timeout = timedelta(seconds=deadline_s)
    if listening is None:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
