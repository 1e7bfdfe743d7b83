"""What the sections of a configuration share: the strict model, the plain types, and validators
that refuse by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from lowroll.advantages import TABLE as ESTIMATORS
from lowroll.config.document import Path
from lowroll.objectives.table import ALGORITHMS, CORRECTIONS
from lowroll.quant.table import FORMATS, OWN, is_dense, large_batch
from lowroll.types import MAX_SAMPLES, PENALTIES, TEMPERATURES

# the keys it concerns, the one to blame first; what is wrong
Problem = tuple[tuple[Path, ...], str]

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
# of learning: a larger one leaves float32 within a step
Rate = Annotated[float, Field(gt=0, le=10)]
NotNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
GroupSize = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
Temperature = Annotated[float, Field(ge=TEMPERATURES[0], le=TEMPERATURES[1])]
Penalty = Annotated[float, Field(ge=PENALTIES[0], le=PENALTIES[1])]
Text = Annotated[str, Field(min_length=1)]
Schedule = Literal["constant", "linear", "cosine"]


def one_of(names: Callable[[], Iterable[str]]) -> PlainValidator:
    """A validator of one word: those of a table, as it is when a file is read."""

    def check(value: Any) -> Any:
        known = list(names())
        if value not in known:
            *most, last = [repr(name) for name in known]
            expected = f"{', '.join(most)} or {last}" if most else last
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value

    return PlainValidator(check)


Algorithm = Annotated[str, one_of(lambda: ALGORITHMS)]
Correction = Annotated[str, one_of(lambda: ("auto", *CORRECTIONS))]
CUSTOM = "custom"  # the advantage of a run with an advantage_function
Advantage = Annotated[str, one_of(lambda: (*ESTIMATORS, CUSTOM))]
Weights = Annotated[str, one_of(lambda: sorted((OWN, *FORMATS), key=is_dense))]
LargeBatchWeights = Annotated[str, one_of(lambda: sorted(large_batch(), key=is_dense))]


def only(*neutral: Any, why: str = "not available yet") -> AfterValidator:
    """A validator that accepts the neutral values alone."""

    def check(value: Any) -> Any:
        if not any(value == choice and type(value) is type(choice) for choice in neutral):
            shown = yaml.safe_dump(_plain(neutral[0]), default_flow_style=True).split("\n")[0]
            raise PydanticCustomError(
                "not_available", "{text}", {"text": f"{why}; only {shown} works"}
            )
        return value

    return AfterValidator(check)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def as_list(value: Any) -> Any:
    """A single section stands for a list of one."""
    return [value] if isinstance(value, dict) else value


class Section(BaseModel):
    """A mapping of the YAML file: strict, closed and frozen."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    @classmethod
    def table_keys(cls) -> list[str]:
        """Keys that a table of another room has, beside the fields."""
        return []
