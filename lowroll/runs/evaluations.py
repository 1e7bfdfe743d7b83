"""Evaluation of a run's policy on held-out prompts. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lowroll.config import RunConfig
from lowroll.envs import Environment
from lowroll.orchestrator.conversations import Conversations
from lowroll.orchestrator.evaluate import evaluate as evaluate_env
from lowroll.orchestrator.interfaces import EngineClient, Judge, PhaseProgress, Tokenizer
from lowroll.orchestrator.settings import SamplingSettings
from lowroll.runs.assembly import orchestrator, prompts

if TYPE_CHECKING:
    from lowroll.model.spec import ModelSpec

log = logging.getLogger(__name__)

COMPARED = ("reward", "pass_at_1")


class EvaluationEngine(EngineClient, Protocol):
    def without_noise(self, version: int) -> AbstractContextManager[None]:
        """Draw without noise in the block; restore the engine's exact bits after it."""
        ...


class Evaluations:
    """`eval/*` of a run's policy on the test splits, without noise."""

    def __init__(
        self,
        cfg: RunConfig,
        spec: ModelSpec,
        rollouts: EvaluationEngine,
        envs: Mapping[str, Environment],
        scorer: Judge,
        chat: Tokenizer,
    ) -> None:
        self.cfg = cfg.eval
        self.interval = cfg.eval.interval
        self._resumed_step: int | None = None
        self.last = cfg.train.max_steps
        self.spec = spec
        self.rollouts = rollouts
        self.envs = envs
        self.scorer = scorer
        self.chat = chat
        self.on_note: Callable[[str], object] = log.info
        self.on_phase: PhaseProgress | None = None

    def due_before(self, step: int) -> bool:
        """Return whether the initial or resumed policy is evaluated before this step."""
        is_initial = step == 1 and self.cfg.eval_base_model
        return bool(self.interval) and (is_initial or step == self._resumed_step)

    def due(self, step: int) -> bool:
        return self.interval is not None and (step == self.last or step % self.interval == 0)

    def resumed(self, step: int) -> None:
        """Have a resumed run evaluate before its next step, unless the settings skip that."""
        self._resumed_step = None if self.cfg.skip_eval_on_resume else step

    def before(self, step: int, now: RunConfig, version: int) -> dict[str, float]:
        self.on_note(
            f"evaluating the policy before step {step} (eval.interval: null leaves evaluations out)"
        )
        return self._measure(now, version, sampled=True, next_step=step)

    def after(self, step: int, now: RunConfig, version: int) -> dict[str, float]:
        return self._measure(now, version, sampled=step == self.last, next_step=step + 1)

    def _measure(
        self, now: RunConfig, version: int, sampled: bool, next_step: int
    ) -> dict[str, float]:
        began = time.monotonic()
        own = orchestrator.eval_sampling(now)
        as_rollouts = orchestrator.sampling(now)
        metrics = {"eval/temperature": own.temperature}
        with self.rollouts.without_noise(version):
            for env in self.envs.values():
                env_metrics = self._measure_env(env, now, own, next_step)
                metrics |= env_metrics
                if sampled:
                    if as_rollouts != own:  # equal ones are drawn once
                        env_metrics = self._measure_env(env, now, as_rollouts, next_step)
                    metrics |= _as_sampled(env.name, env_metrics)
        return metrics | {"time/eval": time.monotonic() - began}

    def _measure_env(
        self, env: Environment, now: RunConfig, sampling: SamplingSettings, next_step: int
    ) -> dict[str, float]:
        return evaluate_env(
            env,
            Conversations(self.rollouts, self.scorer, self.chat),
            self.scorer,
            self.chat,
            num_examples=now.eval.count(env.size("test")),
            rollouts_per_example=now.eval.rollouts_per_example,
            sampling=sampling,
            seed=now.seed,
            max_prompt_tokens=prompts.longest(now, self.spec),
            max_sequence_tokens=prompts.sequence(now, self.spec),
            max_error_rate=now.score.max_error_rate,
            step=next_step,
            max_steps=now.train.max_steps,
            on_phase=self.on_phase and partial(_report_phase, self.on_phase),
        )


def _as_sampled(env: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        f"eval/{env}/sampled_{name}": metrics[f"eval/{env}/{name}"]
        for name in COMPARED
        if f"eval/{env}/{name}" in metrics
    }


def around(first: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    """Merge the metrics of a step's two evaluations; compared ones of `first` are named
    `<name>_before`."""
    compared_endings = tuple(f"{separator}{name}" for separator in "/_" for name in COMPARED)
    metrics = {
        f"{name}_before": value for name, value in first.items() if name.endswith(compared_endings)
    }
    if first:
        metrics["eval/temperature"] = first["eval/temperature"]
    metrics |= then
    if first or then:
        metrics["time/eval"] = sum(values["time/eval"] for values in (first, then) if values)
    return metrics


def _report_phase(on_phase: PhaseProgress, phase: str, done: int, total: int) -> None:
    on_phase(f"evaluate: {phase}", done, total)
