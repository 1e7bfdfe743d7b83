"""The trainer's and the guard's settings from the configuration."""

from __future__ import annotations

from dataclasses import replace

from lowroll.config import RunConfig
from lowroll.config.auto import rollouts_of
from lowroll.config.loss import LossConfig
from lowroll.config.rollout import NoiseConfig
from lowroll.config.train import CriticConfig, GuardConfig, TrainConfig
from lowroll.objectives.objective import select
from lowroll.quant.format_budget import parse
from lowroll.runs.assembly.settings_from_config import Mirror
from lowroll.trainer.critic import CriticSettings
from lowroll.trainer.guard import Guard, GuardSettings
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.step import LearnSettings
from lowroll.weights.exploration_noise import NoiseSchedule

_LEARN = Mirror(LearnSettings, TrainConfig, LossConfig, given=("objective", "options"))
_OPTIM = Mirror(OptimSettings, TrainConfig, given=("total_steps",))
_CRITIC = Mirror(CriticSettings, CriticConfig, TrainConfig)
_CRITIC_OPTIM = Mirror(
    OptimSettings,
    CriticConfig,
    TrainConfig,
    # A critic has a constant rate; its section's warmup_steps pause the policy.
    default=("lr_scheduler_type", "warmup_steps", "total_steps", "min_lr_ratio", "optimizer"),
)
_GUARD = Mirror(GuardSettings, GuardConfig)
_NOISE = Mirror(NoiseSchedule, NoiseConfig, given=("total_steps", "seed"))
# alarm level over the budget's KL, which was measured on other tokens
KL_ALARM_OVER_BUDGET = 2.0


def learn(cfg: RunConfig) -> LearnSettings:
    return _LEARN(
        cfg.train.sized(),
        cfg.loss,
        objective=select(cfg.algorithm, cfg.correction),
        options=cfg.objective_options,
    )


def optim(cfg: RunConfig) -> OptimSettings:
    """Return the policy's optimiser settings; its schedule begins after a critic's warm-up."""
    warmup_steps = cfg.critic.warmup_steps if cfg.has_critic else 0
    return _OPTIM(cfg.train, total_steps=cfg.train.max_steps - warmup_steps)


def critic(cfg: RunConfig) -> CriticSettings:
    return _CRITIC(cfg.critic, cfg.train.sized())


def critic_optim(cfg: RunConfig) -> OptimSettings:
    return _CRITIC_OPTIM(cfg.critic, cfg.train)


def guard(cfg: RunConfig, budget: str = "") -> Guard | None:
    """Return the mismatch guard, or None. A multiple of a budget's KL is an alarm, and the format
    is chosen again if all weights learn. Under LoRA a fallback is dense at once, since a wider
    format would only round the base again."""
    if cfg.guard is None:
        return None
    settings = _GUARD(cfg.guard)
    rollouts = rollouts_of(cfg)
    if rollouts.truncated or rollouts.noisy:  # these alone raise the KL's level
        settings = replace(settings, kl_above=None)
    budget_kl = parse(budget).max_kl if budget else None
    if budget_kl and settings.kl_above == GuardSettings.kl_above:
        settings = replace(settings, kl_above=KL_ALARM_OVER_BUDGET * budget_kl)
    # An adapter's base and an aligned learner share the engine's codes: no format is nearer.
    chooses_again = bool(budget) and not cfg.train.lora and cfg.train.forward == "dense"
    return Guard(settings, cfg.rollout.weights, cfg.train.lora, chooses_again)


def noise(cfg: RunConfig) -> NoiseSchedule | None:
    if cfg.noise is None:
        return None
    return _NOISE(cfg.noise, total_steps=cfg.train.max_steps, seed=cfg.seed)
