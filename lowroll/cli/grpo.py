"""`lowroll grpo run.yaml [a.b=c ...]`: train by reinforcement learning."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lowroll.cli.closing_lines import conclude
from lowroll.cli.settings import (
    add_dry_run,
    add_folder_options,
    add_settings,
    read_settings,
    show,
)

if TYPE_CHECKING:
    from lowroll.config import RunConfig


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll grpo",
        description=(
            "Train a model by GRPO and its relatives with low-precision rollouts, in one process, or "
            "with launcher=local or launcher=ray in several. The run folder (output_dir) holds the resolved "
            "settings, metrics.jsonl, every rollout, checkpoints and the logs."
        ),
    )
    add_settings(p)
    add_folder_options(p)
    add_dry_run(p, "model, environments, data and memory")
    return p


def run(arguments: argparse.Namespace) -> int:
    cfg = read_settings(arguments)
    if arguments.dry_run:
        from lowroll.runs.preflight import look_at_run

        findings = look_at_run(cfg, arguments.resume, arguments.overwrite)
        return show(cfg, plan(cfg), findings, arguments.verbose)
    if cfg.launcher != "none":
        from lowroll.runs.roles.supervisor import launch

        result = launch(cfg, resume=arguments.resume, overwrite=arguments.overwrite)
    else:
        from lowroll.runs.grpo import run as train

        result = train(cfg, resume=arguments.resume, overwrite=arguments.overwrite)
    return conclude(result)


def plan(cfg: RunConfig) -> list[str]:
    """Describe the run in a few lines."""
    rollout, train = cfg.rollout, cfg.train
    updates = train.max_steps * train.minibatches
    step_cfgs = [cfg.at(step) for step in range(1, train.max_steps + 1)]
    tokens = sum(step_cfg.batch_size * step_cfg.rollout.max_tokens for step_cfg in step_cfgs)
    learned = f"LoRA adapters of rank {train.lora_rank}" if train.lora else "all weights"
    low, high = cfg.loss.eps_low, cfg.loss.eps_high
    clip = "no clip" if low is None or high is None else f"clip {low:g}/{high:g}"
    cache_note = "" if rollout.kv is None else f" and a cache of {rollout.kv.name}"
    engine_note = "" if rollout.engine == "native" else f" by {rollout.vllm.words}"
    return [
        f"model {cfg.model}, learning {learned}; rollouts with {rollout.weights} weights{cache_note}{engine_note}",
        f"{train.max_steps} steps of {cfg.num_groups} prompts x {cfg.rollouts_per_example} "
        f"rollouts of up to {rollout.max_tokens} tokens: at most {tokens:,} tokens generated",
        *(_describe_stage(stage.step, cfg.at(stage.step)) for stage in cfg.stages),
        f"{updates} updates at learning rate {train.learning_rate:g} ({train.lr_scheduler_type}, "
        f"{train.warmup_steps} steps of warm-up)",
        f"algorithm {cfg.algorithm}, advantages {cfg.advantage}, correction {cfg.correction}, "
        f"{clip}, reduce {cfg.loss.reduce}",
        *_evaluations(cfg),
        f"environments {', '.join(f'{env.name} ({env.weight:g})' for env in cfg.env)}; run folder "
        f"{cfg.output_dir}",
    ]


def _describe_stage(step: int, stage_cfg: RunConfig) -> str:
    return (
        f"from step {step}: {stage_cfg.num_groups} prompts x {stage_cfg.rollouts_per_example} "
        f"rollouts of up to {stage_cfg.rollout.max_tokens} tokens"
    )


def _evaluations(cfg: RunConfig) -> list[str]:
    evaluation = cfg.eval
    if not evaluation.interval:
        return []
    return [
        f"evaluation before step 1, every {evaluation.interval} steps and after the last: "
        f"{evaluation.most} held-out prompts x {evaluation.rollouts_per_example} responses an "
        "environment each time, twice before step 1 and after the last (eval.num_examples; "
        "eval.interval: null has none)"
    ]
