"""The `critic:` section: PPO's second model. Names and defaults of the program's own are those of
`trainer.critic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from lowroll.config.section import NotNegative, Positive, Problem, Rate, Section, Text
from lowroll.objectives.table import ALGORITHMS

Share = Annotated[float, Field(ge=0, le=1)]


class CriticConfig(Section):
    """PPO's critic: it predicts the reward, learns in full at a constant rate, and stays in the
    checkpoints."""

    model: Text | None = None  # a folder or a hub id of the same tokenizer; null: the run's
    learning_rate: Rate = 1e-5  # of its optimiser
    weight_decay: NotNegative = 0.01  # of its optimiser
    max_grad_norm: Positive = 1.0  # longer gradients are cut to this length
    value_clip: Positive | None = 0.5  # how far a value may move in a step; null: no clip
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # first steps, in which only the critic learns
    gamma: Share = 1.0  # discount a token
    lam: Share = 1.0  # of GAE: 1 trusts the rewards, 0 the values
    whiten: bool = True  # advantages of mean 0 and variance 1 over the batch


def critic_problems(
    algorithm: str,
    advantage: str | None,
    dynamic_sampling: bool | None,
    critic: CriticConfig,
    max_steps: int,
) -> Iterator[Problem]:
    """Settings that have no meaning with a critic, or without one."""
    if not ALGORITHMS[algorithm].has_critic:
        if advantage == "gae":
            yield (("advantage",), ("algorithm",)), "gae needs a critic; write algorithm: ppo"
        return
    if advantage not in (None, "gae"):
        yield (
            (("advantage",), ("algorithm",)),
            f"{advantage} compares the rollouts of a prompt, and ppo's advantages are its "
            f"critic's; write null",
        )
    if dynamic_sampling:
        yield (
            (("dapo", "dynamic_sampling"), ("algorithm",)),
            "ppo learns from groups whose rewards are all equal too; write false or null",
        )
    if critic.warmup_steps >= max_steps:
        yield (
            (("critic", "warmup_steps"), ("train", "max_steps")),
            f"critic.warmup_steps ({critic.warmup_steps}) leaves none of the {max_steps} steps to "
            f"the policy",
        )


def critic_notes(algorithm: str, critic: CriticConfig) -> Iterator[str]:
    """Warn of a changed section that has no effect."""
    if not ALGORITHMS[algorithm].has_critic and critic != CriticConfig():
        yield f"critic: no effect, the algorithm is {algorithm}"
