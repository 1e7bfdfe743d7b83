"""How a vLLM is asked, and what its answers say of the policy.

What vLLM does otherwise than lowroll's engine is settled here, or refused by name:

    seed           vLLM's noise depends on the seed and the sample, not on the request's id: it gets
                   the digest of both (`request.noise_key`). The tokens repeat; they are not those
                   of lowroll's own engine.
    end            the model's end-of-sequence ids are sent as stop ids with every request, so that
                   no file beside the model adds any or takes one away
    vocabulary     both engines and the learner normalise over all `vocab_size` logits, rows that
                   pad the tokenizer's included: such an id may be drawn, and its log-prob is right
    min-p          vLLM cuts by min-p before top-p, lowroll after it: both together are refused
    greedy         vLLM takes n = 1 alone at temperature 0: more are refused
    temperature    vLLM raises what lies between 0 and 0.01 to 0.01, and takes none above 2: refused
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowroll.engine.base import Capabilities, EngineStats
from lowroll.engine.remote.completions import Sample, body_of, tagged
from lowroll.engine.request import noise_key
from lowroll.types import BehaviorTag, Request

HEEDED = frozenset(
    {
        "prompt_ids",
        "n",
        "max_tokens",
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "stop_ids",
        "ignore_eos",
        "seed",
        "id",
        "top_logprobs",
    }
)
COLDEST, HOTTEST = 0.01, 2.0  # of temperatures that are not 0
SEEDS = 2**62  # vLLM adds the number of the sample to the seed
_SERIES = re.compile(r"^vllm:(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass
class VllmDialect:
    """weights, weight_bits: format of the linear weights, and bits of one."""

    capabilities: Capabilities
    behavior: BehaviorTag
    model: str
    vocab_size: int
    eos_ids: frozenset[int]
    weight_bits: float
    cache_tokens: int = 0  # of its KV cache; 0: /metrics say it (`stats`)

    def check(self, request: Request) -> None:
        """ValueError names a field that vLLM would not heed as lowroll does."""
        if request.stop_strings:
            raise ValueError("stop_strings: vLLM runs without a tokenizer here; use stop_ids")
        if request.grammar is not None:
            raise ValueError("grammar: vLLM's grammars are not those of lowroll")
        if request.temperature == 0 and request.n > 1:
            raise ValueError(
                f"n: vLLM draws one greedy sample, and {request.n} were asked for; all are equal"
            )
        if 0 < request.temperature < COLDEST:
            raise ValueError(
                f"temperature: vLLM draws at {COLDEST} what is asked for at "
                f"{request.temperature:g}; write 0 for greedy"
            )
        if request.temperature > HOTTEST:
            raise ValueError(f"temperature: vLLM takes {HOTTEST:g} at most")
        if request.min_p > 0 and request.top_p < 1:
            raise ValueError("min_p: vLLM cuts by it before top_p, and lowroll after; use one")

    def stop_ids(self, request: Request) -> list[int]:
        """The request's own, and the model's unless it ignores them."""
        own = set() if request.ignore_eos else self.eos_ids
        return sorted({*request.stop_ids, *own})

    def body(self, request: Request) -> dict[str, Any]:
        """The body of its request."""
        seed = noise_key(request, 0) % SEEDS
        return body_of(request, self.model, seed=seed, stop_ids=self.stop_ids(request))

    def scoring(self, ids: Sequence[int], top: int, temperature: float) -> dict[str, Any]:
        """The body that asks for a prompt's log-probs, which vLLM computes at temperature 1."""
        if temperature != 1:
            raise ValueError(f"temperature: vLLM scores at 1 alone, not at {temperature:g}")
        if len(ids) >= self.capabilities.context_length:
            raise ValueError(
                f"sequences: {len(ids)} tokens leave no room in a context of "
                f"{self.capabilities.context_length} for the one that vLLM draws beyond"
            )
        return {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
            "return_token_ids": True,
        }

    def evictions(self, one: Sample) -> None:
        """vLLM's cache drops nothing."""

    def tag(self, request: Request, behavior: BehaviorTag, index: int, one: Sample) -> BehaviorTag:
        """vLLM does not say what it drew from. Requests keep the adapter that they began with, and
        a full update waits for their end: it is the policy of when they were sent."""
        return tagged(behavior, request, index)

    def stats(self, metrics: str) -> EngineStats:
        """What vLLM's /metrics say, summed over its engines."""
        found: dict[str, float] = {}
        labels: dict[str, str] = {}
        for name, inside, value in _SERIES.findall(metrics):
            found[name] = found.get(name, 0.0) + float(value)
            if name == "cache_config_info":
                labels = dict(_LABEL.findall(inside))
        blocks, block = _int(labels.get("num_gpu_blocks")), _int(labels.get("block_size"))
        return EngineStats(
            weights=self.behavior.weights,
            weight_bits=self.weight_bits,
            cache_tokens=blocks * block,
            cache_bytes=0,
            policy_bytes=0,
            virtual_memory_bytes=0,
            pages_peak=0,
            prefix_hits=int(found.get("prefix_cache_hits_total", 0)) // max(block, 1),
            running=int(found.get("num_requests_running", 0)),
            waiting=int(found.get("num_requests_waiting", 0)),
            tokens=int(found.get("generation_tokens_total", 0)),
        )


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
