"""The gated delta rule and the short convolution before it, in plain torch.

A token shrinks a head's state S, which maps keys to values, by its decay, then moves the value
under its key towards its own (Yang et al. 2024, arXiv 2412.06464):

    S_t = exp(decay_t) S_{t-1} + beta_t k_t (v_t - exp(decay_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

In chunks (WY form; Yang et al. 2024, arXiv 2406.06484), where D_ij is the decay of the tokens after
j up to i, g_i that of all up to i:

    A = I + strictly lower part of (diag(beta) K K^T * D)        U = A^-1 diag(beta) (V - diag(g) K S)
    O = diag(g) Q S + (Q K^T * D) U                              S' = g_L S + (diag(D_L) K)^T U

The arithmetic and the states are float32.

Legend: T packed tokens, S sequences, B rows of one token, H heads, k key size, v value size, C
channels, K taps of the convolution, L tokens of a chunk, N chunks, A sequences that still have a
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(
    x_TC: Tensor, weight_CK: Tensor, lengths: Sequence[int], state_SCK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return silu of each sequence's causal depthwise convolution [T, C], and the new state. The
    state [S, C, K - 1] is the last inputs, the newest last; None: zeros. ValueError for lengths
    that do not fit."""
    _check_lengths(lengths, len(x_TC))
    taps = weight_CK.shape[1]
    if state_SCK is None:
        state_SCK = x_TC.new_zeros(len(lengths), x_TC.shape[1], taps - 1)
    if len(set(lengths)) == 1:
        x_SLC = x_TC.unflatten(0, (len(lengths), -1))
        y_SLC, state_SCK = _convolve_stack(x_SLC, weight_CK, state_SCK)
        return y_SLC.flatten(0, 1), state_SCK
    sequences = zip(x_TC.split(list(lengths)), state_SCK.split(1), strict=True)
    outputs = [_convolve_stack(x_LC[None], weight_CK, state) for x_LC, state in sequences]
    return torch.cat([y_SLC[0] for y_SLC, _ in outputs]), torch.cat([state for _, state in outputs])


def _convolve_stack(x_SLC: Tensor, weight_CK: Tensor, state_SCK: Tensor) -> tuple[Tensor, Tensor]:
    length = x_SLC.shape[1]
    extended_SLC = torch.cat([state_SCK.transpose(1, 2).to(x_SLC.dtype), x_SLC], dim=1)
    y_SLC = torch.zeros_like(x_SLC, dtype=torch.float32)
    for tap, weight_C in enumerate(weight_CK.float().unbind(1)):
        y_SLC = y_SLC + extended_SLC[:, tap : tap + length] * weight_C
    return F.silu(y_SLC).to(x_SLC.dtype), extended_SLC[:, length:].transpose(1, 2).contiguous()


def delta_rule(
    q_THk: Tensor,
    k_THk: Tensor,
    v_THv: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    state_SHkv: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, H, v] over packed sequences, in v's dtype, and the states [S, H, k, v]
    after them, float32.

    q and k are L2-normalized, q scaled; decay <= 0 is a logarithm, and -inf forgets the state.
    state: None: zeros. `chunk` changes last bits only. ValueError for lengths that do not fit.
    """
    _check_lengths(lengths, len(v_THv))
    chunk = min(chunk, max(lengths))
    sizes = [q_THk.shape[-1], k_THk.shape[-1], v_THv.shape[-1], 1, 1]
    inputs = (q_THk, k_THk, v_THv, decay_TH.unsqueeze(-1), beta_TH.unsqueeze(-1))
    joined_THe = torch.cat([x.float() for x in inputs], dim=-1)
    pieces = [sequence_THe.split(chunk) for sequence_THe in joined_THe.split(list(lengths))]
    # The scan runs the first chunk of every sequence, then the second, and so on. With the longest
    # first, active sequences are the first rows.
    order = sorted(range(len(lengths)), key=lambda sequence: -len(pieces[sequence]))
    most_chunks = len(pieces[order[0]])
    steps = [[s for s in order if len(pieces[s]) > number] for number in range(most_chunks)]
    places = [(sequence, number) for number, step in enumerate(steps) for sequence in step]
    # tokens of zeros change no state
    x_NLHe = torch.stack(
        [F.pad(pieces[s][n], (0, 0, 0, 0, 0, chunk - len(pieces[s][n]))) for s, n in places]
    )
    chunks = _prepare(*x_NLHe.transpose(1, 2).split(sizes, dim=-1))

    if state_SHkv is None:
        state_SHkv = x_NLHe.new_zeros(len(lengths), v_THv.shape[1], sizes[1], sizes[2])
    start_SHkv = torch.stack([state_SHkv[s] for s in order]).float()
    o_NHLv, last_SHkv = _scan(chunks, start_SHkv, [len(step) for step in steps])

    o_by_place = dict(zip(places, o_NHLv.transpose(1, 2), strict=True))
    outputs = [
        o_by_place[sequence, number][: len(piece)]
        for sequence, sequence_pieces in enumerate(pieces)
        for number, piece in enumerate(sequence_pieces)
    ]
    last_by_sequence = dict(zip(order, last_SHkv, strict=True))
    last_states = torch.stack([last_by_sequence[sequence] for sequence in range(len(lengths))])
    return torch.cat(outputs).to(v_THv.dtype), last_states


def delta_step(
    q_BHk: Tensor,
    k_BHk: Tensor,
    v_BHv: Tensor,
    decay_BH: Tensor,
    beta_BH: Tensor,
    state_BHkv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` of one token a row. Return outputs [B, H, v] and the new states [B, H,
    k, v], float32."""
    q_BHk1, k_BHk1 = q_BHk.float().unsqueeze(-1), k_BHk.float().unsqueeze(-1)
    decayed_BHkv = state_BHkv.float() * decay_BH.float().exp()[..., None, None]
    recalled_BHv = (decayed_BHkv * k_BHk1).sum(-2)
    change_BHv = beta_BH.float().unsqueeze(-1) * (v_BHv.float() - recalled_BHv)
    new_BHkv = decayed_BHkv + k_BHk1 * change_BHv.unsqueeze(-2)
    return (new_BHkv * q_BHk1).sum(-2).to(v_BHv.dtype), new_BHkv


