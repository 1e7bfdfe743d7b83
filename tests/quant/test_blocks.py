"""GGUF's blocks against the gguf package: the codes of its blocks come back bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.quant.blocks import keeps
from tests.fixtures.tensors import normal

KINDS = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}


def blocks(w: Tensor, name: str) -> tuple[np.ndarray, Tensor]:
    """Return a matrix as a file's bytes, and the numbers that they stand for."""
    kind = gguf.GGMLQuantizationType[KINDS[name]]
    data = gguf.quants.quantize(w.numpy(), kind)
    return data, torch.tensor(gguf.quants.dequantize(data, kind))


def stored(data: np.ndarray, name: str) -> dict[str, Tensor]:
    """Return the codes and scales of a file's bytes, in our order."""
    sizes = {"q4_0": (18, 2), "q4_1": (20, 4), "q8_0": (34, 2)}[name]
    block = data.reshape(-1, sizes[0])
    heads = block[:, : sizes[1]].copy().view(np.float16)
    codes = block[:, sizes[1] :]
    if name != "q8_0":  # entry i of the first half and of the second half share a byte
        both = np.concatenate([codes & 15, codes >> 4], 1)
        codes = both[:, 0::2] | both[:, 1::2] << 4
    rows = data.shape[0]
    found = {"codes": torch.tensor(codes.copy()).reshape(rows, -1)}
    found["codes"] = found["codes"].view(torch.int8) if name == "q8_0" else found["codes"]
    for i, key in enumerate(("scale", "low")[: heads.shape[1]]):
        found[key] = torch.tensor(heads[:, i].copy()).reshape(rows, -1)
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [1.0, 0.02, 30.0])
def test_the_codes_of_a_file_come_back(name: str, size: float) -> None:
    data, dense = blocks(size * normal(48, 320), name)
    q = lowroll.quantize(dense, name)
    assert torch.equal(q.dequantize(), dense) and keeps(name, dense)
    wanted = stored(data, name)
    assert q.tensors.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(q.tensors[key], value), key


@pytest.mark.parametrize("name", KINDS)
def test_a_group_of_one_number_and_of_zeros(name: str) -> None:
    w = torch.zeros(2, 64)
    w[0, :32] = -0.375
    got = lowroll.quantize(w, name).dequantize()
    torch.testing.assert_close(got, w, rtol=2**-11 if name == "q8_0" else 0, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_other_weights_are_rounded_as_llama_cpp_does(name: str) -> None:
    """A few codes may differ by one: the scale is stored before weights are rounded by it."""
    w = normal(64, 256, seed=1)
    _, dense = blocks(w, name)
    ours = lowroll.quantize(w, name).dequantize()
    assert not keeps(name, w)
    assert (ours == dense).float().mean() > 0.99
    assert (ours - w).norm() <= 1.001 * (dense - w).norm()
