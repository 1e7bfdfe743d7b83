"""The benchmark of the server: what its clients read, how sides are compared, and a small run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import load, server, targets, vocabulary
from bench.harness import Row
from bench.peer import Peer, PeerFailed
from bench.vllm_server import VllmServer
from lowroll.model.tokenizer import load_tokenizer
from tests.fixtures.shapes import TINY

# `vllm serve` as far as it is asked here: streams of a token at a time
SERVER = """
import asyncio, json, sys
from aiohttp import web
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if {dies}:
    sys.exit("ValueError: no such kernel")
async def complete(request):
    body = await request.json()
    response = web.StreamResponse()
    await response.prepare(request)
    for i in range(body["max_tokens"]):
        chunk = {{"choices": [{{"index": 0, "text": "a"}}]}}
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\\n\\n")
        await asyncio.sleep(0.001)
    usage = {{"choices": [], "usage": {{"completion_tokens": body["max_tokens"]}}}}
    await response.write(b"data: " + json.dumps(usage).encode() + b"\\n\\ndata: [DONE]\\n\\n")
    return response
app = web.Application()
app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
app.router.add_get("/version", lambda _: asyncio.sleep(0, web.json_response({{"version": "0.24.0"}})))
app.router.add_post("/v1/completions", complete)
web.run_app(app, host="127.0.0.1", port=int(options["--port"]), print=None)
"""

# `vllm bench serve`, which says a second for everything
CLIENT = ("request_throughput", "mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
CLIENTS = f"""
from urllib.request import urlopen
get_tokenizer = print
def add_cli_args(parser):
    for name in ("backend base-url endpoint model dataset-name random-input-len random-output-len num-prompts "
                 "max-concurrency seed temperature percentile-metrics tokenizer").split():
        parser.add_argument("--" + name)
    for name in ("ignore-eos", "disable-tqdm"):
        parser.add_argument("--" + name, action="store_true")
async def main_async(args):
    assert urlopen(args.base_url + "/health", timeout=30).status == 200
    count = int(args.num_prompts)
    numbers = dict(completed=count, total_output_tokens=count * int(args.random_output_len), input_lens=[])
    return numbers | dict.fromkeys({CLIENT}, 1.0)
"""


def site(folder: Path, monkeypatch: pytest.MonkeyPatch, dies: bool = False) -> None:
    """Make a folder with a vllm in it, and name it in the environment."""
    module = folder / "vllm" / "entrypoints" / "openai" / "api_server.py"
    clients = folder / "vllm" / "benchmarks" / "serve.py"
    for file in (module, clients):
        file.parent.mkdir(parents=True)
    for package in (module.parent.parent, module.parent, clients.parent):
        (package / "__init__.py").write_text("")
    (folder / "vllm" / "__init__.py").write_text('__version__ = "0.24.0"')
    module.write_text(SERVER.format(dies=dies))
    clients.write_text(CLIENTS)
    monkeypatch.setenv("LOWROLL_VLLM_PATH", str(folder))
    monkeypatch.delenv("LOWROLL_VLLM_PYTHON", raising=False)


def settings(folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "name": "tiny",
        "shape": TINY,
        "format": "fp8",
        "batch": 8,
        "length": 100,
        "cache_bytes": 1 << 20,
        "memory_fraction": 0.25,
        "device": "cuda",
    }


# -- what clients read -----------------------------------------------------------------------------


def test_a_stream_is_timed_by_its_reads() -> None:
    stream = load.Stream()
    stream.take(b'data: {"choices":[{"text":"a"}]}\n\nda', 3.0)
    stream.take(b'ta: {"choices": [{"text":"b"}]}\n\n', 3.5)
    stream.take(b'data: {"choices":[{"text":"c"}]}\n\ndata: {"choices":[{"text":"d"}]}\n\n', 5.5)
    stream.take(b'data: {"choices":[],"usage":{"completion_tokens":9}}\n\ndata: [DONE]\n\n', 9.0)
    assert (stream.last, stream.gap, stream.gap_at) == (5.5, 2.0, 5.5)
    assert stream.tokens() == 9


def test_a_stream_without_a_count_is_an_error() -> None:
    stream = load.Stream()
    stream.take(b'data: {"error":{"message":"broken"}}\n\n', 1.0)
    with pytest.raises(ValueError, match="without usage.*broken"):
        stream.tokens()


def test_a_run_of_vllms_client_counts_when_all_its_tokens_came() -> None:
    answer = dict.fromkeys(CLIENT, 1.0) | {"completed": 3, "total_output_tokens": 36}
    assert server.check_vllms({**answer, "mean_ttft_ms": 200.0}, 3, 12)["mean_ttft_ms"] == 200
    for short in ({"completed": 2}, {"total_output_tokens": 35}):
        with pytest.raises(PeerFailed, match="of 3 requests with"):
            server.check_vllms({**answer, **short}, 3, 12)


# -- the comparison --------------------------------------------------------------------------------


def seen(*numbers: float) -> dict[str, float]:
    return dict(zip(CLIENT, numbers, strict=True))


def test_a_ratio_is_how_many_times_better_ours_is() -> None:
    class Ours:
        model, format = "qwen2.5-7b", "bf16"

    mine, theirs = [seen(6.0, 50.0, 5.0, 40.0)] * 2, [seen(3.0, 40.0, 10.0, 11.0)] * 2
    rows = server.over_vllm(Ours(), 16, mine, theirs)  # type: ignore[arg-type]
    assert [row.ratio for row in rows] == [2.0, 0.8, 2.0]
    assert [(row.ours, row.peer) for row in rows] == [(6.0, 3.0), (50.0, 40.0), (5.0, 10.0)]
    assert rows[0].note == "by vllm bench serve; gaps 40 ms, vLLM's 11"
    aimed = targets.aimed(rows)
    assert [row.verdict for row in aimed] == ["met", "missed", "met"]


def test_every_target_of_the_server_has_a_row() -> None:
    named = {name for t in targets.TARGETS if t.file == "server" for name in t.rows}
    Side = type("Side", (), {"model": "qwen2.5-7b", "format": "bf16"})
    made = {
        row.name
        for c in (1, 16, 64, 256)
        for row in server.over_vllm(Side(), c, [seen(1, 1, 1, 1)], [seen(1, 1, 1, 1)])
    }
    made |= {
        targets.through_server("qwen2.5-7b", "bf16", batch, group)
        for batch in (64, 256)
        for group in server.GROUPS
    }
    assert named == made
    slow = Row(targets.through_server("qwen2.5-7b", "bf16", 64, 8), "tokens/s", 1, 1, 0.89)
    assert targets.aimed([slow])[0].verdict == "missed"


# -- the tokenizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [261, 512, 3000])
def test_a_text_has_as_many_tokens_as_it_was_made_of(size: int) -> None:
    tokenizer = vocabulary.tokenizer(size)
    ids = list(vocabulary.words(tokenizer))[-40:]
    assert len(tokenizer) == size and len(ids) == 40
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_the_models_class_adds_no_token(tmp_path: Path) -> None:
    """An id behind the model's last one would be refused."""
    tokenizer = load_tokenizer(vocabulary.write(tmp_path, {**TINY, "vocab_size": 3000}))
    assert len(tokenizer) == 3000 and max(vocabulary.words(tokenizer)) == 2999
    assert tokenizer.encode(tokenizer.decode(range(2900, 3000))) == list(range(2900, 3000))


