"""AWQ (docs/algorithms.md): scale the input channels of a weight before quantization, so that loud
channels round finer.

    Q(W s) (x / s) ~ W x        s a channel; the producer of x is divided by s once

The factors of a ratio r = 0, 1/20, ..., 19/20, from the mean |x| of a channel on calibration text
(xm) and the mean over the rows of |w| / amax(|w| in its group) (wm):

    s = max(xm^r / (wm^(1-r) + 1e-4), 1e-4),    s <- s / sqrt(max(s) min(s))

The candidate with the least mean squared error of the output is taken, measured after attention for
q, k, v, after the MLP for gate and up, and after themselves for o (only where every query head has
its own v) and down. Source: AWQ, arXiv 2306.00978, section 3; the ratio and both means as in
llm-compressor. Deviations:

1. s = 1 is a candidate too.
2. A producer's own rounding changes, so the whole quantized block is measured at the end, and
   restored when it did not improve.
3. Q(W s) meets x / s in the format's own arithmetic: for W8A8 the rounding of activations counts.
4. The optional search for clipped ranges is left out.

Inputs are those of the dense model. Memory: two residual streams, the quantized candidates of one
matrix, and the activations of one chunk.

Legend: T calibration tokens, D hidden size, K in features, N out features, G groups, S weights of a
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowroll.model.linear import Linear
from lowroll.model.residual_stream import RMSNorm
from lowroll.model.transformer import Block, Transformer, whole
from lowroll.quant.formats import Format, get_format
from lowroll.weights.blockwise import Chunk, check, embed_in_chunks, input_of, multiplying, plain

RATIOS = tuple(i / 20 for i in range(20))


@dataclass(frozen=True)
class Calibrated:
    """The mean squared errors of a block's quantized output before and after, and the ratio of each
    mapping (None: s = 1). kept: False for a restored block."""

    plain_error: float
    error: float
    ratios: dict[str, float | None]
    kept: bool


@dataclass(frozen=True)
class Mapping:
    """A producer whose output channels are divided by s, and their reader. output: from its inputs
    to where the error is measured."""

    name: str
    reader: Linear
    divide: Callable[[Tensor], None]
    inputs: Callable[[Chunk], Tensor]
    output: Callable[[Tensor, Chunk], Tensor]


@torch.no_grad()
def calibrate(
    model: Transformer,
    format: str,
    sequences: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Calibrated]:
    """Rescale a dense model in place for quantization to `format`; the logits stay up to rounding.
    Return a record for each block.

    sequences: token ids. on_progress(done, total) counts blocks. ValueError, before anything
    changes, as `blockwise.check`.
    """
    target_format = get_format(format)
    check("awq", model, target_format, sequences)
    x_TD, chunks = embed_in_chunks(model, sequences)
    records = []
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        y_TD = torch.cat([whole(block, x_TD[c.rows], c.cos, c.sin, c.attend) for c in chunks])
        records.append(_calibrate_block(block, target_format, x_TD, y_TD, chunks))
        x_TD = y_TD
        if on_progress is not None:
            on_progress(i + 1, len(model.blocks))
    return records


def factors(w_NK: Tensor, loudness_K: Tensor, ratio: float, group: int | None) -> Tensor:
    """Return s_K of a ratio, float32. loudness_K: the mean |x| of each channel."""
    weight_K = _relative_magnitude(w_NK, group)
    s_K = (loudness_K.float() ** ratio / (weight_K ** (1 - ratio) + 1e-4)).clamp_min(1e-4)
    return s_K / (s_K.max() * s_K.min()).sqrt()


def _calibrate_block(
    block: Block, format: Format, x_TD: Tensor, y_TD: Tensor, chunks: list[Chunk]
) -> Calibrated:
    original_weights = {name: p.clone() for name, p in block.named_parameters()}
    plain_error = _block_error(block, format, x_TD, y_TD, chunks)
    ratios = {
        mapping.name: _calibrate_mapping(mapping, format, chunks)
        for mapping in _mappings(block, x_TD)
    }
    error = _block_error(block, format, x_TD, y_TD, chunks)
    kept = error < plain_error
    if not kept:
        for name, p in block.named_parameters():
            p.copy_(original_weights[name])
    return Calibrated(plain_error, error if kept else plain_error, ratios, kept)


def _calibrate_mapping(mapping: Mapping, format: Format, chunks: list[Chunk]) -> float | None:
    weight = mapping.reader.weight
    assert isinstance(weight, nn.Parameter)
    abs_sums = torch.stack([mapping.inputs(c).abs().sum(0, dtype=torch.float32) for c in chunks])
    num_tokens = chunks[-1].rows.stop
    loudness_K = abs_sums.sum(0) / num_tokens
    ratios: list[float | None] = [None, *RATIOS]
    candidates = [torch.ones_like(loudness_K)]
    candidates += [factors(weight, loudness_K, ratio, format.group) for ratio in RATIOS]
    errors = _candidate_errors(mapping, format, chunks, candidates)
    best = errors.index(min(errors))
    ratio, s_K = ratios[best], candidates[best]
    if ratio is not None:
        weight.copy_(_scale_columns(weight, s_K))
        mapping.divide(s_K)
    return ratio


def _candidate_errors(
    mapping: Mapping, format: Format, chunks: list[Chunk], candidates: list[Tensor]
) -> list[float]:
    weight = mapping.reader.weight
    errors = [0.0] * len(candidates)
    assert isinstance(weight, nn.Parameter)
    quantized = [format.quantize(_scale_columns(weight, s_K)) for s_K in candidates]
    for chunk in chunks:
        x_TK = mapping.inputs(chunk)
        dense_TD = mapping.output(x_TK, chunk)
        for i, (candidate_weight, s_K) in enumerate(zip(quantized, candidates, strict=True)):
            divided_TK = (x_TK.float() / s_K).to(x_TK.dtype)
            with multiplying((mapping.reader, candidate_weight)):
                errors[i] += _squared_distance(mapping.output(divided_TK, chunk), dense_TD)
            # kernels' copies of all candidates would be large
            candidate_weight.packed.clear()
    return errors


def _block_error(
    block: Block, format: Format, x_TD: Tensor, y_TD: Tensor, chunks: list[Chunk]
) -> float:
    linears = [module for module in block.modules() if isinstance(module, Linear)]
    pairs = [
        (linear, format.quantize(linear.weight))
        for linear in linears
        if isinstance(linear.weight, nn.Parameter)
    ]
    errors: list[float] = []
    with multiplying(*pairs):
        for c in chunks:
            quantized_TD = whole(block, x_TD[c.rows], c.cos, c.sin, c.attend)
            errors.append(_squared_distance(quantized_TD, y_TD[c.rows]))
    return sum(errors) / x_TD.numel()


def _mappings(block: Block, x_TD: Tensor) -> list[Mapping]:
    input_norm, mlp_norm = block.pre_norms
    v_rows = slice(-block.kv_heads * block.head_dim, None)
    up_rows = slice(block.gate_up.weight.shape[0] // 2, None)

    def normed(c: Chunk) -> Tensor:
        return input_norm(x_TD[c.rows])

    def attention(x_TD: Tensor, c: Chunk) -> Tensor:
        return plain(block.attention(x_TD, c.cos, c.sin, c.attend))

    def heads(c: Chunk) -> Tensor:
        return input_of(block.o, lambda: attention(normed(c), c))

    def mlp_input(c: Chunk) -> Tensor:
        return mlp_norm(x_TD[c.rows] + attention(normed(c), c))

    def hidden(c: Chunk) -> Tensor:
        return input_of(block.down, lambda: block.mlp(mlp_input(c)))

    def o(heads_TK: Tensor, _: Chunk) -> Tensor:
        return plain(block.o(heads_TK))

    def mlp(x_TD: Tensor, _: Chunk) -> Tensor:
        return plain(block.mlp(x_TD))

    def down(hidden_TK: Tensor, _: Chunk) -> Tensor:
        return plain(block.down(hidden_TK))

    divide_v, divide_up = _row_divider(block.qkv, v_rows), _row_divider(block.gate_up, up_rows)
    mappings = [Mapping("qkv", block.qkv, _norm_divider(input_norm), normed, attention)]
    if block.heads == block.kv_heads:  # else several heads read one v, and need one s
        mappings.append(Mapping("o", block.o, divide_v, heads, o))
    mappings.append(Mapping("gate_up", block.gate_up, _norm_divider(mlp_norm), mlp_input, mlp))
    mappings.append(Mapping("down", block.down, divide_up, hidden, down))
    return mappings


def _norm_divider(norm: RMSNorm) -> Callable[[Tensor], None]:
    return lambda s_K: _divide(norm.weight, s_K)


def _row_divider(linear: Linear, rows: slice) -> Callable[[Tensor], None]:

    def divide(s_K: Tensor) -> None:
        assert isinstance(linear.weight, nn.Parameter)
        _divide(linear.weight[rows], s_K[:, None])
        if linear.bias is not None:
            _divide(linear.bias[rows], s_K)

    return divide


def _divide(weight: Tensor, s: Tensor) -> None:
    weight.copy_(weight.float() / s)


def _scale_columns(w_NK: Tensor, s_K: Tensor) -> Tensor:
    return (w_NK.float() * s_K).to(w_NK.dtype)


def _relative_magnitude(w_NK: Tensor, group: int | None) -> Tensor:
    """Return wm, with 0 for groups of zeros."""
    w_NK = w_NK.detach().float().abs()
    num_in = w_NK.shape[1]
    group_size = num_in if group is None else group
    w_NGS = nn.functional.pad(w_NK, (0, -num_in % group_size)).view(w_NK.shape[0], -1, group_size)
    relative_NGS = w_NGS / w_NGS.amax(dim=-1, keepdim=True).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    return relative_NGS.mean(0).flatten()[:num_in]


def _squared_distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).square().sum(dtype=torch.float64))
