"""GPTQ (docs/algorithms.md): round a weight column by column, and let the later columns compensate
each error.

    H = sum_t x_t x_t' + damping I      of the inputs that the matrix reads on calibration text
    U = the upper Cholesky factor of H^-1,  U' U = H^-1
    e = (w_k - round(w_k)) / U_kk,          w_j <- w_j - e U_kj    for every column j > k

Columns are taken from the largest to the smallest diagonal entry of H, with group scales chosen
before, so the codes have the usual layout (GPTQ, arXiv 2210.17323, algorithm 1; the order is
`desc_act` of AutoGPTQ). A group's range is stretched or cut to minimise the loss of its nearest
codes, weighted by H's diagonal: on SmolLM2 that removes a quarter of the remaining KL. A matrix
reads what the rounded ones before it make (GPTAQ lost on other text).

Memory: two residual streams and the heads, the activations of one chunk, and H of one matrix in
float32; factors are in float64.

Legend: T calibration tokens, D hidden size, Q width of the heads, K in features, N out features, B
columns of a panel, G groups, S weights of a group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lowroll.model.linear import Linear
from lowroll.model.residual_stream import Stream
from lowroll.model.transformer import Block, Transformer
from lowroll.quant.formats import Format, QTensor, get_format
from lowroll.quant.grid import Grid, Gridded
from lowroll.quant.groups import split
from lowroll.weights.blockwise import Chunk, check, embed_in_chunks, input_of, plain

log = logging.getLogger(__name__)

DAMPING = 0.01  # of the mean of H's diagonal
# of a group's range: e2m1 gains where its largest weight becomes 4 instead of 6
STRETCHES = (1.0, 0.9, 0.8, 0.7, 1.1, 1.2, 1.35, 1.5)
PANEL = 128  # columns whose errors reach the later ones in one product


@dataclass(frozen=True)
class Rounded:
    """A rounded linear weight, and the relative squared errors of its product on the calibration
    text: to nearest, and as kept."""

    name: str
    format: str
    nearest_error: float
    error: float


@torch.no_grad()
def round_base(
    model: Transformer,
    format: str,
    sequences: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Rounded]:
    """Replace every linear weight of a dense model by its QTensor in `format`, rounded to nearest
    in layers whose format has no grid. Return a record for each matrix.

    sequences: token ids, best sampled from the model itself. on_progress(done, total) counts
    blocks. ValueError, before anything changes, as `blockwise.check`, and for a format without a
    grid or unfit for a matrix; later for a weight that is not finite.
    """
    chosen_format = get_format(format)
    check("gptq", model, chosen_format, sequences)
    formats = {name: chosen_format.of(name) for name, _ in model.linears()}
    _check_gridded(model, chosen_format, formats)
    max_features = max(linear.in_features for _, linear in model.linears())
    if (num_tokens := sum(map(len, sequences))) < max_features:
        log.warning(
            "gptq: %d tokens say little of matrices that read %d features; take more text",
            num_tokens,
            max_features,
        )
    x_TD, chunks = embed_in_chunks(model, sequences)
    names = {id(linear): name for name, linear in model.linears()}
    records: list[Rounded] = []

    def round_linear(linear: Linear, inputs: Iterable[Tensor]) -> None:
        name = names[id(linear)]
        records.append(_round_linear(name, linear, formats[name], inputs))

    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        x_TD = _round_block(block, x_TD, chunks, round_linear)
        if on_progress is not None:
            on_progress(i + 1, len(model.blocks))
    return records


def fitted(
    w_NK: Tensor, loudness_K: Tensor, form: Gridded, stretches: Sequence[float]
) -> Tensor | float:
    """Return the stretch of each group [N, G] with the least squared error of nearest codes,
    weighted by loudness; the first of equals.

    loudness_K: the sum over the tokens of x^2. stretches: relative to the range of a group.
    """
    if len(stretches) == 1:
        return stretches[0]
    shape = (w_NK.shape[0], w_NK.shape[1])
    group_size = form.grid(form.scales(w_NK), shape).size
    w_NGS, loudness_1GS = split(w_NK, group_size), split(loudness_K[None], group_size)
    best_NG = torch.ones(w_NGS.shape[:2], device=w_NK.device)
    least_loss_NG = torch.full_like(best_NG, torch.inf)
    for stretch in stretches:
        nearest_NGS = form.grid(form.scales(w_NK, stretch), shape).nearest_groups(w_NGS)
        loss_NG = ((nearest_NGS - w_NGS).square() * loudness_1GS).sum(-1)
        best_NG = torch.where(loss_NG < least_loss_NG, stretch, best_NG)
        least_loss_NG = torch.minimum(loss_NG, least_loss_NG)
    return best_NG


def compensated(w_NK: Tensor, gram_KK: Tensor, grid: Grid) -> Tensor:
    """Return the compensated weights [N, K], float32, whose nearest grid values are those of the
    codes. gram_KK: sum over the tokens of x x'."""
    gram_KK = gram_KK.double()
    loudness_K = gram_KK.diagonal()
    order_K = torch.argsort(loudness_K, descending=True, stable=True)
    columns = order_K.tolist()  # loudest first
    upper_KK = _inverse_cholesky(gram_KK[order_K][:, order_K]).float()
    w_KN = w_NK.float().t()[order_K].contiguous()
    for start in range(0, len(columns), PANEL):
        stop = min(start + PANEL, len(columns))
        error_BN = torch.empty_like(w_KN[start:stop])
        for k in range(start, stop):
            rounded_N = grid.nearest(w_KN[k], columns[k])
            error_N = (w_KN[k] - rounded_N) / upper_KK[k, k]
            w_KN[k + 1 : stop] -= torch.outer(upper_KK[k, k + 1 : stop], error_N)
            error_BN[k - start] = error_N
        # later columns compensate all errors of the panel in one product
        w_KN[stop:] -= upper_KK[start:stop, stop:].t() @ error_BN
    compensated_KN = torch.empty_like(w_KN)
    compensated_KN[order_K] = w_KN
    return compensated_KN.t().contiguous()


