"""A real vLLM as the engine: rollouts, log-probs, updates, pauses and deaths. `make vllm`.

One server holds a dense model and takes whole models, one takes adapters, one each holds a folder
in a low-bit format. Bounds are in nats.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.engine.remote import EngineLost, NotArrived, ServerError, VllmEngine, connect
from lowroll.engine.remote.http_client import HttpCall
from lowroll.engine.remote.verify import Verifier
from lowroll.model import hf, lora
from lowroll.model.transformer import Transformer
from lowroll.runs.export import quantize_folder
from lowroll.types import Request
from lowroll.weights.publish import rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.served import SEQUENCES, random_model

PYTHON = os.environ.get("LOWROLL_VLLM_PYTHON", "")
START = 240.0  # seconds: about 25 on an idle machine
EXACT = 2e-5
LONG = Request([10, 11, 12], n=2, max_tokens=240, ignore_eos=True, seed=5)


def step(model: Transformer, seed: int, size: float = 0.02) -> None:
    """As an optimiser would: every weight that learns moves a little."""
    learns = model.trainable_parameters().values() if is_adapted(model) else model.parameters()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in learns:
            p.add_(torch.randn(p.shape, generator=generator) * size)


def is_adapted(model: Transformer) -> bool:
    return any(linear.adapter is not None for _, linear in model.linears())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(random_model(), tmp_path_factory.mktemp("models") / "dense")


def started(folder: Path, log: Path, **options: Any) -> VllmEngine:
    return VllmEngine.start(
        folder,
        log=log,
        python=PYTHON,
        max_batch=16,
        start_s=START,
        request_s=60.0,
        arguments=["--enforce-eager"],
        **options,
    )


@pytest.fixture(scope="module")
def whole(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Takes whole models."""
    with started(dense, tmp_path_factory.mktemp("log") / "vllm.log", bound=1e-3) as engine:
        yield engine


def farthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def drawn(request: Request, engine: VllmEngine) -> list[list[int]]:
    return [r.token_ids for r in engine.generate([request])[0].rollouts]


