"""What the orchestrator asks of the rooms it may not import: an engine, a tokenizer, a scorer, a
channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lowroll.types import Batch, Group, Message, Prompt, Request, Score, ScoreError, Turn

Progress = Callable[[int, int], None]  # (done, total)
PhaseProgress = Callable[[str, int, int], None]  # (phase, done, total)


class HasTokens(Protocol):
    """What one sample of a request has drawn so far."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class EngineClient(Protocol):
    """Turns requests into groups, in process or at the other end of a wire."""

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        """One group a request, in any order: they are matched by `request.id`."""
        ...

    def add(self, request: Request) -> int:
        """Send a request; returns its handle."""
        ...

    def step(self) -> list[tuple[int, Group]]:
        """Wait a moment for answers; returns those that came, by handle. The group of an aborted
        request may be among them."""
        ...

    def abort(self, handle: int) -> bool:
        """Give a request up. False if it had ended."""
        ...

    def so_far(self, handle: int) -> Sequence[HasTokens]:
        """What each sample of a request in flight has drawn, as far as that is known here."""
        ...


class WeightsWatch(Protocol):
    """Which weights the engines draw from, where they follow a learner in another process. Its
    waits have a deadline and name what they wait for."""

    def at_least(self, version: int, most: int) -> int:
        """Wait until weights of this version or newer are there, and have the engines take the
        newest up to `most`; returns its version."""
        ...

    def exactly(self, version: int) -> int:
        """The same with this very version, though newer ones are there."""
        ...

    def newer(self, most: int) -> int | None:
        """Newer weights up to this version, without a wait: the engines have taken them when their
        version is returned. None when there are none."""
        ...


class Tokenizer(Protocol):
    """The chat template and the way back to text."""

    def encode_chat(
        self, messages: list[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Ids of the conversation, with the header that opens the assistant's turn; tools: JSON
        schemas of those that the model may call."""
        ...

    def encode_turn(self, messages: list[Message], after: Turn, said: Message) -> list[int]:
        """Ids that the template puts behind a drawn turn for these messages, up to the header that
        opens the assistant's next one. `said`: the turn as a message."""
        ...

    def turn(self, token_ids: list[int], tools: bool = False) -> Message:
        """A drawn turn as a message; tools: with the calls that it makes."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response, special tokens left out."""
        ...


class Scorer(Protocol):
    """Scores responses, or the messages of whole conversations, by the environment named in each
    prompt."""

    def score(
        self,
        items: Sequence[tuple[Prompt, str | list[Message]]],
        on_progress: Progress | None = None,
    ) -> list[Score | ScoreError]:
        """One outcome an item, in the order of the items."""
        ...


class Responder(Protocol):
    """Answers conversations by the environment named in each prompt."""

    def respond(
        self, items: Sequence[tuple[Prompt, list[Message]]]
    ) -> list[list[Message] | None | ScoreError]:
        """What the environment says to each, in the order of the items: new messages, or None where
        the conversation is done."""
        ...


class Judge(Scorer, Responder, Protocol):
    """Both."""


class BatchSender(Protocol):
    """The sending end of a rollout channel."""

    def send(self, batch: Batch) -> None:
        """Hand the batch to the trainer, or raise before a deadline."""
        ...
