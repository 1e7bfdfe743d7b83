"""The check that prompts leave space for a whole response, and prompt lengths of environments. No
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lowroll.config import RunConfig
from lowroll.envs import Environment
from lowroll.envs.tasks import prompt_at
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
    """Return the most prompt tokens that leave space for a whole response. ValueError when there
    are none."""
    max_prompt_tokens, limit_tokens, _, owner = _tightest_limit(cfg, spec)
    if max_prompt_tokens < 1:
        raise ValueError(
            f"rollout.max_tokens: {cfg.rollout.max_tokens} leaves no room for a prompt in {owner} "
            f"of {limit_tokens} tokens"
        )
    return max_prompt_tokens


def sequence(cfg: RunConfig, spec: ModelSpec) -> int:
    """Return the token limit of a conversation with its prompt. A bounded cache holds a later
    turn's prompt and response up to the longest prompt."""
    response_tokens = 0 if cfg.rollout.cache.evicts else cfg.rollout.max_tokens
    return longest(cfg, spec) + response_tokens


def check_turns(chat: ChatTokenizer, envs: Mapping[str, Environment]) -> None:
    """Raise ValueError for multi-turn environments whose chat template cannot continue."""
    for env in envs.values():
        if env.max_turns > 1:
            try:
                chat.check_turns()
            except ValueError as error:
                raise ValueError(f"env {env.name!r}: {error}") from None


def _tightest_limit(cfg: RunConfig, spec: ModelSpec) -> tuple[int, int, str, str]:
    """Return the tightest limit on a prompt with its response: (tokens of the longest prompt,
    tokens of the limit, its key, its owner in words)."""
    rollout = cfg.rollout
    sequence_limits = [
        (spec.max_position, "model", "the model's context"),
        (cfg.train.longest, "train.tokens_per_microbatch", "a micro-batch"),
    ]
    if rollout.max_model_len:
        sequence_limits.append(
            (rollout.max_model_len, "rollout.max_model_len", "the longest sequence")
        )
    limits = [
        (tokens - rollout.max_tokens, tokens, key, owner) for tokens, key, owner in sequence_limits
    ]
    if rollout.cache_tokens is not None:
        longest_prompt = caches.longest_prompt(cfg, rollout.cache_tokens)
        limits.append(
            (longest_prompt, rollout.cache_tokens, "rollout.cache_tokens", "the KV cache")
        )
    return min(limits, key=lambda limit: limit[0])


def check(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str = "train",
) -> list[str]:
    """Raise ValueError naming the setting that makes all first prompts of an environment too long,
    or train.replay_kv with several turns. Return lines on environments where some are too long."""
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
            lengths = _first_lengths(cfg, env, split, chat)
            if not lengths or min(lengths) <= max_prompt_tokens:
                continue
            if split != "train" and len(lengths) != stage_cfg.eval.count(env.size(split)):
                continue  # an evaluation skips what is too long, and has more prompts
            _, tokens, key, _ = _tightest_limit(stage_cfg, spec)
            response = stage_cfg.rollout.max_tokens
            kind = "prompts" if split == "train" else "held-out prompts"
            raise ValueError(
                f"{key}: {tokens} tokens are too few: the shortest of the first {len(lengths)} "
                f"{kind} of env {env.name!r} has {min(lengths)} and rollout.max_tokens is "
                f"{response}, which makes {min(lengths) + response}"
            )
    return lines


def _first_lengths(cfg: RunConfig, env: Environment, split: str, chat: ChatTokenizer) -> list[int]:
    """Return the token counts of a split's first prompts, at most as many as an evaluation uses."""
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
    max_prompt_tokens, tokens, key, _ = _tightest_limit(cfg, spec)
    counter_note = "rollout/passed_over_prompts counts them"
    if split != "train":
        counter_note = "`lowroll eval` counts them in its column 'too long'"
    lines = []
    for env in envs.values():
        prompt_lengths = _first_lengths(cfg, env, split, chat)
        if num_too_long := sum(length > max_prompt_tokens for length in prompt_lengths):
            lines.append(
                f"env {env.name!r}: {num_too_long} of the first {len(prompt_lengths)} prompts "
                f"have more than {max_prompt_tokens} tokens and are passed over ({key}: {tokens}, "
                f"of which a response may take {cfg.rollout.max_tokens}); {counter_note}"
            )
    return lines


def check_stages(cfg: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError for a stage whose longest response leaves no space for a prompt."""
    for stage in cfg.stages:
        try:
            longest(cfg.at(stage.step), spec)
        except ValueError as error:
            raise ValueError(f"the stage that begins at step {stage.step}: {error}") from None
