"""The run puts recomputation on its learner, as far as its setting says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowroll.config import from_mapping
from lowroll.model import hf
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.trainer import recompute
from tests.fixtures.runs import settings
from tests.fixtures.tiny import hf_folder


@pytest.mark.parametrize("share", [False, 0.5, True])
def test_the_setting_reaches_the_learner(tmp_path: Path, share: bool | float) -> None:
    folder = hf_folder(tmp_path / "m")
    tree = settings(folder, tmp_path / "run", train={"activation_checkpointing": share})
    cfg = from_mapping(tree).resolved()
    learner = models.learner(cfg, Compute.of(cfg))
    assert learner.run_block == recompute.apply(hf.load(folder), share).run_block
    assert learner.run_block != recompute.apply(hf.load(folder), 0.9).run_block
