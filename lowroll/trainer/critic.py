"""PPO's critic: a second model with a scalar head that estimates the value of every state.

    V_t = w . h_t + b          h_t the last hidden state before token y_t is drawn

With a response's reward on its last token, `advantages.gae` makes token advantages and returns from
the values before the batch. Advantages are whitened over the masked tokens of the whole batch, and
the critic descends `objectives.value.value_loss` on the returns in the policy's minibatches.

The body learns in full, even under LoRA, at a constant rate. The head begins at zero, so that with
gamma = lam = 1 and no whitening the first step is REINFORCE with the reward as advantage (verl
draws a random head).

T: tokens fed, N: response tokens, D: hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowroll.advantages import gae, place, whiten
from lowroll.model.transformer import Transformer
from lowroll.objectives.reduce import Denominators
from lowroll.objectives.value import value_loss
from lowroll.parallel.ranks import ALONE, PerToken, Ranks
from lowroll.trainer.optim import Optimizer, OptimSettings, check_saved
from lowroll.trainer.packing import MicrobatchSchedule, PackedBatch, check, collate, cost, gather
from lowroll.types import RunFailed, Sample

NO_VARIANCE = 1e-12  # of returns; equal ones differ by rounding


@dataclass(frozen=True)
class CriticSettings:
    gamma: float = 1.0  # discount a token
    lam: float = 1.0  # GAE: 1 trusts the rewards, 0 the values
    whiten: bool = True
    value_clip: float | None = 0.5  # c of `value_loss`; None: no clip
    warmup_steps: int = 0  # training steps before the policy learns too
    tokens_per_microbatch: int = 8192
    share_prompts: bool | None = None  # None: where the body can


@dataclass(frozen=True)
class CriticOutput:
    """Values, advantages and returns before the batch's first update."""

    values: PerToken
    advantages: PerToken
    returns: PerToken
    metrics: dict[str, float]


