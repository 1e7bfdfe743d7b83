"""`lowroll quantize MODEL OUT --format nvfp4`: a dense model as a low-bit folder that other tools read too."""
from __future__ import annotations

import argparse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="lowroll quantize", description=(
        "Quantise the linear weights of a dense model and write them as a folder that lowroll, transformers and vLLM "
        "read: compressed-tensors for int8, fp8, int4, nvfp4 and mxfp4, bitsandbytes for nf4. Embeddings, norms and "
        "lm_head stay as they are."))
    p.add_argument("model", metavar="MODEL", help="a dense model: a folder or a hub id")
    p.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
    p.add_argument("--format", required=True,
                   help="int8, fp8, fp8_block, int4, int4_asym, w4a8, nvfp4, mxfp4, nf4, nf4_dq")
    return p


def run(arguments: argparse.Namespace) -> int:
    from lowroll.export import quantize_folder
    from lowroll.quant.formats import formats
    done = quantize_folder(arguments.model, arguments.out, arguments.format)
    print(f"{done.folder}: {done.format}, {formats()[done.format]}\n"
          f"weight files: {done.bytes_before / 1e6:.1f} MB before, {done.bytes / 1e6:.1f} MB now\n"
          f"try it: lowroll generate --model {done.folder}")
    return 0
