"""The common parts of the sections: the strict model, plain types, and validators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    Strict,
)
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from lowroll.advantages import TABLE as ESTIMATORS
from lowroll.config.document import Path
from lowroll.objectives.table import ALGORITHMS, CORRECTIONS
from lowroll.quant.table import is_dense, large_batch
from lowroll.tool_calls import FORMATS as TOOL_FORMATS
from lowroll.types import HUB_NAME, MAX_SAMPLES, PENALTIES, TEMPERATURES

# the keys concerned, the main one first; the message
Problem = tuple[tuple[Path, ...], str]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
# a larger one leaves float32 within a step
Rate = Annotated[float, Field(gt=0, le=10)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
GroupSize = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Temperature = Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])]
Penalty = Annotated[float, Field(ge=PENALTIES[0], le=PENALTIES[1])]
Text = Annotated[str, Field(min_length=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Schedule = Literal["constant", "linear", "cosine"]
HubName = Annotated[str, Field(pattern=HUB_NAME)]


def _check_variable_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:  # not shown: it may be a secret value
        raise PydanticCustomError(
            "no_variable", "must be the name of an environment variable, not its value"
        )
    return name


Variable = Annotated[str, AfterValidator(_check_variable_name)]


def unique(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return the items; a validation error for duplicates."""
    if len(set(items)) != len(items):
        raise PydanticCustomError("duplicates", "the same entry stands twice")
    return items


Tracker = Literal["wandb", "tensorboard", "trackio", "mlflow"]
Trackers = Annotated[tuple[Tracker, ...], Strict(False), AfterValidator(unique)]


def one_of(names: Callable[[], Iterable[str]]) -> PlainValidator:
    """Return a validator of the words of a table, read at validation time."""

    return PlainValidator(lambda value: known(value, names()))


def known(value: Any, names: Iterable[str]) -> Any:
    """Return the value; a validation error unless it is a name."""
    if value not in (known_names := list(names)):
        *first_choices, last_choice = [repr(name) for name in known_names]
        expected = f"{', '.join(first_choices)} or {last_choice}" if first_choices else last_choice
        raise PydanticKnownError("literal_error", {"expected": expected})
    return value


Algorithm = Annotated[str, one_of(lambda: ALGORITHMS)]
Correction = Annotated[str, one_of(lambda: ("auto", *CORRECTIONS))]
CUSTOM = "custom"  # of a run with an advantage_function
Advantage = Annotated[str, one_of(lambda: (*ESTIMATORS, CUSTOM))]
ToolFormat = Annotated[str, one_of(lambda: TOOL_FORMATS)]
LargeBatchWeights = Annotated[str, one_of(lambda: sorted(large_batch(), key=is_dense))]


@dataclass(frozen=True)
class AllowOnly:
    """A validator that accepts only the neutral values, and gives a reason."""

    neutral: tuple[Any, ...]
    why: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    @property
    def words(self) -> str:
        """Format the accepted value: "true", "[]"."""
        value = self.neutral[0]
        yaml_value = list(value) if isinstance(value, tuple) else value
        return str(yaml.safe_dump(yaml_value, default_flow_style=True)).split("\n")[0]

    def _check(self, value: Any) -> Any:
        if not any(
            value == neutral_value and type(value) is type(neutral_value)
            for neutral_value in self.neutral
        ):
            raise PydanticCustomError(
                "not_available", "{text}", {"text": f"{self.why}; only {self.words} works"}
            )
        return value


def only(*neutral: Any, why: str) -> AllowOnly:
    """Accept only the neutral values."""
    return AllowOnly(neutral, why)


def as_list(value: Any) -> Any:
    """Wrap a single section in a list."""
    return [value] if isinstance(value, dict) else value


class Section(BaseModel):
    """A mapping of the YAML file: strict, closed and frozen."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @classmethod
    def table_keys(cls) -> list[str]:
        """Return further keys from another package's table."""
        return []
