"""Attention of the learner over the keys that the sampler's cache held.

Query q of a head sees key j iff j <= q and no compaction had dropped it when q ran
(`types.Evictions`). So the queries of a stretch, between two compactions, see the keys that the
first one left, and causally their own. These are gathered by layer, KV head and stretch. The
backward pass recomputes the copies.

Legend: `model`; T also positions of a sequence, Q query heads of a key-value head, R stretches, C
their queries, N their keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowroll.model.attention import (
    Attend,
    AttentionInputs,
    inverse,
    suffixes,
    tokens_of,
    upload,
    varlen,
)
from lowroll.types import Evictions

MOST_MARKED = 1 << 20  # stretches x heads x positions at once
IN_A_BYTE = 255  # compactions


def pack_evictions(numbers_LGT: Tensor, after: Sequence[int]) -> Evictions:
    """Return the record of compactions after these positions. numbers_LGT: on the CPU, the
    compaction that dropped each key; 0: none."""
    layers, heads, length = numbers_LGT.shape
    if not after:
        return Evictions(layers, heads)
    assert length == after[-1] + 1, f"{length} positions and a compaction after {after[-1]}"
    dtype = torch.uint8 if len(after) <= IN_A_BYTE else torch.int16
    raw = bytearray(numbers_LGT.numel() * dtype.itemsize)
    torch.frombuffer(raw, dtype=dtype).copy_(numbers_LGT.flatten())
    return Evictions(layers, heads, tuple(after), zlib.compress(raw, level=1))


def unpack_evictions(evictions: Evictions) -> Tensor:
    """Return `pack_evictions`'s numbers [L, G, T]. ValueError for invalid data."""
    after = evictions.after
    length = after[-1] + 1 if after else 0
    dtype = torch.uint8 if len(after) <= IN_A_BYTE else torch.int16
    shape = (evictions.layers, evictions.heads, length)
    size = evictions.layers * evictions.heads * length * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    raw = bytearray(_decompress(evictions.numbers, size))
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def _decompress(data: bytes, size: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"numbers: not compressed by zlib: {error}") from error
    if len(raw) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"numbers: expected {size} bytes, compressed")
    return raw


def check_evictions(
    evictions: Evictions,
    layers: int,
    heads: int,
    context_length: int,
    windows: Sequence[int] = (),
) -> None:
    """Raise ValueError, with the field, unless a model can replay the evictions: it has no windows,
    positions ascend, all heads drop equally many keys at once, and no key is dropped before it
    exists."""
    after = evictions.after
    if (evictions.layers, evictions.heads) != (layers, heads):
        raise ValueError(
            f"layers, heads: {evictions.layers} and {evictions.heads}, the model has {layers} "
            f"and {heads}"
        )
    if any(a < 0 or a >= b for a, b in pairwise((*after, context_length))):
        raise ValueError(f"after: {after} do not ascend within a context of {context_length}")
    if not after:
        return
    if windows:
        raise ValueError("after: a model with sliding windows cannot replay dropped keys")
    numbers_XT = unpack_evictions(evictions).flatten(0, 1)
    lowest, highest = (int(x) for x in numbers_XT.aminmax())
    if lowest < 0 or highest > len(after):
        raise ValueError(f"numbers: leave 0 .. {len(after)}, the compactions")
    positions_T = torch.arange(numbers_XT.shape[1])
    # the first compaction, counted from 1, that can drop each key
    earliest_T = torch.searchsorted(torch.tensor(after), positions_T) + 1
    is_early_XT = (numbers_XT != 0) & (numbers_XT < earliest_T.to(numbers_XT.dtype))
    if bool(is_early_XT.any()):
        raise ValueError("numbers: a key is dropped before it is there")
    counts = [numbers_T.bincount(minlength=len(after) + 1) for numbers_T in numbers_XT]
    if any(not torch.equal(counts_E, counts[0]) for counts_E in counts):
        raise ValueError("numbers: the heads drop different numbers of keys")


def replayed(
    lengths: Sequence[int],
    evictions: Sequence[Evictions | None],
    device: torch.device | str = "cpu",
    windows: Sequence[int] = (),
) -> Attend:
    """Return causal attention over packed sequences, each over the keys that its sampler's cache
    held: bitwise `varlen` before the first compaction and without a record."""
    starts = list(accumulate(lengths, initial=0))[:-1]
    stretches: list[_Stretch] = []
    numbers_by_sequence: list[Tensor] = []
    dense_lengths: list[int] = []  # up to the first compaction
    for start, length, record in zip(starts, lengths, evictions, strict=False):
        # a compaction after the last token changes nothing
        begins = [] if record is None else [p + 1 for p in record.after if p + 1 < length]
        dense_lengths.append(begins[0] if begins else length)
        if record is None or not begins:
            continue
        numbers_LGT = unpack_evictions(record)[..., :length]
        sequence = len(numbers_by_sequence)
        stretches += _cut_stretches(sequence, start, begins, length, numbers_LGT[0, 0])
        numbers_by_sequence.append(numbers_LGT)
    dense = varlen(dense_lengths, device, windows)
    if not stretches:
        return dense
    numbers_LGST = upload(_padded(numbers_by_sequence), device)
    groups = _group_stretches(stretches, numbers_LGST.shape[1])
    portions = [_Portion(group, numbers_LGST, device) for group in groups]
    spans = [(s, s + length) for s, length in zip(starts, dense_lengths, strict=False)]
    dense_D = tokens_of(spans, device)
    order_T = torch.cat([dense_D, *(portion.queries_C for portion in portions)])
    back_T = inverse(order_T)

    def attend(layer: int, inputs: AttentionInputs) -> Tensor:
        assert inputs.sinks_H is None, "a model with sinks has no bounded cache"
        outputs = [dense(layer, inputs.tokens(dense_D))]
        for portion in portions:
            arguments = (portion, layer, *inputs[:3])
            outputs.append(checkpoint(*arguments, use_reentrant=False, preserve_rng_state=False))
        return torch.cat(outputs)[back_T]

    return attend


