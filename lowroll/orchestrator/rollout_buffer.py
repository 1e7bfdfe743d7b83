"""The open groups of a run: in flight, or returned and waiting for a batch (docs/asynchrony.md).

`Settings.num_open` groups are kept open. A batch takes returned groups in planned order as soon as
there are enough; a dropped group is replaced. At level k with an oversampling_factor of 1, batch n
has only tokens of versions >= n - 1 - k.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.groups import ScoredGroup, check_group
from lowroll.orchestrator.interfaces import EngineClient
from lowroll.orchestrator.ledger import GroupPlan, Ledger
from lowroll.orchestrator.ledger_file import Journal
from lowroll.orchestrator.pending_batch import DroppedGroup, PendingBatch
from lowroll.orchestrator.prompt_source import PromptDraw, PromptSource
from lowroll.orchestrator.settings import Settings
from lowroll.types import Group, RunFailed


class RolloutsStalled(RunFailed):
    """A long time in which no group in flight ended."""


@dataclass
class OpenGroup:
    """A planned group in flight, or returned and waiting for a batch."""

    planned: GroupPlan
    draw: PromptDraw
    handle: int | None = None
    num_updates: int = 0
    scored: ScoredGroup | None = None

    @property
    def id(self) -> str:
        return self.draw.request.id


class RolloutBuffer:
    """The open groups of a run and their requests. Not thread-safe."""

    def __init__(
        self, source: PromptSource, engine: EngineClient, journal: Journal | None = None
    ) -> None:
        self.source = source
        self.engine = engine
        self.journal = journal
        self.version: int | None = None
        self._known: dict[GroupPlan, OpenGroup] = {}
        self._flights: dict[int, OpenGroup] = {}
        self._aborted: set[int] = set()  # handles whose groups may still return
        self._last_answer_at = time.monotonic()

    @property
    def settings(self) -> Settings:
        return self.source.settings

    def note(self, event: str, **fields: Any) -> None:
        """Write an event into the ledger's file, if any."""
        if self.journal is not None:
            self.journal.write(event, **fields)

    # -- the groups --------------------------------------------------------------------------------

    def opened(self, ledger: Ledger) -> list[OpenGroup]:
        """Return a ledger's open groups in planned order, and abort all others."""
        still_open = set(ledger.open)
        for planned in [known_plan for known_plan in self._known if known_plan not in still_open]:
            self.abort(self._known.pop(planned))
        for planned in ledger.open:
            if planned not in self._known:
                self._known[planned] = OpenGroup(planned, self.source.again(planned))
        return [self._known[planned] for planned in ledger.open]

    def ready(self, ledger: Ledger) -> list[OpenGroup]:
        """Return the open groups that are returned and scored, in planned order."""
        return [open_group for open_group in self.opened(ledger) if open_group.scored is not None]

    def plan(self, ledger: Ledger, count: int, step: int, temperature: float) -> list[OpenGroup]:
        """Draw `count` groups and open them in the ledger, for `send`."""
        new_groups = []
        for draw in self.source.draw(ledger, count, temperature):
            planned = GroupPlan(draw.prompt.env, draw.position, step, temperature)
            ledger.open.append(planned)
            self._known[planned] = OpenGroup(planned, draw)
            new_groups.append(self._known[planned])
        if new_groups:
            self.note("planned", step=step, ids=[new_group.id for new_group in new_groups])
        return new_groups

    def close(self, ledger: Ledger, groups: Sequence[OpenGroup]) -> None:
        """Remove groups from the ledger, and abort their requests."""
        closed = {open_group.planned for open_group in groups}
        for open_group in groups:
            self.abort(open_group)
        ledger.open = [planned for planned in ledger.open if planned not in closed]

    def drop(self, pending: PendingBatch, groups: Sequence[OpenGroup], reason: str) -> None:
        """Close groups that go into no batch, and record why."""
        pending.dropped += [DroppedGroup(one.id, reason, one.scored) for one in groups]
        self.close(pending.ledger, groups)

    # -- requests ----------------------------------------------------------------------------------

    def send(self, ledger: Ledger) -> None:
        """Send the open groups that are neither in flight nor returned."""
        sent_ids = []
        for open_group in self.opened(ledger):
            if open_group.handle is None and open_group.scored is None:
                open_group.handle = self.engine.add(open_group.draw.request)
                open_group.num_updates = 0
                self._flights[open_group.handle] = open_group
                sent_ids.append(open_group.id)
        if not sent_ids:
            return
        if len(sent_ids) == len(self._flights):
            self._last_answer_at = time.monotonic()  # nothing was in flight before
        self.note("dispatched", version=self.version, ids=sent_ids)

    def collect(self, ledger: Ledger) -> list[tuple[OpenGroup, Group]]:
        """Wait a moment; return checked groups in planned order. InvalidRollout for an answer
        without a request, RolloutsStalled after `stall_s` without an answer."""
        returned = []
        for handle, group in self.engine.step():
            if handle in self._aborted:
                self._aborted.discard(handle)
                continue
            open_group = self._flights.pop(handle, None)
            if open_group is None or group.request.id != open_group.id:
                raise InvalidRollout(
                    f"request {group.request.id!r}: never asked, or answered twice"
                )
            open_group.handle = None
            check_group(open_group.draw, group)
            returned.append((open_group, group))
        if not returned:
            self._check_stall()
            return []
        self._last_answer_at = time.monotonic()
        self.note("done", ids=[open_group.id for open_group, _ in returned])
        planned_index = {planned: index for index, planned in enumerate(ledger.open)}
        return sorted(returned, key=lambda answer: planned_index[answer[0].planned])

    def _check_stall(self) -> None:
        if self._flights and time.monotonic() - self._last_answer_at > self.settings.stall_s:
            example_id = next(iter(self._flights.values())).id
            raise RolloutsStalled(
                f"waited {self.settings.stall_s:g} s for one of {len(self._flights)} requests at "
                f"the engines to end, {example_id!r} among them"
            )

    def record_version(self, version: int) -> list[OpenGroup]:
        """Record the engines' new version; return the groups in flight during an update."""
        is_update = self.version is not None and self.version != version
        self.version = version
        in_flight = list(self._flights.values()) if is_update else []
        for open_group in in_flight:
            open_group.num_updates += 1
        return in_flight

    def abort(self, one: OpenGroup) -> None:
        """Abort a group's request and discard later answers."""
        handle, one.handle = one.handle, None
        if handle is None:
            return
        self._flights.pop(handle, None)
        self._aborted.add(handle)
        self.engine.abort(handle)

    def recall(self, for_good: bool = False) -> int:
        """Abort everything in flight; return the number of groups, which stay open for `send`.
        `for_good`: this engine's successor restarts its handles."""
        in_flight = list(self._flights.values())
        for open_group in in_flight:
            self.abort(open_group)
        if for_good:
            self._aborted.clear()
        return len(in_flight)

    def retract(self, version: int) -> int:
        """Draw again what is in flight or newer than `version`, to which the learner went back.
        Return the number of groups."""
        count = self.recall()
        for open_group in self._known.values():
            if open_group.scored is None:
                continue
            _, newest_version = open_group.scored.versions
            if newest_version > version:
                open_group.scored = None
                count += 1
        self.version = None
        return count

    def rewind(self, ledger: Ledger, back: set[GroupPlan]) -> None:
        """Restore the ledger's groups after a failed step; all but those in `back` are
        drawn again."""
        self.recall()
        for open_group in self.opened(ledger):
            if open_group.planned not in back:
                open_group.scored = None

    # -- numbers -----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def stats(self, step: int, chosen: Iterable[OpenGroup]) -> dict[str, float]:
        """Return the number of groups in flight, and of a batch's groups (`chosen`) from earlier
        steps, each with the mean length in tokens."""
        stats = {"rollout/in_flight_groups": float(self.in_flight)}
        lengths_so_far = [
            len(sample.token_ids)
            for handle in self._flights
            for sample in self.engine.so_far(handle)
        ]
        if lengths_so_far:
            stats["rollout/open_length_mean"] = fmean(lengths_so_far)
        carried_groups = [
            open_group.scored
            for open_group in chosen
            if open_group.planned.step < step and open_group.scored
        ]
        stats["rollout/carried_groups"] = float(len(carried_groups))
        if carried_groups:
            stats["rollout/carried_length_mean"] = fmean(
                sample.rollout.num_drawn for group in carried_groups for sample in group.samples
            )
        return stats
