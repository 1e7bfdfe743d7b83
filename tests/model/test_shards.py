"""Tensors of safetensors files on their way to a device: every byte, in order, and in the format
asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lowroll
from lowroll import Engine, Request
from lowroll.model import hf, lora, shards
from lowroll.quant.formats import QTensor
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy, rollout_load
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.masters import nudge, pointers, tensors
from tests.fixtures.tiny import hf_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / "qwen3", "qwen3-tied-bias")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PIECE", 1000)
    monkeypatch.setattr(shards, "AHEAD", 3000)


def files(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Path]]:
    torch.manual_seed(0)
    stored = {
        "a": torch.randn(33, 70),
        "b": torch.randn(5, 70),
        "c": torch.randn(7).bfloat16(),
        "d": torch.randint(-99, 99, (777,), dtype=torch.int8),
        "e": torch.randn(9, 3).to(torch.float8_e4m3fn),
        "f": torch.tensor([3, 4]),
        "g": torch.randint(0, 9, (2, 2, 2), dtype=torch.int32),
    }
    first, second = folder / "1.safetensors", folder / "2.safetensors"
    save_file({name: stored[name] for name in "bdg"}, first)
    save_file({name: stored[name] for name in "acef"}, second)
    return stored, {name: first if name in "bdg" else second for name in stored}


def test_every_tensor_arrives_whole_and_in_the_order_asked(
    tmp_path: Path, small_pieces: None
) -> None:
    stored, places = files(tmp_path)
    batches = [["a", "b"], ["c", "d", "e", "f"], ["g"], ["b", "a"], []]
    arrived = list(shards.stream(places, batches, "cpu"))
    assert [list(batch) for batch in arrived] == batches
    for batch in arrived:
        for name, tensor in batch.items():
            assert tensor.dtype == stored[name].dtype and torch.equal(tensor, stored[name]), name
            assert tensor.data_ptr() % tensor.itemsize == 0


def test_what_came_together_is_joined_where_it_lies(tmp_path: Path) -> None:
    stored, places = files(tmp_path)
    (batch,) = shards.stream(places, [["a", "b"]], "cpu")
    whole = shards.join([batch["a"], batch["b"]], torch.float32)
    assert whole.data_ptr() == batch["a"].data_ptr()
    for parts, dtype in ((["a", "b"], torch.bfloat16), (["b", "a"], torch.float32)):
        other = shards.join([batch[name] for name in parts], dtype)
        assert other.data_ptr() != batch["a"].data_ptr()
        assert torch.equal(other, torch.cat([stored[name] for name in parts]).to(dtype))
    assert torch.equal(whole, torch.cat([stored["a"], stored["b"]]))


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path, small_pieces: None) -> None:
    _, places = files(tmp_path)
    stream = shards.stream(places, [["g"], ["b"], ["d"]], "cpu")
    path = tmp_path / "1.safetensors"
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(ValueError, match=r"1\.safetensors: ends at byte"):
        list(stream)


@pytest.mark.parametrize("format", lowroll.formats())
def test_a_folder_quantized_on_the_way_is_the_copy_of_the_loaded_model(
    folder: Path, format: str, small_pieces: None
) -> None:
    dtype = torch.bfloat16 if format == "bf16" else torch.float32
    master = hf.load(folder, dtype=dtype)
    want, got = rollout_copy(master, format, dtype), rollout_load(folder, format, "cpu", dtype)
    assert digest(got) == digest(want) and not got.shared
    assert not any(p.requires_grad for p in got.parameters())
    places = pointers(got)
    publish(nudge(master, seed=1), got)
    assert pointers(got) == places and digest(got) == digest(rollout_copy(master, format, dtype))


@pytest.mark.slow
def test_an_engine_of_a_folder_owns_its_weights(folder: Path, tmp_path: Path) -> None:
    """It takes any master of its sizes, also where the folder holds the engine's format or an
    adapter."""
    request = Request([5, 6, 7], n=2, max_tokens=8, seed=1, ignore_eos=True)
    hf.save(quantize_base(hf.load(folder), "int8"), tmp_path / "int8")
    learner = nudge(lora.attach(hf.load(folder), 2, 4.0), seed=2)
    lora.save(learner, tmp_path / "adapter", base=str(folder))
    for source, master in (
        (folder, hf.load(folder)),
        (tmp_path / "int8", hf.load(folder)),
        (tmp_path / "adapter", learner),
    ):
        engine = Engine(source, weights="int8", device="cpu", cache_tokens=256)
        assert digest(engine.model) == digest(rollout_copy(hf.load(source), "int8", torch.float32))
        places = pointers(engine.model)
        engine.update_weights(WeightUpdate.local(nudge(master, seed=3), 1))
        fresh = Engine(master, weights="int8", device="cpu", cache_tokens=256)
        assert pointers(engine.model) == places and digest(engine.model) == digest(fresh.model)
        assert [r.token_ids for r in engine.generate([request])[0].rollouts] == [
            r.token_ids for r in fresh.generate([request])[0].rollouts
        ]


def test_noisy_norms_of_a_folder_are_in_float32(folder: Path) -> None:
    rollout = rollout_load(folder, "bf16", "cpu", torch.bfloat16, noisy=True)
    kinds = {name: p.dtype for name, p in rollout.named_parameters()}
    assert {
        dtype
        for name, dtype in kinds.items()
        if name.startswith("blocks")
        and "_norm.weight" in name
        and ".q_norm" not in name
        and ".k_norm" not in name
    } == {torch.float32}
    assert kinds["norm.weight"] == kinds["embedding"] == torch.bfloat16


def test_a_matrix_in_the_models_own_dtype_is_never_copied(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = []

    def stream(*args: object) -> object:
        for batch in original(*args):
            arrived.extend(t.untyped_storage().data_ptr() for t in batch.values())
            yield batch

    original = shards.stream
    monkeypatch.setattr(hf.shards, "stream", stream)
    rollout = rollout_load(folder, "fp32", "cpu", torch.float32)
    assert {t.untyped_storage().data_ptr() for t in tensors(rollout).values()} == set(arrived)
    assert all(isinstance(linear.weight, QTensor) for _, linear in rollout.linears())


@pytest.mark.parametrize("format", [None, "int8", "nvfp4", "nf4_dq", "int4_asym"])
def test_a_value_that_is_not_finite_is_named_whatever_it_is_quantized_to(
    tmp_path: Path, format: str | None
) -> None:
    folder = hf_folder(tmp_path / "m", "qwen2")
    model = hf.load(folder)
    with torch.no_grad():
        model.blocks[1].gate_up.weight[60, 3] = float("nan")
    state = hf.state(model)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.up_proj\.weight holds a value that is not finite"
    ):
        hf.load(folder, weights=format)
