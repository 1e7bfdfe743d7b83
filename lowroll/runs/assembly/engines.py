"""The rollout engine of a run, and what the run will hold in it together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lowroll.config import RunConfig
from lowroll.engine.base import Capabilities, Engine
from lowroll.engine.native import NativeEngine
from lowroll.envs import Environment
from lowroll.kv.capacity import Workload
from lowroll.model.spec import ModelSpec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.assembly import caches, capabilities, exactness, prompts, vllm
from lowroll.runs.assembly.compute import Compute
from lowroll.weights.noise import Noise
from lowroll.weights.sync.base import Kind
from lowroll.weights.sync.update import WeightUpdate


def make(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    weights: str | None = None,
    workloads: Sequence[Workload] = (),
) -> Engine:
    """Build a rollout engine that holds the weights of `model` as version 0, in `weights` or the
    run's own rollout format, with a cache for `workloads`. Close it at the end. The second format
    (`rollout.large_batch_weights`) belongs to the run's own format only: an engine in any other
    format has just that one."""
    name = compute.format(weights or cfg.rollout.weights)
    if cfg.rollout.engine == "native":
        made: Engine = _native(cfg, compute, model, chat, name, workloads)
    elif cfg.rollout.vllm.url is None:
        made = vllm.start(cfg, compute, model, name)
    else:
        made = vllm.attach(cfg, model, name)
    try:
        capabilities.check(cfg, made.capabilities)
        if cfg.rollout.engine != "native":
            _check_vllm(cfg, model.spec, made.capabilities)
            made.update_weights(update(cfg, model, 0))
    except BaseException:
        made.close()
        raise
    return made


def update(
    cfg: RunConfig, model: Transformer, version: int, noise: Noise | None = None
) -> WeightUpdate:
    """Return a version of the learner's weights for the run's engine: for one in this process the
    learner itself, for another a stream."""
    local = WeightUpdate.local(model, version, noise)
    return local if cfg.rollout.engine == "native" else local.as_stream()


def _native(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    name: str,
    workloads: Sequence[Workload],
) -> NativeEngine:
    rollout = cfg.rollout
    own = compute.format(rollout.weights)
    return NativeEngine(
        model,
        weights=name,
        kv=caches.policy(cfg),
        kv_dtype=rollout.cache.kv_dtype,
        dtype=None if get_format(name).dense else compute.dtype,
        tokenizer=chat.tokenizer,
        page_size=rollout.page_size,
        cache_tokens=rollout.cache_tokens,
        workloads=workloads,
        max_batch=rollout.max_batch,
        prefill_chunk=rollout.prefill_chunk,
        noisy=cfg.noise is not None,
        large_batch_weights=rollout.large_batch_weights if name == own else None,
        keep_dense=rollout.keep_dense,
        record_evictions=cfg.train.replay_kv,
        max_model_len=rollout.max_model_len,
        memory_share=rollout.gpu_memory_utilization,
        prefix_caching=rollout.prefix_caching,
        turn_caching=rollout.turn_caching,
        cuda_graphs=rollout.cuda_graphs,
        exact=exactness.of_engine(cfg, compute, model.spec, name),
    )


def check(cfg: RunConfig) -> None:
    """Raise ValueError for what would keep the run's engine from being built, before anything
    is."""
    if cfg.rollout.engine != "native":
        vllm.check(cfg)


def _check_vllm(cfg: RunConfig, spec: ModelSpec, able: Capabilities) -> None:
    """Raise ValueError that names what a run asks of vLLM and the installed one does not have."""
    needed = vllm.context(cfg, spec)
    if able.context_length < needed:
        raise ValueError(
            f"train.tokens_per_microbatch: prompts and responses of up to {needed} tokens are "
            f"asked for, and this vLLM's context is {able.context_length} (--max-model-len)"
        )
    kind: Kind = "adapter" if cfg.train.lora else "full"
    if kind not in able.updates:
        takes = " and ".join(sorted(able.updates)) or "none"
        raise ValueError(
            f"train.lora: updates of kind {kind!r} are needed, and this vLLM takes {takes}"
        )


def with_engine(cfg: RunConfig, engine: str) -> RunConfig:
    """Return the same settings with another engine."""
    return cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"engine": engine})})


def with_cache(cfg: RunConfig, cache_tokens: int | None) -> RunConfig:
    """Return the same settings with a cache of this size."""
    return cfg.model_copy(
        update={"rollout": cfg.rollout.model_copy(update={"cache_tokens": cache_tokens})}
    )


def workloads(
    cfg: RunConfig,
    spec: ModelSpec,
    chat: ChatTokenizer,
    envs: Mapping[str, Environment],
    held_out: Mapping[str, Environment],
) -> list[Workload]:
    """Return the workloads that a run will have in its engine: the batch of each stage and, if it
    evaluates, the examples. Empty when the cache has a size already.

    The longest of an environment's first prompts stands for all; a rare longer one finds room, and
    others may wait.
    """
    if cfg.rollout.cache_tokens is not None:
        return []
    found = []
    train = _lengths(envs, "train", prompts.LOOKED_AT, chat)
    for now in cfg.each_stage():
        n = now.rollouts_per_example
        found.append(_workload(now, spec, now.num_groups, n, train, _turns(envs)))
        if cfg.eval.interval:
            found.append(eval_workload(now, spec, chat, held_out))
    return found


def eval_workload(
    cfg: RunConfig, spec: ModelSpec, chat: ChatTokenizer, envs: Mapping[str, Environment]
) -> Workload:
    """Return the workload that an evaluation has in the engine at once."""
    asked = cfg.eval.num_examples
    examples = asked or max(cfg.eval.count(env.size("test")) for env in envs.values())
    test = _lengths(envs, "test", min(examples, prompts.LOOKED_AT), chat)
    return _workload(cfg, spec, examples, cfg.eval.rollouts_per_example, test, _turns(envs))


def _workload(
    cfg: RunConfig, spec: ModelSpec, groups: int, n: int, lengths: Iterable[int], turns: int
) -> Workload:
    """Return the workload of conversations of at most `turns` turns. An environment's messages are
    taken to be as long as a response."""
    most = prompts.longest(cfg, spec)
    response = cfg.rollout.max_tokens
    prompt = max((length for length in lengths if length <= most), default=most)
    whole = min((2 * turns - 1) * response, most + response - prompt)
    return Workload(groups, n, prompt, whole, most + response)


def _turns(envs: Mapping[str, Environment]) -> int:
    return max(env.max_turns for env in envs.values())


def _lengths(
    envs: Mapping[str, Environment], split: str, count: int, chat: ChatTokenizer
) -> list[int]:
    return [n for env in envs.values() for n in prompts.lengths(env, split, count, chat)]
