"""Prompts that are fed once for all their responses, on CUDA: the gradients of whole sequences
within the dtype's rounding, and the same bits again."""

from __future__ import annotations

import pytest
import torch

from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.step import learn
from tests.fixtures.learner import Probe, make_batch, settings, tiny_model

pytestmark = pytest.mark.gpu
WITHIN = {torch.float32: 1e-4, torch.bfloat16: 6e-2}  # of a gradient's largest entry


@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize("capacity", [24, 4096])
def test_an_update_is_that_of_whole_sequences(dtype: torch.dtype, capacity: int) -> None:
    batch = make_batch(tiny_model(), groups=6, size=8)

    def gradients(share: bool) -> dict[str, torch.Tensor]:
        model = tiny_model().to("cuda", dtype).requires_grad_(True)
        optimizer = Probe(model.trainable_parameters(), OptimSettings(learning_rate=1e-4))
        learn(
            model, batch, optimizer, settings(tokens_per_microbatch=capacity, share_prompts=share)
        )
        return optimizer.seen[0]

    shared, again, whole = gradients(True), gradients(True), gradients(False)
    for name, want in whole.items():
        assert torch.equal(shared[name], again[name]), name
        assert (shared[name] - want).abs().max() <= WITHIN[dtype] * want.abs().max() + 1e-7, name
