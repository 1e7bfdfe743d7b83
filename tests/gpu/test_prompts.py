"""On a CUDA device: short passes over prompts as graphs, and several passes between two looks.

FAR: log-probs of a pass lie nearer to `score`'s of the same tokens in the mean. Played on a CPU with
the same shapes, decoding and scoring in bfloat16, they lie 0.005 (bf16), 0.018 (int8), 0.03 (fp8),
0.007 (nvfp4) and 0.005 (int4) apart, a mixture's 0.003 (bf16) and 0.008 (nvfp4): what a rounding moves,
and the codes that it turns over. A GPU's products add in other orders, of the same size. Log-probs of
other tokens' hidden states would lie 0.9 apart: logits have a deviation of 0.02 sqrt(D) = 0.8 to 0.9,
and the mean of the difference of two such is 1.13 of that.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.shapes import SHAPES, random_model
from lowroll import Engine, Request
from lowroll.engine.prefill_graphs import SIZES
from lowroll.kv.batch import PromptChunk
from lowroll.types import Group
from lowroll.weights.sync.update import WeightUpdate

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
SHAPE = {**SHAPES["qwen2.5-1.5b"], "num_hidden_layers": 3, "vocab_size": 8192}
MIXTURE = {**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 2, "vocab_size": 8192}
FAR = 0.1


def requests(lengths: list[int], n: int = 1) -> list[Request]:
    g = torch.Generator().manual_seed(sum(lengths))
    return [
        Request(
            torch.randint(8000, (length,), generator=g).tolist(), n=n, max_tokens=3,
            ignore_eos=True, seed=i,
        )
        for i, length in enumerate(lengths)
    ]  # fmt: skip


def drawn(engine: Engine, asked: list[Request]) -> list[tuple[list[int], list[float]]]:
    engine.pool.clear_prefixes()
    return [(r.token_ids, r.logprobs) for group in engine.generate(asked) for r in group.rollouts]


@pytest.mark.parametrize(
    ("shape", "weights"),
    [(SHAPE, weights) for weights in ("bf16", "fp8", "int8", "int8_rotated", "nvfp4", "int4")]
    + [(MIXTURE, "bf16"), (MIXTURE, "nvfp4")],
)
def test_captured_passes_are_those_that_are_launched(shape: dict[str, Any], weights: str) -> None:
    model = random_model(shape, "cuda")
    options = {"weights": weights, "cache_tokens": 8192, "max_batch": 64}
    engine, eager = Engine(model, **options), Engine(model, cuda_graphs=False, **options)
    short = engine.runner.short
    assert short is not None and eager.runner.short is not None
    for lengths, n in (([1], 1), ([200], 1), ([17, 64, 30], 8), ([128] * 8, 1), ([700], 2)):
        asked, before = requests(lengths, n), short.replays
        found = [drawn(engine, asked) for _ in range(4)]
        assert short.replays == before + 3, lengths
        assert all(one == found[0] for one in found), lengths
        assert found[0] == drawn(eager, asked), lengths
        leaders = found[0][::n]  # of each request one
        sequences = [r.prompt_ids + ids for r, (ids, _) in zip(asked, leaders, strict=True)]
        scored = torch.cat(engine.score(sequences, lengths))
        assert (scored - torch.tensor([logp for _, logp in leaders]).flatten()).abs().mean() < FAR
    assert eager.runner.short.replays == 0 and drawn(engine, requests([1025]))


def test_a_prompt_has_the_same_bits_whatever_runs_beside_it_in_its_size() -> None:
    """Its hidden state: how many rows the head multiplies with is another matter."""
    engine = Engine(random_model(SHAPE, "cuda"), weights="bf16", cache_tokens=8192, max_batch=64)
    short, each = engine.runner.short, engine.runner.cache.page_size
    assert short is not None
    mine, other = (one.prompt_ids for one in requests([100, 20]))

    @torch.inference_mode()
    def hidden(*prompts: list[int]) -> list[Tensor]:
        pages = iter(range(64))
        chunks = [
            PromptChunk(0, len(ids), [next(pages) for _ in range(-(-len(ids) // each))])
            for ids in prompts
        ]
        return [*short.run([i for ids in prompts for i in ids], chunks).clone()]

    for _ in range(3):  # launched, captured, replayed
        (alone,), pair, turned = hidden(mine), hidden(mine, other), hidden(other, mine)
        assert torch.equal(pair[0], alone) and torch.equal(turned[1], alone)
        assert torch.equal(pair[1], turned[0])


def test_a_graph_is_captured_while_another_thread_takes_memory() -> None:
    """As one does that receives weights; it waits for its stream, not for the device."""
    engine = Engine(random_model(SHAPE, "cuda"), weights="bf16", cache_tokens=8192, max_batch=64)
    ended, buckets, failed = threading.Event(), list[Tensor](), list[Exception]()

    def take() -> None:
        try:
            while len(buckets) < 64 and not ended.wait(0.02):  # each is asked of the driver
                buckets.append(torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"))
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        engine.warm_up()
    finally:
        ended.set()
        thread.join(60)
    assert not failed and buckets
    asked = requests([50, 30], 8)
    assert drawn(engine, asked) == drawn(engine, asked)


def test_new_weights_reach_the_graphs() -> None:
    engine = Engine(random_model(SHAPE, "cuda"), weights="fp8", cache_tokens=8192, max_batch=64)
    asked = requests([90, 30])
    old = [drawn(engine, asked) for _ in range(3)][-1]
    learner = random_model(SHAPE, "cuda", seed=5)
    engine.update_weights(WeightUpdate.local(learner, 1))
    new = drawn(engine, asked)
    fresh = Engine(
        random_model(SHAPE, "cuda", seed=5), weights="fp8", cache_tokens=8192, max_batch=64
    )
    assert new != old and new == drawn(fresh, asked)


def test_graphs_outlive_a_released_cache() -> None:
    engine = Engine(random_model(SHAPE, "cuda"), weights="bf16", cache_tokens=8192, max_batch=64)
    asked = requests([90, 30])
    before = [drawn(engine, asked) for _ in range(3)][-1]
    engine.release()
    assert drawn(engine, asked) == before == drawn(engine, asked)


def test_warming_up_captures_every_size() -> None:
    engine = Engine(random_model(SHAPE, "cuda"), weights="bf16", cache_tokens=8192, max_batch=4)
    engine.warm_up()
    short = engine.runner.short
    assert short is not None
    before = short.replays
    drawn(engine, requests([50]))
    assert short.replays == before + 1
    assert all(graph is not None for graph in short._graphs.values()) and set(short._graphs) == set(
        SIZES
    )


def test_several_passes_are_launched_before_any_is_read() -> None:
    def run(passes: int) -> list[Group]:
        engine = Engine(
            random_model(SHAPE, "cuda"), weights="bf16", cache_tokens=16384, max_batch=64,
            max_prefill_tokens=1200,
        )  # fmt: skip
        assert engine.scheduler.passes == 16
        engine.scheduler.passes = passes
        return engine.generate(requests([700] * 7 + [40]))

    for one, other in zip(run(16), run(1), strict=True):
        ours, theirs = one.rollouts[0], other.rollouts[0]
        assert ours.logprobs[0] == theirs.logprobs[0] and ours.token_ids[0] == theirs.token_ids[0]
