"""The table of weight formats, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

OWN = "dense"  # a run's name for the dense format of its dtype
STORED = "stored"  # a run's name for the format of its model's folder
DEFAULT = "int8"  # of rollouts that name no format
EIGHT_BITS = "int8_rotated"  # the 8-bit format nearest to dense weights


@dataclass(frozen=True)
class FormatRow:
    """A format's facts before torch is loaded."""

    home: str  # module:class
    dense: bool = False  # plain floating point
    large_batch: bool = False  # fast with many rows: may accompany another format


FORMATS: dict[str, FormatRow] = {
    "fp32": FormatRow("lowroll.quant.dense:Float32", dense=True),
    "bf16": FormatRow("lowroll.quant.dense:BFloat16", dense=True, large_batch=True),
    "int8": FormatRow("lowroll.quant.int8:Int8", large_batch=True),
    "int8_rotated": FormatRow("lowroll.quant.int8_rotated:Int8Rotated", large_batch=True),
    "fp8": FormatRow("lowroll.quant.fp8:Float8", large_batch=True),
    "fp8_block": FormatRow("lowroll.quant.fp8:Float8Block"),
    "int4": FormatRow("lowroll.quant.int4:Int4"),
    "int4_asym": FormatRow("lowroll.quant.int4:Int4Asymmetric"),
    "w4a8": FormatRow("lowroll.quant.int4:Int4Int8"),
    "nvfp4": FormatRow("lowroll.quant.nvfp4:NVFloat4"),
    "mxfp4": FormatRow("lowroll.quant.mxfp4:MXFloat4"),
    "mxfp4_floor": FormatRow("lowroll.quant.mxfp4:MXFloat4Floor"),
    "nf4": FormatRow("lowroll.quant.nf4:NormalFloat4"),
    "nf4_dq": FormatRow("lowroll.quant.nf4:NormalFloat4Double"),
    "q4_0": FormatRow("lowroll.quant.blocks:Q4_0"),
    "q4_1": FormatRow("lowroll.quant.blocks:Q4_1"),
    "q8_0": FormatRow("lowroll.quant.blocks:Q8_0"),
}


def is_dense(name: str) -> bool:
    return name == OWN or (name in FORMATS and FORMATS[name].dense)


def large_batch() -> list[str]:
    return [name for name, row in FORMATS.items() if row.large_batch]


def low_bit() -> list[str]:
    return [name for name, row in FORMATS.items() if not row.dense]
