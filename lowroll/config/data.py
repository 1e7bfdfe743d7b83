"""The `data:` section with `reward_funcs:` and `reward_weights:`, the short form of an environment
whose id is `data`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, Strict

from lowroll.config.env import EnvConfig
from lowroll.config.section import Count, Problem, Section, Text

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig

ID = "data"


class DataConfig(Section):
    """Rows of a data set as prompts: a file (JSON lines, JSON, CSV, parquet; also a pattern of
    files), a folder, or a hub id. A path alone is `data: {path: ...}`."""

    path: Text  # a file, folder or hub id
    split: Text = "train"  # that is trained on; a file is one split
    subset: Text | None = None  # the configuration of a hub's data set, such as main
    revision: Text | None = None  # its branch, tag or commit
    streaming: bool = False  # rows of the hub are read as they come, and no copy is kept
    rows: Count | None = None  # the first so many; null: all
    test_path: Text | None = None  # what is evaluated on; null: the test split of `path`
    test_split: Text | None = None  # null: test, or else validation
    # the share of the rows that is evaluated on, where there is no test split; 0: none
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    prompt: Text | None = None  # the column of the prompt; null: found by its name
    answer: Text | None = None  # of the gold answer, as in reward_model.ground_truth
    completion: Text | None = None  # of the demonstration, for lowroll sft
    system: Text | None = None  # a system message before prompts that have none
    template: Text = "{text}"  # around the prompt


def _with_path(value: Any) -> Any:
    """A path alone stands for the section."""
    return {"path": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


DataSection = Annotated[DataConfig, BeforeValidator(_with_path)]
RewardFunctions = Annotated[tuple[Text, ...], Strict(False), BeforeValidator(_listed)]
RewardWeights = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Strict(False), Field(min_length=1)
]


def data_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Data beside environments, functions without data, weights of other functions."""
    if cfg.data is not None and cfg.is_env_given:
        yield (
            (("data",), ("env",)),
            "is an environment of its own; to mix it with others write env: [{id: data, args: "
            "{path: ..., reward_funcs: [...]}}, ...]",
        )
    for key in ("reward_funcs", "reward_weights"):
        if cfg.data is None and getattr(cfg, key):
            yield (((key,),), "needs data beside it; of an env they stand among its args")
    if cfg.data is not None and cfg.reward_weights is not None:
        functions = len(cfg.reward_funcs) or 1
        if len(cfg.reward_weights) != functions:
            yield (
                (("reward_weights",), ("reward_funcs",)),
                f"{len(cfg.reward_weights)} weights for {functions} functions; give each its own",
            )


def environments(cfg: RunConfig) -> tuple[EnvConfig, ...]:
    """The run's environments, `data` among them."""
    if cfg.data is None:
        return cfg.env
    args = cfg.data.model_dump(mode="json", exclude_defaults=True)
    if cfg.reward_funcs:
        args["reward_funcs"] = list(cfg.reward_funcs)
    if cfg.reward_weights is not None:
        args["reward_weights"] = list(cfg.reward_weights)
    return (EnvConfig(id=ID, args=args),)
