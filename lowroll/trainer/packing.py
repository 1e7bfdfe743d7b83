"""Packing: many sequences in one row of tokens, without padding.

Sequences, longest first (stable), go into the first micro-batch with enough space (first-fit
decreasing: at most 11/9 of the optimal number of bins plus 6/9, Dosa 2007). Positions restart with
every sequence and `lengths` bounds its attention.

Entry n of a `_N` tensor belongs to response token y_t = `targets_N[n]`, which the hidden state in
row `index_N[n]` predicts. A sequence's last token is not fed. Where prompts are shared, a prompt is
fed once for neighbours that have it (`model.shared_prompts`), and such neighbours are packed as one
sequence.

T: tokens fed to the model, N: response tokens, S: sequences of one micro-batch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from lowroll.model.attention import Attend, ranges, upload
from lowroll.model.shared_prompts import PromptGroup
from lowroll.model.spec import ModelSpec
from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import PerToken, Ranks
from lowroll.types import MicroBatch, Sample


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. Its tensors are created on first use, so that the model's inputs are sent
    first and without host synchronization. `samples[s]` is the batch index of segment s."""

    samples: tuple[int, ...]
    chosen: tuple[Sample, ...]
    device: torch.device
    share_prompts: bool = False

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens fed of each sequence without sharing."""
        return tuple(num_fed(sample) for sample in self.chosen)

    @cached_property
    def groups(self) -> list[PromptGroup]:
        """Neighbours that share their prompt; each sequence by itself without sharing."""
        if not self.share_prompts:
            neighbours = [[sample] for sample in self.chosen]
        else:
            by_prompt = groupby(self.chosen, key=lambda sample: tuple(sample.prompt_ids))
            neighbours = [list(samples) for _, samples in by_prompt]
        return [
            PromptGroup(
                len(samples[0].prompt_ids),
                tuple(len(sample.rollout.token_ids) - 1 for sample in samples),
            )
            for samples in neighbours
        ]

    @property
    def shares(self) -> bool:
        return len(self.groups) < len(self.chosen)

    @cached_property
    def ids_T(self) -> Tensor:
        """int64, prompt and response of each sequence without its last token."""
        pieces: list[Sequence[int]] = []
        samples = iter(self.chosen)
        for group in self.groups:
            for number, sample in enumerate(islice(samples, len(group.responses))):
                prompt_ids = [] if number else sample.prompt_ids
                pieces += [prompt_ids, sample.rollout.token_ids[:-1]]
        return self._put(_concatenate_numbers("q", pieces))

    @cached_property
    def pos_T(self) -> Tensor:
        """int64, from 0 in each sequence."""
        spans = [
            span
            for prompt, responses in self.groups
            for span in [(0, prompt), *((prompt, fed) for fed in responses)]
        ]
        return self._put(ranges(spans))

    @cached_property
    def index_N(self) -> Tensor:
        """int64, into T. The last row of a shared prompt stands once for each response."""
        spans, start = [], 0
        for prompt, responses in self.groups:
            start += prompt
            last = start - 1
            for fed in responses:
                spans += [(last, 1), (start, fed)]
                start += fed
        return self._put(ranges(spans))

    def attention(self, model: Transformer) -> Attend:
        """Return the model's causal attention over these tokens."""
        return model.causal_in_groups(self.groups) if self.shares else model.causal(self.lengths)

    def predicting(self, hidden_TD: Tensor) -> Tensor:
        """Return the hidden states [N, D] that predict the response tokens."""
        if self.shares and hidden_TD.is_cuda:
            # whose gradient sums rows that stand several times in a fixed order there
            return hidden_TD[self.index_N]
        return hidden_TD.index_select(0, self.index_N)

    @cached_property
    def targets_N(self) -> Tensor:
        """int64."""
        return self._put(
            _concatenate_numbers("q", [sample.rollout.token_ids for sample in self.chosen])
        )

    @cached_property
    def mask_N(self) -> Tensor:
        """bool, true for a token in the loss."""
        return self._put(
            _concatenate_numbers("q", [sample.loss_mask for sample in self.chosen]) != 0
        )

    @cached_property
    def segments_N(self) -> Tensor:
        """int64, 0 .. S-1."""
        return self._put(torch.arange(len(self.chosen)).repeat_interleave(self._responses))

    @cached_property
    def behavior_N(self) -> Tensor:
        """float32 log-probs recorded by the sampler."""
        return self._put(
            _concatenate_numbers("d", [sample.rollout.logprobs for sample in self.chosen]).float()
        )

    @cached_property
    def advantages_N(self) -> Tensor:
        """float32."""
        advantages_S = torch.tensor(
            [sample.advantage for sample in self.chosen], dtype=torch.float32
        )
        return self._put(advantages_S.repeat_interleave(self._responses))

    def by_sample(self, x_N: Tensor) -> PerToken:
        """Split token values by sample."""
        return dict(zip(self.samples, x_N.split(self._responses.tolist()), strict=True))

    def staleness_N(self, version: int) -> Tensor:
        """Return each token's age in versions, float32."""
        lags: list[float] = []
        for sample in self.chosen:
            spans = sample.rollout.behavior.policy
            ends = [*(span.start for span in spans[1:]), len(sample.rollout.token_ids)]
            for span, end in zip(spans, ends, strict=True):
                lags += [float(version - span.version)] * (end - span.start)
        return self._put(torch.tensor(lags))

    @cached_property
    def _responses(self) -> Tensor:
        return torch.tensor([len(sample.rollout.token_ids) for sample in self.chosen])

    def _put(self, x: Tensor) -> Tensor:
        return upload(x, self.device)


