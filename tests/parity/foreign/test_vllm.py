"""A real vLLM on the CPU gives the tokens of our folders the log-probs that our engine gives them:
`make vllm`.

vLLM runs in a process and an environment of its own (LOWROLL_VLLM_PYTHON). Bounds are in nats. In
float32 the two engines agree to rounding, but where a rounded activation falls to the other side:
INT8's largest difference has room for that, its median has not. vLLM's INT4 product has no float32,
so there both compute in bfloat16, whose own spread is what is allowed.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.model import hf, lora
from lowroll.model.transformer import Transformer
from lowroll.runs.export import quantize_folder
from lowroll.weights import awq
from tests.fixtures.served import SEQUENCES, random_model

PYTHON = os.environ.get("LOWROLL_VLLM_PYTHON", "")
DEADLINE = 240  # seconds for vLLM to import, load and score: about 20 on an idle machine
SCORES = Path(__file__).with_name("vllm_scores.py")
RANK = 4
EXACT, EXACT_BUT_ROUNDINGS, HALF = (1e-5, 1e-4), (1e-5, 0.1), (0.08, 0.3)
# format: the dtype that both compute in, what our engine runs the folder as, bounds of the median
# and the largest
FORMATS = {
    "int8": ("float32", "int8", EXACT_BUT_ROUNDINGS),
    "fp8": ("float32", "fp8", EXACT_BUT_ROUNDINGS),
    "fp8_block": ("float32", "fp8_block", EXACT_BUT_ROUNDINGS),
    "int4": ("bfloat16", "int4", HALF),
    "int4_asym": ("bfloat16", "int4_asym", HALF),
    "w4a8": (
        "bfloat16",
        "int4",
        HALF,
    ),  # vLLM's CPU build leaves the activations of these folders as they are
    "nvfp4": ("float32", "nvfp4", EXACT),
    "mxfp4": ("float32", "mxfp4", EXACT),
    "nf4": ("float32", "nf4", EXACT),
    "nf4_dq": ("float32", "nf4_dq", EXACT),
}


@dataclass
class Table:
    """The measurements, printed when all is done."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    version: str = ""

    def show(self) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable

        table = RichTable(
            "folder",
            "median",
            "bound",
            "largest",
            "bound",
            "median to the dense model",
            title=f"vLLM {self.version} on CPU against lowroll: log-probs of the same tokens, nats",
        )
        for row in self.rows:
            table.add_row(*row)
        Console(width=120).print("\n", table)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.show()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.save(random_model(), tmp_path_factory.mktemp("models") / "dense")


