"""`lowroll diagnose`: the causes of the gap between the rollouts and the learner, on one batch of
tokens.

Tokens are drawn once, and scored at points from the engine to the learner:

    decode    recorded by the engine while it drew them, under its KV cache
    prefill   the engine's weights again, a whole sequence at a time, without any cache
    aligned   the learner's forward in the engine's low-bit arithmetic (`weights.aligned_forward`)
    quantized the same on the dequantized matrices, where the format rounds activations
    dense     the learner's own forward; `fp8` or `nvfp4` if `train.forward` differs from the rollouts

Each step has one cause:

    decode -> prefill      kv where the cache has dropped or rounded keys, else as the next
    prefill -> aligned     rounding where the format rounds activations, else kernels
    aligned -> quantized   rounding
    quantized -> dense     weights (where the format leaves activations alone, from aligned)

Rounding amplifies: an order of sums that differs by 1e-7 flips codes of activations, layer by
layer, until both sides' rounding errors are independent.

In kl_k1, mean(from - to), the causes add up exactly; a cause's share is its mean |from - to| over
the sum of all. The tokens are those of `decode`, so k3 estimates a KL divergence only for the
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from lowroll.checkpoint.store import Checkpoint, Store
from lowroll.config import RunConfig
from lowroll.engine.base import Capabilities, Engine
from lowroll.kv.capacity import Workload
from lowroll.kv.tokens_saved import saving
from lowroll.model.scoring import score
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.objectives.mismatch import mismatch
from lowroll.quant.formats import get_format
from lowroll.runs import chosen_formats
from lowroll.runs.assembly import engines, models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.calibration import first_requests
from lowroll.runs.monitor import fallen_to
from lowroll.trainer.state import restore_weights
from lowroll.types import Request
from lowroll.weights import aligned_forward

CAUSES = ("weights", "rounding", "kernels", "kv", "staleness")
ADVICE = {
    "weights": "correction auto pays for it (acr, or tis for LoRA on its base); train.forward "
    "aligned makes it vanish",
    "rounding": "activations are rounded, and engine and learner round them to other codes from layer "
    "to layer; correction auto pays for it, and train.forward aligned does not make it vanish: of "
    "8 bits int8_rotated rounds least; other formats round weights alone",
    "kernels": "the arithmetic of engine and learner differs (dtype, order of sums); correction "
    "tis is enough",
    "kv": "the cache forgets or rounds what the learner sees; correction auto pays for it (sparse "
    "where keys are dropped)",
}
ALIGNABLE = (
    "the engine rounds activations and the learner does not; correction auto pays for it, and "
    "train.forward aligned makes it vanish"
)
# The bound of guard.kl_above; a larger gap cannot be corrected (docs/algorithms.md).
FAR = 0.1  # nats a token
TOO_FAR = (
    " A KL of {kl:.2g} nats a token is more than a correction can pay for: give the rollouts more bits, "
    "by a budget (rollout.weights: {{max_kl: 0.02}}) or a wider format, or train LoRA on their base; until then "
    "correction acr"
)
NEGLIGIBLE = 1e-4  # nats, for the worst token
_MISMATCH_METRICS = ("kl_k1", "kl_k3", "logp_diff_mean", "logp_diff_max", "ess")


@dataclass(frozen=True)
class MismatchPart:
    """One step: its cause, its ends, and their distance (names of `objectives.mismatch`)."""

    cause: str
    start: str
    stop: str
    kl_k1: float = 0.0
    kl_k3: float = 0.0
    logp_diff_mean: float = 0.0
    logp_diff_max: float = 0.0
    ess: float = 1.0
    share: float = 0.0
    remark: str = ""


@dataclass(frozen=True)
class Diagnosis:
    model: str
    format: str
    num_tokens: int
    parts: tuple[MismatchPart, ...]
    whole: MismatchPart
    notes: tuple[str, ...] = field(default=())

    def share(self, cause: str) -> float:
        return sum(part.share for part in self.parts if part.cause == cause)

    @property
    def reading(self) -> str:
        """Describe the largest cause and its remedy."""
        if max(part.logp_diff_max for part in (*self.parts, self.whole)) < NEGLIGIBLE:
            return (
                f"engine and learner agree: no token differs by {NEGLIGIBLE:g} nats or more, so "
                "there is nothing to correct"
            )
        cause = max(CAUSES, key=self.share)
        advice = ADVICE[cause]
        engine_differences = [
            part.logp_diff_max for part in self.parts if part.start in ("decode", "prefill")
        ]
        if cause == "rounding" and max(engine_differences, default=0.0) < NEGLIGIBLE:
            advice = ALIGNABLE
        reading = f"{self.share(cause):.0%} of the gap comes from {cause}: {advice}"
        if cause in ("weights", "rounding") and self.whole.kl_k3 > FAR:
            reading += "." + TOO_FAR.format(kl=self.whole.kl_k3)
        return reading

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "shares": {cause: self.share(cause) for cause in CAUSES},
            "reading": self.reading,
        }


def attribute(
    log_probs: Mapping[str, Tensor], segments: Tensor, blames_kv: bool = False
) -> tuple[tuple[MismatchPart, ...], MismatchPart]:
    """Return the parts, in the order of CAUSES, and the whole.

    log_probs: [N] by point, in order, with the learner's own forward last. segments: each token's
    sequence [N]. blames_kv: the cache dropped or rounds keys.
    """
    rounds_activations = "quantized" in log_probs
    arithmetic_cause = "rounding" if rounds_activations else "kernels"
    cache_cause = "kv" if blames_kv else arithmetic_cause
    *_, point_before, last_point = log_probs

    def measure(cause: str, start: str, stop: str) -> MismatchPart:
        metrics = mismatch(
            learner=log_probs[stop],
            behavior=log_probs[start],
            mask=torch.ones_like(segments),
            segments=segments,
        )
        values: dict[str, Any] = {name: metrics[f"mismatch/{name}"] for name in _MISMATCH_METRICS}
        return MismatchPart(cause, start, stop, **values)

    steps = [measure("weights", point_before, last_point)]
    if rounds_activations:
        steps.append(measure("rounding", "aligned", "quantized"))
    steps.append(measure(arithmetic_cause, "prefill", "aligned"))
    steps.append(measure(cache_cause, "decode", "prefill"))
    total = sum(step.logp_diff_mean for step in steps)
    parts = [replace(step, share=step.logp_diff_mean / total if total else 0.0) for step in steps]
    if not blames_kv:
        parts.append(MismatchPart("kv", "", "", remark="the cache forgot and rounded nothing"))
    parts.append(
        MismatchPart("staleness", "", "", remark="engine and learner hold the same version")
    )
    parts.sort(key=lambda part: CAUSES.index(part.cause))
    whole = replace(measure("all", "decode", last_point), share=float(total > 0))
    return tuple(parts), whole


def diagnose(
    cfg: RunConfig,
    run: Path | None = None,
    prompts: Sequence[str] = (),
    num_prompts: int = 16,
    n: int = 4,
) -> Diagnosis:
    """Draw one batch and score it at every point.

    run: a run folder, whose newest checkpoint is used. prompts: user messages, else `num_prompts`
    of the environments. n: responses a prompt. ValueError when nothing was drawn or the run cannot
    be read.
    """
    run_cfg = cfg.resolved()
    compute = Compute.of(run_cfg)
    chat = models.chat_of(run_cfg)
    checkpoint = None if run is None else _newest_checkpoint(run)
    cfg = _with_formats(run_cfg, run, compute, chat)
    model = models.learner(cfg, compute)
    weights, notes = cfg.rollout.weights, _notes(cfg)
    if checkpoint is not None:
        weights = _rollout_format(checkpoint, run_cfg, weights)
        restore_weights(model, checkpoint.tensors["model"], checkpoint.state["trainer"])
        notes.append(f"weights of step {checkpoint.step}")
    elif run is not None:
        notes.append("the run has no checkpoint yet: these are the weights that it starts from")
    requests = first_requests(cfg, model.spec, chat, prompts, num_prompts, n)
    lengths = [len(request.prompt_ids) for request in requests]
    workload = Workload(len(requests), n, max(lengths, default=1), cfg.rollout.max_tokens)
    format = compute.format(weights)
    with closing(engines.make(cfg, compute, model, chat, weights, [workload])) as engine:
        capabilities = engine.capabilities
        temperature = cfg.rollout.temperature
        drawn = draw(engine, requests, temperature)
    points = drawn.points | learner_points(model, format, drawn, temperature, cfg.train.forward)
    evictions = saving(capabilities.kv, drawn.responses)["evictions"]
    blames_kv = evictions > 0 or capabilities.kv_dtype is not None
    parts, whole = attribute(points, drawn.segments, blames_kv)
    notes += _cache_notes(capabilities, evictions)
    return Diagnosis(str(run or cfg.model), format, len(drawn.segments), parts, whole, tuple(notes))


@dataclass(frozen=True)
class DrawnSequences:
    """Rollouts with their prompts, and the engine's log-probs [N] of the responses."""

    sequences: list[list[int]]
    prompt_lens: list[int]
    points: dict[str, Tensor]

    @property
    def responses(self) -> list[tuple[int, int]]:
        return [
            (length, len(ids) - length)
            for ids, length in zip(self.sequences, self.prompt_lens, strict=True)
        ]

    @property
    def segments(self) -> Tensor:
        """Return each token's sequence [N]."""
        sizes = torch.tensor([size for _, size in self.responses])
        return torch.arange(len(sizes)).repeat_interleave(sizes)


