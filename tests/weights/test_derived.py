"""What is made of the weights follows them by an explicit event, where autograd's counters and
addresses tell nothing (kernels that write through addresses, gathered shards)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowroll.model import lora
from lowroll.model.attention import varlen
from lowroll.model.transformer import Transformer
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.state import restore_weights
from lowroll.trainer.step import learn
from lowroll.weights import derived
from lowroll.weights.aligned import align
from tests.fixtures.learner import make_batch, settings, tiny_model


def hidden(model: Transformer) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(9), torch.arange(9), varlen([9]))


def write_unseen(model: Transformer, seed: int = 0) -> None:
    """New values in the storages that are there, which no counter of autograd notices."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.trainable_parameters().values():
        before = p.data_ptr(), p._version
        p.data.normal_(0, 0.1, generator=generator)
        assert before == (p.data_ptr(), p._version)


def adapted() -> Transformer:
    return lora.attach(tiny_model(), 4, 8.0)


def aligned() -> Transformer:
    return align(tiny_model().requires_grad_(True), "int8")


@pytest.mark.parametrize("make", [adapted, aligned])
def test_one_call_makes_the_new_weights_felt(make) -> None:
    model, fresh = make(), make()
    stale = hidden(model)
    for each in (model, fresh):
        write_unseen(each)
        derived.renew(each)
    assert torch.equal(hidden(model), hidden(fresh)) and not torch.equal(hidden(model), stale)


def test_an_adapter_that_is_moved_or_cast_makes_its_copies_again() -> None:
    model = adapted()
    adapter = model.blocks[0].qkv.adapter
    a_LK, _ = adapter.matrices(model.blocks[0].qkv.parts, torch.float32)
    before = a_LK.clone()
    adapter.to(torch.bfloat16)
    a_LK, _ = adapter.matrices(model.blocks[0].qkv.parts, torch.float32)
    assert torch.equal(a_LK, before.bfloat16().float()) and not torch.equal(a_LK, before)


def test_torchs_own_writes_need_no_call() -> None:
    """A loop with an optimizer of torch's, which knows nothing of adapters."""
    model, fresh = adapted(), adapted()
    hidden(model)
    for each in (model, fresh):
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in each.trainable_parameters().values():
                p.add_(torch.randn(p.shape, generator=generator))
    assert torch.equal(hidden(model), hidden(fresh))


@pytest.mark.parametrize("unseen", [False, True])
def test_updates_that_nobody_sees_are_learnt_from_all_the_same(
    unseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates of a batch: the second gradient is of the weights after the first."""
    seen = learnt(2)
    if unseen:
        update = Optimizer.update

        def hidden_update(self: Optimizer, refuse: bool = False) -> dict[str, float]:
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.params.values())):
                return update(self, refuse)

        monkeypatch.setattr(Optimizer, "update", hidden_update)
    again = learnt(2)
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))


def learnt(minibatches: int) -> list[Tensor]:
    model = adapted()
    optimizer = Optimizer(model.trainable_parameters(), OptimSettings(learning_rate=0.1))
    learn(model, make_batch(tiny_model()), optimizer, settings(minibatches=minibatches))
    return list(model.trainable_parameters().values())


def test_restored_weights_are_felt() -> None:
    model, other = adapted(), adapted()
    write_unseen(other)
    derived.renew(other)
    hidden(model)
    saved = {name: p.detach().clone() for name, p in other.trainable_parameters().items()}
    with torch.autograd._unsafe_preserve_version_counter(
        tuple(model.trainable_parameters().values())
    ):
        restore_weights(model, saved, {})
    assert torch.equal(hidden(model), hidden(other))


def test_an_update_finds_parameters_whose_storages_were_replaced() -> None:
    param = nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": param}, OptimSettings())
    fused = optimizer._fused_adamw()
    gradients = [torch.ones(4, 4, dtype=torch.bfloat16)]
    assert fused.addresses(gradients).table[0, 4] == param.data_ptr()
    before = param.data
    param.data = before.clone()
    assert before.data_ptr() != param.data_ptr()
    assert fused.addresses(gradients).table[0, 4] == param.data_ptr()
