"""A probe of an objective on a batch before its first update: the measured mismatch and the
thresholds.

`spread` describes ln pi_old - ln b; `silent` counts tokens without a gradient although the ratio R
is still 1, because of a mask, a rejection or a clip on the mismatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowroll.model.transformer import Transformer
from lowroll.objectives.mismatch import spread
from lowroll.objectives.reduce import masked_mean, sequence_any, sequences_of
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.trainer.packing import PackedBatch, collate, gather
from lowroll.trainer.step import LearnSettings, PackedForward
from lowroll.types import Batch


@dataclass(frozen=True)
class Probe:
    """A batch with the learner's log-probs and entropies, [N]."""

    packed: PackedBatch
    learner_N: Tensor
    entropy_N: Tensor
    settings: LearnSettings

    @property
    def spread(self) -> dict[str, float]:
        packed = self.packed
        return spread(
            learner=self.learner_N,
            behavior=packed.behavior_N,
            mask=packed.mask_N,
            segments=packed.segments_N,
        )

    def findings(self, options: Mapping[str, Any]) -> list[str]:
        """Describe the spread, and the bands on sequence ratios that are narrower than it."""
        token, sequence = (self.spread[f"spread/{level}_std"] for level in ("token", "sequence"))
        messages = [
            f"before the first update: ln pi_old - ln b has std {token:.2g} a token and "
            f"{sequence:.2g} a sequence (mean over its tokens)"
        ]
        band = options.get("eps_high")
        name = self.settings.objective.name
        if band and band < sequence and any(word in name for word in ("gspo", "tbpo")):
            messages.append(
                f"{name}: its band ends at 1 + {band:.2g}, {sequence / band:.1f} times closer than "
                "that: it bounds what the learner moves, not this mismatch; train.forward aligned "
                "makes that small"
            )
        return messages

    def silent(self, options: Mapping[str, Any]) -> dict[str, float]:
        """Return the shares of tokens and of whole sequences without a gradient under these
        options."""
        packed = self.packed
        objective = self.settings.objective
        batch_tensors = {
            "mask": packed.mask_N,
            "segments": packed.segments_N,
            "behavior": packed.behavior_N,
            "proximal": self.learner_N,
        }
        # an advantage of 0 or a KL term would hide the thresholds
        learner_N = self.learner_N.clone().requires_grad_(True)
        advantages_N = torch.where(packed.advantages_N == 0, 1, packed.advantages_N)
        if "kl_tau" in options:
            options = {**options, "kl_tau": 0.0}
        with torch.enable_grad():
            J, _ = objective(
                learner=learner_N,
                counts=objective.count(**batch_tensors, **options),
                advantages=advantages_N,
                teacher=self.learner_N + advantages_N / 2,  # agrees with the sign of A
                **batch_tensors,
                **options,
            )
            (gradient_N,) = torch.autograd.grad(J, learner_N)
        active_N = gradient_N != 0
        sequences = sequences_of(packed.mask_N, packed.segments_N)
        has_tokens_S = sequence_any(torch.ones_like(active_N), sequences)
        return {
            "spread/silent_fraction": masked_mean(~active_N, sequences.mask_N).item(),
            "spread/silent_sequence_fraction": masked_mean(
                ~sequence_any(active_N, sequences), has_tokens_S
            ).item(),
        }


def probe(
    model: Transformer, batch: Batch, settings: LearnSettings, ranks: Ranks = ALONE
) -> Probe | None:
    """Score a batch with the learner, on all ranks; None if it has no token to learn from."""
    active = [i for i, sample in enumerate(batch.samples) if any(sample.loss_mask)]
    if not active:
        return None
    forward = PackedForward.of(model, batch, settings, ranks)
    packed = collate(batch.samples, active, model.device)
    output = forward.run([active])
    learner_N, entropy_N = gather(output.log_probs, packed), gather(output.entropy, packed)
    return Probe(packed, learner_N, entropy_N, settings)
