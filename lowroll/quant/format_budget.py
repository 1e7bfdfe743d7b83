"""Budgets in place of a format, a bound on the KL to the dense model or on the size (docs/usage.md,
`weights.format_search`): `max_kl=0.1,max_bits=6,formats=int4+int8`. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowroll.quant.table import EIGHT_BITS, FORMATS, OWN, is_dense

DEFAULT_FORMATS = ("nvfp4", EIGHT_BITS, OWN)  # 4, 8 and 16 bits


@dataclass(frozen=True)
class Budget:
    """Limits on the linear weights of the rollouts."""

    max_kl: float | None = None
    max_bits: float | None = None
    max_bytes: int | None = None
    formats: tuple[str, ...] = ()

    @property
    def candidates(self) -> tuple[str, ...]:
        return self.formats or DEFAULT_FORMATS

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each invalid key and the reason."""
        bounds = (self.max_kl, self.max_bits, self.max_bytes)
        if all(bound is None for bound in bounds):
            yield "max_kl", "a budget has max_kl, max_bits or max_bytes"
        for key, bound in (("max_kl", self.max_kl), ("max_bits", self.max_bits)):
            if bound is not None and not 0 <= bound < float("inf"):
                yield key, f"must be a number of at least 0, got {bound}"
        if self.max_bytes is not None and self.max_bytes < 1:
            yield "max_bytes", f"must be >= 1, got {self.max_bytes}"
        for name in self.formats:
            if name != OWN and name not in FORMATS:
                known_formats = ", ".join((OWN, *FORMATS))
                yield "formats", f"{name!r} is none of {known_formats}"
            elif name != OWN and is_dense(name):
                yield "formats", f"{name}: write {OWN}, the run's own dtype"
        if len(set(self.formats)) < len(self.formats):
            yield "formats", "the same format stands twice"
        if len(self.formats) == 1:
            yield "formats", f"there is nothing to choose; write {self.formats[0]} as the format"

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        parts = []
        if self.max_kl is not None:
            parts.append(f"max_kl={self.max_kl:.12g}")
        if self.max_bits is not None:
            parts.append(f"max_bits={self.max_bits:.12g}")
        if self.max_bytes is not None:
            parts.append(f"max_bytes={self.max_bytes}")
        if self.formats:
            parts.append(f"formats={'+'.join(self.formats)}")
        return ",".join(parts)


def is_budget(weights: object) -> bool:
    return isinstance(weights, str) and "=" in weights


def parse(text: str) -> Budget:
    """Parse a budget. ValueError names what is wrong."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in ("max_kl", "max_bits", "max_bytes", "formats") or not value:
            raise ValueError(
                f"{part!r}: a budget is max_kl=0.02, max_bits=5, max_bytes=N, formats=A+B, or "
                "several of them with commas"
            )
        if key in values:
            raise ValueError(f"{key}: it stands twice")
        values[key] = value
    try:
        budget = Budget(
            float(values["max_kl"]) if "max_kl" in values else None,
            float(values["max_bits"]) if "max_bits" in values else None,
            int(values["max_bytes"]) if "max_bytes" in values else None,
            tuple(values["formats"].split("+")) if "formats" in values else (),
        )
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    for key, reason in budget.problems():
        raise ValueError(f"{key}: {reason}")
    return budget
