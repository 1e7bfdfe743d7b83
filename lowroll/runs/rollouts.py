"""The engine of a run: built for its workloads, updated after every step, replaced when the guard
falls back to another format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lowroll import machine
from lowroll.config import RunConfig
from lowroll.engine.base import Engine, EngineStats, InFlight, PartialSample
from lowroll.kv.capacity import NoRoom
from lowroll.kv.policy.base import CachePolicy
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.interfaces import Progress
from lowroll.runs.assembly import engines, trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory.plan import Planner
from lowroll.types import Group, Request, RunFailed
from lowroll.weights.aligned_forward import realign
from lowroll.weights.exploration_noise import Noise, share
from lowroll.weights.update_metrics import AdapterWatch, WeightWatch

log = logging.getLogger(__name__)


class RolloutEngine:
    """The engine over a learner's weights, as the orchestrator's client. cache_tokens: of a resumed
    run; ValueError when they do not fit. `cfg` has the cache size."""

    def __init__(
        self,
        cfg: RunConfig,
        compute: Compute,
        model: Transformer,
        chat: ChatTokenizer,
        planner: Planner,
        cache_tokens: int | None = None,
    ) -> None:
        self.compute = compute
        self.model = model
        self.chat = chat
        self.planner = planner
        self.weights: str = cfg.rollout.weights
        self.cfg = cfg
        self.engine = self._first_engine(cache_tokens)
        self.cfg = engines.with_rollout(cfg, cache_tokens=self.cache_tokens)
        self.noise = trainer.noise(cfg)
        self.in_flight: InFlight = "replay" if cfg.asynchrony.partial == "replay" else "keep"
        # Set by the owner; called before the engine is replaced.
        self.before_end: Callable[[], object] = lambda: None
        self.watch = self._watch()

    def _first_engine(self, cache_tokens: int | None) -> Engine:
        wanted_tokens = cache_tokens or self.planner.plan(self.cfg).cache_tokens or None
        cfg = engines.with_rollout(self.cfg, cache_tokens=wanted_tokens)
        try:
            return engines.make(cfg, self.compute, self.model, self.chat)
        except NoRoom as error:
            if cache_tokens is None:
                raise
            raise ValueError(
                f"resume: a run keeps the KV cache that it began with: rollout.{error}"
            ) from None

    def close(self) -> None:
        self.engine.close()

    @property
    def cache_tokens(self) -> int | None:
        return self.engine.stats().cache_tokens if self.cfg.rollout.engine == "native" else None

    def generate(self, requests: list[Request], on_progress: Progress | None = None) -> list[Group]:
        return self.engine.generate(requests, on_progress=on_progress)

    def add(self, request: Request) -> int:
        return self.engine.add(request)

    def step(self) -> list[tuple[int, Group]]:
        return self.engine.step()

    def abort(self, handle: int) -> bool:
        return self.engine.abort(handle)

    def so_far(self, handle: int) -> list[PartialSample]:
        return self.engine.so_far(handle)

    def publish(self, version: int) -> Mapping[str, float]:
        """Load a version's weights; return `weights/*`. RunFailed if they did not arrive."""
        self.update(version)
        self._check_arrival(version)
        return {} if self.watch is None else self.watch.measure()

    def update(self, version: int) -> None:
        """Load a version's weights and noise into the engine, and shared noise into the learner.
        Requests in flight continue or restart by `asynchrony.partial`."""
        noise = None if self.noise is None else self.noise.at(version)
        self._load(version, noise)
        if self.cfg.noise is not None and self.cfg.noise.learner == "shared":
            share(self.model, noise)

    @contextmanager
    def without_noise(self, version: int) -> Iterator[None]:
        has_noise = self.engine.behavior.noise_sigma > 0
        if has_noise:
            self._load(version, noise=None)
        yield
        if self.cfg.rollout.engine == "native":
            self.engine.reset_prefix_cache()
        if has_noise:
            self.update(version)

    def _load(self, version: int, noise: Noise | None) -> None:
        update = engines.update(self.cfg, self.model, version, noise)
        self.engine.update_weights(update, in_flight=self.in_flight)

    def release(self) -> None:
        self.engine.release(in_flight=self.in_flight)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def kv(self) -> CachePolicy:
        return self.engine.capabilities.kv

    @property
    def hidden_bytes(self) -> int:
        return self.engine.stats().virtual_memory_bytes

    def change_format(self, weights: str) -> None:
        """Replace the engine by one of another format, with a smaller cache if need be."""
        cfg = self.cfg
        if cfg.train.forward == "aligned":
            realign(self.model, self.compute.format(weights))
        self.before_end()
        self.engine.close()
        del self.engine, self.watch
        machine.collect_garbage()  # the engine and its scheduler reference each other
        try:
            self.engine = engines.make(cfg, self.compute, self.model, self.chat, weights)
        except NoRoom as error:
            uncached_cfg = engines.with_rollout(cfg, cache_tokens=None)
            self.engine = engines.make(
                uncached_cfg, self.compute, self.model, self.chat, weights, self.planner.workloads
            )
            log.warning(
                "beside %s weights the KV cache is smaller than before, of %d tokens: %s",
                weights,
                self.engine.stats().cache_tokens,
                error,
            )
        self.weights = weights
        self.watch = self._watch()
        self.engine.warm_up()

    def _check_arrival(self, version: int) -> None:
        """Compare one block of the engine, another at each version, with the learner's."""
        block = version % self.model.spec.num_layers
        name = self.engine.first_difference(self.model, block)
        if name is not None:
            raise RunFailed(
                f"update to version {version}: {name} of the engine is not what the learner's weights "
                "make of it: the engine still draws from older weights"
            )

    def _watch(self) -> WeightWatch | AdapterWatch | None:
        if not self.cfg.train.weight_metrics:
            return None
        if self.cfg.train.lora:
            return AdapterWatch(self.model)
        linear_weights = self.engine.linear_weights()
        return WeightWatch(self.model, linear_weights) if linear_weights else None
