"""Models in parts: the step of n ranks beside that of one, what is published of them, and
checkpoints that other numbers of ranks go on from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.shapes import SHAPES
from lowroll.checkpoint.atomic_folders import DamagedError, DiskFullError
from lowroll.checkpoint.store import Store
from lowroll.model import lora
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.parallel import sharding
from lowroll.parallel.ranks import ALONE, RankLost, Ranks
from lowroll.parallel.sharding import Sharded
from lowroll.weights.publish import digest, quantize_base
from tests.fixtures.learner import tiny_model
from tests.fixtures.learners import CASES, Learning, arrays
from tests.fixtures.ranks import together

SHARDED = "lowroll.parallel.sharding:Sharded"
FEWER = ("fp32 untied", "lora bf16", "aligned", "critic", "muon bf16", "8 bits")
SIZES = {1: tuple(CASES), 2: tuple(CASES), 4: FEWER}
RESUMED = ("fp32 untied", "bf16", "lora", "lora, critic", "critic", "muon bf16", "8 bits", "fp8")


@pytest.mark.parametrize("name", SHAPES)
def test_a_mirror_takes_little_more_page_locked_memory_than_it_has(name: str) -> None:
    """torch rounds each request up to a power of two: 1.9 times a 7B's bytes, matrix by matrix."""
    model = Transformer(spec_from_config(SHAPES[name]), "meta", torch.bfloat16)
    sizes = [p.nbytes for p in model.parameters()]
    found = sharding.pieces(sizes)
    assert sum(len(starts) for _, starts in found) == len(sizes)
    alone = sharding.rounded([(size, [0]) for size in sizes])
    assert sharding.rounded(found) <= min(8 / 7 * sum(sizes), alone)


def test_parameters_in_one_piece_keep_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "PIECES", [4096])
    model = tiny_model()
    shapes = [(p.shape, p.dtype) for p in model.parameters()]
    with torch.no_grad():
        sharding.pin(list(model.parameters()), pinned=False)
        for i, p in enumerate(model.parameters()):
            p.fill_(i)
    assert [(p.shape, p.dtype) for p in model.parameters()] == shapes
    assert all((p == i).all() and p.data_ptr() % 64 == 0 for i, p in enumerate(model.parameters()))
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert 1 < len(storages) < len(shapes)


def digest_of(learning: Learning) -> str | None:
    """That of the whole model, on the rank that has it."""
    whole = learning.whole()
    return None if whole is None else digest(whole)


def lessons(ranks: Ranks, folder: Path, before: tuple[int, ...]) -> dict[str, Any]:
    """Of each case two steps with a checkpoint between, the second step again from that checkpoint,
    and a checkpoint again from what other numbers of ranks saved."""
    found: dict[str, Any] = {}
    for name in SIZES[ranks.size]:
        learning = Learning(CASES[name], ranks)
        metrics = [learning.step(1)]
        kept = digest_of(learning)
        learning.save(folder / name / str(ranks.size))
        metrics.append(learning.step(2))
        found[name] = {"metrics": metrics, "kept": kept, "ended": digest_of(learning)}
        found[name]["weights"] = arrays(learning.whole())
        if name not in RESUMED:
            continue
        for other in (ranks.size, *before):
            again = Learning(CASES[name], ranks)
            again.restore(folder / name / str(other))
            found[name][f"kept of {other}"] = digest_of(again)
            again.save(folder / name / f"{other} by {ranks.size}")
            if other == ranks.size:
                again.step(2)
                found[name]["ended again"] = digest_of(again)
    return found


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """2-norm."""
    return float(np.sqrt(sum(np.square(found[name] - wanted[name]).sum() for name in wanted)))


