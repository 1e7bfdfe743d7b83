"""The 4-bit quantizers in one launch give the bytes of plain torch: in Triton's interpreter, and
compiled for a GPU."""

from __future__ import annotations

import pytest
import torch

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize import quantize4
from lowroll.quant.formats import get_format
from tests.fixtures.compiled import arguments, built

pytest.importorskip("triton")
FORMATS = ("nvfp4", "mxfp4", "mxfp4_floor", "int4", "int4_asym", "w4a8")


@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy counts overflows that are meant
def test_bytes_are_those_of_plain_torch() -> None:
    """Odd sizes, rows of zeros, values that tie, and sizes at both ends of float32; storages are
    written whole."""
    assert triton_supports(torch.empty(0))
    torch.manual_seed(0)
    for shape in ((5, 7), (3, 256), (2, 130), (1, 1), (17, 33), (40, 128)):
        w = torch.randn(shape) * torch.rand(shape[0], 1)
        w[0] = 0
        w[1:2] = torch.randint(-12, 13, w[1:2].shape) / 4  # halves and quarters of a level
        for name in FORMATS:
            for case in (w.half(), w * 1e-37, w * 1e30, torch.zeros_like(w)):
                form = get_format(name)
                q = form.empty(case.shape, case.device)
                for t in q.tensors.values():
                    t.view(torch.uint8).fill_(0xA5)
                q.quantize_(case)
                for part, want in form.encode(case).items():
                    assert torch.equal(q.tensors[part].view(torch.uint8), want.view(torch.uint8)), (
                        name,
                        shape,
                        part,
                    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "int4_asym"])
def test_compiled_for_a_gpu_nothing_spills(name: str) -> None:
    group = get_format(name).group
    types = arguments(
        {"*bf16": "w", "*i32": "codes", "*fp32": "scales zeros matrix", "i32": "num_groups K G U"}
    )
    if "fp4" in name:
        types["scales"] = "*u8"
    constants = {
        "KIND": quantize4._KINDS[name],
        "S": group,
        "TILE": quantize4.TILE // group,
        "UNIT": 8,
    }
    sass = built(
        quantize4._quantize4_kernel, types, constants, loose=("num_groups", "G", "U"), num_warps=4
    ).asm["sass"]
    assert "STL" not in sass and "LDG.E.128" in sass
