"""The rollout engine of a run and its workloads.

A row of ENGINES is a module that builds an engine:

    make(cfg, compute, model, chat, weights, workloads)

Outside the learner's process it also has

    check(cfg)                   raises ValueError when the engine cannot be started or reached
    refuse(cfg, spec)            raises ValueError for an unsupported model
    begin(cfg, model, engine)    sends the learner's weights, as version 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from lowroll.config import RunConfig
from lowroll.engine.base import Engine
from lowroll.envs import Environment
from lowroll.kv.capacity import Workload
from lowroll.model.spec import ModelSpec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.runs.assembly import caches, capabilities, prompts
from lowroll.runs.assembly.compute import Compute
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.sync.update import WeightUpdate

ENGINES = {  # by `rollout.engine`; only the used row is imported
    "native": "lowroll.runs.assembly.native",
    "vllm": "lowroll.runs.assembly.vllm",
}


def make(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    weights: str | None = None,
    workloads: Sequence[Workload] = (),
) -> Engine:
    """Build a rollout engine with the weights of `model` as version 0. The caller closes it."""
    refuse(cfg, model.spec)
    weight_format = compute.format(weights or cfg.rollout.weights)
    module = _engine_module(cfg)
    engine: Engine = module.make(cfg, compute, model, chat, weight_format, workloads)
    try:
        capabilities.check(cfg, engine.capabilities)
        if cfg.rollout.engine != "native":
            module.begin(cfg, model, engine)
    except BaseException:
        engine.close()
        raise
    return engine


def update(
    cfg: RunConfig, model: Transformer, version: int, noise: Noise | None = None
) -> WeightUpdate:
    """Return the learner's weights, as a stream for an engine outside this process."""
    local = WeightUpdate.local(model, version, noise)
    return local if cfg.rollout.engine == "native" else local.as_stream()


def check(cfg: RunConfig) -> None:
    """Raise ValueError when the engine cannot be started or reached."""
    if cfg.rollout.engine != "native":
        _engine_module(cfg).check(cfg)


def refuse(cfg: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError for settings that the engine does not support of this model."""
    caches.refuse(cfg, spec)
    if cfg.rollout.engine != "native":
        _engine_module(cfg).refuse(cfg, spec)


def _engine_module(cfg: RunConfig) -> Any:
    return import_module(ENGINES[cfg.rollout.engine])


def with_rollout(cfg: RunConfig, **settings: object) -> RunConfig:
    """Return the run's settings with changes of `rollout`."""
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=settings)})


def workloads(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    held_out: Mapping[str, Environment],
) -> list[Workload]:
    """Return the engine's workloads: each stage's batch, and evaluations. Empty for a set cache
    size.

    An environment's longest first prompt stands for all. A longer one fits, but others may wait.
    """
    if cfg.rollout.cache_tokens is not None:
        return []
    run_workloads = []
    lengths = _first_lengths(envs, "train", prompts.LOOKED_AT, chat)
    turns = _max_turns(envs)
    for stage_cfg in cfg.each_stage():
        groups, n = stage_cfg.num_groups, stage_cfg.rollouts_per_example
        run_workloads.append(_workload(stage_cfg, spec, groups, n, lengths, turns))
        if cfg.eval.interval:
            run_workloads.append(eval_workload(stage_cfg, spec, chat, held_out))
    return run_workloads


def eval_workload(
    cfg: RunConfig, spec: ModelSpec, chat: ChatTokenizer, envs: Mapping[str, Environment]
) -> Workload:
    examples = cfg.eval.num_examples
    if not examples:
        examples = max(cfg.eval.count(env.size("test")) for env in envs.values())
    lengths = _first_lengths(envs, "test", min(examples, prompts.LOOKED_AT), chat)
    return _workload(cfg, spec, examples, cfg.eval.rollouts_per_example, lengths, _max_turns(envs))


def _workload(
    cfg: RunConfig, spec: ModelSpec, groups: int, n: int, lengths: Iterable[int], turns: int
) -> Workload:
    longest, response = prompts.longest(cfg, spec), cfg.rollout.max_tokens
    prompt = max((length for length in lengths if length <= longest), default=longest)
    # The environment's messages are assumed as long as responses.
    all_turns = (2 * turns - 1) * response
    after_prompt = min(all_turns, longest + response - prompt)
    return Workload(groups, n, prompt, after_prompt, longest=longest + response)


def _max_turns(envs: Mapping[str, Environment]) -> int:
    return max(env.max_turns for env in envs.values())


def _first_lengths(
    envs: Mapping[str, Environment], split: str, count: int, chat: ChatTokenizer
) -> list[int]:
    return [length for env in envs.values() for length in prompts.lengths(env, split, count, chat)]
