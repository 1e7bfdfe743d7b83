"""Whole runs whose rollouts have bounded caches, from their settings."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowroll import Engine
from lowroll.checkpoint.store import Store
from lowroll.config import from_mapping, load
from lowroll.config.rollout import KvConfig
from lowroll.kv.policy import table
from lowroll.kv.policy.base import footprint
from lowroll.metrics.record import read
from lowroll.model.spec import read_spec
from lowroll.runs.assembly import caches, prompts
from lowroll.runs.diagnose import diagnose
from lowroll.runs.evaluate import evaluate
from lowroll.transport.rollout_log import read_rollouts
from lowroll.types import Group, Rollout
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

SMALL: dict[str, dict[str, Any]] = {
    "streaming": {"budget": 5, "buffer": 2, "sinks": 1},
    "h2o": {"budget": 5, "buffer": 2},
    "snapkv": {"budget": 5, "buffer": 2, "window": 2, "kernel": 3},
    "rkv": {"budget": 5, "buffer": 2, "window": 2, "kernel": 3},
    "parity": {"budget": 4, "buffer": 2},
}


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy more, as one adds it: a file, a row."""
    row = table.CachePolicyRow("tests.fixtures.policies:Parity", table.BOUNDED)
    monkeypatch.setitem(table.POLICIES, "parity", row)


def drawn(folder: Path) -> list[Rollout]:
    """Every rollout of a run."""
    files = sorted((folder / "rollouts").iterdir())
    return [sample.rollout for path in files for sample in read_rollouts(path).samples]


def learnt(folder: Path) -> list[Any]:
    """Tokens, log-probs and weights."""
    tokens = [(rollout.token_ids, rollout.logprobs) for rollout in drawn(folder)]
    tensors = Store(folder / "checkpoints").load().tensors["model"]
    return [tokens, {name: tensor.tolist() for name, tensor in tensors.items()}]


@pytest.mark.slow
@pytest.mark.usefixtures("parity")
@pytest.mark.parametrize("name", SMALL)
def test_resume_is_bitwise_the_uninterrupted_run(name: str, model: Path, tmp_path: Path) -> None:
    kv = {"policy": name, **SMALL[name]}
    tree = settings(model, tmp_path / "whole", rollout={"kv": kv}, train={"max_steps": 4})
    result = train(tree)
    whole = fingerprint(result.folder)
    tags = {(r.behavior.kv_policy, r.behavior.kv_budget) for r in drawn(result.folder)}
    assert tags == {(name, SMALL[name]["budget"])}
    for step in (1, 3) if name == "rkv" else (2,):
        copy_stopped_after(result.folder, step, tmp_path / f"cut{step}")
        resumed = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(resumed.folder) == whole, f"resumed after step {step}"
    copy_stopped_after(result.folder, 1, tmp_path / "other")
    other = {**tree, "output_dir": str(tmp_path / "other")}
    for changed, told in (
        ({**kv, "buffer": 3}, r"rollout\.kv\.buffer was 2 and is 3"),
        (None, rf"rollout\.kv\.budget was {kv['budget']} and is None"),
    ):
        with pytest.raises(ValueError, match=told):
            train({**other, "rollout": {**tree["rollout"], "kv": changed}}, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if name != "parity"])
