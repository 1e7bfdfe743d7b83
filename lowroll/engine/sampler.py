"""Logits to tokens, with the log-prob of each token under the distribution that it was drawn from.

There are two implementations with the same bits: this one draws first tokens and drafts,
`engine.decoder` with `kernels.sampling` those of decode steps. Change both.

Each row is processed in fp32 in the order of Hugging Face's processors:

    1. repetition penalty (CTRL, Keskar et al. 2019, arXiv:1909.05858, eq. 5, with the usual sign
       rule): of every id in prompt or response, a positive logit is divided by it, a negative one
       multiplied;
    2. ids banned until `min_tokens` are drawn: logit -inf;
    2b. presence and frequency penalties, subtracted from the logits of the response's tokens (once,
        and for each time), and the request's own bias, added;
    2c. ids that its grammar excludes (`engine.grammar`): logit -inf;
    3. logits / temperature;
    4. top-k: the k largest (0 is off);
    5. top-p (Holtzman et al. 2020, arXiv:1904.09751): of what is left, the smallest set of largest
       probabilities whose mass is >= p; equal logits go lower id first in both;
    6. min-p (Nguyen et al. 2024, arXiv:2407.01082): drop what is below min_p * (largest
       probability).

Top-k and top-p use the order of the logits after 2, min-p their distance to the largest
(`kernels.sampling.filters`). Gumbel-max draws from the normalised rest (`kernels.sampling.draw`),
with noise of `request.noise_key`, position and token id alone. Greedy (temperature 0) takes the
argmax after 1 and 2, lower id first, and records the log-prob at temperature 1.

A row without a distribution (NaN or +inf logits, or only -inf) gets token 0 and log-prob NaN, which
`require_finite` refuses.

Shapes: B rows, V vocabulary, N pairs of row and id, A rows with top log-probs, K likeliest tokens,
C rows of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.engine.grammar import held
from lowroll.engine.logit_bias import biases_of, is_biased
from lowroll.engine.sampling_state import filters_of, index_pairs, is_filtered
from lowroll.engine.sequence import DrawnPosition, Sequence, banned_ids
from lowroll.kernels.sampling.draw import distribution as log_probs_of
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.filters import Filters
from lowroll.model.attention import upload

RANKED_ROWS = 64  # rows whose tokens are ranked at a time


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling settings of B rows, on the device."""

    keys_B: Tensor  # int64 with the bits of the unsigned keys
    temperature_B: Tensor  # float32, 1 for greedy rows
    greedy_B: Tensor  # bool
    filters: Filters | None

    @classmethod
    def of(
        cls,
        sequences: Collection[Sequence | DrawnPosition],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        temperatures = [s.request.temperature or 1 for s in sequences]
        temperature_B = torch.tensor(temperatures, dtype=torch.float32)
        filters = None
        if any(map(is_filtered, sequences)):
            host_filters = filters_of(sequences, vocab_size)
            filters = Filters(
                upload(host_filters.top_k_B, device),
                upload(host_filters.top_p_B, device),
                upload(host_filters.log_min_p_B, device),
            )
        return cls(
            keys_B=upload(torch.tensor([signed(s.noise_key) for s in sequences]), device),
            temperature_B=upload(temperature_B, device),
            greedy_B=upload(torch.tensor([s.request.temperature == 0 for s in sequences]), device),
            filters=filters,
        )


def signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key


def sample(logits_BV: Tensor, params: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row, from logits after penalties and bans.

    logits_BV: any float dtype, left unchanged. positions_B: int64, of the drawn tokens. Returns ids
    int64 [B] and log-probs float32 [B].
    """
    return draw(
        logits_BV, params.keys_B, positions_B, params.temperature_B, params.greedy_B, params.filters
    )


def distribution(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """Return the log-probs, float32 [B, V], that `sample` draws from or, for greedy
    rows, records."""
    return log_probs_of(logits_BV, params.temperature_B, params.greedy_B, params.filters)


def shaped(logits_BV: Tensor, sequences: Many[Sequence | DrawnPosition]) -> Tensor:
    """Return float32 logits after penalties, bans, bias and grammar, or the input if nothing
    changes."""
    return by_host(
        _apply_bans(_apply_repetition_penalty(logits_BV, sequences), sequences), sequences
    )


def by_host(logits_BV: Tensor, sequences: Many[Sequence | DrawnPosition]) -> Tensor:
    rows = [
        (row, s.group.grammar, s.sample, s.token_ids)
        for row, s in enumerate(sequences)
        if s.group.grammar is not None
    ]
    return held(_apply_biases(logits_BV, sequences), rows)


def _apply_biases(logits_BV: Tensor, sequences: Many[Sequence | DrawnPosition]) -> Tensor:
    biases_by_row = [(row, biases_of(s)) for row, s in enumerate(sequences) if is_biased(s)]
    if not any(biases for _, biases in biases_by_row):
        return logits_BV
    rows_N, ids_N = index_pairs(
        [(row, list(biases)) for row, biases in biases_by_row], logits_BV.device
    )
    values = [value for _, biases in biases_by_row for value in biases.values()]
    values_N = upload(torch.tensor(values, dtype=torch.float32), logits_BV.device)
    logits_BV = logits_BV.float()
    return logits_BV.index_put((rows_N, ids_N), logits_BV[rows_N, ids_N] + values_N)


def _apply_bans(logits_BV: Tensor, sequences: Many[Sequence | DrawnPosition]) -> Tensor:
    banned_by_row = [(row, banned_ids(s)) for row, s in enumerate(sequences)]
    if not any(ids for _, ids in banned_by_row):
        return logits_BV
    rows_N, ids_N = index_pairs(banned_by_row, logits_BV.device)
    minus_inf = torch.full((), -math.inf, device=logits_BV.device)
    return logits_BV.float().index_put((rows_N, ids_N), minus_inf)


def likeliest(logp_BV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probs of the `most` likeliest tokens, [B, K], likeliest first, the lower
    id first among equals, on every device and in any batch."""
    most = min(most, logp_BV.shape[-1])
    if most == 0:
        empty_B0 = logp_BV[:, :0]
        return empty_B0.long(), empty_B0
    ids_BK = torch.cat([_likeliest_ids(logp_CV, most) for logp_CV in logp_BV.split(RANKED_ROWS)])
    return ids_BK, logp_BV.gather(-1, ids_BK)


def _likeliest_ids(logp_CV: Tensor, most: int) -> Tensor:
    """Return the ids [C, K] of the `most` largest float32 log-probs.

    `topk` leaves the order of equals open, so each token gets a distinct integer: the upper half
    orders the log-probs, the lower half prefers lower ids.
    """
    bits_CV = (logp_CV + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    # the bits of negative floats grow with their magnitude: flip all but the sign
    ordered_CV = torch.where(bits_CV < 0, bits_CV ^ 0x7FFFFFFF, bits_CV)
    tie_break_V = torch.arange(logp_CV.shape[-1], device=logp_CV.device).flip(0)
    return (ordered_CV.long() << 32 | tie_break_V).topk(most, dim=-1).indices


class TopLogprobs:
    """The likeliest tokens of the rows with `Request.top_logprobs`, after filters and bans."""

    def __init__(self, sequences: Many[Sequence | DrawnPosition]) -> None:
        self.asking = [i for i, s in enumerate(sequences) if s.top_logprobs is not None]
        self._sequences = sequences
        self._batch: tuple[Tensor, SamplingBatch] | None = None
        self._steps: list[tuple[Tensor, Tensor]] = []  # [A, K] of each step

    def see(self, logits_BV: Tensor) -> None:
        """Rank the tokens of one step from its logits [B, V], without waiting for the device."""
        if not self.asking:
            return
        if self._batch is None:
            device = logits_BV.device
            asking_sequences = [self._sequences[i] for i in self.asking]
            params = SamplingBatch.of(asking_sequences, logits_BV.shape[-1], device)
            self._batch = upload(torch.tensor(self.asking), device), params
        rows_A, params = self._batch
        logp_AV = distribution(logits_BV[rows_A], params)
        max_top = max(self._sequences[i].request.top_logprobs for i in self.asking)
        self._steps.append(likeliest(logp_AV, max_top))

    def told(
        self, tokens_BS: list[list[int]], logprobs_BS: list[list[float]]
    ) -> list[list[list[tuple[int, float]]] | None]:
        """Wait for the device and return each row's (id, log-prob) pairs at each step, None for a
        row that requests none. The recorded log-probs of drawn tokens replace the ranked ones: on a
        GPU another kernel has summed these."""
        pairs_by_row: list[list[list[tuple[int, float]]] | None] = [None] * len(tokens_BS)
        if not self.asking:
            return pairs_by_row
        ids_ASK = torch.stack([ids_AK for ids_AK, _ in self._steps], 1).tolist()
        logp_ASK = torch.stack([logp_AK for _, logp_AK in self._steps], 1).tolist()
        for i, ids_SK, logp_SK in zip(self.asking, ids_ASK, logp_ASK, strict=True):
            num_top = self._sequences[i].request.top_logprobs
            pairs_by_row[i] = [
                _top_pairs(ids_K[:num_top], logp_K[:num_top], token, logprob)
                for ids_K, logp_K, token, logprob in zip(
                    ids_SK, logp_SK, tokens_BS[i], logprobs_BS[i], strict=True
                )
            ]
        return pairs_by_row


def _top_pairs(
    ranked_ids: list[int], ranked_logps: list[float], token: int, logprob: float
) -> list[tuple[int, float]]:
    pairs = []
    for ranked_id, ranked_logp in zip(ranked_ids, ranked_logps, strict=True):
        if ranked_logp > -math.inf:
            pairs.append((ranked_id, logprob if ranked_id == token else ranked_logp))
    return pairs


def require_finite(logprobs: Collection[float]) -> None:
    """Raise ValueError naming the rows without a distribution, whose log-prob is not finite."""
    rows = [i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob)]
    if rows:
        raise ValueError(
            f"logits: no distribution to draw from (NaN, +inf or all -inf) in rows {rows}"
        )


def _apply_repetition_penalty(
    logits_BV: Tensor, sequences: Many[Sequence | DrawnPosition]
) -> Tensor:
    rows = [row for row, s in enumerate(sequences) if s.request.repetition_penalty != 1]
    if not rows:
        return logits_BV
    # by the list's identity: siblings share one prompt list
    prompt_id_sets: dict[int, set[int]] = {}
    seen_ids = []
    for row in rows:
        s = sequences[row]
        prompt = prompt_id_sets.setdefault(id(s.prompt_ids), set(s.prompt_ids))
        seen_ids.append((row, list(prompt.union(s.token_ids))))
    device = logits_BV.device
    rows_N, ids_N = index_pairs(seen_ids, device)
    penalties = [s.request.repetition_penalty for s in sequences]
    penalty_B = upload(torch.tensor(penalties, dtype=torch.float32), device)
    penalty_N = penalty_B[rows_N]
    logits_BV = logits_BV.float()
    logits_N = logits_BV[rows_N, ids_N]
    penalised_N = torch.where(logits_N > 0, logits_N / penalty_N, logits_N * penalty_N)
    return logits_BV.index_put((rows_N, ids_N), penalised_N)
