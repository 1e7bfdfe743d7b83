"""The bytes that a decode step must read at least, and how fast this device can read.

A step of B rows streams every linear weight once (of a mixture of experts, those that the rows
touch, as `touched` counts them), the bfloat16 head, and the keys and values of all rows. The
measured bandwidth is the better of a copy (bytes read and written) and of a sum (bytes read) over
buffers far larger than the cache.

    time at the roofline = bytes / bandwidth
    bytes = linear weights * bits / 8 + head * 2 + B * context * KV bytes a token

A step of B rows, S experts a row out of E, touches at most B S experts of a layer. If every row chose
S different ones with equal chances, it would be on average

    E (1 - (1 - S / E)^B)

Both engines are made to do about that: ours by the weights of `shapes.random_model`, vLLM by its routing
simulator, which may draw an expert twice for a row and so comes to E (1 - (1 - 1 / E)^(B S)).

Legend: B rows, N tokens of a response, S experts a token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.harness import seconds_of
from lowroll import score
from lowroll.model.experts import Experts
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format

PASSES, ROUNDS = 8, 9
BUFFER = 2 << 30  # bytes


def linear_weights(config: dict[str, Any], touched: float | None = None) -> float:
    """Return the weights of the linear layers: with all experts, or with as many of a layer as a
    step touches."""
    spec = spec_from_config(config)
    hidden, wide = spec.hidden_size, float(spec.intermediate_size)
    if experts := config.get("num_experts"):
        wide = config["moe_intermediate_size"] * (experts if touched is None else touched)
    heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return spec.num_layers * hidden * (heads + 3.0 * wide)


def weight_bytes(config: dict[str, Any], format: str, touched: float | None = None) -> float:
    """Return the bytes of the linear weights in a format and of the bfloat16 head."""
    return (
        linear_weights(config, touched) * get_format(format).bits / 8
        + 2 * config["vocab_size"] * config["hidden_size"]
    )


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """Return the bytes of bfloat16 keys and values that one token leaves in the cache."""
    spec = spec_from_config(config)
    return 4 * spec.num_layers * spec.num_kv_heads * spec.head_dim


def step_bytes(
    config: dict[str, Any], format: str, batch: int, context: float, touched: float | None = None
) -> float:
    """Return the bytes that a decode step of `batch` rows must read when each has `context` tokens
    behind it."""
    return weight_bytes(config, format, touched) + batch * context * kv_bytes_per_token(config)


def bandwidth(device: torch.device) -> float:
    """Return the bytes a second, the median of ROUNDS runs of PASSES passes."""
    source = torch.ones(BUFFER // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for run, moved in ((lambda: target.copy_(source), 2 * BUFFER), (source.sum, BUFFER)):
        run()

        def passes(run: Callable[[], object] = run) -> None:
            for _ in range(PASSES):
                run()

        seconds = statistics.median(seconds_of(passes, device) for _ in range(ROUNDS))
        best = max(best, moved * PASSES / seconds)
    return best


# -- experts ---------------------------------------------------------------------------------------


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
