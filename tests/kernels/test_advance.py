"""The end of a decode step, in the interpreter and in plain torch, against Python."""

from __future__ import annotations

import pytest
import torch

from lowroll.kernels.sampling.advance import advance


def check(rows: int, wide: int) -> None:
    g = torch.Generator().manual_seed(rows)
    tokens_SB, logprobs_SB = torch.full((4, wide), -7), torch.full((4, wide), -7.0)
    step, ids = torch.tensor([1]), torch.full((rows,), -1)
    pos, end = (torch.randint(0, 6, (rows,), generator=g) for _ in range(2))
    next_, lengths = pos + 1, torch.zeros(rows, dtype=torch.int32)
    for at in (1, 2):
        tokens, logprobs = (
            torch.randint(0, 99, (rows,), generator=g),
            torch.randn(rows, generator=g),
        )
        want = [p + (p < e) for p, e in zip(pos.tolist(), end.tolist(), strict=True)]
        advance(tokens, logprobs, step, tokens_SB, logprobs_SB, ids, pos, next_, end, lengths)
        assert pos.tolist() == want and next_.tolist() == [p + 1 for p in want]
        assert lengths.tolist() == [
            p + 1 if p < e else 0 for p, e in zip(want, end.tolist(), strict=True)
        ]
        assert torch.equal(ids, tokens) and step.item() == at + 1
        assert torch.equal(tokens_SB[at, :rows], tokens) and torch.equal(
            logprobs_SB[at, :rows], logprobs
        )
    assert (
        (tokens_SB[[0, 3]] == -7).all()
        and (tokens_SB[:, rows:] == -7).all()
        and (logprobs_SB[:, rows:] == -7).all()
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_one_launch_moves_every_row_on(rows: int) -> None:
    check(rows, 67)


def test_plain_torch_does_the_same() -> None:
    check(5, 8)
