"""What a client is told when a request is not answered, in the shape of OpenAI's API."""

from __future__ import annotations

from typing import Any


class Refused(ValueError):
    """A request that is not done, and why, for the client's eyes.

    param: the field that is wrong, as a path into the body ("stop[1]", "messages[0].content").
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return error_body(str(self), self.status, self.param, self.code)


def error_body(
    message: str, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """{"error": {...}} for a status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
