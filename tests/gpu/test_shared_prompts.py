"""Prompts that are fed once for all their responses, on CUDA: the gradients of whole sequences
within the dtype's rounding, and the same bits again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowroll.model.shared_prompts import PromptGroup
from lowroll.model.transformer import Transformer
from lowroll.trainer.optim import OptimSettings
from lowroll.trainer.step import learn
from tests.fixtures.exact import exact_model
from tests.fixtures.learner import Probe, make_batch, settings, tiny_model
from tests.fixtures.prompt_groups import alone
from tests.fixtures.tiny import hf_folder

pytestmark = pytest.mark.gpu
WITHIN = 6e-2  # of a gradient's largest entry


@pytest.mark.parametrize("format", [None, "int8_rotated"], ids=["plain", "exact"])
@pytest.mark.parametrize("capacity", [24, 4096])
def test_an_update_is_that_of_whole_sequences(
    format: str | None, capacity: int, tmp_path: Path
) -> None:
    batch = make_batch(tiny_model(), groups=6, size=8)
    folder = hf_folder(tmp_path / "m", "qwen3", head_dim=64)

    def learner() -> Transformer:
        if format is not None:
            return exact_model(folder, format, True, "cuda", torch.bfloat16)
        return tiny_model().to("cuda", torch.bfloat16).requires_grad_(True)

    def gradients(share: bool) -> dict[str, torch.Tensor]:
        model = learner()
        assert model.can_share_prompts
        optimizer = Probe(model.trainable_parameters(), OptimSettings(learning_rate=1e-4))
        learn(
            model, batch, optimizer, settings(tokens_per_microbatch=capacity, share_prompts=share)
        )
        return optimizer.seen[0]

    shared, again, whole = gradients(True), gradients(True), gradients(False)
    for name, want in whole.items():
        assert torch.equal(shared[name], again[name]), name
        assert (shared[name] - want).abs().max() <= WITHIN * want.abs().max() + 1e-7, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_an_exact_models_states_keep_their_bits(
    dtype: torch.dtype, head_dim: int, tmp_path: Path
) -> None:
    folder = hf_folder(tmp_path / "m", "qwen3", head_dim=head_dim)
    model = exact_model(folder, "int8_rotated", True, "cuda", dtype)
    groups = [PromptGroup(5, (3, 70)), PromptGroup(200, (90, 1)), PromptGroup(256, (2, 30))]
    rows, lengths = alone(groups)
    tokens = max(rows) + 1
    ids = torch.arange(tokens, device="cuda") * 7 % model.spec.vocab_size
    positions = torch.cat(
        [torch.cat([torch.arange(p), *(torch.arange(p, p + n) for n in r)]) for p, r in groups]
    ).to("cuda")
    assert len(positions) == tokens
    with torch.no_grad():
        shared = model(ids, positions, model.causal_in_groups(groups))
        whole = model(ids[rows], positions[rows], model.causal(lengths))
    assert torch.equal(shared[rows], whole)
