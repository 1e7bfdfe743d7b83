"""Interfaces of the components that the orchestrator uses: an engine, a tokenizer, a scorer, a
channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowroll.types import Batch, Group, Message, Prompt, Request, Score, ScoreError, Turn

Progress = Callable[[int, int], None]  # (done, total)
PhaseProgress = Callable[[str, int, int], None]  # (phase, done, total)


class HasTokens(Protocol):
    """The tokens that one sample of a request has drawn so far."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class EngineClient(Protocol):
    """An engine that turns requests into groups, in process or over the network."""

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        """Return one group for each request, in any order: they are matched by `request.id`."""
        ...

    def add(self, request: Request) -> int:
        """Send a request and return its handle."""
        ...

    def step(self) -> list[tuple[int, Group]]:
        """Wait a moment and return the answers that came, by handle; those of aborted requests may be
        among them."""
        ...

    def abort(self, handle: int) -> bool:
        """Abort a request. Returns False if it had ended."""
        ...

    def so_far(self, handle: int) -> Sequence[HasTokens]:
        """Return the known tokens of each sample of a request in flight."""
        ...


class WeightsWatch(Protocol):
    """The weights that the engines draw from, of a learner in another process. Every wait has a
    deadline."""

    def at_least(self, version: int, most: int) -> int:
        """Wait for weights of this version or newer, have the engines load the newest up to `most`,
        and return its version."""
        ...

    def exactly(self, version: int) -> int:
        """Wait for weights of exactly this version, have the engines load them, and return the
        version."""
        ...

    def newer(self, most: int) -> int | None:
        """Have the engines load newer weights, up to version `most`, and return their version; None,
        without a wait, when there are none."""
        ...


class Tokenizer(Protocol):
    """The chat template and the way back to text."""

    def encode_chat(
        self, messages: list[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of the conversation, with the header of the assistant's turn. tools: JSON
        schemas."""
        ...

    def encode_turn(self, messages: list[Message], after: Turn, said: Message) -> list[int]:
        """Return the ids of these messages behind a drawn turn, up to the header of the assistant's
        next one. `said`: the turn as a message."""
        ...

    def turn(self, token_ids: list[int], tools: bool = False) -> Message:
        """Return a drawn turn as a message; tools: with the calls that it makes."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a response without special tokens."""
        ...


class Scorer(Protocol):
    """A scorer of responses or conversations, by the environment named in each prompt."""

    def score(
        self,
        items: Sequence[tuple[Prompt, str | list[Message]]],
        on_progress: Progress | None = None,
    ) -> list[Score | ScoreError]:
        """Return one outcome for each item, in the order of the items."""
        ...


class Responder(Protocol):
    """The environments' side of conversations, by the environment named in each prompt."""

    def respond(
        self, items: Sequence[tuple[Prompt, list[Message]]]
    ) -> list[list[Message] | None | ScoreError]:
        """Return the environment's reply to each item: new messages, or None where it is done."""
        ...


class Judge(Scorer, Responder, Protocol):
    """A scorer that is also a responder."""


class BatchSender(Protocol):
    """The sending end of a rollout channel."""

    def send(self, batch: Batch) -> None:
        """Send the batch to the trainer, or raise before a deadline."""
        ...
