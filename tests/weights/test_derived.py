"""What is made of the weights follows them by an explicit event, where autograd's counters and
addresses tell nothing (kernels that write through addresses, gathered shards)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowroll.model import lora
from lowroll.model.attention import varlen
from lowroll.model.transformer import Transformer
from lowroll.trainer import recompute
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.state import restore_weights
from lowroll.trainer.step import learn
from lowroll.weights import derived_tensors
from lowroll.weights.aligned_forward import align
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
        derived_tensors.renew(each)
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
    derived_tensors.renew(other)
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


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """One rank, whose gathers are as real as those of many."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("share", [False, 0.5, True])
def test_a_sharded_adapter_learns_as_a_whole_one(mesh: DeviceMesh, share: bool | float) -> None:
    """FSDP2 gathers into storages that it keeps and hides the write from autograd: without the call
    every forward would read the adapter of the first one."""
    models = [recompute.apply(adapted(), share) for _ in range(2)]
    for block in models[1].blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(models[1], mesh=mesh)
    whole, sharded = (losses(model) for model in models)
    assert whole == sharded and len(set(whole)) == len(whole)


def losses(model: Transformer) -> list[float]:
    """Of a few steps."""
    optimizer = torch.optim.SGD(list(model.trainable_parameters().values()), lr=0.05)
    found = []
    for _ in range(3):
        hidden_TD = model(torch.arange(9), torch.arange(9), varlen([9]))
        weights = torch.linspace(-1, 1, hidden_TD.numel()).view_as(hidden_TD)
        loss = (hidden_TD * weights).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        derived_tensors.renew(model)
        found.append(loss.item())
    return found
