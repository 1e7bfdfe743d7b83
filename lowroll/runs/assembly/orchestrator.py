"""The orchestrator's settings from the configuration. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowroll.advantages.group import Estimator
from lowroll.config import RunConfig
from lowroll.config.data import BufferConfig, EvalConfig, FilterConfig, ScoreConfig
from lowroll.config.processes import AsynchronyConfig
from lowroll.config.rollout import RolloutConfig
from lowroll.config.train import DapoConfig
from lowroll.orchestrator.filters import Filter, Gibberish, Repetition
from lowroll.orchestrator.settings import SamplingSettings, Settings
from lowroll.orchestrator.temperature import TemperatureSchedule
from lowroll.runs.assembly import prompts
from lowroll.runs.assembly.settings_from_config import Mirror

if TYPE_CHECKING:
    from lowroll.model.spec import ModelSpec

_SAMPLING = Mirror(SamplingSettings, RolloutConfig, given=("stop_strings",), default=("stop_ids",))
_EVAL_SAMPLING = Mirror(
    SamplingSettings,
    EvalConfig,
    given=("max_tokens", "stop_strings"),
    default=("min_tokens", "stop_ids"),
)
_SETTINGS = Mirror(
    Settings,
    RunConfig,
    DapoConfig,
    ScoreConfig,
    AsynchronyConfig,
    BufferConfig,
    given=(
        "sampling",
        "sampling_seed",
        "temperature_schedule",
        "env_weights",
        "advantage",
        "estimator",
        "max_prompt_tokens",
        "max_sequence_tokens",
        "dynamic_sampling",
        "filters",
        "max_async_level",
        "buffer_seed",
        "max_steps",
    ),
    default=("error_window", "canary_interval", "stall_s"),
)
_GIBBERISH = Mirror(Gibberish, FilterConfig, given=("vocab_size",))
_REPETITION = Mirror(Repetition, FilterConfig)


def sampling(cfg: RunConfig) -> SamplingSettings:
    return _SAMPLING(cfg.rollout, stop_strings=cfg.rollout.stop)


def eval_sampling(cfg: RunConfig) -> SamplingSettings:
    return _EVAL_SAMPLING(
        cfg.eval, max_tokens=cfg.rollout.max_tokens, stop_strings=cfg.rollout.stop
    )


def estimator(cfg: RunConfig) -> Estimator | None:
    """Load the run's own advantage function, which executes its file, or None."""
    function_cfg = cfg.advantage_function
    if function_cfg is None:
        return None
    from lowroll.advantages import custom  # imported only for such a run

    return custom.load(function_cfg.import_path, function_cfg.kwargs)


def settings(
    cfg: RunConfig, spec: ModelSpec, alone: bool = True, own: Estimator | None = None
) -> Settings:
    """Return the settings of the first stage. alone: in the learner's process, at async level 0.
    own: the run's `estimator`."""
    return _SETTINGS(
        cfg,
        cfg.dapo,
        cfg.score,
        cfg.asynchrony,
        cfg.buffer,
        sampling=sampling(cfg),
        sampling_seed=cfg.rollout.seed,
        temperature_schedule=_temperature_schedule(cfg),
        env_weights={env.name or env.id: env.weight for env in cfg.env},
        advantage=cfg.advantage or "grpo",
        estimator=own,
        max_prompt_tokens=prompts.longest(cfg, spec),
        max_sequence_tokens=prompts.sequence(cfg, spec),
        dynamic_sampling=bool(cfg.dapo.dynamic_sampling),
        filters=tuple(_make_filter(section, spec.vocab_size) for section in cfg.filters),
        max_async_level=0 if alone else cfg.asynchrony.max_async_level,
        buffer_seed=cfg.buffer.seed,
        max_steps=cfg.train.max_steps,
    )


def _temperature_schedule(cfg: RunConfig) -> TemperatureSchedule | None:
    schedule = cfg.rollout.temp_scheduler
    if schedule is None:
        return None
    return TemperatureSchedule(
        schedule.start_temperature, schedule.end_temperature, cfg.train.max_steps, schedule.type
    )


def _make_filter(section: FilterConfig, vocab_size: int) -> Filter:
    if section.type == "gibberish":
        return _GIBBERISH(section, vocab_size=vocab_size)
    return _REPETITION(section)