def _cut_stretches(
    sequence: int, start: int, begins: Sequence[int], length: int, numbers_T: Tensor
) -> list[_Stretch]:
    num_dropped = numbers_T.long().bincount(minlength=len(begins) + 1).tolist()
    stretches: list[_Stretch] = []
    num_keys_gone = 0
    for number, (begin, end) in enumerate(pairwise([*begins, length]), start=1):
        num_keys_gone += num_dropped[number]
        stretches.append(_Stretch(sequence, number, start, begin, end, end - num_keys_gone))
    return stretches


@dataclass(frozen=True)
class _Stretch:
    """Positions [begin, end) of a sequence between two compactions."""

    sequence: int
    number: int  # the compaction before it
    start: int
    begin: int
    end: int
    keys: int  # keys that its last query sees


def _padded(numbers: Sequence[Tensor]) -> Tensor:
    longest = max(x.shape[2] for x in numbers)
    dtype = max((x.dtype for x in numbers), key=lambda dtype: dtype.itemsize)
    padded_LGST = torch.zeros(*numbers[0].shape[:2], len(numbers), longest, dtype=dtype)
    for sequence, x in enumerate(numbers):
        padded_LGST[:, :, sequence, : x.shape[2]] = x
    return padded_LGST


def _group_stretches(stretches: Sequence[_Stretch], num_heads: int) -> Iterator[list[_Stretch]]:
    group: list[_Stretch] = []
    longest = 0
    for stretch in stretches:
        longest = max(longest, stretch.end)
        if group and (len(group) + 1) * num_heads * longest > MOST_MARKED:
            yield group
            group, longest = [], stretch.end
        group.append(stretch)
    yield group


class _Portion:
    def __init__(
        self, stretches: Sequence[_Stretch], numbers_LGST: Tensor, device: torch.device | str
    ) -> None:
        self.numbers_LGST = numbers_LGST
        self.num_heads = numbers_LGST.shape[1]
        self.num_keys = sum(stretch.keys for stretch in stretches)
        self.longest = max(stretch.end for stretch in stretches)
        offsets = [0, *accumulate(stretch.keys for stretch in stretches)]
        rows = [
            (stretch.sequence, stretch.number, stretch.start, stretch.end, offset)
            for stretch, offset in zip(stretches, offsets, strict=False)
        ]
        self.rows_5R = upload(torch.tensor(rows).t().contiguous(), device)
        self.queries_C = tokens_of(
            [(s.start + s.begin, s.start + s.end) for s in stretches], device
        )
        # each key-value head is a sequence of `suffixes`
        lengths = [stretch.end - stretch.begin for stretch in stretches] * self.num_heads
        totals = [stretch.keys for stretch in stretches] * self.num_heads
        self.attend = suffixes(lengths, totals, device, stacked=True)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        keys_GN = self.keys(layer)
        heads_G1 = torch.arange(self.num_heads, device=keys_GN.device)[:, None]
        q_CGQd = q_THd[self.queries_C].unflatten(1, (self.num_heads, -1))
        inputs = AttentionInputs(
            q_CGQd.transpose(0, 1).flatten(0, 1),
            k_TGd[keys_GN, heads_G1].flatten(0, 1)[:, None],
            v_TGd[keys_GN, heads_G1].flatten(0, 1)[:, None],
        )
        o_GxCQd = self.attend(layer, inputs)
        return o_GxCQd.unflatten(0, (self.num_heads, -1)).transpose(0, 1).flatten(1, 2)

    def keys(self, layer: int) -> Tensor:
        """Return each head's key indices in the packed row, int64 [G, N], ascending in each
        stretch. To avoid a wait for the device, a seen key is scattered to the number of those
        before it."""
        sequence_R = self.rows_5R[0]
        number_R1, start_R1, end_R1, offset_R1 = self.rows_5R[1:, :, None]
        numbers_GRT = self._numbers(layer)[:, sequence_R]
        t_T = torch.arange(self.longest, device=number_R1.device)
        # dropped never or by a later compaction
        seen_GRT = ((numbers_GRT == 0) | (numbers_GRT > number_R1)) & (t_T < end_R1)
        place_GRT = seen_GRT.cumsum(2) - 1 + offset_R1
        place_GRT = torch.where(seen_GRT, place_GRT, self.num_keys)  # a place for unseen keys
        keys_GN = t_T.new_zeros(self.num_heads, self.num_keys + 1)
        source_GX = (start_R1 + t_T).expand_as(place_GRT).flatten(1)
        return keys_GN.scatter_(1, place_GRT.flatten(1), source_GX)[:, :-1]

    def _numbers(self, layer: int) -> Tensor:
        numbers_GST = self.numbers_LGST[layer]
        missing = self.longest - numbers_GST.shape[2]
        if missing <= 0:
            return numbers_GST[:, :, : self.longest]
        return torch.nn.functional.pad(numbers_GST, (0, missing))
