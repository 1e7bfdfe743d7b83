"""The choice of the next prompt and of the noise of its rollouts.

A hash of (seed, d) chooses the environment of draw d by weight; the environment's cursor gives the
prompt's position; the request's seed is a hash of (seed, environment, prompt id, position). Nothing
depends on the step, retries or the order of answers, so a resumed run draws the same tokens. With a
curriculum, the position also encodes the level (`envs.curriculum`).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lowroll.envs.checked_prompts import prompt_at
from lowroll.envs.curriculum import LevelProgress
from lowroll.orchestrator.conversations import Dialogue
from lowroll.orchestrator.errors import NoSignal
from lowroll.orchestrator.interfaces import Tokenizer
from lowroll.orchestrator.ledger import GroupPlan, Ledger
from lowroll.orchestrator.settings import SamplingSettings, Settings
from lowroll.types import Prompt, Request

if TYPE_CHECKING:
    from lowroll.envs.base import Environment

# consecutive too long prompts, after which the limit counts as wrong
MAX_PASSED_OVER = 1000
PASSES = 10  # passes over all data without a usable prompt, before it counts as exhausted


def seed_of(*parts: str | int) -> int:
    """Return a 63-bit seed from its parts alone (blake2b over their JSON list)."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class PromptDraw:
    """One planned prompt and its request to the engine."""

    prompt: Prompt
    request: Request
    position: int = 0

    def is_longer(self, limit: int | None) -> bool:
        """Return whether the prompt has more than `limit` tokens, or too many for a
        conversation."""
        if isinstance(self.request, Dialogue) and not self.request.fits:
            return True
        return limit is not None and len(self.request.prompt_ids) > limit


class PromptSource:
    """Prompts from a weighted mix of environments."""

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
        # the order in the configuration does not matter
        self._names = sorted(self.envs)
        weights = [settings.env_weights.get(name, 1.0) for name in self._names]
        self._cumulative_weights = list(accumulate(weights))
        self._sizes = {name: env.size("train") for name, env in self.envs.items()}
        self._firsts = {name: Firsts() for name in self.envs}

    def draw(self, ledger: Ledger, count: int, temperature: float) -> list[PromptDraw]:
        """Return the next `count` draws and advance `ledger`. NoSignal when the pools leave no
        prompt, ValueError after MAX_PASSED_OVER too long ones in a row."""
        draws: list[PromptDraw] = []
        num_too_long = num_unwanted = 0  # since the last usable prompt
        limit = self.settings.max_prompt_tokens
        while len(draws) < count:
            name = self.choose(ledger.draws)
            position = self._position(ledger, name)
            ledger.draws += 1
            ledger.cursors[name] = ledger.cursors.get(name, 0) + 1
            if self._is_unwanted(ledger, name, position):
                num_unwanted += 1
                self._refuse_emptiness(ledger, num_unwanted)
                continue
            next_draw = self._at(name, position, temperature)
            if next_draw.is_longer(limit):
                ledger.passed_over += 1
                num_too_long += 1
                if num_too_long >= MAX_PASSED_OVER:
                    raise ValueError(
                        f"max_prompt_tokens: {num_too_long} prompts in a row have more than "
                        f"{limit} tokens"
                    )
                continue
            num_too_long = num_unwanted = 0
            ledger.planned += 1
            draws.append(next_draw)
        return draws

    def again(self, planned: GroupPlan) -> PromptDraw:
        """Return the draw of an open group."""
        return self._at(planned.env, planned.position, planned.temperature)

    def choose(self, draw: int) -> str:
        """Return the environment of a draw, a function of (seed, draw, weights)."""
        if len(self._names) == 1:
            return self._names[0]
        total_weight = self._cumulative_weights[-1]
        point = seed_of(self.seed, "environment", draw) / 2**63 * total_weight
        index = bisect_right(self._cumulative_weights, point)
        return self._names[min(index, len(self._names) - 1)]  # the point may round to the total

    @property
    def seed(self) -> int:
        chosen = self.settings.buffer_seed
        return self.settings.seed if chosen is None else chosen

    def plan(self) -> dict[str, Any]:
        """Return the settings that determine prompts and noise; they must not change within
        a run."""
        return {
            "seed": self.settings.seed,
            "buffer_seed": self.seed,
            "rollouts_per_example": self.settings.rollouts_per_example,
            "env_weights": {name: self.settings.env_weights.get(name, 1.0) for name in self._names},
            "hash_keys": list(self.settings.hash_keys),
        }

    def learn(self, ledger: Ledger, groups: Sequence[tuple[Prompt, list[float]]]) -> None:
        """Update difficulty pools and curriculum levels by a step's rewards."""
        for prompt, rewards in groups:
            if rewards and self._sizes[prompt.env] is not None:
                ledger.pools.place(prompt.env, prompt.id, rewards, self.settings)
        for name, env in self.envs.items():
            curriculum = env.curriculum
            if curriculum is None:
                continue
            progress = ledger.levels.get(name, LevelProgress(curriculum.start))
            mean_rewards = [
                fmean(rewards)
                for prompt, rewards in groups
                if prompt.env == name and prompt.info["level"] == progress.level and rewards
            ]
            ledger.levels[name] = progress.after(curriculum, mean_rewards)

    def _position(self, ledger: Ledger, name: str) -> int:
        cursor, curriculum = ledger.cursors.get(name, 0), self.envs[name].curriculum
        if curriculum is None:
            return cursor
        level = ledger.levels.get(name, LevelProgress(curriculum.start)).level
        return curriculum.position(cursor, min(level, curriculum.levels - 1))

    def _at(self, name: str, position: int, temperature: float) -> PromptDraw:
        settings = self.settings
        sampling_seed = settings.seed if settings.sampling_seed is None else settings.sampling_seed
        return draw_at(
            self.envs[name],
            name,
            position,
            "train",
            self.tokenizer,
            sampling=replace(settings.sampling, temperature=temperature),
            n=settings.rollouts_per_example,
            run_seed=sampling_seed,
            max_sequence_tokens=settings.max_sequence_tokens,
        )

    def _is_unwanted(self, ledger: Ledger, name: str, position: int) -> bool:
        is_endless = self._sizes[name] is None
        if is_endless or not (self.settings.uses_pools or self.settings.hash_keys):
            return False
        prompt = prompt_at(self.envs[name], position, "train")
        if self.settings.hash_keys and self._is_duplicate(name, position, prompt):
            ledger.duplicates += 1
            return True
        if ledger.pools.holds(name, prompt.id):
            ledger.pooled += 1
            return True
        return False

    def _is_duplicate(self, name: str, position: int, prompt: Prompt) -> bool:
        """Return whether an earlier prompt has the same content. A resumed run reads earlier
        prompts again."""
        firsts, keys = self._firsts[name], self.settings.hash_keys
        end = min(position + 1, self._sizes[name] or 0)
        for unread_position in range(firsts.num_read, end):
            firsts.read(prompt_at(self.envs[name], unread_position, "train"), keys)
        return firsts.is_duplicate(prompt, keys)

    def _refuse_emptiness(self, ledger: Ledger, unwanted: int) -> None:
        if unwanted < MAX_PASSED_OVER + PASSES * sum(size or 0 for size in self._sizes.values()):
            return
        raise NoSignal(
            f"buffer: {unwanted} prompts in a row are too easy, too hard or a duplicate "
            f"({ledger.pools.count('easy')} in the easy pool, {ledger.pools.count('hard')} in the "
            "hard one); nothing is left to learn from"
        )


