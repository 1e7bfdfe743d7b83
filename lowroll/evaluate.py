"""`lowroll eval`: one model in several weight formats on the same held-out prompts with the same noise."""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lowroll import assemble
from lowroll.config import RunConfig
from lowroll.metrics.progress import phases
from lowroll.model import hf
from lowroll.orchestrator.evaluate import evaluate as evaluate_env


def evaluate(cfg: RunConfig, weights: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row an environment and format: reward, pass@1, avg@k, pass@k, mean length, tokens a second.

    `weights` are formats; "dense" is the run's own dtype. Without any they are dense and rollout.weights or, where that
    is not set, the low-bit format that the model holds. The formats see the same prompts and the same seeds.
    A run with stages is evaluated at the lengths of its last one.
    """
    weights = weights or list(dict.fromkeys(["dense", _rollouts(cfg)]))
    cfg = cfg.resolved().at(cfg.train.max_steps)
    where, chat = assemble.place(cfg), assemble.tokenizer(cfg.model)
    model = hf.load(cfg.model, where.device, where.dtype)
    chosen = cfg.eval.env or cfg.env
    envs = assemble.environments(chosen, cfg.seed)
    rows, work = [], [assemble.eval_workload(cfg, model, chat, envs)]
    with assemble.scorer(cfg, chosen) as scorer, phases() as on_phase:
        for name in weights:
            engine = assemble.engine(cfg, where, model, chat, name, work)
            cfg = assemble.with_cache(cfg, engine.cache_tokens)          # the same for all formats
            most = assemble.longest_prompt(cfg, model)
            assemble.check_prompts(cfg, model, chat, envs, "test")
            for env in envs.values():
                began = time.monotonic()
                metrics = evaluate_env(
                    env, engine, scorer, chat, num_examples=cfg.eval.num_examples,
                    rollouts_per_example=cfg.eval.rollouts_per_example,
                    sampling=assemble.eval_sampling(cfg), seed=cfg.seed,
                    max_prompt_tokens=most, on_phase=on_phase)
                short = {key.rsplit("/", 1)[1]: value for key, value in metrics.items()}
                rows.append({"env": env.name, "weights": assemble.rollout_format(cfg, where, name), **short,
                             "seconds": time.monotonic() - began})
    return rows


def _rollouts(cfg: RunConfig) -> str:
    """The format of the rollouts."""
    own = None if "weights" in cfg.rollout.model_fields_set else hf.low_bit_format(hf.resolve(cfg.model))
    return own or cfg.rollout.weights
