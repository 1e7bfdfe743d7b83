"""`lowroll grpo run.yaml [a.b=c ...]`: train by reinforcement learning."""
from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lowroll.cli.settings import add_folder_options, add_settings, read_settings

if TYPE_CHECKING:
    from lowroll.config import RunConfig


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="lowroll grpo", description=(
        "Train a model by GRPO and its relatives with low-precision rollouts, in one process. The run folder "
        "(output_dir) holds the resolved settings, metrics.jsonl, every rollout, checkpoints and the logs."))
    add_settings(p)
    add_folder_options(p)
    p.add_argument("--dry-run", action="store_true", help="print the plan and the resolved settings, then stop")
    return p


def run(arguments: argparse.Namespace) -> int:
    cfg = read_settings(arguments)
    if arguments.dry_run:
        print("\n".join(f"# {line}" for line in plan(cfg)))
        print(cfg.dump(), end="")
        return 0
    from lowroll.inprocess import run as train
    result = train(cfg, resume=arguments.resume, overwrite=arguments.overwrite)
    if result.signal:
        return 128 + result.signal
    if result.ended:
        print(f"the run ended before its last step: {result.ended}")
    print(f"trained weights: {result.folder / 'final'}\nplots: lowroll report {result.folder}")
    return 0


def plan(cfg: RunConfig) -> list[str]:
    """What the run will do, in a few lines."""
    rollout, train = cfg.rollout, cfg.train
    updates = train.max_steps * train.minibatches
    tokens = sum(now.batch_size * now.rollout.max_tokens for now in map(cfg.at, range(1, train.max_steps + 1)))
    learned = f"LoRA adapters of rank {train.lora_rank}" if train.lora else "all weights"
    low, high = cfg.loss.eps_low, cfg.loss.eps_high
    clip = "no clip" if low is None or high is None else f"clip {low:g}/{high:g}"
    return [
        f"model {cfg.model}, learning {learned}; rollouts with {rollout.weights} weights",
        f"{train.max_steps} steps of {cfg.num_groups} prompts x {cfg.rollouts_per_example} rollouts of up to "
        f"{rollout.max_tokens} tokens: at most {tokens:,} tokens generated",
        *(f"from step {stage.step}: {now.num_groups} prompts x {now.rollouts_per_example} rollouts of up to "
          f"{now.rollout.max_tokens} tokens" for stage in cfg.stages for now in [cfg.at(stage.step)]),
        _cache(cfg),
        f"{updates} updates at learning rate {train.learning_rate:g} ({train.lr_scheduler_type}, "
        f"{train.warmup_steps} steps of warm-up)",
        f"algorithm {cfg.algorithm}, advantages {cfg.advantage}, correction {cfg.correction}, "
        f"{clip}, reduce {cfg.loss.reduce}",
        f"environments {', '.join(f'{env.name} ({env.weight:g})' for env in cfg.env)}; run folder {cfg.output_dir}",
    ]


def _cache(cfg: RunConfig) -> str:
    """The size of the KV cache, or what bounds it: the prompts' lengths are known once they are read."""
    from lowroll.kv.capacity import SHARE, Workload
    rollout, row = cfg.rollout, cfg.train.tokens_per_microbatch
    if rollout.cache_tokens is not None:
        return f"KV cache of {rollout.cache_tokens:,} tokens"
    stages = [cfg, *(cfg.at(stage.step) for stage in cfg.stages)]
    counts = [(now.num_groups, now.rollouts_per_example, now.rollout.max_tokens) for now in stages]
    if cfg.eval.interval:
        counts += [(cfg.eval.num_examples, cfg.eval.rollouts_per_example, now.rollout.max_tokens) for now in stages]
    tokens = max(Workload(groups, n, row - response, response).tokens(rollout.page_size, rollout.max_batch)
                 for groups, n, response in counts)
    return (f"KV cache as the first prompts of the environments need it: at most {tokens:,} tokens (rows of {row:,}), "
            f"and 1/{SHARE} of the free memory")
