"""Which prompt comes next, and with which noise.

Draw d goes to an environment by its weight, chosen by a hash of (seed, d); the environment's cursor
gives the position of its next prompt; the request's seed is a hash of (seed, environment, prompt
id, position). Nothing here depends on the step, on how often a request was sent or on the order in
which answers came back, so a retry and a resumed run draw the same tokens. The ledger is what a
checkpoint keeps: it moves on only when a batch has really been handed over.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lowroll.envs.tasks import prompt_at
from lowroll.orchestrator.client import Tokenizer
from lowroll.orchestrator.settings import Sampling, Settings
from lowroll.types import Prompt, Request

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

# prompts in a row that may be too long before the limit itself must be wrong
MAX_PASSED_OVER = 1000


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed that is a pure function of its parts (blake2b over their JSON list)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass
class Ledger:
    """What has been drawn and what became of it, in groups. planned == consumed + dropped."""

    draws: int = 0  # draws made, passed-over prompts included
    cursors: dict[str, int] = field(default_factory=dict)  # next position of each environment
    planned: int = 0
    consumed: int = 0
    dropped: int = 0  # by dynamic sampling
    passed_over: int = 0  # prompts over max_prompt_tokens: never planned

    def copy(self) -> Ledger:
        """An independent ledger to plan on."""
        return replace(self, cursors=dict(self.cursors))

    def state(self) -> dict[str, Any]:
        """JSON form of the ledger."""
        assert self.planned == self.consumed + self.dropped, "ledger: planned != consumed + dropped"
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any], env_names: set[str]) -> Ledger:
        """The ledger of a state. Raises ValueError naming the field that does not fit."""
        names = set(cls.__dataclass_fields__)
        if set(state) != names:
            raise ValueError(f"ledger: expected the fields {sorted(names)}, got {sorted(state)}")
        cursors = state["cursors"]
        if not isinstance(cursors, Mapping) or set(cursors) != env_names:
            raise ValueError(
                f"ledger.cursors: expected the environments {sorted(env_names)}, got {cursors!r}"
            )
        counts = {name: state[name] for name in names - {"cursors"}} | {
            f"cursors.{k}": v for k, v in cursors.items()
        }
        for name, count in counts.items():
            if type(count) is not int or count < 0:
                raise ValueError(f"ledger.{name}: expected a count, got {count!r}")
        if state["planned"] != state["consumed"] + state["dropped"]:
            raise ValueError("ledger.planned: expected consumed + dropped")
        return cls(**{**state, "cursors": dict(cursors)})


@dataclass(frozen=True)
class Draw:
    """One prompt of a step's plan and the request that goes to the engine for it."""

    prompt: Prompt
    request: Request


class PromptSource:
    """Draws prompts of a weighted mix of environments."""

    def __init__(
        self, settings: Settings, envs: Mapping[str, Environment], tokenizer: Tokenizer
    ) -> None:
        unknown = set(settings.env_weights) - set(envs)
        if unknown:
            raise ValueError(f"env_weights: no environment named {sorted(unknown)}")
        if not envs:
            raise ValueError("envs: none given")
        self.settings = settings
        self.envs = dict(envs)
        self.tokenizer = tokenizer
        # the choice must not depend on the order of the configuration
        self._names = sorted(self.envs)
        self._shares = list(accumulate(settings.env_weights.get(name, 1.0) for name in self._names))

    def draw(self, ledger: Ledger, count: int, temperature: float) -> list[Draw]:
        """The next `count` draws; advances `ledger`. Raises ValueError when an environment gives
        unusable prompts."""
        drawn: list[Draw] = []
        passed_over = 0
        limit = self.settings.max_prompt_tokens
        sampling = replace(self.settings.sampling, temperature=temperature)
        while len(drawn) < count:
            name = self.choose(ledger.draws)
            position = ledger.cursors.get(name, 0)
            ledger.draws += 1
            ledger.cursors[name] = position + 1
            drawing = draw_at(
                self.envs[name],
                name,
                position,
                "train",
                self.tokenizer,
                sampling,
                self.settings.rollouts_per_example,
                self.settings.seed,
            )
            if limit is not None and len(drawing.request.prompt_ids) > limit:
                ledger.passed_over += 1
                passed_over += 1
                if passed_over >= MAX_PASSED_OVER:
                    raise ValueError(
                        f"max_prompt_tokens: {passed_over} prompts in a row have more than {limit} "
                        f"tokens"
                    )
                continue
            passed_over = 0
            ledger.planned += 1
            drawn.append(drawing)
        return drawn

    def choose(self, draw: int) -> str:
        """The environment of a draw: a pure function of (seed, draw index, weights)."""
        if len(self._names) == 1:
            return self._names[0]
        share = seed_of(self.settings.seed, "environment", draw) / 2**63 * self._shares[-1]
        return self._names[min(bisect_right(self._shares, share), len(self._names) - 1)]


def draw_at(
    env: Environment,
    name: str,
    position: int,
    split: str,
    tokenizer: Tokenizer,
    sampling: Sampling,
    n: int,
    run_seed: int,
) -> Draw:
    """The prompt of an environment at a position and its request, whose id and seed are the same
    whenever it is sent.

    Raises ValueError when the prompt says it belongs to another environment or has no tokens.
    """
    prompt = prompt_at(env, position, split)
    if prompt.env != name:
        raise ValueError(
            f"environment {name!r}: prompt {prompt.id!r} says it belongs to {prompt.env!r}"
        )
    prompt_ids = list(tokenizer.encode_chat(prompt.messages))
    if not prompt_ids:
        raise ValueError(f"environment {name!r}: prompt {prompt.id!r} has no tokens")
    return Draw(
        prompt,
        Request(
            prompt_ids=prompt_ids,
            n=n,
            seed=seed_of(run_seed, split, name, prompt.id, position),
            id=f"{split}/{name}/{position}/{prompt.id}",
            **vars(sampling),
        ),
    )