def draw(engine: Engine, requests: list[Request], temperature: float) -> DrawnSequences:
    """Draw and score rollouts. ValueError when the engine cannot score, or nothing was drawn."""
    if not engine.capabilities.scores:
        raise ValueError("diagnose: this engine cannot score given tokens")
    pairs = [
        (group.request.prompt_ids, rollout)
        for group in engine.generate(requests)
        for rollout in group.rollouts
        if rollout.token_ids
    ]
    if not pairs:
        raise ValueError("diagnose: no token was drawn")
    sequences = [ids + rollout.token_ids for ids, rollout in pairs]
    lengths = [len(ids) for ids, _ in pairs]
    points = {
        "decode": torch.tensor([logprob for _, rollout in pairs for logprob in rollout.logprobs]),
        "prefill": torch.cat(engine.score(sequences, lengths, temperature)),
    }
    return DrawnSequences(sequences, lengths, points)


def learner_points(
    model: Transformer,
    format: str,
    drawn: DrawnSequences,
    temperature: float,
    forward: str = "dense",
) -> dict[str, Tensor]:
    """Return the log-probs [N] at the learner's points, in order. format: the engine's. forward:
    `train.forward`. The model stays aligned with the engine."""

    def scored() -> Tensor:
        return torch.cat(score(model, drawn.sequences, drawn.prompt_lens, temperature)).cpu()

    _align(model, format)
    points = {"aligned": scored()}
    last_point = "dense" if forward in ("aligned", format) else forward
    with aligned_forward.suspended(model):
        if last_point != "dense":
            aligned_forward.align(model, last_point)
        learner_scores = scored()
    if _rounds_activations(model):
        if model.weight_format is not None and last_point == "dense":
            # An adapter's base is the codes' matrices: its dense forward rounds nothing.
            points["quantized"] = learner_scores
        else:
            with aligned_forward.dequantized(model):
                points["quantized"] = scored()
    points[last_point] = learner_scores  # last, in the order of `attribute`
    return points


