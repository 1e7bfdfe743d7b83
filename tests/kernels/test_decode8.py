"""Decode attention over 8-bit codes: what Triton does, run by its interpreter, and plain torch,
against float64 over what the codes stand for."""

from __future__ import annotations

import pytest
import torch

from lowroll.kernels.attention import decode
from lowroll.kernels.attention.decode8 import _rounded, paged_decode8
from lowroll.kernels.attention.quantized_cache import decode_keys, encode
from lowroll.kernels.launch import jit, tl
from tests.fixtures.decode8 import Case8
from tests.fixtures.interpreted import both_paths


@both_paths
@pytest.mark.parametrize("programs", [1, 6])
@pytest.mark.parametrize(
    "case",
    [
        ([45, 0, 1, 16, 17], 6, 2, 24, 4, torch.float32),
        ([130, 2], 7, 1, 16, 16, torch.float16),
        ([33, 34], 4, 4, 8, 1, torch.float32),
        ([70, 640], 8, 1, 128, 32, torch.float16),
    ],
)
def test_rows_attend_to_what_is_stored(
    case: tuple, programs: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    Case8(*case).check(4e-3 if case[-1] == torch.float16 else 2e-5)


@pytest.mark.interpreted
def test_the_kernel_rounds_to_e4m3_as_torch_does() -> None:
    @jit
    def rounded(x_ptr, y_ptr, N: tl.constexpr):
        n = tl.arange(0, N)
        tl.store(y_ptr + n, _rounded(tl.load(x_ptr + n)))

    x = torch.cat([torch.randn(2000) * 2.0 ** torch.randint(-12, 8, (2000,)), torch.zeros(3)])
    ties = torch.arange(0, 256).to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0)
    x = torch.cat([x.clamp(-448, 448), ties, (ties[:-1] + ties[1:]) / 2])
    x = torch.cat([x, x.new_zeros(4096 - len(x))])
    y = torch.empty_like(x)
    rounded[(1,)](x, y, N=4096)
    want = x.to(torch.float8_e4m3fn).float()
    assert torch.equal(y.view(torch.int32), want.view(torch.int32)), "and its sign, of 0 too"


@both_paths
def test_values_of_any_size_keep_their_weights(path: str) -> None:
    """Scales from 2^-60 to 2^20 side by side, zeros, and a score so large that a row is one key."""
    case = Case8([40, 40, 3], 4, 2, 16, 4, torch.float32)
    factor = torch.logspace(-20, 6, 40)
    factor[7] = 0
    case.rewrite(lambda t, k, v: (k * (1 + 30 * (t == 5)), v * factor[t]))
    case.v[2] = 0
    case.check(1e-4)


def test_an_outliers_channels_are_as_exact_as_in_bfloat16() -> None:
    g = torch.Generator().manual_seed(0)
    k = torch.randn(300, 2, 64, generator=g)
    channels = torch.stack([torch.arange(16), torch.arange(16) * 4])
    for head in range(2):
        k[:, head, channels[head, :4]] += 300
    codes = encode(k, k, channels)
    got = decode_keys(codes.keys_TGd, codes.fine_TGF, codes.scales_TG2, channels, torch.float32)
    error = (got - k).abs() / k.abs()
    for head in range(2):
        assert error[:, head, channels[head, :4]].max() < 2**-8
        rest = [c for c in range(64) if c not in channels[head]]
        others = error[:, head, rest][k[:, head, rest].abs() > 0.02]  # over the subnormal codes
        assert 2**-5 < others.max() <= 2**-4


def test_codes_by_hand() -> None:
    """amax 448 has the scale 1, a little more has 2; 17 is a tie between 16 and 18: to even."""
    k = torch.tensor([[[448.0, 17.0, -19.0, 0.3]], [[449.0, 17.0, 0.0, -448.0]], [[0.0] * 4]])
    v = torch.tensor([[[0.4375, 0.0, 0.0, 1.0]], [[1.76, 0, 0, 0]], [[2.0**-70, 0, 0, 0]]])
    codes = encode(k, v, torch.tensor([[1, 2]]))
    assert codes.scales_TG2[:, 0].tolist() == [[127, 119], [128, 120], [67, 67]]
    as_float = [x.view(torch.float8_e4m3fn).float()[:, 0].tolist() for x in codes[:3]]
    assert as_float[0] == [
        [448, 16, -20, 0.3125],
        [224, 8, 0, -224],
        [0, 0, 0, 0],
    ]
    assert as_float[1][0] == [112, 0, 0, 256] and as_float[1][2] == [2.0**-9 * 0, 0, 0, 0]
    assert as_float[2] == [[16, 16], [8, 0], [0, 0]]


def test_a_key_that_is_no_number_stays_none() -> None:
    case = Case8([9, 4], 4, 2, 16, 4, torch.float32)
    case.k[0, 1, 3] = torch.nan
    out = paged_decode8(*case.arguments())
    assert out[0, 2:].isnan().all() and not out[0, :2].isnan().any() and not out[1].isnan().any()
