"""`lowroll quantize MODEL OUT --format nvfp4`: a dense model as a low-bit folder for other tools
too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import low_bit

if TYPE_CHECKING:
    import torch

    from lowroll.model.transformer import Transformer

GPTQ = "gptq"
ROUNDINGS = ("nearest", GPTQ)
KL_TOKENS, KL_PIECE = 512, 128  # tokens for the reported KL, and in each sequence


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll quantize",
        description=(
            "Quantize the linear weights of a dense model and write them as a folder that lowroll, "
            "transformers and vLLM read: compressed-tensors, and bitsandbytes for nf4. Embeddings, "
            "norms and lm_head stay as they are."
        ),
    )
    p.add_argument("model", metavar="MODEL", help="a dense model: a folder or a hub id")
    p.add_argument("out", metavar="OUT", help="the folder to write; it must not exist")
    p.add_argument(
        "--format",
        required=True,
        help=f"{', '.join(low_bit())}; or a budget, such as max_kl=0.02 or max_bits=5, under which "
        "each layer gets a format",
    )
    p.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where to calibrate and quantize",
    )
    p.add_argument(
        "--rounding",
        default="nearest",
        choices=ROUNDINGS,
        help="nearest, or gptq: each column makes up for what the ones before it lost, on your "
        "text (default nearest)",
    )
    p.add_argument(
        "--awq",
        action="store_true",
        help="before that, rescale channels that are loud on your text: they round finer",
    )
    text = p.add_argument_group(
        "calibration", "the text that --rounding gptq, --awq and a budget look at"
    )
    text.add_argument(
        "--calibration",
        metavar="FILE",
        help="a .jsonl file of rows with a text or messages, or a plain text; best what the model "
        "itself writes on your task (the samples of a run). Without it: what the model answers to a "
        "few general prompts",
    )
    text.add_argument(
        "--calibration-samples", type=int, metavar="N", help="sequences at most (default 128)"
    )
    text.add_argument(
        "--calibration-length",
        type=int,
        metavar="L",
        help="tokens of a sequence at most (default 512, or the model's context where that is "
        "shorter)",
    )
    return p


def run(arguments: argparse.Namespace) -> int:
    has_budget = is_budget(arguments.format)
    is_calibrated = arguments.awq or arguments.rounding == GPTQ
    _check_arguments(arguments, has_budget, is_calibrated)
    from lowroll.model.device import pick_device
    from lowroll.quant.formats import get_format
    from lowroll.runs.export import quantize_folder

    device = pick_device(arguments.device)
    format = _chosen(arguments, device) if has_budget else arguments.format
    transform = _make_calibration(arguments, format, device) if is_calibrated else None
    quantized = quantize_folder(arguments.model, arguments.out, format, transform, device)
    format_spec = get_format(quantized.format)
    print(
        f"{quantized.folder}: {quantized.format}, {format_spec.bits:g} bits a weight: {format_spec.summary}\n"
        f"weight files: {quantized.bytes_before / 1e6:.1f} MB before, {quantized.bytes / 1e6:.1f} MB now\n"
        + (f"note: {quantized.note}\n" if quantized.note else "")
        + f"try it: lowroll generate --model {quantized.folder}"
    )
    return 0


def _check_arguments(arguments: argparse.Namespace, has_budget: bool, is_calibrated: bool) -> None:
    has_text = arguments.calibration is not None
    sizes = (arguments.calibration_samples, arguments.calibration_length)
    has_sizes = any(size is not None for size in sizes)
    if has_sizes and not has_text:
        raise ValueError(
            "--calibration-samples, --calibration-length: they are of --calibration FILE"
        )
    if has_budget and arguments.awq:
        raise ValueError("--awq: it rescales for one format, and a budget chooses several")
    reads_text = is_calibrated or (has_budget and not has_sizes)
    if has_text and not reads_text:
        raise ValueError(f"--calibration: without --awq or --rounding {GPTQ} nothing is calibrated")


def _chosen(arguments: argparse.Namespace, device: torch.device) -> str:
    from pathlib import Path

    from lowroll.model.folder import resolve
    from lowroll.runs.export import absent, stored_dtype
    from lowroll.runs.format_search import of_model

    absent(arguments.out)
    text_file = None if arguments.calibration is None else Path(arguments.calibration)
    dtype = stored_dtype(resolve(arguments.model))
    return of_model(arguments.model, arguments.format, device, dtype, text_file)


def _make_calibration(
    arguments: argparse.Namespace, format: str, device: torch.device
) -> Callable[[Transformer], None]:
    from lowroll.model.folder import resolve
    from lowroll.model.spec import read_spec
    from lowroll.model.tokenizer import load_tokenizer
    from lowroll.runs.calibration import calibration_sequences
    from lowroll.runs.format_search import answers

    given_sequences: list[list[int]] | None = None
    if arguments.calibration is not None:
        folder = resolve(arguments.model)
        length = arguments.calibration_length
        given_sequences = calibration_sequences(
            arguments.calibration,
            load_tokenizer(folder),
            128 if arguments.calibration_samples is None else arguments.calibration_samples,
            min(512, read_spec(folder).max_position) if length is None else length,
        )

    def calibrate(model: Transformer) -> None:
        sequences = given_sequences or answers(arguments.model, model, device)
        if arguments.awq:
            _rescale(model, format, sequences)
        if arguments.rounding == GPTQ:
            _round(model, format, sequences)

    return calibrate


def _rescale(model: Transformer, format: str, sequences: list[list[int]]) -> None:
    from lowroll.metrics.progress import phases
    from lowroll.weights import awq

    with phases() as on_phase:
        blocks = awq.calibrate(
            model,
            format,
            sequences,
            on_progress=lambda done, total: on_phase("AWQ, blocks", done, total),
        )
    error_before = sum(block.plain_error for block in blocks)
    error_after = sum(block.error for block in blocks)
    print(
        f"AWQ on {_describe_sequences(sequences)}: squared error of the quantized blocks {error_before:.3g} before, "
        f"{error_after:.3g} now; {sum(block.kept for block in blocks)} of {len(blocks)} rescaled"
    )


def _round(model: Transformer, format: str, sequences: list[list[int]]) -> None:
    from lowroll.metrics.progress import phases
    from lowroll.weights import gptq
    from lowroll.weights.format_search import Calibration, Reference

    dense = Reference(model, Calibration(sequences, [0] * len(sequences)).cut(KL_TOKENS, KL_PIECE))
    with phases() as on_phase:
        matrices = gptq.round_base(
            model,
            format,
            sequences,
            on_progress=lambda done, total: on_phase("GPTQ, blocks", done, total),
        )
    nearest_error = sum(matrix.nearest_error for matrix in matrices) / len(matrices)
    rounded_error = sum(matrix.error for matrix in matrices) / len(matrices)
    print(
        f"GPTQ on {_describe_sequences(sequences)}: squared error of a product {nearest_error:.2%} rounded to nearest, "
        f"{rounded_error:.2%} now (means over {len(matrices)} matrices); KL from the dense model {dense.kl():.2g} "
        f"on {dense.tokens} of these tokens"
    )


def _describe_sequences(sequences: list[list[int]]) -> str:
    return f"{len(sequences)} sequences, {sum(map(len, sequences))} tokens"
