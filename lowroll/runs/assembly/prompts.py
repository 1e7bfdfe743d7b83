"""Prompt lengths of environments, and the check that prompts leave space for a response. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lowroll.config import RunConfig
from lowroll.envs import Environment
from lowroll.envs.checked_prompts import prompt_at
from lowroll.orchestrator.prompt_source import encode
from lowroll.runs.assembly import caches

if TYPE_CHECKING:
    from lowroll.model.spec import ModelSpec
    from lowroll.model.tokenizer import ChatTokenizer

LOOKED_AT = 128  # prompts of an environment whose lengths size the KV cache
_length_cache: WeakKeyDictionary[ChatTokenizer, dict[tuple[Environment, str], list[int]]] = (
    WeakKeyDictionary()
)


def lengths(env: Environment, split: str, count: int, chat: ChatTokenizer) -> list[int]:
    """Return the token counts of a split's first prompts, cached."""
    cached_lengths = _length_cache.setdefault(chat, {}).setdefault((env, split), [])
    count = min(count, env.size(split) or count)
    cached_lengths += [
        len(encode(env, prompt_at(env, i, split), chat)) for i in range(len(cached_lengths), count)
    ]
    return cached_lengths[:count]


def longest(cfg: RunConfig, spec: ModelSpec) -> int:
    """Return the most prompt tokens that leave space for a response, or raise ValueError."""
    limit = _tightest_limit(cfg, spec)
    if limit.longest_prompt < 1:
        raise ValueError(
            f"rollout.max_tokens: {cfg.rollout.max_tokens} leaves no room for a prompt in "
            f"{limit.owner} of {limit.tokens} tokens"
        )
    return limit.longest_prompt


def sequence(cfg: RunConfig, spec: ModelSpec) -> int:
    """Return a conversation's token limit. A bounded cache holds later turns up to the longest
    prompt."""
    response_tokens = 0 if cfg.rollout.cache.evicts else cfg.rollout.max_tokens
    return longest(cfg, spec) + response_tokens


def check_turns(chat: ChatTokenizer, envs: Mapping[str, Environment]) -> None:
    """Raise ValueError for several turns with a chat template that cannot continue."""
    for env in envs.values():
        if env.max_turns > 1:
            try:
                chat.check_turns()
            except ValueError as error:
                raise ValueError(f"env {env.name!r}: {error}") from None


@dataclass(frozen=True)
class _SequenceLimit:
    """A limit on a prompt with its response."""

    tokens: int
    longest_prompt: int  # tokens that leave space for a response
    key: str
    owner: str


def _tightest_limit(cfg: RunConfig, spec: ModelSpec) -> _SequenceLimit:
    rollout = cfg.rollout

    def limit(tokens: int, key: str, owner: str) -> _SequenceLimit:
        return _SequenceLimit(tokens, tokens - rollout.max_tokens, key, owner)

    limits = [
        limit(spec.max_position, "model", "the model's context"),
        limit(cfg.train.longest, "train.tokens_per_microbatch", "a micro-batch"),
    ]
    if rollout.max_model_len:
        limits.append(limit(rollout.max_model_len, "rollout.max_model_len", "the longest sequence"))
    if rollout.cache_tokens is not None:
        tokens = rollout.cache_tokens
        longest_prompt = caches.longest_prompt(cfg, tokens)
        limits.append(
            _SequenceLimit(tokens, longest_prompt, "rollout.cache_tokens", "the KV cache")
        )
    return min(limits, key=lambda limit: limit.longest_prompt)


def check(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str = "train",
) -> list[str]:
    """Raise ValueError when all first prompts of an environment are too long, or for
    train.replay_kv with several turns. Return lines on some too long prompts."""
    check_turns(chat, envs)
    multi_turn = [env.name for env in envs.values() if env.max_turns > 1]
    if cfg.train.replay_kv and multi_turn:
        raise ValueError(
            f"train.replay_kv: env {multi_turn[0]!r} has conversations of several turns, each turn is "
            "drawn with a cache of its own, and what those dropped is not put together; leave "
            "replay_kv out"
        )
    return _check_prompt_lengths(cfg, spec, chat, envs, split)


def check_held_out(
    cfg: RunConfig, spec: ModelSpec, chat: ChatTokenizer, envs: Mapping[str, Environment]
) -> list[str]:
    """Check the evaluation environments, before a run fails midway."""
    if not cfg.eval.interval:
        return []
    check_turns(chat, envs)
    for env in envs.values():
        check_tests(env)
    return _check_prompt_lengths(cfg, spec, chat, envs, "test")


def check_tests(env: Environment) -> None:
    if env.size("test") == 0:
        raise ValueError(
            f"eval: environment {env.name!r} has no test split; set its test_path, or "
            "eval.interval: null"
        )


def _check_prompt_lengths(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str,
) -> list[str]:
    lines = []
    for stage_cfg in cfg.each_stage():
        max_prompt_tokens = longest(stage_cfg, spec)
        lines += passed_over(stage_cfg, spec, chat, envs, split)
        for env in envs.values():
            prompt_lengths = _first_lengths(cfg, env, split, chat)
            if not prompt_lengths or min(prompt_lengths) <= max_prompt_tokens:
                continue
            # An evaluation passes over long prompts, and later prompts may fit.
            is_evaluation = split != "train"
            if is_evaluation and len(prompt_lengths) != stage_cfg.eval.count(env.size(split)):
                continue
            kind = "held-out prompts" if is_evaluation else "prompts"
            limit = _tightest_limit(stage_cfg, spec)
            shortest, response = min(prompt_lengths), stage_cfg.rollout.max_tokens
            raise ValueError(
                f"{limit.key}: {limit.tokens} tokens are too few: the shortest of the first "
                f"{len(prompt_lengths)} {kind} of env {env.name!r} has {shortest} and "
                f"rollout.max_tokens is {response}, which makes {shortest + response}"
            )
    return lines


def _first_lengths(cfg: RunConfig, env: Environment, split: str, chat: ChatTokenizer) -> list[int]:
    count = LOOKED_AT
    if split != "train":
        count = min(count, cfg.eval.count(env.size(split)))
    return lengths(env, split, count, chat)


def passed_over(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str = "train",
) -> list[str]:
    """Return a line for each environment with some too long first prompts."""
    limit = _tightest_limit(cfg, spec)
    counter_note = "rollout/passed_over_prompts counts them"
    if split != "train":
        counter_note = "`lowroll eval` counts them in its column 'too long'"
    lines = []
    for env in envs.values():
        prompt_lengths = _first_lengths(cfg, env, split, chat)
        num_too_long = sum(length > limit.longest_prompt for length in prompt_lengths)
        if num_too_long:
            lines.append(
                f"env {env.name!r}: {num_too_long} of the first {len(prompt_lengths)} prompts "
                f"have more than {limit.longest_prompt} tokens and are passed over ({limit.key}: "
                f"{limit.tokens}, of which a response may take {cfg.rollout.max_tokens}); "
                f"{counter_note}"
            )
    return lines


def check_stages(cfg: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError for a stage that leaves no space for a prompt."""
    for stage in cfg.stages:
        try:
            longest(cfg.at(stage.step), spec)
        except ValueError as error:
            raise ValueError(f"the stage that begins at step {stage.step}: {error}") from None
