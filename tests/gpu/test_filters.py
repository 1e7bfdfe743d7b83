"""On a CUDA device: what top-k, top-p and min-p leave of whole vocabularies is what a sort keeps, and
marks shape logits as plain torch does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowroll.kernels.sampling import filters
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters, keep
from lowroll.kernels.sampling.penalties import Marked, blank, shape

pytestmark = pytest.mark.gpu

OFF = (0, 1.0, 0.0)
KNOBS = [
    *(OFF, (1, 1.0, 0.0), (50, 0.95, 0.0), (64, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.999, 0.0)),
    *((7, 0.3, 0.0), (1000, 0.8, 0.0), (1300, 1.0, 0.0), (0, 1.0, 0.05), (20, 1e-6, 0.2)),
    *((50000, 0.99, 0.0), (0, 0.5, 0.01), OFF),
]


def of(knobs: list[tuple[int, float, float]], tokens: int) -> Filters:
    top_k, top_p, min_p = zip(*knobs, strict=True)
    floors = [math.log(p) if p else -math.inf for p in min_p]
    return Filters(
        torch.tensor([min(k or tokens, tokens) for k in top_k]),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(floors, dtype=torch.float64),
    )


def on_cuda(asked: Filters) -> Filters:
    return Filters(asked.top_k_B.cuda(), asked.top_p_B.cuda(), asked.log_min_p_B.cuda())


def logits_of(kind: str, rows: int, tokens: int) -> Tensor:
    x = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(tokens))
    if kind == "peaked":
        x[:, torch.arange(20) * 7] += torch.linspace(18, 8, 20)
    if kind == "rounded":
        x = (x * 3).bfloat16().float()
    if kind == "banned":
        x[:, 100:] = -math.inf
    return x * (0 if kind == "equal" else 1)


KINDS = ("flat", "peaked", "rounded", "equal", "banned")


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *((kind, tokens) for tokens in (300, 151936) for kind in KINDS),
        ("rounded", 32003),
        ("flat", 262144),
    ],
)
def test_what_stays_is_what_a_sort_keeps(kind: str, tokens: int) -> None:
    asked, x = of(KNOBS, tokens), logits_of(kind, len(KNOBS), tokens)
    temperature_B = torch.linspace(0.5, 1.6, len(KNOBS))
    want_BV = keep(x, asked, temperature_B).mask(x)
    device = x.cuda(), on_cuda(asked), temperature_B.cuda()
    got, again = keep(*device), keep(*device)
    # where p falls between two ids decides a float32 sum: one id more or less, beside what its error moves
    mass_BV = ((x - x.amax(-1, keepdim=True)).double() / temperature_B[:, None]).exp()
    other_BV = mass_BV * (got.mask(device[0]).cpu() != want_BV)
    other_B = other_BV.sum(-1)
    assert (other_B - other_BV.amax(-1) <= 2e-6 * mass_BV.sum(-1)).all()
    assert (other_B[[1, 2, 3, 6, 7, 8, 9, 10]] == 0).all()
    assert torch.equal(got.floor_B, again.floor_B) and torch.equal(got.last_B, again.last_B)


@pytest.mark.parametrize("kind", ["flat", "peaked", "rounded"])
def test_draws_are_the_cpus_and_log_probs_exact(kind: str) -> None:
    tokens, rows = 151936, len(KNOBS)
    asked, x, keys_B = of(KNOBS, tokens), logits_of(kind, rows, tokens), torch.arange(rows)
    temperature_B, greedy_B = torch.linspace(0.5, 1.6, rows), keys_B == 4
    want = draw(x, keys_B, keys_B + 7, temperature_B, greedy_B, asked)
    device = [one.cuda() for one in (x, keys_B, keys_B + 7, temperature_B, greedy_B)]
    tokens_B, logprobs_B = draw(*device, on_cuda(asked))
    assert torch.equal(tokens_B.cpu(), want[0])  # no two scores of these rows are near each other
    # in float64: a float32 log-softmax over 152,000 tokens is off by 6e-5 on a CPU
    kept_BV = x.masked_fill(~keep(x, asked, temperature_B, greedy_B).mask(x), -math.inf).double()
    scale_B = torch.where(greedy_B, 1.0, temperature_B).double()
    exact_BV = torch.log_softmax(kept_BV / scale_B[:, None], dim=-1)
    exact_B = exact_BV.gather(-1, want[0][:, None])[:, 0]
    torch.testing.assert_close(logprobs_B.cpu().double(), exact_B, rtol=0, atol=1e-5)
    plain = draw(*device)  # a row without filters, and a greedy one, among those that have some
    for row in (0, 4, rows - 1):
        assert tokens_B[row] == plain[0][row] and logprobs_B[row] == plain[1][row]


@pytest.mark.parametrize("at_once", [1, 64])
def test_how_many_blocks_are_read_at_once_changes_nothing(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = logits_of("flat", len(KNOBS), 32003).cuda()
    want = keep(x, on_cuda(of(KNOBS, 32003)))
    monkeypatch.setattr(filters, "AT_ONCE", at_once)
    monkeypatch.setattr(filters, "NEAR", 256)
    found = keep(x, on_cuda(of(KNOBS, 32003)))
    assert torch.equal(found.floor_B, want.floor_B) and torch.equal(found.last_B, want.last_B)


@pytest.mark.parametrize("tokens", [300, 151936])
def test_marks_shape_logits_as_plain_torch_does(tokens: int) -> None:
    marks_SV = blank(6, tokens, torch.device("cpu"))
    marks_SV.random_(0, 4)
    columns = (
        torch.tensor([5, 0, 2, 3]),
        torch.tensor([1.0, 1.3, 0.7, 1.3], dtype=torch.float64),
        torch.tensor([9, 9, 0, 10]),
    )
    next_B, x = torch.tensor([8, 9, 5, 9]), torch.randn(4, tokens)
    want = shape(x.clone(), Marked(marks_SV, *columns), next_B)
    device = blank(6, tokens, torch.device("cuda"))
    device.copy_(marks_SV)
    found = shape(x.cuda(), Marked(device, *(c.cuda() for c in columns)), next_B.cuda())
    torch.testing.assert_close(found.cpu(), want, rtol=1e-6, atol=0)
