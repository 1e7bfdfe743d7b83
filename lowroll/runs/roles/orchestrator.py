"""`lowroll orchestrate`: batches from remote engines for a remote trainer. No torch.

    1. takes the role in the run folder, and waits for the trainer's heartbeat
    2. resumes from the newest batch in the spool, else from the trainer's checkpoint
    3. makes batch n when the weights of version n - 1 - max_async_level are there

A restarted process repeats the same requests with the same noise.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from lowroll.checkpoint.atomic_files import write_file
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.checkpoint.store import Store
from lowroll.config import RunConfig
from lowroll.config.surogate.roles import GIVEN
from lowroll.engine.remote.discovery import Elastic
from lowroll.engine.remote.replica import PoolOptions
from lowroll.metrics.record import add_evaluation, forget_evaluations, read_evaluations
from lowroll.model.folder import resolve
from lowroll.model.spec import read_spec_apart
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.tokens import FileTokenizer
from lowroll.orchestrator.errors import NoSignal
from lowroll.orchestrator.ledger_file import Journal
from lowroll.orchestrator.loop import logged
from lowroll.runs.batches import BatchSource, RunEnvironments
from lowroll.runs.evaluations import around
from lowroll.runs.folder import RunFolder
from lowroll.runs.roles.agreement import check_engines, check_trainer
from lowroll.runs.roles.channels import sender
from lowroll.runs.roles.heartbeat import (
    GONE_S,
    LONGEST_STEP_S,
    Heartbeat,
    HeartbeatMonitor,
    silent_s,
)
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.run_paths import ORCHESTRATOR, TRAINER, RunPaths
from lowroll.runs.roles.versions import RolloutPool, Versions
from lowroll.runs.session import log_file, own, tell
from lowroll.runs.stop import polite_stop
from lowroll.transport.base import Cursor, FrameGone, wait_until
from lowroll.transport.rollout_log import rollouts_path, truncate_rollouts
from lowroll.transport.spool import END, dismissal
from lowroll.types import Batch, printable
from lowroll.weights.sync.base import Broadcasts

log = logging.getLogger(__name__)


class Stopped(Exception):
    """A requested end by a signal."""


def orchestrate(cfg: RunConfig) -> int:
    """Make the batches of a run. Return the signal that ended it early, else 0.

    ValueError names invalid settings or a wrong run folder, RunFailed a missing role.
    """
    cfg = cfg.resolved()
    refuse(cfg)
    paths = RunPaths(cfg.output_dir)
    with ExitStack() as stack:
        lock = stack.enter_context(own(paths.roles / ORCHESTRATOR))
        if cfg.given is not None:  # for a trainer that has only its own file
            path = paths.run / GIVEN
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, cfg.given.encode())
        stack.enter_context(log_file(paths.run, lock.attempt, ORCHESTRATOR))
        heartbeat = stack.enter_context(
            Heartbeat(paths.heartbeat(ORCHESTRATOR), ORCHESTRATOR, lock.attempt, phase="starting")
        )
        stop = stack.enter_context(polite_stop())

        def alive() -> None:
            if stop:
                raise Stopped

        try:
            Orchestration(cfg, paths, stack, heartbeat, lock.attempt, alive).run()
        except Stopped:
            log.warning("stopped; what was sent is in %s", paths.spool)
            return stop.signal
    return 0


def overheard(urls: Sequence[str]) -> list[str]:
    parts = {url: urlsplit(url) for url in urls}
    return [
        url
        for url, part in parts.items()
        if part.scheme != "https" and not _is_this_machine(part.hostname or "")
    ]


class Orchestration:
    """The orchestrator's role. alive: raises when the process must stop."""

    def __init__(
        self,
        cfg: RunConfig,
        paths: RunPaths,
        stack: ExitStack,
        heartbeat: Heartbeat,
        attempt: int,
        alive: Callable[[], None],
    ) -> None:
        self.paths = paths
        self.heartbeat = heartbeat
        self.trainer = HeartbeatMonitor(paths.heartbeat(TRAINER))
        self.check_stop = alive
        self.committed = 0  # steps known to the ledger
        self.last = cfg.train.max_steps
        folder = resolve(cfg.model, weights=False)
        spec = read_spec_apart(folder)
        chat = ChatTokenizer(
            FileTokenizer(folder), cfg.rollout.tool_call_parser, cfg.chat_template_kwargs
        )
        environments = RunEnvironments(cfg)
        self.tokens = paths.tokens()  # before any wait, so that a missing token is reported at once
        # not "waiting", which is ready: refused settings below then end a launch at once
        heartbeat.update(phase="meeting", doing="the trainer")
        tell(f"waiting for the trainer in {paths.run} (lowroll train)")
        self._meet_trainer()
        trainer_cfg = check_trainer(cfg, paths.run, self.trainer.name)
        heartbeat.update(doing="engines")
        tell(f"waiting for engines: {', '.join(cfg.client.base_url) or 'lowroll serve'}")
        self.pool = stack.enter_context(self._pool(cfg))
        check_engines(trainer_cfg, self.pool)
        cache_tokens = self.pool.server.cache_tokens or None
        sized_rollout = cfg.rollout.model_copy(update={"cache_tokens": cache_tokens})
        cfg = cfg.model_copy(update={"rollout": sized_rollout})
        self.level = cfg.asynchrony.max_async_level
        weights_deadline_s = cfg.ckpt.wait_for_weights_timeout or cfg.weight_broadcast.timeout
        self.versions = Versions(
            Broadcasts(paths.broadcasts), self.pool, self.check_needed, weights_deadline_s
        )
        self.channel = sender(cfg, paths, attempt, self.alive)
        stack.callback(self.channel.close)
        paths.ledger.parent.mkdir(parents=True, exist_ok=True)
        self.home = RunFolder(cfg, "grpo")
        self.batches = BatchSource(
            cfg,
            spec,
            chat,
            environments,
            self.pool,
            self.channel,
            rollout_log=partial(self.home.keep_batch, "rollouts"),
            stack=stack,
            weights=self.versions if self.level else None,
            journal=Journal(paths.ledger),
            alone=False,
        )
        self.versions.retract = self.batches.orchestrator.rollout_buffer.retract
        heartbeat.update(phase="waiting", doing="")
        self.initial_state = self.batches.state()
        self.batches.watch(self._phase, lambda text: tell(text))
        self.batches.more = self._pace
        self._waited_s = 0.0  # for this step's weights, outside its batch
        self._last_batch_at = time.monotonic()

    def alive(self) -> None:
        """Check for a stop and the trainer's heartbeat."""
        self.check_stop()
        self.trainer.check()

    def check_needed(self) -> None:
        """Check as `alive` does. FrameGone when the trainer needs lost batches."""
        self.alive()
        self.channel.check()

    def _phase(self, name: str, done: int, total: int) -> None:
        self.heartbeat.progress(name, done, total)
        faultpoint(f"orchestrate.{name}")
        self.check_stop()

    def _meet_trainer(self) -> None:
        """Wait for a begun or resumed trainer, because files may be of an earlier run."""

        def has_begun() -> bool:
            is_alive = self.trainer.alive
            report = self.trainer.report or {}
            phase = report.get("phase")
            if phase == "ended":  # counts if no batch follows, else another trainer starts
                return report.get("step") == self.last or (self.paths.spool / END).exists()
            return is_alive and phase != "starting"

        wait_until(
            has_begun,
            f"a sign of life of the trainer in {self.paths.heartbeat(TRAINER)} (lowroll train)",
            LONGEST_STEP_S,
            self.alive,
        )

    def _pool(self, cfg: RunConfig) -> RolloutPool:
        client, found = cfg.client, cfg.client.elastic
        token, admin_token = self.tokens
        elastic = None
        if found.hostname is not None:
            elastic = Elastic(found.hostname, found.port, found.sync_interval)
        if client.base_url or elastic is not None:
            urls = list(client.base_url)
            token = os.environ.get(client.api_key_var) or token
            for url in overheard(urls or [f"http://{found.hostname}"]):
                tell(
                    f"warning: the admin's token goes to {url} unencrypted: whoever reads it there can "
                    "give the engine other weights; use a private network, or https before the engine"
                )
        else:
            urls = self._registered_engines(cfg.rollout.engines)
        options = PoolOptions(
            token=token,
            admin_token=admin_token,
            timeout_s=client.timeout,
            check_model=not client.skip_model_check,
            start_s=GONE_S,
            silent_s=silent_s(),
            in_flight="replay" if cfg.asynchrony.partial == "replay" else "keep",
        )
        return RolloutPool(urls, options, elastic=elastic, alive=self.check_stop)

    def _registered_engines(self, count: int) -> list[str]:
        monitors: dict[str, HeartbeatMonitor] = {}
        urls: list[str] = []

        def are_ready() -> bool:
            for role in self.paths.engines():
                monitors.setdefault(role, HeartbeatMonitor(self.paths.heartbeat(role)))
            reports = [monitor.report or {} for monitor in monitors.values() if monitor.alive]
            registered = [report for report in reports if report.get("url")]
            for report in registered:
                _check_reached(report)
            urls[:] = [str(report["url"]) for report in registered]
            return len(urls) >= count and len(registered) == len(reports)

        description = "an engine" if count == 1 else f"{count} engines (rollout.engines)"
        wait_until(
            are_ready,
            f"{description} in {self.paths.roles} (lowroll serve), or client.base_url",
            GONE_S,
            self.check_stop,
        )
        return urls

    # -- steps -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make all batches and the last evaluation."""
        while True:
            try:
                self._make_after(self._go_on())
                break
            except FrameGone as gone:  # an older checkpoint replaced a damaged one
                log.warning("%s: what follows the trainer's checkpoint is made again", gone)
        self._commit()
        tell("the trainer has learned from every batch; nothing is left to make")

    def _make_after(self, last_made: int) -> None:
        """Make the batches after step `last_made` with the evaluations, and wait until the trainer
        has committed all. NoSignal ends the channel early."""
        try:
            if (ended := self.channel.spool.ended()) is not None:
                raise NoSignal(ended)
            for step in range(last_made + 1, self.last + 1):
                self._evaluate_after(step - 1)
                self.step(step)
        except NoSignal as reason:
            tell(f"no batch follows: {reason}")
            self.channel.end(str(reason))
        else:
            self._evaluate_after(self.last)
        if unjudged := self.batches.orchestrator.errors.unjudged():
            log.warning(unjudged)
        self.heartbeat.update(phase="waiting", doing="for the last checkpoint")
        self.channel.drain(LONGEST_STEP_S)

    def step(self, step: int) -> None:
        """Make the batch of a step once its weights are there."""
        self.heartbeat.update(
            step=step, phase="waiting", doing=f"for the weights of {self.needs(step)}"
        )
        if step == 1 or self.level == 0:  # other batches wait for their weights themselves
            began = time.monotonic()
            self.versions.at_least(self.needs(step), step - 1)
            self._waited_s = time.monotonic() - began
        if step == 1 and not self._recorded(0):
            self._record(0, around(self.batches.before(1, self.versions.version), {}))
        self.heartbeat.update(phase="generating", doing="")
        faultpoint(f"orchestrate.step/{step}")
        self.batches.step(step, step - 1)
        self._commit()

    def _pace(self, batch: Batch) -> dict[str, float]:
        now = time.monotonic()
        wall_s = max(now - self._last_batch_at, 1e-9)
        self._last_batch_at = now
        metrics = self.pool.report().metrics()
        if self.level == 0:
            idle_s = self._waited_s + batch.stats["time/generate"]
            metrics["time/wait_weights"] = self._waited_s
            metrics["perf/orchestrator_idle_fraction"] = min(1.0, idle_s / wall_s)
        return metrics

    def _commit(self) -> None:
        cursor = self.channel.cursor()
        if cursor is not None and cursor.committed > self.committed:
            self.committed = cursor.committed
            self.batches.orchestrator.committed(cursor.committed)

    def needs(self, step: int) -> int:
        return max(0, step - 1 - self.level)

    def _go_on(self) -> int:
        """Restore the state after the newest batch in the spool, or after the trainer's checkpoint
        if the trainer cannot continue with that batch. Return the step."""
        cursor = self._cursor()
        spool = self.channel.spool
        newest = spool.newest()
        if newest is not None and spool.reaches(cursor.received) and newest.orchestrator:
            self.batches.restore(newest.step, newest.orchestrator, resumed=True)
            if not rollouts_path(self.paths.run / "rollouts", newest.step).exists():
                self.home.keep_batch("rollouts", logged(newest))
            log.info("going on after the batch of step %d in the spool", newest.step)
            return newest.step
        self.channel.go_back(cursor)
        if cursor.received > cursor.committed:  # they may differ when made again
            tell(dismissal(cursor.attempt))
            cursor = self._cursor()
        self.committed = cursor.committed
        forget_evaluations(self.paths.run, cursor.committed)
        truncate_rollouts(self.paths.run / "rollouts", cursor.committed)
        if cursor.committed == 0:
            self.batches.restore(0, self.initial_state)
            return 0
        checkpoint = Store(self.paths.run / "checkpoints").load(cursor.committed, only=())
        state: Mapping[str, Any] = checkpoint.state["orchestrator"]
        self.batches.restore(checkpoint.step, state, resumed=True)
        log.info("going on after the checkpoint of step %d", checkpoint.step)
        return checkpoint.step

    def _cursor(self) -> Cursor:
        def has_spoken() -> bool:
            self.trainer.look()
            report = self.trainer.report or {}
            cursor = self.channel.cursor()
            if cursor is None:
                return False
            # an earlier attempt's may be ahead of the current checkpoint
            return report.get("phase") == "ended" or cursor.attempt >= report.get("attempt", 0)

        wait_until(
            has_spoken,
            "the trainer's word about what it has received",
            LONGEST_STEP_S,
            self.alive,
        )
        cursor = self.channel.cursor()
        assert cursor is not None
        return cursor

    # -- evaluations -------------------------------------------------------------------------------

    def _evaluate_after(self, step: int) -> None:
        if step < 1 or not self.batches.evaluations.due(step) or self._recorded(step):
            return
        self.heartbeat.update(phase="waiting", doing=f"for the weights of {step}, to evaluate them")
        version = self.versions.at_least(step, step)
        self.heartbeat.update(phase="evaluating")
        self.batches.enter(step)
        self._record(step, around({}, self.batches.after(step, version)))

    def _recorded(self, step: int) -> bool:
        return step in read_evaluations(self.paths.run)

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            add_evaluation(self.paths.run, step, metrics)


def _check_reached(said: Mapping[str, Any]) -> None:
    """Raise ValueError for another machine's engine whose address leads to this machine."""
    if said.get("host") == socket.gethostname():
        return
    if str(said["url"]).startswith("unix:"):
        raise ValueError(
            f"{said.get('role')}: its vLLM on {printable(said.get('host'))} is reached there alone; "
            "start one by itself (docs/vllm.md), and name its address in client.base_url"
        )
    host = urlsplit(str(said["url"])).hostname or ""
    if _is_this_machine(host):
        raise ValueError(
            f"{said.get('role')}: on {printable(said.get('host'))} it listens at {host}, which leads "
            "nowhere from here: start it with serve.host=ADDRESS, one that this machine reaches, or "
            "name the engines in client.base_url"
        )


def _is_this_machine(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
