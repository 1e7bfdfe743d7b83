"""INT8 W8A8: one scale an output channel, one dynamic scale a token, integer accumulation.

    weights      s_w[n] = amax(|w[n, :]|) / 127.5,  q_w = clamp(round(w / s_w), -128, 127)
    activations  s_x[m] = amax(|x[m, :]|) / 127,    q_x = round(x * 127 / amax)
    product      y[m, n] = (sum_k q_x q_w in int32) * s_w[n] * s_x[m] + bias[n]

Ties round to even. Weight scales follow compressed-tensors, activation scales vLLM's dynamic kernel
(QuRL section 3.1). Integer sums make a row bitwise independent of its batch.

A CPU with AVX-512 VNNI multiplies by `kernels.matmul.w8a8_vnni` (beside AMX only few rows) or by
oneDNN, with unsigned activations, as signed ones fall back to a reference loop (docs/LOG.md).
Others use `kernels.matmul.w8a8_float32`.

Legend: `quant`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.launch import triton_supports
from lowroll.kernels.matmul import w8a8_float32, w8a8_onednn, w8a8_vnni
from lowroll.kernels.matmul.w8a8_cuda import multiply
from lowroll.kernels.quantize.quantize8 import quantize_rows_into
from lowroll.kernels.quantize.rows import Product, QuantizedRows, quantize_rows
from lowroll.quant.formats import QTensor, divide, nonzero
from lowroll.quant.grid import Grid, Gridded, Stretch
from lowroll.quant.scheme import INT8_TOKENS, Scheme, arguments

KIND = "int8"  # of the codes of activations


class Int8(Gridded):
    name = "int8"
    summary = "W8A8, per-channel weights, per-token activations, int32 accumulation"
    bits = 8
    rows: str = KIND
    stacked = ("w8a8", "codes", "scale")
    scheme = Scheme("int-quantized", arguments(8, "int", "channel"), INT8_TOKENS)
    suffixes = {"codes": "weight", "scale": "weight_scale"}
    read_experts = False

    def scales(self, w_NK: Tensor, stretch_NG: Stretch = 1.0) -> dict[str, Tensor]:
        amax_N1 = w_NK.float().abs().amax(dim=-1, keepdim=True) * stretch_NG
        return {"scale": nonzero(divide(amax_N1, 127.5))}

    def codes(self, w_NK: Tensor, scales: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"codes": _round_to_code(w_NK.float() / scales["scale"]).to(torch.int8)}

    def grid(self, scales: dict[str, Tensor], shape: tuple[int, int]) -> Grid:
        return Grid(scales["scale"], _round_to_code, shape[1])

    def encode_into(self, w_NK: Tensor, amax_1: Tensor, tensors: dict[str, Tensor]) -> None:
        if not triton_supports(w_NK):
            return super().encode_into(w_NK, amax_1, tensors)
        quantize_rows_into(w_NK, tensors["codes"], tensors["scale"], self.rows)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return (q.tensors["codes"].float() * q.tensors["scale"]).to(dtype)

    def slower_than_float32(self, device: torch.device) -> str:
        if device.type != "cpu" or (support := w8a8_onednn.supports_device(device)):
            return ""
        return f"{support.why_not}, so its codes are multiplied as float32 numbers"

    def linear(
        self, x_MK: Tensor, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Tensor:
        # integer sums are exact in any batch
        if w8a8_vnni.supports(x_MK):
            packed = q.derive("vnni", _pack_vnni)
            return w8a8_vnni.linear(x_MK, packed, bias_N, self.rotation_width(q.shape[1]))
        return self.product(quantize_rows(x_MK, self.rows), q, bias_N).dense()

    def rotation_width(self, num_in: int) -> int:
        """Return the width of the rotated blocks of rows; 1: none."""
        return 1

    def product(
        self, rows: QuantizedRows, q: QTensor, bias_N: Tensor | None, exact: bool = False
    ) -> Product:
        if w8a8_onednn.supports_device(rows.codes_MK.device):
            packed = q.derive("onednn", pack)
            sums_MN = w8a8_onednn.multiply(rows.codes_MK, packed)
        elif rows.codes_MK.device.type == "cpu":
            parts = q.derive("values", lambda q: w8a8_float32.split(q.tensors["codes"]))
            sums_MN = w8a8_float32.multiply(rows.codes_MK, parts) * q.tensors["scale"].flatten()
        else:
            return multiply(rows, q.tensors["codes"], q.tensors["scale"], bias_N)
        return Product(sums_MN, rows.scale_M1, None, bias_N, rows.dtype)


def _round_to_code(x: Tensor) -> Tensor:
    return torch.round(x).clamp_(-128, 127)


def pack(q: QTensor) -> w8a8_onednn.Packed:
    return w8a8_onednn.pack(q.tensors["codes"], q.tensors["scale"])


def _pack_vnni(q: QTensor) -> w8a8_vnni.Packed:
    return w8a8_vnni.pack(q.tensors["codes"], q.tensors["scale"])
