"""Broadcast of a weight version to all replicas in parallel. A replica that is much slower than the
others finishes in the background, and receives no new requests until it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from lowroll.engine.remote.http_client import ServerError, happens_within
from lowroll.engine.remote.replica import PoolOptions, Replica
from lowroll.engine.remote.server_base import HeldPolicy, Published
from lowroll.engine.remote.versions import Disagreement, PolicyVersions, Superseded, agreed

log = logging.getLogger(__name__)

ABREAST_S = 1.0  # least grace of the others after the first engine has the weights
LOOK_S = 0.25  # between two checks for a newer version while no engine has taken this one
GONE = 409  # the status of an engine that does not find the version any more


class WeightBroadcaster:
    """A broadcaster of weights, on the pool's loop alone. dispatch: called when an engine can draw
    again. told: returns what is wrong with each engine."""

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

    async def update(self, broadcast: Published, superseded: Callable[[], bool]) -> bool:
        """Have engines draw from a broadcast, as `EnginePool.update`. Return whether it replaces a
        version that is newer or has the same name."""
        known = self.versions
        if broadcast == known.newest and known.settled.is_set():
            return False
        ready = [replica for replica in self.replicas if replica.state == "ready"]
        back = known.begin(broadcast)
        known.broadcasting = bool(ready)
        try:
            taken, gone = await self._tell(ready, broadcast, superseded)
            if taken:
                held = agreed(taken)
                for replica in ready:
                    if taken.get(replica.url, held) != held:
                        replica.mark_unhealthy(
                            "its weights have another digest than those of most engines"
                        )
                known.settle(held)
        except Disagreement as error:
            raise ServerError(str(error)) from None
        finally:
            known.broadcasting = False
        if gone:
            raise Superseded(broadcast.path.name)
        await self._until_taken(broadcast, superseded)
        return back

    async def _until_taken(self, broadcast: Published, superseded: Callable[[], bool]) -> None:
        known, options = self.versions, self.options
        name, clock = broadcast.path.name, asyncio.get_running_loop().time
        end, remind = clock() + options.start_s, clock() + options.silent_s
        while not await happens_within(known.settled, min(LOOK_S, max(0.0, end - clock()))):
            now = clock()
            if now >= end:
                raise ServerError(
                    f"no engine took {name} within {options.start_s:g} s: {self._told()}"
                )
            if superseded():
                raise Superseded(name)
            if now >= remind:
                remind = now + options.silent_s
                log.warning(
                    "no engine has taken %s yet: %s. Waiting for one, %.0f s more at most",
                    name,
                    self._told(),
                    end - now,
                )

    async def _tell(
        self, ready: list[Replica], broadcast: Published, superseded: Callable[[], bool]
    ) -> tuple[dict[str, HeldPolicy], bool]:
        """Return what each acknowledges, and whether one did not find the version any more. Others
        that cannot take it are evicted; those that need longer than twice the time of the first
        finish in the background (`_await_late`)."""
        loop = asyncio.get_running_loop()
        asked = {asyncio.ensure_future(replica.take(broadcast)): replica for replica in ready}
        taken: dict[str, HeldPolicy] = {}
        gone = False
        pending = set(asked)
        began = loop.time()
        end = began + self.options.update_s
        while pending and (left := end - loop.time()) > 0:
            done, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                replica = asked[task]
                try:
                    taken[replica.url] = await task
                    now = loop.time()
                    end = min(end, now + max(ABREAST_S, now - began))
                except ServerError as error:
                    if error.status == GONE and superseded():
                        gone = True
                    else:
                        replica.mark_unhealthy(f"it did not take {broadcast.path.name}: {error}")
        if taken:
            grace = self._grace(ready)
            for task in pending:
                late = asyncio.ensure_future(self._await_late(asked[task], task, broadcast, grace))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
        else:
            for task in pending:
                task.cancel()
                asked[task].mark_unhealthy(f"it has not taken {broadcast.path.name} in time")
        return taken, gone

    async def _await_late(
        self,
        replica: Replica,
        task: asyncio.Future[HeldPolicy],
        broadcast: Published,
        seconds: float,
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                held = await task
        except TimeoutError:
            replica.mark_unhealthy(
                f"it had not taken {broadcast.path.name} {seconds:g} s after the others"
            )
            return
        except ServerError as error:
            replica.mark_unhealthy(f"it did not take {broadcast.path.name}: {error}")
            return
        if broadcast == self.versions.newest and not self.versions.agrees(held):
            replica.mark_unhealthy(
                "its weights have another digest than those of the other engines"
            )
        self._dispatch()

    def _grace(self, replicas: list[Replica]) -> float:
        """Return the seconds for the others after the first has the weights: some finish their
        requests first."""
        drains = any(m.server is not None and not m.server.in_flight for m in replicas)
        return max(self.options.silent_s, self.options.timeout_s if drains else 0.0)
