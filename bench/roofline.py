"""What a decode step must read at least, and how fast this device can read.

A step of B rows streams every linear weight once (of a mixture of experts, those that the rows
touch, as `bench.routing` counts them), the bfloat16 head, and the keys and values of all rows. The
measured bandwidth is the better of a copy (bytes read and written) and of a sum (bytes read) over
buffers far larger than the cache.

    time at the roofline = bytes / bandwidth
    bytes = linear weights * bits / 8 + head * 2 + B * context * KV bytes a token
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import seconds_of
from lowroll.model.spec import spec_from_config
from lowroll.quant.formats import get_format

PASSES = 8


def linear_weights(config: dict[str, Any], touched: float | None = None) -> float:
    """Return the weights of the linear layers: with all experts, or with as many of a layer as a
    step touches."""
    spec = spec_from_config(config)
    q, kv, hidden = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.hidden_size,
    )
    mlp = 3.0 * hidden * spec.intermediate_size
    if experts := config.get("num_experts"):
        mlp = (
            3.0
            * hidden
            * config["moe_intermediate_size"]
            * (experts if touched is None else touched)
        )
    return spec.num_layers * (hidden * (2 * q + 2 * kv) + mlp)


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


def bandwidth(device: torch.device, num_bytes: int = 2 << 30, rounds: int = 9) -> float:
    """Return the bytes a second, the median of `rounds` runs of PASSES passes."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for run, moved in ((lambda: target.copy_(source), 2 * num_bytes), (source.sum, num_bytes)):
        run()

        def passes(run: Callable[[], object] = run) -> None:
            for _ in range(PASSES):
                run()

        seconds = statistics.median(seconds_of(passes, device) for _ in range(rounds))
        best = max(best, moved * PASSES / seconds)
    return best
