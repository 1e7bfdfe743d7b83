"""The health of the engine, and the Prometheus metrics of `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from lowroll.types import BehaviorTag, Group

if TYPE_CHECKING:
    from lowroll.engine.base import EngineStats

ThreadState = Literal["running", "draining", "paused"]
FAILURES_BEFORE_UNHEALTHY = 3  # consecutive
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
# the engine's counters: their names here, and their descriptions
TOTALS = {
    "prefix_hits": ("prefix_hit_pages", "pages of prompts found in the cache"),
    "tokens": ("drawn_tokens", "tokens drawn"),
    "replays": ("replayed_samples", "unfinished samples replayed under newer weights"),
    "replayed_tokens": ("replayed_tokens", "tokens that they had drawn"),
    "kept_tokens": ("replay_kept_tokens", "of those, the ones that the newer weights draw too"),
}


@dataclass(frozen=True)
class EngineHealth:
    behavior: BehaviorTag
    stats: EngineStats
    open: int
    state: ThreadState
    failures: int  # consecutive

    @property
    def healthy(self) -> bool:
        return self.failures < FAILURES_BEFORE_UNHEALTHY


@dataclass
class RequestTimes:
    """The times of one request, in seconds of the monotonic clock."""

    began_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    moved_at: float = 0.0


class _EngineTotals(Collector):
    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (metric_name, help_text) in TOTALS.items():
            value = 0 if self.stats is None else getattr(self.stats, name)
            yield CounterMetricFamily(f"lowroll_{metric_name}", help_text, value=value)


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._up = gauge("lowroll_engine_up", "1 when the engine's thread answers")
        self._open = gauge("lowroll_requests_open", "requests in the server")
        self._paused = gauge("lowroll_paused", "1 while nothing is drawn")
        self._running = gauge("lowroll_samples_running", "samples that decode")
        self._waiting = gauge("lowroll_samples_waiting", "samples without a place")
        self._cache = gauge("lowroll_cache_tokens", "tokens that the KV cache holds")
        self._used = gauge("lowroll_cache_used_tokens", "tokens of it in pages that requests hold")
        self._totals = _EngineTotals()
        registry.register(self._totals)
        self._weights = Info("lowroll_weights", "the policy that is drawn from", registry=registry)
        self._requests = counter("lowroll_requests", "requests that ended, by how", ["outcome"])
        self._prompt = counter("lowroll_prompt_tokens", "tokens of prompts")
        self._response = counter("lowroll_response_tokens", "tokens of responses")
        labels = ["route", "status"]
        self._answers = counter("lowroll_http_responses", "answers, by route and status", labels)
        self._first = histogram(
            "lowroll_first_token_seconds", "from a request to its first token", buckets=SECONDS
        )
        self._gap = histogram(
            "lowroll_inter_token_seconds", "between two tokens of a stream", buckets=GAPS
        )
        self._whole = histogram(
            "lowroll_request_seconds", "from a request to its end", buckets=SECONDS
        )

    # -- from the engine's thread -------------------------------------------------------------------

    def first_token(self, times: RequestTimes) -> None:
        times.first_at = times.moved_at = time.monotonic()
        self._first.observe(times.first_at - times.began_at)

    def moved(self, streams: Sequence[tuple[RequestTimes, int]]) -> None:
        """Record the times of streams, each with the most tokens of a sample. One step moved all of
        them, so the gap is measured once."""
        now = time.monotonic()
        is_gap_recorded = False
        for times, tokens in streams:
            if times.first_at is None:
                self.first_token(times)
                continue
            if not is_gap_recorded:
                self._gap.observe((now - times.moved_at) / max(1, tokens))
                is_gap_recorded = True
            times.moved_at = now

    def ended(self, times: RequestTimes, group: Group) -> None:
        if times.first_at is None and any(rollout.token_ids for rollout in group.rollouts):
            self.first_token(times)
        self._whole.observe(time.monotonic() - times.began_at)
        reasons = {rollout.finish_reason for rollout in group.rollouts}
        # the first of these that any sample has
        outcome = next(reason for reason in ("abort", "length", "stop") if reason in reasons)
        self._requests.labels(outcome).inc()
        self._prompt.inc(len(group.request.prompt_ids))
        self._response.inc(sum(len(rollout.token_ids) for rollout in group.rollouts))

    def failed(self) -> None:
        self._requests.labels("failed").inc()

    # -- from the event loop ------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def render(self, health: EngineHealth | None) -> bytes:
        """Return all metrics in Prometheus' format. health: None when the thread is silent."""
        self._up.set(health is not None and health.healthy)
        if health is not None:
            stats = health.stats
            self._open.set(health.open)
            self._paused.set(health.state == "paused")
            self._running.set(stats.running)
            self._waiting.set(stats.waiting)
            self._cache.set(stats.cache_tokens)
            self._used.set(stats.cache_used)
            self._totals.stats = stats
            policy = health.behavior.policy[-1]
            self._weights.info(
                {
                    "version": str(policy.version),
                    "digest": policy.digest,
                    "format": health.behavior.weights,
                    "kv_policy": health.behavior.kv_policy,
                }
            )
        return generate_latest(self.registry)
