"""`lowroll serve`: what it refuses before it loads anything, and a whole life of its process."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lowroll import Engine
from lowroll.cli import serve
from lowroll.cli.main import main
from lowroll.config.train import TrainConfig
from lowroll.model.device import pick_device
from lowroll.server import app as server_app
from lowroll.server.limits import STATE
from tests.fixtures.processes import eventually

DENSE = "rollout.weights=dense"
ANYWHERE = ".".join("0000")
TOKEN = "a-token-of-some-length"
LONG = {"prompt": "1 + 1", "max_tokens": 200, "ignore_eos": True, "n": 4}


@pytest.fixture(scope="module", autouse=True)
def usual_turns() -> Iterator[None]:
    """A server has the threads of its process take turns faster."""
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", ANYWHERE], "--host: 0.0.0.0 can be reached by others, which takes a token"),
        (["--host", "::"], "--host: :: can be reached"),
        (["--host", "server.example"], "--host: server.example can be reached"),
        (["--host", "127.0.0.2.example"], "can be reached"),
        (["--token-env", "NOBODY_SET_THIS"], "--token-env: the environment has no NOBODY_SET"),
        (["--admin-token-env", "SHORT"], "--admin-token-env: SHORT: a token has at least 16"),
        (["--token-env", "SPACED"], "--token-env: SPACED: a token has"),
        (["--port", "65536"], "--port: expected a number in 0..65535"),
        (["--max-n", "0"], "--max-n: expected at least 1"),
        (["--lora-alpha", "2"], "--lora-alpha: it is of --lora-rank's adapter"),
        (["--kv", "spare"], "--kv: unknown cache 'spare'"),
        (["--weights", "int3"], "--weights: unknown format 'int3'"),
        (["--token-env", "LONG", "--admin-token-env", "LONG"], "--admin-token-env: it holds the"),
        (["--weights-dir", "."], "--admin-token-env"),
        (["--weights-dir", "nowhere", "--admin-token-env", "LONG"], "--weights-dir: nowhere is no"),
        (["--lora-rank", "0"], "--lora-rank: expected at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(
    model: Path,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("SHORT", "a" * 15), ("SPACED", "a" * 20 + " b"), ("LONG", "a" * 20)):
        monkeypatch.setenv(name, value)
    assert main(["serve", str(model), "--port", "0", "--device", "cpu", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "aaaaaaaaaaaaaaa" not in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "9000"], "--port: with a run's file write serve.port=9000"),
        (["--lora-rank", "4"], "--lora-rank: with a run's file write train.lora_rank=4"),
        (["--kv", "rkv"], "--kv: with a run's file write rollout.kv.policy=rkv"),
        (["--noisy"], "--noisy: it is for a model; a run's file says it"),
        (["--token-env", "X"], "--token-env: it is for a model; a run's file says it; tokens are"),
        (["rollout.engine=vllm", "rollout.vllm.url=http://h:1", DENSE], "named in client.base_url"),
        (
            ["rollout.engine=vllm", "weight_broadcast.type=nccl", DENSE],
            "weight_broadcast.type: with",
        ),
        (["rollout.engine=vllm", "rollout.weights=fp8"], "rollout.weights: fp8: with roles a vLLM"),
    ],
)
def test_what_a_runs_file_says_is_no_option(
    model: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was ignored."""
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {model}\noutput_dir: {tmp_path / 'run'}\n")
    assert main(["serve", str(file), *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_address_that_is_taken_is_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lowroll.server.app import bind

    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", str(model), "--port", port]) == 2
    assert f"--port: 127.0.0.1:{port}" in capsys.readouterr().err


def test_an_address_that_is_taken_while_the_model_loads_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lowroll.server.app import bind

    load = serve.serving
    with bind("127.0.0.1", 0) as other:
        port = str(other.getsockname()[1])

        def slowly(*given: Any) -> Any:
            other.listen()
            return load(*given)

        monkeypatch.setattr(serve, "serving", slowly)
        assert main(["serve", str(model), "--port", port, "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert f"--port: 127.0.0.1:{port}: " in told and "--port 0 takes one that is free" in told
    assert told.startswith("loading model from ") and "int8 weights, dense cache of " in told


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert serve.is_loopback(host)


def test_the_options_reach_the_engine_and_the_limits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--kv rkv+fp8 --cache-tokens 2048 --max-batch 3 --lora-rank 2 --weights int8"
    more = "--name it --max-n 5 --max-prompts 6 --max-requests 7 --max-body-mb 1 --device cpu"
    monkeypatch.setenv("ADMIN", "a" * 20)
    shelf = ["--weights-dir", str(tmp_path), "--admin-token-env", "ADMIN"]
    given = serve.parser().parse_args([str(model), *words.split(), *more.split(), *shelf])
    app = serve.application(given, serve.credentials(given))
    serving = app[STATE]
    able = serving.capabilities
    assert (able.kv_policy, able.kv_dtype, able.updates) == ("rkv", "fp8", {"adapter"})
    assert serving.name == "it" and serving.chat is not None and serving.vocabulary is not None
    limits = serving.limits
    assert (limits.n, limits.prompts, limits.requests, limits.body) == (5, 6, 7, 1 << 20)
    assert ("POST", "/weights") in {(r.method, r.resource.canonical) for r in app.router.routes()}
    stats = serving.engine.engine.stats()
    assert (stats.weights, stats.cache_tokens) == ("int8", 2048)


def test_an_adapter_is_scaled_as_a_runs(model: Path) -> None:
    given = serve.parser().parse_args([str(model), "--lora-rank", "2"])
    adapted = serve.adapted(model, pick_device("cpu"), given)
    scales = {
        linear.adapter.scaling for _, linear in adapted.linears() if linear.adapter is not None
    }
    assert scales == {TrainConfig().lora_alpha / 2}


def test_prompts_run_beside_rows_on_a_gpu_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = serve.parser().parse_args([str(model), "--device", "cpu", "--cache-tokens", "512"])
    engine = serve.make_engine(given, model, None)
    assert (engine.scheduler.lookahead, engine.scheduler.gather) == (1, 0)
    assert not engine.runner.one_pass
    engine = Engine(model, device="cpu", cache_tokens=512, lookahead=8, **serve.PROMPTS)
    assert engine.scheduler.gather == serve.PROMPTS["gather"]
    assert engine.scheduler.max_prefill_tokens == serve.PROMPTS["max_prefill_tokens"]
    assert engine.runner.one_pass == serve.PROMPTS["one_pass"]


def test_what_was_loaded_is_never_collected_while_requests_wait(
    model: Path, monkeypatch: pytest.MonkeyPatch, collected: None
) -> None:
    frozen, before = [], gc.get_freeze_count()

    def begin(serving: Coroutine[Any, Any, int]) -> int:
        serving.close()
        frozen.append(gc.get_freeze_count())
        return 2

    monkeypatch.setattr(serve.asyncio, "run", begin)
    assert main(["serve", str(model), "--port", "0", "--device", "cpu"]) == 128 + 2
    assert frozen[0] > before + 10_000 and gc.get_freeze_count() <= before


@pytest.fixture
def heeded() -> Iterator[None]:
    """A shell's background job, as the tests may be, begins with SIGINT ignored, and so would the
    processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def process(model: Path, *words: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, and its address."""
    command = [sys.executable, "-m", "lowroll", "serve", str(model), "--port", "0", *words]
    child = subprocess.Popen(
        [*command, "--device", "cpu", "--cache-tokens", "8192"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line.startswith("serving model at http://127.0.0.1:"), child.communicate(timeout=60)
        yield child, line.split()[-1].removesuffix("/v1")
    finally:
        child.kill()
        child.communicate(timeout=60)


def ask(url: str, body: Any = None, token: str = "") -> tuple[int, Any]:
    address, _, path = url.removeprefix("http://").partition("/")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    connection = http.client.HTTPConnection(address, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", f"/{path}", data, headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def running(url: str) -> bool:
    """Whether a sample is being drawn."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    said = connection.getresponse().read().decode()
    connection.close()
    return float(said.partition("\nlowroll_samples_running ")[2].split()[0]) > 0


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("echo_s", [60.0, 0.0])
def test_a_signal_soon_after_the_first_is_taken_for_its_echo(
    echo_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_app, "ECHO_S", echo_s)

    async def twice() -> bool:
        with server_app.catch_signals() as (first, second):
            signal.raise_signal(signal.SIGINT)
            assert await asyncio.wait_for(first, 30) == signal.SIGINT
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait([second], timeout=0.2 if echo_s else 30.0)
            return second.done()

    assert asyncio.run(twice()) == (echo_s == 0.0)


@pytest.mark.slow
def test_a_life(model: Path) -> None:
    """It starts, answers, and ends at a signal with the answers of what was in flight."""
    with process(model, "--token-env", "T", T=TOKEN) as (child, url):
        assert ask(f"{url}/health") == (200, {"status": "running"})
        assert ask(f"{url}/v1/models")[0] == 401
        status, models = ask(f"{url}/v1/models", token=TOKEN)
        assert status == 200 and models["data"][0]["id"] == "model"
        found: list[tuple[int, Any]] = []
        flight = threading.Thread(
            target=lambda: found.append(ask(f"{url}/v1/completions", LONG, TOKEN))
        )
        flight.start()
        assert eventually(lambda: found or running(url))
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=60) == 143
        flight.join(timeout=60)
        status, answer = found[0]
        assert status == 200
        assert {choice["finish_reason"] for choice in answer["choices"]} <= {"length", "abort"}
        with pytest.raises(OSError):
            ask(f"{url}/health")


@pytest.mark.slow
@pytest.mark.usefixtures("heeded")
def test_a_second_signal_does_not_wait(model: Path) -> None:
    many = {"prompt": [[5, 80, i] for i in range(12)], "n": 32}
    with process(model, "--admin-token-env", "T", T=TOKEN) as (child, url):
        assert ask(f"{url}/v1/completions", LONG | {"n": 1, "max_tokens": 2})[0] == 200
        found: list[tuple[int, Any]] = []
        flight = threading.Thread(
            target=lambda: found.append(ask(f"{url}/v1/completions", LONG | many))
        )
        flight.start()
        assert eventually(lambda: running(url))
        began = time.monotonic()
        while child.poll() is None and time.monotonic() - began < serve.GRACE_S:
            child.send_signal(signal.SIGINT)  # the second may be taken for an echo
            time.sleep(0.5)
        assert child.poll() in (130, -signal.SIGINT)  # one of them may meet the interpreter's end
        flight.join(timeout=60)
        assert found[0][0] == 200
        assert "abort" in {choice["finish_reason"] for choice in found[0][1]["choices"]}
