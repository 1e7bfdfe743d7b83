"""The versions that a pool's engines were sent, and the digests that all acknowledged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from lowroll.engine.remote.http_client import ServerError
from lowroll.engine.remote.server_base import HeldPolicy
from lowroll.types import Group
from lowroll.weights.sync.base import Broadcast

MOST = 256  # remembered versions; a request in flight spans fewer


class Superseded(Exception):
    """A version that engines cannot take any more because of the named newer one."""


class PolicyVersions:
    """The versions of the policy in a pool, on the pool's loop alone.

    newest: what every engine takes before it works; None before the first broadcast. settled: no
    version is being agreed on.
    """

    def __init__(self) -> None:
        self.newest: Broadcast | None = None
        self.held: HeldPolicy | None = None  # newest agreement
        self.settled = asyncio.Event()
        self.settled.set()
        self.broadcasting = False
        self._agreed: dict[int, frozenset[str]] = {}

    def begin(self, broadcast: Broadcast) -> bool:
        """Begin a broadcast, which ends the agreement on versions that are not older. Return
        whether there was one, so that what is in flight must be drawn again."""
        is_replacement = self.held is not None and broadcast.version <= self.held.version
        self._agreed = {
            version: digests
            for version, digests in self._agreed.items()
            if version < broadcast.version
        }
        self.newest = broadcast
        self.settled.clear()
        return is_replacement

    def settle(self, held: HeldPolicy) -> None:
        self.held = held
        self._agreed[held.version] = held.digests
        while len(self._agreed) > MOST:
            del self._agreed[min(self._agreed)]
        self.settled.set()

    def problem(self, group: Group, sent: int) -> str | None:
        """Return what is wrong with the versions that drew a group: one goes back, or was not
        agreed on. sent: acknowledged by its engine."""
        for i, rollout in enumerate(group.rollouts):
            last_version = sent
            for span in rollout.behavior.policy:
                if span.version < last_version:
                    return f"sample {i} was drawn from version {span.version} after {last_version}"
                last_version = span.version
                if span.version not in self._agreed:
                    return f"sample {i} was drawn from version {span.version}, told to no engine"
                if span.digest not in self._agreed[span.version]:
                    return f"sample {i}: version {span.version} is not the one that all agreed on"
        return None


def agreed(acknowledged: Mapping[str, HeldPolicy]) -> HeldPolicy:
    """Return the policy that most engines (by address) acknowledge. ServerError for a tie."""
    (most_held, most), *others = Counter(acknowledged.values()).most_common()
    if others and others[0][1] == most:
        statements = "; ".join(
            f"{url} version {policy.version} with digest {', '.join(sorted(policy.digests))}"
            for url, policy in acknowledged.items()
        )
        raise ServerError(f"engines took one broadcast and hold different weights: {statements}")
    return most_held
