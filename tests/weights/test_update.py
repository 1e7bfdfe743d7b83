"""A weight update as a value: a stream and the local path give an engine the same bits, the digest
is of names and bytes, and a stream that does not fit changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowroll import Engine, Request, WeightUpdate
from lowroll.model import hf, lora, scaling
from lowroll.model.transformer import Transformer
from lowroll.weights import aligned_forward, publish
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.publish import digest, fingerprint, quantize_base
from tests.fixtures.formats import FEW, LAYOUTS
from tests.fixtures.masters import nudge, pointers, tensors
from tests.fixtures.tiny import COMMON, hf_folder

NOISE = Noise(11, 0.1)
IDS = torch.randint(2, COMMON["vocab_size"], (9,), generator=torch.Generator().manual_seed(0))
REQUEST = Request(IDS.tolist(), n=3, max_tokens=8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("models")
    families = ("qwen3", "qwen2-tied", "qwen3-moe", "llama-biases", "gpt-oss")
    return {family: hf_folder(home / family, family) for family in families}


def engine_on(model: Transformer, weights: str = "int8", **options: Any) -> Engine:
    settings = {"device": "cpu", "cache_tokens": 512, "page_size": 4, **options}
    return Engine(model, weights=weights, **settings)


def adapted(folder: Path, weights: str | None = "int8") -> Transformer:
    """A LoRA learner, on a base in `weights` or on the dense one."""
    model = hf.load(folder)
    base = model if weights is None else quantize_base(model, weights)
    return lora.attach(base, rank=3, alpha=6.0, targets=["q_proj", "v_proj", "o_proj"], seed=1)


def travelled(update: WeightUpdate, seed: int = 0) -> WeightUpdate:
    """The update as another process would see it: in any order, in storages of its own."""
    sent = update.as_stream()
    assert sent.master is None
    arrived = [(name, tensor.clone()) for name, tensor in sent.tensors()]
    random.Random(seed).shuffle(arrived)
    return replace(sent, tensors=lambda: iter(arrived))


def drawn(engine: Engine) -> list[tuple[list[int], list[float]]]:
    engine.reset_prefix_cache()
    return [(r.token_ids, r.logprobs) for r in engine.generate([REQUEST])[0].rollouts]


def assert_alike(near: Engine, far: Engine) -> None:
    """Same bits in every storage of all models, same tags, same tokens."""
    models = [(near.model, far.model), (near.large_batch_model, far.large_batch_model)]
    for mine, theirs in models:
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        ours, others = tensors(mine), tensors(theirs)
        assert ours.keys() == others.keys()
        for name in ours:
            assert torch.equal(bits(ours[name]), bits(others[name])), name
    assert near.behavior == far.behavior and drawn(near) == drawn(far)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def follow(
    learner: Transformer, near: Engine, far: Engine, noises: Iterable[Noise | None]
) -> list[str]:
    """Update both engines step by step, one locally and one by a stream; the digests of the
    policies."""
    seen, places = [digest(far.model)], pointers(far.model)
    for version, noise in enumerate(noises, 1):
        nudge(learner, seed=version)
        update = WeightUpdate.local(learner, version, noise)
        tags = near.update_weights(update), far.update_weights(travelled(update, version))
        assert tags[0] == tags[1] == far.behavior and tags[0].policy[0].version == version
        assert_alike(near, far)
        assert pointers(far.model) == places
        seen.append(tags[1].policy[0].digest)
    assert len(set(seen)) == len(seen)
    return seen


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "format"),
    [
        *(("qwen3", format) for format in LAYOUTS),
        *((family, format) for family in ("qwen2-tied", "qwen3-moe", "gpt-oss") for format in FEW),
    ],
)
def test_a_full_stream_is_the_local_update(
    folders: dict[str, Path], family: str, format: str
) -> None:
    master = hf.load(folders[family])
    near, far = (engine_on(hf.load(folders[family]), format, noisy=True) for _ in range(2))
    follow(master, near, far, [None, NOISE, None])


@pytest.mark.slow
@pytest.mark.parametrize("format", FEW)
def test_an_adapter_is_the_local_update(folders: dict[str, Path], format: str) -> None:
    """The far engine stands on a base of its own; noise comes and goes on the base's norms."""
    learner = adapted(folders["qwen3"], format)
    near = engine_on(learner, format, noisy=True)
    far = engine_on(adapted(folders["qwen3"], format), format, noisy=True)
    names = [name for name, _ in WeightUpdate.local(learner, 1).tensors()]
    assert names and all("lora_" in name for name in names)
    follow(learner, near, far, [None, NOISE, Noise(12, 0.05), None])


