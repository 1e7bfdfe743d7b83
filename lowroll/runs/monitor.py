"""The monitor of the distance between rollouts and learner, and of the settings that follow: before
the first update (`Monitor.first_look`) and after every step (`trainer.guard`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lowroll.config import RunConfig
from lowroll.config.auto import rollouts_of
from lowroll.quant import mixed
from lowroll.runs.assembly import trainer
from lowroll.trainer.guard import TIGHTENING, rescale
from lowroll.trainer.mismatch_probe import Probe

log = logging.getLogger(__name__)

# The share of tokens or sequences that an objective may silence before any update.
MOST_SILENT = 0.5
MAX_WIDENED = 4


class Monitor:
    """The guard and the first look of a run. budget: of the rollouts' format."""

    def __init__(self, cfg: RunConfig, budget: str = "") -> None:
        self.cfg = cfg
        self.guard = trainer.guard(cfg, budget)
        is_asynchronous = cfg.asynchrony.max_async_level > 0 or cfg.asynchrony.partial != "none"
        self.expects_bits = cfg.rollout.exact and not (
            is_asynchronous or rollouts_of(cfg).truncated
        )
        self.widened = 0  # doublings of the exponent
        self.on_note: Callable[[str], object] = log.info

    @property
    def weights(self) -> str:
        if self.guard is None or not self.guard.has_moved:
            return self.cfg.rollout.weights
        return self.guard.weights

    def options(self, now: RunConfig) -> dict[str, Any]:
        """Return the objective's options in a stage, after the first look and the guard."""
        options = now.objective_options
        if self.widened:
            options = rescale(options, 2.0**self.widened, self.cfg.chosen_options)
        if self.guard is not None and self.guard.tightened:
            options = rescale(options, TIGHTENING**self.guard.tightened)
        return options

    def first_look(self, first: Probe | None, now: RunConfig) -> dict[str, float]:
        """Return `spread/*` of the mismatch before the first update, and widen the thresholds."""
        if first is None:
            return {}
        for line in first.findings(self.options(now)):
            self.on_note(line)
        silent_shares = first.silent(self.options(now))
        if self.cfg.chosen_options:  # the user's own thresholds stay
            while max(silent_shares.values()) > MOST_SILENT and self.widened < MAX_WIDENED:
                self.widened += 1  # `options` doubles the exponent
                silent_shares = first.silent(self.options(now))
        self._tell_widened(self.options(now), silent_shares)
        return first.spread | silent_shares

    def _tell_widened(self, options: Mapping[str, Any], silent: Mapping[str, float]) -> None:
        if self.widened:
            widened_options = [f"{name} {options[name]:.3g}" for name in self.cfg.chosen_options]
            log.warning(
                "the mismatch silences over half of the batch: %s in the place of what auto chose",
                ", ".join(widened_options),
            )
        if max(silent.values()) > MOST_SILENT:
            log.warning(
                "correction %s silences %.0f %% of the tokens and %.0f %% of the sequences before "
                "the first update: its thresholds are narrower than the mismatch of the rollouts",
                self.cfg.correction,
                *(100 * share for share in silent.values()),
            )

    def look(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return `guard/*` of a step; decisions hold from the next one on."""
        if step == 1 and metrics.get("kv/evictions") == 0:
            policy = self.cfg.rollout.cache.policy
            self.on_note(
                f"rollout.kv: {policy} dropped no key in step 1: every prompt with its response "
                "fits in budget + buffer, as in a dense cache"
            )
        self._check_bits(step, metrics)
        if self.guard is None:
            return {}
        values, warnings = self.guard.look(metrics)
        for line in warnings:
            log.warning("guard: step %d: %s", step, line)
        return values

    def _check_bits(self, step: int, metrics: Mapping[str, float]) -> None:
        difference = metrics.get("mismatch/logp_diff_max", 0.0)
        if not (self.expects_bits and difference > 0):
            return
        self.expects_bits = False
        log.warning(
            "rollout.exact: step %d: a recorded log-prob is %.2g nats off the learner's; they were to be "
            "the same number. Do engine and learner run on one kind of processor, with the same torch?",
            step,
            difference,
        )

    def state(self) -> dict[str, Any]:
        return {"guard": self.guard and self.guard.state(), "widened": self.widened}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's bounds and format. ValueError without a guard to hold them."""
        if state["guard"]:
            self._restore_guard(state["guard"])
        self.widened = state["widened"]

    def _restore_guard(self, saved: Mapping[str, Any]) -> None:
        if self.guard is None:
            if _format_of(saved) or saved["tightened"]:
                raise ValueError(
                    f"guard: the run went on with {saved['weights']} rollouts and bounds tightened "
                    f"{saved['tightened']} times; keep a guard section (action: warn leaves it so)"
                )
            return
        self.guard.restore(saved)
        own_weights = self.cfg.rollout.weights
        if _format_of(saved) is None and saved["weights"] != own_weights:
            raise ValueError(
                f"rollout.weights: the run drew from {saved['weights']}, and would go on with "
                f"{own_weights}: another model, or rollout_weights.json was changed"
            )


def fallen_to(state: Mapping[str, Any]) -> str | None:
    """Return a checkpoint's fallback format, if any."""
    return _format_of(state.get("guard") or {})


def _format_of(guard_state: Mapping[str, Any]) -> str | None:
    if guard_state.get("formats"):
        mixed.read(guard_state["formats"])
    elif not guard_state.get("fallbacks"):
        return None
    return guard_state["weights"]
