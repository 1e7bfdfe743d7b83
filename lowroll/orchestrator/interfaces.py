"""Interfaces of the components that the orchestrator uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowroll.types import Batch, Group, Message, Prompt, Request, Score, ScoreError, Turn

Progress = Callable[[int, int], None]  # (done, total)
PhaseProgress = Callable[[str, int, int], None]  # (phase, done, total)


class HasTokens(Protocol):
    """The tokens drawn so far for one sample."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class EngineClient(Protocol):
    """An engine that turns requests into groups."""

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        """Return one group per request, in any order, matched by `request.id`."""
        ...

    def add(self, request: Request) -> int:
        """Send a request; return its handle."""
        ...

    def step(self) -> list[tuple[int, Group]]:
        """Wait a moment; return finished groups by handle, perhaps also aborted ones."""
        ...

    def abort(self, handle: int) -> bool:
        """Abort a request. Return False if it had ended."""
        ...

    def so_far(self, handle: int) -> Sequence[HasTokens]:
        """Return each sample of a request in flight."""
        ...


class WeightsWatch(Protocol):
    """The weights of a learner in another process. Every wait has a deadline."""

    def at_least(self, version: int, most: int) -> int:
        """Wait for weights of this version or newer, load the newest up to `most`, and return its
        version."""
        ...

    def exactly(self, version: int) -> int:
        """Wait for weights of exactly this version and load them."""
        ...

    def newer(self, most: int) -> int | None:
        """Load newer weights up to `most` and return their version, if there are any."""
        ...


class Tokenizer(Protocol):
    """The chat template and decoding."""

    def encode_chat(
        self, messages: list[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of the conversation, with the assistant's header. tools: JSON schemas."""
        ...

    def encode_turn(self, messages: list[Message], after: Turn, said: Message) -> list[int]:
        """Return the ids of `messages` after a drawn turn (`said` as a message), up to the
        assistant's next header."""
        ...

    def turn(self, token_ids: list[int], tools: bool = False) -> Message:
        """Return a drawn turn as a message; tools: parse its calls."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return a response's text without special tokens."""
        ...


class Scorer(Protocol):
    """A scorer of responses or conversations."""

    def score(
        self,
        items: Sequence[tuple[Prompt, str | list[Message]]],
        on_progress: Progress | None = None,
    ) -> list[Score | ScoreError]:
        """Return one outcome per item, in order."""
        ...


class Responder(Protocol):
    """The environments' side of conversations."""

    def respond(
        self, items: Sequence[tuple[Prompt, list[Message]]]
    ) -> list[list[Message] | None | ScoreError]:
        """Return the reply to each item: new messages, or None at the end."""
        ...


class Judge(Scorer, Responder, Protocol):
    """A scorer that is also a responder."""


class BatchSender(Protocol):
    """The sending end of a rollout channel."""

    def send(self, batch: Batch) -> None:
        """Send the batch, or raise after a deadline."""
        ...
