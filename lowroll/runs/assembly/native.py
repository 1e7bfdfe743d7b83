"""lowroll's own engine, in the process of the run."""

from __future__ import annotations

from collections.abc import Sequence

from lowroll.config import RunConfig
from lowroll.engine.native import NativeEngine
from lowroll.kv.capacity import Workload
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.assembly import caches, exactness
from lowroll.runs.assembly.compute import Compute


def make(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    weights: str,
    workloads: Sequence[Workload],
) -> NativeEngine:
    rollout = cfg.rollout
    # The second format, for large batches, belongs to the run's own.
    is_run_format = weights == compute.format(rollout.weights)
    return NativeEngine(
        model,
        weights=weights,
        kv=caches.policy(cfg),
        kv_dtype=rollout.cache.kv_dtype,
        dtype=None if get_format(weights).dense else compute.dtype,
        tokenizer=chat.tokenizer,
        page_size=rollout.page_size,
        cache_tokens=rollout.cache_tokens,
        workloads=workloads,
        max_batch=rollout.max_batch,
        prefill_chunk=rollout.prefill_chunk,
        noisy=cfg.noise is not None,
        large_batch_weights=rollout.large_batch_weights if is_run_format else None,
        keep_dense=rollout.keep_dense,
        record_evictions=cfg.train.replay_kv,
        max_model_len=rollout.max_model_len,
        memory_share=rollout.gpu_memory_utilization,
        prefix_caching=rollout.prefix_caching,
        turn_caching=rollout.turn_caching,
        cuda_graphs=rollout.cuda_graphs,
        exact=exactness.of_engine(cfg, compute, model.spec, weights),
    )
