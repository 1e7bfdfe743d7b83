"""Broadcasts of a trainer, taken by an engine behind a server: the bits of one process, whatever
travels, and never those of another attempt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine
from lowroll.cli.serve import make_engine
from lowroll.cli.serve import parser as serve_parser
from lowroll.engine.native import NativeEngine
from lowroll.model import hf, lora, scaling
from lowroll.model.transformer import Transformer
from lowroll.server.protocol import Refused
from lowroll.server.weight_store import WeightStore
from lowroll.types import Request
from lowroll.weights import aligned_forward
from lowroll.weights.exploration_noise import Noise, NoiseSchedule
from lowroll.weights.publish import quantize_base
from lowroll.weights.sync import folder as sync_folder
from lowroll.weights.sync.base import STABLE
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.broadcasts import adapted, broadcaster, moved
from tests.fixtures.serving import ADMIN, TOKENS, served

NOISE = NoiseSchedule(sigma_start=0.05, sigma_end=0.01, num_stages=2, total_steps=4, seed=5)
ASKED = Request([3, 4, 5], n=2, max_tokens=24, ignore_eos=True, seed=9)


def base(
    folder: Path, format: str, dtype: torch.dtype, with_lora: bool, s: float | None
) -> Transformer:
    """A learner as a run makes it."""
    model = hf.load(folder, "cpu", dtype)
    if s is not None:
        scaling.scale(model, s)
    if with_lora:
        return lora.attach(quantize_base(model, format), 4, 8.0)
    return model.requires_grad_(True)


def engine_of(model: Transformer, format: str, dtype: torch.dtype, noisy: bool) -> NativeEngine:
    return Engine(
        model, format, dtype=dtype, device="cpu", cache_tokens=1024, page_size=4, noisy=noisy
    )


def take(shelf: WeightStore, engine: NativeEngine, version: str) -> None:
    """What the server does with a version."""
    now = engine.behavior
    _, updates = shelf.load(version, now.policy[-1].version, engine.capabilities, now.weights)
    for one, update in updates:
        engine.update_weights(update)
        shelf.current = one


# Each format meets an adapter and a scale in every combination, and noise with and without either; all
# three switches together meet half of the formats, for none of them asks what the format is.
CASES = [
    (format, dtype, with_lora, s, (number + with_lora + (s is not None)) % 2 == 1)
    for number, (format, dtype) in enumerate(
        (
            ("fp32", torch.float32),
            ("bf16", torch.bfloat16),
            ("int8", torch.float32),
            ("int8", torch.bfloat16),
            ("nvfp4", torch.float32),
            ("nvfp4", torch.bfloat16),
        )
    )
    for with_lora in (False, True)
    for s in (None, 1.5)
]


@pytest.mark.parametrize(("format", "dtype", "with_lora", "s", "noise"), CASES)
def test_a_broadcast_is_the_update_of_one_process(
    folder: Path,
    tmp_path: Path,
    format: str,
    dtype: torch.dtype,
    with_lora: bool,
    s: float | None,
    noise: bool,
) -> None:
    learner = base(folder, format, dtype, with_lora, s)
    inside = engine_of(learner, format, dtype, noise)
    outside = engine_of(base(folder, format, dtype, with_lora, s), format, dtype, noise)
    shelf = WeightStore(tmp_path, folder)
    at = broadcaster(tmp_path, learner, noise=NOISE if noise else None, base=str(folder))
    sigmas = set()
    for version in (1, 2, 3):
        at.publish(moved_to(learner, version))
        drawn = NOISE.at(version) if noise else None
        sigmas.add(drawn.sigma if drawn else 0)
        wanted = inside.update_weights(WeightUpdate.local(learner, version, drawn))
        take(shelf, outside, f"step_{version}")
        assert outside.behavior == wanted
        assert outside.generate([ASKED]) == inside.generate([ASKED])
    assert (len(sigmas) > 1) == noise
    take(shelf, outside, "step_000003")  # holds it already


def moved_to(learner: Transformer, version: int) -> int:
    moved(learner, version)
    return version


def test_an_aligned_learner_is_met_too(folder: Path, tmp_path: Path) -> None:
    learner = base(folder, "int8", torch.float32, False, None)
    aligned_forward.align(learner, "int8")
    inside = engine_of(learner, "int8", torch.float32, False)
    outside = engine_of(hf.load(folder), "int8", torch.float32, False)
    moved(learner)
    aligned_forward.refresh(learner)
    broadcaster(tmp_path, learner).publish(1)
    take(WeightStore(tmp_path, folder), outside, "step_1")
    assert outside.behavior == inside.update_weights(WeightUpdate.local(learner, 1))


@pytest.mark.parametrize("options", [[], ["--lora-rank", "4", "--lora-alpha", "8"]])
def test_the_commands_engine_is_that_of_a_run(folder: Path, tmp_path: Path, options: list) -> None:
    arguments = serve_parser().parse_args(
        [str(folder), "--weights", "int8", "--device", "cpu", "--cache-tokens", "1024"]
        + ["--uaq-scale", "1.5", "--noisy", *options]
    )
    learner = base(folder, "int8", torch.float32, bool(options), 1.5)
    inside = engine_of(learner, "int8", torch.float32, True)
    outside = make_engine(arguments, folder, None)
    assert outside.behavior.policy == inside.behavior.policy
    moved(learner)
    broadcaster(tmp_path, learner, noise=NOISE, base=str(folder)).publish(3)
    take(WeightStore(tmp_path, folder), outside, "step_3")
    assert outside.behavior == inside.update_weights(WeightUpdate.local(learner, 3, NOISE.at(3)))


# -- over HTTP ---------------------------------------------------------------------------------------


async def post(client: Any, body: Any, wanted: int = 200) -> Any:
    headers = ADMIN | {"Content-Type": "application/json"}
    async with client.post("/weights", data=json.dumps(body), headers=headers) as response:
        found = await response.json()
        assert response.status == wanted, found
        return found


async def test_versions_over_http(folder: Path, tmp_path: Path) -> None:
    learner = base(folder, "int8", torch.float32, False, None)
    engine = engine_of(hf.load(folder), "int8", torch.float32, False)
    at = broadcaster(tmp_path, learner, attempt=1)
    taken: list[int] = []
    update = engine.update_weights

    def counted(value: WeightUpdate, *more: Any, **named: Any) -> Any:
        taken.append(value.version)
        return update(value, *more, **named)

    engine.update_weights = counted  # type: ignore[method-assign]

    async with served(engine, TOKENS, WeightStore(tmp_path, folder)) as client:
        at.publish(moved_to(learner, 7))
        first = await post(client, {"version": "step_7"})
        found = at.broadcasts.at(7)
        assert found is not None
        assert first["version"] == "step_000007"
        assert first["manifest_digest"] == found.digest
        assert [span["version"] for span in first["policy"]] == [7]
        again = await post(client, {"version": "step_000007"})
        assert taken == [7] and again["policy"] == first["policy"]
        moved(learner, 8)  # the trainer died, and learnt something else
        broadcaster(tmp_path, learner, attempt=2).publish(7)
        other = await post(client, {"version": "step_000007"})
        assert taken == [7, 7] and other["policy"] != first["policy"]
        assert other["manifest_digest"] != first["manifest_digest"]
        async with client.get("/weights", headers=ADMIN) as response:
            held = await response.json()
        assert held["version"] == "step_000007"
        assert held["manifest_digest"] == other["manifest_digest"]


async def test_a_marker_must_agree(folder: Path, tmp_path: Path) -> None:
    learner = base(folder, "int8", torch.float32, False, None)
    engine = engine_of(hf.load(folder), "int8", torch.float32, False)
    at = broadcaster(tmp_path, learner, keep=9)
    for version in (1, 2, 3):
        at.publish(version)
    (tmp_path / "step_000001" / STABLE).unlink()
    (tmp_path / "step_000002" / STABLE).write_text("")
    weights = tmp_path / "step_000003/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")

    before = engine.behavior
    async with served(engine, TOKENS, WeightStore(tmp_path, folder)) as client:
        for version, wanted, says in (
            ("step_1", 404, "no STABLE"),
            ("step_000002", 409, "step_000002/STABLE"),
            ("step_3", 409, "SHA-256 differs"),
            ("step_4", 404, "there is no step_4"),
        ):
            error = (await post(client, {"version": version}, wanted))["error"]
            assert says in error["message"] and str(tmp_path) not in error["message"]
    assert engine.behavior == before


def test_an_engine_without_room_for_noise_says_so(folder: Path, tmp_path: Path) -> None:
    learner = base(folder, "int8", torch.float32, False, None)
    engine = engine_of(hf.load(folder), "bf16", torch.bfloat16, False)
    at = broadcaster(tmp_path, learner, noise=NOISE, keep=9)
    shelf = WeightStore(tmp_path, folder)
    at.publish(1)
    assert NOISE.at(1).sigma == 0
    take(shelf, engine, "step_1")
    at.publish(3)
    with pytest.raises(Refused, match="--noisy"):
        take(shelf, engine, "step_3")
    assert engine.behavior.policy[0].version == 1


def test_a_version_that_is_written_again_meanwhile_is_read_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = adapted(folder, "int8")
    engine = engine_of(adapted(folder, "int8"), "int8", torch.float32, False)
    at = broadcaster(tmp_path, learner, base=str(folder))
    at.publish(1)
    shelf, reads = WeightStore(tmp_path, folder), []
    read = sync_folder.read_update

    def slow(*given: Any) -> Any:
        found = read(*given)
        if len(reads) < again:
            moved(learner, 5 + len(reads))
            at.publish(1)
        reads.append(1)
        return found

    monkeypatch.setattr(sync_folder, "read_update", slow)
    again = 2
    take(shelf, engine, "step_1")
    inside = engine_of(learner, "int8", torch.float32, False)
    assert engine.behavior == inside.update_weights(WeightUpdate.local(learner, 1))
    assert len(reads) == 3
    again, shelf.current = 99, None
    with pytest.raises(Refused, match="being written again"):
        take(shelf, engine, "step_1")


def test_noise_of_a_broadcast_is_that_of_its_marker(folder: Path, tmp_path: Path) -> None:
    learner = base(folder, "fp32", torch.float32, False, None)
    outside = engine_of(hf.load(folder), "fp32", torch.float32, True)
    broadcaster(tmp_path, learner, noise=NOISE).publish(3)
    take(WeightStore(tmp_path, folder), outside, "step_3")
    drawn = NOISE.at(3)
    assert (outside.behavior.noise_seed, outside.behavior.noise_sigma) == (drawn.seed, drawn.sigma)
    inside = engine_of(learner, "fp32", torch.float32, True)
    other = inside.update_weights(
        WeightUpdate.local(learner, 3, Noise(drawn.seed + 1, drawn.sigma))
    )
    assert other.policy != outside.behavior.policy
