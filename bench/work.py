"""The work of the decoding benchmark, as data: batches of rollouts of fixed length, by part and format.

A batch is prompts of random tokens, each with as many rollouts as share it, and tokens drawn in one
of the ways of SAMPLINGS. Both engines get the same prompts and the same words for the sampler
(`lowroll.types.Request`'s). Every rollout has the same length whatever is drawn: the rows of the head
for STOPS are zero on both sides, and where the 50 likeliest tokens are kept, a logit of 0 is never
among them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowroll.quant.formats import get_format

MACHETE = "int4"  # the format of vLLM's fastest product of 4 bits on Hopper
PLAIN = ""
FILTERS = "top-p + top-k"
STOPS = (7, 8)  # that end a row, if they were drawn
_FILTERED: dict[str, Any] = {"top_p": 0.95, "top_k": 50}
SAMPLINGS: dict[str, dict[str, Any]] = {  # fields of a request
    PLAIN: {},
    FILTERS: _FILTERED,
    f"{FILTERS} + min-p": {**_FILTERED, "min_p": 0.05},
    f"{FILTERS} + repetition penalty": {**_FILTERED, "repetition_penalty": 1.1},
    f"{FILTERS} + min_tokens": {**_FILTERED, "stop_ids": STOPS},
    f"{FILTERS} + stop ids": {**_FILTERED, "stop_ids": STOPS, "min_tokens": 0},
}


@dataclass(frozen=True)
class Work:
    """`batch` rollouts, `group` of each prompt. sampling: one of SAMPLINGS."""

    batch: int
    prompt_tokens: int = 256
    new_tokens: int = 256
    group: int = 8
    sampling: str = PLAIN

    @property
    def title(self) -> str:
        """Return its name in rows: the batch, and what sets it apart from a batch of an RL step."""
        drawn = f", {self.sampling}" if self.sampling else ""
        if self.is_apart:
            return f"{self.batch} prompts of {self.prompt_tokens}, {self.new_tokens} new{drawn}"
        return f"B={self.batch}{drawn}"

    @property
    def is_first(self) -> bool:
        """Tell if it ends with the first token."""
        return self.new_tokens == 1

    @property
    def is_apart(self) -> bool:
        """Tell if it has many prompts that share nothing."""
        return self.batch > 1 and self.group == 1

    @property
    def is_step(self) -> bool:
        """Tell if it is the work of an RL step."""
        return self.sampling == PLAIN and not self.is_first and not self.is_apart

    @property
    def copies(self) -> int:
        return min(self.group, self.batch)

    @property
    def tokens(self) -> int:
        """Return the tokens whose speed the work is about: those of its prompts where nothing is
        shared."""
        return self.batch * (self.prompt_tokens if self.is_apart else self.new_tokens)

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        dice = random.Random(seed)
        return [
            [dice.randrange(vocab_size // 100, vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.batch // self.copies)
        ]

    def asked(self, new_tokens: int) -> dict[str, Any]:
        length = {"max_tokens": new_tokens, "min_tokens": new_tokens, "ignore_eos": True}
        return {"temperature": 1.0, **length, **SAMPLINGS[self.sampling]}

    def cache_tokens(self) -> int:
        """Return the KV positions of a batch that shares its prompts, with a page of slack at each
        end of a rollout."""
        shared = self.batch // self.copies * (self.prompt_tokens + 16)
        return shared + self.batch * (self.new_tokens + 48) + 1024


FIRST = Work(1, new_tokens=1)  # the first token of a prompt by itself
FILTERED = (
    Work(64, sampling=FILTERS),
    Work(256, sampling=FILTERS),
    *(Work(64, sampling=name) for name in list(SAMPLINGS)[2:]),
)
APART = {  # prompts that nothing is shared of, by format
    "fp8": (Work(128, 1024, 128, 1), Work(32, 4096, 256, 1)),
    "nvfp4": (Work(64, 4096, 256, 1),),
}
PARTS = ("rollout", "filters", "prompts", "codes", "first")  # whose rows are of such work


def works(format: str, parts: Sequence[str], batches: Sequence[int]) -> list[Work]:
    """Return what is measured of a format at default settings: of 4 bits from the codes alone."""
    codes = get_format(format).bits < 8
    rollouts = [Work(batch) for batch in sorted(batches)]
    found: Mapping[str, Sequence[Work]] = {
        "rollout": () if codes else rollouts,
        "codes": rollouts if codes else (),
        "filters": FILTERED if format == "bf16" else (),
        "prompts": APART.get(format, ()),
        "first": (FIRST,),
    }
    return [work for part, chosen in found.items() if part in parts for work in chosen]


def dense_works(format: str, parts: Sequence[str], batches: Sequence[int]) -> list[Work]:
    """Return what is measured of a 4-bit format with dense copies beside its codes."""
    if get_format(format).bits >= 8 or "rollout" not in parts:
        return []
    return [Work(batch) for batch in sorted(batches)]
