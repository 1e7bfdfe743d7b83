"""Decode attention of a CPU's own kernel, beside what `test_decode.py` asks of all of them, and a whole
engine against torch's path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowroll import Engine, Request
from lowroll.kernels import cxx
from lowroll.kernels.attention import avx2
from lowroll.kernels.support import no
from lowroll.kv.policy.table import make
from lowroll.model import initialize
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.runs.demo import CONFIG
from lowroll.types import Rollout
from tests.fixtures.decode import Case

CPU = torch.device("cpu")
runs_here = pytest.mark.skipif(not avx2.supports_device(CPU), reason="the kernel does not run here")
# lengths, query heads, key-value heads, head size, page
CASES = [
    ([1, 0, 7, 8, 9], 4, 4, 8, 4),  # a head of its own, a dead row, a new token alone
    ([63, 64, 65], 6, 2, 24, 16),  # three heads together; around a block
    ([130, 2], 14, 2, 64, 16),  # four heads, and three
    ([20], 5, 1, 256, 1),  # four and one, as wide as it takes
    ([200, 129], 8, 4, 40, 32),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes rows of any size."""
    monkeypatch.setattr(avx2, "LEAST", 1)


@runs_here
@pytest.mark.parametrize("case", CASES)
def test_attention_over_pages(case: tuple[Any, ...], small: None) -> None:
    assert avx2.supports(Case(*case).q, Case(*case).keys)
    Case(*case).check(1e-5)


@runs_here
def test_scores_of_any_size_are_a_distribution(small: None) -> None:
    for size in (1e-3, 30.0, 1e4):
        case = Case([70, 3], 4, 2, 16, 8)
        case.q *= size
        case.check(1e-5)


@runs_here
def test_a_row_is_the_same_alone_in_any_batch_and_on_any_threads(small: None) -> None:
    whole = Case([70, 1, 129, 40], 6, 2, 32, 16)
    want = whole.run()
    torch.set_num_threads(3 - min(torch.get_num_threads(), 2))
    assert torch.equal(whole.run(), want)
    for row in range(4):
        alone = Case([70, 1, 129, 40], 6, 2, 32, 16)
        for name in ("q", "k", "v", "table", "lengths"):
            setattr(alone, name, getattr(alone, name)[row : row + 1])
        assert torch.equal(alone.run()[0], want[row])


@runs_here
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_spoils_no_other_row(value: float, small: None) -> None:
    case, odd = (Case([40, 90], 4, 2, 16, 16) for _ in range(2))
    want = case.run()
    odd.keys[odd.table[1, 4].long(), 3, 1, 5] = value
    got = odd.run()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1, :2], want[1, :2])
    assert got[1, 2:].isnan().any(-1).all()


def test_what_is_left_to_torch_has_a_reason() -> None:
    q_BHd, keys_pPGd = torch.randn(1, 8, 64), torch.randn(3, 4, 2, 64)
    assert avx2.LEAST == 8 * 64
    assert "rows of 512" in avx2.supports(q_BHd[:, :7], keys_pPGd).why_not
    assert "multiples of 8" in avx2.supports(torch.randn(1, 8, 68), keys_pPGd).why_not
    assert "up to 256" in avx2.supports(torch.randn(1, 8, 264), keys_pPGd).why_not
    assert "float32" in avx2.supports(q_BHd.bfloat16(), keys_pPGd).why_not
    assert "float32" in avx2.supports(q_BHd, keys_pPGd.bfloat16()).why_not
    assert "gradient" in avx2.supports(q_BHd.requires_grad_(), keys_pPGd).why_not
    assert avx2.supports_device(torch.device("meta")).why_not == "runs on a CPU"


def test_without_a_compiler_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cxx, "compiler", lambda: None)
    cxx.supports.cache_clear()
    try:
        case = Case([70, 3], 8, 2, 64, 8).without_nan()
        found = avx2.supports(case.q, case.keys)
        assert not found and found.why_not.startswith(("no C++ compiler", "needs a CPU"))
        case.check(1e-5)
    finally:
        cxx.supports.cache_clear()


WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


def rollouts(changes: dict[str, Any], **settings: Any) -> list[Rollout]:
    """Draw from prompts that share pages, alone and eight at once, the second time from the prefix
    cache."""
    config = {
        **CONFIG,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 64,
        **changes,
    }
    model = initialize(Transformer(spec_from_config(config)), seed=0, std=0.2)
    engine = Engine(model, "fp32", device="cpu", cache_tokens=2048, **settings)
    prompt = [7, 8, 9, *range(20, 50)]
    asks = [
        Request(prompt[:size], n=n, max_tokens=24, seed=size, ignore_eos=True)
        for size, n in ((3, 1), (33, 8), (20, 1))
    ]
    groups = [*engine.generate(asks), *engine.generate(asks)]
    return [rollout for group in groups for rollout in group.rollouts]


@runs_here
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "changes"), [(None, {}), (None, WINDOW), ("rkv", {}), ("streaming", {})]
)
def test_an_engine_draws_what_it_draws_with_torch(
    policy: str | None, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {} if policy is None else {"kv": make(policy, budget=24)}
    calls = []
    decode = avx2.decode
    monkeypatch.setattr(avx2, "decode", lambda *args: calls.append(1) or decode(*args))
    got = rollouts(changes, **settings)
    assert calls
    monkeypatch.setattr(avx2, "supports", lambda *args: no("is asked not to"))
    want = rollouts(changes, **settings)
    assert len(want) == 20
    for ours, theirs in zip(got, want, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
