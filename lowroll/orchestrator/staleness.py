"""The rule of staleness.

`max_off_policy_steps` bounds a group's age in two ways (Surogate's rule and prime-rl's): in flight
by the weight updates since it was sent, returned by its oldest token's version.
"""

from __future__ import annotations

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.settings import Settings

STALE = "stale"


def is_stale(group: ScoredGroup, version: int, settings: Settings) -> bool:
    """Return whether a returned group has a token that is too old for the learner's version.
    InvalidRollout for a token of a newer version."""
    oldest, newest = group.versions
    if newest > version:
        raise InvalidRollout(
            f"request {group.id!r}: drawn under policy version {newest} while the "
            f"learner is at {version}"
        )
    return version - oldest > settings.max_off_policy_steps


def require_fresh(group: ScoredGroup, version: int) -> None:
    """Raise InvalidRollout for a token of another version than the learner's."""
    for drawn_version in group.versions:
        if drawn_version != version:
            raise InvalidRollout(
                f"request {group.id!r}: drawn under policy version {drawn_version} while the "
                f"learner is at {version}, and at most 0 behind it are allowed"
            )
