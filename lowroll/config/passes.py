"""The sizes of a learner's passes, where the file leaves them open (`runs.memory.sizes` makes them
smaller on a CPU)."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field

from lowroll.config.section import Section

Recomputed = bool | Annotated[float, Field(ge=0, le=1)] | None
SIZES: dict[str, Any] = {
    "tokens_per_microbatch": 8192,
    "activation_checkpointing": False,
    "logprob_chunk": 1024,
}


class Passes(Section):
    """A section that has these keys."""

    _longest: int | None = None

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its response must fit in: of a size that was chosen (a longer
        sample has a pass of its own) those of before."""
        return self._longest or self.together

    @property
    def together(self) -> int:
        """Tokens of a micro-batch."""
        return int(getattr(self, "tokens_per_microbatch") or SIZES["tokens_per_microbatch"])  # noqa: B009

    def keeping_longest(self, other: Passes) -> Self:
        """A copy that takes samples as long as another section does."""
        copy = self.model_copy()
        copy._longest = other.longest
        return copy

    def sized(self) -> Self:
        """A copy whose open sizes have the numbers of a device with room for them."""
        return self.model_copy(
            update={key: size for key, size in SIZES.items() if getattr(self, key) is None}
        )
