"""Discovery of engines by a DNS name, which is resolved periodically. A failed query changes
nothing."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowroll.types import printable

log = logging.getLogger(__name__)

Resolver = Callable[[str, int], Sequence[str]]  # (host, port) -> addresses
ANSWER_S = 10.0  # deadline of one query
JOIN_S = 1.0


@dataclass(frozen=True)
class Elastic:
    hostname: str
    port: int = 8000
    sync_interval: float = 5.0  # seconds between two queries


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name. OSError for none, or without a resolver."""
    address_infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(socket_address[0]) for *_, socket_address in address_infos})


class Discovery:
    """A thread that passes changed base URLs to `found`. Each query has its own thread, because the
    system's resolver may hang."""

    def __init__(
        self, elastic: Elastic, found: Callable[[list[str]], None], resolver: Resolver
    ) -> None:
        self.elastic = elastic
        self.last_error = "it was not asked yet"
        self._found = found
        self._resolver = resolver
        self._asking: threading.Thread | None = None
        self._told: list[str] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join(timeout=JOIN_S)

    def _run(self) -> None:
        while not self._end.is_set():
            self._ask()
            self._end.wait(self.elastic.sync_interval)

    def _ask(self) -> None:
        if self._asking is not None and self._asking.is_alive():
            return
        name = self.elastic.hostname
        try:
            urls = self._query()
        except (OSError, ValueError) as error:  # UnicodeError: an invalid label
            why = f"{name}: {printable(getattr(error, 'strerror', None) or error)}"
            if why != self.last_error:
                log.warning("discovery of engines: %s", why)
            self.last_error = why
            return
        self.last_error = ""
        if urls != self._told:
            log.info("%s leads to %s", name, ", ".join(urls))
            self._told = urls
            self._found(urls)

    def _query(self) -> list[str]:
        answers: list[Sequence[str] | Exception] = []

        def ask() -> None:
            try:
                answers.append(self._resolver(self.elastic.hostname, self.elastic.port))
            except (OSError, ValueError) as error:
                answers.append(error)

        self._asking = threading.Thread(target=ask, name="resolver", daemon=True)
        self._asking.start()
        self._asking.join(timeout=ANSWER_S)
        if not answers:
            raise ValueError(f"no answer of the resolver within {ANSWER_S:g} s")
        addresses = answers[0]
        if isinstance(addresses, Exception):
            raise addresses
        if not addresses:
            raise ValueError("it leads to no address")
        return sorted({self._url(address) for address in addresses})

    def _url(self, address: str) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{self.elastic.port}"
