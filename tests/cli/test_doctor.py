"""`lowroll doctor`: it says what is there, never fails for what is missing, and its advice fits."""

from __future__ import annotations

import builtins
import copy
import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.cli import doctor
from lowroll.cli.main import main
from lowroll.kernels import dispatch, launch, nvcc
from lowroll.kernels.support import YES, no
from lowroll.model import hf, scaling
from lowroll.weights.publish import quantize_base
from tests.fixtures.gpt_oss import published
from tests.fixtures.tiny import hf_folder


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return doctor.look()


def used(found: dict[str, Any], product: str) -> list[str]:
    return [answer["kernel"] for answer in found["kernels"][product] if answer["used"]]


def test_the_page_names_the_machine_and_every_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    for words in (torch.__version__, "cores", "triton", "nvcc", *dispatch.PRODUCTS):
        assert words in page
    assert max(map(len, page.splitlines())) <= 120


def test_json_is_the_same_with_a_reason_for_every_kernel_that_is_not_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == torch.__version__
    assert found["kernels"].keys() == dispatch.PRODUCTS.keys()
    for product, answers in found["kernels"].items():
        assert used(found, product), product
        assert all(bool(answer["why_not"]) != answer["used"] for answer in answers)


def test_a_model_is_one_line_with_the_reasons_of_its_refusals(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", str(hf_folder(tmp_path / "a", "olmo2"))]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    model = hf.load(tmp_path / "a")
    size = sum(p.numel() for p in model.parameters())
    assert f"Olmo2ForCausalLM, {size:,} parameters, stored dense" in line
    assert f"{2 * size / 1e9:.3g} GB in bf16" in line
    with pytest.raises(ValueError) as refused:
        scaling.scale(model, 1.5)
    assert str(refused.value).removesuffix("; write null") in line
    assert all(f"{word}: " in line for word in ("exact", "calibration", "noise"))
    hf.save(
        quantize_base(hf.load(hf_folder(tmp_path / "b", "phi3-partial")), "int8"), tmp_path / "c"
    )
    assert main(["doctor", str(tmp_path / "c"), "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["model"]
    assert "Phi3ForCausalLM" in line and "stored in int8" in line and "calibration" not in line
    assert main(["doctor", str(tmp_path / "none")]) == 2


def test_formats_of_layers_that_differ_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of 208,896 linear weights 184,320, those of the experts, are in MXFP4 with 4.25 bits."""
    assert main(["doctor", str(published(tmp_path / "m"))]) == 0
    assert "stored in fp32 and mxfp4 (7.51 bits a linear weight); " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_without_a_gpu_all_is_plain_torch(here: dict[str, Any]) -> None:
    assert used(here, "decode attention, 8-bit cache") == ["plain torch"]
    assert here["kernels"]["decode attention"][0]["why_not"] == "needs a CUDA device"
    assert "needs a CUDA device:" in doctor.show(here | {"hints": []})


def test_a_machine_that_has_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(launch, "triton", None)
    monkeypatch.setattr(nvcc, "compiler", lambda: None)
    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "none")
    monkeypatch.setattr("lowroll.machine.MEMINFO", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert "Triton is not installed" in page and "no NVIDIA GPU" in page


def test_a_torch_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = builtins.__import__

    def broken(name: str, *args: Any) -> Any:
        if name == "torch":
            raise ImportError("libcudart.so.12: cannot open shared object file")
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", broken)
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert "libcudart.so.12" in page and "install it again" in page


def test_a_device_in_trouble_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: torch.device) -> Any:
        raise RuntimeError("CUDA error: out of memory\nmore words")

    kernel = dispatch.Kernel("broken", "Triton", "", asked)
    plain = dispatch.Kernel("plain torch", "torch", "", lambda device: YES)
    monkeypatch.setitem(dispatch.PRODUCTS, "norm", (kernel, plain))
    first, second = dispatch.answers("norm", torch.device("cpu"))
    assert first.support.why_not == "asking the device failed: CUDA error: out of memory"
    assert second.support


def test_answers_end_at_the_kernel_that_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(name: str, takes: str, support: Any) -> dispatch.Kernel:
        return dispatch.Kernel(name, "Triton", takes, lambda device: support)

    row = (
        kernel("a", "few rows", YES),
        kernel("b", "", no("not here")),
        kernel("c", "", YES),
        kernel("d", "", YES),
    )
    monkeypatch.setitem(dispatch.PRODUCTS, "norm", row)
    assert [one.kernel.name for one in dispatch.answers("norm", torch.device("cpu"))] == [*"abc"]


# -- advice ----------------------------------------------------------------------------------------


def on_gpu(here: dict[str, Any], refused: dict[str, str]) -> dict[str, Any]:
    """The same machine with a GPU, by which all kernels run but these."""
    found = copy.deepcopy(here)
    gpu = {"name": "GPU", "capability": "9.0", "memory": 80 << 30}
    found |= {"device": "cuda:0", "devices": [gpu], "driver": "580.0"}
    found["nvcc"] = {"path": "/usr/bin/nvcc", "version": "12.8", "why_not": ""}
    found["packages"]["triton"] = "3.6.0"
    found["torch"]["threads"] = found["cpu"]["cores"]
    found["kernels"] = {
        product: [
            {
                "kernel": kernel.name,
                "language": kernel.language,
                "takes": kernel.takes,
                "used": kernel.name not in refused,
                "why_not": refused.get(kernel.name, ""),
            }
            for kernel in kernels
        ]
        for product, kernels in dispatch.PRODUCTS.items()
    }
    return found


def test_where_all_runs_there_is_nothing_to_mend(here: dict[str, Any]) -> None:
    found = on_gpu(here, {})
    assert doctor.hints(found) == []
    assert doctor.show(found | {"hints": []}).endswith("Nothing to mend.")


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (
            {"matmul/streamed.cu": "needs compute capability 9.0 or later"},
            "weights: int8 is faster",
        ),
        ({"matmul/streamed.cu": "no nvcc"}, "CUDA_HOME"),
        ({"torch._scaled_mm": "no e4m3"}, "in the place of fp8"),
    ],
)
def test_what_slows_a_gpu_has_its_hint(
    here: dict[str, Any], refused: dict[str, str], words: str
) -> None:
    found = on_gpu(here, refused)
    if words == "CUDA_HOME":
        found["nvcc"] = None
    (hint,) = doctor.hints(found)
    assert words in hint


def test_an_nvcc_that_does_not_work_is_told_apart_from_none(here: dict[str, Any]) -> None:
    found = on_gpu(here, {"matmul/streamed.cu": "nvcc cannot compile"})
    found["nvcc"]["why_not"] = "nvcc failed (1): unsupported GNU version"
    (hint,) = doctor.hints(found)
    assert "does not work" in hint
    assert "unsupported GNU version" in doctor.show(found | {"hints": [hint]})


@pytest.mark.parametrize(
    ("driver", "cuda", "words"),
    [
        (None, None, "no NVIDIA GPU"),
        ("580.0", None, "built without CUDA"),
        ("580.0", "12.8", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_why_there_is_no_device(
    here: dict[str, Any],
    driver: str | None,
    cuda: str | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = copy.deepcopy(here) | {"device": "cpu", "driver": driver}
    found["torch"]["cuda"] = cuda
    assert words in doctor.hints(found)[0]


@pytest.mark.parametrize(
    ("threads", "cores", "words"), [(8, 2, "8 threads for 2 cores"), (1, 4, "1 of 4 cores")]
)
def test_threads_that_do_not_fit(
    here: dict[str, Any], threads: int, cores: int, words: str
) -> None:
    found = copy.deepcopy(here) | {"device": "cpu"}
    found["torch"]["threads"], found["cpu"]["cores"] = threads, cores
    assert any(words in hint for hint in doctor.hints(found))


def test_hints_are_few(here: dict[str, Any]) -> None:
    found = on_gpu(here, {"matmul/streamed.cu": "no nvcc", "torch._scaled_mm": "none"})
    found["packages"]["triton"], found["nvcc"] = None, None
    found["torch"]["threads"] = found["cpu"]["cores"] + 1
    assert len(doctor.hints(found)) == doctor.MOST_HINTS


@pytest.mark.parametrize(
    ("words", "driver"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
            "GCC version:  gcc version 15.3.0 (GCC)\n",
            "580.159.04",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\n", "535.54.03"),
        ("nothing of the kind", None),
    ],
)
def test_the_driver_says_its_version(
    words: str, driver: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(words)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path / "version")
    assert doctor.driver_version() == driver
