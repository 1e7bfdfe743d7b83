"""Many at once: every mix of requests, streams that are left at any moment, pauses and new weights
on the way. What is answered is what the engine draws for the same request alone."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lowroll import Engine, Request, WeightUpdate
from lowroll.model import hf
from lowroll.server.engine_thread import EngineThread
from lowroll.server.limits import Credentials, ServerLimits
from tests.fixtures import engines
from tests.fixtures.http import events, post, serving
from tests.fixtures.processes import eventually
from tests.fixtures.serving import Moody

ADMIN = "an-admin-of-this-test"


engine_of = partial(engines.engine_of, cache_tokens=4096, max_batch=16)


def mix(seed: int) -> dict[str, Any]:
    """A completion with any settings; prompts share their beginnings."""
    rng = random.Random(seed)
    start = random.Random(rng.randrange(3)).choices(range(5, 100), k=rng.randrange(1, 12))
    asked: dict[str, Any] = {
        "prompt": [*start, *rng.choices(range(5, 250), k=rng.randrange(1, 20))],
        "max_tokens": rng.randrange(1, 40),
        "n": rng.choice([1, 1, 2, 8]),
        "seed": seed,
        "request_id": f"mix {seed}",
        "logprobs": rng.choice([0, 2]),
        "return_token_ids": True,
    }
    if rng.random() < 0.5:
        asked |= {"temperature": rng.choice([0.5, 1.3]), "top_p": 0.9}
    if rng.random() < 0.3:
        asked["stop"] = rng.sample([" ", "a", "e", "\n", "ö"], 2)
        asked["min_tokens"] = rng.randrange(0, asked["max_tokens"])
    if rng.random() < 0.3:
        asked["stop_token_ids"] = rng.choices(range(5, 250), k=20)
    if rng.random() < 0.2:
        asked["repetition_penalty"] = 1.2
    return asked


def alone(engine: Engine, asked: dict[str, Any]) -> list[tuple[list[int], str, int | str | None]]:
    """Tokens and ends of the same request, by the engine itself."""
    names = {"prompt": "prompt_ids", "request_id": "id", "stop": "stop_strings"}
    names |= {"stop_token_ids": "stop_ids", "logprobs": "top_logprobs"}
    fields = {names.get(k, k): v for k, v in asked.items() if k != "return_token_ids"}
    fields |= {k: tuple(fields[k]) for k in ("stop_ids", "stop_strings") if k in fields}
    (group,) = engine.generate([Request(**fields)])
    return [(r.token_ids, r.finish_reason, r.stop_reason) for r in group.rollouts]


def whole(url: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    status, tree = post(f"{url}/v1/completions", asked)
    assert status == 200, tree
    return tree["choices"]


def streamed(url: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream, joined."""
    joined = [
        {"token_ids": [], "text": "", "logprobs": {"token_logprobs": [], "text_offset": []}}
        for _ in range(asked["n"])
    ]
    for event in events(f"{url}/v1/completions", asked):
        assert "error" not in event
        for part in event["choices"]:
            choice = joined[part["index"]]
            assert "finish_reason" not in choice, "something comes after the end"
            choice["token_ids"] += part["token_ids"]
            choice["text"] += part["text"]
            for name, told in choice["logprobs"].items():
                told += part["logprobs"][name]
            if part["finish_reason"] is not None:
                choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return joined


