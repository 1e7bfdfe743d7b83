"""An engine with an 8-bit cache, against attention over what its codes stand for: alone, under each
policy, with shared prompts, chunks, updates in flight. What it costs, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from lowroll import Engine, Request
from lowroll.config.rollout import Dtype
from lowroll.kernels.attention.quantized_cache import Codes, encode
from lowroll.kv.cache import KVCache
from lowroll.kv.capacity import NoRoom
from lowroll.kv.fp8 import Float8Cache, fine_channels, key_energy
from lowroll.kv.storage import STORAGES
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.types import Group
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.masters import nudge
from tests.fixtures.policies import (
    POLICIES,
    ChosenStreaming,
    Kind,
    Rounded,
    check_group,
    rkv,
    snapkv,
)
from tests.fixtures.tiny import hf_folder

STEM = prompt(21, 1)
REQUESTS = [
    Request(STEM + prompt(4, 2), n=8, max_tokens=30, seed=1),
    Request(prompt(3, 3), n=1, max_tokens=40, seed=2, temperature=0.8, ignore_eos=True),
    Request(STEM + prompt(7, 4), n=2, max_tokens=25, seed=3),
    Request(prompt(9, 5), n=8, max_tokens=20, seed=4, temperature=1.2),
]
WIDE = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, so that most channels have one code."""
    return hf_folder(tmp_path_factory.mktemp("models") / "m", "qwen3-tied-bias", **WIDE)


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    return hf.load(folder)


def cache_of(engine: Engine) -> Float8Cache:
    cache = engine.runner.cache
    assert isinstance(cache, Float8Cache)
    return cache


def rounding(engine: Engine) -> Rounded:
    cache = cache_of(engine)
    return lambda layer, k, v: cache._decode(layer, encode(k, v, cache.channels_LGF[layer]))


def engine8(source: object, lookahead: int = 1, **options: Any) -> Engine:
    engine = engine_of(source, kv_dtype="fp8", **options)
    engine.scheduler.lookahead = lookahead
    return engine


def check(engine: Engine, groups: list[Group], models: list[Transformer], kv: Any = None) -> int:
    """A number next to the middle between two codes may go either way, and has moved log-probs by
    0.012: noise of 2e-7 on the oracle's keys does as much. Hence the bounds."""
    rounded = rounding(engine)
    return sum(check_group(kv, group, models, 3e-2, rounded) for group in groups)


def tokens(groups: list[Group]) -> list[list[int]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


def numbers(groups: list[Group]) -> list[tuple[list[int], list[float]]]:
    return [(r.token_ids, r.logprobs) for group in groups for r in group.rollouts]


CHUNKS = {"prefill_chunk": 5, "max_prefill_tokens": 12}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, CHUNKS, {"cache_tokens": 112, "max_batch": 6}])
def test_log_probs_are_those_of_the_stored_keys(model: Transformer, options: dict) -> None:
    engine = engine8(model, 5, **options)
    groups = engine.generate(REQUESTS[:2]) + engine.generate(REQUESTS[2:])
    check(engine, groups, [model])
    assert engine.pool.hits > 0 and engine.pool.num_used == 0
    assert {r.behavior.kv_dtype for group in groups for r in group.rollouts} == {"fp8"}
    assert engine.capabilities.kv_dtype == "fp8"
    with pytest.raises(AssertionError):  # the oracle can tell
        check_group(None, groups[0], [model], 3e-2)
    rollout = groups[0].rollouts[0]
    (scored,) = engine.score([REQUESTS[0].prompt_ids + rollout.token_ids], [25])
    gap = (scored - torch.tensor(rollout.logprobs)).abs()
    assert 1e-3 < gap.median() < 0.2  # scoring sees no cache


@pytest.mark.slow
def test_a_prefix_found_or_fresh_whole_or_in_chunks_gives_the_same_tokens(
    model: Transformer,
) -> None:
    engine = engine8(model)
    fresh = tokens(engine.generate(REQUESTS))
    again = tokens(engine.generate(REQUESTS))
    assert engine.pool.hits > 8 and again == fresh
    assert tokens(engine8(model, 5, **CHUNKS).generate(REQUESTS)) == fresh
    assert [row for r in REQUESTS for row in tokens(engine8(model, 3).generate([r]))] == fresh
    assert tokens(engine_of(model).generate(REQUESTS)) != fresh


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", POLICIES)
def test_policies_move_codes_with_their_scales(
    model: Transformer, kind: Kind, options: dict
) -> None:
    kv = kind(9, 4)
    engine = engine8(model, 5, kv=kv, **options)
    groups = engine.generate(REQUESTS[:2]) + engine.generate(REQUESTS[2:])
    assert check(engine, groups, [model], kv) > 20
    assert engine.pool.num_used == engine.scheduler.reserved_pages == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ChosenStreaming, rkv])
