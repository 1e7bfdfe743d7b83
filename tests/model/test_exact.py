"""`Transformer.be_exact`: what an engine records is what the learner computes, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from lowroll.engine.native import NativeEngine
from lowroll.kernels.invariant import rows
from lowroll.model import exact, hf, lora
from lowroll.model.scoring import score
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed
from lowroll.quant.table import low_bit
from lowroll.types import Request
from lowroll.weights import aligned
from lowroll.weights.publish import quantize_base
from tests.fixtures.tiny import hf_folder

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not rows.supports_device(CPU), reason="needs a CPU with AVX2 and a C++ compiler"
)
FAMILIES = ("qwen3", "llama-biases", "qwen2-tied", "qwen3-moe")
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 16 numbers


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("exact") / "m", request.param, **HEADS)


def exact_model(folder: Path, format: str, adapter: bool = False) -> Transformer:
    """A learner that is exact beside rollouts in a format."""
    model = hf.load(folder).requires_grad_(False)
    if format == "mixed":
        linears = dict(model.linears())
        names = {name: ("int8_rotated", "fp32", "int8")[i % 3] for i, name in enumerate(linears)}
        sizes = {name: linear.weight.numel() for name, linear in linears.items()}  # type: ignore[operator]
        format = mixed.register(names, sizes)
    if adapter:
        quantize_base(model, format)
        targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
        lora.attach(model, 4, 8.0, targets[: 3 if model.spec.num_experts else 5], 0)
        draw = torch.Generator().manual_seed(1)
        for name, p in model.trainable_parameters().items():
            if ".b." in name:
                p.data.copy_(torch.randn(p.shape, generator=draw) * 0.1)
    if format != "fp32":
        aligned.align(model, format)
    exact.refuse(model.spec, CPU, torch.float32)
    return model.be_exact()


def requests(draw: random.Random, vocab: int) -> list[Request]:
    """Of all lengths and numbers, some with the same beginning."""
    start = [draw.randrange(2, vocab) for _ in range(draw.choice((0, 5, 20)))]
    return [
        Request(
            start + [draw.randrange(2, vocab) for _ in range(draw.randrange(1, 30))],
            n=draw.randrange(1, 4),
            max_tokens=draw.randrange(1, 24),
            temperature=draw.choice((1.0, 0.7, 1.3)),
            seed=draw.randrange(1 << 30),
        )
        for _ in range(draw.randrange(1, 5))
    ]


def check(model: Transformer, format: str, seed: int) -> int:
    """Draw in one way of many, and score in another; the number of tokens."""
    draw = random.Random(seed)
    engine = NativeEngine(
        model,
        format,
        page_size=draw.choice((1, 4, 16)),
        cache_tokens=draw.choice((128, 512, 2048)),
        max_batch=draw.randrange(1, 9),
        prefill_chunk=draw.choice((None, 3, 16)),
        max_prefill_tokens=draw.choice((8, 64, 8192)),
        lookahead=draw.choice((None, 1, 4)),
        one_pass=draw.random() < 0.5,
    )
    tokens = 0
    for _ in range(2):  # the second finds prefixes of the first
        for group in engine.generate(requests(draw, model.spec.vocab_size)):
            request = group.request
            texts = [request.prompt_ids + r.token_ids for r in group.rollouts]
            most = draw.choice((40, 8192))
            scored = score(
                model, texts, [len(request.prompt_ids)] * len(texts), request.temperature, most
            )
            for rollout, want_T in zip(group.rollouts, scored, strict=True):
                assert torch.equal(torch.tensor(rollout.logprobs), want_T), seed
                tokens += len(want_T)
    engine.close()
    return tokens


def formats(model: Transformer) -> str:
    """The format of an exact learner's rollouts."""
    if model.weight_format is not None:
        return model.weight_format
    held = {name: one.aligned.format if one.aligned else "fp32" for name, one in model.linears()}
    sizes = {name: one.weight.numel() for name, one in model.linears()}  # type: ignore[operator]
    return mixed.register(held, sizes)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("format", ["int8", "int8_rotated", "fp32", "mixed"])
def test_recorded_is_recomputed_in_every_mix(folder: Path, format: str, adapter: bool) -> None:
    model = exact_model(folder, format, adapter)
    assert sum(check(model, formats(model), seed) for seed in range(6)) > 200


@pytest.mark.parametrize("format", low_bit())
def test_every_format_is_exact(format: str, tmp_path: Path) -> None:
    """Small matrices are multiplied as floats, large ones as codes where there is a kernel."""
    for i, sizes in enumerate(({"hidden_size": 64}, {"hidden_size": 512, "num_hidden_layers": 1})):
        wide = {**sizes, "intermediate_size": 2 * sizes["hidden_size"]}
        path = hf_folder(tmp_path / f"{i}", "qwen3", head_dim=64, **wide)
        model = exact_model(path, format, adapter=i == 0)
        assert sum(check(model, format, seed) for seed in range(3)) > 50


def test_an_engine_can_be_asked_for_it(folder: Path) -> None:
    """A request that waits for nobody, and one beside others, after others and in pieces."""
    asked = Request([5, 6, 7, 8], n=2, max_tokens=12, seed=4, id="mine")
    alone = NativeEngine(folder, "int8", exact=True, cache_tokens=512).generate([asked])[0]
    others = [Request([9 + i, 3, 5], n=3, max_tokens=7 + i, seed=i) for i in range(5)]
    busy = NativeEngine(folder, "int8", exact=True, cache_tokens=512, prefill_chunk=2, page_size=4)
    busy.generate(others)
    for position in (0, 3, 5):
        around = [*others[:position], asked, *others[position:]]
        found = busy.generate(around)[position]
        for mine, theirs in zip(found.rollouts, alone.rollouts, strict=True):
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)


def test_what_an_engine_cannot_make_exact(folder: Path) -> None:
    for options, words in (
        ({"weights": "bf16"}, "exact: it computes in float32"),
        ({"weights": "int8", "kv_dtype": "fp8"}, "exact: needs the dense cache"),
        ({"weights": "int8", "large_batch_weights": "fp32"}, "exact: needs the dense cache"),
    ):
        with pytest.raises(ValueError, match=words):
            NativeEngine(folder, exact=True, cache_tokens=64, **options)  # type: ignore[arg-type]
