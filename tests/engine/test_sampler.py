"""The sampler against Random123's known answers, an independent float64 oracle, and counted
draws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lowroll.engine.sampler import SamplingBatch, distribution, require_finite, sample, shaped
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.kernels.sampling.filters import Filters
from lowroll.kernels.sampling.gumbel_noise import philox4x32
from lowroll.types import Request
from tests.fixtures.gumbel import short_of_best
from tests.fixtures.scheduling import NEED

PLAIN = Request(prompt_ids=[1, 2], max_tokens=9)
KNOBS = {
    "plain": PLAIN,
    "temperature": replace(PLAIN, temperature=0.6),
    "top_k": replace(PLAIN, top_k=3),
    "top_p": replace(PLAIN, top_p=0.7),
    "min_p": replace(PLAIN, min_p=0.2),
    "repetition_penalty": replace(PLAIN, repetition_penalty=1.8),
    "min_tokens": replace(PLAIN, min_tokens=4, stop_ids=(0, 4)),
    "all": replace(
        PLAIN,
        temperature=1.3,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        min_tokens=4,
        stop_ids=(3,),
    ),
}
LOGITS_V = torch.tensor([2.0, 1.5, -0.5, 1.0, 0.5, 1.0, -1.0, -4.0, 0.9, 0.0])


def row(request: Request, key: int = 0, token_ids: tuple[int, ...] = (5,)) -> Sequence:
    group = LiveGroup(0, request, tuple(sorted(request.stop_ids)), NEED)
    return Sequence(group, 0, key, token_ids=list(token_ids))


def oracle(logits: list[float], s: Sequence) -> list[float]:
    """Probabilities in float64 by plain Python: sets and loops, nothing shared with the sampler."""
    r, x = s.request, list(logits)
    for i in set(s.prompt_ids) | set(s.token_ids):
        x[i] = x[i] / r.repetition_penalty if x[i] > 0 else x[i] * r.repetition_penalty
    if len(s.token_ids) < r.min_tokens:
        for i in s.group.stop_ids:
            x[i] = -math.inf
    x = [v / r.temperature for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[: r.top_k or None]
    weight = {i: math.exp(x[i] - x[order[0]]) for i in order}
    total, kept, mass = sum(weight.values()), [], 0.0
    for i in order:
        if mass < r.top_p or r.top_p == 1:
            kept.append(i)
        mass += weight[i] / total
    kept = [i for i in kept if weight[i] >= r.min_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


@pytest.mark.parametrize(
    "counter, key, answer",
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    def words(text):
        return torch.tensor([[int(word, 16)] for word in text.split()])

    assert [f"{int(word):08x}" for word in philox4x32(words(counter), words(key))] == answer.split()


def test_philox_equals_whole_numbers_of_python():
    def one(c, k, mask=0xFFFFFFFF):
        for _ in range(10):
            p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = (q >> 32 ^ c[1] ^ k[0], q & mask, p >> 32 ^ c[3] ^ k[1], p & mask)
            k = (k[0] + 0x9E3779B9 & mask, k[1] + 0xBB67AE85 & mask)
        return list(c)

    torch.manual_seed(0)
    words_6B = torch.randint(0, 2**32, (6, 1000))
    got_4B = philox4x32(words_6B[:4], words_6B[4:])
    assert got_4B.T.tolist() == [one(tuple(w[:4]), tuple(w[4:])) for w in words_6B.T.tolist()]


@pytest.mark.parametrize("name", KNOBS)
def test_draws_follow_the_oracle_and_record_its_log_probs(name):
    s = row(KNOBS[name], key=2**64 - 12345)
    want = oracle(LOGITS_V.tolist(), s)
    num_draws = 20_000
    draws = replace_rows(SamplingBatch.of([s], 10), num_draws)
    logits_BV = shaped(LOGITS_V[None], [s]).expand(num_draws, -1)
    tokens_B, logprobs_B = sample(logits_BV, draws, torch.arange(num_draws))
    assert tokens_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    for token, logprob in {*zip(tokens_B.tolist(), logprobs_B.tolist(), strict=True)}:
        assert abs(logprob - math.log(want[token])) < 2e-6
    counts = torch.bincount(tokens_B, minlength=10).tolist()
    support = [i for i in range(10) if want[i] > 0]
    assert all(counts[i] == 0 for i in range(10) if i not in support)
    chi2 = sum((counts[i] - num_draws * want[i]) ** 2 / (num_draws * want[i]) for i in support)
    assert (
        chi2 < (len(support) - 1) + 5 * math.sqrt(2 * (len(support) - 1)) + 6
    )  # far beyond p = 1e-4


def replace_rows(params: SamplingBatch, n: int) -> SamplingBatch:
    """Row 0 of `params`, n times: distribution by distribution it is the same row at other
    positions."""

    filters = params.filters
    if filters is not None:
        filters = Filters(
            filters.top_k_B.expand(n), filters.top_p_B.expand(n), filters.log_min_p_B.expand(n)
        )
    columns = (params.keys_B, params.temperature_B, params.greedy_B)
    return SamplingBatch(*(column.expand(n) for column in columns), filters)


def drawn(logits_BV, rows, positions_B, vocab_size):
    return sample(shaped(logits_BV, rows), SamplingBatch.of(rows, vocab_size), positions_B)


def test_hand_worked_filters():
    p = [0.4, 0.25, 0.25, 0.1]
    logits = torch.tensor([p]).log()

    def kept(**knobs):
        s = row(replace(PLAIN, **knobs), token_ids=())
        return [
            round(v, 6) for v in distribution(logits, SamplingBatch.of([s], 4))[0].exp().tolist()
        ]

    assert kept(top_k=2) == [
        round(0.4 / 0.65, 6),
        round(0.25 / 0.65, 6),
        0,
        0,
    ]  # a tie: the lower id stays
    assert kept(top_p=0.6) == [round(0.4 / 0.65, 6), round(0.25 / 0.65, 6), 0, 0]
    assert kept(top_p=0.66) == [round(0.4 / 0.9, 6), round(0.25 / 0.9, 6), round(0.25 / 0.9, 6), 0]
    assert kept(top_p=1e-9) == [1, 0, 0, 0]
    assert kept(min_p=0.5) == [round(0.4 / 0.9, 6), round(0.25 / 0.9, 6), round(0.25 / 0.9, 6), 0]
    assert distribution(torch.zeros(1, 4), SamplingBatch.of([row(replace(PLAIN, top_p=0.5))], 4))[
        0
    ].tolist() == [
        pytest.approx(-math.log(2)),
        pytest.approx(-math.log(2)),
        -math.inf,
        -math.inf,
    ]  # 1/4 + 1/4 is enough
    far = torch.tensor([[0.0, -50.0, -60.0]])
    assert distribution(far, SamplingBatch.of([row(replace(PLAIN, top_k=2))], 3))[0].tolist() == [
        0,
        -50,
        -math.inf,
    ]
    # top-p sees the mass that top-k leaves: 0.4 / 0.9 = 0.444 < 0.45, so a second id is needed
    assert kept(top_k=3, top_p=0.45) == [round(0.4 / 0.65, 6), round(0.25 / 0.65, 6), 0, 0]


def test_knobs_switched_off_change_nothing_bitwise():
    torch.manual_seed(0)
    logits_BV = torch.randn(3, 300)
    rows = [row(replace(PLAIN, temperature=0.7), key=k) for k in range(3)]
    plain = SamplingBatch.of(rows, 300)
    assert plain.filters is None and shaped(logits_BV, rows) is logits_BV
    rows += [row(KNOBS["all"]), row(replace(PLAIN, temperature=0.0))]
    whole_BV = shaped(torch.cat([logits_BV, torch.randn(2, 300)]), rows)
    mixed = distribution(whole_BV, SamplingBatch.of(rows, 300))
    assert torch.equal(mixed[:3], distribution(logits_BV, plain))


@pytest.mark.parametrize("vocab_size", [10, 128, 1000])
def test_a_row_alone_is_the_row_in_a_batch_bitwise(vocab_size):
    torch.manual_seed(vocab_size)
    requests = [*KNOBS.values(), replace(PLAIN, temperature=0.0)] * 3
    rows = [row(r, key=2**63 + 77 * i) for i, r in enumerate(requests)]
    logits_BV = (torch.randn(len(rows), vocab_size) * 3).bfloat16()
    positions_B = torch.arange(len(rows)) + 3
    before = logits_BV.clone()
    tokens_B, logprobs_B = drawn(logits_BV, rows, positions_B, vocab_size)
    assert torch.equal(before, logits_BV)
    for i, s in enumerate(rows):
        at = slice(i, i + 1)
        token, logprob = drawn(logits_BV[at], [s], positions_B[at], vocab_size)
        assert (token.item(), logprob.item()) == (tokens_B[i].item(), logprobs_B[i].item())


def test_greedy_takes_the_lower_id_of_a_tie_after_penalty_and_bans():
    logits = torch.tensor([[3.0, 2.5, 2.5, 1.0]])
    request = Request(
        prompt_ids=[3], temperature=0.0, min_tokens=2, stop_ids=(0,), top_p=0.1, seed=3
    )
    tokens, logprobs = drawn(logits, [row(request, token_ids=())], torch.tensor([1]), 4)
    assert tokens.item() == 1
    want = 2.5 - math.log(2 * math.exp(2.5) + math.exp(1.0))
    assert abs(logprobs.item() - want) < 1e-6


def test_impossible_ids_are_never_drawn():
    logits = torch.full((400, 400), -math.inf)
    logits[:, 130:140] = 0.0
    logits[:, 300:302] = -80.0  # more than any noise makes up for
    rows = [row(PLAIN, k) for k in range(400)]
    tokens, logprobs = sample(logits, SamplingBatch.of(rows, 400), torch.arange(400))
    assert set(tokens.tolist()) == set(range(130, 140))
    require_finite(logprobs.tolist())


def test_the_token_has_the_best_score_under_the_noise_of_its_place():
    torch.manual_seed(1)
    logits_BV = torch.randn(64, 5000) * 2
    keys = [2**64 - 1 - 2**58 * k for k in range(64)]
    params = SamplingBatch.of([row(PLAIN, key=key) for key in keys], 5000)
    tokens_B, _ = sample(logits_BV, params, torch.arange(64) * 2**33)
    for b, token in enumerate(tokens_B.tolist()):
        assert short_of_best(logits_BV[b], keys[b], b * 2**33, token) < 1e-5


def test_rows_without_a_distribution_are_named():
    logits = torch.zeros(6, 50)
    logits[1, 49] = math.nan
    logits[2] = -math.inf
    logits[4, 7] = math.inf
    logits[5, :49] = -math.inf  # one possible id is a distribution
    for request in (*KNOBS.values(), replace(PLAIN, temperature=0.0)):
        plain = replace(request, min_tokens=0)
        rows = [row(plain, k) for k in range(6)]
        tokens, logprobs = drawn(logits, rows, torch.arange(6), 50)
        assert ((tokens >= 0) & (tokens < 50)).all() and tokens[5] == 49 and logprobs[5] == 0
        with pytest.raises(ValueError, match=r"rows \[1, 2, 4\]"):
            require_finite(logprobs.tolist())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_draws_the_same_tokens_without_a_host_sync():
    torch.manual_seed(2)
    requests = [*KNOBS.values(), replace(PLAIN, temperature=0.0)] * 8
    rows = [row(r, key=2**62 + i) for i, r in enumerate(requests)]
    logits_BV, positions_B = torch.randn(len(rows), 5000) * 3, torch.arange(len(rows))
    want = drawn(logits_BV, rows, positions_B, 5000)
    logits_BV, positions_B = logits_BV.cuda(), positions_B.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        params = SamplingBatch.of(rows, 5000, "cuda")
        tokens_B, logprobs_B = sample(shaped(logits_BV, rows), params, positions_B)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens_B.cpu(), want[0])
    torch.testing.assert_close(logprobs_B.cpu(), want[1], atol=2e-6, rtol=0)