def test_a_budget_of_the_whole_sequence_is_bitwise_the_dense_8_bit_engine(
    model: Transformer, kind: Kind
) -> None:
    want = numbers(engine8(model).generate(REQUESTS))
    assert numbers(engine8(model, kv=kind(54, 1)).generate(REQUESTS)) == want


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, snapkv])
def test_weights_change_in_flight(folder: Path, model: Transformer, kind: Kind | None) -> None:
    """The channels with two codes stay while requests run, and follow the weights afterwards."""
    kv = None if kind is None else kind(9, 4)
    later = nudge(hf.load(folder), 5, size=0.05)
    for block in later.blocks:  # other outliers
        block.k_norm.weight.data = block.k_norm.weight.data.flip(0)
    engine = engine8(model, 3, kv=kv)
    before = cache_of(engine).channels_LGF.clone()
    handles = [engine.add(request) for request in REQUESTS[:2]]
    done = dict(group for _ in range(4) for group in engine.step())
    engine.update_weights(WeightUpdate.local(later, 1))
    while engine.has_work:
        done |= dict(engine.step())
    groups = [done[handle] for handle in handles]
    assert any(len(r.behavior.policy) == 2 for group in groups for r in group.rollouts)
    check(engine, groups, [model, later], kv)
    assert torch.equal(cache_of(engine).channels_LGF, before)
    engine.update_weights(WeightUpdate.local(later, 1))  # the same version: its pages must not stay
    after = cache_of(engine).channels_LGF
    assert torch.equal(after, fine_channels(key_energy(later))) and not torch.equal(after, before)
    assert numbers(engine.generate(REQUESTS)) == numbers(
        engine8(later, 3, kv=kv).generate(REQUESTS)
    )


def test_released_memory_comes_back_and_tails_are_copied(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 25 tokens ends within a page of 4: eight samples write to copies of it."""
    engine = engine8(model, 3)
    want = numbers(engine.generate(REQUESTS))
    buffers = [buffer for column in cache_of(engine).buffers for buffer in column]
    assert len(buffers) == 4 * model.spec.num_layers
    engine.release()
    assert all(buffer.untyped_storage().nbytes() == 0 for buffer in buffers)
    assert numbers(engine.generate(REQUESTS)) == want
    monkeypatch.setattr(engine.runner, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(REQUESTS)
    assert not any(bool(buffer.any()) for buffer in buffers)
    cache = cache_of(engine)
    for buffer in buffers:
        buffer.random_()
    held = [buffer[3].clone() for buffer in buffers]
    cache.copy_pages([(3, 7), (4, 3)])
    assert all(torch.equal(b[7], old) for b, old in zip(buffers, held, strict=True))


def test_bfloat16_rolls_out_over_the_same_codes(folder: Path) -> None:
    """Keys come in bfloat16 and are read back in it."""
    engine = engine8(folder, weights="bf16", page_size=16)
    (group,) = engine.generate([REQUESTS[1]])
    ids = REQUESTS[1].prompt_ids + group.rollouts[0].token_ids
    (scored,) = engine.score([ids], [3], temperature=0.8)
    gap = (scored - torch.tensor(group.rollouts[0].logprobs)).abs()
    assert gap.mean() < 0.3  # scoring sees no cache
    k, v = cache_of(engine).read(0, torch.arange(16))
    assert k.dtype == v.dtype == torch.bfloat16


def test_what_a_token_takes(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads of 64: 64 codes each, 16 fine ones, 2 scales, where bfloat16 takes 256 bytes."""
    spec = model.spec
    heads = spec.num_layers * spec.num_kv_heads
    assert Float8Cache.bytes_per_token(spec, torch.bfloat16) == heads * 146
    assert KVCache.bytes_per_token(spec, torch.bfloat16) == heads * 256
    engine = engine8(model, cache_tokens=64)
    held = sum(b.nbytes for column in cache_of(engine).buffers for b in column)
    assert engine.stats().cache_bytes == held == 64 * heads * 146
    monkeypatch.setattr("lowroll.engine.cache_size.free_memory", lambda _: 64 * heads * 200)
    engine8(model, cache_tokens=64)
    with pytest.raises(NoRoom, match="cache_tokens"):
        engine_of(model, cache_tokens=64)
    tokens = [make(model, cache_tokens=None).stats().cache_tokens for make in (engine_of, engine8)]
    assert tokens[1] == 64 * 200 // 4 // 146 // 4 * 4 > 2 * tokens[0] > 0  # float32's 512 bytes


def test_unknown_types_are_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"kv_dtype: expected None.* or one of fp8, got 'int3'"):
        Engine("no such folder", kv_dtype="int3")


