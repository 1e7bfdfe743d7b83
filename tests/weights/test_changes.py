"""What an update changes: the bits of a full update, over any way that versions come, and nothing at
all where something does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine
from lowroll.engine.native import NativeEngine
from lowroll.model import hf, lora, scaling
from lowroll.model.transformer import Transformer
from lowroll.server.weight_store import WeightStore
from lowroll.types import Request
from lowroll.weights import aligned_forward
from lowroll.weights.exploration_noise import NoiseSchedule
from lowroll.weights.publish import digest, rollout_copy
from lowroll.weights.sync.base import Broadcasts, Gap
from lowroll.weights.sync.changes import STRIDE, Changes, Shadow, apply, difference
from lowroll.weights.sync.folder import CHANGES, FULL_INTERVAL
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.broadcasts import broadcaster
from tests.fixtures.masters import nudge
from tests.fixtures.serving import ADMIN, TOKENS, run, served

FORMATS = [("int8", torch.float32), ("nvfp4", torch.bfloat16), ("bf16", torch.bfloat16)]
NOISE = NoiseSchedule(sigma_start=0.05, sigma_end=0.01, num_stages=2, total_steps=4, seed=5)


def learner(
    folder: Path, format: str = "int8", dtype: torch.dtype = torch.float32, s: float | None = None
) -> Transformer:
    model = hf.load(folder, "cpu", dtype).requires_grad_(True)
    if s is not None:
        scaling.scale(model, s)
    return aligned_forward.align(model, format)


def stepped(model: Transformer, seed: int, size: float = 4e-4) -> Transformer:
    """A small update: most codes stay."""
    nudge(model, seed, size)
    aligned_forward.refresh(model)
    return model


def engine_of(model: Transformer, format: str, dtype: torch.dtype, noisy: bool) -> NativeEngine:
    return Engine(
        model, format, dtype=dtype, device="cpu", cache_tokens=1024, page_size=4, noisy=noisy
    )


async def post(client: Any, version: str, wanted: int = 200) -> Any:
    headers = ADMIN | {"Content-Type": "application/json"}
    body = json.dumps({"version": version})
    async with client.post("/weights", data=body, headers=headers) as response:
        found = await response.json()
        assert response.status == wanted, found
        return found


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("s", [None, 1.5])
@pytest.mark.parametrize(("format", "dtype"), FORMATS)
def test_a_sequence_of_changes_is_that_of_full_updates(
    folder: Path, tmp_path: Path, format: str, dtype: torch.dtype, s: float | None, noise: bool
) -> None:
    """Ten versions; an engine that takes all, one that misses some, one that comes late."""
    model = learner(folder, format, dtype, s)
    schedule = NOISE if noise else None
    inside = engine_of(model, format, dtype, noise)
    engines = [engine_of(learner(folder, format, dtype, s), format, dtype, noise) for _ in "123"]
    shelves = [WeightStore(tmp_path, folder) for _ in engines]
    at = broadcaster(tmp_path, model, keep=2, noise=schedule, shadow=Shadow(model, format, dtype))
    turns = [set(range(1, 11)), {1, 2, 5, 9, 10}, {10}]

    async def body() -> None:
        for version in range(1, 11):
            metrics = at.publish(version_of(model, version))
            drawn = None if schedule is None else schedule.at(version)
            wanted = inside.update_weights(WeightUpdate.local(model, version, drawn))
            found = at.broadcasts.at(version)
            assert found is not None
            whole = version == 1 or version % FULL_INTERVAL == 0
            assert found.kind == ("full" if whole else "codes")
            assert found.since == (None if whole else version - 1)
            assert ("perf/changed_bytes_fraction" in metrics) == (not whole)
            most = 1.2 if dtype == torch.float32 else 0.9  # a float32 embedding moves as a whole
            assert metrics.get("perf/changed_bytes_fraction", 0) < most
            for engine, shelf, mine in zip(engines, shelves, turns, strict=True):
                if version in mine:
                    async with served(engine, TOKENS, shelf) as client:
                        await post(client, f"step_{version}")
                    assert engine.behavior == wanted
        asked = Request([3, 4, 5], n=2, max_tokens=16, ignore_eos=True, seed=9)
        tokens = inside.generate([asked])
        assert all(engine.generate([asked]) == tokens for engine in engines)

    run(body)
    kept = [one.version for one in Broadcasts(tmp_path).versions()]
    assert kept == [8, 9, 10]  # 8 is what 9 and 10 are changes of


def version_of(model: Transformer, version: int) -> int:
    stepped(model, version)
    return version


async def test_a_trainer_that_begins_again_is_followed(folder: Path, tmp_path: Path) -> None:
    """Killed after version 3, with a checkpoint of version 2: it learns version 3 again."""
    model = learner(folder)
    engine = engine_of(hf.load(folder), "int8", torch.float32, False)
    shelf = WeightStore(tmp_path, folder)
    first = broadcaster(tmp_path, model, shadow=Shadow(model, "int8", torch.float32), attempt=1)

    async def take(version: int) -> list[Any]:
        async with served(engine, TOKENS, shelf) as client:
            await post(client, f"step_{version}")
        return [span.digest for span in engine.behavior.policy]

    for version in (1, 2, 3):
        first.publish(version_of(model, version))
        digests = await take(version)
    again = learner(folder)
    for version in (1, 2):
        stepped(again, version)
    shadow = Shadow(again, "int8", torch.float32)
    second = broadcaster(tmp_path, again, shadow=shadow, attempt=2)
    second.publish(2)
    second.publish(version_of(again, 3))
    found = second.broadcasts.at(3)
    assert found is not None and found.kind == "codes"
    assert found.attempt == 2  # what was undone was retired; this one has the same bytes
    assert await take(3) == digests
    second.publish(version_of(again, 4))
    assert await take(4) == [digest(again)]
    # an engine that holds another version 4 than the one that 5 changes
    stepped(again, 40)
    shadow.renew(4)
    second.publish(version_of(again, 5))
    with pytest.raises(AssertionError, match="holds"):
        await take(5)


def test_an_engine_with_other_bits_of_the_version_before_begins_at_a_full_one(
    folder: Path, tmp_path: Path
) -> None:
    model = learner(folder)
    engine = engine_of(hf.load(folder), "int8", torch.float32, False)
    shelf = WeightStore(tmp_path, folder)
    at = broadcaster(tmp_path, model, shadow=Shadow(model, "int8", torch.float32), keep=9)

    async def body() -> None:
        async with served(engine, TOKENS, shelf) as client:
            at.publish(version_of(model, 1))
            at.publish(version_of(model, 2))
            await post(client, "step_2")
            inside = engine.engine if hasattr(engine, "engine") else engine
            inside.update_weights(WeightUpdate.local(hf.load(folder), 2))  # behind the shelf's back
            at.publish(version_of(model, 3))
            await post(client, "step_3")

    run(body)
    assert engine.behavior.policy[0].digest == digest(model)


# -- entries -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, STRIDE, STRIDE + 1, 3 * STRIDE + 5])
def test_differences_are_found_wherever_they_are(dtype: torch.dtype, size: int) -> None:
    old = torch.zeros(size, dtype=dtype)
    for places in ([0], [size - 1], [0, size - 1], [size // 2]):
        new = old.clone()
        new[places] = 1
        stream = difference("w", old, new, False)
        if "w" in stream:
            assert torch.equal(stream["w"], new) and size < 20
            continue
        at = (stream["w.gaps"].to(torch.int64) & 0xFFFF).cumsum(0) - 1
        made = old.clone()
        made[at] = stream["w.values"]
        assert torch.equal(made, new)
    assert difference("w", old, old, False) == {}
    assert torch.equal(difference("w", old, old, True)["w"], old)
    assert difference("w", old, old + 1, False).keys() == {"w"}


def test_a_zero_of_another_sign_is_a_change() -> None:
    old, new = torch.zeros(99), torch.zeros(99)
    new[5] = -0.0
    assert difference("w", old, new, False)["w.values"].tolist() == [0.0]


def parts(folder: Path) -> tuple[Transformer, dict[str, Any], Changes]:
    """An engine's model, and the changes of a step."""
    model = learner(folder)
    rollout = rollout_copy(model, "int8", torch.float32)
    shadow = Shadow(model, "int8", torch.float32)
    shadow.renew(1)
    stepped(model, 2)
    stream, changes = shadow.changes()
    return rollout, stream, changes


