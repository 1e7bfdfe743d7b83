"""One thread everywhere: results repeat bit for bit for a fixed thread count only, and tiny models
gain nothing.

Set before torch is imported, so that the processes which tests start inherit it.

Tests marked `interpreted` run Triton kernels on CPU tensors. Triton decides at its import whether
it interprets, and other tests need it undecided, so all of them run together in one process of
their own (`fixtures/interpreted.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
for name in [*os.environ]:  # no proxy leads to a server of this machine, and no test is a terminal
    if name.lower().endswith("_proxy") or name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        del os.environ[name]

pytest_plugins = [
    "tests.fixtures.leash",
    "tests.fixtures.interpreted",
    "tests.fixtures.draws",
    "tests.fixtures.lost_context",
]
pytest.register_assert_rewrite("tests.fixtures")
HEAP = ExitStack()  # keeps what all tests import from the garbage collector


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Hardly anything that a collection makes is garbage, and to look for it took a quarter of the
    time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Ten thousand tests and all that they import are two million objects, and every `gc.collect`
    of a run that changes its engine looked at them for more than a second."""
    from lowroll import machine

    HEAP.enter_context(machine.long_lived())
    atexit.register(HEAP.close)


@pytest.fixture
def collected() -> Iterator[None]:
    """The collector sees all objects, as in a process of a user."""
    from lowroll import machine

    HEAP.close()
    yield
    HEAP.enter_context(machine.long_lived())


COROUTINE_SECONDS = 120  # of a test that is one


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own; one that hangs fails by name."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters

    async def bounded() -> None:
        async with asyncio.timeout(COROUTINE_SECONDS):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    asyncio.run(bounded())
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model folder with the demo's tokenizer."""
    from lowroll.runs import demo
    from tests.fixtures.runs import TINY

    return demo.build_model(tmp_path_factory.mktemp("run") / "model", 0, TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that transformers has saved."""
    from tests.fixtures.tiny import hf_folder

    return hf_folder(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct's folder, for tests marked `real_model`: what `lowroll fetch smollm2` left
    on this machine. LOWROLL_FETCH=1 has it fetched here; otherwise nothing is downloaded."""
    from lowroll.model import short_names

    folder = short_names.place_of("smollm2")
    if not folder.is_dir() and os.environ.get("LOWROLL_FETCH") != "1":
        pytest.skip("needs `lowroll fetch smollm2`, or LOWROLL_FETCH=1, which downloads 93 MB")
    return short_names.fetch("smollm2")


@pytest.fixture(autouse=True)
def paths() -> Iterator[None]:
    """A user's file brings its folder to the path: modules beside it would be found for others.
    And ranks name the interface that they meet at in the environment, which others inherit."""
    path, environ = list(sys.path), dict(os.environ)
    yield
    sys.path[:] = path
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test, or a benchmark's `main` in it, may set the number of torch's threads; a fork of a
    process with several breaks at its first parallel loop."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry runs plan without a look at the model, which is on a hub that tests do not ask, and at
    the data."""
    from lowroll.runs import preflight

    for look in ("look_at_run", "look_at_sft"):
        monkeypatch.setattr(preflight, look, lambda *_: preflight.Findings())


@pytest.fixture(scope="session")
def built() -> None:
    """Build the 4-bit kernels of all formats at once, which saves most of a minute."""
    import torch

    from lowroll.kernels.matmul import streamed
    from lowroll.kernels.moe import routed

    kinds = [
        (module, kind)
        for module in (streamed, routed)
        for kind in ("nvfp4", "mxfp4", "int4", "int4_asym")
        if (module, kind) != (routed, "int4_asym")
    ]
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(lambda pair: pair[0].supports_device(pair[1], torch.device("cuda", 0)), kinds)
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("LOWROLL_VLLM_PYTHON"):
        for item in items:
            if "foreign" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a vLLM: `make vllm`"))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
            )
