"""The protocol in front of an engine: what it says about itself is so, and runs ask for no more."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowroll import Engine, Request
from lowroll.config.load import from_mapping
from lowroll.engine import base
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import make
from lowroll.model import hf
from lowroll.orchestrator.interfaces import EngineClient
from lowroll.quant.formats import QTensor, get_format
from lowroll.runs.assembly.capabilities import check as check_capabilities
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tiny import COMMON


def methods(protocol: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(protocol).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@pytest.mark.parametrize("protocol", [base.Engine, EngineClient])
def test_the_native_engine_has_every_method_of_the_protocols(protocol: type) -> None:
    asked = methods(protocol)
    assert asked
    for name, signature in asked.items():
        mine = inspect.signature(getattr(Engine, name)).parameters
        assert list(mine)[: len(signature.parameters)] == list(signature.parameters), name
    assert isinstance(Engine.capabilities, property)


def test_what_the_orchestrator_asks_is_part_of_the_protocol() -> None:
    whole, narrow = methods(base.Engine), methods(EngineClient)
    for name, signature in narrow.items():
        asked, has = list(signature.parameters), list(whole[name].parameters.values())
        assert [one.name for one in has[: len(asked)]] == asked
        assert all(one.default is not one.empty for one in has[len(asked) :])


def test_stats_follow_the_work(folder: Path) -> None:
    engine = engine_of(folder, weights="nvfp4", cache_tokens=128, max_batch=3)
    spec = hf.load(folder).spec
    before = engine.stats()
    assert (before.weights, before.weight_bits) == ("nvfp4", get_format("nvfp4").bits)
    assert before.cache_tokens == 128 and before.virtual_memory_bytes == 0
    assert before.cache_bytes == 128 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    assert (before.running, before.waiting, before.tokens, before.pages_peak) == (0, 0, 0, 0)
    request = Request(prompt(9), n=5, max_tokens=6, ignore_eos=True)
    handle = engine.add(request)
    assert (engine.stats().running, engine.stats().waiting) == (0, 5)
    engine.step()
    engine.step()
    amid = engine.stats()
    assert (amid.running, amid.waiting) == (3, 2)
    assert 0 < amid.tokens < 30 and amid.pages_peak > 0 and amid.prefix_hits == 0
    engine.abort(handle)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
    (group,) = engine.generate([replace(request, n=2)])
    after = engine.stats()
    assert after.prefix_hits == 2  # both full pages of the prompt, for the leader
    assert after.tokens - amid.tokens == sum(len(r.token_ids) for r in group.rollouts) == 12


def test_capabilities_are_the_engines(folder: Path) -> None:
    able = engine_of(folder, noisy=True).capabilities
    assert able.context_length == COMMON["max_position_embeddings"]
    assert able.updates == {"full", "codes"} and able.noise and able.scores and able.kv is DENSE
    assert able.sampler == {field.name for field in fields(Request)}
    assert engine_of(folder).stats().policy_bytes == 0


def test_an_engine_says_what_its_cache_keeps(folder: Path) -> None:
    kv = make("snapkv", budget=12, buffer=4)
    engine = engine_of(folder, kv=kv, max_batch=3)
    assert engine.capabilities.kv is kv and engine.capabilities.kv_policy == "snapkv"
    assert engine.stats().policy_bytes == engine.runner.selector.ring_LSAHd.nbytes > 0


def test_linear_weights_are_those_that_it_multiplies_with(folder: Path) -> None:
    engine = engine_of(folder, weights="int8")
    held = engine.linear_weights()
    assert list(held) == [name for name, _ in engine.model.linears()]
    for name, linear in engine.model.linears():
        assert isinstance(held[name], QTensor) and held[name] is linear.weight


def test_a_run_asks_an_engine_for_no_more_than_it_can(folder: Path) -> None:
    able = engine_of(folder).capabilities
    run = {"model": str(folder), "env": [{"id": "reverse-text"}]}
    plain = from_mapping(run).resolved()
    check_capabilities(plain, able)
    check_capabilities(plain, replace(able, sampler=frozenset(), noise=False))
    drawn = from_mapping({**run, "rollout": {"top_k": 5, "min_p": 0.1}}).resolved()
    check_capabilities(drawn, able)
    with pytest.raises(ValueError, match="does not heed top_k, min_p$"):
        check_capabilities(drawn, replace(able, sampler=frozenset({"temperature", "max_tokens"})))
    with pytest.raises(ValueError, match="log-probs are not those of the distribution"):
        check_capabilities(plain, replace(able, exact_logprobs=False))
    dense = SimpleNamespace(**{**vars(able), "kv_policy": "dense", "kv_dtype": None})
    check_capabilities(plain, dense)
    for kv, told in (
        ({"policy": "rkv"}, r"^rollout\.kv\.policy: rkv is asked for; this engine's is dense$"),
        ({"dtype": "fp8"}, r"^rollout\.kv\.dtype: fp8 is asked for; this engine's is auto$"),
    ):
        cached = from_mapping({**run, "rollout": {"kv": kv}}).resolved()
        with pytest.raises(ValueError, match=told):
            check_capabilities(cached, dense)
        dense.kv_policy = kv.get("policy", "dense")
        dense.kv_dtype = kv.get("dtype")
        check_capabilities(cached, dense)
        dense.kv_policy, dense.kv_dtype = "dense", None
    noisy = from_mapping({**run, "noise": {"sigma_start": 0.02}}).resolved()
    check_capabilities(noisy, replace(able, noise=True))
    with pytest.raises(ValueError, match="^noise: "):
        check_capabilities(noisy, replace(able, noise=False))
