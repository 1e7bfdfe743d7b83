"""Passes over prompts: short ones padded to a size, and several between two looks of the host. A GPU
captures them (tests/gpu/test_prompts.py); here is what they compute."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowroll.engine import prefill_graphs
from lowroll.engine.prefill_graphs import ShortPasses
from lowroll.engine.sequence import StepPlan
from lowroll.kv.batch import PromptChunk
from lowroll.kv.policy.table import make
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.model.rope import rotations
from lowroll.model.transformer import Transformer
from lowroll.runs.memory import activations
from lowroll.types import Group, Request
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tiny import hf_folder

STEM = prompt(9, 1)
REQUESTS = [
    Request(STEM + prompt(3, 2), n=8, max_tokens=6, seed=1, stop_ids=(9, 17)),
    Request(prompt(5, 3), n=1, max_tokens=7, seed=2, top_p=0.9, top_logprobs=2),
    Request(STEM + prompt(2, 4), n=1, max_tokens=5, seed=3, repetition_penalty=1.2),
    Request(prompt(16, 5), n=3, max_tokens=4, seed=4, temperature=0.0),
    Request(prompt(1, 6), n=1, max_tokens=3, seed=5),
]


@pytest.fixture
def model(tmp_path: Path) -> Transformer:
    return hf.load(hf_folder(tmp_path / "m"), "cpu", torch.float32)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the short passes that ran, which run here, too, and are cut at 4, 16 and 32 tokens."""
    ran: list[int] = []
    run = ShortPasses._pass

    def watched(passes: ShortPasses, size: int) -> None:
        ran.append(size)
        run(passes, size)

    monkeypatch.setattr(prefill_graphs, "SIZES", (4, 16, 32))
    monkeypatch.setattr(ShortPasses, "supports", staticmethod(lambda model, cache: True))
    monkeypatch.setattr(ShortPasses, "_pass", watched)
    return ran