def with_adapter(folder: Path) -> Transformer:
    """The model of a folder under an adapter that matters."""
    model, generator = lora.attach(hf.load(folder), RANK, 8.0), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def by_vllm(
    table: Table, folder: Path, work: Path, dtype: str = "float32", adapter: Path | None = None
) -> list[Tensor]:
    """vLLM's log-probs of SEQUENCES. Skips, in vLLM's words, when it has no kernel for the folder
    here."""
    order, answer = work / "order.json", work / "answer.json"
    order.write_text(
        json.dumps(
            {
                "folder": str(folder),
                "dtype": dtype,
                "sequences": SEQUENCES,
                "rank": 8,
                "adapter": adapter and str(adapter),
            }
        )
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    try:
        done = subprocess.run(
            [PYTHON, str(SCORES), str(order), str(answer)],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env=environment,
            cwd=work,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"vLLM did not score {folder.name} within {DEADLINE} s")
    assert done.returncode == 0, f"vLLM on {folder.name}:\n{done.stderr[-4000:]}"
    found = json.loads(answer.read_text())
    if "missing" in found:
        pytest.skip(f"vLLM has no kernel here: {' '.join(found['missing'].split())[:300]}")
    table.version = found["version"]
    return [torch.tensor(row) for row in found["logprobs"]]


def by_engine(folder: Path, weights: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The log-probs of the same tokens under our engine's weights and arithmetic."""
    engine = lowroll.Engine(folder, weights=weights, dtype=dtype, device="cpu", cache_tokens=256)
    return lowroll.score(engine.model, SEQUENCES, [1] * len(SEQUENCES))


def distances(ours: list[Tensor], theirs: list[Tensor]) -> tuple[float, float]:
    """Median and largest over all tokens."""
    apart = torch.cat([(a - b).abs() for a, b in zip(ours, theirs, strict=True)])
    return float(apart.median()), float(apart.max())


def compare(
    table: Table,
    name: str,
    ours: list[Tensor],
    theirs: list[Tensor],
    bounds: tuple[float, float],
    dense: Path,
) -> None:
    """Within the bounds of median and maximum; and far enough from the dense model for that to mean
    something."""
    apart, away = (
        distances(ours, theirs),
        distances(lowroll.score(dense, SEQUENCES, [1] * len(SEQUENCES)), theirs),
    )
    table.rows.append(
        (name, *(f"{value:.2g}" for value in (apart[0], bounds[0], apart[1], bounds[1], away[0])))
    )
    assert apart <= bounds and apart[1] <= bounds[1]
    assert name == "dense" or away[0] > 3 * bounds[0]


def test_dense(table: Table, dense: Path, tmp_path: Path) -> None:
    compare(table, "dense", by_engine(dense, "fp32"), by_vllm(table, dense, tmp_path), EXACT, dense)


def test_merged(table: Table, dense: Path, tmp_path: Path) -> None:
    merged = hf.save(lora.merge(with_adapter(dense)), tmp_path / "merged")
    compare(
        table, "merged", by_engine(merged, "fp32"), by_vllm(table, merged, tmp_path), EXACT, dense
    )


def test_adapter(table: Table, dense: Path, tmp_path: Path) -> None:
    adapter = lora.save(with_adapter(dense), tmp_path / "adapter", base=str(dense))
    theirs = by_vllm(table, dense, tmp_path, adapter=adapter)
    compare(table, "adapter", by_engine(adapter, "fp32"), theirs, EXACT, dense)


def has_amx() -> bool:
    """Return whether the CPU multiplies in tiles: vLLM would choose other kernels for it
    (`vllm_scores.without_amx`)."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


@pytest.mark.parametrize("format", FORMATS)
def test_low_bits(table: Table, dense: Path, tmp_path: Path, format: str) -> None:
    if format == "fp8_block" and has_amx():
        pytest.skip(
            "vLLM's one CPU kernel for FP8 in blocks (AMX) leaves the activations in bfloat16: "
            "another product "
            "than the folder says, and in a dtype whose spread hides what is compared"
        )
    dtype, weights, bounds = FORMATS[format]
    folder = quantize_folder(dense, tmp_path / format, format).folder
    theirs = by_vllm(table, folder, tmp_path, dtype)
    compare(table, format, by_engine(folder, weights, getattr(torch, dtype)), theirs, bounds, dense)


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_calibrated(table: Table, dense: Path, tmp_path: Path, format: str) -> None:
    dtype, weights, bounds = FORMATS[format]
    text = [
        torch.randint(2, 512, (64,), generator=torch.Generator().manual_seed(i)).tolist()
        for i in range(4)
    ]
    folder = quantize_folder(
        dense, tmp_path / format, format, lambda model: awq.calibrate(model, format, text)
    ).folder
    theirs = by_vllm(table, folder, tmp_path, dtype)
    compare(
        table,
        f"{format}, AWQ",
        by_engine(folder, weights, getattr(torch, dtype)),
        theirs,
        bounds,
        dense,
    )


def test_adapter_on_low_bits(table: Table, dense: Path, tmp_path: Path) -> None:
    """A QLoRA policy: the adapter on an INT4 base."""
    base = quantize_folder(dense, tmp_path / "int4", "int4").folder
    adapter = lora.save(with_adapter(base), tmp_path / "adapter", base=str(base))
    theirs = by_vllm(table, base, tmp_path, "bfloat16", adapter)
    compare(
        table, "adapter on int4", by_engine(adapter, "int4", torch.bfloat16), theirs, HALF, dense
    )
