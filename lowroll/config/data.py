"""The sections of prompts and rewards: `env:`, `data:`, `eval:`, `score:`, `filters:`, `buffer:`
and `advantage_function:`.

`data:`, `reward_funcs:`, `reward_weights:` are the short form of an environment whose id is `data`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.document import Path
from lowroll.config.section import (
    Count,
    GroupSize,
    NotNegative,
    Penalty,
    Positive,
    Probability,
    Problem,
    Section,
    Seed,
    Share,
    Text,
    Variable,
    Whole,
    as_list,
)
from lowroll.types import TEMPERATURES

ENDLESS = 64  # examples of an endless split when all are requested


class EnvConfig(Section):
    """One environment. Its default name omits the folders of an absolute path."""

    id: Text  # one of lowroll's, path/to/file.py, or reasoning-gym/<generator>
    name: Text | None = None  # label of its metrics; null: its id
    args: dict[str, JsonValue] = {}  # its own arguments
    weight: Positive = 1.0  # its share of the prompts
    # environment variables that its scorer sees
    pass_env: Annotated[tuple[Variable, ...], Strict(False)] = ()


def _as_environment_list(value: Any) -> Any:
    if isinstance(value, str):
        ids = [value]
    elif isinstance(value, list):
        ids = [item for item in value if isinstance(item, str)]
    else:
        ids = []
    if ids:
        suggestion = ", ".join(f"{{id: {item}}}" for item in ids)
        raise PydanticCustomError(
            "bare_ids", "{text}", {"text": f"an environment is a section: write [{suggestion}]"}
        )
    return as_list(value)


Environments = Annotated[
    tuple[EnvConfig, ...], Strict(False), BeforeValidator(_as_environment_list), Field(min_length=1)
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
    """Evaluation on the test split before the first step, every `interval` steps and after the
    last. `env` null: the training ones.

    Of `rollout` it uses only max_tokens and the stop strings. Before the first and after the last
    step the same prompts are also drawn as rollouts.
    """

    interval: Count | None = None  # steps between evaluations; null: only on request
    num_examples: Count | None = 64  # null: all of a finite split, 64 of an endless one
    rollouts_per_example: GroupSize = 1  # responses to each
    temperature: Annotated[float, AfterValidator(_greedy_or_drawn)] = 0.0  # 0 is greedy
    top_p: Probability = 1.0  # as rollout.top_p
    top_k: Whole = 0  # 0 is off
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0  # as rollout.min_p
    repetition_penalty: Penalty = 1.0  # as rollout.repetition_penalty
    env: Environments | None = None
    eval_base_model: bool = True  # evaluate also before the first step
    skip_eval_on_resume: bool = True  # a resumed run evaluates only when due
    # abort requests in flight for an evaluation, and repeat them after it
    cancel_inflight_rollouts_on_eval: bool = False

    @property
    def most(self) -> str:
        """Describe the number of examples: "at most 1,024", "all"."""
        return "all" if self.num_examples is None else f"at most {self.num_examples:,}"

    def count(self, size: int | None) -> int:
        """Return the number of examples of a split of `size` tasks; None is endless."""
        if self.num_examples is None:
            return ENDLESS if size is None else size
        return self.num_examples if size is None else min(self.num_examples, size)


def named(env: EnvConfig) -> EnvConfig:
    """Fill in an environment's default name."""
    return env if env.name is not None else env.model_copy(update={"name": default_name(env)})


def default_name(env: EnvConfig) -> str:
    """Return the environment's name, else its id; of an absolute path only the last part, because
    metrics use it."""
    if env.name:
        return env.name
    path = PurePath(env.id)
    return path.name if path.is_absolute() else env.id


def env_problems(env: tuple[EnvConfig, ...], held_out: EvalConfig) -> Iterator[Problem]:
    """Yield environments with the same name."""
    env_sections: tuple[tuple[Path, tuple[EnvConfig, ...]], ...] = (
        (("env",), env),
        (("eval", "env"), held_out.env or ()),
    )
    for path, envs in env_sections:
        seen_names: set[str] = set()
        for index, env_cfg in enumerate(envs):
            name = default_name(env_cfg)
            if name in seen_names:
                yield (
                    ((*path, index, "name"), (*path, index, "id")),
                    f"two environments are called {name!r}; give one another name",
                )
            seen_names.add(name)


