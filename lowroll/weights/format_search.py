"""The search for formats under a budget: each linear layer gets as few bits as the requested
fidelity allows.

  1  single    every layer alone in its smallest format: the KL of the dense model to it, on
               calibration tokens. Larger formats scale it by the squared error of the layer's
               output.
  2  order     from all layers in their smallest format, steps to larger ones, those first that
               save most KL a bit (the lower convex hull of each layer's choices)
  3  whole     the model after so many steps is measured, and the number of steps is bisected

Errors of single layers add up nearly (on SmolLM2 0.67 for a whole of 0.63), so they give the order;
only measurements of the whole model are reported.

Legend: T calibration tokens, D hidden size, K in features, N out features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lowroll.model.attention import Attend
from lowroll.model.linear import Linear
from lowroll.model.transformer import Block, Transformer, whole
from lowroll.quant import mixed
from lowroll.quant.format_budget import Budget
from lowroll.quant.formats import QTensor, get_format
from lowroll.quant.table import OWN
from lowroll.weights.aligned_forward import quantized
from lowroll.weights.blockwise import check_dense, input_of, multiplying

# tokens in all, and of each sequence, for single layers
SINGLE_TOKENS, PIECE_TOKENS = 192, 48
FINE_BITS = 0.02  # bits a weight
HEAD_TOKENS = 256  # tokens whose logits exist at once
LEAST_KL = 1e-15  # float32 sums of quantized layers may be smaller


@dataclass(frozen=True)
class Calibration:
    """Token ids of sequences, and from which position in each tokens count."""

    sequences: Sequence[Sequence[int]]
    starts: Sequence[int]

    def cut(self, tokens: int, piece: int) -> Calibration:
        """Return the first `piece` tokens of the sequences that first hold `tokens`. All count."""
        cut_sequences: list[Sequence[int]] = []
        while len(cut_sequences) < len(self.sequences) and sum(map(len, cut_sequences)) < tokens:
            cut_sequences.append(self.sequences[len(cut_sequences)][:piece])
        return Calibration(cut_sequences, [0] * len(cut_sequences))


@dataclass(frozen=True)
class Point:
    """A measurement of the whole model after some steps."""

    steps: int
    bits: float
    nbytes: int
    kl: float


@dataclass(frozen=True)
class Allocation:
    """The formats of a model's linear layers under a budget; `dense` is the run's own dtype.

    kl: nats a token, on `tokens` tokens. bits: of a weight, with scales. measured: by bits.
    """

    assignment: dict[str, str]
    sizes: dict[str, int]
    kl: float
    bits: float
    nbytes: int
    tokens: int
    measured: tuple[Point, ...]
    seconds: float


@dataclass(frozen=True)
class _Choice:
    format: str
    nbytes: int
    kl: float


class _Step(NamedTuple):
    """A step from choice `number` of a layer's hull to the next. slope: KL change a byte."""

    slope: float
    layer: str
    number: int


@torch.no_grad()
def allocate(
    model: Transformer,
    budget: Budget,
    calibration: Calibration,
    on_progress: Callable[[int, int], None] | None = None,
) -> Allocation:
    """Choose the format of every linear layer of a dense model, which stays unchanged.

    on_progress(done, total) counts layers. ValueError as by `blockwise.check_dense`, and for an
    unreachable budget.
    """
    start_time = time.monotonic()
    search = _Search(model, budget)
    reference = Reference(model, calibration)
    search.choose(calibration.cut(SINGLE_TOKENS, PIECE_TOKENS), on_progress)
    search.reference = reference
    steps = search.find()
    chosen_point = search.measure(steps)
    return Allocation(
        search.after(steps),
        search.sizes,
        chosen_point.kl,
        chosen_point.bits,
        chosen_point.nbytes,
        reference.tokens,
        tuple(sorted(search.points.values(), key=lambda point: point.bits)),
        time.monotonic() - start_time,
    )


