"""A run's adapter as a folder, and a policy's distance from the learner on the run's rollouts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lowroll.checkpoint.atomic_folders import publish_folder
from lowroll.config import RunConfig
from lowroll.model import adapter_base, adapter_card, hf, lora
from lowroll.model.device import free_memory
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format
from lowroll.model.scoring import score
from lowroll.model.transformer import Transformer
from lowroll.objectives.mismatch import mismatch
from lowroll.quant.formats import stored_format
from lowroll.transport.codec import CodecError
from lowroll.transport.rollout_log import read_rollouts, rollout_files
from lowroll.types import Batch, Sample
from lowroll.weights import aligned_forward, exploration_noise

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolicyGap:
    """The distance of a policy from the learner, in nats a token."""

    tokens: int
    logp_diff: float  # mean |difference of log-probs|
    kl: float  # of the learner to the policy, estimated by k3

    def __str__(self) -> str:
        return (
            f"{self.logp_diff:.3g} nats a token (mean |difference of log-probs|; KL {self.kl:.3g}) "
            f"over {self.tokens} tokens of the run's rollouts"
        )


def publish_adapter(
    cfg: RunConfig, model: Transformer, out: Path, batch: Batch | None, step: int
) -> PolicyGap | None:
    """Publish a learner's adapter as the new folder `out`, with its gap on `batch` in the card.

    Return None without a batch, for an unchanged base, or without memory for a second model.
    """
    scale = cfg.train.uaq_scale or 1.0
    source = resolve(cfg.model)
    revision = source.name if source.parent.name == "snapshots" else None  # of the hub's cache
    trained_base = adapter_base.of(model, scale)
    low_bit_name = low_bit_format(source)
    is_base_changed = (
        trained_base.rounds and stored_format(str(trained_base.weights)) != low_bit_name
    )
    gap = None

    def write(target: Path) -> None:
        nonlocal gap
        lora.write(model, target, cfg.model, source, scale, revision)
        if batch and is_base_changed:
            gap = _measure_gap(source, target, model, batch)
        measured = "" if gap is None else f"Measured: {gap}."
        adapter_card.write(target, cfg.model, trained_base, low_bit_name, measured)

    publish_folder(out, write, {"kind": "adapter", "step": step})
    return gap


def _measure_gap(source: Path, adapter: Path, model: Transformer, batch: Batch) -> PolicyGap | None:
    needed_bytes = 1.25 * model.spec.num_parameters * model.dtype.itemsize + (2 << 30)
    free_bytes = free_memory(model.device)
    try:
        if free_bytes is None or free_bytes > needed_bytes:  # where it is unknown, try
            policy = lora.load(hf.load(source, model.device, model.dtype), adapter)
            return gap_between(scores(model, batch), scores(policy, batch))
    except (torch.OutOfMemoryError, MemoryError):
        pass
    log.warning(
        "how far the adapter is from the learner on %s was not measured: too little memory is free "
        "for a second model",
        source,
    )
    return None


def newest_batch(run: Path, step: int, most: int = 4096) -> Batch | None:
    """Return an `excerpt` of the newest readable rollouts up to a step."""
    batch = None
    paths = [path for file_step, path in rollout_files(run / "rollouts") if file_step <= step]
    for path in reversed(paths):
        try:
            batch = read_rollouts(path)
            break
        except (CodecError, OSError) as error:
            log.warning("%s; older rollouts take its place in the measurement", error)
    return None if batch is None else excerpt(batch, most)


def excerpt(batch: Batch, most: int = 4096) -> Batch | None:
    """Return at most `most` tokens of a batch's rollouts, alternating between groups, or None."""
    kept_samples: list[Sample] = []
    tokens_left = most
    learned_samples = [sample for sample in batch.samples if sample.group >= 0]
    for sample in sorted(learned_samples, key=lambda sample: sample.rollout.behavior.sample):
        num_tokens = len(sample.prompt_ids) + len(sample.rollout.token_ids)
        if sample.rollout.token_ids and num_tokens <= tokens_left:
            kept_samples.append(sample)
            tokens_left -= num_tokens
    return replace(batch, samples=kept_samples) if kept_samples else None


def scores(model: Transformer, batch: Batch) -> Tensor:
    """Return `token_scores` of the dense forward, without noise."""
    with aligned_forward.suspended(model), exploration_noise.muted(model):
        return token_scores(model, batch, batch.temperature)


def token_scores(model: Transformer, batch: Batch, temperature: float) -> Tensor:
    """Return the log-probs [N] of a batch's response tokens, on the CPU."""
    sequences = [sample.prompt_ids + sample.rollout.token_ids for sample in batch.samples]
    prompt_lens = [len(sample.prompt_ids) for sample in batch.samples]
    return torch.cat(score(model, sequences, prompt_lens, temperature)).cpu()


def gap_between(learner: Tensor, policy: Tensor) -> PolicyGap:
    metrics = mismatch(
        learner=policy[None], behavior=learner[None], mask=torch.ones_like(learner[None])
    )
    return PolicyGap(len(learner), metrics["mismatch/logp_diff_mean"], metrics["mismatch/kl_k3"])