class DataConfig(Section):
    """Rows of a data set as prompts: a file (JSON lines, JSON, CSV, parquet; also a pattern of
    files), a folder, or a hub id. A path alone is `data: {path: ...}`."""

    path: Text  # a file, folder or hub id
    split: Text = "train"  # split for training; a file is one split
    subset: Text | None = None  # configuration of a hub's data set, such as main
    revision: Text | None = None  # its branch, tag or commit
    streaming: bool = False  # read rows of the hub without a copy
    rows: Count | None = None  # how many of the first rows; null: all
    test_path: Text | None = None  # for evaluation; null: the test split of `path`
    test_split: Text | None = None  # null: test, or else validation
    # share of rows for evaluation, without a test split; 0: none
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    prompt: Text | None = None  # column of the prompt; null: found by its name
    answer: Text | None = None  # of the gold answer, as in reward_model.ground_truth
    completion: Text | None = None  # of the demonstration, for lowroll sft
    system: Text | None = None  # system message before prompts without one
    template: Text = "{text}"  # around the prompt


def _as_data_section(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def _as_name_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


DataSection = Annotated[DataConfig, BeforeValidator(_as_data_section)]


RewardFunctions = Annotated[tuple[Text, ...], Strict(False), BeforeValidator(_as_name_list)]


RewardWeights = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Strict(False), Field(min_length=1)
]


class ScoreConfig(Section):
    """The scoring workers."""

    workers: Count = 2  # scoring processes
    time_limit: Positive = 10.0  # seconds a response
    memory_limit_mb: Count = 2048  # of a worker
    # share of failed scores that stops the run, judged from 50 scores on
    max_error_rate: Annotated[float, Field(ge=0, lt=1)] = 0.05


class FilterConfig(Section):
    """A flag on degenerate rollouts in the metrics; `enforce` also removes them from the loss,
    while their reward stays."""

    type: Literal["gibberish", "repetition"]  # what is flagged: rare tokens, or a loop
    enforce: bool = False  # remove flagged rollouts from the loss
    # gibberish: higher ids are rare tokens
    token_id_threshold: Whole = 100_000
    logprob_offset: NotNegative = 2.0  # gibberish: nats below the uniform log-prob
    window: Count = 3000  # repetition: consecutive near-certain tokens
    prob_threshold: Probability = 0.99  # repetition: what near-certain means


Reward = Annotated[float, Field(allow_inf_nan=False)]


class BufferConfig(Section):
    """Pools by difficulty. A prompt whose group has a mean reward of `easy_threshold` or more goes
    to the easy pool, one of `hard_threshold` or less to the hard pool, and neither is drawn again
    until a resumed run returns the fractions."""

    seed: Seed | None = None  # for what returns to the normal pool; null: the run's
    # draw again groups whose rewards are all 0 or all 1
    online_difficulty_filtering: bool = False
    easy_threshold: Reward | None = None  # null: no easy pool
    hard_threshold: Reward | None = None  # null: no hard pool
    easy_fraction: Share = 0.0  # share of the easy pool that a resumption returns
    hard_fraction: Share = 0.0  # of the hard pool
    # identity of a prompt ("task", "prompt"); []: no check for duplicates
    hash_keys: Annotated[tuple[Text, ...], Strict(False)] = ()
    skip_verification: bool = False  # no scoring: every reward is 0


def _code(text: str) -> str:
    file, separator, function_name = text.partition(".py:")
    if not (file and separator and function_name.isidentifier()):
        raise PydanticCustomError(
            "code",
            "{text}",
            {"text": "must be path/to/file.py:function, a function of a file of this machine"},
        )
    return text


class AdvantageFunction(Section):
    """Advantages by a function of a file: f(rewards, lengths, **kwargs) of a group returns as many
    numbers."""

    import_path: Annotated[Text, AfterValidator(_code)]  # path/to/file.py:function
    kwargs: dict[str, JsonValue] = {}  # its further arguments
