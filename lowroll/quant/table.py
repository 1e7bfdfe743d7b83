"""The table of weight formats: a row each, readable without torch.

A format is one file of this room and one row here. The row says what a configuration may ask for;
everything else (bits, groups, kernels, what files hold, where the guard leads) stands on the
format's class (`formats.Format`).
"""

from __future__ import annotations

from dataclasses import dataclass

OWN = "dense"  # how a run's settings call the dense format of the run's own dtype
STORED = "stored"  # and how the low-bit format that the folder of its model holds
DEFAULT = "int8"  # of rollouts that name no format
EIGHT_BITS = "int8_rotated"  # the format of 8 bits that is nearest to the dense weights


@dataclass(frozen=True)
class FormatRow:
    """A format as it is known before torch is loaded."""

    home: str  # module:class
    dense: bool = False  # plain floating point: there is nothing to correct for
    large_batch: bool = False  # quick with many rows: may stand beside another format


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
    """Is it plain floating point? So is `dense`, the run's own dtype."""
    return name == OWN or (name in FORMATS and FORMATS[name].dense)


def large_batch() -> list[str]:
    """The formats that may stand beside another one, for many rows."""
    return [name for name, row in FORMATS.items() if row.large_batch]


def low_bit() -> list[str]:
    """The formats that are not plain floating point."""
    return [name for name, row in FORMATS.items() if not row.dense]