def _inverse_cholesky(gram_KK: Tensor) -> Tensor:
    """Return U of a Gram matrix, whose diagonal is damped in place until it is positive
    definite."""
    diagonal_K = gram_KK.diagonal()
    diagonal_K[diagonal_K == 0] = 1
    damping = DAMPING * diagonal_K.mean()
    while True:
        diagonal_K += damping
        lower_KK, failed = torch.linalg.cholesky_ex(gram_KK)
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(lower_KK), upper=True)
        damping *= 10


def _round_block(
    block: Block,
    x_TD: Tensor,
    chunks: list[Chunk],
    round_linear: Callable[[Linear, Iterable[Tensor]], None],
) -> Tensor:
    """Round a block's linears in order. x_TD: the rounded model's residual stream before the block;
    return that after it."""
    input_norm, mlp_norm = block.pre_norms

    def attention(c: Chunk) -> Stream:
        return block.attention(input_norm(x_TD[c.rows]), c.cos, c.sin, c.attend)

    round_linear(block.qkv, (input_norm(x_TD[c.rows]) for c in chunks))
    heads_TQ = torch.cat([input_of(block.o, partial(attention, c)) for c in chunks])
    round_linear(block.o, (heads_TQ[c.rows] for c in chunks))
    x_TD = torch.cat([x_TD[c.rows] + plain(block.o(heads_TQ[c.rows])) for c in chunks])
    del heads_TQ

    def mlp(c: Chunk) -> Stream:
        return block.mlp(mlp_norm(x_TD[c.rows]))

    round_linear(block.gate_up, (mlp_norm(x_TD[c.rows]) for c in chunks))
    round_linear(block.down, (input_of(block.down, partial(mlp, c)) for c in chunks))
    return torch.cat([x_TD[c.rows] + plain(mlp(c)) for c in chunks])


def _round_linear(name: str, linear: Linear, form: Format, inputs: Iterable[Tensor]) -> Rounded:
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    gram_KK = sum_of_products(inputs, linear.in_features, weight.device)
    if not gram_KK.isfinite().all():
        raise ValueError(f"gptq: {name}: the calibration text makes inputs that are not finite")
    w_NK = weight.detach().float()
    output_power = _output_square(w_NK, gram_KK)
    try:
        best = form.quantize(weight.detach())
    except ValueError as refused:
        raise ValueError(f"{name}.weight: {refused}") from None
    nearest_error = error = _output_square(best.dequantize() - w_NK, gram_KK)
    if isinstance(form, Gridded):
        rounded = encode(w_NK, gram_KK, form)
        compensated_error = _output_square(rounded.dequantize() - w_NK, gram_KK)
        if compensated_error < error:
            best, error = rounded, compensated_error
    linear.set_weight(best)
    return Rounded(name, form.name, nearest_error / output_power, error / output_power)


def encode(
    w_NK: Tensor, gram_KK: Tensor, form: Gridded, stretches: Sequence[float] | None = None
) -> QTensor:
    """Return the QTensor of a matrix, rounded with compensation. gram_KK: as of `compensated`.
    stretches: default STRETCHES, for floating levels the first alone."""
    if stretches is None:
        stretches = STRETCHES[:1] if form.floating else STRETCHES
    shape = (w_NK.shape[0], w_NK.shape[1])
    w_NK = form.turned(w_NK)
    # rotated inputs have x x' rotated on both sides
    gram_KK = form.turned(form.turned(gram_KK).t().contiguous())
    stretch_NG = fitted(w_NK, gram_KK.diagonal(), form, stretches)
    scales = form.scales(w_NK, stretch_NG)
    compensated_NK = compensated(w_NK, gram_KK, form.grid(scales, shape))
    qtensor = form.empty(shape, w_NK.device)
    for name, tensor in (form.codes(compensated_NK, scales) | scales).items():
        qtensor.tensors[name].copy_(tensor)
    return qtensor


def sum_of_products(inputs: Iterable[Tensor], num_in: int, device: torch.device) -> Tensor:
    """Return the sum over the tokens of x x': float32 [K, K]."""
    gram_KK = torch.zeros(num_in, num_in, device=device)
    for x_TK in inputs:
        gram_KK += x_TK.float().t() @ x_TK.float()
    return gram_KK


def _output_square(w_NK: Tensor, gram_KK: Tensor) -> float:
    """Return the sum over the tokens of |W x|^2: the trace of W gram W'."""
    return float(((w_NK @ gram_KK) * w_NK).sum(dtype=torch.float64).clamp_min(1e-30))


def _check_gridded(model: Transformer, chosen: Format, forms: dict[str, Format]) -> None:
    if not any(isinstance(form, Gridded) for form in forms.values()):
        raise ValueError(
            f"gptq: {chosen.name} has no grid that codes could be moved on; round it to nearest"
        )
    for name, linear in model.linears():
        form = forms[name]
        if isinstance(form, Gridded):
            shape = linear.weight.shape
            meta_weight = torch.empty((shape[0], shape[1]), device="meta")
            try:
                form.grid(form.scales(meta_weight), (shape[0], shape[1]))
            except ValueError as error:
                raise ValueError(f"gptq: {name}.weight: {error}") from None
