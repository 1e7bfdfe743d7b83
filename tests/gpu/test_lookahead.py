"""On a CUDA device: captured steps between two looks of the host, and what is told of the likeliest
tokens beside them, change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request, score
from lowroll.kv.policy.table import make
from lowroll.model import hf
from tests.fixtures.engines import prompt
from tests.fixtures.tiny import hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

LARGE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
BASE = Request(prompt(9), n=1, max_tokens=40, ignore_eos=True)
PLAIN: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"n": 8, "temperature": 0.8}]
FILTERED: list[dict[str, Any]] = [{"top_p": 0.8}, {"n": 8, "top_k": 5}, {"min_p": 0.05}]
SAMPLERS = {
    "plain": PLAIN,
    "filtered": PLAIN + FILTERED,
    "penalised": [
        *PLAIN,
        {"n": 8, "repetition_penalty": 1.2, "top_k": 20},
        {"n": 3, "min_tokens": 25, "stop_ids": (3, 5, 7, 9, 11)},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / "m", **LARGE)


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(folder, device="cuda", cache_tokens=8192, **options)


def requests_of(samplers: str) -> list[Request]:
    return [replace(BASE, seed=i, **one) for i, one in enumerate(SAMPLERS[samplers])]


@pytest.mark.parametrize("weights", ["fp32", "bf16", "nvfp4"])
@pytest.mark.parametrize("samplers", SAMPLERS)
def test_every_lookahead_gives_the_same_bits(folder: Path, samplers: str, weights: str) -> None:
    found = []
    for lookahead in (1, 2, 4, 16, None):
        engine = engine_of(folder, weights=weights, lookahead=lookahead)
        found.append(engine.generate(requests_of(samplers)))
        assert engine.runner.decoder.replays >= 39
    assert all(groups == found[0] for groups in found)


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("samplers", ["filtered", "penalised"])
def test_a_graph_draws_what_eager_kernels_draw(folder: Path, samplers: str, weights: str) -> None:
    """And a plain row beside the others has the bits that it has among its own kind."""
    requests = requests_of(samplers)
    graphs = engine_of(folder, weights=weights).generate(requests)
    assert graphs == engine_of(folder, weights=weights, cuda_graphs=False).generate(requests)
    plain = [
        replace(BASE, n=r.n, seed=r.seed, temperature=r.temperature, ignore_eos=True)
        for r in requests
    ]
    assert engine_of(folder, weights=weights).generate(plain)[: len(PLAIN)] == graphs[: len(PLAIN)]


@pytest.mark.parametrize("samplers", ["filtered", "penalised"])
def test_the_cpu_draws_the_same_tokens(folder: Path, samplers: str) -> None:
    requests = requests_of(samplers)
    found = engine_of(folder, weights="fp32").generate(requests)
    want = Engine(folder, weights="fp32", device="cpu", cache_tokens=8192).generate(requests)
    for group, other in zip(found, want, strict=True):
        for rollout, there in zip(group.rollouts, other.rollouts, strict=True):
            assert rollout.token_ids == there.token_ids
            assert rollout.logprobs == pytest.approx(there.logprobs, abs=2e-4)


@pytest.mark.parametrize("policy", ["streaming", "rkv"])
def test_rows_that_are_full_draw_the_same_tokens(folder: Path, policy: str) -> None:
    kv = make(policy, budget=16, buffer=5)
    found = [
        [
            rollout.token_ids
            for group in engine_of(folder, weights="fp32", kv=kv, lookahead=steps).generate(
                requests_of("filtered")
            )
            for rollout in group.rollouts
        ]
        for steps in (1, 4, 16)
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("weights", ["fp32", "bf16", "nvfp4"])
@pytest.mark.parametrize("samplers", SAMPLERS)
def test_asking_for_the_likeliest_changes_no_bit(folder: Path, samplers: str, weights: str) -> None:
    requests = requests_of(samplers)
    want = engine_of(folder, weights=weights).generate(requests)
    asking = [replace(r, top_logprobs=(0, 3, 20)[i % 3]) for i, r in enumerate(requests)]
    for lookahead in (1, 16):
        groups = engine_of(folder, weights=weights, lookahead=lookahead).generate(asking)
        for group, plain in zip(groups, want, strict=True):
            for rollout, alone in zip(group.rollouts, plain.rollouts, strict=True):
                assert replace(rollout, top_logprobs=None) == alone
                told = rollout.top_logprobs
                assert (told is None) == (not group.request.top_logprobs)
                for token, logprob, pairs in zip(
                    rollout.token_ids, rollout.logprobs, told or [], strict=told is not None
                ):
                    assert 0 < len(pairs) <= group.request.top_logprobs
                    assert dict(pairs).get(token, logprob) == logprob
                    assert logprob <= pairs[0][1] + 1e-5


def test_scores_with_the_likeliest_are_the_scores(folder: Path) -> None:
    engine = engine_of(folder, weights="bf16")
    sequences, lens = [prompt(250, 1), prompt(12, 2)], [4, 11]
    plain = engine.score(sequences, lens, 0.7)
    for logp_T, found, ids, length in zip(
        plain, engine.score_top(sequences, lens, 5, 0.7), sequences, lens, strict=True
    ):
        assert torch.equal(found.logprobs_T, logp_T) and not found.top_ids_TK.is_cuda
        assert found.top_ids_TK.shape == (len(ids) - length, 5)
        falls_TK = found.top_logprobs_TK.diff(dim=1)
        rises_TK = found.top_ids_TK.diff(dim=1)
        assert ((falls_TK < 0) | ((falls_TK == 0) & (rises_TK > 0))).all()
        assert (found.logprobs_T <= found.top_logprobs_TK[:, 0]).all()
    (whole,) = score(hf.load(folder, "cuda", torch.bfloat16), sequences[:1], lens[:1], 0.7)
    assert (plain[0] - whole.cpu()).abs().max() < 0.2


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("samplers", SAMPLERS)
def test_nothing_waits_for_the_device_before_it_has_all_of_a_turn(
    folder: Path, samplers: str, one_pass: bool
) -> None:
    """A turn with rows, prompts and a later piece of one is launched without a synchronisation."""
    engine = engine_of(folder, weights="bf16", lookahead=4, one_pass=one_pass, prefill_chunk=16)
    launched: list[bool] = []

    def read() -> None:
        launched.append(torch.cuda.get_sync_debug_mode() == 2)
        torch.cuda.set_sync_debug_mode("default")

    def turn(mode: str) -> None:
        torch.cuda.set_sync_debug_mode(mode)
        try:
            engine.step(read)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for request in requests_of(samplers):
        engine.add(request)
    for _ in range(3):  # compiles and captures
        turn("default")
    for _ in range(4):
        engine.add(replace(BASE, prompt_ids=prompt(40)))
        turn("error")
    assert launched[3:] == [True] * 4
    while engine.has_work:
        turn("default")
