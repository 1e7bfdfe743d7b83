"""The `buffer:` section, which prompts are learnt from, and `advantage_function:`, a file's own
advantages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, JsonValue, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.section import CUSTOM, Problem, Section, Text

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig

Reward = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


def _code(text: str) -> str:
    file, suffix, name = text.partition(".py:")
    if not (file and suffix and name.isidentifier()):
        raise PydanticCustomError(
            "code",
            "{text}",
            {"text": "must be path/to/file.py:function, a function of a file of this machine"},
        )
    return text


class BufferConfig(Section):
    """Pools by difficulty. A prompt whose group has a mean reward of `easy_threshold` or more goes
    to the easy pool, one of `hard_threshold` or less to the hard pool, and neither is drawn again;
    the fractions go back when a run is resumed."""

    seed: Seed | None = None  # of what goes back to the normal pool; null: the run's
    # groups whose rewards are all 0 or all 1 are drawn again
    online_difficulty_filtering: bool = False
    easy_threshold: Reward | None = None  # null: no easy pool
    hard_threshold: Reward | None = None  # null: no hard pool
    easy_fraction: Share = 0.0  # of the easy pool, back to normal at a resumption
    hard_fraction: Share = 0.0  # of the hard pool
    # what makes two prompts the same ("task", "prompt"); []: none is looked for
    hash_keys: Annotated[tuple[Text, ...], Strict(False)] = ()
    skip_verification: bool = False  # no response is scored, and every reward is 0


class AdvantageFunction(Section):
    """Advantages by a function of a file: f(rewards, lengths, **kwargs) of one group, as many
    numbers back."""

    import_path: Annotated[Text, AfterValidator(_code)]  # path/to/file.py:function
    kwargs: dict[str, JsonValue] = {}  # its further arguments


def buffer_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Pools that overlap, fractions of no pool, and advantages given twice."""
    buffer = cfg.buffer
    easy, hard = buffer.easy_threshold, buffer.hard_threshold
    if easy is not None and hard is not None and hard >= easy:
        yield (
            (("buffer", "hard_threshold"), ("buffer", "easy_threshold")),
            f"hard_threshold ({hard:g}) must be below easy_threshold ({easy:g})",
        )
    for pool, threshold in (("easy", easy), ("hard", hard)):
        if getattr(buffer, f"{pool}_fraction") and threshold is None:
            yield (
                (("buffer", f"{pool}_fraction"),),
                f"needs buffer.{pool}_threshold beside it: without one there is no {pool} pool",
            )
    if buffer.online_difficulty_filtering and buffer.skip_verification:
        yield (
            (("buffer", "skip_verification"), ("buffer", "online_difficulty_filtering")),
            "every reward would be 0, and online_difficulty_filtering would draw again for ever",
        )
    if cfg.samples_dynamically and buffer.skip_verification:
        yield (
            (("buffer", "skip_verification"), ("dapo", "dynamic_sampling")),
            "every reward would be 0, and dynamic sampling would drop every group; write "
            "dapo.dynamic_sampling: false",
        )
    yield from _advantage_problems(cfg)


def _advantage_problems(cfg: RunConfig) -> Iterator[Problem]:
    given = cfg.advantage_function is not None
    if given and cfg.algorithm == "ppo":
        yield (
            (("advantage_function",), ("algorithm",)),
            "ppo's advantages are its critic's; take another algorithm",
        )
    elif given and cfg.advantage not in (None, CUSTOM):
        yield (
            (("advantage",), ("advantage_function",)),
            f"{cfg.advantage} beside an advantage_function: leave one of them out",
        )
    if not given and cfg.advantage == CUSTOM:
        yield (("advantage",), ("advantage_function",)), "custom needs an advantage_function"


def buffer_notes(cfg: RunConfig) -> Iterator[str]:
    """Yield notes on settings that deserve a second look before the run."""
    if cfg.buffer.skip_verification:
        yield (
            "warning: buffer.skip_verification: no response is scored and EVERY REWARD IS 0: "
            "nothing is learnt from rewards; good for measuring speed only"
        )
    if cfg.advantage_function is not None:
        yield (
            f"advantage_function: the advantages are those of {cfg.advantage_function.import_path}, "
            "whose code runs in the orchestrator"
        )


def resolved_advantage(cfg: RunConfig, default: str) -> dict[str, Any]:
    """The advantage's name once null is filled in."""
    name = CUSTOM if cfg.advantage_function is not None else default
    return {"advantage": cfg.advantage or name}
