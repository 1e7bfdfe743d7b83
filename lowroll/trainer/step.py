"""One training step: from a batch of scored rollouts to new weights and metrics.

For each minibatch M of whole groups the learner ascends

    J(theta) = objective(learner, proximal, behavior, A) - kl_coef * KL(learner, reference)

of the log-probs under the learner, the proximal policy (the learner before the batch), the behavior
policy that the rollouts recorded, and the frozen reference; all at the sampling temperature.

1. Denominators are the counts of M, so micro-batches add up exactly. All sequences of M count,
   masked or not.
2. With one minibatch the proximal policy is the learner, detached. With more, or with weights
   divided by their mean over the batch, a pass without gradient records its log-probs first. It is
   packed as the updates, because a product with another number of rows rounds differently. So R = 1
   bit for bit until the weights change.
3. A sequence with advantage 0 runs forward only, unless a KL term needs its gradient.
4. With `replay_kv` the learner alone attends to what each sample's cache held
(`model.evicted_attention`). Else a prompt may be fed once for its responses
(`model.shared_prompts`); a model that cannot share them reads whole sequences.
5. The KL term omits tokens that the objective rejects; denominators count them.

T: tokens fed, N: response tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowroll.model import lora
from lowroll.model.attention import Attend
from lowroll.model.evicted_attention import check_evictions, replayed
from lowroll.model.logprobs import token_log_probs
from lowroll.model.transformer import Transformer
from lowroll.objectives.kl import penalty
from lowroll.objectives.mismatch import by_length, by_staleness, mismatch
from lowroll.objectives.objective import Objective
from lowroll.objectives.reduce import Denominators, masked_mean
from lowroll.objectives.rejection import rejection
from lowroll.parallel.ranks import ALONE, PerToken, Ranks
from lowroll.trainer.critic import Critic
from lowroll.trainer.optim import Optimizer
from lowroll.trainer.packing import (
    MicrobatchSchedule,
    PackedBatch,
    check,
    collate,
    cost,
    gather,
    split_groups,
)
from lowroll.types import Batch, RunFailed, Sample, Score
from lowroll.weights import derived_tensors, exploration_noise

MAX_REFUSALS = 3  # non-finite updates in a row that end the run

NO_UPDATE = {
    "optim/grad_norm": 0.0,
    "optim/update_norm": 0.0,
    "optim/skipped": 0.0,
}  # of a step that does not train the policy


class TrainingDiverged(RunFailed):
    """A run of MAX_REFUSALS non-finite updates. The weights are those before."""


@dataclass(frozen=True)
class LearnSettings:
    """Settings of the learner."""

    objective: Objective
    options: Mapping[str, Any] = field(default_factory=dict)
    minibatches: int = 1  # optimizer updates a batch
    tokens_per_microbatch: int = 8192
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    logprob_chunk: int = 1024  # tokens whose logits exist at once
    replay_kv: bool = False  # attend only to the keys that the sampler's cache held
    # feed a prompt once for its responses; None: if possible
    share_prompts: bool | None = None

    @property
    def has_teacher(self) -> bool:
        return bool(self.options.get("teacher_tau"))

    @property
    def normalizes(self) -> bool:
        """True if the objective's weights are divided by their mean over the batch."""
        return self.objective.normalizes(**self.options)

    @property
    def reduction(self) -> dict[str, Any]:
        return {
            name: (self.objective.options | dict(self.options))[name]
            for name in ("reduce", "max_length")
        }


@dataclass(frozen=True)
class PassOutput:
    """Detached log-probs and entropies of the sequences that ran, on the host."""

    log_probs: PerToken = field(default_factory=dict)
    entropy: PerToken = field(default_factory=dict)

    def __or__(self, other: PassOutput) -> PassOutput:
        return PassOutput(self.log_probs | other.log_probs, self.entropy | other.entropy)


