"""The learner's ranks other than rank 0, which follow its orders.

    rank 0        learn + batch    checkpoint    ...    finish    end
    the others    the same calls on a learner whose run folder writes nothing

Only rank 0 reads the channel, writes and broadcasts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lowroll.checkpoint.fault_injection import faultpoint
from lowroll.config import RunConfig
from lowroll.parallel.ranks import ALONE, RankGroup, Ranks
from lowroll.parallel.sharding import Sharded
from lowroll.runs.assembly import models, trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.checkpointing import Checkpointing
from lowroll.runs.folder import RunFolder
from lowroll.runs.learner import Learner, Policy
from lowroll.runs.roles.heartbeat import GONE_S, Heartbeat
from lowroll.runs.roles.ranks import RankEnvironment
from lowroll.runs.roles.run_paths import RunPaths, rank_role
from lowroll.runs.session import log_file
from lowroll.runs.stop import polite_stop
from lowroll.transport.frame import pack_batch, unpack_batch
from lowroll.types import Batch
from lowroll.weights.exploration_noise import share

log = logging.getLogger(__name__)

ORDER_S = GONE_S * 50  # for rank 0's next order: longer than its wait for a batch

Do = Literal["learn", "checkpoint", "finish", "end"]


@dataclass(frozen=True)
class Order:
    """An order to all ranks."""

    do: Do
    step: int = 0


@dataclass(frozen=True)
class Begin:
    """The first message to the other ranks. step: of the checkpoint to resume from."""

    attempt: int
    step: int | None
    settings: str


@contextmanager
def join_ranks(cfg: RunConfig, environment: RankEnvironment | None) -> Iterator[Ranks]:
    """Connect the learner's ranks for the block."""
    if environment is None or environment.size == 1:
        yield ALONE
        return
    device = Compute.of(cfg).device
    if device.type == "cuda":
        device = torch.device("cuda", 0)  # its own comes first (`runs.roles.devices`)
    ranks_class = Sharded if cfg.is_sharded else RankGroup
    ranks = ranks_class(
        environment.rank, environment.size, environment.host, environment.port, device, GONE_S
    )
    try:
        yield ranks
    finally:
        ranks.close()


class OrderSender:
    """Rank 0's side of the orders, silent when alone."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def begin(self, attempt: int, checkpoints: Checkpointing, cfg: RunConfig) -> None:
        step = None if checkpoints.found is None else checkpoints.found.step
        if self.ranks.size > 1:
            self.ranks.tell(json.dumps(asdict(Begin(attempt, step, cfg.dump()))).encode())

    def send(self, do: Do, step: int = 0, batch: Batch | None = None) -> None:
        if self.ranks.size > 1:
            payload = b"" if batch is None else pack_batch(batch)
            self.ranks.tell(json.dumps(asdict(Order(do, step))).encode() + b"\n" + payload)

    def send_batch(self, batch: Batch) -> None:
        self.send("learn", batch.step, batch)


def follow(cfg: RunConfig, environment: RankEnvironment) -> None:
    """Learn with rank 0 to the end. ValueError for another run's settings or weights."""
    cfg = cfg.resolved()
    paths, role = RunPaths(cfg.output_dir), rank_role(environment.rank)
    with ExitStack() as stack:
        stack.enter_context(polite_stop())  # rank 0 stops for all
        ranks = stack.enter_context(join_ranks(cfg, environment))
        begin = Begin(**json.loads(ranks.tell(wait_s=ORDER_S)))
        check_settings(cfg, begin)
        stack.enter_context(log_file(paths.run, begin.attempt, role))
        heartbeat = stack.enter_context(Heartbeat(paths.heartbeat(role), role, begin.attempt))
        log.info("rank %d of %d, attempt %d", environment.rank, environment.size, begin.attempt)
        Follower(cfg, ranks, heartbeat, begin).run()