class Critic:
    """The value model and its optimizer. It takes over `body` without its lm_head."""

    def __init__(
        self,
        body: Transformer,
        optim: OptimSettings,
        settings: CriticSettings | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        body.lm_head = None
        self.body = ranks.shard(body.requires_grad_(True))
        self.settings = settings or CriticSettings()
        self.weight_D = nn.Parameter(torch.zeros(body.spec.hidden_size, device=body.device))
        self.bias = nn.Parameter(torch.zeros(1, device=body.device))
        self.params = {f"body.{name}": p for name, p in body.trainable_parameters().items()} | {
            "head.weight": self.weight_D,
            "head.bias": self.bias,
        }
        self.optimizer = Optimizer(self.params, optim, ranks=ranks)

    @property
    def warming_up(self) -> bool:
        return self.optimizer.num_steps < self.settings.warmup_steps

    def judge(self, samples: Sequence[Sample], portions: Sequence[Sequence[int]]) -> CriticOutput:
        """Return values, advantages and returns, packed as an update so that equal weights give
        bitwise equal values. ValueError for an unusable sample; RunFailed for a non-finite value.
        """
        check(samples, self.body.spec.vocab_size, self.body.spec.max_position)
        values = self._run(samples, portions)
        indices = [i for portion in portions for i in portion]
        sample_values = [values[i].tolist() for i in indices]
        masks = [samples[i].loss_mask for i in indices]
        advantages: list[list[float]] = []
        returns: list[list[float]] = []
        for i, token_values, mask in zip(indices, sample_values, masks, strict=True):
            where, reward = f"sample {i} ({samples[i].prompt.id})", samples[i].reward
            if reward is None:
                raise ValueError(f"{where}: reward: it is to be learned from and has none")
            if not all(map(math.isfinite, token_values)):
                raise RunFailed(f"critic: a value of {where} is not finite")
            A, G = gae(
                place(reward, mask),
                token_values,
                mask,
                gamma=self.settings.gamma,
                lam=self.settings.lam,
            )
            advantages.append(A)
            returns.append(G)
        metrics = explained_variance(sample_values, returns, masks)
        if self.settings.whiten:
            advantages = whiten(advantages, masks)
        return CriticOutput(
            values, _by_sample(indices, advantages), _by_sample(indices, returns), metrics
        )

    def update(
        self, samples: Sequence[Sample], minibatch: Sequence[int], judged: CriticOutput
    ) -> dict[str, float]:
        """Make one update towards a minibatch's returns. Samples that `judge` did not run only
        count among the sequences."""
        active = [i for i in minibatch if i in judged.returns]
        num_tokens = sum(sum(samples[i].loss_mask) for i in active)
        counts = Denominators(num_tokens, len(minibatch))

        def loss(packed: PackedBatch, values_N: Tensor) -> tuple[Tensor, dict[str, float]]:
            return value_loss(
                values=values_N,
                old_values=gather(judged.values, packed),
                returns=gather(judged.returns, packed),
                mask=packed.mask_N,
                segments=packed.segments_N,
                counts=counts,
                clip=self.settings.value_clip,
            )

        values = self._run(samples, [active], lambda packed, values_N: loss(packed, values_N)[0])
        record: dict[str, float] = {"critic/loss": 0.0}
        if active:
            whole_minibatch = collate(samples, active, self.body.device)
            record = loss(whole_minibatch, gather(values, whole_minibatch))[1]
        optimizer_metrics = self.optimizer.update(refuse=not math.isfinite(record["critic/loss"]))
        return record | {
            "critic/grad_norm": optimizer_metrics["optim/grad_norm"],
            "critic/skipped": optimizer_metrics["optim/skipped"],
        }

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
        """Return this rank's live weights and moments by file and name, and the counters."""
        moments, counters = self.optimizer.state()
        return {"critic": self.optimizer.weights(), "critic_optimizer": moments}, counters

    @torch.no_grad()
    def restore(
        self, tensors: Mapping[str, Mapping[str, Tensor]], counters: Mapping[str, Any]
    ) -> None:
        """Restore `state` bitwise. ValueError, before anything changes, for other names or
        shapes."""
        saved = tensors.get("critic", {})
        ranks = self.optimizer.ranks
        expected = {name: (p.shape, ranks.dtype(p)) for name, p in self.params.items()}
        check_saved("critic state", saved, expected)
        self.optimizer.restore(tensors["critic_optimizer"], counters)
        for name, p in self.params.items():
            local_param = ranks.part(p)
            if local_param.dtype == saved[name].dtype:  # else it is a master
                local_param.copy_(ranks.cut(saved[name], p))

    def _run(
        self,
        samples: Sequence[Sample],
        portions: Sequence[Sequence[int]],
        loss: Callable[[PackedBatch, Tensor], Tensor] | None = None,
    ) -> PerToken:
        """Run the samples and return their values. With `loss`, accumulate its gradient."""
        costs = [cost(sample, self.body.spec, outputs=1) for sample in samples]
        portion_lists = ([portion] for portion in portions)
        capacity = self.settings.tokens_per_microbatch
        ranks = self.optimizer.ranks
        shares = self.settings.share_prompts is not False and self.body.can_share_prompts
        walk = MicrobatchSchedule(samples, portion_lists, capacity, costs, ranks, shares)
        values: list[tuple[PackedBatch, Tensor]] = []
        for packed, counts in walk.dealt(self.body.device):
            with torch.set_grad_enabled(loss is not None):
                hidden_TD = self.body(packed.ids_T, packed.pos_T, packed.attention(self.body))
                values_N = packed.predicting(hidden_TD).float() @ self.weight_D + self.bias
                if loss is not None:
                    # a pass that does not count runs backward too, to keep the ranks in step
                    share = loss(packed, values_N) if counts else 0 * values_N.sum()
                    share.backward()
            if counts:
                values.append((packed, values_N.detach()))
        return walk.gathered(values)[0]


def _by_sample(indices: Sequence[int], lists: Sequence[Sequence[float]]) -> PerToken:
    return {i: torch.tensor(values) for i, values in zip(indices, lists, strict=True)}


def explained_variance(
    values: Sequence[Sequence[float]],
    returns: Sequence[Sequence[float]],
    masks: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Return the metric 1 - Var(G - V) / Var(G) over the unmasked tokens; {} if returns G are
    equal."""
    pairs = []
    for V, G, mask in zip(values, returns, masks, strict=True):
        for value, token_return, is_learned in zip(V, G, mask, strict=True):
            if is_learned:
                pairs.append((value, token_return))
    V_N, G_N = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    if not len(G_N) or (total := G_N.var(correction=0).item()) < NO_VARIANCE:
        return {}
    return {"critic/explained_variance": 1 - (G_N - V_N).var(correction=0).item() / total}
