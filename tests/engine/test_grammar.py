"""Responses held to a grammar: only what it has a place for is drawn, with log-probs of what could be;
beside other rows, again after new weights, and with every other setting."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from lowroll import Engine, Request
from lowroll.engine.grammar import Grammars, held
from lowroll.model import hf
from lowroll.runs.demo import build_tokenizer
from lowroll.types import Rollout
from lowroll.weights.sync.update import WeightUpdate

DIGITS = LLMatcher.grammar_from_regex("([0-9]{2},){1,5}[a-f]+")
POINT = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {"x": {"enum": [1, 22, 333]}, "y": {"enum": ["a", "bc"]}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)
PROMPT = [5, 9, 9, 7]


def engine_of(model: Path, **options: Any) -> Engine:
    settings = {"weights": "fp32", "device": "cpu", "cache_tokens": 2048, "page_size": 4}
    return Engine(model, **(settings | options))


def matcher_of(engine: Engine, grammar: str) -> LLMatcher:
    """The library's own reading of a grammar over the engine's tokenizer."""
    tokenizer = from_tokenizer(
        engine.tokenizer, engine.spec.vocab_size, sorted(engine.scheduler.eos_ids)
    )
    return LLMatcher(tokenizer, grammar)


def oracle(engine: Engine, ask: Request, drawn: Rollout) -> list[float]:
    """Log-probs of the drawn tokens from logits without any setting, and the grammar's own mask."""
    assert ask.grammar is not None
    state = matcher_of(engine, ask.grammar)
    found, every = [], engine.spec.vocab_size
    for i, token in enumerate(drawn.token_ids):
        ids = [*ask.prompt_ids, *drawn.token_ids[:i]]
        _, ids_1V, logp_1V = engine.runner.score([*ids, token], len(ids), 1.0, every)
        row = torch.empty(every, dtype=torch.float64)
        row[ids_1V[0]] = logp_1V[0].double()
        allowed = torch.tensor([bias > 0 for bias in state.compute_logit_bias()])
        row[~allowed] = -math.inf
        found.append(float((row / ask.temperature).log_softmax(0)[token]))
        state.consume_token(token)
    return found


@pytest.mark.parametrize("lookahead", [1, 8])
@pytest.mark.parametrize("n", [1, 8])
def test_log_probs_are_of_what_could_be_drawn(model: Path, n: int, lookahead: int) -> None:
    engine = engine_of(model, lookahead=lookahead)
    ask = Request(PROMPT, n=n, max_tokens=60, seed=3, temperature=0.9, grammar=POINT)
    (group,) = engine.generate([ask])
    for rollout in group.rollouts:
        assert json.loads(engine.text(rollout))["x"] in (1, 22, 333)
        assert rollout.finish_reason == "stop"
        assert rollout.logprobs == pytest.approx(oracle(engine, ask, rollout), abs=1e-4)
        assert rollout.behavior.sampler["grammar"] == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "int8"},
        {"weights": "bf16"},
        {"max_batch": 3, "lookahead": 8},
        {"lookahead": 4, "gather": 0, "one_pass": True},
        {"prefill_chunk": 2},
    ],
    ids=str,
)
def test_it_holds_in_every_engine_beside_rows_that_are_free(
    model: Path, options: dict[str, Any]
) -> None:
    plain = Request(PROMPT, n=3, max_tokens=20, seed=1, ignore_eos=True)
    asks = [
        plain,
        replace(plain, ignore_eos=False, grammar=POINT, max_tokens=60, n=8),
        replace(plain, ignore_eos=False, grammar=DIGITS, max_tokens=40, top_k=3, top_logprobs=4),
        replace(
            plain, ignore_eos=False, grammar=DIGITS, temperature=0.0, n=1, repetition_penalty=1.3
        ),
        replace(plain, ignore_eos=False, grammar=DIGITS, logit_bias=((7, 100.0),), top_p=0.8),
    ]
    engine = engine_of(model, **options)
    free, point, *digits = engine.generate(asks)
    for rollout in point.rollouts:
        json.loads(engine.text(rollout))
    for group in digits:
        for rollout in group.rollouts:
            taken = matcher_of(engine, DIGITS).try_consume_tokens(rollout.token_ids)
            assert taken == len(rollout.token_ids)
            assert all(map(math.isfinite, rollout.logprobs))
    if options in ({}, {"max_batch": 3, "lookahead": 8}, {"prefill_chunk": 2}):
        (alone,) = engine_of(model, **options).generate([plain])
        assert [r.token_ids for r in free.rollouts] == [r.token_ids for r in alone.rollouts]


def test_a_replay_under_new_weights_is_held_too(model: Path) -> None:
    master = hf.load(model)
    engine = engine_of(model, weights="fp32")
    ask = Request(PROMPT, n=4, max_tokens=40, seed=2, grammar=POINT)
    handle = engine.add(ask)
    for _ in range(6):
        engine.step()
    generator = torch.Generator().manual_seed(1)
    for p in master.parameters():
        p.data.mul_(1 + 0.3 * torch.randn(p.shape, generator=generator))
    engine.update_weights(WeightUpdate.local(master, 1), in_flight="replay")
    ended = {}
    while handle not in ended:
        ended |= dict(engine.step())
    (fresh,) = engine.generate([ask])
    for now, want in zip(ended[handle].rollouts, fresh.rollouts, strict=True):
        assert json.loads(engine.text(now))["x"] in (1, 22, 333)
        assert now.token_ids == want.token_ids


def test_another_draft_of_a_sample_is_tried_from_where_they_part() -> None:
    tokenizer = build_tokenizer()
    grammars = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    grammar = grammars.compile('start: "12" ("a" | "b") "c"')
    ids = {c: tokenizer.encode(c, add_special_tokens=False)[0] for c in "12abc"}

    def allowed(text: str) -> set[str]:
        tokens = [ids[c] for c in text]
        row = held(torch.zeros(1, len(tokenizer)), [(0, grammar, 0, tokens)])[0]
        return {c for c, i in ids.items() if row[i] == 0}

    assert allowed("12") == {"a", "b"}
    assert allowed("12a") == {"c"}
    assert allowed("12b") == {"c"}
    assert allowed("1") == {"2"}
    assert allowed("") == {"1"}
    # what no grammar goes on from ends
    row = held(torch.zeros(1, len(tokenizer)), [(0, grammar, 0, [ids["c"]])])[0]
    assert row[tokenizer.eos_token_id] == 0 and int((row == 0).sum()) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": 5}, "grammar: expected a text"),
        ({"grammar": "start: nobody"}, "grammar: .*nobody"),
        ({"grammar": "x" * 300_000}, "grammar: 300,000 characters"),
        ({"grammar": POINT, "min_tokens": 2}, "min_tokens: "),
        ({"grammar": POINT, "ignore_eos": True}, "ignore_eos: "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_is_refused(model: Path, fields: dict[str, Any], message: str) -> None:
    engine = engine_of(model)
    with pytest.raises(ValueError, match=message):
        engine.add(Request(PROMPT, max_tokens=9, **fields))
    assert not engine.scheduler.has_work


def test_one_that_takes_too_much_ends_with_a_line_in_the_log(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    regex = LLMatcher.grammar_from_regex("(((((a{100}){100}){100}){100}){100})")
    engine = engine_of(model)
    (group,) = engine.generate([Request(PROMPT, max_tokens=20, grammar=regex)])
    assert group.rollouts[0].finish_reason == "stop"
    assert "cannot be followed further" in caplog.text
    (free,) = engine.generate([Request(PROMPT, max_tokens=5, ignore_eos=True)])
    assert len(free.rollouts[0].token_ids) == 5