def same(ours: list[Group], theirs: list[Group]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for rollout, wanted in zip(one.rollouts, other.rollouts, strict=True):
            assert rollout.token_ids == wanted.token_ids
            assert rollout.finish_reason == wanted.finish_reason
            assert rollout.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


@pytest.mark.parametrize("max_prefill_tokens", [1, 16, 28, 64])
def test_padding_changes_no_token(
    model: Transformer, sizes: list[int], max_prefill_tokens: int
) -> None:
    """One prompt a pass (and one that fills its size), several, and more than a short pass takes."""
    short = engine_of(model, cuda_graphs=False, max_prefill_tokens=max_prefill_tokens)
    ours = short.generate(REQUESTS)
    assert set(sizes) == {1: {4, 16}, 16: {16, 4}, 28: {32}, 64: set()}[max_prefill_tokens]
    plain = engine_of(model, max_prefill_tokens=max_prefill_tokens)
    plain.runner.short = None
    same(ours, plain.generate(REQUESTS))


def test_the_padding_writes_to_no_page(model: Transformer, sizes: list[int]) -> None:
    engine = engine_of(model, cuda_graphs=False)
    engine.generate([Request(prompt(5), max_tokens=1)])
    assert sizes == [16]
    for buffer in chain(*engine.runner.cache.buffers):
        written_T = buffer.flatten(0, 1).flatten(1).any(1)
        assert written_T.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_prompts_behind_pages_of_others_are_no_short_pass(
    model: Transformer, sizes: list[int]
) -> None:
    """Nor are drafts, nor prompts with rows beside them in one pass."""
    engine = engine_of(model, cuda_graphs=False)
    first, again = (Request(STEM + prompt(2, i), max_tokens=3, seed=i) for i in (1, 2))
    engine.generate([first])
    engine.generate([again])
    assert sizes == [16] and engine.pool.hits == 2
    short = engine.runner.short
    assert (
        short is not None and not short.takes([]) and not short.takes([PromptChunk(4, 8, [0, 1])])
    )
    assert not short.takes([PromptChunk(0, 2, [i]) for i in range(prefill_graphs.MOST_PROMPTS + 1)])
    assert not short.takes([PromptChunk(0, 17, [0] * 5), PromptChunk(0, 16, [5] * 4)])


def test_a_pass_that_fails_is_not_captured_before_it_has_run(
    model: Transformer, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels are compiled, and their workspaces made, by a pass that comes to its end."""
    engine = engine_of(model, cuda_graphs=True)
    short = engine.runner.short
    assert short is not None
    asked, captures = Request(prompt(5), max_tokens=1), []

    class Graph:
        """What CUDA would replay, run again."""

        def __init__(self, run: Callable[[], object], pool: object) -> None:
            captures.append(pool)
            self.run = run

        def replay(self) -> None:
            self.run()

        def pool(self) -> str:
            return "memory"

    def fails(size: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(prefill_graphs, "captured", Graph)
    with monkeypatch.context() as patched:
        patched.setattr(short, "_pass", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([asked])
    found = []
    for _ in range(4):
        found += engine.generate([asked])
        engine.pool.clear_prefixes()
    assert captures == [None] and short.replays == 3
    same(found, [found[0]] * 4)


def test_the_memory_of_a_run_knows_the_largest_short_pass() -> None:
    assert activations.MOST_SHORT == prefill_graphs.SIZES[-1]


def test_what_cannot_run_without_the_host_is_no_short_pass(model: Transformer) -> None:
    assert engine_of(model).runner.short is None  # the CPU


@pytest.mark.parametrize("kind", ["kv_dtype", "rkv"])
def test_caches_that_read_slots_or_watch_have_none(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("lowroll.engine.prefill_graphs.flashes", lambda *_: True)
    monkeypatch.setattr(
        ShortPasses, "supports", staticmethod(lambda model, cache: cache.skips_negative_slots)
    )
    options = {"kv_dtype": {"kv_dtype": "fp8"}, "rkv": {"kv": make("rkv", budget=16, buffer=4)}}
    assert engine_of(model, **options[kind]).runner.short is None
    assert engine_of(model).runner.short is not None


@pytest.mark.parametrize("passes", [2, 16])
@pytest.mark.parametrize("chunk", [None, 5])
def test_several_passes_between_two_looks_change_no_token(
    model: Transformer, chunk: int | None, passes: int
) -> None:
    def rollouts(passes: int) -> tuple[list[Group], list[int]]:
        engine = engine_of(model, max_prefill_tokens=12, prefill_chunk=chunk, max_batch=12)
        engine.scheduler.passes = passes
        turns: list[int] = []
        plan = engine.scheduler.plan

        def watched() -> StepPlan:
            planned = plan()
            turns.append(len(planned.passes))
            return planned

        engine.scheduler.plan = watched  # type: ignore[method-assign]
        groups = engine.generate(REQUESTS)
        assert engine.pool.num_used == engine.scheduler.reserved_pages == 0
        return groups, [count for count in turns if count]

    ours, together = rollouts(passes)
    wanted, one_by_one = rollouts(1)
    same(ours, wanted)
    assert max(together) > 1 == max(one_by_one) and len(together) < len(one_by_one)


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_tokens_that_nobody_wants_end_behind_the_last_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """As on CUDA, where it saves most of a layer: the wanted ones are as they would be beside all."""
    model = hf.load(hf_folder(tmp_path / family, family), "cpu", torch.float32)
    lengths = [5, 9, 2]
    ids_T = torch.tensor([i for length in lengths for i in prompt(length, length)])
    pos_T = torch.cat([torch.arange(length) for length in lengths])
    attend, wanted_P = varlen(lengths), torch.tensor([4, 13, 13, 0])
    with torch.inference_mode():
        whole_PD = model(ids_T, pos_T, attend)[wanted_P]
        assert torch.equal(model(ids_T, pos_T, attend, wanted_P), whole_PD)
        calls: list[int] = []
        last = model.blocks[-1]
        monkeypatch.setattr(type(last), "mlp", watched(type(last).mlp, calls))
        cos, sin = rotations(pos_T, model.freqs)
        x_TD, update_TD = F.embedding(ids_T, model.embedding), None
        for block in model.blocks[:-1]:
            x_TD, update_TD = block(x_TD, update_TD, cos, sin, attend)
        x_PD, update_PD = last(x_TD, update_TD, cos, sin, attend, wanted_P)
        assert calls[-1] == len(wanted_P)
        torch.testing.assert_close(model.norm.add(x_PD, update_PD)[1], whole_PD)


def watched(mlp: Any, calls: list[int]) -> Any:
    def counted(block: Any, x_TD: Any) -> Any:
        calls.append(len(x_TD))
        return mlp(block, x_TD)

    return counted