CODES = "blocks.0.qkv.weight.codes"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s | {"more": torch.zeros(3)}, "has no more"),
        (lambda s: s | {f"{CODES}.gaps": s[f"{CODES}.gaps"][:-1]}, "values of"),
        (lambda s: s | {f"{CODES}.gaps": s[f"{CODES}.gaps"] * 0}, "lead out"),
        (lambda s: s | {f"{CODES}.gaps": s[f"{CODES}.gaps"] | -256}, "lead out"),
        (lambda s: s | {f"{CODES}.gaps": s[f"{CODES}.gaps"].int()}, "gaps of torch.int32"),
        (lambda s: s | {f"{CODES}.values": s[f"{CODES}.values"].float()}, "values of"),
        (lambda s: s | {f"{CODES}.values": s[f"{CODES}.values"] ^ 1}, "was stated"),
        (lambda s: s | {CODES: s[f"{CODES}.values"]}, "half of it"),
        (lambda s: {n: t for n, t in s.items() if n != f"{CODES}.gaps"}, "half of it"),
        (lambda s: {n: t for n, t in s.items() if not n.startswith(CODES)}, "was stated"),
        (lambda s: {n: t for n, t in s.items() if "norm" not in n}, "is missing"),
        (
            lambda s: {n: t * float("nan") if n.startswith("norm") else t for n, t in s.items()},
            "non-finite",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(folder: Path, change: Any, words: str) -> None:
    rollout, stream, changes = parts(folder)
    assert f"{CODES}.gaps" in stream
    before = digest(rollout)
    with pytest.raises(ValueError, match=words):
        apply(rollout, change(dict(stream)), changes)
    assert digest(rollout) == before
    apply(rollout, stream, changes)
    assert digest(rollout) != before
    with pytest.raises(Gap, match="of version 1"):
        apply(rollout, stream, changes)


def test_what_cannot_be_changed_is_refused(folder: Path) -> None:
    plain = hf.load(folder)
    with pytest.raises(ValueError, match="aligned to int8"):
        Shadow(plain, "int8", torch.float32)
    with pytest.raises(ValueError, match="aligned to int8"):
        Shadow(learner(folder, "nvfp4"), "int8", torch.float32)
    with pytest.raises(ValueError, match="adapter"):
        adapted = lora.attach(hf.load(folder, weights="int8"), 4, 8.0)
        Shadow(aligned_forward.align(adapted, "int8"), "int8", torch.float32)
    _, stream, changes = parts(folder)
    update = WeightUpdate(2, "codes", stream.items, changes=changes)
    two = Engine(
        plain, "int8", device="cpu", cache_tokens=512, large_batch_weights="bf16",
        dtype=torch.bfloat16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="kind 'codes'"):
        two.update_weights(update)
    assert "codes" not in two.capabilities.updates


def test_the_file_is_as_small_as_the_step(folder: Path, tmp_path: Path) -> None:
    model = learner(folder)
    at = broadcaster(tmp_path, model, shadow=Shadow(model, "int8", torch.float32))
    at.publish(1)
    at.publish(2)  # nothing has moved
    small = (tmp_path / "step_000002" / CHANGES).stat().st_size
    stepped(model, 3)
    at.publish(3)
    assert small < (tmp_path / "step_000003" / CHANGES).stat().st_size
    assert small < 2000