def content(folder: Path) -> dict[str, Any]:
    """Whole tensors and state of the checkpoint in a folder; the number of ranks does not count."""
    saved = Store(folder).load()
    found: dict[str, Any] = {"state": saved.state}
    saved.state["optimizer"].pop("shards", None)
    for group, tensors in saved.tensors.items():
        found |= {f"{group}/{name}": tensor[:] for name, tensor in tensors.items()}
    return found


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(
        torch.equal(x, theirs[key]) if isinstance(x, torch.Tensor) else x == theirs[key]
        for key, x in ours.items()
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return lessons(ALONE, folder / "alone", ())


@pytest.fixture(scope="module")
def by_two(folder: Path, alone: dict[str, Any]) -> list[Any]:
    for name in RESUMED:
        (folder / name).mkdir()
        (folder / "alone" / name / "1").rename(folder / name / "1")
    return together(2, lessons, folder, (1,), make=SHARDED)


def check_learnt(size: int, results: list[Any], alone: dict[str, Any]) -> None:
    first, *others = results
    assert isinstance(first, dict), results
    for name, mine in first.items():
        wanted = alone[name]
        way = distance(wanted["weights"], arrays(Learning(CASES[name]).model) or {})
        gap = distance(mine["weights"], wanted["weights"])
        assert gap <= CASES[name].bound * way, f"{name}: {gap / way}"
        assert all(other[name]["metrics"] == mine["metrics"] for other in others), name
        if size == 1:
            assert mine["metrics"] == wanted["metrics"] and mine["ended"] == wanted["ended"], name


def check_resumed(size: int, results: list[Any], folder: Path, before: dict[int, Any]) -> None:
    for name in set(RESUMED) & results[0].keys():
        mine = results[0][name]
        assert mine["kept of " + str(size)] == mine["kept"] and mine["ended again"] == mine["ended"]
        for other, theirs in before.items():
            assert mine[f"kept of {other}"] == theirs[name]["kept"], (name, other)
            written = content(folder / name / str(other))
            again = content(folder / name / f"{other} by {size}")
            assert same(again, written), (name, other)


@pytest.mark.slow
def test_one_rank_with_its_part_learns_bit_for_bit_what_a_process_alone_learns(
    folder: Path, alone: dict[str, Any]
) -> None:
    check_learnt(1, together(1, lessons, folder / "one", (), make=SHARDED), alone)


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns_and_go_on_from_what_it_saved(
    folder: Path, alone: dict[str, Any], by_two: list[Any]
) -> None:
    check_learnt(2, by_two, alone)
    check_resumed(2, by_two, folder, {1: alone})


@pytest.mark.slow
def test_four_ranks_go_on_from_two_and_one_from_four(
    folder: Path, alone: dict[str, Any], by_two: list[Any]
) -> None:
    by_four = together(4, lessons, folder, (1, 2), make=SHARDED)
    check_learnt(4, by_four, alone)
    check_resumed(4, by_four, folder, {1: alone, 2: by_two[0]})
    for name in set(RESUMED) & by_four[0].keys():
        learning = Learning(CASES[name])
        learning.restore(folder / name / "4")
        assert digest_of(learning) == by_four[0][name]["kept"], name


@pytest.mark.slow
def test_a_part_that_is_gone_or_damaged_is_named(folder: Path, by_two: list[Any]) -> None:
    step = folder / "fp32 untied" / "2" / "step_000001"
    part = step / "optimizer.2of2.safetensors"
    held = part.read_bytes()
    part.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    with pytest.raises(DamagedError, match=r"optimizer\.2of2\.safetensors: SHA-256 differs"):
        Store(step.parent).load(1)
    part.unlink()
    with pytest.raises(DamagedError, match=r"optimizer\.2of2\.safetensors: .* missing"):
        Store(step.parent).load(1)
    part.write_bytes(held)
    assert Store(step.parent).load(1).step == 1


PHASES = {  # of a save by two ranks: who is killed, at which point
    "the follower, its share half written": (1, "store.tensors_written/model"),
    "the leader, when all shares are there": (0, "store.shared"),
    "the leader, before the folder has its name": (0, "publish.manifest_synced"),
}


def save_twice(ranks: Ranks, folder: Path, victim: int, point: str) -> str:
    """A checkpoint, and a second one in which a rank is killed; what the other says of it."""
    learning = Learning(CASES["fp32 untied"], ranks)
    learning.save(folder)
    if ranks.rank == victim:
        os.environ["LOWROLL_FAULT"] = f"{point}:kill"
    try:
        learning.save(folder, 2)
    except RankLost as error:
        return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    phase: str, tmp_path: Path
) -> None:
    victim, point = PHASES[phase]
    told = together(2, save_twice, tmp_path, victim, point, make=SHARDED)
    assert told[victim] is None and f"rank {victim}" in told[1 - victim], told
    store = Store(tmp_path)
    store.clean()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert store.load().step == 1


def fill_disk(ranks: Ranks, folder: Path) -> str:
    """A follower's disk is full, once."""
    learning = Learning(CASES["fp32 untied"], ranks)
    if ranks.rank == 1:
        os.environ["LOWROLL_FAULT"] = "store.tensors_written/model:enospc"
    try:
        learning.save(folder)
    except DiskFullError as error:
        told = str(error.__cause__)
        ranks.meet("a checkpoint")  # as the others do, whose save went on
    else:
        told = ""
    os.environ.pop("LOWROLL_FAULT", None)
    learning.save(folder)
    return told


@pytest.mark.slow
def test_a_full_disk_of_any_rank_fails_the_save_and_the_next_one_works(tmp_path: Path) -> None:
    leader, follower = together(2, fill_disk, tmp_path, make=SHARDED)
    assert "No space left on device (rank 1)" in leader and follower == "", (leader, follower)
    assert Store(tmp_path).load().step == 1


def test_codes_in_parts_are_refused_with_the_fix() -> None:
    model = lora.attach(quantize_base(tiny_model(), "int8"), 4, 8.0)
    with pytest.raises(ValueError, match=r"train\.sharding: full: blocks\.0\.qkv is int8 .*: none"):
        Sharded.shard(Sharded.__new__(Sharded), model)
