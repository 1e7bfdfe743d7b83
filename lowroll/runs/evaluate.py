"""Evaluation on held-out prompts by `lowroll eval`: of one model in several weight formats and under
several caches, or of what a server serves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from lowroll.config import RunConfig
from lowroll.config.kv import KvConfig
from lowroll.engine.base import Engine
from lowroll.envs import Environment
from lowroll.envs.rewards import ScorerPool
from lowroll.metrics.progress import phases
from lowroll.model import hf
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.orchestrator.client import PhaseProgress
from lowroll.orchestrator.conversations import Conversations
from lowroll.orchestrator.evaluate import evaluate as evaluate_env
from lowroll.runs.build import engines, environments, models, orchestrator, prompts
from lowroll.runs.build.compute import Compute
from lowroll.runs.server import Server


def evaluate(
    cfg: RunConfig, weights: Sequence[str] = (), kv: Sequence[KvConfig] = ()
) -> list[dict[str, Any]]:
    """One row an environment, format and cache: reward, pass@1, avg@k, pass@k, mean length, tokens
    a second.

    `weights` are formats; "dense" is the run's own dtype. Without any they are dense and
    rollout.weights or, where that is not set, the low-bit format that the model holds. `kv` are
    caches; without any they are dense and rollout.kv. All see the same prompts and the same seeds,
    caches that keep every key first: the first one's tokens are the size of all. A run with stages
    is evaluated at the lengths of its last one. lowroll's own engine answers, also for a run whose
    rollouts are vLLM's; `evaluate_server` asks another.
    """
    weights = weights or list(dict.fromkeys(["dense", _rollouts(cfg)]))
    cfg = engines.with_engine(cfg.resolved().at(cfg.train.max_steps), "native")
    own = cfg.rollout.cache
    distinct = {cache.name: cache for cache in kv or (own.another("dense"), own)}
    caches = sorted(distinct.values(), key=lambda cache: cache.evicts)
    compute = Compute.of(cfg)
    chat = models.tokenizer(cfg.model, cfg.rollout.tool_call_parser)
    model = hf.load(cfg.model, compute.device, compute.dtype)
    chosen = cfg.eval.env or cfg.env
    envs = environments.make(chosen, cfg.seed)
    work = [engines.eval_workload(cfg, model.spec, chat, envs)]
    rows: list[dict[str, Any]] = []
    with environments.scorer(cfg, chosen) as scorer, phases() as on_phase:
        for cache, name in product(caches, weights):
            cfg = _under(cfg, cache)
            engine = engines.make(cfg, compute, model, chat, name, work)
            cfg = engines.with_cache(cfg, engine.stats().cache_tokens)  # the same for all
            most = min(prompts.longest(_under(cfg, one), model.spec) for one in caches)
            prompts.check(cfg, model.spec, chat, envs, "test")
            about = {"weights": compute.format(name), "kv": cache.name}
            tokens = min(prompts.sequence(_under(cfg, one), model.spec) for one in caches)
            rows += _rows(cfg, envs, engine, scorer, chat, (most, tokens), about, on_phase)
    return rows


def evaluate_server(cfg: RunConfig, server: Server) -> list[dict[str, Any]]:
    """One row an environment of what a server serves, with its address and the model's name; drawn
    as `evaluate` draws. ValueError when its context leaves no room for a response."""
    cfg = cfg.resolved().at(cfg.train.max_steps)
    context = server.engine.capabilities.context_length
    most = context - cfg.rollout.max_tokens
    if most < 1:
        raise ValueError(
            f"rollout.max_tokens: {cfg.rollout.max_tokens} leaves no room for a prompt in the "
            f"context of {server.url}, {context} tokens"
        )
    chosen = cfg.eval.env or cfg.env
    envs = environments.make(chosen, cfg.seed)
    about = {"server": server.url, "model": server.model}
    with environments.scorer(cfg, chosen) as scorer, phases() as on_phase:
        limits = (most, context)
        return _rows(cfg, envs, server.engine, scorer, server.chat, limits, about, on_phase)


def _rows(
    cfg: RunConfig,
    envs: Mapping[str, Environment],
    engine: Engine,
    scorer: ScorerPool,
    chat: ChatTokenizer,
    limits: tuple[int, int],
    about: Mapping[str, str],
    on_phase: PhaseProgress | None,
) -> list[dict[str, Any]]:
    """A row an environment: its numbers, and `about` what answered. limits: tokens of a prompt, and
    of a whole conversation."""
    prompts.check_turns(chat, envs)
    rows = []
    for env in envs.values():
        began = time.monotonic()
        metrics = evaluate_env(
            env,
            Conversations(engine, scorer, chat),
            scorer,
            chat,
            num_examples=cfg.eval.count(env.size("test")),
            rollouts_per_example=cfg.eval.rollouts_per_example,
            sampling=orchestrator.eval_sampling(cfg),
            seed=cfg.seed,
            max_prompt_tokens=limits[0],
            max_sequence_tokens=limits[1],
            on_phase=on_phase,
        )
        short = {key.rsplit("/", 1)[1]: value for key, value in metrics.items()}
        rows.append({"env": env.name, **about, **short, "seconds": time.monotonic() - began})
    return rows


def _under(cfg: RunConfig, kv: KvConfig) -> RunConfig:
    """The same settings with another cache."""
    return cfg.model_copy(update={"rollout": cfg.rollout.with_kv(kv)})


def _rollouts(cfg: RunConfig) -> str:
    """The format of the rollouts."""
    if "weights" in cfg.rollout.model_fields_set:
        own = None
    else:
        own = hf.low_bit_format(hf.resolve(cfg.model))
    return own or cfg.rollout.weights
