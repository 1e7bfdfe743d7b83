"""The `env:` and `eval:` sections: where prompts come from, and how a policy is measured on those
held out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.document import Path
from lowroll.config.section import (
    Count,
    GroupSize,
    Penalty,
    Positive,
    Probability,
    Problem,
    Section,
    Text,
    as_list,
)
from lowroll.types import TEMPERATURES


def _is_variable(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:  # not shown: it may be a value
        raise PydanticCustomError(
            "no_variable", "must be the name of an environment variable, not its value"
        )
    return name


ENDLESS = 64  # examples of a split without an end, where all are asked for
Variable = Annotated[str, AfterValidator(_is_variable)]


class EnvConfig(Section):
    """One environment. `name` labels its metrics (default: its id, without the folders of an
    absolute path); `weight` is its share of the prompts. `pass_env` names environment variables
    that the scoring workers see."""

    id: Text  # one that comes along, path/to/file.py, or reasoning-gym/<generator>
    name: Text | None = None  # what its metrics are called; null: its id
    args: dict[str, JsonValue] = {}  # its own arguments
    weight: Positive = 1.0  # its share of the prompts
    # environment variables that its scorer sees
    pass_env: Annotated[tuple[Variable, ...], Strict(False)] = ()


def _listed(value: Any) -> Any:
    """A single section stands for a list of one; a bare id is answered with the section that was
    meant."""
    if isinstance(value, str):
        ids = [value]
    elif isinstance(value, list):
        ids = [one for one in value if isinstance(one, str)]
    else:
        ids = []
    if ids:
        meant = ", ".join(f"{{id: {one}}}" for one in ids)
        raise PydanticCustomError(
            "bare_ids", "{text}", {"text": f"an environment is a section: write [{meant}]"}
        )
    return as_list(value)


Environments = Annotated[
    tuple[EnvConfig, ...], Strict(False), BeforeValidator(_listed), Field(min_length=1)
]


def _greedy_or_drawn(value: float) -> float:
    low, high = TEMPERATURES
    if value != 0 and not low <= value <= high:
        raise PydanticCustomError(
            "temperature",
            "{text}",
            {"text": f"must be 0 (greedy) or from {low:g} to {high:g}, got {value:g}"},
        )
    return value


class EvalConfig(Section):
    """Evaluation on the test split every `interval` steps, before the first and after the last one
    (null: only when asked). `env` null: the training ones.

    It has a sampler of its own: nothing of `rollout` but max_tokens and the stop strings reaches
    it. Before the first and after the last step the same prompts are drawn once more, as the
    rollouts are.
    """

    interval: Count | None = None  # steps between two; null: only when asked
    num_examples: Count | None = 64  # null: all of a split that ends, and 64 of one that does not
    rollouts_per_example: GroupSize = 1  # responses to each
    temperature: Annotated[float, AfterValidator(_greedy_or_drawn)] = 0.0  # 0 is greedy
    top_p: Probability = 1.0  # as rollout.top_p
    top_k: Annotated[int, Field(ge=0)] = 0  # 0 is off
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0  # as rollout.min_p
    repetition_penalty: Penalty = 1.0  # as rollout.repetition_penalty
    env: Environments | None = None
    eval_base_model: bool = True  # evaluate before the first step, too
    skip_eval_on_resume: bool = True  # a resumed run evaluates when it is due, and not at once
    # requests in flight are aborted for an evaluation, and made again after it
    cancel_inflight_rollouts_on_eval: bool = False

    @property
    def most(self) -> str:
        """ "at most 1,024", "all"."""
        return "all" if self.num_examples is None else f"at most {self.num_examples:,}"

    def count(self, size: int | None) -> int:
        """Examples of a split of `size` tasks; None: one without an end."""
        if self.num_examples is None:
            return ENDLESS if size is None else size
        return self.num_examples if size is None else min(self.num_examples, size)


def named(env: EnvConfig) -> EnvConfig:
    """The environment with its default name filled in."""
    return env if env.name is not None else env.model_copy(update={"name": default_name(env)})


def default_name(env: EnvConfig) -> str:
    """The name, or the id; of a file with an absolute path its last part, since metrics are named
    by it."""
    return env.name or (PurePath(env.id).name if PurePath(env.id).is_absolute() else env.id)


def env_problems(env: tuple[EnvConfig, ...], held_out: EvalConfig) -> Iterator[Problem]:
    """Two environments of one name."""
    places: tuple[tuple[Path, tuple[EnvConfig, ...]], ...] = (
        (("env",), env),
        (("eval", "env"), held_out.env or ()),
    )
    for path, envs in places:
        seen: set[str] = set()
        for index, one in enumerate(envs):
            name = default_name(one)
            if name in seen:
                yield (
                    ((*path, index, "name"), (*path, index, "id")),
                    f"two environments are called {name!r}; give one another name",
                )
            seen.add(name)


def eval_notes(held_out: EvalConfig) -> Iterator[str]:
    """Filters that a greedy evaluation does not ask."""
    if held_out.temperature == 0 and (held_out.top_p, held_out.top_k, held_out.min_p) != (
        1.0,
        0,
        0.0,
    ):
        yield "eval.top_p, top_k, min_p: no effect at eval.temperature 0, which is greedy"
