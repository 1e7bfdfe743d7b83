"""`lowroll train`: learns from a remote orchestrator's batches, and broadcasts weights.

A restarted trainer learns again from the batches since its last checkpoint, and broadcasts the same
bytes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack

from lowroll.checkpoint.atomic_files import write_file
from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.config import RunConfig
from lowroll.metrics.live import LiveView
from lowroll.metrics.record import Record, read
from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import Ranks
from lowroll.quant.formats import QTensor, get_format
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.checkpointing import Checkpointing
from lowroll.runs.folder import RunFolder, resumes_by_config
from lowroll.runs.learner import Learner, Policy
from lowroll.runs.roles.channels import TrainerChannel, receiver
from lowroll.runs.roles.heartbeat import LONGEST_STEP_S, Heartbeat, HeartbeatMonitor
from lowroll.runs.roles.limits import refuse
from lowroll.runs.roles.rank_follower import MirrorPublisher, OrderSender, join_ranks
from lowroll.runs.roles.ranks import RankEnvironment
from lowroll.runs.roles.run_paths import ORCHESTRATOR, TRAINER, RunPaths
from lowroll.runs.session import RunResult, attempt, run_steps
from lowroll.runs.stop import StepDropped, Stop, polite_stop
from lowroll.transport.base import ChannelClosed
from lowroll.transport.spool import Spool
from lowroll.weights.publish import publish, rollout_copy
from lowroll.weights.sync.base import transfer_token
from lowroll.weights.sync.changes import Shadow
from lowroll.weights.sync.folder import FolderPublisher
from lowroll.weights.sync.server import WeightServer
from lowroll.weights.update_metrics import AdapterWatch, WeightWatch

log = logging.getLogger(__name__)

STEPS_IN_USE = 2  # versions that engines may still load, beyond the level's


def train(
    cfg: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    environment: RankEnvironment | None = None,
) -> RunResult:
    """Learn from an orchestrator's batches. Other arguments and the result are those of
    `lowroll.run`. environment: of rank 0, if several ranks learn."""
    resume = resume or resumes_by_config(cfg)
    cfg = cfg.resolved()
    refuse(cfg)
    last_step = cfg.train.max_steps
    paths = RunPaths(cfg.output_dir)
    with ExitStack() as stack:
        home = stack.enter_context(attempt(cfg, "grpo", resume, overwrite, alone=False))
        heartbeat = stack.enter_context(Heartbeat(paths.heartbeat(TRAINER), TRAINER, home.attempt))
        ranks = stack.enter_context(join_ranks(cfg, environment))
        role = Training(home, paths, heartbeat, resume, ranks)
        first_step = role.go_on() if resume else role.begin()
        view = stack.enter_context(
            LiveView(last_step, f"{home.path}: {cfg.algorithm}, {cfg.correction}")
        )
        role.stop = stop = stack.enter_context(polite_stop())
        view.asked_to_stop = stop
        role.watch(view)

        try:
            signal = run_steps(role, first_step, last_step, cfg.ckpt.interval, view.show, stop)
        except ChannelClosed as reason:
            role.finish(role.learner.made)
            role.orders.send("end")
            return RunResult(home.path, read(home.path), ended=str(reason))
        finally:
            role.close()
        role.orders.send("end")
    return RunResult(home.path, read(home.path), signal=signal)


class Training:
    """The trainer's role."""

    def __init__(
        self,
        home: RunFolder,
        paths: RunPaths,
        heartbeat: Heartbeat,
        resume: bool,
        ranks: Ranks,
    ) -> None:
        cfg = home.cfg
        self.home = home
        self.cfg = cfg
        self.paths = paths
        self.heartbeat = heartbeat
        self.stop = Stop()
        self.orders = OrderSender(ranks)
        self.orchestrator = HeartbeatMonitor(paths.heartbeat(ORCHESTRATOR))
        checkpoints = Checkpointing(home, resume)
        self.orders.begin(home.attempt, checkpoints, cfg)
        policy = Policy.load(cfg, models.chat_of(cfg), Compute.of(cfg), ranks)
        self.channel = TrainerChannel(self._check, self.orders.send_batch)
        self.publisher = Broadcasting(cfg, policy, paths, home.attempt)
        self.learner = Learner(
            cfg,
            policy,
            checkpoints,
            self.channel,
            self.publisher,
            deadline_s=LONGEST_STEP_S,
            whole=self.publisher.whole,
        )
        self._ended = time.monotonic()

    def watch(self, view: LiveView) -> None:
        def phase(name: str, done: int, total: int) -> None:
            view.phase(name, done, total)
            self.heartbeat.progress(name, done, total)
            faultpoint(f"train.{name}")

        def note(text: str) -> None:
            view.note(text)
            log.info("%s", text)

        self.learner.watch(phase, note)

    def begin(self, again: bool = False) -> int:
        """Start a run; return the first step. again: in its folder without a checkpoint."""
        self.home.begin(self.learner.about(), again)
        self._open(0)
        return 1

    def go_on(self) -> int:
        """Continue from the newest undamaged checkpoint, else begin; return the next step."""
        checkpoint = self.learner.restore()
        committed = 0 if checkpoint is None else checkpoint.step
        spool = Spool(self.paths.spool)
        if not spool.reaches(committed):
            self.publisher.folder.forget_after(committed)
        spool.reopen()
        if checkpoint is None:
            return self.begin(again=True)
        step = self.learner.go_on(checkpoint)
        self._open(committed)
        return step

    def _open(self, committed: int) -> None:
        self.channel.open(receiver(self.cfg, self.paths, self.home.attempt, committed, self._check))
        self.heartbeat.update(phase="waiting", step=committed)

    def _check(self) -> None:
        """Check for a stop, which drops the step, and for failed roles."""
        if self.stop:
            raise StepDropped
        self.orchestrator.check()
        self.publisher.folder.check()

    def step(self, step: int) -> Record:
        began = time.monotonic()
        self.heartbeat.update(step=step, phase="waiting", doing=f"for batch {step}")
        metrics = self.learner.step(step)
        ended = time.monotonic()
        wall_s = max(ended - self._ended, 1e-9)
        self._ended = ended
        metrics |= {
            "time/wait_batch": self.channel.waited_s,
            "perf/trainer_idle_fraction": min(1.0, self.channel.waited_s / wall_s),
        }
        self.heartbeat.update(phase="recording", doing="")
        record = self.learner.record(step, metrics, began)
        faultpoint(f"train.recorded/{step}")
        return record

    def drop(self, step: int) -> None:
        if step > 1:
            self.learner.enter(step - 1)
            self.checkpoint(step - 1)

    def checkpoint(self, step: int) -> None:
        """Save a checkpoint, and release its batches."""
        self.heartbeat.update(phase="checkpoint", doing="")
        self.orders.send("checkpoint", step)
        self.learner.checkpoint(step)
        faultpoint(f"train.checkpoint/{step}")
        self.channel.commit(step)

    def finish(self, step: int) -> None:
        self.heartbeat.update(phase="finishing", doing="")
        self.orders.send("finish", step)
        self.learner.finish(step)
        if step:
            self.channel.commit(step)

    def close(self) -> None:
        self.channel.close()
        self.publisher.folder.close()


