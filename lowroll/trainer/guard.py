"""Alarms on a step's mismatch, and the actions that follow (docs/usage.md#the-guard).

    ess           mismatch/ess below a bound
    kl            moving average of mismatch/kl_k3 above `kl_growth` times its first steps and above
                  `kl_floor`, or above `kl_above`
    rejected      correction/rejected_fraction or rejected_sequence_fraction above a bound
    ratio         mismatch/weight_max above a bound
    nonfinite     one of these is not finite, or an update was skipped

The average is m <- m + (x - m) / 10; its baseline begins again with other rollouts. After
`patience` alarmed steps in a row the action follows. A resumed run decides the same.

Under a budget (`rollout.weights: {max_kl:...}`) a KL alarm first has the formats chosen again; if
the choice is the same, the action follows, and the next choice waits twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowroll.checkpoint.store import check_pieces
from lowroll.quant.formats import get_format
from lowroll.quant.table import OWN

BASELINE = 5  # steps whose mean KL is the baseline
HORIZON = 10  # steps of the moving average
MAX_TIGHTENED = 3  # more would prevent learning
TIGHTENING = 0.5  # the power on the objective's bounds
ALARMS = ("ess", "kl", "rejected", "ratio", "nonfinite")
TOO_FAR = (
    "weights pay for that with most of the batch; let the rollouts have more bits (a wider format, or "
    "a budget: rollout.weights {max_kl: 0.02}) or a larger cache, or train LoRA on their base (train.lora), "
    "and ask lowroll diagnose for the cause"
)
STAGE = ("rollout/noise_sigma", "rollout/stage")  # a change of these restarts the KL baseline
STATE = (
    "weights",
    "formats",
    "choices",
    "wait",
    "waited",
    "tightened",
    "fallbacks",
    "streak",
    "num_seen",
    "average",
    "baseline",
    "stage",
)
WATCHED = ("mismatch/ess", "mismatch/kl_k3", "mismatch/weight_max")

# distances from 0; other bounds are ratios with neutral value 1
_DISTANCE_OPTIONS = ("eps_low", "eps_high", "eps_negative", "width")
_RATIO_OPTIONS = (
    "cap",
    "xi_cap",
    "token_rs",
    "icepop",
    "veto",
    "token_mask_low",
    "token_mask_high",
    "geo_mask_low",
    "geo_mask_high",
    "sequence_mask_low",
    "sequence_mask_high",
    "sequence_clip_high",
    "ratio_cap",
)


@dataclass(frozen=True)
class GuardSettings:
    """Settings of the `guard` section. A bound of None disables the alarm."""

    action: str = "warn"
    patience: int = 3
    ess_below: float | None = 0.3
    kl_growth: float | None = 10.0
    kl_floor: float = 2e-3
    kl_above: float | None = 0.1
    rejected_above: float | None = 0.5
    ratio_above: float | None = 1e3
    nonfinite: bool = True


class Guard:
    """The guard of a run. `weights` is the rollouts' format; with `to_dense` a fallback goes to
    dense at once. The caller applies `tightened` and `weights` to the next step, and calls `chosen`
    first if `wants_choice`."""

    def __init__(
        self,
        settings: GuardSettings,
        weights: str,
        to_dense: bool = False,
        has_budget: bool = False,
    ) -> None:
        self.settings = settings
        self.weights = weights
        self.to_dense = to_dense
        self.has_budget = has_budget
        self.wants_choice = False
        self.choices = 0
        self.wait = self.waited = 0
        self.formats: dict[str, dict[str, int]] | None = None  # as `quant.mixed.stated` returns
        self.tightened = self.fallbacks = self.streak = self.num_seen = 0
        self.average = self.baseline = 0.0
        self.stage: list[float] | None = None

    def look(self, metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """Update the alarms, act if needed, and return the `guard/*` metrics and messages. Alarms
        are reported when a streak begins and when it reaches `patience`."""
        stage = [metrics.get(name, 0.0) for name in STAGE]
        if self.stage not in (None, stage):
            self._forget()
        self.stage = stage
        alarms = self._alarms(metrics)
        self.streak = self.streak + 1 if alarms else 0
        messages: list[str] = []
        if self.streak in (1, self.settings.patience):
            messages += [f"{name}: {text}" for name, text in alarms.items()]
        if self.streak >= self.settings.patience:
            self.streak = 0
            if self._may_choose(alarms):
                self.wants_choice = True
                messages.append(
                    "the budget's formats are searched for again, for the weights as they are now"
                )
            else:
                messages += self._act()
        values = {f"guard/{name}": float(name in alarms) for name in ALARMS}
        values["guard/tightened"] = float(self.tightened)
        values["guard/fallbacks"] = float(self.fallbacks)
        if self.choices:
            values["guard/choices"] = float(self.choices)
        return values, messages

    def chosen(self, weights: str, formats: dict[str, dict[str, int]]) -> None:
        """Accept newly chosen formats for the rollouts."""
        if weights == self.weights:
            self.without_choice()
            return
        self.choices += 1
        self.weights, self.formats = weights, formats
        self.wants_choice, self.wait, self.waited = False, 0, 0
        self._forget()

    def without_choice(self) -> None:
        """Record that no other format was found, which doubles the wait for the next search."""
        self.wants_choice, self.wait, self.waited = False, 2 * self.wait + 1, 0

    @property
    def has_moved(self) -> bool:
        """True if the rollouts' format differs from the run's first."""
        return bool(self.fallbacks or self.formats)

    def _may_choose(self, alarms: Mapping[str, str]) -> bool:
        if not self.has_budget or self.fallbacks or "kl" not in alarms:
            return False
        self.waited += 1
        return self.waited > self.wait

    def state(self) -> dict[str, Any]:
        """Return JSON data for a bitwise `restore`."""
        return {name: getattr(self, name) for name in STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        check_pieces("guard state", state, self.state())
        for name in state:
            setattr(self, name, state[name])

    def _alarms(self, metrics: Mapping[str, float]) -> dict[str, str]:
        settings = self.settings
        alarms: dict[str, str] = {}
        nonfinite = [name for name in WATCHED if not math.isfinite(metrics.get(name, 0.0))]
        if metrics.get("optim/skipped", 0):
            nonfinite.append("optim/skipped")
        if settings.nonfinite and nonfinite:
            verb = "shows" if len(nonfinite) == 1 else "show"
            alarms["nonfinite"] = f"{', '.join(nonfinite)} {verb} a value that is not finite"
        ess, kl, ratio = (metrics.get(name, math.nan) for name in WATCHED)
        if settings.ess_below is not None and ess < settings.ess_below:
            alarms["ess"] = f"mismatch/ess is {ess:.6g}, below {settings.ess_below:g}"
        if settings.ratio_above is not None and ratio > settings.ratio_above:
            alarms["ratio"] = f"mismatch/weight_max is {ratio:.3g}, above {settings.ratio_above:g}"
        rejected = max(
            metrics.get(f"correction/rejected{part}_fraction", 0.0) for part in ("", "_sequence")
        )
        if settings.rejected_above is not None and rejected > settings.rejected_above:
            alarms["rejected"] = (
                f"{rejected:.0%} of the tokens or sequences are rejected, above "
                f"{settings.rejected_above:.0%}"
            )
        if not math.isfinite(kl):
            return alarms
        has_grown = self._follow(kl)
        if settings.kl_above is not None and self.average > settings.kl_above:
            alarms["kl"] = (
                f"mismatch/kl_k3 averages {self.average:.3g} nats a token, above {settings.kl_above:g}: "
                f"{TOO_FAR}"
            )
        elif has_grown:
            alarms["kl"] = (
                f"mismatch/kl_k3 averages {self.average:.3g}, over {settings.kl_growth:g} times the "
                f"{self.baseline:.3g} of its first steps"
            )
        return alarms

    def _follow(self, kl: float) -> bool:
        self.num_seen += 1
        if self.num_seen <= BASELINE:
            self.baseline += (kl - self.baseline) / self.num_seen
            self.average = self.baseline
            return False
        self.average += (kl - self.average) / HORIZON
        growth = self.settings.kl_growth
        return growth is not None and self.average > max(
            growth * self.baseline, self.settings.kl_floor
        )

    def _forget(self) -> None:
        self.num_seen, self.average, self.baseline = 0, 0.0, 0.0

    def _act(self) -> list[str]:
        if self.settings.action == "tighten":
            if self.tightened == MAX_TIGHTENED:
                return [f"tightened {MAX_TIGHTENED} times already: the bounds stay"]
            self.tightened += 1
            return [f"tightened the objective's bounds (power {TIGHTENING**self.tightened:g})"]
        if self.settings.action != "fallback":
            return []
        previous_format = self.weights
        fallback = "" if previous_format == OWN else get_format(previous_format).fallback
        if not fallback:
            return [
                f"the rollouts have {previous_format} weights already: nothing is left to fall "
                f"back to"
            ]
        self.weights = OWN if self.to_dense else fallback
        self.fallbacks += 1
        self._forget()
        return [
            f"fell back from {previous_format} to {self.weights} rollouts for the following steps"
        ]


def rescale(
    options: Mapping[str, Any], power: float, names: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a copy of the objective's options with every bound, or those of `names`, nearer to its
    neutral value (power < 1). A clip range eps, or a bound of a k2 or k3 rejection, becomes eps *
    power; a bound on a ratio becomes bound ** power."""
    changed = dict(options)
    for name in names or options:
        value = options[name]
        if value is None:
            continue
        if name == "eps_low":
            changed[name] = min(1.0, value * power)  # keeps 1 - eps_low a ratio
        elif name in _DISTANCE_OPTIONS:
            changed[name] = value * power
        elif name in _RATIO_OPTIONS:
            changed[name] = _raise_bound(value, power)
        elif name == "reject":
            changed[name] = {
                rule: _raise_bound(bound, power) if rule.endswith("k1") else bound * power
                for rule, bound in value.items()
            }
    return changed


def _raise_bound(bound: Any, power: float) -> Any:
    if isinstance(bound, (tuple, list)):
        return tuple(_raise_bound(part, power) for part in bound)
    return float(bound) ** power