@pytest.mark.parametrize("base", [None, "nvfp4"])
def test_both_formats_of_an_engine_are_refilled(folders: dict[str, Path], base: str | None) -> None:
    """An adapter leaves the base alone, also that of the second format."""
    options = {"weights": "nvfp4", "large_batch_weights": "fp8", "noisy": True}
    near, far = (engine_on(hf.load(folders["llama-biases"]), **options) for _ in range(2))
    follow(hf.load(folders["llama-biases"]), near, far, [None, NOISE])
    learner = adapted(folders["llama-biases"], base)
    near = engine_on(learner, **options)
    far = engine_on(adapted(folders["llama-biases"], base), **options)
    follow(learner, near, far, [None, NOISE, None])


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_a_stream_of_an_aligned_learner_has_its_codes(
    folders: dict[str, Path], format: str
) -> None:
    master = aligned_forward.align(hf.load(folders["qwen3"]), format)
    near, far = engine_on(master, format), engine_on(hf.load(folders["qwen3"]), format)
    nudge(master, seed=3)
    aligned_forward.refresh(master)
    update = WeightUpdate.local(master, 1)
    near.update_weights(update)
    far.update_weights(travelled(update))
    assert_alike(near, far)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_of_half_precision_streams_as_it_is(
    folders: dict[str, Path], dtype: torch.dtype
) -> None:
    master = nudge(hf.load(folders["qwen3"], dtype=dtype), seed=1, size=0.02)
    near, far = (engine_on(hf.load(folders["qwen3"])) for _ in range(2))
    update = WeightUpdate.local(master, 1)
    assert {tensor.dtype for _, tensor in update.tensors()} == {dtype}
    near.update_weights(update)
    far.update_weights(travelled(update))
    assert_alike(near, far)


def test_noise_of_a_scaled_model_grows_with_it(folders: dict[str, Path]) -> None:
    masters = [scaling.scale(hf.load(folders["qwen3"]), 1.5) for _ in range(3)]
    near, far = (engine_on(master, noisy=True) for master in masters[:2])
    assert WeightUpdate.local(masters[2], 1).input_scale == 1.5
    follow(masters[2], near, far, [NOISE])


