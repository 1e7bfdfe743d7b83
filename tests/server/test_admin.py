"""Control routes over HTTP: pausing, and weights by version id while requests are in flight."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestClient

from lowroll import Engine
from lowroll.checkpoint.atomic_folders import publish_folder
from lowroll.engine.base import InFlight
from lowroll.kv.policy.table import make
from lowroll.model import hf, lora
from lowroll.server.admin import UPDATING
from lowroll.server.limits import STATE
from lowroll.server.protocol import Refused
from lowroll.server.weight_store import WeightStore
from lowroll.types import BehaviorTag, Request
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.serving import ADMIN, TOKENS, Moody, hung, impatient, served, tiny, until
from tests.fixtures.tiny import hf_folder

LONG = {"prompt": [3, 4, 5], "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
_opened: list[str] | None = None  # what is opened while somebody watches


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _opened is not None:
        _opened.append(os.fspath(arguments[0]) if not isinstance(arguments[0], int) else "")


sys.addaudithook(_watch)


@contextmanager
def opened() -> Iterator[list[str]]:
    """The names of what is opened in the block."""
    global _opened
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("control") / "model")


@pytest.fixture(scope="module")
def folder(model: Path) -> Path:
    """A shelf with three versions of the model, and what is none."""
    shelf = model.parent / "shelf"
    for number in (1, 2, 3):
        source = hf_folder(model.parent / f"source_{number}", seed=number)
        hf.save(hf.load(source), shelf / f"step_{number}")
    hf.save(hf.load(hf_folder(model.parent / "small", intermediate_size=32)), shelf / "small")
    hf_folder(shelf / "unpublished", seed=5)
    hf.save(hf.load(model), shelf / "damaged_9")
    with (shelf / "damaged_9/model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    (shelf / "linked").symlink_to(shelf / "step_1")
    (shelf / "file").write_text("no folder")
    hf.save(hf.load(model, weights="int8"), shelf / "int8_4")
    return shelf


async def post(client: TestClient, path: str, body: Any = None, wanted: int = 200) -> Any:
    headers = ADMIN | {"Content-Type": "application/json"}
    async with client.post(path, data=json.dumps(body), headers=headers) as response:
        found = await response.json()
        assert response.status == wanted, found
        return found


async def get(client: TestClient, path: str) -> Any:
    async with client.get(path, headers=ADMIN) as response:
        assert response.status == 200
        return await response.json()


def versions_of(answer: Any, i: int = 0) -> list[int]:
    return [span["version"] for span in answer["choices"][i]["lowroll"]["behavior"]["policy"]]


# -- weights -----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_three_versions_while_requests_are_in_flight(model: Path, folder: Path) -> None:
    engine = Moody(tiny(model))
    cold = [tiny(folder / f"step_{number}") for number in (1, 2, 3)]

    async with served(engine, TOKENS, WeightStore(folder, model)) as client:
        engine.slow_s = 0.02
        asked = asyncio.ensure_future(post(client, "/v1/completions", LONG | {"n": 2}))
        await until(lambda: engine.stats().tokens > 4, "tokens")
        digests = []
        for number in (1, 2, 3):
            before = engine.stats().tokens
            answer = await post(client, "/weights", {"version": f"step_{number}"})
            assert answer["version"] == f"step_{number}" and answer["seconds"] > 0
            assert [span["version"] for span in answer["policy"]] == [number]
            digests.append(answer["policy"][0]["digest"])
            held = await get(client, "/weights")
            assert held["version"] == f"step_{number}" and held["policy"] == answer["policy"]
            await until(lambda b=before: engine.stats().tokens > b + 8, "tokens")
        engine.slow_s = 0
        found = await asked
        assert versions_of(found) == versions_of(found, 1) == [0, 1, 2, 3]
        assert digests == [one.behavior.policy[0].digest for one in cold]
        after = await post(client, "/v1/completions", LONG | {"seed": 9})
        await post(client, "/reset_prefix_cache")
        again = await post(client, "/v1/completions", LONG | {"seed": 9})
        assert versions_of(after) == [3]
        for name in ("token_ids", "logprobs"):
            assert after["choices"][0][name] == again["choices"][0][name]
        wanted = cold[2].generate([Request([3, 4, 5], max_tokens=100, ignore_eos=True, seed=9)])[0]
        assert after["choices"][0]["token_ids"] == wanted.rollouts[0].token_ids
        assert held["available"] == "damaged_9 int8_4 small step_1 step_2 step_3".split()


async def test_requests_in_flight_are_replayed_where_that_is_asked_for(
    model: Path, folder: Path
) -> None:
    """The tokens of the new version from the first on. Streams have told theirs: refused. A bounded
    cache cannot: refused."""
    engine = Moody(tiny(model))
    replay = {"version": "step_2", "in_flight": "replay"}
    async with served(engine, TOKENS, WeightStore(folder, model)) as client:
        engine.slow_s = 0.02
        whole = asyncio.ensure_future(post(client, "/v1/completions", LONG | {"n": 2}))
        await until(lambda: engine.stats().tokens > 4, "tokens")
        answer = await post(client, "/weights", replay)
        assert [span["version"] for span in answer["policy"]] == [2]
        stream = {"prompt": [3], "max_tokens": 90, "ignore_eos": True, "stream": True}
        before = engine.stats().tokens
        async with client.post("/v1/completions", json=stream, headers=ADMIN) as _:
            await until(lambda: engine.stats().tokens > before + 8, "tokens")
            refused = await post(client, "/weights", replay | {"version": "step_3"}, 409)
            assert "1 requests in flight are streams" in refused["error"]["message"]
            assert (await get(client, "/weights"))["version"] == "step_2"
        engine.slow_s = 0
        found = await whole
        assert versions_of(found) == versions_of(found, 1) == [2]
        assert engine.stats().replays == 2
        async with client.get("/metrics", headers=ADMIN) as told:
            assert "lowroll_replayed_samples_total 2.0" in await told.text()
        models = await get(client, "/v1/models")
        assert models["data"][0]["lowroll"]["capabilities"]["replays"] is True
    bounded = Engine(model, "fp32", kv=make("streaming", budget=8, buffer=4, sinks=2))
    async with served(Moody(bounded), TOKENS, WeightStore(folder, model)) as client:
        refused = await post(client, "/weights", replay, 409)
        assert "this engine cannot replay" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("body", "wanted", "says"),
    [
        ({"version": "step_9"}, 404, "there is no step_9"),
        ({"version": "unpublished"}, 404, "there is no unpublished"),
        ({"version": "linked"}, 404, "there is no linked"),
        ({"version": "file"}, 404, "there is no file"),
        ({"version": "damaged_9"}, 409, "damaged_9/model.safetensors: SHA-256 differs"),
        ({"version": "small"}, 409, "intermediate_size: not as the served model's"),
        ({"version": "int8_4"}, 409, "int8_4/config.json: quantization_config"),
        ({"version": ""}, 400, "expected up to 64 letters"),
        ({"version": 3}, 400, "version: input should be a valid string"),
        ({}, 400, "version: field required"),
        ({"version": "step_1", "path": "/etc"}, 400, "path: there is no such field"),
        (
            {"version": "step_1", "in_flight": "drop"},
            400,
            "in_flight: input should be 'keep' or 'replay'",
        ),
    ],
)
async def test_a_version_that_does_not_fit_changes_nothing(
    model: Path, folder: Path, body: Any, wanted: int, says: str
) -> None:
    engine = tiny(model)

    async with served(engine, TOKENS, WeightStore(folder, model)) as client:
        before = await get(client, "/weights")
        error = (await post(client, "/weights", body, wanted))["error"]
        assert says in error["message"] and str(folder) not in error["message"]
        named = {"path", "in_flight"} & body.keys()
        assert error["param"] == (named.pop() if named else "version")
        assert await get(client, "/weights") == before
        await post(client, "/weights", {"version": "step_1"})


def test_files_that_came_later_are_not_read(model: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir()

    def write(target: Path) -> None:
        (target / "config.json").write_bytes((model / "config.json").read_bytes())

    published = publish_folder(tmp_path / "shelf/step_1", write, {})
    (published / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    shelf = WeightStore(tmp_path / "shelf", model)
    with pytest.raises(Refused, match="model.safetensors: the folder was not published with it"):
        shelf.read(shelf.find("step_1"), 1, tiny(model).capabilities, "fp32")


def hostile_ids() -> list[str]:
    """Names that lead, or might be taken to lead, out of a folder."""
    made = [
        "..", ".", "/", "", "...", "step_1/", "/step_1", "./step_1", "step_1/.", "step_1/..",
        "~", "~root", "$HOME", "%2e%2e", "%2e%2e%2fetc", "..%2f..", "..%c0%af..", "..\\..",
        "step_1\x00", "step_1\n", "\x00", "step_1\x00/../..", "C:\\x", "\\\\host\\share",
        "file:///etc/passwd", "http://127.0.0.1/", ".tmp-lowroll-x", "ｓｔｅｐ＿１", "step_1\u202e",
        "\u2025/\u2025", "．．", "step_\u0661", "a" * 65, "step_1 ", " step_1", "step_1;ls", "-" * 65,
        "\ud7ff", "/proc/self/environ", "/dev/stdin", "step_1|x", "`x`", "step_1?x=1", "step_1#",
    ]  # fmt: skip
    parts = ["..", "../", "/", "step_1", "%2e", "\\", "\x00", "etc", "passwd", ".", "//", "\u2215"]
    draw = random.Random(0)
    while len(made) < 300:
        text = "".join(draw.choices(parts, k=draw.randint(2, 8)))
        if not all(c.isalnum() and c.isascii() or c in "._-" for c in text) or text[0] == ".":
            made.append(text)
    return made


async def test_no_id_leads_out_of_the_shelf(model: Path, folder: Path) -> None:
    engine = tiny(model)
    ids = hostile_ids()
    assert len(ids) == 300

    async with served(engine, TOKENS, WeightStore(folder, model)) as client:
        await post(client, "/weights", {"version": "step_1"})
        before = await get(client, "/weights")
        with opened() as names:
            for version in ids:
                answer = await post(client, "/weights", {"version": version}, 400)
                assert answer["error"]["param"] == "version"
        assert names == []
        assert await get(client, "/weights") == before
        with opened() as names:
            await post(client, "/weights", {"version": "step_2"})
        inside = (str(folder), str(model))
        odd = [n for n in names if not str(n).startswith(inside) and n.startswith("/")]
        assert names and not [n for n in odd if not n.endswith((".py", ".pyc", ".so"))]


async def test_one_update_at_a_time_and_one_that_hangs_is_named(model: Path, folder: Path) -> None:
    engine = Moody(tiny(model))

    shelf = WeightStore(folder, model)
    async with served(engine, TOKENS, shelf) as client:
        loop = client.server.app[STATE].engine
        await hung(engine, loop)
        first = asyncio.ensure_future(post(client, "/weights", {"version": "step_1"}, 503))
        await until(client.server.app[UPDATING].locked, "the first update")
        second = await post(client, "/weights", {"version": "step_2"}, 409)
        assert "another update" in second["error"]["message"]
        with impatient(loop):
            assert "busy with a step" in (await first)["error"]["message"]
        engine.hang.clear()
        await until(lambda: not loop.open, "the hung request")
        assert (await get(client, "/weights"))["version"] is None
        await post(client, "/weights", {"version": "step_2"})


async def test_an_update_whose_client_goes_is_told_as_it_is(model: Path, folder: Path) -> None:
    engine, begun = Moody(tiny(model)), threading.Event()

    def slow(update: WeightUpdate, in_flight: InFlight) -> BehaviorTag:
        begun.set()
        time.sleep(0.3)
        return engine.engine.update_weights(update, in_flight)

    engine.update_weights = slow  # type: ignore[attr-defined]

    async with served(engine, TOKENS, WeightStore(folder, model)) as client:
        asked = asyncio.ensure_future(post(client, "/weights", {"version": "step_1"}))
        await until(begun.is_set, "the update")
        asked.cancel()
        await asyncio.wait([asked])
        await until(lambda: engine.behavior.policy[-1].version == 1, "its end")
        assert (await get(client, "/weights"))["version"] == "step_1"


async def test_without_a_shelf_there_is_no_such_route(model: Path) -> None:
    async with served(tiny(model), TOKENS) as client:
        await post(client, "/weights", {"version": "step_1"}, 404)


# -- adapters ----------------------------------------------------------------------------------------


def adapted(model: Path, seed: int | None, rank: int = 4, weights: str | None = None) -> Any:
    """The model with an adapter; seed None: one that changes nothing."""
    made = lora.attach(hf.load(model, weights=weights), rank, 2.0 * rank)
    if seed is not None:
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in made.trainable_parameters().values():
                p.copy_(0.2 * torch.randn(p.shape, generator=draw))
    return made


@pytest.mark.slow
async def test_adapters_come_by_version_too(model: Path, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        lora.save(adapted(model, seed), tmp_path / f"pol-v{seed}", base=str(model))
    lora.save(adapted(model, 4, rank=5), tmp_path / "rank-5", base=str(model))
    lora.save(adapted(model, 5, weights="int8"), tmp_path / "int8", base=str(model))
    hf.save(hf.load(model), tmp_path / "full_4")
    engine = Engine(adapted(model, None), weights="fp32", device="cpu", cache_tokens=2048)

    async with served(engine, TOKENS, WeightStore(tmp_path, model)) as client:
        for seed in (1, 2, 3):
            answer = await post(client, "/weights", {"version": f"pol-v{seed}"})
            assert [span["version"] for span in answer["policy"]] == [seed]
            found = await post(client, "/v1/completions", LONG | {"temperature": 0})
            alone = Engine(tmp_path / f"pol-v{seed}", "fp32", device="cpu", cache_tokens=2048)
            assert answer["policy"][0]["digest"] == alone.behavior.policy[0].digest
            greedy = Request([3, 4, 5], max_tokens=100, ignore_eos=True, temperature=0)
            wanted = alone.generate([greedy])[0].rollouts[0]
            assert found["choices"][0]["token_ids"] == wanted.token_ids
        before = await get(client, "/weights")
        for version, says in (
            ("rank-5", "the adapter has rank 5, and this engine has room for 4"),
            ("int8", "it learned on int8, and this engine's are fp32"),
            ("full_4", "kind 'full': this engine takes updates of kind adapter"),
        ):
            error = (await post(client, "/weights", {"version": version}, 409))["error"]
            assert says in error["message"]
        assert await get(client, "/weights") == before


# -- pausing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.slow
async def test_a_client_sees_a_pause_in_its_answer(model: Path, folder: Path, mode: str) -> None:
    engine = Moody(tiny(model))

    async with served(engine, TOKENS, WeightStore(folder, model)) as client:
        engine.slow_s = 0.005
        asked = asyncio.ensure_future(post(client, "/v1/completions", LONG))
        await until(lambda: engine.stats().tokens > 4, "tokens")
        assert await post(client, f"/pause?mode={mode}") == {"status": "paused", "mode": mode}
        assert await get(client, "/is_paused") == {"is_paused": True}
        assert await get(client, "/health") == {"status": "paused"}
        await post(client, "/weights", {"version": "step_1"})
        late = asyncio.ensure_future(post(client, "/v1/completions", LONG))
        await asyncio.sleep(0.05)
        assert asked.done() == (mode != "keep") and not late.done()
        await post(client, "/resume")
        assert await get(client, "/is_paused") == {"is_paused": False}
        found, after = await asked, await late
        assert versions_of(after) == [1]
        drawn = len(found["choices"][0]["token_ids"])
        if mode == "abort":
            assert found["choices"][0]["finish_reason"] == "abort" and 4 < drawn < 100
        else:
            assert found["choices"][0]["finish_reason"] == "length" and drawn == 100
        assert versions_of(found) == ([0, 1] if mode == "keep" else [0])


async def test_pauses_that_are_wrong_are_named(model: Path) -> None:
    engine = Moody(tiny(model))

    async with served(engine, TOKENS) as client:
        for query, param in (("mode=stop", "mode"), ("mod=keep", "mod"), ("mode=", "mode")):
            error = (await post(client, f"/pause?{query}", wanted=400))["error"]
            assert error["param"] == param
        engine.slow_s = 0.01
        asked = asyncio.ensure_future(post(client, "/v1/completions", LONG))
        await until(lambda: engine.stats().tokens > 4, "tokens")
        waits = asyncio.ensure_future(post(client, "/pause?mode=wait", wanted=409))
        loop = client.server.app[STATE].engine
        await until(lambda: loop.loop.pausing.state == "draining", "the first pause")
        assert "another pause" in str(await post(client, "/pause?mode=wait", wanted=409))
        await post(client, "/resume")
        assert "resumed before" in str(await waits)
        assert await post(client, "/abort") == {"aborted": 1}
        assert (await asked)["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wrong_request_that_was_held_back_is_named(model: Path, stream: bool) -> None:
    engine = Moody(tiny(model))
    wrong = LONG | {"top_p": 0, "stream": stream}

    async with served(engine, TOKENS) as client:
        loop = client.server.app[STATE].engine
        engine.slow_s = 0.005
        asked = asyncio.ensure_future(post(client, "/v1/completions", LONG))
        await until(lambda: engine.stats().tokens > 4, "tokens")
        pausing = asyncio.ensure_future(post(client, "/pause?mode=wait"))
        await until(lambda: loop.loop.pausing.state == "draining", "the pause")
        held = asyncio.ensure_future(client.post("/v1/completions", json=wrong, headers=ADMIN))
        await until(lambda: bool(loop.loop.held), "the request that is held back")
        engine.slow_s = 0
        await pausing
        await asked
        async with await held as answer:
            said = await answer.text()
            assert answer.status == (200 if stream else 400)
        error = json.loads(said.removeprefix("data: ").split("\n\n")[0])["error"]
        assert error["param"] == "top_p" and said.endswith("[DONE]\n\n") == stream
        await post(client, "/resume")