def _rounds_activations(model: Transformer) -> bool:
    aligned_codes = [linear.aligned for _, linear in model.linears() if linear.aligned is not None]
    return any(get_format(codes.format).rounds_activations for codes in aligned_codes)


def _align(model: Transformer, format: str) -> None:
    base = model.weight_format
    if base not in (None, format) and get_format(format).dense:
        # After a guard's fallback under LoRA the engine has the base's values.
        aligned_forward.realign(model, format)
    else:
        aligned_forward.align(model, format)


def _with_formats(
    cfg: RunConfig, run: Path | None, compute: Compute, chat: ChatTokenizer
) -> RunConfig:
    if run is not None:
        return chosen_formats.settled(cfg, run, compute)
    return chosen_formats.with_weights(
        cfg, chosen_formats.named(cfg.rollout.weights, cfg, compute, chat)
    )


def _newest_checkpoint(run: Path) -> Checkpoint | None:
    store = Store(run / "checkpoints")
    steps = store.steps()
    if not steps:
        return None
    checkpoint = store.load(steps[-1], only=("model",))
    if checkpoint.meta.get("command") == "sft":
        raise ValueError(f"diagnose: {run} is a run of lowroll sft, which has drawn nothing")
    return checkpoint


def _rollout_format(held: Checkpoint, cfg: RunConfig, weights: str) -> str:
    run_weights = yaml.safe_load(held.meta["config"])["rollout"]["weights"]
    if cfg.rollout.weights != run_weights:
        return weights
    return fallen_to(held.state) or weights


def _cache_notes(able: Capabilities, evictions: float) -> list[str]:
    notes: list[str] = []
    if able.kv.budget is not None:
        notes.append(
            f"{able.kv.name} with a budget of {able.kv.budget} compacted each response's cache "
            f"{evictions:.3g} times on average"
        )
    if able.kv_dtype is not None:
        notes.append(f"the cache holds keys and values in {able.kv_dtype}")
    if len(notes) == 2:
        notes.append("what kv is worth of each alone: rollout.kv.dtype auto, or its policy dense")
    return notes


def _notes(cfg: RunConfig) -> list[str]:
    rollout = cfg.rollout
    notes: list[str] = []
    sampler = (rollout.top_k, rollout.top_p, rollout.min_p)
    if (*sampler, rollout.repetition_penalty, rollout.min_tokens) != (0, 1.0, 0.0, 1.0, 0):
        notes.append(
            "drawn without the run's top_k, top_p, min_p, repetition_penalty and min_tokens; their "
            "part is not shown"
        )
    if cfg.noise is not None:
        notes.append("drawn from clean norms; the part of the run's noise is not shown")
    if cfg.forward_weights == rollout.weights:
        notes.append(
            "train.forward is aligned: the run learns from `aligned`, and does not pay for weights"
        )
    if cfg.train.replay_kv and rollout.cache.evicts:
        notes.append(
            "train.replay_kv: the run's learner attends to what the cache held, and does not see "
            "the keys that were dropped; of kv it pays for the rounding alone"
        )
    if cfg.train.lora:
        notes.append(
            "LoRA: the learner's base is the engine's, so weights is the arithmetic of the product "
            "alone, and rounding what the engine does to activations"
        )
    return notes
