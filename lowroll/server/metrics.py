"""What Prometheus reads at `/metrics`, in a registry of the server's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from lowroll.types import Group

if TYPE_CHECKING:
    from lowroll.engine.base import EngineStats
    from lowroll.server.loop import Health
    from lowroll.server.ticket import Delta, Flight

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


TOTALS = {
    "prefix_hits": ("prefix_hit_pages", "pages of prompts found in the cache"),
    "tokens": ("drawn_tokens", "tokens drawn"),
    "replays": ("replayed_samples", "unfinished samples replayed under newer weights"),
    "replayed_tokens": ("replayed_tokens", "tokens that they had drawn"),
    "kept_tokens": ("replay_kept_tokens", "of those, the ones that the newer weights draw too"),
}  # counted by the engine: the name in its stats, the name here and what it says


class _Totals(Collector):
    """What the engine has counted, as it last said."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, (shown, meaning) in TOTALS.items():
            value = 0 if self.stats is None else getattr(self.stats, name)
            yield CounterMetricFamily(f"lowroll_{shown}", meaning, value=value)


class Metrics:
    """Counted where it happens, on the engine's thread and in the event loop; what the engine knows
    is read when somebody asks."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self._up = Gauge("lowroll_engine_up", "1 when the engine's thread answers", registry=own)
        self._open = Gauge("lowroll_requests_open", "requests in the server", registry=own)
        self._paused = Gauge("lowroll_paused", "1 while nothing is drawn", registry=own)
        self._running = Gauge("lowroll_samples_running", "samples that decode", registry=own)
        self._waiting = Gauge("lowroll_samples_waiting", "samples without a place", registry=own)
        self._cache = Gauge("lowroll_cache_tokens", "tokens that the KV cache holds", registry=own)
        self._used = Gauge(
            "lowroll_cache_used_tokens", "tokens of it in pages that requests hold", registry=own
        )
        self._totals = _Totals()
        own.register(self._totals)
        self._weights = Info("lowroll_weights", "the policy that is drawn from", registry=own)
        self._requests = Counter(
            "lowroll_requests", "requests that ended, by how", ["outcome"], registry=own
        )
        self._prompt = Counter("lowroll_prompt_tokens", "tokens of prompts", registry=own)
        self._response = Counter("lowroll_response_tokens", "tokens of responses", registry=own)
        self._answers = Counter(
            "lowroll_http_responses",
            "answers, by route and status",
            ["route", "status"],
            registry=own,
        )
        self._first = Histogram(
            "lowroll_first_token_seconds",
            "from a request to its first token",
            buckets=SECONDS,
            registry=own,
        )
        self._gap = Histogram(
            "lowroll_inter_token_seconds",
            "between two tokens of a stream",
            buckets=GAPS,
            registry=own,
        )
        self._whole = Histogram(
            "lowroll_request_seconds", "from a request to its end", buckets=SECONDS, registry=own
        )

    # -- from the engine's thread -------------------------------------------------------------------

    def first(self, flight: Flight) -> None:
        """A request has its first token."""
        flight.first_at = flight.moved_at = time.monotonic()
        self._first.observe(flight.first_at - flight.began_at)

    def moved(self, streams: Sequence[tuple[Flight, Sequence[Delta]]]) -> None:
        """Streams have moved, all by as many steps: one of them counts, so that many cost no more.
        A gap is of a token of the part that came."""
        now = time.monotonic()
        counted = False
        for flight, deltas in streams:
            if not deltas:
                continue
            if flight.first_at is None:
                self.first(flight)
                continue
            if not counted:
                tokens = max(len(delta.token_ids) for delta in deltas)
                self._gap.observe((now - flight.moved_at) / max(1, tokens))
                counted = True
            flight.moved_at = now

    def ended(self, flight: Flight, group: Group) -> None:
        """A request has its group."""
        if flight.first_at is None and any(rollout.token_ids for rollout in group.rollouts):
            self.first(flight)
        self._whole.observe(time.monotonic() - flight.began_at)
        reasons = {rollout.finish_reason for rollout in group.rollouts}
        outcome = next(one for one in ("abort", "length", "stop") if one in reasons)
        self._requests.labels(outcome).inc()
        self._prompt.inc(len(group.request.prompt_ids))
        self._response.inc(sum(len(rollout.token_ids) for rollout in group.rollouts))

    def failed(self, flight: Flight) -> None:
        """The engine failed while it worked on a request."""
        self._requests.labels("failed").inc()

    # -- from the event loop ------------------------------------------------------------------------

    def answered(self, route: str, status: int) -> None:
        """A response was begun."""
        self._answers.labels(route, str(status)).inc()

    def text(self, health: Health | None) -> bytes:
        """All of it in Prometheus' words. health: None when the engine's thread does not answer."""
        self._up.set(health is not None and health.well)
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
