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
_known: WeakKeyDictionary[ChatTokenizer, dict[tuple[Environment, str], list[int]]] = (
    WeakKeyDictionary()
)


def lengths(env: Environment, split: str, count: int, chat: ChatTokenizer) -> list[int]:
    """Return the token counts of a split's first prompts, cached for the cache's size, the memory
    plan and the prompt check."""
    known = _known.setdefault(chat, {}).setdefault((env, split), [])
    count = min(count, env.size(split) or count)
    known += [len(encode(env, prompt_at(env, i, split), chat)) for i in range(len(known), count)]
    return known[:count]


def longest(cfg: RunConfig, spec: ModelSpec) -> int:
    """Return the most prompt tokens beside a whole response. ValueError when there are none."""
    most, tokens, _, owner = _limit(cfg, spec)
    if most < 1:
        raise ValueError(
            f"rollout.max_tokens: {cfg.rollout.max_tokens} leaves no room for a prompt in {owner} "
            f"of {tokens} tokens"
        )
    return most


def sequence(cfg: RunConfig, spec: ModelSpec) -> int:
    """Return the token limit of a conversation with its prompt. A bounded cache holds a later
    turn's prompt, and what is drawn after it, up to the longest prompt."""
    most = longest(cfg, spec)
    return most if cfg.rollout.cache.evicts else most + cfg.rollout.max_tokens


def check_turns(chat: ChatTokenizer, envs: Mapping[str, Environment]) -> None:
    """Raise ValueError for multi-turn environments whose chat template cannot continue."""
    for env in envs.values():
        if env.max_turns > 1:
            try:
                chat.check_turns()
            except ValueError as error:
                raise ValueError(f"env {env.name!r}: {error}") from None


def _limit(cfg: RunConfig, spec: ModelSpec) -> tuple[int, int, str, str]:
    """Return the tightest limit on a prompt with its response: (tokens of the longest prompt,
    tokens of the limit itself, the key that sets it, what it is)."""
    response, cached = cfg.rollout.max_tokens, cfg.rollout.cache_tokens
    most = cfg.rollout.max_model_len or spec.max_position
    limits = [
        (tokens - response, tokens, key, what)
        for tokens, key, what in (
            (spec.max_position, "model", "the model's context"),
            (cfg.train.longest, "train.tokens_per_microbatch", "a micro-batch"),
            (most, "rollout.max_model_len", "the longest sequence"),
        )
    ]
    if cached is not None:
        most = caches.longest_prompt(cfg, cached)
        limits.append((most, cached, "rollout.cache_tokens", "the KV cache"))
    return min(limits, key=lambda limit: limit[0])


def check(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str = "train",
) -> list[str]:
    """Raise ValueError naming the setting that makes all first prompts of an environment too long,
    or train.replay_kv beside conversations of several turns. Return lines on environments where
    only some are too long."""
    check_turns(chat, envs)
    talking = [env.name for env in envs.values() if env.max_turns > 1]
    if cfg.train.replay_kv and talking:
        raise ValueError(
            f"train.replay_kv: env {talking[0]!r} has conversations of several turns, each turn is "
            "drawn with a cache of its own, and what those dropped is not put together; leave "
            "replay_kv out"
        )
    return _check_room(cfg, spec, chat, envs, split)


def check_held_out(
    cfg: RunConfig, spec: ModelSpec, chat: ChatTokenizer, envs: Mapping[str, Environment]
) -> list[str]:
    """Check the evaluation environments at the start, so that a run does not fail midway."""
    if not cfg.eval.interval:
        return []
    check_turns(chat, envs)
    for env in envs.values():
        check_tests(env)
    return _check_room(cfg, spec, chat, envs, "test")


def check_tests(env: Environment) -> None:
    """Raise ValueError for an environment without evaluation examples."""
    if env.size("test") == 0:
        raise ValueError(
            f"eval: environment {env.name!r} has no test split; set its test_path, or "
            "eval.interval: null"
        )


def _check_room(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    split: str,
) -> list[str]:
    lines = []
    for now in cfg.each_stage():
        most = longest(now, spec)
        lines += passed_over(now, spec, chat, envs, split)
        for env in envs.values():
            found = _first(cfg, env, split, chat)
            # an evaluation skips too long prompts, and fails where none is left
            all_seen = split == "train" or len(found) == now.eval.count(env.size(split))
            if found and all_seen and min(found) > most:
                _, tokens, key, _ = _limit(now, spec)
                response = now.rollout.max_tokens
                kind = "prompts" if split == "train" else "held-out prompts"
                raise ValueError(
                    f"{key}: {tokens} tokens are too few: the shortest of the first {len(found)} "
                    f"{kind} of env {env.name!r} has {min(found)} and rollout.max_tokens is "
                    f"{response}, which makes {min(found) + response}"
                )
    return lines


def _first(cfg: RunConfig, env: Environment, split: str, chat: ChatTokenizer) -> list[int]:
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
    most, tokens, key, _ = _limit(cfg, spec)
    counted = "rollout/passed_over_prompts counts them"
    if split != "train":
        counted = "`lowroll eval` counts them in its column 'too long'"
    lines = []
    for env in envs.values():
        found = _first(cfg, env, split, chat)
        if many := sum(length > most for length in found):
            lines.append(
                f"env {env.name!r}: {many} of the first {len(found)} prompts have more than {most} "
                f"tokens and are passed over ({key}: {tokens}, of which a response may take "
                f"{cfg.rollout.max_tokens}); {counted}"
            )
    return lines


def check_stages(cfg: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError for a stage whose longest response leaves no space for a prompt."""
    for stage in cfg.stages:
        try:
            longest(cfg.at(stage.step), spec)
        except ValueError as error:
            raise ValueError(f"the stage that begins at step {stage.step}: {error}") from None
