"""Invariants of a run's ledger, checked from its file.

1. A group is consumed once in the whole run, across restarts.
2. planned = consumed + dropped + open; a group is dispatched again only while open.
3. A batch has no token that is older than the run allows, or newer than its learner.
4. After a rollback to batch N no group of a later batch is used without having been drawn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowroll.orchestrator.ledger_file import Event, read

# event: (allowed states of a group before it, state after it)
MOVES: dict[str, tuple[tuple[str | None, ...], str]] = {
    "planned": ((None,), "planned"),
    "dispatched": (("planned", "dispatched", "done"), "dispatched"),
    "done": (("dispatched",), "done"),
    "batched": (("done",), "batched"),
    "dropped": (("planned", "dispatched", "done"), "dropped"),
}
OPEN = ("planned", "dispatched", "done")


def check(
    ledger: Path | Sequence[Event], learned: Mapping[int, Sequence[str]] | None = None
) -> list[str]:
    """Return one line for each violation. ValueError for a damaged file."""
    events = read(ledger)[0] if isinstance(ledger, Path) else ledger
    audit = Audit(events)
    if learned is not None:
        audit.compare(learned)
    return audit.found


class Audit:
    """The states of all groups after some events."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.found: list[str] = []
        self.states: dict[str, str] = {}
        self.batches: dict[int, list[str]] = {}
        self.consumed = 0  # the last step that a checkpoint covers
        # steps of batches, and groups with their state before a move (None: not planned)
        self._undo: list[int | tuple[str, str | None]] = []
        for number, event in enumerate(events, 1):
            self._take(number, event)

    @property
    def counts(self) -> Counter[str]:
        """Groups by state: `open`, `batched`, `dropped`."""
        return Counter("open" if state in OPEN else state for state in self.states.values())

    def _take(self, number: int, event: Event) -> None:
        kind = event["event"]
        if kind == "begun":
            self._begin(event)
        elif kind == "rolled_back":
            self._roll_back(number, event["step"])
        elif kind == "consumed":
            self._consume(number, event["step"])
        else:
            self._move(number, kind, event["ids"])
        if kind == "batched":
            self._batch(number, event)

    def compare(self, learned: Mapping[int, Sequence[str]]) -> None:
        """Compare the batches with what the learner learned from."""
        for step, ids in sorted(learned.items()):
            if step not in self.batches:
                self.found.append(f"step {step}: learnt from, and no batch of it stands")
            elif sorted(ids) != sorted(self.batches[step]):
                self.found.append(f"step {step}: learnt from other groups than its batch has")
        for step in sorted(set(self.batches) - set(learned)):
            if step <= self.consumed:
                self.found.append(f"step {step}: consumed, and the learner does not know it")
        learned_counts = Counter(request_id for ids in learned.values() for request_id in ids)
        self.found += [
            f"{request_id}: learnt from {n} times"
            for request_id, n in learned_counts.items()
            if n > 1
        ]

    def _begin(self, event: Event) -> None:
        self.states = dict.fromkeys(event["open"], "planned")
        self.batches = {}
        self.consumed = event["step"]
        self._undo = [event["step"]]

    def _move(self, number: int, kind: str, ids: Sequence[str]) -> None:
        allowed_states, new_state = MOVES[kind]
        for request_id in ids:
            state = self.states.get(request_id)
            if state not in allowed_states:
                self.found.append(
                    f"line {number}: {request_id}: {kind}, and it is {state or 'not planned'}"
                )
            self._undo.append((request_id, state))
            self.states[request_id] = new_state

    def _batch(self, number: int, event: Event) -> None:
        step, learner = event["step"], event["learner"]
        last_step = max(self.batches, default=None)
        if last_step is not None and step != last_step + 1:
            self.found.append(f"line {number}: batch {step} comes after batch {last_step}")
        self.batches[step] = list(event["ids"])
        self._undo.append(step)
        if learner is None:
            return
        for request_id, (oldest, newest) in zip(event["ids"], event["oldest"], strict=True):
            if learner - oldest > event["most"]:
                self.found.append(
                    f"line {number}: {request_id}: drawn from version {oldest} for a learner of version "
                    f"{learner}, which is more than {event['most']} behind"
                )
            if newest > learner:
                self.found.append(
                    f"line {number}: {request_id}: drawn from version {newest}, and its learner is "
                    f"at {learner}"
                )

    def _consume(self, number: int, step: int) -> None:
        if step not in self.batches and step != self.consumed:
            self.found.append(f"line {number}: batch {step} is consumed, and none of it stands")
        self.consumed = max(self.consumed, step)

    def _roll_back(self, number: int, step: int) -> None:
        if step not in self._undo:
            self.found.append(f"line {number}: rolled back to batch {step}, which does not stand")
            return
        while (entry := self._undo[-1]) != step:
            self._undo.pop()
            if isinstance(entry, int):
                self.batches.pop(entry, None)
                continue
            request_id, previous_state = entry
            if previous_state is None:
                self.states.pop(request_id, None)
            else:
                self.states[request_id] = previous_state
        self.consumed = min(self.consumed, step)
