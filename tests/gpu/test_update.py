"""On a CUDA device: weights are updated in place, whatever holds their addresses goes on, and
folders arrive whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll import Engine, Request
from lowroll.kernels import checksum
from lowroll.model import hf, lora, shards
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy, rollout_load
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.masters import nudge, pointers, tensors
from tests.fixtures.tiny import COMMON, hf_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

IDS = torch.randint(2, COMMON["vocab_size"], (64,), generator=torch.Generator().manual_seed(0))
REQUESTS = [
    Request(
        IDS[i : i + 5 + 3 * i].tolist(),
        n=3,
        max_tokens=24,
        seed=i,
        ignore_eos=True,
        temperature=[1.0, 0.0][i % 2],
    )
    for i in range(4)
]
SIZES = dict(
    hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=32
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", **SIZES)


def addresses(model: Transformer) -> dict[str, int]:
    """Return the addresses that a graph may hold: of parameters, codes, scales, and what kernels
    derived from them."""
    held = pointers(model)
    qtensors = {
        name: linear.weight
        for name, linear in model.linears()
        if isinstance(linear.weight, QTensor)
    }
    for name, linear in model.linears():
        if linear.adapter is not None and linear.adapter._made is not None:
            held |= {
                f"{name}.adapter.{i}": t.data_ptr() for i, t in enumerate(linear.adapter._made)
            }
    if model.head is not None:
        qtensors["head"] = model.head
    for name, q in qtensors.items():
        for key, kept in q.packed.items():
            for i, t in enumerate(kept if isinstance(kept, tuple) else (kept,)):
                held |= (
                    {f"{name}.{key}.{i}": t.data_ptr()}
                    if isinstance(t, Tensor)
                    else {f"{name}.{key}.{i}.{part}": x.data_ptr() for part, x in t.tensors.items()}
                )
    return held


def drawn(engine: Engine) -> tuple[list[list[int]], Tensor]:
    rows = [r for group in engine.generate(REQUESTS) for r in group.rollouts]
    return [r.token_ids for r in rows], torch.tensor([x for r in rows for x in r.logprobs])


def masters(folder: Path, kind: str, format: str) -> Transformer:
    model = hf.load(folder, "cuda")
    return (
        model
        if kind == "full"
        else lora.attach(quantize_base(model, format), rank=3, alpha=6.0, seed=1)
    )


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        *(("full", name) for name in lowroll.formats() if name != "fp32"),
        *(("lora", name) for name in ("bf16", "int8", "fp8", "nvfp4", "int4")),
    ],
)
def test_three_publications_move_nothing_and_reach_every_step(
    folder: Path, format: str, kind: str
) -> None:
    """After each, an engine that has run for long draws what a new one draws, and graphs draw what
    single steps do."""
    master = masters(folder, kind, format)
    engine = Engine(master, weights=format, cache_tokens=4096, max_batch=16, noisy=True)
    drawn(engine)
    held = addresses(engine.model)
    cache = [t.data_ptr() for t in (*engine.runner.cache.keys, *engine.runner.cache.values)]
    seen = set()
    for version in (1, 2, 3):
        noise = Noise(version, 0.02) if version < 3 else None
        engine.update_weights(
            WeightUpdate.local(nudge(master, seed=version, size=0.05), version, noise)
        )
        assert addresses(engine.model) == held
        assert engine.first_difference(master, version % master.spec.num_layers) is None
        got, logprobs = drawn(engine)
        fresh = Engine(master, weights=format, cache_tokens=4096, max_batch=16, noisy=True)
        fresh.update_weights(WeightUpdate.local(master, version, noise))
        assert digest(engine.model) == digest(fresh.model)
        want, theirs = drawn(fresh)
        assert got == want and torch.equal(logprobs, theirs)
        seen.add(str(got))
    assert len(seen) == 3 and addresses(engine.model) == held
    assert [t.data_ptr() for t in (*engine.runner.cache.keys, *engine.runner.cache.values)] == cache
    assert engine.runner.decoder.replays > 0
    eager = Engine(
        master, weights=format, cache_tokens=4096, max_batch=16, noisy=True, cuda_graphs=False
    )
    eager.update_weights(WeightUpdate.local(master, 3))
    plain, logprobs = drawn(eager)
    assert plain == got and torch.equal(logprobs, theirs)


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("full", "bf16"),
        ("full", "int8"),
        ("full", "int8_rotated"),
        ("full", "nvfp4"),
        ("lora", "bf16"),
        ("lora", "nvfp4"),
    ],
)
def test_a_stream_from_the_host_reaches_the_graphs_as_a_local_update_does(
    folder: Path, format: str, kind: str
) -> None:
    learner = masters(folder, kind, format)
    near, far = (
        Engine(model, weights=format, cache_tokens=4096, max_batch=16, noisy=True)
        for model in (learner, masters(folder, kind, format))
    )
    assert drawn(near)[0] == drawn(far)[0]
    held = addresses(far.model)
    for version in (1, 2):
        noise = Noise(version, 0.02) if version == 1 else None
        nudge(learner, seed=version, size=0.05)
        update = WeightUpdate.local(learner, version, noise)
        sent = update.as_stream()
        arrived = [(name, tensor.cpu()) for name, tensor in sent.tensors()]
        tag = near.update_weights(update)
        assert far.update_weights(replace(sent, tensors=lambda: iter(arrived))) == tag
        assert addresses(far.model) == held
        (got, logprobs), (want, theirs) = drawn(far), drawn(near)
        assert got == want and torch.equal(logprobs, theirs)


LARGE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)
MANY = [
    Request(IDS[i : i + 20].tolist(), n=8, max_tokens=20, seed=i, ignore_eos=True) for i in range(6)
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"weights": "bf16"}),
        ("qwen3", {"weights": "nvfp4"}),
        ("qwen3", {"weights": "nvfp4", "keep_dense": True}),
        ("qwen3", {"weights": "nvfp4", "large_batch_weights": "fp8"}),
        ("qwen3-moe", {"weights": "bf16"}),
        ("qwen3-moe", {"weights": "fp8"}),
        ("qwen3-moe", {"weights": "nvfp4", "keep_dense": True}),
    ],
)
def test_publications_reach_dense_copies_the_bulk_and_experts(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """48 rows of sizes that every kernel takes: siblings in one block, streamed codes, grouped
    products."""
    master = hf.load(hf_folder(tmp_path / family, family, **LARGE), "cuda")
    settings = options | {"cache_tokens": 4096, "max_batch": 64}
    engine = Engine(master, **settings)
    models = [
        model
        for model in (engine.runner.model, engine.runner.decoder.large_batch_model)
        if model is not None
    ]

    def draw(engine: Engine) -> tuple[list[list[int]], Tensor]:
        engine.pool.clear_prefixes()
        rows = [r for group in engine.generate(MANY) for r in group.rollouts]
        return [r.token_ids for r in rows], torch.tensor([x for r in rows for x in r.logprobs])

    draw(engine)
    held = [addresses(model) for model in models]
    for version in (1, 2, 3):
        engine.update_weights(WeightUpdate.local(nudge(master, seed=version, size=0.05), version))
        got, logprobs = draw(engine)
        assert [addresses(model) for model in models] == held
        fresh = Engine(master, **settings)
        want, theirs = draw(fresh)
        assert got == want and torch.equal(logprobs, theirs)
    assert engine.runner.decoder.replays > 0
    plain, logprobs = draw(Engine(master, **settings, cuda_graphs=False))
    assert plain == got and torch.equal(logprobs, theirs)


def test_what_a_kernel_derived_is_made_again_in_place() -> None:
    q = lowroll.quantize(torch.randn(64, 32, device="cuda"), "int8")
    turned = q.derive(
        "turned", lambda q: (q.tensors["codes"].t().contiguous(), q.tensors["scale"].flatten() * 2)
    )
    held = [t.data_ptr() for t in turned]
    for w in (torch.randn(64, 32, device="cuda"), torch.zeros(64, 32, device="cuda")):
        q.quantize_(w)
        assert q.derive("turned", lambda q: pytest.fail("made twice")) is turned
        assert [t.data_ptr() for t in turned] == held
        assert torch.equal(turned[0], q.tensors["codes"].t())
        assert torch.equal(turned[1], q.tensors["scale"].flatten() * 2)


@pytest.mark.parametrize("format", ["bf16", "int8", "int8_rotated", "fp8", "nvfp4"])
def test_a_weight_that_is_not_finite_changes_nothing(folder: Path, format: str) -> None:
    master = hf.load(folder, "cuda")
    rollout = rollout_copy(master, format, torch.bfloat16)
    before = {name: t.clone() for name, t in tensors(rollout).items()}
    for value in (float("nan"), float("inf"), -float("inf")):
        with torch.no_grad():
            master.norm.weight += 1
            master.blocks[1].down.weight[-1, -1] = value
        with pytest.raises(ValueError, match=r"blocks\.1\.down\.weight holds a non-finite"):
            publish(master, rollout)
        assert all(
            torch.equal(t.view(torch.uint8), before[n].view(torch.uint8))
            for n, t in tensors(rollout).items()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checksums_and_magnitudes_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    sizes = (0, 1, 3, 7, 4096, 100_003, (1 << 20) + 1)
    here = [torch.randn(n).to(dtype) for n in sizes]
    here += [torch.randn(300, 70).to(dtype).t(), torch.randn(99)[1:].to(dtype)]
    there = [t.cuda() for t in here]
    assert checksum.checksums(there) == checksum.checksums(here)
    assert torch.equal(torch.cat(checksum.amax(there)).cpu(), torch.cat(checksum.amax(here)))
    there[4][-1], there[6][77] = float("nan"), -float("inf")
    assert checksum.finite(checksum.amax(there)) == [i not in (4, 6) for i in range(len(there))]


@pytest.mark.parametrize(
    "format", [None, *(name for name in lowroll.formats() if name not in ("q4_0", "q4_1", "q8_0"))]
)
def test_folders_arrive_on_the_device_as_on_the_cpu(
    folder: Path, format: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many small pieces, and from a folder that holds the format itself."""
    monkeypatch.setattr(shards, "PIECE", 1 << 10)
    monkeypatch.setattr(shards, "AHEAD", 1 << 14)
    for dtype in (torch.float32, torch.bfloat16):
        here, there = (hf.load(folder, device, dtype, format) for device in ("cpu", "cuda"))
        assert digest(here) == digest(there) and all(p.is_cuda for p in there.parameters())
    if (
        format not in (None, "fp8_block", "nf4_dq") and not get_format(format).dense
    ):  # their blocks span two parts
        hf.save(here, tmp_path / "low")
        assert digest(hf.load(tmp_path / "low", "cuda", torch.bfloat16)) == digest(here)
        assert digest(rollout_load(tmp_path / "low", format, "cuda", torch.bfloat16)) == digest(
            here
        )


def test_the_cache_goes_back_and_comes_again(folder: Path) -> None:
    engine = Engine(folder, weights="int8", cache_tokens=1 << 20, max_batch=16)
    want = drawn(engine)
    cache = engine.runner.cache
    places, captured = [t.data_ptr() for t in cache.keys], dict(engine.runner.decoder._graphs)
    size = sum(t.nbytes for t in (*cache.keys, *cache.values))
    if cache.virtual_memory is None:
        held = torch.cuda.memory_allocated()
        engine.release()
        assert torch.cuda.memory_allocated() <= held - size
    else:
        back = []
        for _ in range(5):  # other processes take and give memory of the device meanwhile
            cache.restore()
            free = torch.cuda.mem_get_info()[0]
            engine.release()
            back.append(torch.cuda.mem_get_info()[0] - free)
        assert sorted(back)[2] >= size * 0.9
    got = drawn(engine)
    assert got[0] == want[0] and torch.equal(got[1], want[1])
    if cache.virtual_memory is not None:  # the graphs are those of before
        assert [t.data_ptr() for t in cache.keys] == places
        assert captured and all(
            engine.runner.decoder._graphs[key] is graph for key, graph in captured.items()
        )
