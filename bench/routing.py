"""How many experts of a mixture a decode step reads, counted on the rollouts themselves.

A step of B rows, S experts a row out of E, touches at most B S experts of a layer. If every row
chose S different ones with equal chances and without regard to the others, it would be on average

    E (1 - (1 - S / E)^B)

Both engines are made to do about that, so that they read as many weights: ours by the weights of
`shapes.random_model`, vLLM by its routing simulator, which may draw an expert twice for a row and
so comes to

    E (1 - (1 - 1 / E)^(B S))

Legend: B rows, N tokens of a response, S experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowroll import score
from lowroll.model.experts import Experts
from lowroll.model.transformer import Transformer


def uniform(config: dict[str, Any], batch: int) -> float:
    """Return the expected number of experts that a step of `batch` rows touches when all are
    equally likely."""
    experts = config["num_experts"]
    return float(experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** batch))


def simulated(config: dict[str, Any], batch: int) -> float:
    """Return the same for vLLM's simulator."""
    experts = config["num_experts"]
    return float(experts * (1 - (1 - 1 / experts) ** (batch * config["num_experts_per_tok"])))


def touched(
    model: Transformer,
    sequences: Sequence[Sequence[int]],
    prompt_tokens: int,
    batches: Sequence[int],
) -> dict[int, float]:
    """Return the experts that a step of the first B sequences touches, for every B: the mean over
    layers and steps.

    The sequences have one length. The passes are those of `lowroll.score` in the model's own
    arithmetic; a step is what the tokens at one place of all responses choose.
    """
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    chosen: dict[Experts, list[Tensor]] = {layer: [] for layer in layers}

    def record(layer: Experts, args: tuple[Tensor]) -> None:
        chosen[layer].append(layer.router(args[0])[1].to(torch.int16))

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        score(model, sequences, [prompt_tokens] * len(sequences))
    finally:
        for hook in hooks:
            hook.remove()
    counts: dict[int, list[Tensor]] = {batch: [] for batch in batches}
    for layer in layers:
        experts_BNS = torch.cat(chosen[layer]).unflatten(0, (len(sequences), -1))[:, prompt_tokens:]
        for batch in batches:
            slots_NP = experts_BNS[:batch].transpose(0, 1).flatten(1).long()
            seen_NE = slots_NP.new_zeros(len(slots_NP), layer.gate_up.num_experts).scatter_(
                1, slots_NP, 1
            )
            counts[batch].append(seen_NE.sum(1).float().mean())
    return {batch: float(torch.stack(values).mean()) for batch, values in counts.items()}
