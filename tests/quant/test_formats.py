"""The low-bit formats: byte-exact vectors (algorithms B2-B6), the tools that own the layouts
(compressed-tensors, bitsandbytes), edges, products against float64 sums of the codes (P5), whole
runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.kernels.quantize.rotation import rotate
from lowroll.kernels.quantize.rows import quantize_rows
from lowroll.model import hf
from lowroll.model.attention import varlen
from lowroll.quant import fp8, groups, int4, mxfp4, nf4
from lowroll.quant.formats import QTensor, WeightOnly, dense_from, get_format
from lowroll.weights.publish import quantize_base
from tests.fixtures.engines import engine_of, prompt
from tests.fixtures.tensors import normal
from tests.fixtures.tiny import hf_folder

LOW_BIT = tuple(name for name in lowroll.formats() if not get_format(name).dense)
NEW = tuple(name for name in LOW_BIT if name != "int8")
STORED = {
    "int8_rotated": ("codes", "scale"),
    "fp8": ("weight", "weight_scale"),
    "fp8_block": ("weight", "weight_scale"),
    "int4": ("weight_packed", "weight_scale"),
    "w4a8": ("weight_packed", "weight_scale"),
    "int4_asym": ("weight_packed", "weight_scale", "weight_zero_point"),
    "nvfp4": ("weight_packed", "weight_scale", "weight_global_scale"),
    "mxfp4": ("weight_packed", "weight_scale"),
    "mxfp4_floor": ("weight_packed", "weight_scale"),
    "nf4": ("weight", "absmax"),
    "nf4_dq": ("weight", "absmax", "nested_absmax", "nested_offset"),
    "q4_0": ("codes", "scale"),
    "q4_1": ("codes", "scale", "low"),
    "q8_0": ("codes", "scale"),
}


def raw(tensor: Tensor) -> str:
    """Return the bytes in hex."""
    return tensor.contiguous().view(torch.uint8).flatten().numpy().tobytes().hex()


def padded(head: list[float], size: int) -> Tensor:
    return torch.tensor([head + [0.0] * (size - len(head))])


# -- the table -------------------------------------------------------------------------------------


def test_the_stored_names_follow_the_table() -> None:
    for name in NEW:
        assert tuple(lowroll.quantize(normal(4, 32), name).tensors) == STORED[name], name


def test_bits_a_weight_by_hand() -> None:
    """INT4's scales are float32 a group of 128; NF4's absmax takes 32 bits a block of 64."""
    by_hand = {
        "int8": 8,
        "int8_rotated": 8,
        "fp8": 8,
        "fp8_block": 8,
        "int4": 4 + 32 / 128,
        "w4a8": 4 + 32 / 128,
        "nvfp4": 4 + 8 / 16,
        "int4_asym": 4 + (32 + 4) / 128,
        "mxfp4": 4 + 8 / 32,
        "mxfp4_floor": 4 + 8 / 32,
        "nf4": 4 + 32 / 64,
        "nf4_dq": 4 + 8 / 64 + 32 / (64 * 256),
        "q4_0": 4 + 16 / 32,
        "q4_1": 4 + 2 * 16 / 32,
        "q8_0": 8 + 16 / 32,
    }
    assert {name: get_format(name).bits for name in LOW_BIT} == pytest.approx(by_hand, abs=1e-3)


# -- vectors computed elsewhere --------------------------------------------------------------------


def test_fp8_vectors() -> None:
    cast = {
        1.05: 1,
        1.0625: 1,
        447.0: 448,
        464.0: 448,
        2.0**-10: 0,
        0.0014: 0.001953125,
        -0.3: -0.3125,
        1e9: 448,
        -1e9: -448,
    }
    assert fp8.to_e4m3(torch.tensor(list(cast))).float().tolist() == list(cast.values())
    q = lowroll.quantize(torch.tensor([[0.5, -1, 0.25, 0.003]]), "fp8")
    assert q.tensors["weight_scale"].item() == pytest.approx(0.00223214296, rel=1e-8)
    assert raw(q.tensors["weight"]) == "76fe6e3b"
    assert q.tensors["weight"].float().tolist() == [[224, -448, 112, 1.375]]
    torch.testing.assert_close(
        q.dequantize(), torch.tensor([[0.5, -1, 0.25, 0.0030691966]]), rtol=1e-7, atol=0
    )


def test_fp8_blocks_are_tiles_of_128_by_128() -> None:
    w = torch.zeros(130, 257)
    w[0, 0], w[0, 128], w[127, 256], w[128, 0], w[129, 255] = 1, 2, -4, 8, 16
    q = lowroll.quantize(w, "fp8_block")
    assert q.tensors["weight_scale"].shape == (2, 3)
    wanted = torch.tensor([[1, 2, 4], [8, 16, 1e-10]]) / 448
    torch.testing.assert_close(q.tensors["weight_scale"], wanted, rtol=1e-7, atol=0)
    assert torch.equal(
        q.tensors["weight"].float()[[0, 127, 129], [0, 256, 255]],
        torch.tensor([448.0, -448.0, 448.0]),
    )
    torch.testing.assert_close(q.dequantize(), w)


def test_fp8_activation_scales_have_a_floor() -> None:
    rows = quantize_rows(torch.tensor([[0.0, 0.0], [896.0, 1.0], [1e-9, 0.0]]), "fp8")
    assert rows.scale_M1.flatten().tolist() == pytest.approx(
        [1 / (448 * 512), 2, 1 / (448 * 512)], rel=1e-7
    )
    assert rows.codes_MK.float().tolist() == [[0, 0], [448, 0.5], [0, 0]]


INT4_ROW = torch.tensor([[0.10, -0.75, 0.30, 0.52, -0.05, 0, 0.74, -0.40]])


def test_int4_vectors() -> None:
    q = lowroll.quantize(INT4_ROW, "int4")
    assert q.tensors["weight_packed"].item() & 0xFFFFFFFF == 0x4F88DB09
    assert q.tensors["weight_scale"].item() == pytest.approx(0.1, rel=1e-7)
    assert int4.unpack_words(q.tensors["weight_packed"], 8).tolist() == [[1, -8, 3, 5, 0, 0, 7, -4]]
    q = lowroll.quantize(INT4_ROW, "int4_asym")
    assert q.tensors["weight_packed"].item() & 0xFFFFFFFF == 0x4F87DB09
    assert q.tensors["weight_zero_point"].tolist() == [[8]]
    assert q.tensors["weight_scale"].item() == pytest.approx(0.0993333310, rel=1e-7)
    q = lowroll.quantize(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 7.5]]), "int4_asym")
    assert q.tensors["weight_scale"].item() == 0.5 and q.tensors["weight_zero_point"].item() == 0
    assert int4.unpack_words(q.tensors["weight_packed"], 8).tolist() == [
        [-6, -4, -2, 0, 2, 4, 6, 7]
    ]


def test_int4_words() -> None:
    words = int4.pack_words(torch.arange(-8, 8)[None])
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == [0x76543210, 0xFEDCBA98]
    words = int4.pack_words(torch.tensor([[0, 1, -1, -8, 7]]))
    assert words.tolist() == [[0xF0798]] and int4.unpack_words(words, 5).tolist() == [
        [0, 1, -1, -8, 7]
    ]


def test_int4_zero_points_are_packed_along_the_rows() -> None:
    w = normal(11, 300) + torch.arange(11)[:, None] / 4 - 1
    q = lowroll.quantize(w, "int4_asym")
    assert q.tensors["weight_zero_point"].shape == (2, 3) and q.tensors["weight_packed"].shape == (
        11,
        38,
    )
    assert q.tensors["weight_zero_point"].is_contiguous()


def test_e2m1_rounds_ties_to_even() -> None:
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
    values = torch.tensor(
        [
            *ties,
            0.2500001,
            0.7499999,
            1.2500001,
            1.7499999,
            2.5000002,
            3.4999998,
            5.0000005,
            7.0,
            1e9,
        ]
    )
    wanted = torch.tensor([*ties.values(), 0.5, 0.5, 1.5, 1.5, 3, 3, 6, 6, 6])
    for sign in (1, -1):
        codes = groups.encode_e2m1(sign * values)
        assert torch.equal(torch.tensor(groups.E2M1_LEVELS)[codes.int()], sign * wanted)
    assert groups.encode_e2m1(torch.tensor([0.0, -0.01])).tolist() == [0, 8]


NVFP4_ROW = torch.tensor(
    [
        [
            0.02,
            -0.5,
            1,
            0.3,
            -0.125,
            0,
            0.75,
            -1.2,
            0.6,
            0.9,
            -0.01,
            0.2,
            -0.33,
            0.45,
            1.1,
            -0.05,
            *[0] * 16,
            *[0.001 * i for i in range(-8, 8)],
        ]
    ]
)


def test_nvfp4_vector() -> None:
    q = lowroll.quantize(NVFP4_ROW, "nvfp4")
    assert (
        q.tensors["weight_global_scale"].tolist() == [2240]
        and raw(q.tensors["weight_scale"]) == "7e2044"
    )
    assert raw(q.tensors["weight_packed"]) == "c03609f665284b87" + "00" * 8 + "ffeecd9b10436576"
    wanted = torch.tensor(
        [[0, -0.4, 0.8, 0.3, -0.1, 0, 0.8, -1.2, 0.6, 0.8, 0, 0.2, -0.3, 0.4, 1.2, 0]]
    )
    torch.testing.assert_close(q.dequantize()[:, :16], wanted)
    assert torch.equal(q.dequantize()[:, 16:32], torch.zeros(1, 16))


@pytest.mark.parametrize(
    ("head", "even", "packed", "values", "floor", "cut"),
    [
        ([7, -5, 1, 0.3], 128, "c601", [8, -4, 1, 0], 127, [6, -4, 1, 0.5]),
        ([6.9, 3.4, -0.4], 127, "5709", [6, 3, -0.5], 127, [6, 3, -0.5]),
        (
            [0.1, -0.03, 0.05],
            121,
            "c705",
            [0.09375, -0.03125, 0.046875],
            121,
            [0.09375, -0.03125, 0.046875],
        ),
        ([1.75, 1.749], 126, "5600", [2, 1.5], 125, [1.5, 1.5]),
        ([1.749, 0.9], 125, "6700", [1.5, 1], 125, [1.5, 1]),
        ([0], 0, "0000", [0], 0, [0]),
    ],
)
def test_mxfp4_vectors(
    head: list[float], even: int, packed: str, values: list[float], floor: int, cut: list[float]
) -> None:
    q, q_floor = (lowroll.quantize(padded(head, 32), name) for name in ("mxfp4", "mxfp4_floor"))
    assert (
        q.tensors["weight_scale"].tolist() == [[even]]
        and raw(q.tensors["weight_packed"])[:4] == packed
    )
    assert q.dequantize()[0, : len(values)].tolist() == values
    assert q_floor.tensors["weight_scale"].tolist() == [[floor]]
    assert q_floor.dequantize()[0, : len(cut)].tolist() == cut
    assert not q.dequantize()[0, len(head) :].any()


def test_mxfp4_powers_are_exact() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(
        mxfp4.power_of_two(exponents).double(), 2.0 ** (torch.arange(255).double() - 127)
    )


NF4_BLOCKS = torch.cat(
    [
        padded(
            [
                1,
                -1,
                0.5,
                -0.5,
                0.25,
                -0.1,
                0.04,
                0,
                0.9,
                0.62,
                0.3,
                -0.65,
                -0.45,
                -0.3,
                -0.14,
                0.12,
            ],
            64,
        ),
        padded([0.02, -0.01, 0.005, 0, -0.02, 0.013, 0.007, -0.004], 64),
    ]
)


def test_nf4_vectors() -> None:
    q = lowroll.quantize(NF4_BLOCKS, "nf4")
    assert (
        raw(q.tensors["weight"][:8]) == "f0c2a687fdb13458"
        and raw(q.tensors["weight"][32:36]) == "f2a70eb5"
    )
    assert q.tensors["weight"].shape == (64, 1) and q.tensors["absmax"].tolist() == pytest.approx(
        [1, 0.02], rel=1e-7
    )
    zero = lowroll.quantize(torch.zeros(2, 64), "nf4")
    assert (
        raw(zero.tensors["weight"]) == "77" * 64
        and not zero.tensors["absmax"].any()
        and not zero.dequantize().any()
    )


def test_nf4_double_quantization_vector() -> None:
    w = torch.zeros(4, 64)
    w[:, 0] = torch.tensor([1, 0.02, 0.5, 0.25])
    q = lowroll.quantize(w, "nf4_dq")
    assert q.tensors["nested_offset"].item() == pytest.approx(0.4425, rel=1e-7)
    assert q.tensors["nested_absmax"].tolist() == pytest.approx([0.5575], rel=1e-6)
    assert q.tensors["absmax"].tolist() == [255, 17, 191, 46]
    assert q.dequantize()[:, 0].tolist() == pytest.approx(
        [1, 0.0221972466, 0.5021699071, 0.2495527267], rel=1e-6
    )
    levels = nf4.dynamic_levels()
    assert (
        len(levels) == 256
        and levels[127] == 0
        and levels[255] == 1
        and list(levels) == sorted(set(levels))
    )


# -- the tools that own the layouts ----------------------------------------------------------------

CT_SCHEMES = {
    "fp8": ("FP8_DYNAMIC", "naive-quantized"),
    "fp8_block": ("FP8_BLOCK", "naive-quantized"),
    "int4": ("W4A16", "pack-quantized"),
    "int4_asym": ("W4A16_ASYM", "pack-quantized"),
    "w4a8": ("W4A8", "pack-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": ("MXFP4A16", "mxfp4-pack-quantized"),
}


def compressed_tensors(w_NK: Tensor, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return what compressed-tensors stores for a matrix with min-max scales, and reads back."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    preset, compression = CT_SCHEMES[name]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    rows, columns = args.block_structure or (1, args.group_size or w_NK.shape[1])
    blocks = w_NK.view(w_NK.shape[0] // rows, rows, w_NK.shape[1] // columns, columns)
    low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    state: dict[str, Tensor] = {"weight": w_NK}
    if name == "nvfp4":
        state["weight_global_scale"] = generate_gparam(w_NK.amin(), w_NK.amax())
    state["weight_scale"], zero = calculate_qparams(
        low, high, args, state.get("weight_global_scale")
    )
    state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(compression)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize("scale", [0.02, 1.0, 37.0])
@pytest.mark.parametrize("name", CT_SCHEMES)
def test_compressed_tensors_stores_the_same_bytes(name: str, scale: float) -> None:
    w = normal(256, 512, seed=len(name)) * scale * (1 + normal(256, 1, seed=1).abs())
    theirs, read = compressed_tensors(w, name)
    q = lowroll.quantize(w, name)
    for part, tensor in q.tensors.items():
        assert theirs[part].dtype == tensor.dtype and torch.equal(
            theirs[part].float(), tensor.float()
        ), part
    rounding = 2**-7 if read.dtype == torch.bfloat16 else 0  # it reads FP4 as bfloat16
    torch.testing.assert_close(q.dequantize(), read.float(), rtol=rounding, atol=0)


@pytest.mark.parametrize("name", ["nf4", "nf4_dq"])
@pytest.mark.parametrize("shape", [(256, 512), (100, 33), (3, 43)])
def test_bitsandbytes_stores_the_same_bytes(name: str, shape: tuple[int, int]) -> None:
    from bitsandbytes import functional as bnb

    w = normal(*shape) * (0.1 + normal(shape[0], 1, seed=1).abs())
    with torch.compiler.set_stance(
        "force_eager"
    ):  # it would compile its reference code for each shape
        packed, state = bnb.quantize_4bit(
            w, blocksize=64, compress_statistics=name == "nf4_dq", quant_type="nf4"
        )
        read = bnb.dequantize_4bit(packed, state)
    q = lowroll.quantize(w, name)
    assert torch.equal(packed, q.tensors["weight"])
    if name == "nf4":
        assert torch.equal(state.absmax, q.tensors["absmax"])
        torch.testing.assert_close(q.dequantize(), read, rtol=1e-6, atol=0)
        return
    assert state.offset.item() == pytest.approx(q.tensors["nested_offset"].item(), rel=1e-6)
    torch.testing.assert_close(q.tensors["nested_absmax"], state.state2.absmax, rtol=1e-6, atol=0)
    assert torch.equal(bnb.create_dynamic_map(), torch.tensor(nf4.dynamic_levels()))
    steps = (
        state.absmax.int() - q.tensors["absmax"].int()
    ).abs()  # its search misses the nearest at times
    assert steps.max() <= 1 and steps.float().mean() < 5e-3
    absmax, decoded = w.flatten(), get_format(name).decode_absmax(q.tensors)
    absmax = torch.stack([block.abs().max() for block in absmax.split(64)])
    theirs = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert ((decoded - absmax).abs() <= (theirs - absmax).abs() + 1e-6).all()
    same = (steps == 0).repeat_interleave(64)[: w.numel()].view(shape)
    torch.testing.assert_close(q.dequantize()[same], read[same], rtol=1e-5, atol=1e-7)


# -- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 31), (33, 129), (130, 257)])
def test_sizes_that_no_group_divides(name: str, shape: tuple[int, int]) -> None:
    """The matrix padded with zeros to whole groups gives the same values."""
    w = normal(*shape)
    q = lowroll.quantize(w, name)
    assert q.dequantize().shape == w.shape and q.linear(torch.ones(2, shape[1])).shape == (
        2,
        shape[0],
    )
    if name == "int8_rotated":  # its blocks divide a row: a padded row has others
        assert torch.allclose(q.dequantize(), w, atol=0.03)
    elif not name.startswith("nf4"):  # its blocks run on over the ends of rows
        whole = torch.zeros(shape[0], 384)
        whole[:, : shape[1]] = w
        assert torch.equal(
            lowroll.quantize(whole, name).dequantize()[:, : shape[1]], q.dequantize()
        )
    else:
        whole = torch.zeros(1, -(-w.numel() // 64) * 64)
        whole[0, : w.numel()] = w.flatten()
        assert torch.equal(
            lowroll.quantize(whole, name).dequantize()[0, : w.numel()], q.dequantize().flatten()
        )


@pytest.mark.parametrize("name", LOW_BIT)
def test_zeros_stay_zeros(name: str) -> None:
    assert not lowroll.quantize(torch.zeros(5, 300), name).dequantize().any()
    w = normal(4, 512)
    w[1], w[2, :256] = 0, 0
    q = lowroll.quantize(w, name)
    assert not q.dequantize()[1].any() and not q.dequantize()[2, :256].any()
    assert q.dequantize()[0].any() and torch.isfinite(q.linear(torch.ones(1, 512))).all()


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-37, 1e-30, 1e30, 1e38])
def test_huge_and_denormal_weights_stay_finite(name: str, size: float) -> None:
    """No value is further from its weight than the largest of the matrix."""
    w = torch.tensor([[1.0, -1.0, 0.5, 0.25] * 40, [0.0, -0.7, 0.1, 1.0] * 40]) * size
    q = lowroll.quantize(w, name)
    error = (q.dequantize().double() - w.double()).abs().max()
    assert torch.isfinite(q.dequantize()).all() and error <= 1.001 * w.double().abs().max()
    halves = name in ("q4_0", "q4_1", "q8_0")  # whose scales are float16
    if size in (1e-30, 1e30) and not halves and (size > 1 or name != "fp8_block"):  # has a floor
        assert error <= 0.2 * w.double().abs().max()
    if size < 1e38:  # beyond, sums of unscaled codes overflow
        assert torch.isfinite(q.linear(torch.full((1, 160), 1e-3))).all()


def test_a_non_finite_weight_of_a_model_is_refused_by_its_name(tmp_path: Path) -> None:
    sick = hf.load(hf_folder(tmp_path / "m"))
    with torch.no_grad():
        sick.blocks[1].down.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"blocks\.1\.down\.weight: nvfp4: .*non-finite"):
        quantize_base(sick, "nvfp4")


@pytest.mark.parametrize("name", LOW_BIT)
def test_codes_depend_on_values_and_not_on_the_dtype(name: str) -> None:
    w = normal(40, 96).bfloat16()
    narrow, wide = lowroll.quantize(w, name), lowroll.quantize(w.float(), name)
    for part, tensor in wide.tensors.items():
        assert tensor.dtype == narrow.tensors[part].dtype and raw(tensor) == raw(
            narrow.tensors[part]
        ), part


def test_fused_parts_share_nvfp4s_global_scale() -> None:
    """The fused matrix has the smallest global scale of its parts."""
    q_part, k_part, v_part = (
        normal(32, 64) * 3,
        normal(16, 64, seed=1),
        normal(16, 64, seed=2) * 0.1,
    )
    fused = lowroll.quantize(torch.cat([q_part, k_part, v_part]), "nvfp4")
    alone = [lowroll.quantize(part, "nvfp4") for part in (q_part, k_part, v_part)]
    scales = [part.tensors["weight_global_scale"].item() for part in alone]
    assert fused.tensors["weight_global_scale"].tolist() == [min(scales)] and len(set(scales)) == 3
    for part, rows in ((k_part, slice(32, 48)), (v_part, slice(48, 64))):
        anchored = torch.cat([part, torch.zeros(1, 64)])
        anchored[-1, 0] = q_part.abs().max()
        wanted = lowroll.quantize(anchored, "nvfp4")
        for name in ("weight_packed", "weight_scale"):
            assert raw(fused.tensors[name][rows]) == raw(wanted.tensors[name][:-1])


# -- the engine's arithmetic -----------------------------------------------------------------------


def activations_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activations that a format multiplies, in float64."""

    def tokens(x_MK: Tensor, kind: str) -> Tensor:
        rows = quantize_rows(x_MK, kind)
        return rows.codes_MK.double() * rows.scale_M1.double()

    def blocks(x_MK: Tensor) -> Tensor:
        x_MGS = groups.split(x_MK, 128)
        return groups.join(tokens(x_MGS.flatten(0, 1), "fp8").view(x_MGS.shape), x_MK.shape[1])

    return {
        "int8": lambda x: tokens(x, "int8"),
        "int8_rotated": lambda x: rotate(tokens(x, "int8_rotated").float()).double(),
        "w4a8": lambda x: tokens(x, "int8"),
        "fp8": lambda x: tokens(x, "fp8"),
        "fp8_block": blocks,
    }.get(name, Tensor.double)


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("shape", [(96, 256), (33, 7), (1, 1), (130, 257)])
def test_linear_is_the_oracles_product(name: str, shape: tuple[int, int]) -> None:
    """P5 for one matrix: float64 sums over rounded activations and dequantized weights."""
    q, bias = lowroll.quantize(normal(*shape), name), normal(shape[0], seed=2)
    for rows in (1, 5, 40):
        x = normal(rows, shape[1], seed=rows) * 3
        x[0] = 0
        exact = activations_of(name)(x) @ q.dequantize().double().t() + bias.double()
        torch.testing.assert_close(q.linear(x, bias).double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            q.linear(x.bfloat16(), bias.bfloat16()).double(),
            exact,
            rtol=0.05,
            atol=0.03 * float(exact.abs().max()),
        )
        assert q.linear(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [n for n in LOW_BIT if isinstance(get_format(n), WeightOnly)])
