"""Caches that drop or round keys are refused for models with windows, by name and before anything
is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll import Engine, Request, score
from lowroll.config import from_mapping
from lowroll.kv import support
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.table import POLICIES, make
from lowroll.model import hf
from lowroll.model.evicted_attention import pack_evictions
from lowroll.model.spec import ModelSpec, read_spec
from lowroll.runs.assembly import caches
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tiny import hf_folder

WINDOWED = ["mistral-window", "qwen2-window", "olmo3", "gemma3"]
BOUNDED = [name for name in POLICIES if name != "dense"]


def spec_of(family: str, tmp_path: Path) -> ModelSpec:
    return read_spec(hf_folder(tmp_path / family, family))


@pytest.mark.parametrize("family", WINDOWED)
def test_models_with_windows_have_dense_caches(family: str, tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m", family)
    for name in BOUNDED:
        with pytest.raises(ValueError, match=f"^kv: {name} .*window"):
            engine_of(path, kv=make(name))
    with pytest.raises(ValueError, match=r"^kv_dtype: .* fp8 .*sliding windows"):
        engine_of(path, kv_dtype="fp8")
    with pytest.raises(ValueError, match=r"^exact: .*sliding windows"):
        engine_of(path, exact=True)
    loaded = hf.load(path)
    with pytest.raises(ValueError, match="^kv: streaming "):
        Engine(loaded, kv=make("streaming"), device="cpu")
    engine_of(loaded, kv=DENSE).generate([Request(prompt(9), max_tokens=2)])


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next"])
def test_models_with_states_have_dense_caches(family: str, tmp_path: Path) -> None:
    path = hf_folder(tmp_path / "m", family)
    with pytest.raises(ValueError, match="^kv: rkv .*states in place of keys"):
        engine_of(path, kv=make("rkv"))
    with pytest.raises(ValueError, match="^kv_dtype: .*states in place of keys"):
        engine_of(path, kv_dtype="fp8")
    with pytest.raises(ValueError, match="^exact: .*recurrent layers"):
        engine_of(path, exact=True)


def test_models_with_sinks_have_dense_caches(tmp_path: Path) -> None:
    """Without windows, too."""
    kinds = ["full_attention", "full_attention"]
    path = hf_folder(tmp_path / "m", "gpt-oss", layer_types=kinds)
    assert spec_of("gpt-oss", tmp_path).windows and not read_spec(path).windows
    for name in BOUNDED:
        with pytest.raises(ValueError, match=f"^kv: {name} .*layers with attention sinks"):
            engine_of(path, kv=make(name))
    with pytest.raises(ValueError, match=r"^kv_dtype: .* fp8 .*layers with attention sinks"):
        engine_of(path, kv_dtype="fp8")
    with pytest.raises(ValueError, match=r"^exact: .*attention sinks, experts with biases"):
        engine_of(path, exact=True)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    spec = spec_of("mistral-mqa", tmp_path)
    assert spec.windows == ()
    support.refuse(spec, make("snapkv"), "fp8")


@pytest.mark.parametrize(
    ("kv", "key"),
    [
        *(({"policy": name}, "rollout.kv.policy") for name in BOUNDED),
        ({"dtype": "fp8"}, "rollout.kv.dtype"),
        (None, ""),
    ],
)
def test_a_run_is_told_its_own_keys(kv: dict[str, Any] | None, key: str, tmp_path: Path) -> None:
    cfg = from_mapping({"model": ".", "rollout": {"kv": kv}}).resolved()
    caches.refuse(cfg, spec_of("granite", tmp_path))
    if not key:
        caches.refuse(cfg, spec_of("gemma3", tmp_path))
        return
    with pytest.raises(ValueError, match=f"^{key}: .*sliding windows"):
        caches.refuse(cfg, spec_of("gemma3", tmp_path))


def test_a_learner_with_windows_replays_no_dropped_keys(tmp_path: Path) -> None:
    model = hf.load(hf_folder(tmp_path / "m", "mistral-window"))
    ids = prompt(12)
    spec = model.spec
    numbers_LGT = torch.zeros(spec.num_layers, spec.num_kv_heads, 6, dtype=torch.uint8)
    numbers_LGT[..., 0] = 1
    with pytest.raises(ValueError, match=r"^evictions\[0\]\.after: .*windows"):
        score(model, [ids], [3], evictions=[pack_evictions(numbers_LGT, [5])])
    (plain,) = score(model, [ids], [3])
    (none,) = score(model, [ids], [3], evictions=[pack_evictions(numbers_LGT[..., :0], [])])
    assert torch.equal(plain, none)
