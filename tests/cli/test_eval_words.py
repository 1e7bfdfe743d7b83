"""How `lowroll eval --weights` is cut into formats and budgets."""

from __future__ import annotations

import pytest

from lowroll.cli.eval import _formats


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("dense,int8", ["dense", "int8"]),
        ("max_kl=0.1,max_bits=6,formats=int4+dense", ["max_kl=0.1,max_bits=6,formats=int4+dense"]),
        ("dense,max_kl=0.1,max_bits=6,nvfp4", ["dense", "max_kl=0.1,max_bits=6", "nvfp4"]),
        ("max_bits=6,max_bits=7", ["max_bits=6", "max_bits=7"]),
        (None, []),
    ],
)
def test_bounds_that_follow_each_other_are_one_budget(words: str | None, wanted: list[str]) -> None:
    assert _formats(words) == wanted
