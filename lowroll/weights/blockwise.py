"""Calibration text through a model, by block and by chunk of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.model.attention import Attend
from lowroll.model.linear import Linear
from lowroll.model.residual_stream import Stream
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import Format, QTensor

CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Chunk:
    """Some sequences' rows among the T tokens, and their attention."""

    rows: slice
    cos: Tensor
    sin: Tensor
    attend: Attend


def embed_in_chunks(
    model: Transformer, sequences: Sequence[Sequence[int]]
) -> tuple[Tensor, list[Chunk]]:
    """Return the embedded tokens, and chunks of whole sequences."""
    ids_T = torch.tensor([token for ids in sequences for token in ids], device=model.device)
    return model.embed(ids_T), list(_in_chunks(model, [len(ids) for ids in sequences]))


def _in_chunks(model: Transformer, lengths: list[int]) -> Iterator[Chunk]:
    start = 0
    chunk_lengths: list[int] = []
    for i, length in enumerate(lengths):
        chunk_lengths.append(length)
        stop = start + sum(chunk_lengths)
        if i + 1 < len(lengths) and stop - start + lengths[i + 1] <= CHUNK_TOKENS:
            continue
        pos_T = torch.tensor([pos for n in chunk_lengths for pos in range(n)], device=model.device)
        cos, sin = model.rotations(pos_T)
        yield Chunk(slice(start, stop), cos, sin, model.causal(chunk_lengths))
        start, chunk_lengths = stop, []


def input_of(linear: Linear, run: Callable[[], Stream]) -> Tensor:
    """Return the linear's input while `run` runs."""
    captured_inputs: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, inputs: captured_inputs.append(inputs[0]))
    try:
        run()
    finally:
        hook.remove()
    return captured_inputs[0]


def plain(stream: Stream) -> Tensor:
    """Return a linear's output as a plain tensor."""
    assert isinstance(stream, Tensor)
    return stream


@contextmanager
def multiplying(*pairs: tuple[Linear, QTensor]) -> Iterator[None]:
    """Have linears multiply with quantized weights in the block."""
    for linear, q in pairs:
        linear.aligned = q
    try:
        yield
    finally:
        for linear, _ in pairs:
            linear.aligned = None


def check(
    method: str, model: Transformer, format: Format, sequences: Sequence[Sequence[int]]
) -> None:
    """Raise ValueError for a dense format, and as `check_dense`. method: its name in errors."""
    if format.dense:
        raise ValueError(
            f"{method}: {format.name} does not round to low bits, and there is nothing to calibrate"
        )
    check_dense(method, model, sequences)


def why_not(spec: ModelSpec) -> str | None:
    """Return why models of a spec are not calibrated, or None."""
    if spec.mixture.num_experts:
        return (
            f"{spec.architecture} has experts, of which each would need to be calibrated on its own "
            "tokens; that is not supported"
        )
    if not spec.adds_plainly:
        return (
            f"{spec.architecture} has norms after attention, or scales its updates; calibration is "
            "not supported for it"
        )
    return None


def check_dense(method: str, model: Transformer, sequences: Sequence[Sequence[int]]) -> None:
    """Raise ValueError for a model with quantized weights, experts or an adapter, and for sequences
    outside the vocabulary or context."""
    for name, linear in model.linears():
        if (
            isinstance(linear.weight, QTensor)
            or linear.adapter is not None
            or linear.aligned is not None
        ):
            raise ValueError(
                f"{method}: {name} is quantized, aligned or has an adapter; calibrate the dense "
                f"model before"
            )
    if (reason := why_not(model.spec)) is not None:
        raise ValueError(f"{method}: {reason}")
    if not sequences:
        raise ValueError(f"{method}: no calibration sequences")
    for i, ids in enumerate(sequences):
        if not 1 <= len(ids) <= model.spec.max_position:
            raise ValueError(
                f"{method}: sequences[{i}] has {len(ids)} tokens; 1 to {model.spec.max_position} "
                f"fit the model"
            )
        if min(ids) < 0 or max(ids) >= model.spec.vocab_size:
            raise ValueError(
                f"{method}: sequences[{i}]: an id is outside the vocabulary of "
                f"{model.spec.vocab_size}"
            )
