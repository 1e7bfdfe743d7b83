"""Authentication and encryption of the socket that rollouts travel through: ZeroMQ's CURVE.

Both ends know the run's token, and derive the keys of both from it. The handshake proves them, so a
peer without the token is cut off before a message of it is read or kept. Source: RFC 26 (CurveZMQ)
and RFC 27 (ZAP) of rfc.zeromq.org.
"""

from __future__ import annotations

import hmac

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

HANDSHAKE_MS = 5_000  # a connection that has not proved its key by then is closed
_DOMAIN = "rollouts"


def keypair(token: str, owner: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key, in Z85, of "orchestrator" or "trainer" (`owner`)."""
    secret = z85.encode(hmac.digest(token.encode(), f"lowroll rollouts {owner}".encode(), "sha256"))
    return zmq.curve_public(secret), secret


def set_client_keys(socket: zmq.Socket[bytes], token: str) -> None:
    """Have a trainer's socket speak only to an orchestrator of the same token."""
    socket.curve_publickey, socket.curve_secretkey = keypair(token, "trainer")
    socket.curve_serverkey, _ = keypair(token, "orchestrator")


def set_server_keys(socket: zmq.Socket[bytes], token: str) -> None:
    """Have an orchestrator's socket accept only clients that the authenticator of its context
    admits, and nobody where there is none."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keypair(token, "orchestrator")
    socket.zap_domain = _DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.handshake_ivl = HANDSHAKE_MS


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], token: str) -> ThreadAuthenticator:
    """Start the thread that admits clients with the trainer's key, and no others."""
    authenticator = ThreadAuthenticator(context)
    authenticator.configure_curve_callback(_DOMAIN, TrainerKey(token))
    authenticator.start()
    return authenticator


class TrainerKey:
    """The public key of the trainer, as the authenticator asks for it."""

    def __init__(self, token: str) -> None:
        self.public, _ = keypair(token, "trainer")

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with the public key `key`, in Z85, may enter."""
        return key == self.public