@dataclass(frozen=True)
class PackedForward:
    """Forward passes of a model over packed micro-batches, each of one sampling temperature (the
    samples' own, else the batch's)."""

    model: Transformer
    samples: Sequence[Sample]
    tokens_per_microbatch: int
    logprob_chunk: int
    temperature: float = 1.0
    replay_kv: bool = False
    ranks: Ranks = ALONE
    share_prompts: bool = False  # where the model can

    @staticmethod
    def of(
        model: Transformer, batch: Batch, settings: LearnSettings, ranks: Ranks
    ) -> PackedForward:
        """Return the passes that update a model from a batch."""
        return PackedForward(
            model,
            batch.samples,
            settings.tokens_per_microbatch,
            settings.logprob_chunk,
            batch.temperature,
            settings.replay_kv,
            ranks,
            settings.share_prompts is not False and not settings.replay_kv,
        )

    def run(
        self,
        portions: Iterable[Sequence[int]],
        objective: Callable[[PackedBatch, Tensor], Tensor] | None = None,
    ) -> PassOutput:
        """Run the samples, each portion packed by itself, and return the results of all ranks. With
        `objective(packed, learner_N)`, a micro-batch's share of J, accumulate this rank's gradient
        of -J."""
        costs = [
            cost(sample, self.model.spec, self.model.spec.vocab_size) for sample in self.samples
        ]
        by_temperature = map(self._by_temperature, portions)
        walk = MicrobatchSchedule(
            self.samples,
            by_temperature,
            self.tokens_per_microbatch,
            costs,
            self.ranks,
            self.share_prompts and self.model.can_share_prompts,
        )
        transfers: list[tuple[PackedBatch, Tensor]] = []  # [2, N] each
        last_copy_event = None
        for packed, counts in walk.dealt(self.model.device):
            with torch.set_grad_enabled(objective is not None):
                hidden_TD = self.model(packed.ids_T, packed.pos_T, self.attend(packed))
                learner_N, entropy_N = token_log_probs(
                    packed.predicting(hidden_TD),
                    self.model.lm_head_weight,
                    packed.targets_N,
                    temperature=self._temperature(packed.samples[0]),
                    chunk=self.logprob_chunk,
                    exact=self.model.exact,
                )
                del hidden_TD
                if counts:  # else the pass only keeps the ranks in step
                    logp_entropy_2N = torch.stack((learner_N.detach(), entropy_N))
                    transfers.append((packed, logp_entropy_2N.to("cpu", non_blocking=True)))
                    last_copy_event = _record_event(self.model.device)
                if objective is not None:
                    J = objective(packed, learner_N) if counts else 0 * learner_N.sum()
                    (-J).backward()
        if last_copy_event is not None:
            last_copy_event.synchronize()
        log_probs, entropy = walk.gathered(
            [(packed, logp_entropy_2N[0]) for packed, logp_entropy_2N in transfers],
            [(packed, logp_entropy_2N[1]) for packed, logp_entropy_2N in transfers],
        )
        return PassOutput(log_probs, entropy)

    def _temperature(self, index: int) -> float:
        sample_temperature = self.samples[index].temperature
        return self.temperature if sample_temperature is None else sample_temperature

    def _by_temperature(self, portion: Sequence[int]) -> list[list[int]]:
        indices_by_temperature: dict[float, list[int]] = {}
        for i in portion:
            indices_by_temperature.setdefault(self._temperature(i), []).append(i)
        return list(indices_by_temperature.values())

    def attend(self, packed: PackedBatch) -> Attend:
        """Return attention over all earlier tokens, or over those that the cache kept."""
        if not self.replay_kv:
            return packed.attention(self.model)
        evictions = [sample.rollout.evictions for sample in packed.chosen]
        windows = self.model.spec.windows
        return replayed(packed.lengths, evictions, self.model.device, windows)


@dataclass(frozen=True)
class Minibatch:
    """The samples of one update, by index in the batch."""

    samples: list[int]
    active: list[int]  # samples with a token that is learned from
    with_gradient: set[int]

    @property
    def portions(self) -> tuple[list[int], list[int]]:
        """The samples with a gradient and those only measured, packed separately."""
        with_gradient = [i for i in self.active if i in self.with_gradient]
        forward_only = [i for i in self.active if i not in self.with_gradient]
        return with_gradient, forward_only