def leave(url: str, asked: dict[str, Any], after_bytes: int) -> None:
    """A stream that is left after some bytes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    body = json.dumps(asked | {"stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read(after_bytes)
    connection.close()


def same(choice: dict[str, Any], want: tuple[list[int], str, int | str | None]) -> None:
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == want
    assert len(choice["logprobs"]["token_logprobs"]) == len(want[0])


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_a_mix_is_answered_as_each_alone(model: Path, weights: str) -> None:
    exact = weights == "fp32"  # in 16 bits another batch can tip a draw
    served, reference = (engine_of(model, weights=weights, exact=exact) for _ in range(2))
    with serving(served, tokenizer=served.tokenizer) as url, ThreadPoolExecutor(12) as pool:
        seeds = range(60)
        jobs = []
        for seed in seeds:
            jobs.append(pool.submit(streamed if seed % 2 else whole, url, mix(seed)))
            jobs.append(pool.submit(leave, url, mix(1000 + seed) | {"max_tokens": 100}, seed * 40))
        answers = [job.result(120) for job in jobs][::2]
        for seed, choices in zip(seeds, answers, strict=True):
            if exact:
                for choice, want in zip(choices, alone(reference, mix(seed)), strict=True):
                    same(choice, want)
            again = (whole if seed % 2 else streamed)(url, mix(seed))
            for choice, other in zip(choices, again, strict=True):
                if choice["token_ids"] == other["token_ids"]:
                    assert choice["text"] == other["text"]
                    offsets = [one["logprobs"]["text_offset"] for one in (choice, other)]
                    assert offsets[0] == offsets[1]
        quiet(served)


def quiet(engine: Engine) -> None:
    """Nothing is left in the engine: no row, no page."""
    end = time.monotonic() + 60
    while engine.stats().running + engine.stats().waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.pool.num_free == engine.pool.num_pages


@pytest.fixture(scope="module")
def slow(model: Path) -> Iterator[tuple[str, Moody]]:
    engine, tokens = Moody(engine_of(model)), Credentials(admin=ADMIN)
    with serving(engine, tokenizer=engine.tokenizer, tokens=tokens) as url:
        yield url, engine


def begun(engine: Moody, rows: int) -> None:
    """Wait until so many rows decode, each with a token at least."""
    assert eventually(lambda: engine.stats().running == rows)
    drawn = engine.stats().tokens
    assert eventually(lambda: engine.stats().tokens >= drawn + rows)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause_changes_no_answer_but_those_that_it_ends(
    slow: tuple[str, Moody], model: Path, mode: str
) -> None:
    asked, (url, engine) = mix(7) | {"max_tokens": 60, "n": 2, "ignore_eos": True}, slow
    asked.pop("stop", None), asked.pop("stop_token_ids", None)
    want = alone(engine_of(model), asked)
    with ThreadPoolExecutor(3) as pool:
        engine.slow_s = 0.1  # else they may end before the pause
        answers = [pool.submit(one, url, asked) for one in (whole, streamed)]
        begun(engine, 4)
        if mode == "wait":
            engine.slow_s = 0.0  # it takes as long as they do
        assert post(f"{url}/pause?mode={mode}", {}, ADMIN)[0] == 200
        engine.slow_s = 0.0
        late = pool.submit(whole, url, asked)
        time.sleep(0.1)
        if mode == "keep":
            assert not any(answer.done() for answer in answers)
        assert not late.done()
        assert post(f"{url}/resume", {}, ADMIN)[0] == 200
        for answer in (*answers, late):
            for choice, one in zip(answer.result(30), want, strict=True):
                if mode != "abort" or answer is late:
                    same(choice, one)
                    continue
                assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
                drawn = len(choice["token_ids"])
                assert 0 < drawn < 60 and choice["token_ids"] == one[0][:drawn]


@pytest.mark.slow
def test_an_answer_does_not_wait_for_all_prompts_that_are_scored(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    begun, asked = threading.Event(), threading.Event()
    score, step, submit = engine.score_top, engine.step, EngineThread.submit
    scored, answered = 0, []

    def slow(*args: Any) -> Any:
        nonlocal scored
        scored += 1
        begun.set()
        assert asked.wait(30)
        time.sleep(0.02)
        return score(*args)

    def stepped(*told: Any) -> Any:
        ended = step(*told)
        answered.extend(scored for _ in ended)
        return ended

    async def submitted(self: EngineThread, request: Request, **options: Any) -> Any:
        asked.set()
        return await submit(self, request, **options)

    engine.score_top, engine.step = slow, stepped  # type: ignore[method-assign]
    monkeypatch.setattr(EngineThread, "submit", submitted)
    with serving(engine, tokenizer=engine.tokenizer) as url, ThreadPoolExecutor(1) as pool:
        many = {"prompt": [[70, 71, i] for i in range(5, 105)], "max_tokens": 0}
        all_of_them = pool.submit(whole, url, many | {"prompt_logprobs": 0})
        assert begun.wait(30)
        whole(url, {"prompt": "b", "max_tokens": 3})
        assert len(all_of_them.result(60)) == 100 == scored
    assert answered[0] < 100


class Renewed:
    """An engine that gets new weights after some steps, as version 1."""

    def __init__(self, engine: Engine, other: Path, after: int) -> None:
        self.engine = engine
        self.other = hf.load(other)
        self.left = after

    def step(self, meanwhile: Any = lambda: None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.engine.update_weights(WeightUpdate.local(self.other, 1))
        return self.engine.step(meanwhile)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.slow
def test_an_update_on_the_way_is_told(model: Path) -> None:
    """Which tokens are whose, whole and streamed, also as vLLM says it."""
    for stream in (False, True):
        engine = Renewed(engine_of(model), model, 10)
        with serving(engine, tokenizer=engine.tokenizer) as url:
            params = {"max_tokens": 30, "ignore_eos": True, "logprobs": 0}
            asked = {"token_ids": [70, 71], "sampling_params": params, "return_token_ids": True}
            if stream:
                *parts, last = events(f"{url}/inference/v1/generate", asked)
                assert sum(len(part["choices"][0]["token_ids"]) for part in parts) == 30
                (source,) = last["lowroll"]
            else:
                _, tree = post(f"{url}/inference/v1/generate", asked)
                (choice,) = tree["choices"]
                source = choice["lowroll"]
            spans = source["behavior"]["policy"]
            assert [span["version"] for span in spans] == [0, 1] and 0 < spans[1]["start"] < 30
            if not stream:
                assert choice["weight_versions"] == [
                    {"version": "0", "start": 0, "end": spans[1]["start"]},
                    {"version": "1", "start": spans[1]["start"], "end": 30},
                ]


@pytest.mark.slow
def test_a_client_that_reads_nothing_holds_nobody_up(model: Path) -> None:
    """The engine draws on, and who reads gets answers; the slow one gets all in the end."""
    engine = engine_of(model)
    with serving(engine, tokenizer=engine.tokenizer) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        asked = {"prompt": "a", "max_tokens": 200, "n": 16, "ignore_eos": True, "stream": True}
        asked |= {"logprobs": 20, "return_token_ids": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        began = time.monotonic()
        done = threading.Event()

        def good() -> None:
            for seed in range(10):
                whole(url, {"prompt": "b", "max_tokens": 10, "seed": seed})
            done.set()

        threading.Thread(target=good, daemon=True).start()
        assert done.wait(30), "others wait for a client that reads nothing"
        while engine.stats().running:
            assert time.monotonic() - began < 60
            time.sleep(0.01)
        said = answer.read().decode().split("\n\n")
        connection.close()
        assert said[-2] == "data: [DONE]"
        ids = [0] * 16
        for event in said[:-2]:
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                ids[choice["index"]] += len(choice["token_ids"])
        assert ids == [200] * 16


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_dropped_in_the_end(model: Path) -> None:
    engine = engine_of(model)
    with serving(engine, tokenizer=engine.tokenizer, limits=ServerLimits(write_s=0.3)) as url:
        place = urlsplit(url)
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.settimeout(30)
            slow.connect((place.hostname, place.port))
            asked = {"max_tokens": 240, "n": 16, "ignore_eos": True, "stream": True}
            asked |= {"messages": [{"role": "user", "content": "a"}]}  # more than sockets hold
            body = json.dumps(asked | {"logprobs": True, "top_logprobs": 20}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            said = slow.recv(100)
            assert b"200 OK" in said
            quiet(engine)
            time.sleep(1)
            with contextlib.suppress(ConnectionResetError):
                while part := slow.recv(1 << 20):
                    said += part
            assert b"[DONE]" not in said
        assert whole(url, {"prompt": "b", "max_tokens": 3})[0]["finish_reason"] == "length"
