"""AutoAWQ, AutoGPTQ and GPTQModel folders (`quant_method` awq and gptq), read only.

Both mean w^ = (q - z) s, with a scale s and a zero point z for each group of a row. Files hold the
transpose of W [N, K], in int32 words of 32 / bits codes:

    awq (version gemm)   qweight [K, N / 8], qzeros [K / S, N / 8], scales [K / S, N]: the eight codes
                         of a word are columns 0, 2, 4, 6, 1, 3, 5, 7, from the lowest bits up
    gptq                 qweight [K bits / 32, N], qzeros [G, N bits / 32], scales [G, N], g_idx [K]: words
                         run along K in qweight and along N in qzeros, from the lowest bits up;
                         column k belongs to group g_idx[k]. checkpoint_format gptq stores z - 1
                         (modulo 2^bits), gptq_v2 stores z

Four bits in groups of 128 in column order keep their codes: `int4_asym`, or `int4` for gptq's sym.
All else becomes dense.

Legend: `quant`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowroll.quant.formats import QTensor, get_format, meta_tensors
from lowroll.quant.int4 import GROUP, Int4, Int4Asymmetric, pack_words, pack_zeros
from lowroll.quant.scheme import Header

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each code of a word
BITS = (2, 4, 8)
ADVICE = "; load the dense model"


@dataclass(frozen=True)
class PackedWeights:
    """The layout of such a folder. offset: added to a stored zero point. ordered: groups follow the
    columns."""

    method: str
    bits: int
    size: int  # weights of a group; -1: all of a row
    symmetric: bool = False
    ordered: bool = True
    offset: int = 0

    def of(self, module: str) -> PackedWeights:
        return self

    @property
    def format(self) -> str | None:
        """The format with the same codes, if any."""
        if self.bits != 4 or self.size != GROUP or not self.ordered:
            return None
        return Int4.name if self.symmetric else Int4Asymmetric.name

    @property
    def words(self) -> str:
        group = "one group a row" if self.size == -1 else f"groups of {self.size}"
        order = "" if self.ordered else ", columns in another order"
        return f"{self.method} ({self.bits} bits, {group}{order})"

    def headers(self, shape: tuple[int, int]) -> dict[str, Header]:
        """Return the headers of a matrix, by suffix. ValueError for a shape of no whole words."""
        num_out, num_in = shape
        codes_per_word = 32 // self.bits
        if num_out % codes_per_word or (self.method == "gptq" and num_in % codes_per_word):
            raise ValueError(f"{self.method}: a matrix {list(shape)} is no whole words")
        groups = 1 if self.size == -1 else -(-num_in // self.size)
        stored_headers: dict[str, Header] = {
            "qzeros": ((groups, num_out // codes_per_word), ("I32",)),
            "scales": ((groups, num_out), ("F16", "BF16", "F32")),
        }
        if self.method == "awq":
            return stored_headers | {"qweight": ((num_in, num_out // codes_per_word), ("I32",))}
        qweight: Header = ((num_in // codes_per_word, num_out), ("I32",))
        return stored_headers | {"qweight": qweight, "g_idx": ((num_in,), ("I32",))}

    def decode(self, shape: tuple[int, int], stored: dict[str, Tensor]) -> QTensor | Tensor:
        """Return the matrix of a file's tensors: in `format`, or dense float32. ValueError names
        the wrong suffix."""
        scale_NG = stored["scales"].float().t().contiguous()
        if not bool(torch.isfinite(scale_NG).all()):
            raise ValueError("scales: holds a non-finite value")
        group_K = self._groups(shape[1], scale_NG.shape[1], stored)
        code_NK, zero_NG = self._codes(stored)
        if self.format is None:
            zero_NK, scale_NK = zero_NG[:, group_K], scale_NG[:, group_K]
            return ((code_NK - zero_NK) * scale_NK).contiguous()
        if bool((scale_NG < 0).any()):
            raise ValueError("scales: holds a negative scale")
        tensors = {"weight_packed": pack_words(code_NK - 8), "weight_scale": scale_NG}
        if not self.symmetric:
            tensors["weight_zero_point"] = pack_zeros(zero_NG - 8)
        elif bool((zero_NG != 8).any()):
            raise ValueError("qzeros: holds other zero points than 8, though sym is true")
        expected_names = meta_tensors(get_format(self.format), *shape)
        return QTensor(
            self.format, shape, {name: tensors[name].contiguous() for name in expected_names}
        )

    def _codes(self, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return codes [N, K] and zero points [N, G], int32 from 0 on."""
        zero_GN = _unpack(stored["qzeros"], self.bits)
        if self.method == "awq":
            return _reorder(_unpack(stored["qweight"], self.bits)).t(), _reorder(zero_GN).t()
        code_NK = _unpack(stored["qweight"].t().contiguous(), self.bits)
        return code_NK, ((zero_GN + self.offset) & ((1 << self.bits) - 1)).t()

    def _groups(self, columns: int, groups: int, stored: dict[str, Tensor]) -> Tensor:
        group_size = columns if self.size == -1 else self.size
        in_order_K = torch.arange(columns, device=stored["scales"].device) // group_size
        group_K = stored["g_idx"].long() if "g_idx" in stored else in_order_K
        if self.ordered and not torch.equal(group_K, in_order_K):
            raise ValueError("g_idx: reorders columns, though desc_act is false")
        if int(group_K.min()) < 0 or int(group_K.max()) >= groups:
            raise ValueError(f"g_idx: names groups outside of 0..{groups - 1}")
        return group_K


def read_packed(config: dict[str, Any]) -> PackedWeights:
    """Return the layout of a config. ValueError names the unsupported key."""
    method, bits, group_size = config["quant_method"], config.get("bits"), config.get("group_size")
    if not isinstance(bits, int) or bits not in ((4,) if method == "awq" else BITS):
        raise ValueError(f"bits: {bits!r} in {method} is not supported{ADVICE}")
    if type(group_size) is not int or not (group_size == -1 or group_size > 0):
        raise ValueError(f"group_size: expected a positive number or -1, got {group_size!r}")
    if method == "awq":
        return _read_awq(config, bits, group_size)
    return _read_gptq(config, bits, group_size)


def _read_awq(config: dict[str, Any], bits: int, group_size: int) -> PackedWeights:
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm" or config.get("zero_point", True) is not True:
        raise ValueError(
            f"version, zero_point: expected gemm and true, got {version!r} and "
            f"{config.get('zero_point')!r}{ADVICE}"
        )
    return PackedWeights("awq", bits, group_size)


def _read_gptq(config: dict[str, Any], bits: int, group_size: int) -> PackedWeights:
    checkpoint_format = config.get("checkpoint_format", "gptq")
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"checkpoint_format: {checkpoint_format!r} is not one of gptq, gptq_v2{ADVICE}"
        )
    if config.get("dynamic"):
        raise ValueError(f"dynamic: layers of different bits are not supported{ADVICE}")
    return PackedWeights(
        "gptq",
        bits,
        group_size,
        symmetric=config.get("sym") is True,
        ordered=not config.get("desc_act"),
        offset=int(checkpoint_format == "gptq"),
    )


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 words: [R, W] to [R, W 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _reorder(codes: Tensor) -> Tensor:
    permutation = torch.tensor(AWQ_ORDER, device=codes.device).argsort()
    return codes.unflatten(-1, (-1, len(AWQ_ORDER)))[..., permutation].flatten(-2)