def test_the_configuration_knows_every_storage() -> None:
    assert get_args(Dtype) == ("auto", *STORAGES)


def test_the_largest_biases_have_two_codes(tmp_path: Path) -> None:
    """A pair of RoPE is chosen as one; among equal ones the slowest. Biases of 300 in both channels
    of three pairs leave the keys as exact as bfloat16 would."""
    model = hf.load(hf_folder(tmp_path / "m", "qwen2", **{**WIDE, "hidden_size": 256}))
    spec, wanted = model.spec, [3, 17, 30]
    for block in model.blocks:
        bias_Gd = block.qkv.bias.data[block.qkv.rows("k_proj")].view(2, 64)
        bias_Gd[1, wanted], bias_Gd[1, [i + 32 for i in wanted]] = 300.0, -200.0
    engine = engine8(model)
    channels_LGF = cache_of(engine).channels_LGF
    assert channels_LGF.shape == (spec.num_layers, 2, 16)
    for channels_F in channels_LGF[:, 1].tolist():
        assert set(wanted) <= set(channels_F[:8]) and len(set(channels_F)) == 16
        assert [c + 32 for c in channels_F[:8]] == channels_F[8:]
    k, v = torch.randn(2, 50, 2, 64).unbind()
    k = k + 1
    k[:, 1, wanted] += 300
    got, _ = engine.runner.cache.write(0, torch.arange(50), k, v)
    assert ((got - k)[:, 1, wanted].abs() / k[:, 1, wanted]).max() < 2**-8
    assert fine_channels(torch.zeros(1, 1, 8)).tolist() == [[[3, 2, 1, 0, 7, 6, 5, 4]]]


@pytest.mark.parametrize("family", ["olmo2", "gemma3", "phi3-partial", "glm"])
def test_energies_of_keys_are_in_the_order_of_kernels(family: str, tmp_path: Path) -> None:
    """Norms over all heads, gains of 1 + w, fused matrices, and heads that are reordered."""
    model = hf.load(hf_folder(tmp_path / "m", family))
    spec, block = model.spec, model.blocks[0]
    got_Gd = key_energy(model)[0]
    if block.k_norm is not None:
        gain = block.k_norm.weight + spec.norm_offset
        want = (gain if family == "olmo2" else gain.repeat(spec.num_kv_heads)).square()
    elif block.qkv.bias is None:
        want = torch.zeros(spec.num_kv_heads * spec.head_dim)
    else:
        want = block.qkv.bias[block.qkv.rows("k_proj")].square()
    want_Gd = want.view(got_Gd.shape)
    assert torch.equal(got_Gd, want_Gd if block.order is None else want_Gd[:, block.order])


def test_fine_channels_of_latent_attention_are_its_slowest_rotated_pairs(tmp_path: Path) -> None:
    """Keys at two positions differ in rotated channels alone, and each pair keeps its length."""
    sizes = {"qk_nope_head_dim": 34, "qk_rope_head_dim": 20, "v_head_dim": 16}
    model = hf.load(hf_folder(tmp_path / "m", "deepseek-v3", **sizes))
    attention = model.blocks[0].latent
    x_TD = torch.randn(1, model.spec.hidden_size).expand(2, -1)
    cos, sin = model.rotations(torch.tensor([0, 1000]))
    first_Gd, second_Gd = attention.project(x_TD, cos[0], sin[0]).k_TGd
    pairs = [k_Gd.unflatten(1, (2, -1)) for k_Gd in (first_Gd, second_Gd)]
    assert torch.allclose(pairs[0].norm(dim=1), pairs[1].norm(dim=1))
    rotated = (first_Gd != second_Gd).any(0).nonzero()[:, 0].tolist()
    assert rotated == [*range(17, 27), *range(27 + 17, 54)]
    for channels_F in fine_channels(key_energy(model)).flatten(0, 1).tolist():
        assert sorted(channels_F) == [*range(19, 27), *range(27 + 19, 54)]


def test_a_policys_selector_sees_what_attention_sees(model: Transformer) -> None:
    engine = engine8(model)
    cache = cache_of(engine)
    k, v = torch.randn(2, 12, 2, 64).unbind()
    table = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    slots = (table[0, :, None] * 4 + torch.arange(4)).flatten()
    stored = cache.write(1, slots, k, v)
    assert torch.equal(cache.gather_keys(1, table)[0].transpose(0, 1), stored[0])
    assert all(torch.equal(a, b) for a, b in zip(cache.read(1, slots), stored, strict=True))
    assert isinstance(cache.codes(1), Codes)
