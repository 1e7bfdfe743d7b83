"""The `attend` interface and the learner's attention.

A model calls `attend(layer, AttentionInputs) -> o_THd`. The learner passes `varlen`, the engine
paged attention (`lowroll.kv.attention`).

An attention sink is a logit of a query head that takes part in the softmax without a value:

    o = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))

Legend: `model`; L tokens of a sequence, C queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowroll.kernels.batch_invariant import attention as invariant
from lowroll.kernels.batch_invariant.gradient import with_gradient_of
from lowroll.model import flash


class AttentionInputs(NamedTuple):
    """The inputs of attention over packed tokens."""

    q_THd: Tensor
    k_TGd: Tensor
    v_TGd: Tensor
    sinks_H: Tensor | None = None

    def tokens(self, which: Tensor | slice) -> AttentionInputs:
        return AttentionInputs(
            self.q_THd[which], self.k_TGd[which], self.v_TGd[which], self.sinks_H
        )


Attend = Callable[[int, AttentionInputs], Tensor]


MOST_SCORES = 1 << 24  # scores of a head at once
MOST_STACKS = 4  # lengths of a micro-batch that get a call each on CUDA
# tokens from which cuDNN repays its 30 ms of planning a shape
LONG = 1024
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def varlen(
    lengths: Sequence[int], device: torch.device | str = "cpu", windows: Sequence[int] = ()
) -> Attend:
    """Return causal attention over packed sequences of these lengths, without padding. windows: of
    each layer (`LayerSpec`).

    Sequences of equal length share one call: cuDNN's in half precision on CUDA, twice as fast as
    flash attention. There, short sequences, and more than MOST_STACKS lengths, use torch's
    variable-length flash attention if it supports the head size. ValueError for a length below 1.
    """
    if any(length < 1 for length in lengths):
        raise ValueError(
            f"lengths: every packed sequence needs at least one token, got {min(lengths)}"
        )
    bounds = [0, *accumulate(lengths)]
    starts_by_length: dict[int, list[int]] = defaultdict(list)
    for start, length in zip(bounds, lengths, strict=False):
        starts_by_length[length].append(start)
    stack_shapes = [(len(starts), length) for length, starts in starts_by_length.items()]
    longest = max(lengths)
    flash_bounds = None
    if torch.device(device).type == "cuda":
        flash_bounds = upload(torch.tensor(bounds, dtype=torch.int32), device)

    @cache
    def order() -> tuple[Tensor, Tensor]:
        return _stacked_order(starts_by_length, device)

    mask = cache(_added_mask)  # one for all layers, as backward passes keep it

    def attend(layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd = inputs.q_THd
        window = _window(windows, layer, longest)
        needs_flash = window > 0 or inputs.sinks_H is not None
        prefers_flash = len(stack_shapes) > MOST_STACKS or longest < LONG or needs_flash
        if prefers_flash and _can_flash(q_THd):
            assert flash_bounds is not None
            spans = flash.Packed(flash_bounds, longest, flash_bounds, longest, window)
            return flash.attend_packed(*inputs, spans)
        masks = [mask(length, window, q_THd.dtype, q_THd.device) for _, length in stack_shapes]
        if len(stack_shapes) == 1:
            return _attend_stacks(inputs, stack_shapes, masks)
        stacked_order, original_order = order()
        return _attend_stacks(inputs.tokens(stacked_order), stack_shapes, masks)[original_order]

    return attend


def _stacked_order(
    starts_by_length: dict[int, list[int]], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    spans = [(s, s + length) for length, starts in starts_by_length.items() for s in starts]
    order_T = tokens_of(spans, device)
    return order_T, inverse(order_T)


def tokens_of(spans: Iterable[tuple[int, int]], device: torch.device | str) -> Tensor:
    """Return the indices of the tokens of [start, stop) spans: int64 [T]."""
    return upload(ranges([(start, stop - start) for start, stop in spans]), device)


def bounds_of(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Return where packed sequences of these lengths begin, and the end: int32 [S + 1]."""
    return upload(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def ranges(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return start, start + 1, ... for `size` numbers of each (start, size): int64."""
    starts, sizes = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2).unbind(1)
    offsets = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (starts - offsets).repeat_interleave(sizes)


def inverse(order_T: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    back_T = torch.empty_like(order_T)
    back_T[order_T] = torch.arange(len(order_T), device=order_T.device)
    return back_T


def exact_varlen(lengths: Sequence[int], device: torch.device | str = "cpu") -> Attend:
    """Return `varlen`, with its gradient, where a query's bits depend on it and its keys alone."""
    lengths_S = upload(torch.tensor(lengths, dtype=torch.int32), device)
    return exactly(invariant.packed(lengths_S, sum(lengths)), varlen(lengths, device))


def exactly(values: invariant.Causal, gradient: Attend) -> Attend:
    """Join the values of one attention with the gradient of another."""

    def attend(layer: int, inputs: AttentionInputs) -> Tensor:
        assert inputs.sinks_H is None, "an exact model has no sinks"

        def plain(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
            return gradient(layer, AttentionInputs(q_THd, k_TGd, v_TGd))

        o_THd = with_gradient_of(plain, values, *inputs[:3])
        assert isinstance(o_THd, Tensor)
        return o_THd

    return attend


def packed(inputs: AttentionInputs, bounds: Tensor, longest: int, window: int = 0) -> Tensor:
    """Compute causal attention over packed sequences with int32 bounds [S + 1] on the device; equal
    bounds mean no sequence. Flash attention does not wait for the host."""
    if _can_flash(inputs.q_THd):
        spans = flash.Packed(bounds, longest, bounds, longest, window)
        return flash.attend_packed(*inputs, spans)
    lengths = [length for length in bounds.diff().tolist() if length]
    return varlen(lengths, inputs.q_THd.device, [window])(0, inputs)


def suffixes(
    lengths: Sequence[int],
    totals: Sequence[int],
    device: torch.device | str = "cpu",
    stacked: bool = False,
    windows: Sequence[int] = (),
) -> Attend:
    """Return causal attention of the last `lengths` tokens of each sequence over all its `totals`
    tokens: q [sum lengths, H, d], k and v [sum totals, G, d].

    Torch's variable-length flash attention computes all in one call where it can. Else each
    sequence has a call, or with `stacked` those of one shape; last bits may then depend on the
    other sequences.
    """
    spans = list(zip(lengths, totals, strict=True))
    flash_bounds = []
    if torch.device(device).type == "cuda":
        flash_bounds = [bounds_of(sizes, device) for sizes in (lengths, totals)]

    @cache
    def stacks() -> tuple[list[_Stack], Tensor]:
        stack_list = list(_stacks(lengths, totals, device))
        order_C = torch.cat([stack.queries_C for stack in stack_list])
        return stack_list, inverse(order_C)

    def attend(layer: int, inputs: AttentionInputs) -> Tensor:
        q_CHd, k_TGd, v_TGd, sinks_H = inputs
        window = _window(windows, layer, max(totals))
        if _can_flash(q_CHd):
            q_bounds, k_bounds = flash_bounds
            packing = flash.Packed(q_bounds, max(lengths), k_bounds, max(totals), window)
            return flash.attend_packed(*inputs, packing)
        if stacked:
            assert sinks_H is None, "stacked suffixes have no sinks"
            stack_list, back_C = stacks()
            return torch.cat([stack(q_CHd, k_TGd, v_TGd, window) for stack in stack_list])[back_C]
        k_parts, v_parts = k_TGd.split(list(totals)), v_TGd.split(list(totals))
        sequences = zip(spans, q_CHd.split(list(lengths)), k_parts, v_parts, strict=True)
        outputs = []
        for (length, total), q, k, v in sequences:
            sequence = AttentionInputs(q, k, v, sinks_H)
            outputs.append(_attend_suffix(sequence, total - length, window))
        return torch.cat(outputs)

    return attend


@dataclass(frozen=True)
class _Stack:
    length: int
    total: int
    queries_C: Tensor
    keys_T: Tensor

    def __call__(self, q_CHd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: int) -> Tensor:
        q_SHCd = (
            q_CHd.index_select(0, self.queries_C).unflatten(0, (-1, self.length)).transpose(1, 2)
        )
        k_SGTd, v_SGTd = (
            x_TGd.index_select(0, self.keys_T).unflatten(0, (-1, self.total)).transpose(1, 2)
            for x_TGd in (k_TGd, v_TGd)
        )
        mask_CT = _mask(self.total - self.length, self.total, window, q_CHd.device)
        o_SHCd = F.scaled_dot_product_attention(
            q_SHCd, k_SGTd, v_SGTd, attn_mask=mask_CT, enable_gqa=True
        )
        return o_SHCd.transpose(1, 2).flatten(0, 1)


def _stacks(
    lengths: Sequence[int], totals: Sequence[int], device: torch.device | str
) -> Iterator[_Stack]:
    starts_by_shape: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    first_query = first_key = 0
    for length, total in zip(lengths, totals, strict=True):
        starts_by_shape[length, total].append((first_query, first_key))
        first_query += length
        first_key += total
    for (length, total), starts in starts_by_shape.items():
        stack_size = max(1, MOST_SCORES // (length * total))
        for i in range(0, len(starts), stack_size):
            first_queries_S, first_keys_S = torch.tensor(starts[i : i + stack_size]).t()
            queries_C = (first_queries_S[:, None] + torch.arange(length)).flatten()
            keys_T = (first_keys_S[:, None] + torch.arange(total)).flatten()
            yield _Stack(length, total, upload(queries_C, device), upload(keys_T, device))


def _window(windows: Sequence[int], layer: int, longest: int) -> int:
    window = windows[layer] if windows else 0
    return window if window < longest else 0


def _mask(before: int, total: int, window: int, device: torch.device) -> Tensor:
    """Return which keys the queries after the first `before` tokens see: [C, T]."""
    pos_T = torch.arange(total, device=device)
    pos_C = pos_T[before:, None]
    mask_CT = pos_T <= pos_C
    return mask_CT & (pos_T > pos_C - window) if window else mask_CT


def _added_mask(
    length: int, window: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    if not 0 < window < length:
        return None
    return _added(_mask(0, length, window, device), dtype)


def _added(seen_CT: Tensor, dtype: torch.dtype) -> Tensor:
    zeros_CT = torch.zeros(seen_CT.shape, dtype=dtype, device=seen_CT.device)
    return zeros_CT.masked_fill_(~seen_CT, -torch.inf)


def _attend_suffix(inputs: AttentionInputs, before: int, window: int) -> Tensor:
    q_CHd, k_TGd, v_TGd, sinks_H = inputs
    mask_CT = _mask(before, len(k_TGd), window, q_CHd.device)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_CHd, k_TGd, v_TGd))
    if sinks_H is not None:
        return attend_with_sinks(q, k, v, mask_CT, sinks_H)[0].transpose(0, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_CT, enable_gqa=True)[0].transpose(
        0, 1
    )


def attend_with_sinks(
    q_SHCd: Tensor, k_SGTd: Tensor, v_SGTd: Tensor, mask_CT: Tensor | None, sinks_H: Tensor
) -> Tensor:
    """Compute attention with sinks. mask_CT: which keys are seen, or what is added to scores; None:
    causal."""
    if mask_CT is not None and mask_CT.dtype == torch.bool:
        mask_CT = _added(mask_CT, q_SHCd.dtype)
    if q_SHCd.device.type == "cpu":
        q_SCHd, k_STGd, v_STGd = (x.transpose(1, 2) for x in (q_SHCd, k_SGTd, v_SGTd))
        o_SCHd = flash.attend(q_SCHd, k_STGd, v_STGd, sinks_H, flash.Masked(mask_CT))
        return o_SCHd.transpose(1, 2)
    return attend_with_a_key_of_sinks(q_SHCd, k_SGTd, v_SGTd, mask_CT, sinks_H)


def attend_with_a_key_of_sinks(
    q_SHCd: Tensor, k_SGTd: Tensor, v_SGTd: Tensor, mask_CT: Tensor | None, sinks_H: Tensor
) -> Tensor:
    """Compute `attend_with_sinks` on any device: a sink is a key of zeros with a value of zeros,
    and its score."""
    queries, keys = q_SHCd.shape[2], k_SGTd.shape[2]
    if mask_CT is None:
        mask_CT = _added(_mask(0, keys, 0, q_SHCd.device), q_SHCd.dtype)
    # X: the keys, and the one of the sink
    sinks_HC1 = sinks_H.to(mask_CT.dtype)[:, None, None].expand(-1, queries, 1)
    added_HCX = torch.cat([mask_CT.expand(len(sinks_H), queries, keys), sinks_HC1], 2)
    k_SGXd, v_SGXd = (F.pad(x, (0, 0, 0, 1)) for x in (k_SGTd, v_SGTd))
    return F.scaled_dot_product_attention(
        q_SHCd, k_SGXd, v_SGXd, attn_mask=added_HCX, enable_gqa=True
    )


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to the device without waiting."""
    if torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def _attend_stacks(
    inputs: AttentionInputs, shapes: list[tuple[int, int]], masks: list[Tensor | None]
) -> Tensor:
    """Compute attention of packed tokens, sorted by length. shapes: (count, length). masks: added
    to scores [L, L]; None: causal without a window."""
    q_THd, k_TGd, v_TGd, sinks_H = inputs
    sizes = [count * length for count, length in shapes]
    outputs = []
    for (count, length), mask_LL, q, k, v in zip(
        shapes, masks, q_THd.split(sizes), k_TGd.split(sizes), v_TGd.split(sizes), strict=True
    ):
        q_SHLd, k_SGLd, v_SGLd = (
            x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        o_SHLd = _stack(q_SHLd, k_SGLd, v_SGLd, mask_LL, sinks_H)
        outputs.append(o_SHLd.transpose(1, 2).reshape(q.shape))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _stack(
    q_SHLd: Tensor,
    k_SGLd: Tensor,
    v_SGLd: Tensor,
    mask_LL: Tensor | None,
    sinks_H: Tensor | None,
) -> Tensor:
    if sinks_H is not None:
        return attend_with_sinks(q_SHLd, k_SGLd, v_SGLd, mask_LL, sinks_H)
    is_causal = mask_LL is None
    chooses = is_causal and q_SHLd.is_cuda
    with sdpa_kernel(FASTEST_FIRST, set_priority=True) if chooses else nullcontext():
        return F.scaled_dot_product_attention(
            q_SHLd, k_SGLd, v_SGLd, attn_mask=mask_LL, is_causal=is_causal, enable_gqa=True
        )


def _can_flash(q_THd: Tensor) -> bool:
    return q_THd.is_cuda and flash.flashes(q_THd.dtype, q_THd.shape[-1])