class Follower:
    def __init__(self, cfg: RunConfig, ranks: Ranks, heartbeat: Heartbeat, begin: Begin) -> None:
        self.ranks = ranks
        self.heartbeat = heartbeat
        checkpoints = Checkpointing(ReadOnlyFolder(cfg, begin.step), resume=begin.step is not None)
        policy = Policy.load(cfg, models.chat_of(cfg), Compute.of(cfg), ranks)
        self.orders = OrderReceiver(ranks)
        publisher = MirrorPublisher(cfg, policy)
        self.learner = Learner(cfg, policy, checkpoints, self.orders, publisher, deadline_s=ORDER_S)
        self.learner.watch(self._phase, lambda _: None)
        if begin.step is not None:
            checkpoint = self.learner.restore()
            assert checkpoint is not None
            self.learner.go_on(checkpoint)

    def run(self) -> None:
        actions: Mapping[str, Callable[[int], object]] = {
            "learn": self.learner.step,
            "checkpoint": self._checkpoint,
            "finish": self.learner.finish,
        }
        while True:
            self.heartbeat.update(phase="waiting", doing="for rank 0")
            order = self.orders.next_order()
            faultpoint(f"rank.{order.do}/{order.step}")
            if order.do == "end":
                return
            self.heartbeat.update(phase=order.do, step=order.step, doing="")
            actions[order.do](order.step)

    def _checkpoint(self, step: int) -> None:
        self.learner.enter(step)
        self.learner.checkpoint(step)

    def _phase(self, name: str, done: int, total: int) -> None:
        self.heartbeat.progress(name, done, total)
        faultpoint(f"rank.{name}")


class OrderReceiver:
    """Rank 0's orders, as the learner's channel (`transport.base.RolloutReceiver`)."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._batch: Batch | None = None

    def next_order(self) -> Order:
        line, _, payload = self.ranks.tell(wait_s=ORDER_S).partition(b"\n")
        self._batch = unpack_batch(payload) if payload else None
        return Order(**json.loads(line))

    def receive(self, deadline_s: float) -> Batch:
        assert self._batch is not None
        return self._batch


class ReadOnlyFolder(RunFolder):
    """The run folder of a rank that writes nothing. step: of rank 0's verified checkpoint."""

    verified = True

    def __init__(self, cfg: RunConfig, step: int | None) -> None:
        super().__init__(cfg, "grpo", alone=False)
        self.asked_step = step

    def resume(self, step: int, about: Mapping[str, str]) -> None:
        """Do nothing: rank 0 truncates the folder."""

    def keep_batch(self, name: str, batch: Batch) -> Path:
        return self.path / name

    def save(
        self, step: int, tensors: Any, state: Any, meta: Any, parts: int = 1, share: Any = None
    ) -> None:
        """Do nothing: rank 0 keeps the checkpoint."""

    def publish(self, write: Callable[[Path], object]) -> None:
        """Do nothing: rank 0 publishes the folder."""


class MirrorPublisher:
    """A publisher for remote engines. whole: the gathered weights, on `device` of rank 0."""

    cache_tokens = None
    hidden_bytes = 0

    def __init__(self, cfg: RunConfig, policy: Policy, device: torch.device | str = "cpu") -> None:
        self.cfg = cfg
        self.model = policy.model
        self.ranks = policy.ranks
        self.weights = cfg.rollout.weights
        self.noise = trainer.noise(cfg)
        self.whole = self.ranks.mirror(self.model, device)

    def publish(self, version: int) -> Mapping[str, float]:
        """Refill `whole`, and give the learner its shared noise."""
        self.ranks.refill(self.whole, self.model)
        if self.cfg.noise is not None and self.cfg.noise.learner == "shared":
            share(self.model, None if self.noise is None else self.noise.at(version))
        return {}

    def update(self, version: int) -> None:
        self.publish(version)

    def change_format(self, weights: str) -> None:
        raise AssertionError(f"a fallback to {weights} was refused at the start")

    def release(self) -> None:
        """Do nothing: engines keep their memory."""


def check_settings(cfg: RunConfig, begin: Begin) -> None:
    """Raise ValueError for the first setting that is not rank 0's."""
    for own_line, leader_line in zip(
        cfg.dump().splitlines(), begin.settings.splitlines(), strict=False
    ):
        if own_line != leader_line:
            raise ValueError(
                f"{cfg.source}: {own_line.strip()}: rank 0 has {leader_line.strip()}; all ranks have one run's "
                "settings"
            )
