"""`Transformer.be_exact`: what an engine records is what the learner computes, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowroll.engine.native import NativeEngine
from lowroll.kernels.batch_invariant import rows
from lowroll.kernels.matmul import w4_avx2
from lowroll.quant.table import low_bit
from lowroll.types import Request
from tests.fixtures.exact import CPU, check, exact_model, format_of
from tests.fixtures.tiny import hf_folder

pytestmark = pytest.mark.skipif(
    not rows.supports_device(CPU), reason="needs a CPU with AVX2 and a C++ compiler"
)
FAMILIES = ("qwen3", "llama-biases", "qwen2-tied", "qwen3-moe", "phi3-partial", "glm")
FAMILIES += ("deepseek-v2",)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {**HEADS, "num_key_value_heads": 2} if request.param == "deepseek-v2" else HEADS
    return hf_folder(tmp_path_factory.mktemp("exact") / "m", request.param, **heads)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("format", ["int8_rotated", "mixed"])
def test_recorded_is_recomputed_in_every_mix(folder: Path, format: str, adapter: bool) -> None:
    model = exact_model(folder, format, adapter)
    assert sum(check(model, format_of(model), seed) for seed in range(3)) > 100


@pytest.mark.parametrize("format", ["fp32", *low_bit()])
def test_every_format_is_exact(format: str, tmp_path: Path) -> None:
    """Small matrices are multiplied as floats, large ones as codes where there is a kernel."""
    widths = (64, 512) if format in (*w4_avx2.FORMATS, "w4a8") else (64,)
    for width in widths:
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1}
        path = hf_folder(tmp_path / f"{width}", "qwen3", head_dim=64, **sizes)
        model = exact_model(path, format, adapter=width == 64)
        assert sum(check(model, format, seed) for seed in range(2)) > 30


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
        ({"weights": "bf16"}, "exact: on a CPU it computes in float32"),
        ({"weights": "int8", "kv_dtype": "fp8"}, "exact: needs the dense cache"),
        ({"weights": "int8", "large_batch_weights": "fp32"}, "exact: needs the dense cache"),
    ):
        with pytest.raises(ValueError, match=words):
            NativeEngine(folder, exact=True, cache_tokens=64, **options)
