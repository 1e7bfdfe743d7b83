"""What the orchestrator asks of the rooms it may not import: an engine, a tokenizer, a scorer, a
channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lowroll.types import Batch, Group, Prompt, Request, Score, ScoreError

Progress = Callable[[int, int], None]  # (done, total)
PhaseProgress = Callable[[str, int, int], None]  # (phase, done, total)


class EngineClient(Protocol):
    """Turns requests into groups, in process or at the other end of a wire."""

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        """One group a request, in any order: they are matched by `request.id`."""
        ...


class Tokenizer(Protocol):
    """The chat template and the way back to text."""

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of the conversation, with the header that opens the assistant's turn."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response, special tokens left out."""
        ...


class Scorer(Protocol):
    """Scores responses by the environment named in each prompt."""

    def score(
        self, items: list[tuple[Prompt, str]], on_progress: Progress | None = None
    ) -> list[Score | ScoreError]:
        """One outcome an item, in the order of the items."""
        ...


class BatchSender(Protocol):
    """The sending end of a rollout channel."""

    def send(self, batch: Batch) -> None:
        """Hand the batch to the trainer, or raise before a deadline."""
        ...