@dataclass(frozen=True)
class FixedPolicyLogProbs:
    """Log-probs of policies that are fixed during a batch; None for those not read."""

    proximal: PerToken | None
    reference: PerToken | None
    teacher: PerToken | None


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def learn(
    model: Transformer,
    batch: Batch,
    optimizer: Optimizer,
    settings: LearnSettings,
    reference: Transformer | None = None,
    critic: Critic | None = None,
    teacher: Transformer | None = None,
    on_update: Callable[[int, int], object] | None = None,
) -> dict[str, float]:
    """Update the model from a batch, one update a minibatch, and return the metrics.

    `reference` is the frozen model of the KL term; None with LoRA means the adapter off. A `critic`
    is updated too, and gives token advantages; while it warms up, the policy is only measured.
    `teacher` is that of AIPO's teacher_tau. `on_update(done, total)` is called after each update.
    ValueError, before anything changes, for an unusable batch; TrainingDiverged as
    `refuse_divergence`.
    """
    samples = batch.samples
    _check_inputs(model, batch, settings, reference, teacher)
    forward = PackedForward.of(model, batch, settings, optimizer.ranks)
    minibatches = split_groups([sample.group for sample in samples], settings.minibatches)
    active = [[i for i in minibatch if any(samples[i].loss_mask)] for minibatch in minibatches]
    all_active = list(chain.from_iterable(active))
    value_estimates = None if critic is None else critic.judge(samples, active)
    advantages = None if value_estimates is None else value_estimates.advantages
    updates_policy = critic is None or not critic.warming_up
    with_gradient: set[int] = set()
    if updates_policy:
        with_gradient = _samples_with_gradient(samples, all_active, settings, advantages)
    plan = [
        Minibatch(chosen, learned, with_gradient)
        for chosen, learned in zip(minibatches, active, strict=True)
    ]
    anchors = _anchors(forward, plan, settings, reference, teacher)

    records: list[dict[str, float]] = []
    learning_rate = optimizer.begin_step() if updates_policy else 0.0
    if critic is not None:
        critic.optimizer.begin_step()
    mismatch_metrics: dict[str, float] = {}
    for minibatch in plan:
        objective = _MinibatchObjective(samples, minibatch, settings, anchors, advantages)
        record, log_probs = _accumulate(forward, objective)
        if not records:  # measured before the first update, while the device is busy
            learner = log_probs if anchors.proximal is None else anchors.proximal
            mismatch_metrics = _mismatch_metrics(batch, all_active, learner, settings)
        if updates_policy:
            record |= optimizer.update(refuse=not math.isfinite(record["policy/objective"]))
            derived_tensors.renew(model)
        else:
            record |= NO_UPDATE
        if critic is not None and value_estimates is not None:
            record |= critic.update(samples, minibatch.samples, value_estimates)
        records.append(record)
        if on_update is not None:
            on_update(len(records), len(plan))
        _refuse_step(batch.step, record, optimizer, critic)
    metrics = _merge_records(records) | {"optim/lr": learning_rate}
    if value_estimates is not None:
        metrics |= value_estimates.metrics
    return metrics | mismatch_metrics


def _check_inputs(
    model: Transformer,
    batch: Batch,
    settings: LearnSettings,
    reference: Transformer | None,
    teacher: Transformer | None,
) -> None:
    samples = batch.samples
    check(samples, model.spec.vocab_size, model.spec.max_position)
    if settings.replay_kv:
        _check_replay(samples, model)
    own_temperatures = {
        f"sample {i} ({sample.prompt.id}): ": sample.temperature
        for i, sample in enumerate(samples)
        if sample.temperature is not None
    }
    for where, temperature in {"": batch.temperature, **own_temperatures}.items():
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"{where}temperature: must be finite and above 0 to learn from, is {temperature}"
            )
    has_adapter = any(linear.adapter is not None for _, linear in model.linears())
    if settings.kl_coef and reference is None and not has_adapter:
        raise ValueError(
            "reference: kl_coef needs a frozen reference model, or a LoRA model whose base is one"
        )
    if settings.has_teacher:
        if teacher is None:
            raise ValueError(
                f"teacher: teacher_tau {settings.options['teacher_tau']} needs a teacher model"
            )
        check(samples, teacher.spec.vocab_size, teacher.spec.max_position)