def wait_for(done: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- rollouts --------------------------------------------------------------------------------------


def test_the_probe(whole: VllmEngine, dense: Path) -> None:
    able = whole.capabilities
    assert whole.found.version >= (0, 20) and whole.found.cpu
    assert able.exact_logprobs and able.scores and able.context_length == 256
    assert able.updates == {"full"} and not able.updates_in_flight
    assert (whole.served.root, whole.behavior.weights) == (str(dense.resolve()), "fp32")


@pytest.fixture(scope="module")
def reference(dense: Path) -> Any:
    """transformers' own model of the folder."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()


@torch.no_grad()
def by_hand(reference: Any, request: Request, response: list[int]) -> list[float]:
    """Log-probs of the tokens under penalty, minimum, temperature, top-k, top-p and min-p, written
    out."""
    ids = request.prompt_ids + response
    logits = reference(torch.tensor([ids])).logits[0]
    first = len(request.prompt_ids)
    return [
        float(_cut(logits[first + t - 1].clone(), request, ids[: first + t], t)[token])
        for t, token in enumerate(response)
    ]


def _cut(logits: Tensor, request: Request, prefix: list[int], t: int) -> Tensor:
    seen = torch.tensor(sorted(set(prefix)))
    penalised = torch.where(
        logits[seen] > 0,
        logits[seen] / request.repetition_penalty,
        logits[seen] * request.repetition_penalty,
    )
    logits = logits.index_put((seen,), penalised)
    if t < request.min_tokens:
        logits[[1, *request.stop_ids]] = -torch.inf
    logits = logits / (request.temperature or 1.0)
    if request.top_k:
        logits[logits < logits.topk(request.top_k).values[-1]] = -torch.inf
    p, order = logits.softmax(-1).sort(descending=True)
    logits[order[p.cumsum(-1) - p >= request.top_p]] = -torch.inf
    logits[logits.softmax(-1) < request.min_p * logits.softmax(-1).max()] = -torch.inf
    return logits.log_softmax(-1)


SAMPLERS = {
    "plain": {},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5, "temperature": 0.8},
    "top_p": {"top_p": 0.7},
    "both": {"top_k": 20, "top_p": 0.8},
    "min_p": {"min_p": 0.2, "top_k": 30},
    "stops": {"stop_ids": tuple(range(2, 200)), "min_tokens": 4},
    "penalty": {"repetition_penalty": 1.5},
    "greedy": {"temperature": 0, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_logprobs_are_of_the_distribution_that_was_drawn_from(
    whole: VllmEngine, reference: Any, sampler: str, n: int
) -> None:
    n = n if sampler != "greedy" else 1
    request = Request(SEQUENCES[0], n=n, max_tokens=6, seed=9, id=sampler, **SAMPLERS[sampler])
    (group,) = whole.generate([request])
    for rollout in group.rollouts:
        assert len(rollout.token_ids) == 6 or rollout.finish_reason == "stop"
        expected = by_hand(reference, request, rollout.token_ids)
        assert rollout.logprobs == pytest.approx(expected, abs=EXACT)
    if sampler == "stops":
        assert all(len(r.token_ids) > 4 for r in group.rollouts)
        assert n == 1 or any(
            r.finish_reason == "stop" and r.stop_reason in range(1, 200) for r in group.rollouts
        )


def test_seeds(whole: VllmEngine) -> None:
    request = Request([10, 11, 12], n=8, max_tokens=12, seed=3, id="a", ignore_eos=True)
    first = drawn(request, whole)
    assert drawn(request, whole) == first and len({tuple(ids) for ids in first}) == 8
    assert drawn(replace(request, n=1), whole) == first[:1]
    assert drawn(replace(request, seed=4), whole) != first
    assert drawn(replace(request, id="b"), whole) != first
    together = whole.generate([request, replace(request, seed=4)])
    assert [r.token_ids for r in together[0].rollouts] == first


def test_rows_that_pad_the_vocabulary_are_drawn_and_right(whole: VllmEngine, dense: Path) -> None:
    """Nothing masks them, there or here: the learner's softmax is over all rows too."""
    request = Request([10, 11, 12], n=16, max_tokens=30, ignore_eos=True)
    (group,) = whole.generate([request])
    assert any(token > 480 for r in group.rollouts for token in r.token_ids)
    ours = lowroll.score(
        hf.load(dense), [[10, 11, 12, *r.token_ids] for r in group.rollouts], [3] * 16
    )
    assert farthest(ours, [torch.tensor(r.logprobs) for r in group.rollouts]) < EXACT


def test_scores(whole: VllmEngine, dense: Path) -> None:
    ours = lowroll.Engine(dense, weights="fp32", device="cpu", cache_tokens=256)
    ranked = ours.score_top(SEQUENCES, [1, 7, 90], 5)
    theirs = whole.score_top(SEQUENCES, [1, 7, 90], 5)
    assert farthest([r.logprobs_T for r in ranked], [r.logprobs_T for r in theirs]) < EXACT
    for a, b in zip(ranked, theirs, strict=True):
        assert torch.equal(a.top_ids_TK, b.top_ids_TK)
        assert torch.allclose(a.top_logprobs_TK, b.top_logprobs_TK, atol=EXACT)
    with pytest.raises(ValueError, match="scores at 1 alone"):
        whole.score(SEQUENCES, [1, 1, 1], 0.5)


def test_a_stream_says_the_same_and_shows_what_was_drawn_so_far(whole: VllmEngine) -> None:
    streamed = VllmEngine.attach(whole.url, stream=True, way=None)
    request = replace(LONG, top_logprobs=2)
    handle = streamed.add(request)
    wait_for(lambda: all(len(one.token_ids) > 3 for one in streamed.so_far(handle)))
    ended: dict[int, Any] = {}
    while not ended:
        ended |= dict(streamed.step())
    assert ended[handle] == whole.generate([request])[0]
    streamed.close()
    assert whole.generate([replace(LONG, max_tokens=2)])  # the server goes on


def test_an_abort_ends_it_in_vllm(whole: VllmEngine) -> None:
    handle = whole.add(LONG)
    wait_for(lambda: whole.stats().running == 2)
    assert whole.abort(handle)
    wait_for(lambda: whole.stats().running == 0)
    ((ended, group),) = whole.step()
    assert ended == handle and [r.finish_reason for r in group.rollouts] == ["abort"] * 2


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_pause_and_resume(whole: VllmEngine, mode: str) -> None:
    expected = whole.generate([LONG])[0]
    handle = whole.add(LONG)
    wait_for(lambda: whole.stats().running == 2)
    whole.pause(mode)
    groups: dict[int, Any] = {}
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        groups |= dict(whole.step())
    if mode == "keep":
        assert not groups
    whole.resume()
    while not groups:
        groups |= dict(whole.step())
    for rollout, full in zip(groups[handle].rollouts, expected.rollouts, strict=True):
        count = len(rollout.token_ids)
        assert rollout.token_ids == full.token_ids[:count]
        assert rollout.logprobs == pytest.approx(full.logprobs[:count], abs=1e-4)
        assert (rollout.finish_reason, count) == (
            ("length", 240) if mode == "keep" else ("abort", count)
        )
    assert whole.generate([replace(LONG, max_tokens=2)])


def test_a_vllm_that_runs_already_for_rollouts_alone(whole: VllmEngine) -> None:
    with connect(whole.url) as engine:
        request = Request([10, 11], max_tokens=5)
        assert engine.generate([request]) == whole.generate([request])
        with pytest.raises(ValueError, match="takes no weights"):
            engine.update_weights(WeightUpdate.local(random_model(), 1))


# -- weights ---------------------------------------------------------------------------------------


def test_three_whole_models(whole: VllmEngine) -> None:
    model = random_model()
    for version in (1, 2, 3):
        step(model, version)
        update = WeightUpdate.local(model, version)
        tag = whole.update_weights(update if version != 2 else update.as_stream())
        assert (tag.policy[0].version, tag) == (version, whole.behavior)
        ones = [1] * len(SEQUENCES)
        assert farthest(lowroll.score(model, SEQUENCES, ones), whole.score(SEQUENCES, ones)) < EXACT
        (group,) = whole.generate([Request(SEQUENCES[2], n=8, max_tokens=9, temperature=0.7)])
        ids = [SEQUENCES[2] + r.token_ids for r in group.rollouts]
        ours = lowroll.score(model, ids, [97] * 8, 0.7)
        assert farthest(ours, [torch.tensor(r.logprobs) for r in group.rollouts]) < EXACT
        assert {r.behavior.policy for r in group.rollouts} == {tag.policy}


def test_an_update_that_did_not_arrive(whole: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(1)
    whole.update_weights(WeightUpdate.local(model, 10))
    monkeypatch.setattr(
        whole.weights, "_reload", lambda update: None
    )  # 200 OK, and nothing has changed
    step(model, 1)
    with pytest.raises(NotArrived, match="update to version 11: "):
        whole.update_weights(WeightUpdate.local(model, 11))
    loose = Verifier(512, 256, 10.0)  # by distance alone nobody would see it
    monkeypatch.setattr(whole, "_verifier", loose)
    monkeypatch.undo()
    monkeypatch.setattr(whole, "_verifier", loose)
    whole.update_weights(WeightUpdate.local(model, 12))
    monkeypatch.setattr(whole.weights, "_reload", lambda update: None)
    step(model, 2, 0.002)
    with pytest.raises(NotArrived, match="version 13: .* still draws from older weights"):
        whole.update_weights(WeightUpdate.local(model, 13))


def test_a_whole_model_waits_for_requests_in_flight(whole: VllmEngine) -> None:
    before, after = random_model(2), random_model(3)
    whole.update_weights(WeightUpdate.local(before, 20))
    handle = whole.add(LONG)
    wait_for(lambda: whole.stats().running == 2)
    whole.update_weights(WeightUpdate.local(after, 21))
    ((ended, group),) = whole.step()
    assert ended == handle
    ids = [LONG.prompt_ids + r.token_ids for r in group.rollouts]
    ours = lowroll.score(before, ids, [3, 3])
    assert farthest(ours, [torch.tensor(r.logprobs) for r in group.rollouts]) < EXACT
    assert {r.behavior.policy[0].version for r in group.rollouts} == {20}


@pytest.fixture(scope="module")
def adapters(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Takes adapters."""
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    with started(dense, log, bound=1e-3, lora_rank=4) as engine:
        yield engine


@pytest.fixture
def adapted(dense: Path) -> Transformer:
    model = lora.attach(hf.load(dense), 4, 8.0)
    step(model, 1, 0.1)
    return model


def test_three_adapters(adapters: VllmEngine, adapted: Transformer) -> None:
    assert adapters.capabilities.updates_in_flight
    for version in (1, 2, 3):
        step(adapted, version)
        update = WeightUpdate.local(adapted, version)
        tag = adapters.update_weights(update if version != 2 else update.as_stream())
        ones = [1] * len(SEQUENCES)
        ours, theirs = lowroll.score(adapted, SEQUENCES, ones), adapters.score(SEQUENCES, ones)
        assert farthest(ours, theirs) < EXACT
        (group,) = adapters.generate([Request(SEQUENCES[2], n=8, max_tokens=9)])
        ids = [SEQUENCES[2] + r.token_ids for r in group.rollouts]
        ours = lowroll.score(adapted, ids, [97] * 8)
        assert farthest(ours, [torch.tensor(r.logprobs) for r in group.rollouts]) < EXACT
        assert {r.behavior.policy for r in group.rollouts} == {tag.policy}
    (answer,) = adapters.ask(HttpCall("GET", "/v1/models", "models"))
    listed = {one["id"] for one in answer["data"]}
    assert listed == {"policy", "pol-v3"}


def test_requests_in_flight_keep_their_adapter(adapters: VllmEngine, adapted: Transformer) -> None:
    adapters.update_weights(WeightUpdate.local(adapted, 10))
    old = adapters.add(LONG)
    wait_for(lambda: adapters.stats().running == 2)
    before = lowroll.score(adapted, SEQUENCES[:1], [1])
    step(adapted, 11, 0.1)
    adapters.update_weights(WeightUpdate.local(adapted, 11))
    assert adapters.stats().running == 2
    new = adapters.add(LONG)
    groups: dict[int, Any] = {}
    while adapters.has_work:
        groups |= dict(adapters.step())
    assert farthest(before, lowroll.score(adapted, SEQUENCES[:1], [1])) > 1e-2
    ids = [LONG.prompt_ids + r.token_ids for r in groups[new].rollouts]
    ours = lowroll.score(adapted, ids, [3, 3])
    assert farthest(ours, [torch.tensor(r.logprobs) for r in groups[new].rollouts]) < EXACT
    old_ids = [LONG.prompt_ids + r.token_ids for r in groups[old].rollouts]
    new_weights = lowroll.score(adapted, old_ids, [3, 3])
    assert farthest(new_weights, [torch.tensor(r.logprobs) for r in groups[old].rollouts]) > 1e-2
    assert [groups[h].rollouts[0].behavior.policy[0].version for h in (old, new)] == [10, 11]


def test_a_stale_adapter(
    adapters: VllmEngine, adapted: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters.update_weights(WeightUpdate.local(adapted, 20))
    load = adapters.weights.load_adapter

    def stale(update: WeightUpdate) -> None:
        name = adapters.server.model
        load(update)
        adapters.server.model = name  # requests still go to the old one, which is unloaded

    monkeypatch.setattr(adapters.weights, "load_adapter", stale)
    monkeypatch.setattr(adapters.weights, "unload", lambda keep: None)
    step(adapted, 20, 0.05)
    with pytest.raises(NotArrived, match="update to version 21: "):
        adapters.update_weights(WeightUpdate.local(adapted, 21))
    monkeypatch.undo()
    step(adapted, 21)
    adapters.update_weights(WeightUpdate.local(adapted, 22))


# -- our low-bit folders, and an end ---------------------------------------------------------------


def low_bit(folder: Path, log: Path, dtype: str) -> VllmEngine:
    """Skips, in vLLM's words, where it has no kernel for the format on this CPU."""
    try:
        return started(folder, log, dtype=dtype, bound=0.9)
    except EngineLost as error:
        if "has no attribute" not in str(error):
            raise
        pytest.skip(f"vLLM has no kernel here: {str(error)[-300:]}")


def apart(engine: VllmEngine, model: Transformer, format: str, dtype: str) -> float:
    """Median distance of drawn log-probs to the model's as our engine holds it."""
    held = rollout_copy(model, format, getattr(torch, dtype))
    (group,) = engine.generate([Request(SEQUENCES[0], n=8, max_tokens=9, ignore_eos=True)])
    ids = [SEQUENCES[0] + r.token_ids for r in group.rollouts]
    ours = torch.cat(lowroll.score(held, ids, [5] * 8))
    theirs = torch.cat([torch.tensor(r.logprobs) for r in group.rollouts])
    return float((ours - theirs).abs().median())


@pytest.mark.parametrize(
    ("format", "dtype", "bound"), [("fp8", "float32", 1e-5), ("int4", "bfloat16", 0.08)]
)
def test_low_bit_folders(
    dense: Path, tmp_path: Path, format: str, dtype: str, bound: float
) -> None:
    folder = quantize_folder(dense, tmp_path / format, format).folder
    model = random_model()
    with low_bit(folder, tmp_path / "log", dtype) as engine:
        assert engine.behavior.weights == format
        assert apart(engine, model, format, dtype) < bound
        for version in (1, 2, 3):
            step(model, version, 0.005)
            engine.update_weights(WeightUpdate.local(model, version))
            assert apart(engine, model, format, dtype) < bound


def test_int8_and_an_engine_that_dies_in_mid_request(dense: Path, tmp_path: Path) -> None:
    """vLLM's INT8 products differ between CPUs (those for AMX round activations to bfloat16), and
    reloaded ones may compute NaN: then the update is an error, and no rollout is drawn from it."""
    folder = quantize_folder(dense, tmp_path / "int8", "int8").folder
    model = random_model()
    with low_bit(folder, tmp_path / "log", "float32") as engine:
        assert engine.behavior.weights == "int8"
        assert apart(engine, model, "int8", "float32") < 0.3
        step(model, 1, 0.005)
        try:
            engine.update_weights(WeightUpdate.local(model, 1))
        except NotArrived as error:
            assert "update to version 1: " in str(error) and "not JSON compliant" in str(error)
        else:
            assert apart(engine, model, "int8", "float32") < 0.3
        dies_in_mid_request(engine)


def dies_in_mid_request(engine: VllmEngine) -> None:
    engine.add(LONG)
    wait_for(lambda: engine.stats().running == 2)
    assert engine.process is not None
    group = engine.process.pid
    listed = subprocess.run(
        ["ps", "-eo", "pid=,pgid=,args="], capture_output=True, text=True, timeout=30
    ).stdout.splitlines()
    mine = [line.split(None, 2) for line in listed if line.split()[1] == str(group)]
    for pid, _, args in mine:
        if "EngineCore" in args:
            os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(EngineLost, match="request ") as told:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            engine.step()
    assert "vLLM has ended; the last error of" in str(told.value)
    assert "Error" in str(told.value)
    assert not engine.has_work
    with pytest.raises(ServerError):
        engine.generate([Request([1, 2], max_tokens=2)])


def test_vllm_reads_the_id_of_a_communicator_as_it_was_written() -> None:
    from lowroll.engine.remote.vllm.nccl import stored_id

    unique_id = bytes(i * 7 % 256 for i in range(128))
    store, port = stored_id(unique_id)
    code = f"""
from vllm.distributed.utils import StatelessProcessGroup
group = StatelessProcessGroup.create(host="127.0.0.1", port={port}, rank=1, world_size=2)
found = group.broadcast_obj(None, src=0)
print(type(found).__name__, bytes(found).hex())
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, timeout=START, env=environment
    )
    assert f"ncclUniqueId {unique_id.hex()}" in done.stdout, done.stderr[-2000:]
    del store


def test_a_vllm_that_cannot_start_says_why(tmp_path: Path, dense: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(EngineLost, match="did not start.*last error of .*: .*"):
        VllmEngine.start(
            dense,
            log=tmp_path / "log",
            python=PYTHON,
            start_s=START,
            arguments=["--no-such-option"],
        )
    assert time.monotonic() - begun < START / 2
