"""The batch of a step before it is sent, which `orchestrator.loop` fills."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from lowroll.orchestrator.errors import ErrorWindow
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.ledger import Ledger
from lowroll.orchestrator.settings import Settings
from lowroll.types import Rollout, Sample

STALE = "stale"  # the reason with which `staleness` drops a group
REASONS = ("no_signal", "too_easy", "too_hard", STALE, "oversampled")
NO_SIGNAL = ("no_signal", "too_easy", "too_hard")  # reasons that a step may fall back on


@dataclass(frozen=True)
class DroppedGroup:
    """A group that goes into no batch. `group` is None if it never returned."""

    id: str
    reason: str  # one of REASONS
    group: ScoredGroup | None = None


@dataclass
class PendingBatch:
    """A batch in the making, on copies of the ledger and the error window."""

    step: int
    version: int | None  # the learner's; None: versions are not checked
    temperature: float
    ledger: Ledger
    errors: ErrorWindow
    kept: list[ScoredGroup] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    rounds: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"time/generate": 0.0, "time/score": 0.0}
    )
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def lost(self) -> list[ScoredGroup]:
        return [drop.group for drop in self.dropped if drop.group is not None]

    @property
    def without_signal(self) -> list[ScoredGroup]:
        """Returned groups dropped for their rewards."""
        return [
            drop.group
            for drop in self.dropped
            if drop.group is not None and drop.reason in NO_SIGNAL
        ]

    @property
    def groups(self) -> list[ScoredGroup]:
        return self.kept + self.lost

    def take(self, groups: Iterable[ScoredGroup], settings: Settings) -> None:
        """Keep each group, or drop it for its rewards."""
        for group in groups:
            reason = reason_without_signal(group, settings)
            if reason is None:
                self.kept.append(group)
            else:
                self.dropped.append(DroppedGroup(group.id, reason, group))

    def fall_back(self, count: int) -> None:
        """Keep the first `count` groups that were dropped for their rewards."""
        self.kept = self.without_signal[:count]
        kept_ids = {id(group) for group in self.kept}
        self.dropped = [drop for drop in self.dropped if id(drop.group) not in kept_ids]

    def samples(self) -> list[Sample]:
        """Number the kept groups and return their samples."""
        for index, group in enumerate(self.kept):
            own_temperature = None if group.temperature == self.temperature else group.temperature
            for sample in group.samples:
                sample.group, sample.temperature = index, own_temperature
        return [sample for group in self.kept for sample in group.samples]

    def rollouts(self) -> list[Rollout]:
        return [sample.rollout for group in self.kept for sample in group.samples]


def reason_without_signal(group: ScoredGroup, settings: Settings) -> str | None:
    """Return why a group's rewards give nothing to learn, or None."""
    scores = group.scores()
    if settings.online_difficulty_filtering and scores:
        mean = fmean(scores)
        if mean == 0.0:
            return "too_hard"
        if mean == 1.0:
            return "too_easy"
    if settings.dynamic_sampling and not group.has_signal():
        return "no_signal"
    return None
