"""On a CUDA device: the base of an adapter is made again with the same codes everywhere; `final/`
is the learner."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import lowroll
from lowroll.model import hf
from lowroll.runs import policy_gap
from lowroll.runs.export import export_run
from tests.fixtures.adapters import LORA, SEQUENCES
from tests.fixtures.runs import run_session, settings

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
DEVICE = "cuda"


@pytest.mark.parametrize("weights", ["int8", "nf4", "nvfp4"])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_final_is_the_policy_that_learned(
    weights: str,
    scale: float | None,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": weights},
        train={**LORA, "uaq_scale": scale},
        device=DEVICE,
        dtype="bfloat16",
    )
    with ExitStack() as stack:
        session = run_session(tree, stack)
        session.finish(2)
        learner = session.learner.model
        wanted = torch.cat(lowroll.score(learner, SEQUENCES, [1] * 3)).cpu()
    final = tmp_path / "run" / "final"
    here, there = (hf.load(final, device, torch.bfloat16) for device in (DEVICE, "cpu"))
    assert torch.equal(torch.cat(lowroll.score(here, SEQUENCES, [1] * 3)).cpu(), wanted)
    for (_, mine), (_, a), (_, b) in zip(
        learner.linears(), here.linears(), there.linears(), strict=True
    ):
        for name, codes in mine.weight.tensors.items():
            for other in (a, b):
                assert torch.equal(
                    other.weight.tensors[name].cpu().view(torch.uint8),
                    codes.cpu().view(torch.uint8),
                )
    assert "Measured: " in (final / "README.md").read_text()
    assert (
        export_run(tmp_path / "run", tmp_path / "adapter", "adapter").gap.tokens > 0
    )  # on the CPU
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    batch = policy_gap.newest_batch(tmp_path / "run", 2)
    assert policy_gap.publish_adapter(session.cfg, learner, tmp_path / "full", batch, 2) is None
