"""On a CUDA device: a capture survives the end of an engine that is gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowroll.engine.native import NativeEngine
from lowroll.kernels.launch import captured
from lowroll.types import Request
from tests.fixtures.tiny import hf_folder

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def young_garbage() -> Iterator[None]:
    """Nothing is collected until a test allows it: what dies there is found by the first look."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(0)
    yield
    gc.set_threshold(*before)


def test_no_engine_is_freed_within_a_capture(tmp_path: Path) -> None:
    engine = NativeEngine(hf_folder(tmp_path, "qwen3"), "bf16", device=DEVICE, cache_tokens=1024)
    engine.generate([Request([3, 4, 5], n=2, max_tokens=9)])
    gone = weakref.ref(engine)
    ones = torch.zeros(64, device=DEVICE)
    ones.add_(1)
    del engine
    assert gone() is not None  # it lies in a cycle

    def run() -> None:
        gc.set_threshold(100, 1, 1)
        made = [[number] for number in range(5000)]  # each may begin a collection of all garbage
        assert made
        ones.add_(1)

    captured(run).replay()
    assert ones.tolist() == [2.0] * 64
    gc.collect()
    assert gone() is None
