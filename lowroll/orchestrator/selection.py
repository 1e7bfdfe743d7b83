"""The groups of one step: those for its batch, and those that were dropped, with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.settings import Settings

REASONS = ("no_signal", "too_easy", "too_hard", "stale", "oversampled")
USELESS = ("no_signal", "too_easy", "too_hard")  # what a step may still fall back to


@dataclass(frozen=True)
class Drop:
    """A group that goes into no batch. `group` is None where it never came back."""

    id: str
    reason: str  # of REASONS
    group: ScoredGroup | None = None


@dataclass
class GroupSelection:
    """The groups of one step, in planned order."""

    kept: list[ScoredGroup] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    rounds: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"time/generate": 0.0, "time/score": 0.0}
    )
    stats: dict[str, float] = field(default_factory=dict)  # of a step that takes groups as they end

    @property
    def lost(self) -> list[ScoredGroup]:
        """The dropped groups that had come back."""
        return [drop.group for drop in self.dropped if drop.group is not None]

    @property
    def useless(self) -> list[ScoredGroup]:
        """The groups that came back and were dropped for their rewards."""
        return [
            drop.group for drop in self.dropped if drop.group is not None and drop.reason in USELESS
        ]

    @property
    def groups(self) -> list[ScoredGroup]:
        """All groups that came back, kept or dropped."""
        return self.kept + self.lost

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Ids of the dropped groups, by reason."""
        found: dict[str, list[str]] = {}
        for drop in self.dropped:
            found.setdefault(drop.reason, []).append(drop.id)
        return found

    def take(self, group: ScoredGroup, settings: Settings) -> bool:
        """Keep a group, or drop it for its rewards. Returns whether it was kept."""
        reason = useless(group, settings)
        if reason is None:
            self.kept.append(group)
        else:
            self.dropped.append(Drop(group.id, reason, group))
        return reason is None

    def fall_back(self, count: int) -> None:
        """Keep the first `count` groups that were dropped for their rewards after all."""
        self.kept = self.useless[:count]
        taken = {id(group) for group in self.kept}
        self.dropped = [drop for drop in self.dropped if id(drop.group) not in taken]

    def counts(self) -> Counter[str]:
        """Count the dropped groups by reason."""
        return Counter(drop.reason for drop in self.dropped)


def useless(group: ScoredGroup, settings: Settings) -> str | None:
    """Return why nothing can be learnt from a group's rewards; None if something can."""
    scores = group.scores()
    if settings.online_difficulty_filtering and scores:
        reason = {0.0: "too_hard", 1.0: "too_easy"}.get(fmean(scores))
        if reason is not None:
            return reason
    return "no_signal" if settings.dynamic_sampling and not group.has_signal() else None
