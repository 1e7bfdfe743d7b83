"""Broadcast of a weight version to all replicas in parallel. A replica that is much slower than the
others finishes in the background, and receives no new requests until it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lowroll.engine.remote.http_client import ServerError, happens_within
from lowroll.engine.remote.replica import PoolOptions, Replica
from lowroll.engine.remote.server_base import HeldPolicy
from lowroll.engine.remote.versions import PolicyVersions, Superseded, agreed
from lowroll.weights.sync.base import Broadcast

log = logging.getLogger(__name__)

ABREAST_S = 1.0  # least grace of the others after the first engine
LOOK_S = 0.25  # between checks for a newer version
GONE = 409  # status of an engine that does not find the version


class WeightBroadcaster:
    """A broadcaster, on the pool's loop alone. dispatch: called when an engine can draw again.
    told: returns what is wrong with each engine."""

    def __init__(
        self,
        replicas: list[Replica],
        versions: PolicyVersions,
        options: PoolOptions,
        dispatch: Callable[[], None],
        told: Callable[[], str],
    ) -> None:
        self.replicas = replicas
        self.versions = versions
        self.options = options
        self._dispatch = dispatch
        self._told = told
        self._late: set[asyncio.Future[None]] = set()

    async def update(self, broadcast: Broadcast, superseded: Callable[[], bool]) -> bool:
        """Have engines draw from a broadcast, as `EnginePool.update`. Return whether it replaces a
        version that is not older."""
        versions = self.versions
        if broadcast == versions.newest and versions.settled.is_set():
            return False
        ready = [replica for replica in self.replicas if replica.state == "ready"]
        is_replacement = versions.begin(broadcast)
        versions.broadcasting = bool(ready)
        try:
            policies, is_superseded = await self._send(ready, broadcast, superseded)
            if policies:
                self._settle(policies)
        finally:
            versions.broadcasting = False
        if is_superseded:
            raise Superseded(broadcast.path.name)
        await self._until_taken(broadcast, superseded)
        return is_replacement

    def _settle(self, policies: dict[Replica, HeldPolicy]) -> None:
        agreed_policy = agreed({replica.url: policy for replica, policy in policies.items()})
        for replica, policy in policies.items():
            if policy != agreed_policy:
                replica.mark_unhealthy("its weights have another digest than those of most engines")
        self.versions.settle(agreed_policy)

    async def _until_taken(self, broadcast: Broadcast, superseded: Callable[[], bool]) -> None:
        """Wait until an engine, which may connect later, has taken the version. Raises Superseded,
        or ServerError after `start_s`."""
        versions, options = self.versions, self.options
        name, clock = broadcast.path.name, asyncio.get_running_loop().time
        end, remind_at = clock() + options.start_s, clock() + options.silent_s
        while not await happens_within(versions.settled, min(LOOK_S, max(0.0, end - clock()))):
            now = clock()
            if now >= end:
                raise ServerError(
                    f"no engine took {name} within {options.start_s:g} s: {self._told()}"
                )
            if superseded():
                raise Superseded(name)
            if now >= remind_at:
                remind_at = now + options.silent_s
                log.warning(
                    "no engine has taken %s yet: %s. Waiting for one, %.0f s more at most",
                    name,
                    self._told(),
                    end - now,
                )

    async def _send(
        self, ready: list[Replica], broadcast: Broadcast, superseded: Callable[[], bool]
    ) -> tuple[dict[Replica, HeldPolicy], bool]:
        loop = asyncio.get_running_loop()
        replicas_by_task = {
            asyncio.ensure_future(replica.take(broadcast)): replica for replica in ready
        }
        policies: dict[Replica, HeldPolicy] = {}
        is_superseded = False
        pending = set(replicas_by_task)
        began_at = loop.time()
        end = began_at + self.options.update_s
        while pending and (seconds_left := end - loop.time()) > 0:
            done, pending = await asyncio.wait(
                pending, timeout=seconds_left, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                replica = replicas_by_task[task]
                try:
                    policies[replica] = await task
                except ServerError as error:
                    if error.status == GONE and superseded():
                        is_superseded = True
                    else:
                        replica.mark_unhealthy(f"it did not take {broadcast.path.name}: {error}")
                else:  # the others get as long again as this engine needed
                    now = loop.time()
                    end = min(end, now + max(ABREAST_S, now - began_at))
        for task in pending:
            replica = replicas_by_task[task]
            if policies:
                late = self._await_late(replica, task, broadcast, self._grace(ready))
                waiter = asyncio.ensure_future(late)
                self._late.add(waiter)
                waiter.add_done_callback(self._late.discard)
            else:
                task.cancel()
                replica.mark_unhealthy(f"it has not taken {broadcast.path.name} in time")
        return policies, is_superseded

    async def _await_late(
        self,
        replica: Replica,
        task: asyncio.Future[HeldPolicy],
        broadcast: Broadcast,
        seconds: float,
    ) -> None:
        """Wait for a late engine; mark it unhealthy when it fails, needs more than `seconds`, or
        holds other weights."""
        try:
            async with asyncio.timeout(seconds):
                held_policy = await task
        except TimeoutError:
            replica.mark_unhealthy(
                f"it had not taken {broadcast.path.name} {seconds:g} s after the others"
            )
        except ServerError as error:
            replica.mark_unhealthy(f"it did not take {broadcast.path.name}: {error}")
        else:
            if broadcast == self.versions.newest and held_policy != self.versions.held:
                replica.mark_unhealthy(
                    "its weights have another digest than those of the other engines"
                )
            self._dispatch()

    def _grace(self, replicas: list[Replica]) -> float:
        any_drains = any(
            replica.server is not None and not replica.server.in_flight for replica in replicas
        )
        return max(self.options.silent_s, self.options.timeout_s if any_drains else 0.0)