def test_what_the_engine_kept_can_be_differentiated(name: str) -> None:
    q, x = lowroll.quantize(normal(8, 40), name), normal(3, 40, seed=1)
    with torch.inference_mode():
        q.linear(x)
    x.requires_grad_()
    q.linear(x).sum().backward()
    torch.testing.assert_close(x.grad, q.dequantize().sum(0).expand(3, -1))


# -- the engine ------------------------------------------------------------------------------------

ROUNDED = {
    "int8": 0.05,
    "int8_rotated": 0.05,
    "w4a8": 0.05,
    "fp8": 0.25,
    "fp8_block": 0.25,
}  # formats that round activations


@pytest.mark.parametrize("name", LOW_BIT)
def test_engine_logits_are_those_of_the_dequantized_model(folder: Path, name: str) -> None:
    """P5: some formats round activations besides."""
    engine = engine_of(folder, weights=name)
    ids, positions = torch.tensor(prompt(40)), torch.arange(40)
    dequantized = hf.load(folder)
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(
            dequantized.linears(), engine.model.linears(), strict=True
        ):
            assert isinstance(theirs.weight, QTensor)
            mine.weight.copy_(theirs.weight.dequantize())
        low_bit, wanted = (
            m.logits(m(ids, positions, varlen([40]))) for m in (engine.model, dequantized)
        )
    gap = (low_bit - wanted).abs().max() / wanted.abs().max()
    assert (0 < gap < ROUNDED[name]) if name in ROUNDED else gap < 1e-6


def test_large_matrices_stay_codes_up_to_64_rows() -> None:
    """The shapes are Qwen2.5-7B's: gate-up, down, qkv, o."""
    shapes = ((37888, 3584), (3584, 18944), (4608, 3584), (3584, 3584))
    assert [dense_from(shape) for shape in shapes] == [64, 64, 32, 32]