def _check_replay(samples: Sequence[Sample], model: Transformer) -> None:
    spec = model.spec
    for i, sample in enumerate(samples):
        evictions, behavior_tag = sample.rollout.evictions, sample.rollout.behavior
        location = f"sample {i} ({sample.prompt.id}): rollout.evictions"
        if evictions is None and behavior_tag.kv_budget is not None:
            raise ValueError(
                f"{location}: missing, and its cache was bounded ({behavior_tag.kv_policy}); replay_kv needs "
                "an engine that records evictions"
            )
        if evictions is None:
            continue
        try:
            check_evictions(
                evictions, spec.num_layers, spec.num_kv_heads, spec.max_position, spec.windows
            )
        except ValueError as error:
            raise ValueError(f"{location}.{error}") from None


def _samples_with_gradient(
    samples: Sequence[Sample],
    active: Sequence[int],
    settings: LearnSettings,
    advantages: PerToken | None,
) -> set[int]:
    if settings.kl_coef or not settings.objective.needs_advantage(**settings.options):
        return set(active)
    if advantages is None:
        return {i for i in active if samples[i].advantage != 0}
    return {i for i in active if advantages[i].any()}


def _anchors(
    forward: PackedForward,
    plan: Sequence[Minibatch],
    settings: LearnSettings,
    reference: Transformer | None,
    teacher: Transformer | None,
) -> FixedPolicyLogProbs:
    """Run a pass without gradient for each fixed policy, packed as the updates."""
    portions = list(chain.from_iterable(minibatch.portions for minibatch in plan))
    proximal_lp = reference_lp = teacher_lp = None
    # only the learner replays the cache
    dense = replace(forward, replay_kv=False)
    if len(plan) > 1 or settings.normalizes:
        proximal_lp = forward.run(portions).log_probs
    if settings.kl_coef and reference is not None:
        reference_lp = replace(dense, model=reference).run(portions).log_probs
    elif settings.kl_coef:
        with lora.disabled(forward.model), exploration_noise.muted(forward.model):
            reference_lp = dense.run(portions).log_probs
    if settings.has_teacher and teacher is not None:
        teacher_lp = replace(dense, model=teacher).run(portions).log_probs
    return FixedPolicyLogProbs(proximal_lp, reference_lp, teacher_lp)


def _mismatch_metrics(
    batch: Batch, active: Sequence[int], learner: PerToken, settings: LearnSettings
) -> dict[str, float]:
    if not active:
        return {}
    packed = collate(batch.samples, active)
    per_token = {
        "learner": gather(learner, packed),
        "behavior": packed.behavior_N,
        "mask": packed.mask_N,
        "segments": packed.segments_N,
    }
    metrics = mismatch(**per_token) | by_length(**per_token)
    version = batch.stats.get("rollout/learner_version")
    if version is not None:
        metrics |= by_staleness(**per_token, staleness=packed.staleness_N(int(version)))
    if not all(sample.rollout.behavior.exact_kv for sample in packed.chosen):
        metrics |= _rejection_metrics(packed, per_token, settings)
    return metrics


def _rejection_metrics(
    packed: PackedBatch, per_token: Mapping[str, Tensor], settings: LearnSettings
) -> dict[str, float]:
    options = settings.objective.options | dict(settings.options)
    verdict = settings.objective.verdict(**per_token, proximal=per_token["learner"], **options)
    scores = [sample.score for sample in packed.chosen]
    rewards = [score.reward if isinstance(score, Score) else math.nan for score in scores]
    return rejection(
        **per_token,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        kept=None if verdict is None else verdict.kept_N,
        veto=options.get("veto"),
    )


