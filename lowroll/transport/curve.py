"""Authentication and encryption of the socket that rollouts travel through: ZeroMQ's CURVE.

Both ends know the run's token, and derive the keys of both from it. The handshake proves them, so a
peer without the token is cut off before a message of it is read or kept. Source: RFC 26 (CurveZMQ)
and RFC 27 (ZAP) of rfc.zeromq.org.
"""

from __future__ import annotations

import hmac

import zmq
from zmq.utils import z85

HANDSHAKE_MS = 5_000  # a connection that has not proved its key by then is closed
_DOMAIN = b"rollouts"
_HANDLER = "inproc://zeromq.zap.01"  # where libzmq asks whether a client's key is admitted


def keypair(token: str, owner: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key, in Z85, of "orchestrator" or "trainer" (`owner`)."""
    secret = z85.encode(hmac.digest(token.encode(), f"lowroll rollouts {owner}".encode(), "sha256"))
    return zmq.curve_public(secret), secret


def set_client_keys(socket: zmq.Socket[bytes], token: str) -> None:
    """Have a trainer's socket speak only to an orchestrator of the same token."""
    socket.curve_publickey, socket.curve_secretkey = keypair(token, "trainer")
    socket.curve_serverkey, _ = keypair(token, "orchestrator")


class Admission:
    """The gate of a listening socket of `context`, which accepts only clients with the trainer's
    key. `socket` is readable when a client waits for the decision, which `decide` makes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: str) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_HANDLER)
        self._orchestrator = keypair(token, "orchestrator")
        self._trainer = z85.decode(keypair(token, "trainer")[0])

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Have `socket` accept only clients that this has admitted."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._orchestrator
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.handshake_ivl = HANDSHAKE_MS

    def decide(self) -> None:
        """Answer those who wait."""
        while self.socket.poll(0):
            version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
            admitted = mechanism == b"CURVE" and credentials == [self._trainer]
            status = b"200" if admitted else b"400"
            self.socket.send_multipart([version, request, status, b"", b"", b""])
