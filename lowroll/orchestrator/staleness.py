"""Staleness: rollouts that are too old for the learner are aborted in flight, or dropped by
`orchestrator.loop` when they return.

`max_off_policy_steps` bounds a group's age in two ways (Surogate's rule and prime-rl's): in flight
by the weight updates since it was sent, returned by its oldest token's version.
"""

from __future__ import annotations

from lowroll.orchestrator.errors import InvalidRollout
from lowroll.orchestrator.groups import ScoredGroup
from lowroll.orchestrator.pending_batch import STALE, PendingBatch
from lowroll.orchestrator.rollout_buffer import OpenGroup, RolloutBuffer
from lowroll.orchestrator.settings import Settings


def drop_stale_in_flight(buffer: RolloutBuffer, pending: PendingBatch, version: int) -> None:
    """Record the engines' new version. Abort and drop the groups in flight that are too old for it,
    none if engines replay them."""
    buffer.drop(pending, stale_in_flight(buffer, version), STALE)


def stale_in_flight(buffer: RolloutBuffer, version: int) -> list[OpenGroup]:
    """Record the engines' new version; return the groups in flight that are too old for it."""
    in_flight, settings = buffer.record_version(version), buffer.settings
    if settings.partial == "replay":
        return []
    return [one for one in in_flight if one.num_updates > settings.max_off_policy_steps]


def reason_if_stale(group: ScoredGroup, version: int | None, settings: Settings) -> str | None:
    """Return the reason to drop a returned group with a token that is too old for the learner's
    version, or None. InvalidRollout for a token of a newer version."""
    if version is None:
        return None
    oldest, newest = group.versions
    if newest > version:
        raise InvalidRollout(
            f"request {group.id!r}: drawn under policy version {newest} while the "
            f"learner is at {version}"
        )
    return STALE if version - oldest > settings.max_off_policy_steps else None


def require_fresh(group: ScoredGroup, version: int) -> None:
    """Raise InvalidRollout for a token of another version than the learner's."""
    for drawn_version in group.versions:
        if drawn_version != version:
            raise InvalidRollout(
                f"request {group.id!r}: drawn under policy version {drawn_version} while the "
                f"learner is at {version}, and at most 0 behind it are allowed"
            )
