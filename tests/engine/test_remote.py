"""The engine at the end of a wire: against a fake vLLM that lies, stalls and dies, and against
lowroll's own server, bit for bit. A real vLLM is asked in `tests/parity/foreign`."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowroll
from lowroll import Engine
from lowroll.engine.base import Capabilities
from lowroll.engine.remote import (
    EngineLost,
    EnginePool,
    NotArrived,
    ServerError,
    VllmEngine,
    connect,
)
from lowroll.engine.remote.http_client import HttpClient
from lowroll.engine.remote.lowroll_server import LowrollServer
from lowroll.engine.remote.pool import TURN
from lowroll.engine.remote.protocol import ArrivingSample, pack
from lowroll.engine.remote.verify import Verifier
from lowroll.engine.remote.vllm import nccl as vllm_nccl
from lowroll.engine.remote.vllm import process as vllm_process
from lowroll.engine.remote.vllm.process import VllmProcess
from lowroll.engine.request import noise_key
from lowroll.kv.policy.table import make
from lowroll.model import hf, lora
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.parallel.store import tcp_store
from lowroll.types import BehaviorTag, Group, PolicySpan, Request
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.fake_vllm import FakeVllm, Tree, honest
from tests.fixtures.http import serving

V = 64
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": V,
    "eos_token_id": 1,
}
ASKED = Request([5, 6, 7], n=2, max_tokens=4, seed=3, id="a")


def tiny(seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(spec_from_config(CONFIG | changes))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(tiny(), tmp_path_factory.mktemp("models") / "dense")


@pytest.fixture
def fake(folder: Path) -> Iterator[FakeVllm]:
    with FakeVllm(str(folder), V) as fake:
        yield fake


def attached(fake: FakeVllm, **options: Any) -> VllmEngine:
    return VllmEngine.attach(fake.url, **{"request_s": 5.0, **options})


REAPER = """
import os, socket, sys, time
open(os.environ["VLLM_RPC_BASE_PATH"] + "/left-behind", "w").close()
time.sleep(1.0)
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[-1])
    listening.listen()
    sys.stdin.read()
"""


def test_a_start_is_told_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it leaves lies in its folder, which goes with it."""
    assert vllm_process.REAPER.is_file()
    (tmp_path / "reaper.py").write_text(REAPER)
    monkeypatch.setattr("lowroll.engine.remote.vllm.process.REAPER", tmp_path / "reaper.py")
    monkeypatch.setattr("lowroll.engine.remote.vllm.process.TELLING", 0.2)
    told: list[str] = []
    process = VllmProcess([], log=tmp_path / "log", python=sys.executable)
    try:
        process.wait_ready(60, told.append)
        assert (process.folder / "left-behind").is_file()
    finally:
        process.close()
    assert not process.folder.exists()
    assert str(tmp_path / "log") in told[0] and len(told) >= 3
    assert re.fullmatch("vLLM is starting: [0-9]+ s of 60 at most", told[1])
    assert "answers after" in told[-1]


# -- rollouts --------------------------------------------------------------------------------------


def test_a_request_becomes_a_group(fake: FakeVllm) -> None:
    asked = Request(
        [5, 6], n=3, max_tokens=4, temperature=0.5, top_k=7, stop_ids=(9,), seed=3, id="a"
    )
    with attached(fake) as engine:
        (group,) = engine.generate([asked])
    (body,) = fake.bodies
    assert body["prompt"] == [5, 6] and body["stop_token_ids"] == [1, 9] and body["ignore_eos"]
    assert (body["top_k"], body["top_p"], body["min_p"], body["repetition_penalty"]) == (7, 1, 0, 1)
    assert body["seed"] == noise_key(asked, 0) % 2**62
    expected = honest(body, V)["choices"]
    assert [r.token_ids for r in group.rollouts] == [c["token_ids"] for c in expected]
    assert [r.logprobs for r in group.rollouts] == [
        c["logprobs"]["token_logprobs"] for c in expected
    ]
    tags = [r.behavior for r in group.rollouts]
    assert [(t.sample, t.seed, t.request_id, t.policy[0].version) for t in tags] == [
        (i, 3, "a", 0) for i in range(3)
    ]
    assert tags[0].sampler["top_k"] == 7 and tags[0].weights == "fp32"