def test_a_vocabulary_has_the_bytes_at_least() -> None:
    with pytest.raises(ValueError, match="vocab_size: 256"):
        vocabulary.tokenizer(256)


# -- vLLM's server ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_vllms_server_is_waited_for_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(tmp_path / "site", monkeypatch)
    (tmp_path / "model").mkdir()
    vllm = VllmServer(settings(tmp_path / "model"))
    try:
        assert 0 < vllm.wait(120.0) < 120 and vllm.version == "0.24.0"
        stored = json.loads((tmp_path / "model" / "config.json").read_text())
        assert stored["quantization_config"]["format"] == "float-quantized"
    finally:
        vllm.close()
    with pytest.raises(PeerFailed, match="it ended with"):
        vllm.wait(120.0)


@pytest.mark.slow
def test_vllms_last_words_are_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site(tmp_path / "site", monkeypatch, dies=True)
    vllm = VllmServer(settings(tmp_path))
    with pytest.raises(PeerFailed, match="it ended with 1; .*no such kernel"):
        vllm.wait(120.0)
    vllm.close()


# -- small runs ------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "shape", lambda model: TINY)
    for name, value in (("PROMPT", 12), ("NEW", 6), ("ROLLED", 8), ("STREAMS", 4)):
        monkeypatch.setattr(server, name, value)
    monkeypatch.setattr(server, "LONG", {"cpu": 160})


def run(out: Path, *extra: str) -> dict[str, Row]:
    size = "--model demo --device cpu --concurrency 1,2 --batches 8 --rounds 1".split()
    server.main([*size, "--out", str(out), *extra])
    rows = json.loads((out / "server-cpu.json").read_text())["rows"]
    return {row["name"]: row for row in rows}


@pytest.mark.slow
def test_a_small_run_measures_both_sides(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(tmp_path / "site", monkeypatch)
    rows = run(tmp_path / "out", *"--formats bf16 --parts vllm rollout".split())
    for concurrency in (1, 2):
        for what in server.QUANTITIES:
            row = rows[targets.over_vllm_server("demo", "bf16", concurrency, what)]
            assert row["ours"] == row["peer"] == row["ratio"] == 1
            assert row["note"] == "by vllm bench serve; gaps 1 ms, vLLM's 1"
    for group in server.GROUPS:
        row = rows[targets.through_server("demo", "bf16", 8, group)]
        assert row["unit"] == "tokens/s" and 0 < row["ratio"]
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
    assert len(rows) == 8


@pytest.mark.long
def test_a_pause_is_seen_as_the_longest_gap(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowroll import Engine

    take = Engine.update_weights

    def slow(engine: Engine, update: Any) -> Any:
        time.sleep(4.0)
        return take(engine, update)

    monkeypatch.setattr(Engine, "update_weights", slow)
    rows = run(tmp_path, "--formats", "fp32", "--parts", "update", "--peer", "none")
    name = "demo fp32 4 streams"
    assert rows[f"{name}: the update itself"]["ours"] > 4000
    for way in ("update", "pause, update, resume"):
        assert rows[f"{name}: longest gap, {way}"]["ours"] > 4000, way
    assert rows[f"{name}: longest gap, no update"]["ours"] < 4000


@pytest.mark.slow
def test_a_request_that_fails_ends_the_run(tmp_path: Path) -> None:
    with Peer({}, [sys.executable, "-m", "bench.load"]) as client:
        order = {"url": "http://127.0.0.1:9", "concurrency": 1, "prompts": [[1]], "body": {}}
        answer = client.ask(order, "nothing", 30.0)
    with pytest.raises(PeerFailed, match="1 requests failed: Client"):
        server.check(answer)