def _refuse_step(
    step: int, record: Mapping[str, float], optimizer: Optimizer, critic: Critic | None
) -> None:
    loss, norm = record["policy/objective"], record["optim/grad_norm"]
    refuse_divergence(f"step {step}: objective", loss, norm, optimizer)
    if critic is not None:
        loss, norm = record["critic/loss"], record["critic/grad_norm"]
        refuse_divergence(f"step {step}: the critic's loss", loss, norm, critic.optimizer)


def refuse_divergence(where: str, loss: float, norm: float, optimizer: Optimizer) -> None:
    """Raise TrainingDiverged after MAX_REFUSALS refused updates in a row. norm: the gradient's."""
    if optimizer.refused_in_a_row >= MAX_REFUSALS:
        raise TrainingDiverged(
            f"{where} {loss}, gradient norm {norm}; {MAX_REFUSALS} updates in a row were not finite"
        )


@dataclass(frozen=True)
class _MinibatchObjective:
    """The objective J of a minibatch and its statistics. The values of micro-batches add up to the
    whole's."""

    samples: Sequence[Sample]
    minibatch: Minibatch
    settings: LearnSettings
    anchors: FixedPolicyLogProbs
    advantages: PerToken | None

    @functools.cached_property
    def whole(self) -> PackedBatch:
        return collate(self.samples, self.minibatch.active)

    @functools.cached_property
    def counts(self) -> Denominators:
        """The denominators, counted at first use, when the device already has work."""
        whole, proximal = self.whole, self.anchors.proximal
        total = self.settings.objective.count(
            mask=whole.mask_N,
            segments=whole.segments_N,
            behavior=whole.behavior_N,
            proximal=None if proximal is None else gather(proximal, whole),
            **self.settings.options,
        )
        return replace(total, num_sequences=len(self.minibatch.samples))

    def __call__(self, packed: PackedBatch, learner_N: Tensor) -> tuple[Tensor, dict[str, float]]:
        settings, anchors, advantages = self.settings, self.anchors, self.advantages
        proximal = anchors.proximal
        policies = {
            "learner": learner_N,
            "proximal": learner_N.detach() if proximal is None else gather(proximal, packed),
            "behavior": packed.behavior_N,
            "mask": packed.mask_N,
            "segments": packed.segments_N,
        }
        J, statistics = settings.objective(
            **policies,
            teacher=None if anchors.teacher is None else gather(anchors.teacher, packed),
            advantages=packed.advantages_N if advantages is None else gather(advantages, packed),
            counts=self.counts,
            **settings.options,
        )
        if anchors.reference is None:
            return J, statistics
        divergence, kl_statistics = self._divergence(policies, gather(anchors.reference, packed))
        return J - settings.kl_coef * divergence, statistics | kl_statistics

    def _divergence(
        self, policies: Mapping[str, Tensor], reference_N: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        settings = self.settings
        usable_N = policies["behavior"].isfinite() | (not settings.objective.needs_behavior)
        verdict = settings.objective.verdict(**policies, **settings.options)
        kept_N = usable_N if verdict is None else verdict.kept_N
        return penalty(
            learner=torch.where(kept_N, policies["learner"], reference_N),
            reference=reference_N,
            mask=policies["mask"] & usable_N,
            segments=policies["segments"],
            counts=self.counts,
            estimator=settings.kl_estimator,
            **settings.reduction,
        )


def _accumulate(
    forward: PackedForward, objective: _MinibatchObjective
) -> tuple[dict[str, float], PerToken]:
    with_gradient, forward_only = objective.minibatch.portions
    output = forward.run([with_gradient], lambda packed, learner_N: objective(packed, learner_N)[0])
    output |= forward.run([forward_only])
    if not objective.minibatch.active:
        return {"policy/objective": 0.0}, output.log_probs
    whole = objective.whole
    J, record = objective(whole, gather(output.log_probs, whole))
    record["policy/objective"] = J.item()
    record["policy/entropy"] = masked_mean(gather(output.entropy, whole), whole.mask_N).item()
    return record, output.log_probs


def _merge_records(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for name in dict.fromkeys(chain.from_iterable(records)):
        values = [record[name] for record in records if name in record]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name in ("optim/skipped", "critic/skipped", "correction/dropped_tokens"):
            merged[name] = sum(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged
