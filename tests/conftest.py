"""One thread everywhere: results repeat bit for bit for a fixed thread count only, and tiny models gain nothing.

Set before torch is imported, so that the processes which tests start inherit it.

Tests marked `interpreted` run Triton kernels on CPU tensors. Triton decides at its import whether it interprets, and
other tests need it undecided, so all of them run together in one process of their own (`interpreted.py`).
"""
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

collect_ignore = [] if os.environ.get("LOWROLL_VLLM_PYTHON") else ["foreign"]        # `make test-vllm`

pytest_plugins = ["interpreted"]


@pytest.fixture(scope="session")
def built() -> None:
    """What nvcc builds for 4-bit weights, all formats at once: one after the other they would take most of a minute."""
    import torch

    from lowroll.kernels import streamed, w4a16

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kind: streamed.available(kind, torch.device("cuda", 0)), w4a16.BLOCK))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))