def test_seeds_of_two_ids_differ_as_in_the_engine_of_this_process(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        engine.generate([ASKED, replace(ASKED, id="b"), replace(ASKED, ignore_eos=True)])
    seeds = {body["seed"] for body in fake.bodies}
    assert len(seeds) == 2
    assert sorted(body["stop_token_ids"] for body in fake.bodies) == [[], [1], [1]]


def test_add_step_and_progress(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        first = engine.add(ASKED)
        seen: list[tuple[int, int]] = []
        engine.generate(
            [replace(ASKED, id=str(i)) for i in range(5)], lambda *now: seen.append(now)
        )
        assert seen[-1] == (5, 5)
        ended: list[tuple[int, Group]] = []
        while engine.has_work:
            ended += engine.step()
        assert [handle for handle, _ in ended] == [first]
        assert engine.so_far(first) == [] and not engine.abort(first)


def test_a_step_without_work_does_not_wait(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        began = time.monotonic()
        assert engine.step() == []
        assert time.monotonic() - began < TURN


def test_no_more_requests_are_open_than_allowed(fake: FakeVllm) -> None:
    open_now, most = 0, 0

    async def count() -> None:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.02)
        open_now -= 1

    fake.before = count
    with attached(fake, concurrency=3) as engine:
        engine.generate([replace(ASKED, id=str(i)) for i in range(12)])
    assert most == 3


def bad_tokens(answer: Tree) -> Tree:
    answer["choices"][1]["token_ids"][2] = V
    return answer


def of_choice(**changes: Any) -> Any:
    def change(answer: Tree) -> Tree:
        answer["choices"][1] |= changes
        return answer

    return change


def of_logprobs(values: Any) -> Any:
    return of_choice(logprobs={"token_logprobs": values, "top_logprobs": []})


LIES = {
    "another policy": (lambda a: a | {"model": "pol-v9"}, "policy was asked for, and 'pol-v9'"),
    "a choice missing": (lambda a: a | {"choices": a["choices"][:1]}, "choice 1 of 2 has not come"),
    "a choice twice": (lambda a: a | {"choices": a["choices"] * 2}, "goes on after its end"),
    "a third choice": (of_choice(index=2), "index 2; n is 2"),
    "a boolean index": (of_choice(index=True), "index True"),
    "an id beyond the vocabulary": (bad_tokens, "token ids of 0..63"),
    "ids as text": (of_choice(token_ids=["a"] * 4), "token ids of 0..63"),
    "fewer ids than log-probs": (of_choice(token_ids=[1, 2]), "2 token ids and 4 log-probs"),
    "no log-probs": (of_choice(logprobs=None), "4 token ids and 0 log-probs"),
    "fewer log-probs": (of_logprobs([-1.0]), "4 token ids and 1 log-probs"),
    "a NaN": (lambda a: json.dumps(of_logprobs([-1, math.nan, -1, -1])(a)).encode(), "nan is no"),
    "an infinity": (
        lambda a: json.dumps(of_logprobs([-1, -math.inf, -1, -1])(a)).encode(),
        "-inf is no log-prob",
    ),
    "a probability over 1": (of_logprobs([-1, 0.5, -1, -1]), "0.5 is no log-prob"),
    "a log-prob as text": (of_logprobs([-1, "-1", -1, -1]), "'-1' is no log-prob"),
    "tokens that are not packed": (of_choice(packed={"token_ids": "?"}), "are no packed tokens"),
    "a packed id below 0": (of_choice(packed=pack([1, 2, -1, 3], [-1.0] * 4)), "ids of 0..63"),
    "a packed infinity": (of_choice(packed=pack([1], [-math.inf])), "-inf is no log-prob"),
    "another prompt": (of_choice(prompt_token_ids=[5, 6]), "answers another prompt of 2 tokens"),
    "an unknown end": (of_choice(finish_reason="tired"), "ended with 'tired'"),
    "no end": (of_choice(finish_reason=None), "has not come, or not ended"),
    "a stop that is none": (of_choice(finish_reason="stop"), "at no token that ends a response"),
    "too short for its length": (
        of_choice(token_ids=[1], logprobs={"token_logprobs": [-1.0]}),
        "ended by its length with 1 tokens",
    ),
    "too long": (
        of_choice(token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5}),
        "more than max_tokens 4",
    ),
    "no choices": (lambda a: {"model": "policy"}, "no list of choices"),
    "a list": (lambda a: [a], "no list of choices"),
    "half a JSON": (lambda a: json.dumps(a).encode()[:-30], "is no JSON"),
    "deep JSON": (lambda a: b"[" * 60_000, "is no JSON"),
    "a page": (lambda a: b"<html>", "is no JSON"),
    "huge": (lambda a: a | {"pad": "x" * 1_000_000}, "longer than"),
    "refused": (lambda a: 400, "answered 400: said the test"),
    "broken": (lambda a: 500, "answered 500: said the test"),
    "moved": (lambda a: 307, "answered 307"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.slow
def test_a_lie_is_an_error_that_names_the_request(fake: FakeVllm, lie: str) -> None:
    change, message = LIES[lie]
    fake.change = lambda answer: change(answer)
    with attached(fake) as engine:
        with pytest.raises(ServerError, match="request a: ") as told:
            engine.generate([ASKED])
        assert message in str(told.value)
        fake.change = lambda answer: answer
        (group,) = engine.generate([ASKED])  # and the next request is answered
        assert len(group.rollouts) == 2


def test_top_logprobs_are_read_by_id_though_texts_collide(fake: FakeVllm) -> None:
    def change(answer: Tree) -> Tree:
        for choice in answer["choices"]:
            drawn = [
                (t, p)
                for t, p in zip(
                    choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True
                )
            ]
            choice["logprobs"]["top_logprobs"] = [
                {f"token_id:{t}": p, "token_id:60": -0.1, "token_id:61": -0.2} for t, p in drawn
            ]
        return answer

    fake.change = change
    with attached(fake) as engine:
        (group,) = engine.generate([replace(ASKED, top_logprobs=2)])
        assert group.rollouts[0].top_logprobs == [[(60, -0.1), (61, -0.2)]] * 4
        fake.change = lambda a: of_logprobs([-1.0] * 4)(a)
        with pytest.raises(ServerError, match="2 top_logprobs a token"):
            engine.generate([replace(ASKED, top_logprobs=2)])


def test_fewer_top_logprobs_are_all_that_can_be_drawn(fake: FakeVllm) -> None:
    half = math.log(0.5)
    likeliest = {"token_id:60": half, "token_id:61": half, "token_id:62": -9999.0}

    def change(answer: Tree) -> Tree:
        for choice in answer["choices"]:
            choice["logprobs"]["top_logprobs"] = [likeliest] * len(choice["token_ids"])
        return answer

    fake.change = change
    with attached(fake) as engine:
        (group,) = engine.generate([replace(ASKED, top_logprobs=3)])
        assert group.rollouts[0].top_logprobs == [[(60, half), (61, half)]] * 4
        likeliest["token_id:61"] -= 0.1  # something else can be drawn, and is not told
        with pytest.raises(ServerError, match="3 top_logprobs a token"):
            engine.generate([replace(ASKED, top_logprobs=3)])


# -- the wire --------------------------------------------------------------------------------------


def test_a_dropped_connection_is_tried_again_with_the_same_seed(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        fake.dropped = 2
        (group,) = engine.generate([ASKED])
    assert len(group.rollouts) == 2
    assert len(fake.bodies) == 3 and fake.bodies[0] == fake.bodies[1] == fake.bodies[2]


@pytest.mark.slow
def test_a_connection_that_stays_dropped_is_an_error(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        fake.dropped = 99
        with pytest.raises(EngineLost, match="request a: the connection to .* failed"):
            engine.generate([ASKED])
    assert len(fake.bodies) == 3


def test_a_busy_server_is_asked_again(fake: FakeVllm) -> None:
    busy = iter([503, 429])
    fake.change = lambda answer: next(busy, answer)
    with attached(fake) as engine:
        assert engine.generate([ASKED])
    assert len(fake.bodies) == 3


def test_a_stream_that_was_read_is_not_asked_again(fake: FakeVllm) -> None:
    with attached(fake, stream=True) as engine:
        fake.dropped = 1
        with pytest.raises(EngineLost, match="request a"):
            engine.generate([ASKED])
    assert len(fake.bodies) == 1


def test_a_slow_answer_ends_at_the_deadline_and_closes_its_connection(fake: FakeVllm) -> None:
    async def slow() -> None:
        await asyncio.sleep(30)

    fake.before = slow
    with attached(fake, request_s=0.3) as engine:
        begun = time.monotonic()
        with pytest.raises(ServerError, match="request a: no answer from .* within 0.3 s"):
            engine.generate([ASKED])
        assert time.monotonic() - begun < 25
        wait_for(lambda: fake.closed == 1)


def test_a_failure_gives_up_all_that_is_in_flight(fake: FakeVllm) -> None:
    first = iter([0.0])

    async def slow() -> None:
        await asyncio.sleep(next(first, 30.0))

    fake.before, fake.change = slow, lambda answer: 400
    with attached(fake) as engine:
        with pytest.raises(ServerError, match="answered 400"):
            engine.generate([replace(ASKED, id=str(i)) for i in range(4)])
        assert not engine.has_work
        wait_for(lambda: fake.closed == len(fake.bodies) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_closes_the_connection_and_keeps_what_was_read(
    fake: FakeVllm, stream: bool
) -> None:
    async def slow() -> None:
        if not stream:
            await asyncio.sleep(30)

    fake.before, fake.pause = slow, 0.25
    with attached(fake, stream=stream) as engine:
        handle = engine.add(replace(ASKED, max_tokens=40))
        if stream:
            wait_for(lambda: len(engine.so_far(handle)[1].token_ids) >= 2)
        wait_for(lambda: len(fake.bodies) == 1)
        assert engine.abort(handle) and not engine.abort(handle)
        ((ended, group),) = engine.step()
        wait_for(lambda: fake.closed == 1)
    assert ended == handle and [r.finish_reason for r in group.rollouts] == ["abort"] * 2
    whole = honest(fake.bodies[0], V)["choices"]
    for rollout, choice in zip(group.rollouts, whole, strict=True):
        count = len(rollout.token_ids)
        assert count == len(rollout.logprobs) < 40 and (count >= 1) is stream
        assert rollout.token_ids == choice["token_ids"][:count]


@pytest.mark.parametrize("tail", ["/", "/v1", "/v1/"])
def test_an_address_may_be_written_as_for_openais_clients(
    fake: FakeVllm, folder: Path, tail: str
) -> None:
    with VllmEngine.attach(fake.url + tail, folder, request_s=5.0) as engine:
        assert engine.generate([ASKED])[0].rollouts


def test_a_stream_gives_the_same_group(fake: FakeVllm) -> None:
    with attached(fake) as engine, attached(fake, stream=True) as streamed:
        assert engine.generate([ASKED]) == streamed.generate([ASKED])


def test_a_progress_that_raises_ends_the_call(fake: FakeVllm) -> None:
    async def slow() -> None:
        await asyncio.sleep(30)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    fake.before = slow
    with attached(fake) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([ASKED], stop)
        assert not engine.has_work


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "unix:", "http://me:word@host", ""])
def test_an_odd_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url: "):
        HttpClient(url)


@pytest.mark.slow
def test_nobody_listens(folder: Path) -> None:
    with pytest.raises(EngineLost, match="version of vLLM: the connection to .* failed"):
        VllmEngine.attach("http://127.0.0.1:9", folder)


# -- the probe -------------------------------------------------------------------------------------

LACKS = {
    "old": ({"version": "0.19.2"}, {}, "older than 0.20"),
    "lowroll": ({"server": {"server": "lowroll"}}, {}, "url: a lowroll server answers there"),
    "no version": ({"version": "main"}, {}, "is no version of vLLM"),
    "no token ids": (
        {"fields": ["prompt", "seed"]},
        {},
        "does not take logprobs, return_token_ids",
    ),
    "no reload": ({"paths": set()}, {}, "does not serve /collective_rpc, /pause"),
    "no adapters": ({"paths": set()}, {"lora_rank": 8}, "does not serve /v1/load_lora_adapter"),
    "no transfer": (
        {"paths": {"/collective_rpc", "/pause", "/resume", "/reset_prefix_cache"}},
        {"way": "nccl"},
        "/init_weight_transfer_engine",
    ),
    "transfer on a CPU": ({"device": "cpu"}, {"way": "nccl"}, "between GPUs"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_the_probe_refuses_by_name(fake: FakeVllm, lack: str) -> None:
    changes, options, message = LACKS[lack]
    vars(fake).update(changes)
    with pytest.raises(ValueError, match=message):
        attached(fake, **options)


def test_raw_logprobs_are_seen(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        assert engine.capabilities.exact_logprobs
    fake.processed = False
    with attached(fake) as engine:
        assert not engine.capabilities.exact_logprobs


def test_tied_embeddings_on_a_cpu_are_refused(fake: FakeVllm, tmp_path: Path) -> None:
    tied = hf.save(tiny(tie_word_embeddings=True), tmp_path / "tied")
    with attached(fake, folder=tied):
        pass
    fake.device = "cpu"
    with pytest.raises(ValueError, match="keeps the old head of a model with tied embeddings"):
        attached(fake, folder=tied)
    with attached(fake, folder=tied, lora_rank=4):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_strings": ("a",)}, "stop_strings"),
        ({"temperature": 0.005}, "temperature: vLLM draws at 0.01"),
        ({"temperature": 0, "n": 2}, "n: vLLM draws one greedy sample"),
        ({"temperature": 2.5}, "temperature: vLLM takes 2 at most"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p: vLLM cuts by it before top_p"),
        ({"max_tokens": 62}, "max_tokens: 3 prompt tokens"),
        ({"prompt_ids": [64]}, r"prompt_ids\[0\]"),
    ],
)
def test_what_vllm_does_otherwise_is_refused_before_anything_is_sent(
    fake: FakeVllm, change: dict[str, Any], message: str
) -> None:
    with attached(fake) as engine:
        with pytest.raises(ValueError, match=rf"requests\[1\]\.{message}"):
            engine.generate([ASKED, replace(ASKED, **change)])
    assert fake.bodies == []


# -- weights ---------------------------------------------------------------------------------------


def adapted() -> Transformer:
    model = lora.attach(tiny(), 4, 8.0)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p.copy_(torch.randn(p.shape) * 0.1)
    return model


def test_an_adapter_gets_a_new_name_and_the_old_one_goes_after_its_requests(
    fake: FakeVllm, tmp_path: Path
) -> None:
    gate = threading.Event()

    async def wait() -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)

    fake.before = wait
    model = adapted()
    with attached(fake, lora_rank=4, exchange=tmp_path, verify=lambda ids: [-1.0] * 23) as engine:
        tag = engine.update_weights(WeightUpdate.local(model, 1))
        assert tag.policy[0].version == 1 and len(tag.policy[0].digest) == 32
        old = engine.add(ASKED)
        wait_for(lambda: len(fake.bodies) == 1)
        engine.update_weights(WeightUpdate.local(model, 2).as_stream())
        new = engine.add(ASKED)
        wait_for(lambda: len(fake.bodies) == 2)
        assert [body["model"] for body in fake.bodies] == ["pol-v1", "pol-v2"]
        assert "/v1/unload_lora_adapter" not in dict(fake.orders)
        gate.set()
        groups: dict[int, Group] = {}
        while engine.has_work:
            groups |= dict(engine.step())
        assert groups[old].rollouts[0].behavior.policy[0].version == 1
        assert groups[new].rollouts[0].behavior.policy[0].version == 2
        loaded = {body["lora_path"] for path, body in fake.orders if "/load_" in path}
        assert all(lora.load(tiny(), Path(path)) for path in loaded)
        engine.update_weights(WeightUpdate.local(model, 2))
        gone = [body["lora_name"] for path, body in fake.orders if "unload" in path]
        assert gone == ["pol-v1", "pol-v2"]
        names = [body["lora_name"] for path, body in fake.orders if "/load_" in path]
        assert names == ["pol-v1", "pol-v2", "pol-v2.1"]
    assert list(tmp_path.iterdir()) == []


def test_a_full_update_is_laid_down_whole_between_a_pause_and_its_end(
    fake: FakeVllm, tmp_path: Path
) -> None:
    with attached(fake, exchange=tmp_path, verify=lambda ids: [-1.0] * 23) as engine:
        engine.update_weights(WeightUpdate.local(tiny(1), 7))
    paths = [path for path, _ in fake.orders]
    assert paths == ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert fake.orders[1][1]["method"] == "reload_weights"
    assert list(tmp_path.iterdir()) == []


def test_a_refused_update_ends_with_the_servers_reason(fake: FakeVllm) -> None:
    fake.refused["/collective_rpc"] = 500
    with attached(fake) as engine:
        with pytest.raises(ServerError, match="reloading the weights of version v7-1: .* 500"):
            engine.update_weights(WeightUpdate.local(tiny(1), 7))
        assert engine.behavior.policy[0].version == 0


def broken(update: WeightUpdate, name: str, tensor: torch.Tensor | None) -> WeightUpdate:
    tensors = dict(update.tensors())
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return replace(update, tensors=tensors.items, master=None)


def test_an_update_that_does_not_fit_is_refused_before_vllm_hears_of_it(fake: FakeVllm) -> None:
    update = WeightUpdate.local(tiny(1), 1)
    head = "lm_head.weight"
    cases = [
        (broken(update, head, None), "missing tensors: lm_head.weight"),
        (broken(update, head, torch.zeros(3, 3)), "shape"),
        (broken(update, "extra", torch.zeros(3)), "no such tensor"),
        (broken(update, head, torch.full((V, 32), math.nan)), "non-finite"),
        (replace(update, master=None, digest="0" * 32), "digest: 0000"),
        (replace(update, noise=Noise(1, 0.1)), "noise"),
        (replace(update, input_scale=2.0), "input_scale"),
        (WeightUpdate.local(adapted(), 1), "takes updates of kind full"),
    ]
    with attached(fake) as engine:
        for wrong, message in cases:
            with pytest.raises(ValueError, match=message):
                engine.update_weights(wrong)
    assert fake.orders == []


def test_a_stale_policy_is_seen_by_its_distance(fake: FakeVllm) -> None:
    with attached(fake, lora_rank=4, verify=lambda ids: [-2.0] * 23, bound=0.1) as engine:
        with pytest.raises(NotArrived, match="version 5: vLLM's log-probs are 1 nats from"):
            engine.update_weights(WeightUpdate.local(adapted(), 5))


def test_an_update_that_never_arrives_is_seen_by_what_does_not_move() -> None:
    base = [-3.0 + 0.1 * i for i in range(23)]
    moved = [b + 0.02 * (-1) ** i for i, b in enumerate(base)]
    near = [b + 1e-4 for b in base]
    check = Verifier(V, 64, 0.5)
    check.check(base, near, 1)
    check.check(moved, [b + 1e-4 for b in moved], 2)
    stale = Verifier(V, 64, 0.5)
    stale.check(base, near, 1)
    with pytest.raises(NotArrived, match="version 2: .* older weights"):
        stale.check(moved, near, 2)


def test_small_steps_that_never_arrive_add_up() -> None:
    noise = [0.01 * (-1) ** (i // 2) for i in range(23)]  # a dtype's rounding
    check, base = Verifier(V, 64, 0.5), [-3.0] * 23

    def learner(version: int) -> list[float]:
        return [b + 0.005 * version * (-1) ** i for i, b in enumerate(base)]

    engine = [b + n for b, n in zip(base, noise, strict=True)]
    with pytest.raises(NotArrived, match="older weights") as told:
        for version in range(50):
            check.check(learner(version), engine, version)
    assert 8 <= int(str(told.value).split("version ")[1].split(":")[0]) <= 30
    fresh = Verifier(V, 64, 0.5)
    for version in range(50):
        now = [x + n for x, n in zip(learner(version), noise, strict=True)]
        fresh.check(learner(version), now, version)


def test_a_nan_has_not_arrived() -> None:
    with pytest.raises(NotArrived):
        Verifier(V, 64, 0.5).check([-1.0] * 23, [math.nan] * 23, 1)


class Peer:
    """A communicator without a GPU."""

    hangs = False

    def __init__(self, world: int, device: torch.device) -> None:
        self.world, self.unique_id, self.aborted = world, bytes(range(128)), False

    def join(self) -> None:
        while self.hangs and not self.aborted:
            time.sleep(0.01)

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("version", "local"), [("0.24.0", True), ("0.32.0", False)])
def test_workers_are_told_where_to_meet(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, version: str, local: bool
) -> None:
    monkeypatch.setattr(vllm_nccl, "Communicator", Peer)
    fake.version = version
    with attached(fake) as engine:
        meeting = vllm_nccl.NcclTransfer(engine.begin, engine.found, 5.0, local)
        assert meeting.meet(torch.device("cpu")).world == 3
        assert meeting.meet(torch.device("cpu")) and len(fake.orders) == 1
        told = fake.orders[0][1]["init_info"]
        assert (told.pop("rank_offset"), told.pop("world_size")) == (1, 3)
        if local:
            store = tcp_store(told.pop("master_address"), told.pop("master_port"), None, 5.0)
            assert not told and bytes(range(128)) in store.get(vllm_nccl.STORED_ID)
        else:
            assert base64.b64decode(told.pop("nccl_unique_id_b64")) == bytes(range(128))
            assert not told
        meeting.close()


def test_an_old_vllm_elsewhere_gets_no_store(fake: FakeVllm) -> None:
    with attached(fake) as engine, pytest.raises(ValueError, match="store to the network"):
        vllm_nccl.NcclTransfer(engine.begin, engine.found, 5.0, local=False)


@pytest.mark.parametrize("refused", [False, True])
def test_workers_that_do_not_come_are_not_waited_for(
    fake: FakeVllm, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    monkeypatch.setattr(vllm_nccl, "Communicator", Peer)
    monkeypatch.setattr(Peer, "hangs", True)
    fake.version = "0.32.0"
    message = "not done within 0.5 s"
    if refused:
        fake.refused["/init_weight_transfer_engine"] = 500
        message = "answered 500"
    with attached(fake) as engine:
        meeting = vllm_nccl.NcclTransfer(engine.begin, engine.found, 0.5, True)
        with pytest.raises(ServerError, match=message):
            meeting.meet(torch.device("cpu"))
        monkeypatch.setattr(Peer, "hangs", False)
        fake.refused.clear()
        assert meeting.meet(torch.device("cpu")).world == 3, "it can be tried again"
        meeting.close()


def test_weights_of_a_cpu_do_not_go_between_gpus(fake: FakeVllm) -> None:
    with pytest.raises(ValueError, match="store to the network"):
        attached(fake, way="nccl")
    fake.version = "0.33.0"
    with attached(fake, way="nccl") as engine:
        with pytest.raises(ValueError, match="nccl sends from one CUDA device"):
            engine.update_weights(WeightUpdate.local(tiny(), 1))
    assert fake.orders == []


def test_pause_resume_stats_and_release(fake: FakeVllm) -> None:
    with attached(fake) as engine:
        engine.pause("abort")
        engine.resume()
        engine.reset_prefix_cache()
        assert engine.stats().tokens == 42 and engine.linear_weights() == {}
        engine.release()
    assert [p for p, _ in fake.orders] == ["/pause?mode=abort", "/resume", "/reset_prefix_cache"]


# -- lowroll's own server --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def native(folder: Path) -> Engine:
    return engine_of(folder)


def wait_for(done: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def _stated() -> Tree:
    able = Capabilities(128, frozenset(), True, True, True, True, frozenset())
    return {
        "behavior": asdict(BehaviorTag((PolicySpan(0, ""),), "fp32")),
        "capabilities": asdict(able) | {"kv": {"policy": "dense"}},
    }


def _met(stated: Tree) -> LowrollServer:
    listed = {"data": [{"id": "m", "lowroll": stated}]}
    return LowrollServer(HttpClient("http://there"), listed, None, None)


@pytest.mark.parametrize("where", ["behavior", "capabilities"])
def test_a_server_that_says_no_numbers_is_none_of_ours(where: str) -> None:
    stated = _stated()
    if where == "behavior":
        stated["behavior"]["policy"][0]["version"] = "newest"
    else:
        stated["capabilities"]["context_length"] = "long"

    with pytest.raises(ServerError, match="is no server of lowroll's"):
        _met(stated)


def test_an_origin_without_numbers_names_its_request() -> None:
    tag = BehaviorTag((PolicySpan(0, ""),), "fp32")
    one = ArrivingSample(stated={"behavior": {**asdict(tag), "sampler": {"temperature": "hot"}}})
    with pytest.raises(ServerError, match="request a: no behavior of a sample"):
        _met(_stated()).tag(ASKED, tag, 0, one)


@pytest.mark.parametrize("lost", ["sampler", "start"])
def test_an_origin_that_leaves_something_out_names_its_request(lost: str) -> None:
    """What is made here has defaults for these; a server states them."""
    tag = BehaviorTag((PolicySpan(0, ""),), "fp32")
    stated = asdict(replace(tag, request_id=ASKED.id, seed=ASKED.seed))
    one = ArrivingSample(stated={"behavior": stated})
    (stated if lost == "sampler" else stated["policy"][0]).pop(lost)
    with pytest.raises(ServerError, match="request a: no behavior of a sample"):
        _met(_stated()).tag(ASKED, tag, 0, one)


@pytest.mark.parametrize("lost", ["layers", "heads", "after", "numbers", None])
def test_evictions_are_stated_whole(lost: str | None) -> None:
    """Without one of them a learner would replay a bounded cache as a dense one."""
    stated = {"layers": 1, "heads": 1, "after": [3], "numbers": "AAAA"}
    if lost is None:
        found = _met(_stated()).evictions(ArrivingSample(stated={"evictions": stated}))
        assert found is not None and found.after == (3,)
        return
    del stated[lost]
    with pytest.raises(ServerError, match="evictions: "):
        _met(_stated()).evictions(ArrivingSample(stated={"evictions": stated}))


REQUESTS = [
    Request(prompt(5, 1), n=8, max_tokens=12, seed=3, id="a", temperature=0.7),
    Request(prompt(9, 2), max_tokens=7, seed=2**62, id="", top_k=5, top_p=0.9, top_logprobs=3),
    Request(prompt(4, 3), n=2, max_tokens=20, min_tokens=3, temperature=1.3, min_p=0.05, id="c"),
    Request(prompt(4, 3), n=2, max_tokens=9, temperature=0, repetition_penalty=1.3, id="d"),
    Request(prompt(6, 4), n=3, max_tokens=30, stop_ids=(3, 4, 5, 6, 7, 8), ignore_eos=True),
    Request(prompt(3, 5), n=2, max_tokens=6, top_k=3, top_logprobs=20),  # of which 3 can be drawn
]
REQUESTS = [replace(r, prompt_ids=[t % V for t in r.prompt_ids]) for r in REQUESTS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("token", [None, "a-token-of-many-letters"])
@pytest.mark.slow
def test_the_servers_rollouts_are_the_engines_bit_for_bit(
    native: Engine, folder: Path, stream: bool, token: str | None
) -> None:
    native.reset_prefix_cache()
    expected = [native.generate([request])[0] for request in REQUESTS]
    from lowroll.server.limits import Credentials

    tokens = Credentials() if token is None else Credentials(token)
    with serving(engine_of(folder), tokens=tokens) as url:
        with connect(url, stream=stream, token=token) as engine:
            # alone: which rows share a product, and so its rounding, is a matter of time elsewhere
            assert [engine.generate([request])[0] for request in REQUESTS] == expected
            together = engine.generate(REQUESTS)
            for mine, whole in zip(together, expected, strict=True):
                for a, b in zip(mine.rollouts, whole.rollouts, strict=True):
                    assert (a.token_ids, a.behavior) == (b.token_ids, b.behavior)
                    assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
            able = native.capabilities
            assert replace(engine.capabilities, updates=able.updates, noise=able.noise) == able
            assert engine.server.model == "tiny" and engine.behavior == native.behavior


@pytest.mark.slow
def test_the_servers_scores_are_the_engines(native: Engine, folder: Path) -> None:
    sequences = [[t % V for t in prompt(n, n)] for n in (2, 9, 30)]
    with serving(engine_of(folder)) as url, connect(url) as engine:
        for temperature in (1.0, 0.7):
            ours = native.score(sequences, [1, 1, 1], temperature)
            theirs = engine.score(sequences, [1, 1, 1], temperature)
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        ranked = native.score_top(sequences, [1, 1, 1], 3)
        for a, b in zip(ranked, engine.score_top(sequences, [1, 1, 1], 3), strict=True):
            assert torch.equal(a.top_ids_TK, b.top_ids_TK)
            assert torch.equal(a.top_logprobs_TK, b.top_logprobs_TK)


@pytest.mark.slow
def test_spans_of_an_update_in_flight_come_over_the_wire(folder: Path) -> None:
    inside = engine_of(folder)
    updated = []

    def update(engine: Any) -> None:
        if not updated and any(len(d.token_ids) > 20 for d in engine.so_far(0)):
            updated.append(engine.update_weights(WeightUpdate.local(tiny(1), 1)))

    step = inside.step

    def stepping(*told: Any) -> Any:
        update(inside)
        return step(*told)

    inside.step = stepping  # type: ignore[method-assign]
    with serving(inside) as url, connect(url) as engine:
        (group,) = engine.generate([Request([5, 6], n=2, max_tokens=90, ignore_eos=True, id="x")])
    assert updated
    for rollout in group.rollouts:
        assert [span.version for span in rollout.behavior.policy] == [0, 1]
        start = rollout.behavior.policy[1].start
        assert 20 < start < 90
        ids = [5, 6, *rollout.token_ids]
        ours = lowroll.score(tiny(), [ids], [2])[0][:20]
        assert torch.allclose(ours, torch.tensor(rollout.logprobs[:20]), atol=1e-4)


@pytest.mark.slow
def test_an_abort_ends_the_request_in_the_server(folder: Path) -> None:
    inside = engine_of(folder)
    with serving(inside) as url, connect(url, stream=True) as engine:
        handle = engine.add(Request([5, 6], n=2, max_tokens=120, ignore_eos=True, id="x"))
        wait_for(lambda: all(len(d.token_ids) > 2 for d in engine.so_far(handle)))
        engine.abort(handle)
        ((_, group),) = engine.step()
        wait_for(lambda: inside.stats().running == 0)
    whole = engine_of(folder).generate(
        [Request([5, 6], n=2, max_tokens=120, ignore_eos=True, id="x")]
    )[0]
    for rollout, full in zip(group.rollouts, whole.rollouts, strict=True):
        count = len(rollout.token_ids)
        assert 2 < count < 120 and rollout.finish_reason == "abort"
        assert rollout.token_ids == full.token_ids[:count]
        assert rollout.logprobs == full.logprobs[:count]


@pytest.mark.slow
def test_an_abort_keeps_the_samples_that_had_ended(folder: Path) -> None:
    asked = Request([5, 6], n=8, max_tokens=120, stop_ids=tuple(range(2, 20)), seed=4, id="x")
    whole = engine_of(folder).generate([asked])[0]
    with serving(engine_of(folder)) as url, connect(url, stream=True) as engine:
        handle = engine.add(asked)
        wait_for(lambda: any(d.finish_reason for d in engine.so_far(handle)))
        engine.abort(handle)
        ((_, group),) = engine.step()
    assert {r.finish_reason for r in group.rollouts} >= {"stop", "abort"}
    for rollout, full in zip(group.rollouts, whole.rollouts, strict=True):
        assert rollout.token_ids == full.token_ids[: len(rollout.token_ids)]
        assert rollout.behavior == full.behavior


@pytest.mark.slow
def test_a_servers_policy_has_its_options(folder: Path) -> None:
    kv = make("rkv", budget=6, buffer=3, window=2, kernel=3, mix=0.5)
    with serving(engine_of(folder, kv=kv)) as url, connect(url) as engine:
        assert engine.capabilities.kv == kv


@pytest.mark.slow
def test_connect_names_what_it_finds(fake: FakeVllm, folder: Path) -> None:
    with connect(fake.url) as engine:
        assert type(engine) is EnginePool and engine.capabilities.updates == frozenset()
        assert engine.server.model == "policy" and engine.generate([ASKED])
    with pytest.raises(ValueError, match="serves policy, and not other"):
        connect(fake.url, model="other")
    with serving(engine_of(folder)) as url:
        with pytest.raises(ValueError, match="serves tiny, and not other"):
            connect(url, model="other")
        with connect(url) as plain:
            assert type(plain) is EnginePool
            with pytest.raises(ValueError, match="takes no weights"):
                plain.update_weights(WeightUpdate.local(tiny(), 1))