class Firsts:
    """The first prompt of each content in one data set."""

    def __init__(self) -> None:
        self.num_read = 0
        self._ids: dict[bytes, str] = {}

    def read(self, prompt: Prompt, keys: tuple[str, ...]) -> None:
        self._ids.setdefault(fingerprint(prompt, keys), prompt.id)
        self.num_read += 1

    def is_duplicate(self, prompt: Prompt, keys: tuple[str, ...]) -> bool:
        return self._ids.get(fingerprint(prompt, keys), prompt.id) != prompt.id


def fingerprint(prompt: Prompt, keys: tuple[str, ...]) -> bytes:
    """Return the SHA-256 of a prompt's keys: `task`, `prompt` (its messages) or a key of its info.
    ValueError for a missing key."""
    values_by_key: dict[str, Any] = {**prompt.info, "task": prompt.env, "prompt": prompt.messages}
    for key in keys:
        if key not in values_by_key:
            raise ValueError(
                f"hash_keys: prompt {prompt.id!r} of environment {prompt.env!r} has no {key!r}; "
                f"it has {', '.join(sorted(values_by_key))}"
            )
    content = json.dumps([values_by_key[key] for key in keys], sort_keys=True)
    return hashlib.sha256(content.encode()).digest()


def draw_at(
    env: Environment,
    name: str,
    position: int,
    split: str,
    tokenizer: Tokenizer,
    sampling: SamplingSettings,
    n: int,
    run_seed: int,
    max_sequence_tokens: int | None = None,
) -> PromptDraw:
    """Return an environment's prompt at a position and its request, with constant id and seed; a
    dialogue where the environment replies. ValueError for an unusable prompt."""
    prompt = prompt_at(env, position, split)
    if prompt.env != name:
        raise ValueError(
            f"environment {name!r}: prompt {prompt.id!r} says it belongs to {prompt.env!r}"
        )
    prompt_ids = encode(env, prompt, tokenizer)
    if not prompt_ids:
        raise ValueError(f"environment {name!r}: prompt {prompt.id!r} has no tokens")
    request = Request(
        prompt_ids=prompt_ids,
        n=n,
        seed=seed_of(run_seed, split, name, prompt.id, position),
        id=f"{split}/{name}/{position}/{prompt.id}",
        **vars(sampling),
    )
    if env.max_turns > 1:
        token_limits = [limit for limit in (max_sequence_tokens, env.max_sequence_tokens) if limit]
        request = Dialogue(
            **vars(request),
            prompt=prompt,
            max_turns=env.max_turns,
            max_sequence_tokens=min(token_limits, default=None),
            tools=bool(env.tools),
        )
    return PromptDraw(prompt, request, position)


def encode(env: Environment, prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt in the chat template. ValueError when it cannot show the
    environment's tools."""
    if not env.tools:
        return list(tokenizer.encode_chat(prompt.messages))
    try:
        return list(tokenizer.encode_chat(prompt.messages, tools=env.tools))
    except ValueError as error:
        raise ValueError(f"environment {env.name!r}: {error}") from error
