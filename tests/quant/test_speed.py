"""Which formats are slower than float32 on a machine, and that an engine warns of it."""

from __future__ import annotations

import logging
import platform

import pytest
import torch

import lowroll
from lowroll.engine import loading
from lowroll.kernels.matmul import w8a8_onednn
from lowroll.kernels.support import YES, no
from lowroll.quant.formats import get_format
from tests.fixtures.learner import tiny_model

CPU = torch.device("cpu")


def slow_ones() -> set[str]:
    return {name for name in lowroll.formats() if get_format(name).slower_than_float32(CPU)}


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_what_a_processor_has_decides(
    vnni: bool, bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        w8a8_onednn, "supports_device", lambda _: YES if vnni else no("has no VNNI")
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": bfloat16})
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    wanted = {"fp8", "fp8_block"} | (set() if vnni else {"int8", "int8_rotated"})
    assert slow_ones() == wanted | (set() if bfloat16 else {"bf16"})
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")  # nothing is known of its bfloat16
    assert slow_ones() == wanted


def test_an_engine_says_it_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(w8a8_onednn, "supports_device", lambda _: no("this CPU has no VNNI"))
    loading.warn_if_slow.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lowroll"):
        for weights in ("int8", "fp32", "int8"):
            lowroll.Engine(tiny_model(), weights=weights, device="cpu", cache_tokens=256)
    assert [record.getMessage() for record in caplog.records] == [
        "weights: int8 is slower than float32 on this machine: this CPU has no VNNI, so its codes "
        "are multiplied as float32 numbers"
    ]
    loading.warn_if_slow.cache_clear()