class Broadcasting(MirrorPublisher):
    """A publisher of weights as folders that engines read."""

    def __init__(self, cfg: RunConfig, policy: Policy, paths: RunPaths, attempt: int) -> None:
        compute = policy.compute
        # for files alone the weights are read from the host's memory
        only_files = cfg.weight_broadcast.type == "filesystem" and not cfg.train.weight_metrics
        on_host = only_files and cfg.forward_weights is None
        super().__init__(cfg, policy, "cpu" if on_host else compute.device)
        assert self.whole is not None, "rank 0 leads"
        self.folder = FolderPublisher(
            paths.broadcasts,
            self.whole,
            attempt=attempt,
            keep=cfg.asynchrony.max_async_level + STEPS_IN_USE,
            base=cfg.model,
            noise=self.noise,
            shadow=_make_shadow(cfg, compute, self.whole),
            server=_open_weight_server(cfg, compute, paths),
        )
        self.watch: AdapterWatch | CopyWatch | None = None
        if cfg.train.weight_metrics and cfg.train.lora:
            self.watch = AdapterWatch(self.whole)
        elif cfg.train.weight_metrics:
            self.watch = CopyWatch(self.whole, compute, compute.format(self.weights))

    def publish(self, version: int) -> Mapping[str, float]:
        """Broadcast a version, except the initial one."""
        super().publish(version)
        metrics: dict[str, float] = {}
        if version:
            metrics = self.folder.publish(version)
            faultpoint(f"train.published/{version}")
        return metrics | (self.watch.measure() if self.watch else {})


def _make_shadow(cfg: RunConfig, compute: Compute, model: Transformer) -> Shadow | None:
    """Return an aligned learner's codes of the engines, so that only changes travel."""
    rollout = cfg.rollout
    if cfg.train.forward == "dense" or cfg.forward_weights != rollout.weights or cfg.train.lora:
        return None
    if rollout.engine != "native" or rollout.large_batch_weights is not None:
        return None
    weights = compute.format(cfg.rollout.weights)
    return Shadow(model, weights, get_format(weights).dtype or compute.dtype)


def _open_weight_server(cfg: RunConfig, compute: Compute, paths: RunPaths) -> WeightServer | None:
    broadcast_cfg = cfg.weight_broadcast
    if broadcast_cfg.type == "filesystem":
        return None
    try:
        token = transfer_token(paths.tokens()[1])
        asynchrony = cfg.asynchrony
        keep = asynchrony.max_async_level + 1 if asynchrony.strict_async_level else 1
        server = WeightServer(
            broadcast_cfg.type,
            compute.device,
            host=broadcast_cfg.host,
            port=broadcast_cfg.port,
            timeout_s=broadcast_cfg.timeout,
            token=token,
            keep=keep,
        )
    except ValueError as error:
        raise ValueError(f"weight_broadcast.{error}") from None
    except OSError as error:
        raise ValueError(
            f"weight_broadcast: {broadcast_cfg.host}:{broadcast_cfg.port}: {error}"
        ) from None
    paths.direct.parent.mkdir(parents=True, exist_ok=True)
    write_file(paths.direct, json.dumps({"host": broadcast_cfg.host, "port": server.port}).encode())
    return server


class CopyWatch(WeightWatch):
    """A watch of remote engines, whose codes are made again here."""

    def __init__(self, model: Transformer, compute: Compute, weights: str) -> None:
        self.copy = rollout_copy(model, weights, get_format(weights).dtype or compute.dtype)
        codes: dict[str, QTensor] = {}
        for name, linear in self.copy.linears():
            assert isinstance(linear.weight, QTensor)
            codes[name] = linear.weight
        super().__init__(model, codes)

    def measure(self) -> dict[str, float]:
        publish(self.master, self.copy)
        return super().measure()
