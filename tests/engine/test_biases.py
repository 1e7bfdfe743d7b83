"""Presence and frequency penalties and a bias of logits: what is drawn, and the log-prob of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request
from lowroll.engine.remote.protocol import body_of
from lowroll.engine.request import sampler_settings, validate
from lowroll.engine.sampler import shaped
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.types import Rollout
from tests.fixtures.scheduling import NEED

PROMPT = [5, 9, 9, 7]
ASKS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"logit_bias": ((11, 4.0), (12, -100.0))},
    {
        "presence_penalty": -0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((11, 3.0),),
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "top_k": 9,
        "temperature": 0.8,
    },
]


def test_logits_by_hand() -> None:
    ask = Request(
        [1, 2], presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((4, 3.0), (2, -1.0))
    )
    row = Sequence(LiveGroup(0, ask, (), NEED), 0, 0, [4, 2, 4])
    plain = Sequence(LiveGroup(0, Request([1]), (), NEED), 0, 0, [4])
    logits_BV = torch.zeros(2, 6)
    found = shaped(logits_BV, [row, plain])
    # 1 stands in the prompt alone; 4 is there twice, 2 once
    assert found[0].tolist() == [0, 0, -1 - 0.75, 0, 3 - 1.0, 0]
    assert found[1].tolist() == logits_BV[0].tolist() == [0] * 6


def engine_of(model: Path, **options: Any) -> Engine:
    return Engine(
        model, weights="fp32", device="cpu", cache_tokens=2048, page_size=4, max_batch=8, **options
    )


def oracle(engine: Engine, ask: Request, drawn: Rollout) -> list[float]:
    """Log-probs of the drawn tokens from logits that the engine scores without any setting."""
    found = []
    every = engine.spec.vocab_size
    for i, token in enumerate(drawn.token_ids):
        ids = [*ask.prompt_ids, *drawn.token_ids[:i]]
        _, ids_1V, logp_1V = engine.runner.score([*ids, token], len(ids), 1.0, every)
        row = torch.empty(every, dtype=torch.float64)
        row[ids_1V[0]] = logp_1V[0].double()
        for token_id, bias in ask.logit_bias or ():
            row[token_id] += bias
        for seen in set(drawn.token_ids[:i]):
            count = drawn.token_ids[:i].count(seen)
            row[seen] -= (ask.presence_penalty or 0) + (ask.frequency_penalty or 0) * count
        found.append(float(row.log_softmax(0)[token]))
    return found


@pytest.mark.parametrize("ask", ASKS[:3], ids=str)
@pytest.mark.parametrize("lookahead", [1, 8])
def test_the_recorded_log_prob_is_of_what_was_drawn_from(
    model: Path, ask: dict[str, Any], lookahead: int
) -> None:
    engine = engine_of(model, lookahead=lookahead)
    request = Request(PROMPT, n=2, max_tokens=12, seed=3, ignore_eos=True, **ask)
    (group,) = engine.generate([request])
    for rollout in group.rollouts:
        assert rollout.logprobs == pytest.approx(oracle(engine, request, rollout), abs=1e-4)
    drawn = {token for rollout in group.rollouts for token in rollout.token_ids}
    assert 12 not in drawn or not ask.get("logit_bias")


def test_rows_beside_them_draw_as_they_do_alone(model: Path) -> None:
    plain = [Request(PROMPT, max_tokens=9, seed=i, ignore_eos=True) for i in range(2)]
    mixed = [
        replace(plain[0], seed=7, top_logprobs=2 * (i % 2), **ask) for i, ask in enumerate(ASKS)
    ]
    alone = [engine_of(model).generate([one])[0].rollouts[0] for one in [*plain, *mixed]]
    together = engine_of(model, lookahead=8).generate([*plain, *mixed])
    for want, group in zip(alone, together, strict=True):
        assert group.rollouts[0].token_ids == want.token_ids
        assert group.rollouts[0].logprobs == pytest.approx(want.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("presence_penalty", True),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((999, 1.0),)),
        ("logit_bias", ((3, 101.0),)),
        ("logit_bias", tuple((i % 9, 1.0) for i in range(1025))),
    ],
)
def test_what_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        validate(
            replace(Request(PROMPT), **{field: value}),
            vocab_size=100,
            context_length=256,
            cache_tokens=256,
        )


def test_they_travel_and_are_recorded_only_where_they_are_asked_for() -> None:
    plain = Request(PROMPT)
    asked = replace(plain, **ASKS[3])
    names = {"presence_penalty", "frequency_penalty", "logit_bias"}
    assert names.isdisjoint(body_of(plain, "m", seed=0, stop_ids=[]))
    assert body_of(asked, "m", seed=0, stop_ids=[])["logit_bias"] == {"11": 3.0}
    assert names.isdisjoint(sampler_settings(plain))
    recorded = sampler_settings(asked)
    assert (recorded["frequency_penalty"], recorded["logit_bias.11"]) == (0.3, 3.0)
