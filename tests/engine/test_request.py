"""Every wrong field is refused by name; the noise key is a fixed function of what owns the
noise."""

from __future__ import annotations

import re
from dataclasses import replace
from hashlib import blake2b
from struct import pack

import pytest

from lowroll.engine.request import noise_key, validate
from lowroll.types import Request

GOOD = Request(
    prompt_ids=[0, 5, 99], n=2, max_tokens=13, min_tokens=3, top_k=4, stop_ids=(7,), seed=2**63 - 1
)
LIMITS = {"vocab_size": 100, "context_length": 16, "cache_tokens": 16}
NAN, INF = float("nan"), float("inf")


def test_good_requests_pass():
    validate(GOOD, **LIMITS)
    validate(replace(GOOD, temperature=0, top_p=1, min_p=0, ignore_eos=True), **LIMITS)
    validate(replace(GOOD, stop_strings=("\n\n",)), **LIMITS, has_tokenizer=True)


def test_a_request_that_may_draw_nothing_is_refused() -> None:
    """Its step would fail, and with it what others asked for."""
    most = replace(GOOD, stop_ids=tuple(range(99)) * 2)
    validate(most, **LIMITS)
    for request, eos_ids in ((replace(most, stop_ids=tuple(range(100))), ()), (most, {99})):
        with pytest.raises(ValueError, match="^stop_ids: every token is a stop"):
            validate(request, **LIMITS, eos_ids=eos_ids)
        validate(replace(request, min_tokens=0), **LIMITS, eos_ids=eos_ids)
    validate(replace(most, ignore_eos=True), **LIMITS, eos_ids={99})


@pytest.mark.parametrize(
    "field, value, names",
    [
        ("prompt_ids", [1, 100], "prompt_ids[1]"),
        ("prompt_ids", [-1], "prompt_ids[0]"),
        ("prompt_ids", [True], "prompt_ids[0]"),
        ("prompt_ids", [1.0], "prompt_ids[0]"),
        ("prompt_ids", [10**5000], "prompt_ids[0]"),
        ("prompt_ids", "abc", "prompt_ids"),
        ("prompt_ids", None, "prompt_ids"),
        ("n", True, "n"),
        ("n", "2", "n"),
        ("max_tokens", 2.0, "max_tokens"),
        ("min_tokens", 14, "min_tokens"),
        ("temperature", NAN, "temperature"),
        ("temperature", INF, "temperature"),
        ("temperature", 1e-300, "temperature"),
        ("temperature", 10**400, "temperature"),
        ("temperature", True, "temperature"),
        ("top_k", 1.5, "top_k"),
        ("top_p", NAN, "top_p"),
        ("min_p", None, "min_p"),
        ("repetition_penalty", NAN, "repetition_penalty"),
        ("repetition_penalty", -2, "repetition_penalty"),
        ("stop_ids", (100,), "stop_ids[0]"),
        ("stop_ids", (1, True), "stop_ids[1]"),
        ("stop_ids", 3, "stop_ids"),
        ("stop_strings", ("a", ""), "stop_strings[1]"),
        ("ignore_eos", 1, "ignore_eos"),
        ("seed", 1.0, "seed"),
        ("id", 7, "id"),
    ],
)
def test_wrong_fields_are_named(field, value, names):
    with pytest.raises(ValueError, match="^" + re.escape(names) + r"[:]"):
        validate(replace(GOOD, **{field: value}), **LIMITS, has_tokenizer=True)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("n", (1, 1024), (0, 1025)),
        ("max_tokens", (1, 13), (0, 14)),
        ("min_tokens", (0, 1), (-1, 2)),
        ("temperature", (0, 0.0, 1e-4, 1e4), (0.99e-4, 1.01e4, -0.0001)),
        ("top_k", (0, 1, 10**9), (-1,)),
        ("top_p", (1e-9, 1, 1.0), (0, 1.0000001)),
        ("min_p", (0, 0.999), (-1e-9, 1)),
        ("repetition_penalty", (1e-2, 1e2), (0.99e-2, 1.01e2)),
        ("stop_ids", ((0, 99), []), ((100,), (-1,))),
        ("prompt_ids", ([0, 99], (5,)), ([100], [-1], [])),
        ("seed", (0, 2**63 - 1), (-1, 2**63)),
        ("id", ("", "a"), (None,)),
        ("top_logprobs", (0, 20), (-1, 21, True, 1.0, None)),
        ("stop_strings", ((), ["a"]), (("",), "a", (b"a",))),
    ],
)
def test_every_limit_from_both_sides(field: str, good: tuple, bad: tuple) -> None:
    base = Request([3, 4, 5], max_tokens=1)
    for value in good:
        validate(replace(base, **{field: value}), **LIMITS, has_tokenizer=True)
    for value in bad:
        with pytest.raises(ValueError, match=f"^{field}"):
            validate(replace(base, **{field: value}), **LIMITS, has_tokenizer=True)


@pytest.mark.parametrize(
    "field, value, bounds",
    [
        ("top_k", -1, "of at least 0, got -1"),
        ("n", 0, "in 1..1024, got 0"),
    ],
)
def test_what_an_integer_may_be_is_said(field, value, bounds):
    with pytest.raises(ValueError, match=f"{field}: expected an integer {bounds}"):
        validate(replace(GOOD, **{field: value}), **LIMITS)


def test_limits_name_their_owner():
    with pytest.raises(
        ValueError, match=r"^max_tokens: 3 prompt tokens \+ max_tokens 13 = 16 is over the model's"
    ):
        validate(GOOD, vocab_size=100, context_length=15, cache_tokens=99)
    with pytest.raises(ValueError, match="^max_tokens: .* the KV cache of 15 tokens"):
        validate(GOOD, vocab_size=100, context_length=99, cache_tokens=15)
    with pytest.raises(ValueError, match="^stop_strings: this engine has no tokenizer"):
        validate(replace(GOOD, stop_strings=("x",)), **LIMITS)


def test_noise_key_is_pinned_to_seed_id_and_sample():
    request = Request(prompt_ids=[3, 4], seed=5, id="q1")
    digest = blake2b(pack("<QI", 5, 2) + b"idq1", digest_size=8).digest()
    assert noise_key(request, 2) == int.from_bytes(digest, "little")
    assert noise_key(replace(request, prompt_ids=[9], n=7, temperature=0.3), 2) == noise_key(
        request, 2
    )
    nameless = replace(request, id="")
    variants = [
        noise_key(request, 2),
        noise_key(request, 3),
        noise_key(replace(request, seed=6), 2),
        noise_key(replace(request, id="q2"), 2),
        noise_key(nameless, 2),
        noise_key(replace(nameless, prompt_ids=[3, 5]), 2),
    ]
    assert len(set(variants)) == len(variants) and all(0 <= key < 2**64 for key in variants)
