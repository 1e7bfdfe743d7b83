"""Authentication and encryption of the rollout socket with ZeroMQ's CURVE (docs/security.md): RFC
26 (CurveZMQ) and RFC 27 (ZAP) of rfc.zeromq.org."""

from __future__ import annotations

import hmac
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

HANDSHAKE_MS = 5_000  # for unauthenticated connections
_DOMAIN = "rollouts"


def keypair(token: str, owner: str) -> tuple[bytes, bytes]:
    """Return the public and the secret key of "orchestrator" or "trainer", in Z85."""
    secret = z85.encode(hmac.digest(token.encode(), f"lowroll rollouts {owner}".encode(), "sha256"))
    return zmq.curve_public(secret), secret


def set_client_keys(socket: zmq.Socket[bytes], token: str) -> None:
    """Let a trainer's socket accept only an orchestrator of the same token."""
    socket.curve_publickey, socket.curve_secretkey = keypair(token, "trainer")
    socket.curve_serverkey, _ = keypair(token, "orchestrator")


def set_server_keys(socket: zmq.Socket[bytes], token: str) -> None:
    """Let an orchestrator's socket accept only clients that its context's authenticator admits."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keypair(token, "orchestrator")
    socket.zap_domain = _DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.handshake_ivl = HANDSHAKE_MS


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], token: str) -> ThreadAuthenticator:
    """Start the thread that admits clients with the trainer's key alone."""
    trainer_key, _ = keypair(token, "trainer")
    check = SimpleNamespace(callback=lambda domain, key: key == trainer_key)
    authenticator = ThreadAuthenticator(context)
    authenticator.configure_curve_callback(_DOMAIN, check)
    authenticator.start()
    return authenticator