class _Search:
    reference: Reference

    def __init__(self, model: Transformer, budget: Budget) -> None:
        self.model = model
        self.budget = budget
        self.sizes = {name: prod(linear.weight.shape) for name, linear in model.linears()}
        self.own = next(iter(mixed.in_dtype({"": OWN}, model.dtype).values()))
        self.hulls: dict[str, list[_Choice]] = {}
        self.order: list[str] = []
        self.points: dict[int, Point] = {}
        # on a CPU rounding takes as long as a forward pass
        self.kept: dict[tuple[str, str], QTensor] = {}

    def _codes(self, name: str, linear: Linear, format: str) -> QTensor:
        codes = self.kept.get((name, format))
        if codes is None:
            codes = quantized(name, linear, format)
            if codes.device.type == "cpu":
                self.kept[name, format] = codes
        codes.packed.clear()
        return codes

    def choose(
        self, calibration: Calibration, on_progress: Callable[[int, int], None] | None
    ) -> None:
        """Measure every layer alone, and order the steps."""
        reference = Reference(self.model, calibration)
        steps: list[_Step] = []
        for done, (name, linear) in enumerate(self.model.linears()):
            hull = self.hulls[name] = _hull(self._choices(reference, name, linear))
            for i, (smaller, larger) in enumerate(pairwise(hull)):
                steps.append(_Step(_slope(smaller, larger), name, i))
            if on_progress is not None:
                on_progress(done + 1, len(self.sizes))
        self.order = [step.layer for step in sorted(steps)]

    def _choices(self, reference: Reference, name: str, linear: Linear) -> list[_Choice]:
        formats_by_size = sorted(
            (self._bytes(candidate, linear), candidate)
            for candidate in self.budget.candidates
            if self._fits(candidate, linear)
        )
        if not formats_by_size:
            raise ValueError(f"rollout.weights: no format of the budget can hold {name}")
        block = int(name.split(".")[1])
        x_TK = reference.input_of(block, linear)
        dense_TN = linear(x_TK)
        choices: list[_Choice] = []
        first_error = first_kl = 0.0
        for nbytes, format in formats_by_size:
            if format == OWN:
                choices.append(_Choice(format, nbytes, 0.0))
                continue
            codes = self._codes(name, linear, format)
            squared_error = float(
                (codes.linear(x_TK) - dense_TN).float().square().sum(dtype=torch.float64)
            )
            kl = first_kl * squared_error / first_error if first_error else first_kl
            if not choices:
                with multiplying((linear, codes)):
                    kl = reference.kl_from(block)
                first_error, first_kl = squared_error, max(kl, LEAST_KL)
            choices.append(_Choice(format, nbytes, max(kl, LEAST_KL)))
            codes.packed.clear()
        return choices

    def _fits(self, format: str, linear: Linear) -> bool:
        try:
            self._bytes(format, linear)
        except ValueError:
            return False
        return True

    def _bytes(self, format: str, linear: Linear) -> int:
        rows, columns = linear.weight.shape
        name = self.own if format == OWN else format
        return get_format(name).empty((rows, columns), torch.device("meta")).nbytes

    def after(self, steps: int) -> dict[str, str]:
        return {name: choice.format for name, choice in self._chosen(steps).items()}

    def _chosen(self, steps: int) -> dict[str, _Choice]:
        choice_index = dict.fromkeys(self.hulls, 0)
        for name in self.order[:steps]:
            choice_index[name] += 1
        return {name: self.hulls[name][i] for name, i in choice_index.items()}

    def _bits(self, steps: int) -> float:
        assignment = mixed.in_dtype(self.after(steps), self.model.dtype)
        return mixed.mean_bits(assignment, self.sizes)

    def _nbytes(self, steps: int) -> int:
        return sum(choice.nbytes for choice in self._chosen(steps).values())

    def measure(self, steps: int) -> Point:
        if steps not in self.points:
            linears = dict(self.model.linears())
            codes = {
                name: (linears[name], self._codes(name, linears[name], format))
                for name, format in self.after(steps).items()
                if format != OWN
            }
            with multiplying(*codes.values()):
                kl = max(self.reference.kl_from(0), LEAST_KL) if codes else 0.0
            self.points[steps] = Point(steps, self._bits(steps), self._nbytes(steps), kl)
        return self.points[steps]

    def find(self) -> int:
        """Return the number of steps: the fewest for a `max_kl`, else the most that the size
        allows. ValueError for an unreachable budget."""
        budget = self.budget
        max_steps = len(self.order)
        while max_steps >= 0 and not self._small_enough(max_steps):
            max_steps -= 1
        if max_steps < 0:
            self.measure(0)
            raise self._cannot("in their smallest formats the layers are larger than that")
        if budget.max_kl is None:
            return max_steps
        if self.measure(max_steps).kl > budget.max_kl:
            raise self._cannot("within it no choice of formats is as near to the dense model")
        return self._fewest(max_steps, budget.max_kl)

    def _fewest(self, few: int, max_kl: float) -> int:
        """Return the fewest steps that meet `max_kl`, to FINE_BITS, by a bisection from where the
        scaled sum of layers' KLs predicts the answer. few: enough steps."""
        summed_kl = [
            sum(choice.kl for choice in self._chosen(steps).values()) for steps in range(few + 1)
        ]
        too_few = -1  # most steps known to miss `max_kl`; -1 for none
        ratio = 1.0  # of the whole model's KL to the sum of its layers'
        while few - too_few > 1:
            if too_few >= 0 and self._bits(few) - self._bits(too_few) <= FINE_BITS:
                break
            steps = next((k for k in range(few) if ratio * summed_kl[k] <= max_kl), few)
            if not too_few < steps < few:  # already measured
                steps = (few + too_few) // 2
            kl = self.measure(steps).kl
            ratio = kl / summed_kl[steps]
            if kl <= max_kl:
                few = steps
            else:
                too_few = steps
        return few

    def _small_enough(self, steps: int) -> bool:
        bits, nbytes = self.budget.max_bits, self.budget.max_bytes
        return (bits is None or self._bits(steps) <= bits) and (
            nbytes is None or self._nbytes(steps) <= nbytes
        )

    def _cannot(self, why: str) -> ValueError:
        points = sorted(self.points.values(), key=lambda point: point.bits)
        point_texts = [f"{p.bits:.3g} bits, {p.nbytes} bytes: KL {p.kl:.3g}" for p in points]
        return ValueError(
            f"rollout.weights: {self.budget} cannot be kept: {why} ({'; '.join(point_texts)})"
        )


