"""The run in words, for the report's header."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from lowroll.config import RunConfig
from lowroll.model.spec import ModelSpec
from lowroll.runs.assembly.compute import Compute


def about(cfg: RunConfig, compute: Compute, spec: ModelSpec) -> Mapping[str, str]:
    return {
        "title": Path(cfg.output_dir).resolve().name,
        "model": f"{cfg.model} ({spec.architecture}, {spec.num_parameters / 1e6:.1f} M parameters)",
        "algorithm": cfg.algorithm,
        "learning": _describe_learning(cfg),
        "env": ", ".join(env.name or env.id for env in cfg.env),
        "rollout": _describe_rollouts(cfg, compute),
        "correction": _describe_correction(cfg),
        "device": f"{compute.device}, {str(compute.dtype).removeprefix('torch.')}, "
        f"{torch.get_num_threads()} threads",
    }


def learned(cfg: RunConfig) -> str:
    return f"LoRA rank {cfg.train.lora_rank}" if cfg.train.lora else "full fine-tuning"


def _describe_learning(cfg: RunConfig) -> str:
    train = cfg.train
    text = learned(cfg)
    if train.uaq_scale is not None:
        text += f", update-aware scaling {train.uaq_scale:g}"
    text += (
        f", {cfg.algorithm}, {train.optimizer}, {train.forward} forward, {train.backward} backward, learning rate "
        f"{train.learning_rate:g}"
    )
    if cfg.has_critic:
        critic = cfg.critic
        text += (
            f"; critic {critic.model or 'of the same model'}, learning rate "
            f"{critic.learning_rate:g}"
        )
    return text


def _describe_rollouts(cfg: RunConfig, compute: Compute) -> str:
    rollout, noise = cfg.rollout, cfg.noise
    text = (
        f"{compute.format(rollout.weights)} weights, {cfg.rollouts_per_example} samples a prompt, "
        f"at most {rollout.max_tokens} tokens"
    )
    if rollout.engine != "native":
        text += f", by {rollout.vllm.words}"
    for stage in cfg.stages:
        text += f", {cfg.at(stage.step).rollout.max_tokens} from step {stage.step}"
    if noise is not None:
        text += (
            f", noise {noise.sigma_start:g} to {noise.sigma_end:g} ({noise.schedule}, learner "
            f"{noise.learner})"
        )
    if rollout.kv is not None:
        options = ", ".join(f"{name} {value}" for name, value in rollout.kv.options.items())
        text += f", a KV cache of {rollout.kv.name}" + (f" ({options})" if options else "")
    if rollout.cache_tokens is not None:
        text += f", a KV cache of {rollout.cache_tokens:,} tokens"
    return text


def _describe_correction(cfg: RunConfig) -> str:
    prefix = "correction: "
    reasons = [note.removeprefix(prefix) for note in cfg.notes if note.startswith(prefix)]
    return reasons[0] if reasons else cfg.correction
