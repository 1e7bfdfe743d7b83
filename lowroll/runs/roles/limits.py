"""The settings that runs with roles refuse. No torch."""

from __future__ import annotations

from lowroll.config import RunConfig
from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import STORED, is_dense


def refuse(cfg: RunConfig) -> None:
    """Raise ValueError for a setting that needs one process."""
    if cfg.guard is not None and cfg.guard.action == "fallback":
        raise ValueError(
            "guard.action: fallback puts another engine in the place of the run's own, in one "
            "process; with roles choose warn or tighten"
        )
    if cfg.noise is not None and cfg.eval.interval:
        raise ValueError(
            "eval.interval: an evaluation without noise beside a noise section is for one process"
        )
    ckpt = cfg.ckpt
    for key, is_set in (
        ("resume_step", ckpt.resume_step not in (None, -1)),
        ("skip_progress", ckpt.skip_progress),
        ("skip_buffer", ckpt.skip_buffer),
    ):
        if is_set:
            raise ValueError(
                f"ckpt.{key}: roles go on from where they were, however often one is started "
                "again; resume so in one process"
            )
    if not cfg.eval.skip_eval_on_resume:
        raise ValueError(
            "eval.skip_eval_on_resume: roles evaluate each policy once, however often one is "
            "started again; evaluate at a resumption in one process"
        )
    refuse_budget(cfg)
    if cfg.rollout.release_cache:
        raise ValueError("rollout.release_cache: engines of other processes keep their memory")
    refuse_engine(cfg)


def refuse_budget(cfg: RunConfig) -> None:
    """Raise ValueError for formats that may differ by layer."""
    if is_budget(cfg.rollout.weights) or cfg.rollout.weights == STORED:
        raise ValueError(
            f"rollout.weights: {cfg.rollout.weights}: formats that differ by layer are for one "
            "process; with roles write a format"
        )


def refuse_engine(cfg: RunConfig) -> None:
    """Raise ValueError for settings that a vLLM does not support with roles."""
    rollout, broadcast_type = cfg.rollout, cfg.weight_broadcast.type
    if rollout.engine == "native":
        return
    if rollout.vllm.url is not None:
        raise ValueError(
            "rollout.vllm.url: with roles a vLLM that runs already is named in client.base_url "
            "(docs/vllm.md says how it is started), and needs no lowroll serve"
        )
    if rollout.vllm.transfer == "nccl" or broadcast_type != "filesystem":
        key = "weight_broadcast.type" if broadcast_type != "filesystem" else "rollout.vllm.transfer"
        raise ValueError(f"{key}: with roles a vLLM reads new weights from the run's folder alone")
    if not cfg.train.lora and not is_dense(rollout.weights):
        raise ValueError(
            f"rollout.weights: {rollout.weights}: with roles a vLLM takes all weights dense, as they "
            "are broadcast; write rollout.weights: dense, or train.lora: true"
        )
