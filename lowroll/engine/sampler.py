"""Logits to tokens, with the log-prob of each token under the very distribution that it was drawn
from.

Per row, in fp32 and in this order (the order of Hugging Face's processors):
 1. repetition penalty (CTRL, Keskar et al. 2019, arXiv:1909.05858, eq. 5, with the sign rule that
    is usual since): of every id seen in prompt or response, a positive logit is divided by it, a
    negative one multiplied;
 2. ids banned until `min_tokens` are drawn: logit -inf;
 3. logits / temperature;
 4. top-k: the k largest (0 is off);
 5. top-p (Holtzman et al. 2020, arXiv:1904.09751): of what is left, the smallest set of largest
    probabilities whose mass is >= p; equal logits go lower id first in both;
 6. min-p (Nguyen et al. 2024, arXiv:2407.01082): drop what is below min_p * (largest probability).
The rest is normalised by the one logits-to-logprob function; the token is drawn from its
exponential by inverse CDF.

Greedy (temperature 0) takes the argmax after 1 and 2, lower id first, and records the log-prob at
temperature 1 after 1 and 2: the draw itself has log-prob 0, which says nothing.

Noise is that of `kernels.sampling.draw`: a row's uniform is u(key, position), key =
`request.noise_key`, and does not depend on the batch, the device or the past.

Nothing here but `Ranks.told` waits for the device. A row without a distribution (NaN or +inf logits, or nothing but
-inf) gets token 0 and log-prob NaN; `require_finite` turns that into an error once the numbers are
on the host.

Shapes: B rows, V vocabulary, R filtered rows, A rows that ask, K likeliest tokens,
C rows of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.engine.sequence import Place, Sequence
from lowroll.kernels.sampling.draw import inverse_cdf, uniform
from lowroll.model.attention import upload
from lowroll.model.logprobs import log_probs

RANKED_ROWS = 64  # rows whose tokens are put in order at a time


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows on the device. What no row asks for is None and costs
    nothing.

    If `steady`, it stays right for as long as the rows are the same sequences in the same order.
    """

    keys_B: Tensor  # int64, the bits of the 64-bit noise keys
    temperature_B: Tensor | None  # float32, 1 for greedy rows
    greedy_B: Tensor | None  # bool
    penalised: tuple[Tensor, Tensor, Tensor] | None  # row, id and penalty of each (row, seen id)
    banned: tuple[Tensor, Tensor] | None  # row and id
    # rows R with top-k or top-p, their k (V if off) and p
    ranked: tuple[Tensor, Tensor, Tensor] | None
    log_min_p_B: Tensor | None  # float32, -inf where off

    @property
    def steady(self) -> bool:
        return self.penalised is None and self.banned is None

    @classmethod
    def of(
        cls,
        sequences: Collection[Sequence | Place],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> SamplingBatch:
        """Collect the parameters of the next token of each sequence."""
        requests = [s.request for s in sequences]
        # greedy rows skip the filters: the argmax survives each of them
        ranked = [
            (i, min(r.top_k or vocab_size, vocab_size), r.top_p)
            for i, r in enumerate(requests)
            if r.temperature and (r.top_k or r.top_p < 1)
        ]
        seen = [
            (i, token, s.request.repetition_penalty)
            for i, s in enumerate(sequences)
            if s.request.repetition_penalty != 1
            for token in {*s.prompt_ids, *s.token_ids}
        ]
        banned = [(i, token) for i, s in enumerate(sequences) for token in s.banned_ids()]
        temperature = [r.temperature or 1.0 for r in requests]
        greedy = [r.temperature == 0 for r in requests]
        log_min_p = [
            math.log(r.min_p) if r.min_p and r.temperature else -math.inf for r in requests
        ]

        def put(values: Collection[float], dtype: torch.dtype) -> Tensor:
            return upload(torch.tensor(values, dtype=dtype), device)

        def columns(
            rows: Collection[tuple[float, ...]], *dtypes: torch.dtype
        ) -> tuple[Tensor, ...] | None:
            return tuple(map(put, zip(*rows, strict=True), dtypes)) if rows else None

        tempered = any(t != 1 for t in temperature)
        floored = max(log_min_p, default=-math.inf) > -math.inf
        return cls(
            keys_B=put([signed(s.noise_key) for s in sequences], torch.int64),
            temperature_B=put(temperature, torch.float32) if tempered else None,
            greedy_B=put(greedy, torch.bool) if any(greedy) else None,
            penalised=columns(seen, torch.int64, torch.int64, torch.float32),  # type: ignore[arg-type]
            banned=columns(banned, torch.int64, torch.int64),  # type: ignore[arg-type]
            ranked=columns(ranked, torch.int64, torch.int64, torch.float64),  # type: ignore[arg-type]
            log_min_p_B=put(log_min_p, torch.float32) if floored else None,
        )


def signed(key: int) -> int:
    """The int64 with the bits of a 64-bit noise key."""
    return key - 2**64 if key >= 2**63 else key


def sample(logits_BV: Tensor, params: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    logits_BV: any float dtype, left unchanged (an expanded view will do). positions_B: int64, the
    position at which each token will stand (`Sequence.length`), the noise counter. Returns ids
    int64 [B] and log-probs float32 [B].
    """
    logits_BV = _penalise(logits_BV.float(), params)
    logp_BV = _normalise(logits_BV, params)
    tokens_B = inverse_cdf(logp_BV, uniform(params.keys_B, positions_B))
    if params.greedy_B is not None:
        tokens_B = torch.where(params.greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logp_BV.gather(-1, tokens_B[:, None])[:, 0]


def distribution(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """The log-probs, float32 [B, V], that `sample` draws from (of a greedy row: those that it
    records)."""
    return _normalise(_penalise(logits_BV.float(), params), params)


def likeliest(logp_BV: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of the `most` likeliest tokens, [B, K], likeliest first; equal ones by id,
    the lower first, on every device and in any batch."""
    most = min(most, logp_BV.shape[-1])
    if most == 0:
        nothing_B0 = logp_BV[:, :0]
        return nothing_B0.long(), nothing_B0
    ids_BK = torch.cat([_order(logp_CV, most) for logp_CV in logp_BV.split(RANKED_ROWS)])
    return ids_BK, logp_BV.gather(-1, ids_BK)


def _order(logp_CV: Tensor, most: int) -> Tensor:
    """Ids by the bits of the log-prob, which as an integer are in its order, and then by id: no two
    are equal, so the order is one."""
    bits_CV = (logp_CV + 0.0).view(torch.int32)  # -0.0 is 0.0
    rising_CV = torch.where(bits_CV < 0, bits_CV ^ 0x7FFFFFFF, bits_CV)
    last_V = torch.arange(logp_CV.shape[-1], device=logp_CV.device).flip(0)
    return (rising_CV.long() << 32 | last_V).topk(most, dim=-1).indices


class Ranks:
    """The likeliest tokens at the next places of the rows that ask (`Request.top_logprobs`): of the
    distribution that each draws from, and without what a filter or a ban forbids.

    `see` is called with the logits of each step and waits for nothing, as long as the rows' batch is
    `steady`; `told` waits for the device.
    """

    def __init__(self, sequences: Many[Sequence | Place]) -> None:
        self.asking = [i for i, s in enumerate(sequences) if s.top_logprobs is not None]
        self._sequences = sequences
        self._batch: tuple[Tensor, SamplingBatch] | None = None  # rows [A], and how they draw
        self._steps: list[tuple[Tensor, Tensor]] = []  # ids and log-probs [A, K]

    def see(self, logits_BV: Tensor) -> None:
        """Rank the tokens of one step."""
        if not self.asking:
            return
        if self._batch is None:
            device = logits_BV.device
            rows = [self._sequences[i] for i in self.asking]
            params = SamplingBatch.of(rows, logits_BV.shape[-1], device)
            self._batch = upload(torch.tensor(self.asking), device), params
        rows_A, params = self._batch
        logp_AV = distribution(logits_BV[rows_A], params)
        most = max(self._sequences[i].request.top_logprobs for i in self.asking)
        self._steps.append(likeliest(logp_AV, most))

    def told(
        self, tokens_BS: list[list[int]], logprobs_BS: list[list[float]]
    ) -> list[list[list[tuple[int, float]]] | None]:
        """For each row its pairs of id and log-prob at each step, None for a row that does not ask.

        Of the token that was drawn there it is the log-prob that was recorded, which on a GPU another
        kernel has summed: they are one number.
        """
        found: list[list[list[tuple[int, float]]] | None] = [None] * len(tokens_BS)
        if not self.asking:
            return found
        ids_ASK, logp_ASK = (torch.stack(one, 1).tolist() for one in zip(*self._steps, strict=True))
        for i, ids_SK, logp_SK in zip(self.asking, ids_ASK, logp_ASK, strict=True):
            most = self._sequences[i].request.top_logprobs
            drawn = zip(ids_SK, logp_SK, tokens_BS[i], logprobs_BS[i], strict=True)
            found[i] = [_pairs(*place, most=most) for place in drawn]
        return found


def _pairs(
    ids: list[int], logps: list[float], token: int, logprob: float, most: int
) -> list[tuple[int, float]]:
    return [
        (i, logprob if i == token else logp)
        for i, logp in zip(ids[:most], logps[:most], strict=True)
        if logp > -math.inf
    ]


def require_finite(logprobs: Collection[float]) -> None:
    """Raise ValueError naming the rows whose logits made no distribution. `logprobs` are
    `sample`'s, on the host."""
    rows = [i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob)]
    if rows:
        raise ValueError(
            f"logits: no distribution to draw from (NaN, +inf or all -inf) in rows {rows}"
        )


def _penalise(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """Repetition penalty, then banned ids."""
    if params.penalised is not None:
        rows_N, ids_N, penalty_N = params.penalised
        seen_N = logits_BV[rows_N, ids_N]
        seen_N = torch.where(seen_N > 0, seen_N / penalty_N, seen_N * penalty_N)
        logits_BV = logits_BV.index_put((rows_N, ids_N), seen_N)
    if params.banned is not None:
        logits_BV = logits_BV.index_put(
            params.banned, torch.full((), -math.inf, device=logits_BV.device)
        )
    return logits_BV


def _normalise(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """Temperature and filters: log-probs, -inf wherever top-k, top-p or min-p forbid.

    Min-p compares with the largest probability, which the other two never drop: it needs no
    sorting.
    """
    if params.temperature_B is not None:
        logits_BV = logits_BV / params.temperature_B[:, None]
    kept_BV = logits_BV
    if params.ranked is not None:
        rows_R, top_k_R, top_p_R = params.ranked
        logits_RV = logits_BV[rows_R]
        kept_RV = _keep_top(logits_RV, top_k_R, top_p_R)
        kept_BV = kept_BV.index_put((rows_R,), logits_RV.masked_fill(~kept_RV, -math.inf))
    if params.log_min_p_B is not None:
        floor_B = logits_BV.amax(-1) + params.log_min_p_B
        kept_BV = kept_BV.masked_fill(~(logits_BV >= floor_B[:, None]), -math.inf)
    return log_probs(kept_BV)


def _keep_top(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Mask of the ids that top-k, then top-p on the renormalised rest, keep. At least one id a
    row."""
    sorted_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)  # ties: lower id first
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R[:, None], -math.inf)
    p_RV = torch.softmax(sorted_RV, dim=-1, dtype=torch.float64)
    before_RV = p_RV.cumsum(-1) - p_RV  # mass of the larger ones: the id is needed while it is < p
    # p = 1 is off: there, rounding of the sum must not drop a tail
    keep_RV = (rank_V < top_k_R[:, None]) & (
        (before_RV < top_p_R[:, None]) | (top_p_R[:, None] >= 1)
    )
    return torch.zeros_like(keep_RV).scatter(-1, ids_RV, keep_RV)
