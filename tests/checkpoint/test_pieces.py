"""No piece of a checkpoint can be left out unseen.

Of a run with a critic and a guard here; `make torture` asks about every tensor, and about a run of
an adapter.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from lowroll.runs import demo
from tests.fixtures import pieces
from tests.fixtures.runs import TINY


@pytest.mark.slow
def test_every_piece_of_a_checkpoint_is_needed_and_missed(tmp_path: Path) -> None:
    model = demo.build_model(tmp_path / "model", 0, TINY)
    with ExitStack() as stack:
        trial = pieces.Trial(pieces.configurations(model, tmp_path)["critic"], stack)
        assert [*trial.survivors(), *trial.meta_survivors()] == []
