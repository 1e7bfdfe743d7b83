"""Steps between two looks of the host: how many there are changes no token, and no bit of what the
same rows draw together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lowroll.engine.decoder import Decoder, PendingSteps
from lowroll.kv.policy.table import make
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.types import Group, Request, Rollout
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tiny import hf_folder

LOOKAHEADS = (1, 2, 4, 16)
BASE = Request(prompt(9), n=1, max_tokens=18, ignore_eos=True)
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"n": 8, "temperature": 0.8},
    {"top_p": 0.8},
    {"n": 8, "top_k": 5, "top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"n": 8, "min_tokens": 7, "stop_ids": (3, 4, 5, 6)},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return hf.load(hf_folder(tmp_path_factory.mktemp("models") / "m"))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that the decoder took between two looks."""
    taken: list[int] = []
    read = Decoder.read

    def counted(decoder: Decoder, begun: PendingSteps) -> Any:
        drawn = read(decoder, begun)
        taken.append(len(drawn[0][0]))
        return drawn

    monkeypatch.setattr(Decoder, "read", counted)
    return taken


def rollouts(groups: list[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_rows_of_one_length_have_the_same_bits(
    model: Transformer, weights: str, top: int, looks: list[int]
) -> None:
    """Filters, penalties, bans and likeliest tokens need no look of the host."""
    requests = [replace(BASE, seed=i, **one) for i, one in enumerate(SAMPLERS)]
    requests[3:] = [replace(request, top_logprobs=top) for request in requests[3:]]
    found = []
    for lookahead in LOOKAHEADS:
        looks.clear()
        engine = engine_of(model, weights=weights, lookahead=lookahead)
        found.append(engine.generate(requests))
        assert looks == ([1] * 17 if lookahead == 1 else [lookahead] * (16 // lookahead) + [1])
    assert all(groups == found[0] for groups in found)
    assert all((r.top_logprobs is None) == (top == 0) for r in found[0][3].rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dense", "streaming", "snapkv", "rkv", "h2o"])
def test_rows_that_end_and_rows_that_are_full_draw_the_same_tokens(
    model: Transformer, policy: str
) -> None:
    """Stops in the middle of a run, compactions at its edge, prompts that wait for room, and shared
    prefixes."""
    kv = None if policy == "dense" else make(policy, budget=12, buffer=5)
    stem = prompt(12, 1)
    requests = [
        Request(stem + prompt(3, 2), n=8, max_tokens=25, seed=1, stop_ids=(9, 17)),
        Request(stem + prompt(5, 3), n=3, max_tokens=30, seed=2, top_p=0.9, top_logprobs=2),
        Request(prompt(4, 4), n=1, max_tokens=40, seed=3, temperature=0.0),
        Request(stem, n=2, max_tokens=9, seed=4, min_p=0.02),
    ]
    found = []
    for lookahead in LOOKAHEADS:
        engine = engine_of(model, kv=kv, lookahead=lookahead, max_batch=6, cache_tokens=320)
        found.append(rollouts(engine.generate(requests) + engine.generate(requests[:2])))
        assert engine.pool.num_used == engine.scheduler.reserved_pages == 0
    for others in found[1:]:
        for rollout, first in zip(others, found[0], strict=True):
            ended = (rollout.token_ids, rollout.finish_reason, rollout.stop_reason)
            assert ended == (first.token_ids, first.finish_reason, first.stop_reason)
            assert rollout.logprobs == pytest.approx(first.logprobs, abs=1e-4)
            for told, wanted in zip(
                rollout.top_logprobs or [], first.top_logprobs or [], strict=True
            ):
                assert [i for i, _ in told] == [i for i, _ in wanted]
