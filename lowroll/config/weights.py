"""`rollout.weights`: the name of a format, or a budget in its place.

    weights: int8
    weights: stored               the codes that the folder of the model holds, one format or several
    weights: {max_kl: 0.02}
    weights: max_kl=0.02          the same in one word, as the command line has it

A budget is kept as its text (`quant.budget`), in which it travels like a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, GetCoreSchemaHandler, Strict, model_validator
from pydantic_core import PydanticCustomError, core_schema

from lowroll.config.section import Count, NotNegative, Positive, Problem, Section, known
from lowroll.quant import budget
from lowroll.quant.budget import Budget, is_budget
from lowroll.quant.table import FORMATS, OWN, STORED, is_dense


class WeightBudget(Section):
    """The limits on the linear weights of the rollouts; each layer gets a format."""

    max_kl: NotNegative | None = None  # of the dense model to them, in nats a token, measured
    max_bits: Positive | None = None  # a weight, with scales; the mean over the linear layers
    max_bytes: Count | None = None  # of all linear layers, with scales
    # that layers may have, the smallest that a layer can hold first; null: 4, 8 and 16 bits
    formats: Annotated[tuple[str, ...], Strict(False), Field(min_length=1)] | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.max_kl, self.max_bits, self.max_bytes, self.formats or ())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, why in self.budget.problems():
            raise PydanticCustomError("budget", "{text}", {"text": f"{key}: {why}"})
        return self


class FormatOrBudget:
    """A validator of a format's name or a budget; the value is text."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        section = core_schema.no_info_after_validator_function(
            lambda found: str(found.budget), handler.generate_schema(WeightBudget)
        )
        return core_schema.no_info_wrap_validator_function(
            _check, section, serialization=core_schema.to_string_ser_schema()
        )


def _check(value: Any, as_section: core_schema.ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, dict | WeightBudget):
        return as_section(value)
    if not is_budget(value):
        return known(value, sorted((OWN, *FORMATS, STORED), key=is_dense))
    try:
        return str(budget.parse(value))
    except ValueError as error:
        raise PydanticCustomError("budget", "{text}", {"text": str(error)}) from None


Weights = Annotated[str, FormatOrBudget()]


def budget_problems(
    weights: str, engine: str, large_batch_weights: str | None
) -> Iterator[Problem]:
    """Yield the settings that a budget, or the formats a folder stores, cannot be combined with."""
    if not (is_budget(weights) or weights == STORED):
        return
    where = ("rollout", "weights")
    if engine != "native":
        yield (
            (where, ("rollout", "engine")),
            f"each layer may have a format of its own, which is for lowroll's own engine; with {engine} "
            "write a format",
        )
    if large_batch_weights is not None:
        yield (
            (where, ("rollout", "large_batch_weights")),
            "each layer has one format, and a second one beside it has none; write a format, or "
            "large_batch_weights: null",
        )