class _Chunks(NamedTuple):
    """The inputs of the scan, by the names of the module's formulas."""

    written_NHLv: Tensor  # A^-1 diag(beta) V
    recalling_NHLk: Tensor  # A^-1 diag(beta g) K
    scores_NHLL: Tensor  # Q K^T * D
    q_NHLk: Tensor  # diag(g) Q
    k_NHLk: Tensor  # diag(D_L) K
    kept_NH11: Tensor  # g_L


def _prepare(
    q_NHLk: Tensor, k_NHLk: Tensor, v_NHLv: Tensor, decay_NHL1: Tensor, beta_NHL1: Tensor
) -> _Chunks:
    length = k_NHLk.shape[-2]
    # the logarithm of D, by sums: differences lose the digits of weak decays after strong ones
    sums_NHLL = decay_NHL1.expand(*decay_NHL1.shape[:-1], length).tril(-1).cumsum(-2)
    pair_NHLL = sums_NHLL.exp().tril()  # D
    total_NHL1 = decay_NHL1.cumsum(-2).exp()  # g
    # A, of which the solver reads only what is below the diagonal
    system_NHLL = (beta_NHL1 * k_NHLk) @ k_NHLk.transpose(-1, -2) * pair_NHLL
    solved_NHLe = torch.linalg.solve_triangular(
        system_NHLL,
        beta_NHL1 * torch.cat([v_NHLv, total_NHL1 * k_NHLk], dim=-1),
        upper=False,
        unitriangular=True,
    )
    written_NHLv, recalling_NHLk = solved_NHLe.split([v_NHLv.shape[-1], k_NHLk.shape[-1]], dim=-1)
    return _Chunks(
        written_NHLv=written_NHLv,
        recalling_NHLk=recalling_NHLk,
        scores_NHLL=q_NHLk @ k_NHLk.transpose(-1, -2) * pair_NHLL,
        q_NHLk=total_NHL1 * q_NHLk,
        k_NHLk=pair_NHLL[..., -1, :, None] * k_NHLk,
        kept_NH11=total_NHL1[..., -1:, :],
    )


def _scan(chunks: _Chunks, state_SHkv: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return outputs [N, H, L, v] and the last states. chunks are ordered by number; counts: how
    many sequences have each number."""
    outputs, finished = [], []
    for parts in zip(*(x.split(list(counts)) for x in chunks), strict=True):
        step = _Chunks(*parts)
        active = len(step.kept_NH11)
        finished.append(state_SHkv[active:])
        state_AHkv = state_SHkv[:active]
        change_AHLv = step.written_NHLv - step.recalling_NHLk @ state_AHkv
        outputs.append(step.q_NHLk @ state_AHkv + step.scores_NHLL @ change_AHLv)
        state_SHkv = step.kept_NH11 * state_AHkv + step.k_NHLk.transpose(-1, -2) @ change_AHLv
    return torch.cat(outputs), torch.cat([state_SHkv, *reversed(finished)])


def _check_lengths(lengths: Sequence[int], tokens: int) -> None:
    if not lengths or min(lengths) < 1 or sum(lengths) != tokens:
        raise ValueError(
            f"lengths: every packed sequence needs at least one token, and their sum must be the "
            f"{tokens} tokens given; got {list(lengths)[:20]}"
        )
