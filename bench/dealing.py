"""How evenly a batch is dealt to learner ranks: the costliest rank over the mean, in multiplications.

    python -m bench.dealing

The lengths are those of `bench.lengths`: log-normal, 256 rollouts of Qwen2.5-1.5B's sizes, in
micro-batches of 8,192 tokens. Beside what ranks are dealt: the same in lockstep, where a turn takes
as long as its costliest pass; the micro-batches of one rank dealt by cost; samples dealt by number.
No model is made: the numbers are arithmetic, and the same on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

from lowroll.model.spec import spec_from_config
from lowroll.parallel.ranks import RankGroup
from lowroll.trainer.packing import cost, pack
from lowroll.types import BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score

QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "eos_token_id": 151643,
}
SIZES = {"gsm8k-like": (220, 0.6, 2048), "math-like": (900, 0.87, 8192)}  # median, sigma, longest
CAPACITY = 8192
BATCHES = 50
BEHAVIOR = BehaviorTag((PolicySpan(0, "d"),), "int8")


class Rank(RankGroup):
    """A rank that deals, and has met nobody."""

    def __init__(self, rank: int, size: int, lockstep: bool = False) -> None:
        self.rank, self.size, self.lockstep = rank, size, lockstep


def draw(workload: str, seed: int, rollouts: int = 256, prompt_tokens: int = 128) -> list[Sample]:
    """Samples of random lengths; their ids are all 0."""
    median, sigma, longest = SIZES[workload]
    dice = random.Random(seed)
    samples = []
    for _ in range(rollouts):
        length = min(longest, max(1, round(dice.lognormvariate(math.log(median), sigma))))
        rollout = Rollout([0] * length, [0.0] * length, "stop", BEHAVIOR)
        samples.append(Sample(Prompt("p", "e", []), [0] * prompt_tokens, rollout, "", Score(0.0)))
    return samples


def measure(samples: Sequence[Sample], size: int) -> dict[str, float]:
    """The costliest of `size` ranks over the mean, by way of dealing."""
    spec = spec_from_config(QWEN_1_5B)
    costs = [cost(sample, spec, spec.vocab_size) for sample in samples]
    whole = [range(len(samples))]
    even, plain = pack(samples, whole, CAPACITY, costs, size), pack(samples, whole, CAPACITY)

    def dealt(bins: list[list[int]], lockstep: bool = False) -> list[list[float]]:
        work = [sum(costs[i] for i in each) for each in bins]
        ranks = [Rank(rank, size, lockstep).deal(work) for rank in range(size)]
        return [[0.0 if i is None else work[i] for i in mine] for mine in ranks]

    mean = sum(costs) / size
    return {
        "dealt": max(map(sum, dealt(even))) / mean,
        "in lockstep": sum(map(max, zip(*dealt(even, True), strict=True))) / mean,
        "one rank's micro-batches": max(map(sum, dealt(plain))) / mean,
        "samples by number": max(sum(costs[rank::size]) for rank in range(size)) / mean,
    }


def main() -> None:
    for workload in SIZES:
        for size in (2, 4, 8):
            found = [measure(draw(workload, seed), size) for seed in range(BATCHES)]
            means = {way: fmean(one[way] for one in found) for way in found[0]}
            words = ", ".join(f"{way} {share:.3f}" for way, share in means.items())
            print(f"{workload}, {size} ranks: {words}; worst {max(f['dealt'] for f in found):.3f}")


if __name__ == "__main__":
    main()