def test_a_budget_as_long_as_the_context_is_bitwise_the_dense_run(
    name: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so, once. A small one is another run."""
    found = {}
    for key, kv in {
        "dense": None,
        "whole": {"policy": name, "budget": 64},
        "small": {"policy": name, **SMALL[name]},
    }.items():
        tree = settings(
            model,
            tmp_path / key,
            correction="sparse",
            rollout={"kv": kv, "exact": False},
            train={"max_steps": 2},
        )
        caplog.clear()
        found[key] = learnt(train(tree).folder)
        assert caplog.text.count(f"rollout.kv: {name} dropped no key") == (key == "whole")
    assert found["whole"] == found["dense"] != found["small"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "rkv"])
def test_an_8_bit_cache_resumes_bitwise(name: str, model: Path, tmp_path: Path) -> None:
    kv = {"policy": name, **SMALL.get(name, {}), "dtype": "fp8"}
    tree = settings(model, tmp_path / "whole", rollout={"kv": kv}, train={"max_steps": 3})
    result = train(tree)
    tags = {(r.behavior.kv_policy, r.behavior.kv_dtype) for r in drawn(result.folder)}
    assert tags == {(name, "fp8")}
    copy_stopped_after(result.folder, 1, tmp_path / "cut")
    resumed = train({**tree, "output_dir": str(tmp_path / "cut")}, resume=True)
    assert fingerprint(resumed.folder) == fingerprint(result.folder)
    cfg = from_mapping({**tree, "rollout": {**tree["rollout"], "kv": None}, "force": True})
    rows = evaluate(cfg, ["fp32"], [KvConfig(), cfg.rollout.cache.another("fp8")])
    assert [row["kv"] for row in rows] == ["dense", "dense+fp8"]


@pytest.mark.slow
def test_auto_learns_by_rejection_and_reweighting(model: Path, tmp_path: Path) -> None:
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "dense", "kv": {"policy": "rkv", **SMALL["rkv"]}},
        train={"max_steps": 1, "warmup_steps": 0},
    )
    assert from_mapping(tree).correction == "sparse"
    (record,) = read(train(tree).folder)
    assert record["mismatch/kl_k3"] > 1e-8 and "correction/rejected_sequence_fraction" in record


@pytest.mark.slow
def test_an_evaluation_compares_caches_on_the_same_prompts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one size of the cache, that of the dense one."""
    drawn: dict[str, Any] = {}
    sizes: set[int] = set()

    def step(engine: Engine) -> list[tuple[int, Group]]:
        ended = plain(engine)
        for _, group in ended:
            drawn.setdefault(engine.kv.name, {})[group.request.id] = [
                (group.request, rollout.token_ids, rollout.logprobs) for rollout in group.rollouts
            ]
        sizes.add(engine.stats().cache_tokens)
        return ended

    plain = Engine.step
    monkeypatch.setattr(Engine, "step", step)

    def run(kv: dict[str, Any] | None, *names: str) -> dict[str, Any]:
        drawn.clear()
        rollout = {"kv": kv, "cache_tokens": None, "exact": False}
        evaluated = {"num_examples": 4, "rollouts_per_example": 2, "temperature": 1.0}
        cfg = from_mapping(settings(model, tmp_path, rollout=rollout, eval=evaluated))
        rows = evaluate(cfg, ["fp32"], [cfg.rollout.cache.another(name) for name in names])
        assert [row["kv"] for row in rows] == list(drawn)
        return dict(drawn)

    small = run({"policy": "rkv", **SMALL["rkv"]})
    assert list(small) == ["dense", "rkv"] and small["dense"] != small["rkv"]
    named = run({"policy": "rkv", **SMALL["rkv"]}, "snapkv", "rkv", "dense")
    assert list(named) == ["dense", "snapkv", "rkv"] and named["snapkv"] != named["rkv"]
    assert {name: named[name] for name in small} == small
    assert run(None) == {"dense": small["dense"]}
    whole = run({"policy": "rkv", "budget": 64})
    assert whole["rkv"] == whole["dense"] == small["dense"]
    assert len(sizes) == 1


@pytest.mark.slow
def test_a_fallback_keeps_the_cache_and_diagnosis_draws_under_it(
    model: Path, tmp_path: Path
) -> None:
    kv = {"policy": "rkv", **SMALL["rkv"]}
    tree = settings(
        model,
        tmp_path / "run",
        rollout={"weights": "int8", "kv": kv},
        guard={"action": "fallback", "patience": 1, "ess_below": 1.0},
        train={"max_steps": 3},
    )
    result = train(tree)
    tags = {(r.behavior.weights, r.behavior.kv_policy) for r in drawn(result.folder)}
    assert tags == {("int8", "rkv"), ("fp32", "rkv")}
    found = {}
    for name, changes in (("rkv", []), ("dense", ["rollout.kv=null"])):
        cfg = load(result.folder / "config.yaml", ["force=true", *changes])
        found[name] = diagnose(cfg, result.folder, num_prompts=2, n=2).share("kv")
    assert found["rkv"] > 0 == found["dense"]


def test_every_prompt_up_to_the_longest_fits() -> None:
    """Against every length, where none is longer than the next one that does not fit."""
    rng = random.Random(0)
    for _ in range(300):
        kv = {"policy": "streaming", "sinks": 0}
        kv |= {"budget": rng.randint(1, 9), "buffer": rng.randint(1, 20)}
        rollout = {"max_tokens": rng.randint(1, 9), "page_size": rng.randint(1, 3), "kv": kv}
        cfg, tokens = from_mapping({"model": "m", "rollout": rollout}), rng.randint(1, 60)
        need = [
            footprint(caches.policy(cfg), p, rollout["max_tokens"], rollout["page_size"]).alone
            for p in range(1, tokens + 2)
        ]
        fits = [pages <= tokens // rollout["page_size"] for pages in need]
        assert caches.longest_prompt(cfg, tokens) == [*fits, False].index(False)


def test_a_bounded_cache_takes_longer_prompts(model: Path) -> None:
    """The longest prompt that fits beside its response, by the scheduler's own arithmetic."""
    spec = replace(read_spec(model), max_position=99)
    rollout = {"max_tokens": 40, "page_size": 4, "cache_tokens": 64}
    for kv in (None, *({"policy": name, **SMALL[name]} for name in SMALL if name != "parity")):
        cfg = from_mapping({"model": "m", "rollout": {**rollout, "kv": kv}})
        policy = caches.policy(cfg)
        assert policy.budget == (kv and kv["budget"])
        most = prompts.longest(cfg, spec)
        assert most == caches.longest_prompt(cfg, 64)
        assert footprint(policy, most, 40, 4).alone <= 16
        assert kv is None or footprint(policy, most + 1, 40, 4).alone > 16
        assert (most > 64 - 40) == (kv is not None)
    small = from_mapping({"model": "m", "rollout": {**rollout, "cache_tokens": 4, "kv": kv}})
    with pytest.raises(ValueError, match="40 leaves no room for a prompt in the KV cache of 4 tok"):
        prompts.longest(small, spec)
    with pytest.raises(ValueError, match="in the model's context of 40 tokens"):
        prompts.longest(
            from_mapping({"model": "m", "rollout": {**rollout, "kv": kv}}),
            replace(spec, max_position=40),
        )