# -- the digest is of names and bytes --------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-moe"])
def test_learner_and_file_agree_on_the_digest(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    learner = nudge(hf.load(folders[family]), seed=1)
    hf.save(learner, tmp_path / "full")
    stored = load_file(tmp_path / "full" / "model.safetensors")
    update = WeightUpdate.local(learner, 1)
    assert dict(update.tensors()).keys() == stored.keys()
    assert fingerprint(stored, {"input_scale": 1.0}) == update.content_digest()
    learner = nudge(adapted(folders[family]), seed=1)
    lora.save(learner, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    numbers = {"lora_alpha": 6.0, "input_scale": 1.0}
    assert fingerprint(stored, numbers) == WeightUpdate.local(learner, 1).content_digest()


def test_the_digest_sees_names_bytes_and_what_else_changes_the_policy(
    folders: dict[str, Path],
) -> None:
    update = travelled(WeightUpdate.local(nudge(adapted(folders["qwen3"]), 1), 1))
    sent = dict(update.tensors())
    first, second = [name for name in sent if "q_proj.lora_A" in name]
    swapped = sent | {first: sent[second], second: sent[first]}
    flipped = sent | {first: sent[first].clone()}
    flipped[first].view(torch.uint8).view(-1)[-1] ^= 1
    others = [
        replace(update, tensors=swapped.items),
        replace(update, tensors=flipped.items),
        replace(update, lora_alpha=7.0),
        replace(update, input_scale=2.0),
    ]
    digests = {other.content_digest() for other in others}
    assert len(digests) == 4 and update.digest not in digests
    assert replace(update, version=9, noise=NOISE).content_digest() == update.digest


def test_a_local_update_reads_no_name_and_takes_no_second_digest(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, taken = hf.load(folders["qwen3"]), []
    engine = engine_on(hf.load(folders["qwen3"]))

    def counted(*arguments: Any) -> str:
        taken.append(arguments)
        return fingerprint(*arguments)

    monkeypatch.setattr(publish, "fingerprint", counted)
    monkeypatch.setattr("lowroll.weights.sync.update.fingerprint", counted)
    update = WeightUpdate.local(master, 1)
    silent = replace(update, tensors=lambda: pytest.fail("a local update was streamed"))
    assert engine.update_weights(silent).policy[0].digest == engine.behavior.policy[0].digest
    assert len(taken) == 1 and update.digest is None
    before = dict(update.tensors())["model.norm.weight"].clone()
    nudge(master, seed=1)  # nothing is read before it is asked for
    assert not torch.equal(dict(update.tensors())["model.norm.weight"], before)


# -- a stream that does not fit changes nothing ----------------------------------------------------

Change = Callable[[dict[str, Tensor]], Iterable[tuple[str, Tensor]]]
NORM, Q, K = (
    "model.norm.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
)
LORA_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def with_value(sent: dict[str, Tensor], name: str, value: float) -> dict[str, Tensor]:
    changed = sent[name].clone()
    changed.view(-1)[-1] = value
    return sent | {name: changed}


def breaks_off(sent: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(sent.items())[:-1]
    raise ConnectionResetError("the sender is gone")


FULL: dict[str, tuple[Change, str]] = {
    "missing": (lambda s: {n: t for n, t in s.items() if n != NORM}.items(), f"missing.*{NORM}"),
    "extra": (lambda s: (s | {"lm_head.bias": s[NORM]}).items(), r"lm_head\.bias: .* no such"),
    "twice": (lambda s: [*s.items(), (NORM, s[NORM])], f"{NORM}: it comes twice"),
    "shape": (lambda s: (s | {Q: s[Q][:-1]}).items(), rf"{Q}: shape \[63, 32\] instead of \[64"),
    "dtype": (lambda s: (s | {NORM: s[NORM].long()}).items(), f"{NORM}: torch.int64 is no float32"),
    "parts": (lambda s: (s | {K: s[K].half()}).items(), f"{K}.*different dtypes"),
    "nan": (lambda s: with_value(s, NORM, float("nan")).items(), f"{NORM} holds a non-finite"),
    "inf": (lambda s: with_value(s, Q, float("-inf")).items(), f"{Q} holds a non-finite"),
    "digest": (lambda s: with_value(s, Q, 0.5).items(), "digest: [0-9a-f]{32} was stated"),
    "broken": (breaks_off, "the sender is gone"),
}
ADAPTER: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda s: {n: t for n, t in s.items() if n != LORA_A}.items(),
        f"missing.*{LORA_A}",
    ),
    "extra": (lambda s: (s | {NORM: s[LORA_A]}).items(), f"{NORM}: .* no such"),
    "rank": (lambda s: (s | {LORA_A: s[LORA_A][:2]}).items(), rf"{LORA_A}: shape \[2, 32\]"),
    "nan": (lambda s: with_value(s, LORA_A, float("nan")).items(), f"{LORA_A} holds a non-finite"),
    "digest": (lambda s: with_value(s, LORA_A, 0.5).items(), "digest: [0-9a-f]{32} was stated"),
}


def refused(engine: Engine, update: WeightUpdate, words: str) -> None:
    before = {name: t.clone() for name, t in tensors(engine.model).items()}
    tag, tokens = engine.behavior, drawn(engine)
    with pytest.raises((ValueError, ConnectionResetError), match=words):
        engine.update_weights(update)
    for name, tensor in tensors(engine.model).items():
        assert torch.equal(bits(tensor), bits(before[name])), name
    assert engine.behavior == tag and drawn(engine) == tokens


@pytest.mark.parametrize("change", FULL)
def test_a_full_stream_is_taken_whole_or_not_at_all(folders: dict[str, Path], change: str) -> None:
    sent = travelled(WeightUpdate.local(nudge(hf.load(folders["qwen3"]), 1), 1, NOISE))
    spoil, words = FULL[change]
    engine = engine_on(hf.load(folders["qwen3"]), noisy=True)
    refused(engine, replace(sent, tensors=lambda: spoil(dict(sent.tensors()))), words)
    engine.update_weights(sent)  # and the next one that fits is taken


@pytest.mark.parametrize("change", ADAPTER)
def test_an_adapter_is_taken_whole_or_not_at_all(folders: dict[str, Path], change: str) -> None:
    sent = travelled(WeightUpdate.local(nudge(adapted(folders["qwen3"]), 1), 1, NOISE))
    spoil, words = ADAPTER[change]
    engine = engine_on(adapted(folders["qwen3"]), noisy=True)
    refused(engine, replace(sent, tensors=lambda: spoil(dict(sent.tensors()))), words)
    engine.update_weights(sent)


@pytest.mark.parametrize("targets", [lora.TARGETS[:4], ["o_proj"]])
def test_an_engine_with_more_room_takes_a_smaller_adapter(
    folders: dict[str, Path], targets: list[str]
) -> None:
    """The same policy: its digest, and its tokens; log-probs but for the order of sums."""
    room = lora.attach(hf.load(folders["qwen3"]), rank=8, alpha=16.0)
    wide, places = engine_on(room), pointers(room)
    for version, (rank, alpha) in enumerate([(3, 7.0), (8, 1.0), (2, 4.0)], 1):
        learner = lora.attach(hf.load(folders["qwen3"]), rank, alpha, targets)
        sent = WeightUpdate.local(nudge(learner, version), version)
        near, tag = engine_on(learner), wide.update_weights(travelled(sent, version))
        assert tag.policy[0].digest == near.update_weights(sent).policy[0].digest
        for (ids, logprobs), (theirs, others) in zip(drawn(wide), drawn(near), strict=True):
            assert ids == theirs and logprobs == pytest.approx(others, abs=1e-4)
        assert pointers(room) == places
    high = lora.attach(hf.load(folders["qwen3"]), rank=9, alpha=9.0)
    refused(wide, travelled(WeightUpdate.local(high, 4)), "has rank 9, .* has room for 8")


def test_streams_for_another_engine_are_refused(folders: dict[str, Path]) -> None:
    folder = folders["qwen3"]
    full = travelled(WeightUpdate.local(nudge(hf.load(folder), 1), 1))
    adapter = travelled(WeightUpdate.local(nudge(adapted(folder), 1), 1))
    dense, low = engine_on(hf.load(folder)), engine_on(adapted(folder))
    refused(dense, adapter, "kind 'adapter': this engine takes streams of kind 'full'")
    refused(low, full, "kind 'full': this engine takes streams of kind 'adapter'")
    codes = WeightUpdate.local(quantize_base(hf.load(folder), "int8"), 1)
    assert codes.kind == "codes"
    refused(dense, travelled(codes), "kind 'codes': this engine takes streams of kind 'full'")
    refused(low, replace(adapter, lora_alpha=None), "lora_alpha: not said")
    refused(dense, replace(full, input_scale=1.5), "input_scale: .* s = 1.5, .* model 1.0")
    coarse = engine_on(hf.load(folder), dtype=torch.bfloat16)
    for engine, sent in ((coarse, full), (low, adapter)):
        assert not engine.capabilities.noise
        refused(engine, replace(sent, noise=NOISE), "cannot take noise")
    refused(
        engine_on(quantize_base(hf.load(folder), "int8"), "int8"), full, "whose base the engine"
    )
