"""The corridor from master to rollout weights: one copy under LoRA, none shared under full
fine-tuning, rung P7."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll import Engine, Request
from lowroll.model import hf, lora
from lowroll.model.names import dtype_of
from lowroll.model.transformer import Transformer
from lowroll.quant.int8 import Int8
from lowroll.types import Group
from lowroll.weights import aligned_forward
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.publish import (
    beside,
    digest,
    first_difference,
    publish,
    quantize_base,
    rollout_copy,
)
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.formats import FEW, LAYOUTS
from tests.fixtures.masters import nudge, pointers, tensors
from tests.fixtures.sequences import IDS, logits
from tests.fixtures.tiny import FAMILIES, hf_folder

REQUEST = Request(IDS[:9].tolist(), n=3, max_tokens=12, seed=5, ignore_eos=True)
FORMATS = tuple(lowroll.formats())
WIDE = ("fp8_block", "nf4_dq")  # whose blocks span two experts
FAMILY = "qwen3-tied-bias"


def lora_learner(folder: Path, format: str = "int8") -> Transformer:
    return lora.attach(quantize_base(hf.load(folder), format), rank=3, alpha=6.0, seed=1)


def engine_of(model: Transformer, weights: str = "int8") -> Engine:
    return Engine(model, weights=weights, device="cpu", cache_tokens=1024, page_size=4)


def token_ids(group: Group) -> list[list[int]]:
    return [r.token_ids for r in group.rollouts]


# -- LoRA: one copy of the base --------------------------------------------------------------------


@pytest.mark.parametrize("format", LAYOUTS)
def test_lora_shares_the_base_and_copies_the_adapter(folder: Path, format: str) -> None:
    """bf16 activations over a float32 master still share the linear weights; norms and embedding
    are then cast."""
    learner = lora_learner(folder, format)
    engine = engine_of(learner, format)
    mine, theirs = pointers(learner), pointers(engine.model)
    assert mine.keys() == theirs.keys()
    for name in mine:
        linear = any(f".{kind}.weight." in name for kind in ("qkv", "o", "gate_up", "down"))
        shared = ".adapter." not in name and (linear or format != "bf16")
        assert (mine[name] == theirs[name]) == shared, name
    assert any(name.endswith("norm.weight") for name in mine) and "embedding" in mine
    if format == "int8":
        assert any(name.endswith("codes") for name in mine) and any(
            name.endswith("scale") for name in mine
        )
        own = sum(
            t.nbytes
            for name, t in tensors(engine.model).items()
            if theirs[name] not in mine.values()
        )
        assert own == sum(p.nbytes for p in learner.trainable_parameters().values())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["bf16", *FEW])
def test_the_engine_rolls_out_the_adapter_that_it_was_given(folder: Path, format: str) -> None:
    learner = lora_learner(folder, format)
    engine, base = (
        engine_of(learner, format),
        {n: t.clone() for n, t in tensors(learner).items() if "adapter" not in n},
    )
    first = engine.generate([REQUEST])[0]
    nudge(learner, seed=3)
    again = engine.generate([REQUEST])[0]
    assert token_ids(again) == token_ids(first)  # the learner moved; nothing was published yet
    before = engine.behavior.policy[0].digest
    tag = engine.update_weights(WeightUpdate.local(learner, 1))
    changed = engine.generate([REQUEST])[0]
    assert token_ids(changed) != token_ids(first) and tag.policy[0].digest != before
    assert token_ids(changed) == token_ids(engine_of(learner, format).generate([REQUEST])[0])
    assert all(torch.equal(t, base[name]) for name, t in tensors(learner).items() if name in base)
    low_bit = rollout_copy(learner, format, learner.dtype)
    if format != "bf16":
        assert torch.equal(logits(low_bit), logits(engine.model))
    sequences = [REQUEST.prompt_ids + ids for ids in token_ids(changed)]
    wanted = lowroll.score(low_bit, sequences, [9] * 3)
    bound = {"int8": 0.05, "w4a8": 0.05, "fp8": 0.3, "fp8_block": 0.3, "bf16": 0.3}.get(
        format, 1e-4
    )
    for rollout, logp in zip(changed.rollouts, wanted, strict=True):
        assert (torch.tensor(rollout.logprobs) - logp).abs().max() < bound


def test_the_adapter_rides_on_the_low_bit_product(folder: Path) -> None:
    """Engine and learner differ by the rounding of activations alone, and not by the adapter."""
    learner = nudge(lora_learner(folder), seed=4)
    engine = engine_of(learner)
    gap = (logits(engine.model) - logits(learner)).abs().max()
    with lora.disabled(learner):
        effect = (logits(engine.model) - logits(learner)).abs().max()
    assert 0 < gap < 0.05 * logits(learner).abs().max() and effect > 5 * gap


# -- full fine-tuning: nothing is shared -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "format"),
    [
        *((family, format) for family in FAMILIES for format in FEW),
        *(("qwen3", format) for format in FORMATS if format not in FEW),
        *(("qwen3-moe", format) for format in LAYOUTS if format not in (*FEW, *WIDE)),
    ],
)
def test_full_fine_tuning_publishes_a_fresh_quantization(
    family: str, format: str, tmp_path: Path
) -> None:
    """Publish of a changed master == quantize it afresh, bitwise, in storages that never moved."""
    master = hf.load(hf_folder(tmp_path / "m", family))
    dtype = torch.bfloat16 if format == "bf16" else torch.float32
    rollout = rollout_copy(master, format, dtype)
    places = pointers(rollout)
    assert not set(places.values()) & set(pointers(master).values()) and not rollout.shared
    for version in (1, 2, 3):
        publish(nudge(master, seed=version), rollout)
        assert pointers(rollout) == places
        for (name, ours), (_, theirs) in zip(rollout.linears(), master.linears(), strict=True):
            fresh = lowroll.quantize(theirs.weight, format)
            for part, t in ours.weight.tensors.items():
                assert torch.equal(t, fresh.tensors[part]), (name, part)
        mine = dict(master.named_parameters())
        for name, p in rollout.named_parameters():
            want = mine[name].to(dtype_of(name, dtype))
            assert p.dtype == want.dtype and torch.equal(p, want), name
        assert torch.equal(logits(rollout), logits(rollout_copy(master, format, dtype)))


@pytest.mark.parametrize("format", ["bf16", *FEW])
def test_a_master_that_learns_does_not_leak_into_the_engine(folder: Path, format: str) -> None:
    master = hf.load(folder)
    engine = engine_of(master, format)
    want, stamp, fixed = (
        token_ids(engine.generate([REQUEST])[0]),
        digest(engine.model),
        logits(engine.model),
    )
    nudge(master, seed=1)
    assert digest(engine.model) == stamp and torch.equal(logits(engine.model), fixed)
    assert token_ids(engine.generate([REQUEST])[0]) == want
    engine.update_weights(WeightUpdate.local(master, 1))
    assert digest(engine.model) != stamp and not torch.equal(logits(engine.model), fixed)


def test_norms_that_learn_over_a_quantized_base_are_not_shared(folder: Path) -> None:
    master = quantize_base(
        hf.load(folder), "int8"
    )  # not frozen: its norms and embedding would learn
    rollout = rollout_copy(master, "int8", torch.float32)
    mine, theirs = pointers(master), pointers(rollout)
    assert all((mine[name] == theirs[name]) == name.endswith((".codes", ".scale")) for name in mine)
    publish(nudge(master, seed=2), rollout)
    assert all(torch.equal(t, tensors(rollout)[name]) for name, t in tensors(master).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "format"),
    [*(("full", format) for format in LAYOUTS), *(("lora", format) for format in ("bf16", *FEW))],
)
def test_three_publications_with_and_without_noise_move_nothing(
    folder: Path, kind: str, format: str
) -> None:
    """Whoever holds an address (a CUDA graph) goes on with the new weights: it sees what a fresh
    copy has."""
    master = hf.load(folder) if kind == "full" else lora_learner(folder, format)
    dtype = torch.bfloat16 if format == "bf16" else torch.float32
    rollout = rollout_copy(master, format, dtype, noisy=True)
    places, held, seen = pointers(rollout), tensors(rollout), set()
    head = None if rollout.head is None else rollout.head.tensors["weight"].data_ptr()
    for version, noise in enumerate((Noise(1, 0.1), Noise(2, 0.1), None)):
        publish(nudge(master, seed=version), rollout, noise)
        fresh = rollout_copy(master, format, dtype, noisy=True)
        publish(master, fresh, noise)
        assert pointers(rollout) == places and (
            head is None or rollout.head.tensors["weight"].data_ptr() == head
        )
        assert all(
            torch.equal(held[n].view(torch.uint8), t.view(torch.uint8))
            for n, t in tensors(fresh).items()
        )
        assert torch.equal(logits(rollout), logits(fresh))
        seen.add(digest(rollout))
    assert len(seen) == 3


def products_of(model: Transformer) -> list[Tensor]:
    """The copies of A and B that an adapted model multiplies with."""
    pairs = [one.adapter.matrices(one.parts, torch.float32) for _, one in model.linears()]
    return [matrix for pair in pairs for matrix in pair]


def test_what_an_adapter_keeps_for_its_products_is_published_in_place(folder: Path) -> None:
    """A graph reads the copies of A and B, and nobody asks the adapter for them before it runs
    again."""
    learner = lora_learner(folder)
    rollout = rollout_copy(learner, "int8", torch.float32)
    logits(rollout)
    kept = products_of(rollout)
    before, places = [t.clone() for t in kept], [t.data_ptr() for t in kept]
    publish(nudge(learner, seed=1), rollout)
    fresh = rollout_copy(learner, "int8", torch.float32)
    logits(fresh)
    assert all(torch.equal(a, b) for a, b in zip(kept, products_of(fresh), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept, before, strict=True))
    assert places == [t.data_ptr() for t in products_of(rollout)]


def test_a_second_format_beside_the_first_is_published_with_it(folder: Path) -> None:
    """Its codes are the engine's own, also where the learner multiplies with the same format; what
    was made of a frozen base stays."""
    master = aligned_forward.align(hf.load(folder), "int8")
    rollout = rollout_copy(master, "nvfp4", torch.float32)
    second = beside(master, rollout, "int8")
    places, stamp = pointers(second), digest(second)
    aligned_forward.refresh(nudge(master, seed=1))
    assert digest(second) == stamp
    publish(master, rollout, large_batch_model=second)
    assert (
        pointers(second) == places
        and digest(second) == digest(rollout_copy(master, "int8", torch.float32)) != stamp
    )
    learner = lora_learner(folder, "nvfp4")
    rollout = rollout_copy(learner, "nvfp4", torch.float32)
    second = beside(learner, rollout, "int8")
    before = {name: t.clone() for name, t in tensors(second).items()}
    publish(nudge(learner, seed=2), rollout, large_batch_model=second)
    assert all(
        torch.equal(t, before[name]) == (".adapter." not in name)
        for name, t in tensors(second).items()
    )
    assert digest(second) == digest(beside(learner, rollout, "int8"))


def test_a_frozen_base_of_another_format_is_requantized_when_it_changes_and_not_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, made = lora_learner(folder, "nvfp4"), []
    rollout = rollout_copy(learner, "int8", torch.float32)
    encode = Int8.encode
    monkeypatch.setattr(
        Int8, "encode", lambda self, w_NK: made.append(w_NK.device.type) or encode(self, w_NK)
    )

    def publish_and_count() -> int:
        made.clear()
        publish(nudge(learner, seed=2), rollout)
        count = made.count("cpu")
        assert digest(rollout) == digest(rollout_copy(learner, "int8", torch.float32))
        return count

    assert publish_and_count() == 0
    (_, base), (_, ours) = (list(model.linears())[3] for model in (learner, rollout))
    base.weight.quantize_(base.weight.dequantize() * 1.5)  # the base has moved,
    assert (publish_and_count(), publish_and_count()) == (1, 0)
    ours.weight.quantize_(torch.ones(ours.weight.shape))  # or the engine's codes have,
    assert (publish_and_count(), publish_and_count()) == (1, 0)
    base.set_weight(base.weight.clone())  # or it is another tensor
    assert (publish_and_count(), publish_and_count()) == (1, 0)


# -- rung P7: publish is a pure function of the master ---------------------------------------------


@pytest.mark.parametrize("make", [lora_learner, hf.load], ids=["lora", "full"])
def test_publish_is_a_pure_function_of_the_master(
    folder: Path, make: Callable[[Path], Transformer]
) -> None:
    """The digest depends on the master alone: not on what was published before, nor on how
    often."""
    masters = {seed: nudge(make(folder), seed) for seed in (1, 2)}
    fresh = {seed: rollout_copy(m, "int8", torch.float32) for seed, m in masters.items()}
    assert digest(fresh[1]) != digest(fresh[2])
    master = nudge(make(folder), 1)
    rollout = rollout_copy(master, "int8", torch.float32)
    for seed in (1, 2, 2, 1, 2, 1):
        with torch.no_grad():
            for p, q in zip(master.parameters(), masters[seed].parameters(), strict=True):
                p.copy_(q)
        publish(master, rollout)
        assert digest(rollout) == digest(fresh[seed])
        assert all(
            torch.equal(t, tensors(fresh[seed])[name]) for name, t in tensors(rollout).items()
        )
    assert digest(rollout) == digest(copy.deepcopy(rollout))


def flip(tensor: Tensor, index: int, bit: int) -> None:
    """Flip one bit of the tensor's bytes, in place."""
    tensor.detach().view(-1).view(torch.uint8)[index] ^= 1 << bit


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_digest_sees_every_single_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """A flipped bit in the first, a middle and the last bytes of every stored tensor (heads of 6:
    odd sizes too)."""
    path = hf_folder(tmp_path / "m", "qwen3-tied-bias", head_dim=6)
    rollout = rollout_copy(nudge(lora_learner(path), 1), "int8", dtype)
    assert (dtype == torch.bfloat16) == any(t.nbytes % 8 for t in tensors(rollout).values())
    stamp, seen, kinds = digest(rollout), set(), set()
    for name, tensor in tensors(rollout).items():
        if name.startswith("blocks.1") and ".adapter." in name:
            continue  # block 0's adapters speak for them
        size, step = tensor.nbytes, tensor.element_size()
        for index in {0, step - 1, size // 2, size - 1}:
            bit = (index * 5 + len(name)) % 8
            flip(tensor, index, bit)
            changed = digest(rollout)
            assert changed != stamp, (name, index, bit)
            seen.add(changed)
            kinds.add(name.rsplit(".", 1)[-1])
            flip(tensor, index, bit)
    assert digest(rollout) == stamp and len(seen) > 100  # no two flips look alike
    assert {"weight", "bias", "embedding", "codes", "scale", "q_proj", "down_proj"} <= kinds


def test_the_digest_sees_order_names_and_the_scaling(folder: Path) -> None:
    rollout = rollout_copy(nudge(lora_learner(folder), 1), "int8", torch.float32)
    stamp = digest(rollout)
    weight = rollout.norm.weight.detach()
    weight[:4] = weight[[2, 3, 0, 1]]  # whole 8-byte words change places
    assert digest(rollout) != stamp
    weight[:4] = weight[[2, 3, 0, 1]]
    first, second = rollout.blocks[0].input_norm, rollout.blocks[1].input_norm
    first.weight, second.weight = second.weight, first.weight
    assert digest(rollout) != stamp
    first.weight, second.weight = second.weight, first.weight
    rollout.blocks[0].qkv.adapter.alpha *= 2
    assert digest(rollout) != stamp
    rollout.blocks[0].qkv.adapter.alpha /= 2
    assert digest(rollout) == stamp


# -- a master that does not fit changes nothing ----------------------------------------------------


def refused(engine: Engine, master: Transformer, words: str) -> None:
    before, places = (
        digest(engine.model),
        {name: t.clone() for name, t in tensors(engine.model).items()},
    )
    with pytest.raises(ValueError, match=words):
        engine.update_weights(WeightUpdate.local(master, 1))
    assert digest(engine.model) == before == engine.behavior.policy[0].digest
    assert all(torch.equal(t, places[name]) for name, t in tensors(engine.model).items())
    assert engine.behavior.policy[0].version == 0


def test_masters_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    master, learner = hf.load(folder), lora_learner(folder)
    full, shared = engine_of(master), engine_of(learner)
    refused(
        full, lora.attach(hf.load(folder), 3, 6.0), "adapter"
    )  # it would roll out without the adapter
    refused(full, hf.load(hf_folder(tmp_path / "other", "qwen3")), "sizes")
    other = nudge(lora_learner(folder), 1)
    refused(shared, other, "belongs to another model")  # it would overwrite the learner's base
    refused(shared, master, "adapter")
    recast = rollout_copy(
        learner, "int8", torch.bfloat16
    )  # the learner's codes, with norms of its own
    refused(shared, recast, r"^publish: \S*(norm\.weight|embedding|bias) belongs to another model")
    rescaled = rollout_copy(learner, "int8", torch.float32)
    rescaled.blocks[1].down.adapter.alpha = 12.0
    refused(shared, rescaled, r"blocks\.1\.down: the adapter's scaling is 4")
    for value in (float("nan"), float("inf"), -float("inf")):
        with torch.no_grad():
            master.norm.weight += 1.0
            master.blocks[1].down.weight[3, 5] = value
        refused(full, master, r"blocks\.1\.down\.weight holds a non-finite")


def test_quantizing_a_base_names_a_bad_weight(folder: Path) -> None:
    model = hf.load(folder)
    with torch.no_grad():
        model.blocks[1].o.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"blocks\.1\.o\.weight: int8: .*non-finite"):
        quantize_base(model, "int8")
    with pytest.raises(ValueError, match="int9"):
        quantize_base(hf.load(folder), "int9")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_did_not_arrive_is_named(
    folder: Path, format: str, dtype: torch.dtype
) -> None:
    master = hf.load(folder, dtype=dtype)
    rollout = rollout_copy(master, format, dtype)
    last = master.spec.num_layers - 1
    nudge(master, seed=1, size=0.05)
    assert first_difference(master, rollout, last) is not None
    publish(master, rollout)
    assert all(first_difference(master, rollout, block) is None for block in range(last + 1))
    with torch.no_grad():
        master.blocks[last].down.weight.mul_(2)
    assert first_difference(master, rollout, last) == f"blocks.{last}.down.weight"
    assert first_difference(master, rollout, 0) is None  # another block is not looked at
    publish(master, rollout)
    with torch.no_grad():
        master.norm.weight += 1
    assert first_difference(master, rollout, 0) == "norm.weight"


def test_an_adapter_that_did_not_arrive_is_named(folder: Path) -> None:
    master = lora_learner(folder)
    rollout = rollout_copy(master, "int8", master.dtype)
    assert first_difference(master, rollout, 1) is None
    nudge(master, seed=1, size=0.05)
    name = first_difference(master, rollout, 1)
    assert name is not None and name.startswith("blocks.1.") and ".adapter." in name
    publish(master, rollout)
    assert first_difference(master, rollout, 1) is None


def test_norms_with_noise_are_not_compared(folder: Path) -> None:
    master = hf.load(folder)
    rollout = rollout_copy(master, "int8", master.dtype, noisy=True)
    publish(master, rollout, Noise(1, 0.02))
    assert first_difference(master, rollout, 0, noisy=True) is None
    assert first_difference(master, rollout, 0) == "blocks.0.input_norm.weight"
