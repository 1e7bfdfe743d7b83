"""What learner ranks tell each other."""

from __future__ import annotations

import torch

from lowroll.parallel.ranks import Ranks


def test_one_process_alone_changes_nothing() -> None:
    alone = Ranks()
    values = {3: torch.tensor([0.5, -1.0])}
    gradient = torch.tensor([1.0, 2.0])
    alone.add([gradient])
    assert alone.leads and alone.deal([3.0, 1.0, 2.0]) == [0, 1, 2]
    assert alone.gather([values], {3: 2}) == [values] and alone.tell(b"batch") == b"batch"
    assert gradient.tolist() == [1.0, 2.0] and alone.total(gradient) is gradient
