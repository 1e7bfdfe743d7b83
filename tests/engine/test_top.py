"""The likeliest tokens at each place: those of the distribution that was drawn from, and asking for
them changes no token and no log-prob."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lowroll import score
from lowroll.engine.sampler import SamplingBatch, TopLogprobs, distribution, likeliest
from lowroll.engine.sequence import LiveGroup, Sequence
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.types import Request
from tests.fixtures.engines import V, engine_of, prompt
from tests.fixtures.scheduling import NEED
from tests.fixtures.tiny import hf_folder

SAMPLERS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 1.7},
    "top_p": {"top_p": 0.6},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.03, "temperature": 0.8},
    "penalty": {"repetition_penalty": 1.4},
    "greedy penalty": {"repetition_penalty": 1.4, "temperature": 0.0},
    "min_tokens": {"min_tokens": 5, "stop_ids": (7, 9)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return hf.load(hf_folder(tmp_path_factory.mktemp("models") / "m"))


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("name", SAMPLERS)
def test_asking_changes_no_token_and_no_log_prob(model: Transformer, name: str, n: int) -> None:
    request = Request(prompt(7), n=n, max_tokens=6, seed=5, ignore_eos=True, **SAMPLERS[name])
    engine = engine_of(model, lookahead=4)
    (want,) = engine.generate([request])
    engine.reset_prefix_cache()
    (group,) = engine.generate([replace(request, top_logprobs=4)])
    for plain, rollout in zip(want.rollouts, group.rollouts, strict=True):
        told = rollout.top_logprobs
        assert told is not None and plain.top_logprobs is None
        assert replace(rollout, top_logprobs=None) == plain
        assert len(told) == len(rollout.token_ids) == 6
        for token, logprob, pairs in zip(rollout.token_ids, rollout.logprobs, told, strict=True):
            ids, logps = [i for i, _ in pairs], [lp for _, lp in pairs]
            assert logps == sorted(logps, reverse=True) and len(set(ids)) == len(ids) <= 4
            if token in ids:
                assert dict(pairs)[token] == logprob
            else:
                assert logprob <= logps[-1]
            if "temperature" in SAMPLERS[name] and not SAMPLERS[name]["temperature"]:
                assert ids[0] == token


def test_rows_that_do_not_ask_keep_their_bits_beside_rows_that_do(model: Transformer) -> None:
    base = Request(prompt(7), n=2, max_tokens=9, ignore_eos=True)
    requests = [replace(base, seed=i, **one) for i, one in enumerate(SAMPLERS.values())]
    want = engine_of(model).generate(requests)
    mixed = [replace(r, top_logprobs=(0, 3, 20)[i % 3]) for i, r in enumerate(requests)]
    for lookahead in (1, 5):
        groups = engine_of(model, lookahead=lookahead).generate(mixed)
        for group, plain in zip(groups, want, strict=True):
            asked = group.request.top_logprobs
            assert all((r.top_logprobs is not None) == (asked > 0) for r in group.rollouts)
            assert [replace(r, top_logprobs=None) for r in group.rollouts] == plain.rollouts


def test_batches_of_all_sizes_leave_their_logits_in_one_place(model: Transformer) -> None:
    engine = engine_of(model, max_batch=8)
    for n in (3, 8, 1):
        engine.generate([Request(prompt(7), n=n, max_tokens=3, top_logprobs=3, ignore_eos=True)])
        logits = engine.runner.decoder.logits
        assert logits is not None and logits.shape == (8, V)


def test_what_cannot_be_drawn_is_not_told(model: Transformer) -> None:
    request = Request(prompt(7), max_tokens=5, top_k=3, top_logprobs=20, ignore_eos=True)
    (group,) = engine_of(model).generate([request])
    assert [len(pairs) for pairs in group.rollouts[0].top_logprobs or []] == [3] * 5
    (group,) = engine_of(model).generate([replace(request, min_tokens=5, stop_ids=(3, 4), top_k=0)])
    for pairs in group.rollouts[0].top_logprobs or []:
        assert len(pairs) == 20 and not {3, 4} & {token for token, _ in pairs}


def row(**fields: object) -> Sequence:
    request = Request([1, 2], **fields)  # type: ignore[arg-type]
    top_logprobs = [] if request.top_logprobs else None
    return Sequence(LiveGroup(0, request, (), NEED), 0, 0, [5], top_logprobs=top_logprobs)


def test_ranks_are_those_of_a_sort_and_equal_ones_go_by_id() -> None:
    steps = [torch.randn(70, 300).mul(2).round().div(4) for _ in range(2)]  # many are equal
    rows = [row(top_logprobs=i % 21, temperature=0.7, top_p=0.9) for i in range(70)]
    ranks = TopLogprobs(rows)
    for logits_BV in steps:
        ranks.see(logits_BV)
    told = ranks.told([[0, 0]] * 70, [[-1.5, -2.5]] * 70)
    for step, (logits_BV, logprob) in enumerate(zip(steps, (-1.5, -2.5), strict=True)):
        logp_BV = distribution(logits_BV, SamplingBatch.of(rows, 300)).tolist()
        for tops, logp_V, s in zip(told, logp_BV, rows, strict=True):
            if not s.request.top_logprobs:
                assert tops is None
                continue
            order = sorted(range(300), key=lambda i: (-logp_V[i], i))[: s.request.top_logprobs]
            want = [(i, logp_V[i]) for i in order if logp_V[i] > -math.inf]
            # what was recorded for the drawn id 0 is what is told of it
            assert (tops or [])[step] == [(i, logp if i else logprob) for i, logp in want]


def test_ranks_by_hand() -> None:
    logp_BV = torch.tensor([[-1.0, -0.0, -math.inf, 0.0, -1.0], [-2.0, -3.0, -2.0, -1e-30, -1e30]])
    ids_BK, top_BK = likeliest(logp_BV, 4)
    assert ids_BK.tolist() == [[1, 3, 0, 4], [3, 0, 2, 1]]
    assert torch.equal(top_BK, logp_BV.gather(1, ids_BK))
    assert likeliest(logp_BV, 9)[0].shape == (2, 5)  # there are no more
    ids_BK, top_BK = likeliest(logp_BV, 0)
    assert ids_BK.shape == top_BK.shape == (2, 0) and ids_BK.dtype == torch.int64


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_those_of_score_with_the_likeliest_beside_them(
    model: Transformer, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowroll.engine.runner.SCORE_ROWS", 5)
    engine = engine_of(model)
    sequences, lens = [prompt(23, 1), prompt(6, 2), prompt(2, 3)], [4, 5, 1]
    plain = engine.score(sequences, lens, temperature)
    for ids, length, logp_T, found in zip(
        sequences, lens, plain, engine.score_top(sequences, lens, 3, temperature), strict=True
    ):
        responses = len(ids) - length
        assert torch.equal(found.logprobs_T, logp_T)
        assert found.top_ids_TK.shape == found.top_logprobs_TK.shape == (responses, 3)
        assert found.top_ids_TK.dtype == torch.int64
        assert found.logprobs_T.dtype == found.top_logprobs_TK.dtype == torch.float32
        for t in range(responses):
            for token, logp in zip(
                found.top_ids_TK[t].tolist(), found.top_logprobs_TK[t].tolist(), strict=True
            ):
                other = [*ids[: length + t], token]
                (alone,) = score(model, [other], [length + t], temperature)
                assert abs(float(alone[0]) - logp) < 1e-5
    (all_of_them,) = engine_of(model).score_top([prompt(5)], [4], 20)
    assert all_of_them.top_ids_TK.shape == (1, min(20, V))
    for wrong in (-1, 21, True, 2.0):
        with pytest.raises(ValueError, match="^top: expected an integer in 0..20"):
            engine.score_top(sequences, lens, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^sequences\[1\]: 1 tokens with a prompt of 1"):
        engine.score_top([prompt(5), prompt(1)], [2, 1], 2)