def first_fit(lengths: Sequence[int], capacity: int) -> list[MicroBatch]:
    """Pack sequences, given by token counts, into micro-batches of at most `capacity` tokens; a
    longer one has its own."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        bin_index = next((b for b, load in enumerate(loads) if load + lengths[i] <= capacity), None)
        if bin_index is None:
            bins.append([i])
            loads.append(lengths[i])
        else:
            bins[bin_index].append(i)
            loads[bin_index] += lengths[i]
    return [MicroBatch(tuple(b), load) for b, load in zip(bins, loads, strict=True)]


def balance(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, parts: int
) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `capacity` tokens and about equal cost. A longer
    sequence has its own. Their number is a multiple of `parts`, if there are enough sequences."""
    num_bins = len(first_fit(lengths, capacity))
    while True:
        num_bins = min(len(lengths), -(-num_bins // parts) * parts)
        microbatches = _fill_bins(lengths, costs, capacity, num_bins)
        if microbatches is not None:
            return microbatches
        num_bins += 1


def _fill_bins(
    lengths: Sequence[int], costs: Sequence[float], capacity: int, num_bins: int
) -> list[MicroBatch] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads, bin_costs = [0] * num_bins, [0.0] * num_bins
    for i in sorted(range(len(lengths)), key=lambda i: -costs[i]):
        fitting_bins = [
            b for b in range(num_bins) if not bins[b] or loads[b] + lengths[i] <= capacity
        ]
        if not fitting_bins:
            return None
        cheapest_bin = min(fitting_bins, key=bin_costs.__getitem__)
        bins[cheapest_bin].append(i)
        loads[cheapest_bin] += lengths[i]
        bin_costs[cheapest_bin] += costs[i]
    return [MicroBatch(tuple(b), load) for b, load in zip(bins, loads, strict=True)]


def cost(sample: Sample, spec: ModelSpec, outputs: int) -> float:
    """Return the multiplications of a sample's forward pass. outputs: numbers computed for each
    response token."""
    num_tokens = num_fed(sample)
    query_size = spec.num_heads * spec.head_dim
    key_size = spec.num_kv_heads * spec.head_dim
    mixture = spec.mixture
    mixture_size = mixture.experts_per_token * mixture.expert_size + mixture.shared_size
    num_mixtures = spec.layers_with_experts
    num_dense = spec.num_layers - num_mixtures
    mlp_sizes = num_mixtures * mixture_size + num_dense * spec.intermediate_size
    # a token's products, in rows of hidden_size
    layers_cost = spec.num_layers * (2 * query_size + 2 * key_size) + 3 * mlp_sizes
    windows = spec.windows or (0,) * spec.num_layers
    keys = sum(_seen_keys(num_tokens, window) for window in windows)
    attention_cost = 2 * keys * query_size
    head_cost = len(sample.rollout.token_ids) * outputs * spec.hidden_size
    return float(num_tokens * (spec.hidden_size * layers_cost + attention_cost) + head_cost)


def cost_together(
    samples: Sequence[Sample], indices: Sequence[int], costs: Sequence[float], share_prompts: bool
) -> float:
    """Return the cost of samples in one pass; of those that share prompts, by the tokens fed."""
    whole_cost = sum(costs[i] for i in indices)
    if not share_prompts or not indices:
        return whole_cost
    whole_fed = sum(num_fed(samples[i]) for i in indices)
    prompts = {tuple(samples[i].prompt_ids) for i in indices}
    repeated = sum(len(samples[i].prompt_ids) for i in indices) - sum(map(len, prompts))
    return whole_cost * (1 - repeated / whole_fed)


def _seen_keys(num_tokens: int, window: int) -> float:
    if not 0 < window < num_tokens:
        return num_tokens / 2
    return window * (1 - window / (2 * num_tokens))


def pack(
    samples: Sequence[Sample],
    portions: Iterable[Sequence[int]],
    capacity: int,
    costs: Sequence[float] = (),
    parts: int = 1,
    share_prompts: bool = False,
) -> list[list[int]]:
    """Pack each portion of samples by itself, and return all micro-batches as sample indices.

    parts: the number of ranks. The number of a portion's micro-batches is a multiple of its share
    of the ranks, which is by cost. costs: by sample. With share_prompts, samples that share a
    prompt are packed as one sequence.
    """
    portions = list(portions)
    portion_costs = [0.0] * len(portions)
    if parts > 1:
        portion_costs = [cost_together(samples, p, costs, share_prompts) for p in portions]
    packed: list[list[int]] = []
    for portion, portion_cost in zip(portions, portion_costs, strict=True):
        units = [[i] for i in portion]
        if share_prompts:
            units = together(samples, portion, capacity, parts)
        lengths = [num_fed_together([samples[i] for i in unit]) for unit in units]
        if parts == 1 or not portion:
            bins = first_fit(lengths, capacity)
        else:
            unit_costs = [cost_together(samples, unit, costs, share_prompts) for unit in units]
            own_parts = min(parts, math.ceil(parts * portion_cost / sum(portion_costs)))
            bins = balance(lengths, unit_costs, capacity, own_parts)
        packed += [[i for u in microbatch.indices for i in units[u]] for microbatch in bins]
    return packed


def together(
    samples: Sequence[Sample], portion: Sequence[int], capacity: int, parts: int
) -> list[list[int]]:
    """Return groups of a portion's samples that share a prompt, in order, each of at most
    `capacity` tokens fed; a longer sample stays alone. For several ranks (parts) groups are small
    enough to balance, unless most of a smaller one were the prompt."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i in portion:
        by_prompt.setdefault(tuple(samples[i].prompt_ids), []).append(i)
    most = capacity
    if parts > 1 and by_prompt:
        total = sum(num_fed_together([samples[i] for i in unit]) for unit in by_prompt.values())
        most = min(capacity, max(total // (2 * parts), 2 * max(map(len, by_prompt))))
    units: list[list[int]] = []
    for prompt, sharing in by_prompt.items():
        fed = most + 1  # so that the first one begins a unit
        for i in sharing:
            response = num_fed(samples[i]) - len(prompt)
            fed += response
            if fed > most:
                units.append([])
                fed = len(prompt) + response
            units[-1].append(i)
    return units


class MicrobatchSchedule:
    """A schedule of passes over samples: portions are packed separately and dealt to ranks
    by cost."""

    def __init__(
        self,
        samples: Sequence[Sample],
        portions: Iterable[Iterable[Sequence[int]]],
        capacity: int,
        costs: Sequence[float],
        ranks: Ranks,
        share_prompts: bool = False,
    ) -> None:
        self.samples = samples
        self.share_prompts = share_prompts
        self.costs = costs
        self.ranks = ranks
        self.microbatches = [
            indices
            for portion in portions
            for indices in pack(samples, portion, capacity, costs, ranks.size, share_prompts)
        ]

    def dealt(self, device: torch.device) -> Iterator[tuple[PackedBatch, bool]]:
        """Yield this rank's micro-batches, each with whether it counts. One that does not only
        keeps the ranks in step: ignore its results."""
        samples = self.samples
        smallest = min(range(len(samples)), key=lambda i: num_fed(samples[i]))
        costs = [
            cost_together(samples, microbatch, self.costs, self.share_prompts)
            for microbatch in self.microbatches
        ]
        for number in self.ranks.deal(costs):
            indices = [smallest] if number is None else self.microbatches[number]
            yield collate(samples, indices, device, self.share_prompts), number is not None

    def gathered(self, *found: Iterable[tuple[PackedBatch, Tensor]]) -> list[PerToken]:
        """Return the token values of all samples, one mapping for each kind of value in `found`:
        this rank's micro-batches with their values [N]."""
        values_by_kind: list[PerToken] = []
        for kind in found:
            values_by_kind.append({})
            for packed, x_N in kind:
                values_by_kind[-1].update(packed.by_sample(x_N))
        sample_indices = (i for microbatch in self.microbatches for i in microbatch)
        sizes = {i: len(self.samples[i].rollout.token_ids) for i in sample_indices}
        return self.ranks.gather(values_by_kind, sizes)


def split_groups(groups: Sequence[int], parts: int) -> list[list[int]]:
    """Split sample indices into at most `parts` minibatches of whole groups, in order. `groups[i]`
    is the group of sample i. Sizes differ by at most one group."""
    samples_by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        samples_by_group.setdefault(group, []).append(i)
    whole_groups = list(samples_by_group.values())
    parts = min(parts, len(whole_groups))
    minibatches = []
    for part in range(parts):
        first = len(whole_groups) * part // parts
        stop = len(whole_groups) * (part + 1) // parts
        minibatches.append([i for group in whole_groups[first:stop] for i in group])
    return minibatches


def num_fed(sample: Sample) -> int:
    """Return the number of tokens fed: all but the last."""
    return len(sample.prompt_ids) + len(sample.rollout.token_ids) - 1


def num_fed_together(sharing: Sequence[Sample]) -> int:
    """Return the number of tokens fed of samples that share a prompt."""
    prompt = len(sharing[0].prompt_ids)
    return prompt + sum(num_fed(sample) - prompt for sample in sharing)


def check(samples: Sequence[Sample], vocab_size: int, context_length: int) -> None:
    """Raise ValueError for a sample that cannot be learned from, with its field."""
    if not samples:
        raise ValueError("samples: the batch is empty")
    for i, sample in enumerate(samples):
        where = f"sample {i} ({sample.prompt.id})"
        prompt_ids, token_ids = sample.prompt_ids, sample.rollout.token_ids
        if not prompt_ids:
            raise ValueError(f"{where}: prompt_ids is empty")
        if not token_ids:
            raise ValueError(f"{where}: rollout.token_ids is empty")
        for name, values in (
            ("rollout.logprobs", sample.rollout.logprobs),
            ("loss_mask", sample.loss_mask),
        ):
            if len(values) != len(token_ids):
                raise ValueError(
                    f"{where}: {name} has {len(values)} entries for {len(token_ids)} response tokens"
                )
        if num_fed(sample) > context_length:
            raise ValueError(
                f"{where}: prompt_ids and rollout.token_ids are {num_fed(sample)} tokens to read, "
                f"the model's context is {context_length}"
            )
        for name, ids in (("prompt_ids", prompt_ids), ("rollout.token_ids", token_ids)):
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise ValueError(f"{where}: {name} leaves 0..{vocab_size - 1}")


def collate(
    samples: Sequence[Sample],
    indices: Sequence[int],
    device: torch.device | str = "cpu",
    share_prompts: bool = False,
) -> PackedBatch:
    """Concatenate samples into one micro-batch."""
    chosen = tuple(samples[i] for i in indices)
    return PackedBatch(tuple(indices), chosen, torch.device(device), share_prompts)


def _concatenate_numbers(code: str, lists: Sequence[Sequence[int | float]]) -> Tensor:
    values: array[Any] = array(code)
    for numbers in lists:
        values.extend(numbers)
    return torch.frombuffer(values, dtype={"q": torch.int64, "d": torch.float64}[code])


def gather(values: PerToken, packed: PackedBatch) -> Tensor:
    """Concatenate the packed samples' values, [N], on the micro-batch's device."""
    x_N = torch.cat([values[i] for i in packed.samples])
    return x_N if x_N.device.type == packed.device.type else upload(x_N, packed.device)