class Reference:
    """The dense model's residual streams and log-probs on calibration tokens. ValueError as by
    `blockwise.check_dense`."""

    def __init__(self, model: Transformer, calibration: Calibration) -> None:
        check_dense("rollout.weights", model, calibration.sequences)
        lengths = [len(ids) for ids in calibration.sequences]
        self.model = model
        device = model.device
        ids_T = torch.tensor([i for ids in calibration.sequences for i in ids], device=device)
        pos_T = torch.tensor([pos for n in lengths for pos in range(n)], device=device)
        self.cos, self.sin = model.rotations(pos_T)
        self.attend: Attend = model.causal(lengths)
        self.counted_T = torch.tensor(_counted_rows(lengths, calibration.starts), device=device)
        self.streams = [model.embed(ids_T)]
        for block in model.blocks:
            self.streams.append(self._run(block, self.streams[-1]))
        self.logprobs = [self._logprobs(part_TD) for part_TD in self._ends(self.streams[-1])]

    @property
    def tokens(self) -> int:
        return self.counted_T.numel()

    @torch.no_grad()
    def kl(self) -> float:
        """The KL of the dense model to the current one, in its formats' arithmetic."""
        weights = [(linear, linear.weight) for _, linear in self.model.linears()]
        with multiplying(
            *((linear, weight) for linear, weight in weights if isinstance(weight, QTensor))
        ):
            return self.kl_from(0)

    def _run(self, block: torch.nn.Module, x_TD: Tensor) -> Tensor:
        assert isinstance(block, Block)
        return whole(block, x_TD, self.cos, self.sin, self.attend)

    def _ends(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        return self.model.final(x_TD[self.counted_T]).split(HEAD_TOKENS)

    def _logprobs(self, x_TD: Tensor) -> Tensor:
        return self.model.logits(x_TD).float().log_softmax(-1)

    def input_of(self, block: int, linear: Linear) -> Tensor:
        return input_of(linear, lambda: self._run(self.model.blocks[block], self.streams[block]))

    def kl_from(self, block: int) -> float:
        """Return the mean KL of the dense model to the current one, which is dense
        before `block`."""
        x_TD = self.streams[block]
        for following_block in self.model.blocks[block:]:
            x_TD = self._run(following_block, x_TD)
        total = 0.0
        for part_TD, dense_TV in zip(self._ends(x_TD), self.logprobs, strict=True):
            log_ratio_TV = dense_TV - self._logprobs(part_TD)
            total += float((dense_TV.exp() * log_ratio_TV).sum(dtype=torch.float64))
        return total / len(self.counted_T)


def _counted_rows(lengths: Sequence[int], starts: Sequence[int]) -> list[int]:
    rows: list[int] = []
    offset = 0
    for length, start in zip(lengths, starts, strict=True):
        first, stop = max(start, 1) - 1, max(length - 1, 1)  # row i predicts token i + 1
        rows += range(offset + first, offset + stop)
        offset += length
    return rows


def _hull(choices: Sequence[_Choice]) -> list[_Choice]:
    """Return the lower convex hull, in bytes and KL, of choices by ascending bytes."""
    hull: list[_Choice] = []
    for choice in choices:
        if hull and choice.kl >= hull[-1].kl:
            continue
        if hull and choice.nbytes == hull[-1].nbytes:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: _Choice, b: _Choice) -> float:
    return (b.kl - a.kl) / (b.nbytes - a.nbytes)
