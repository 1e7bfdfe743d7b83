"""Logits to tokens, with the log-prob of each token under the very distribution that it was drawn from.

Per row, in fp32 and in this order (the order of Hugging Face's processors):
 1. repetition penalty (CTRL, Keskar et al. 2019, arXiv:1909.05858, eq. 5, with the sign rule that is usual since):
    of every id seen in prompt or response, a positive logit is divided by it, a negative one multiplied;
 2. ids banned until `min_tokens` are drawn: logit -inf;
 3. logits / temperature;
 4. top-k: the k largest (0 is off); 5. top-p (Holtzman et al. 2020, arXiv:1904.09751): of what is left, the smallest
    set of largest probabilities whose mass is >= p; equal logits go lower id first in both;
 6. min-p (Nguyen et al. 2024, arXiv:2407.01082): drop what is below min_p * (largest probability).
The rest is normalised by the one logits-to-logprob function; the token is drawn from its exponential by inverse CDF.

Greedy (temperature 0) takes the argmax after 1 and 2, lower id first, and records the log-prob at temperature 1 after
1 and 2: the draw itself has log-prob 0, which says nothing.

Noise is counter-based (Philox4x32-10: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). A row's
uniform is u(key, position), key = `request.noise_key`: it does not depend on the batch, the device or the past.

Nothing here waits for the device. A row without a distribution (NaN or +inf logits, or nothing but -inf) gets token 0
and log-prob NaN; `require_finite` turns that into an error once the numbers are on the host.

Shapes: B rows, V vocabulary, R filtered rows, K tokens a block of the CDF, C = ceil(V / K) blocks.
"""
from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.engine.sequence import Sequence
from lowroll.model.logprobs import log_probs

CDF_BLOCK = 128
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of B rows on the device. What no row asks for is None and costs nothing.

    If `steady`, it stays right for as long as the rows are the same sequences in the same order.
    """

    keys_B: Tensor                             # int64, the bits of the 64-bit noise keys
    temperature_B: Tensor | None               # float32, 1 for greedy rows
    greedy_B: Tensor | None                    # bool
    penalised: tuple[Tensor, Tensor, Tensor] | None    # row, id and penalty of each (row, seen id)
    banned: tuple[Tensor, Tensor] | None       # row and id
    ranked: tuple[Tensor, Tensor, Tensor] | None       # rows R with top-k or top-p, their k (V if off) and p
    log_min_p_B: Tensor | None                 # float32, -inf where off

    @property
    def steady(self) -> bool:
        return self.penalised is None and self.banned is None

    @classmethod
    def of(cls, sequences: Rows[Sequence], vocab_size: int, device: torch.device | str = "cpu") -> SamplingBatch:
        """Collect the parameters of the next token of each sequence."""
        requests = [s.request for s in sequences]
        # greedy rows skip the filters: the argmax survives each of them
        ranked = [(i, min(r.top_k or vocab_size, vocab_size), r.top_p) for i, r in enumerate(requests)
                  if r.temperature and (r.top_k or r.top_p < 1)]
        seen = [(i, token, s.request.repetition_penalty) for i, s in enumerate(sequences)
                if s.request.repetition_penalty != 1 for token in {*s.prompt_ids, *s.token_ids}]
        banned = [(i, token) for i, s in enumerate(sequences) for token in s.banned_ids()]
        temperature = [r.temperature or 1.0 for r in requests]
        greedy = [r.temperature == 0 for r in requests]
        log_min_p = [math.log(r.min_p) if r.min_p and r.temperature else -math.inf for r in requests]

        def put(values: Rows[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        def columns(rows: Rows[tuple[float, ...]], *dtypes: torch.dtype) -> tuple[Tensor, ...] | None:
            return tuple(map(put, zip(*rows, strict=True), dtypes)) if rows else None

        return cls(
            keys_B=put([signed(s.noise_key) for s in sequences], torch.int64),
            temperature_B=put(temperature, torch.float32) if any(t != 1 for t in temperature) else None,
            greedy_B=put(greedy, torch.bool) if any(greedy) else None,
            penalised=columns(seen, torch.int64, torch.int64, torch.float32),      # type: ignore[arg-type]
            banned=columns(banned, torch.int64, torch.int64),                      # type: ignore[arg-type]
            ranked=columns(ranked, torch.int64, torch.int64, torch.float64),       # type: ignore[arg-type]
            log_min_p_B=put(log_min_p, torch.float32) if max(log_min_p, default=-math.inf) > -math.inf else None,
        )


def signed(key: int) -> int:
    """The int64 with the bits of a 64-bit noise key."""
    return key - 2**64 if key >= 2**63 else key


def sample(logits_BV: Tensor, params: SamplingBatch, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    logits_BV: any float dtype, left unchanged (an expanded view will do). positions_B: int64, the position at which
    each token will stand (`Sequence.length`), the noise counter. Returns ids int64 [B] and log-probs float32 [B].
    """
    logits_BV = _penalise(logits_BV.float(), params)
    logp_BV = _normalise(logits_BV, params)
    tokens_B = _inverse_cdf(logp_BV, uniform(params.keys_B, positions_B))
    if params.greedy_B is not None:
        tokens_B = torch.where(params.greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logp_BV.gather(-1, tokens_B[:, None])[:, 0]


def distribution(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """The log-probs, float32 [B, V], that `sample` draws from (of a greedy row: those that it records)."""
    return _normalise(_penalise(logits_BV.float(), params), params)


def require_finite(logprobs: Rows[float]) -> None:
    """Raise ValueError naming the rows whose logits made no distribution. `logprobs` are `sample`'s, on the host."""
    rows = [i for i, logprob in enumerate(logprobs) if not math.isfinite(logprob)]
    if rows:
        raise ValueError(f"logits: no distribution to draw from (NaN, +inf or all -inf) in rows {rows}")


def uniform(keys_B: Tensor, counters_B: Tensor) -> Tensor:
    """One float64 in [0, 1), a multiple of 2^-53, a (64-bit key, 64-bit counter) pair. Both int64 [B]."""
    zero_B = torch.zeros_like(counters_B)
    counter_4B = torch.stack([counters_B & _WORD, (counters_B >> 32) & _WORD, zero_B, zero_B])
    words_4B = philox4x32(counter_4B, torch.stack([keys_B & _WORD, (keys_B >> 32) & _WORD]))
    return (words_4B[0] * 2**21 + (words_4B[1] >> 11)).double() * 2.0**-53


def philox4x32(counter_4B: Tensor, key_2B: Tensor, rounds: int = 10) -> Tensor:
    """Philox4x32 of Salmon et al. 2011, section 3.4: words [4, B] of each column. All int64, values in [0, 2^32).

    Both halves of a round run as one [2, B] operation, and constants are made on the device: few, small launches.
    """
    lane_21 = torch.arange(2, device=counter_4B.device)[:, None]
    multiplier_21 = lane_21 * (0xCD9E8D57 - 0xD2511F53) + 0xD2511F53
    weyl_21 = lane_21 * (0xBB67AE85 - 0x9E3779B9) + 0x9E3779B9
    multiplied_2B, other_2B = counter_4B[0::2], counter_4B[1::2]
    for i in range(rounds):
        product_2B = multiplied_2B * multiplier_21            # modulo 2^64: the sign bit is bit 63 of the product
        high_2B, low_2B = (product_2B >> 32) & _WORD, product_2B & _WORD
        multiplied_2B = high_2B.flip(0) ^ other_2B ^ ((key_2B + i * weyl_21) & _WORD)
        other_2B = low_2B.flip(0)
    return torch.stack([multiplied_2B, other_2B], dim=1).flatten(0, 1)


def _penalise(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """Repetition penalty, then banned ids."""
    if params.penalised is not None:
        rows_N, ids_N, penalty_N = params.penalised
        seen_N = logits_BV[rows_N, ids_N]
        seen_N = torch.where(seen_N > 0, seen_N / penalty_N, seen_N * penalty_N)
        logits_BV = logits_BV.index_put((rows_N, ids_N), seen_N)
    if params.banned is not None:
        logits_BV = logits_BV.index_put(params.banned, torch.full((), -math.inf, device=logits_BV.device))
    return logits_BV


def _normalise(logits_BV: Tensor, params: SamplingBatch) -> Tensor:
    """Temperature and filters: log-probs, -inf wherever top-k, top-p or min-p forbid.

    Min-p compares with the largest probability, which the other two never drop: it needs no sorting.
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
    """Mask of the ids that top-k, then top-p on the renormalised rest, keep. At least one id a row."""
    sorted_RV, ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True)       # ties: lower id first
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R[:, None], -math.inf)
    p_RV = torch.softmax(sorted_RV, dim=-1, dtype=torch.float64)
    before_RV = p_RV.cumsum(-1) - p_RV                     # mass of the larger ones: the id is needed while it is < p
    # p = 1 is off: there, rounding of the sum must not drop a tail
    keep_RV = (rank_V < top_k_R[:, None]) & ((before_RV < top_p_R[:, None]) | (top_p_R[:, None] >= 1))
    return torch.zeros_like(keep_RV).scatter(-1, ids_RV, keep_RV)


def _inverse_cdf(logp_BV: Tensor, u_B: Tensor) -> Tensor:
    """The first id whose cumulative probability exceeds u * total. An id of probability 0 is never drawn.

    Two levels, so that the V-long sum is never written: block masses, the block that u falls into, the id within it.
    """
    p_BV = logp_BV.exp()
    missing = -p_BV.shape[-1] % CDF_BLOCK
    p_BCK = (F.pad(p_BV, (0, missing)) if missing else p_BV).unflatten(-1, (-1, CDF_BLOCK))
    cdf_BC = p_BCK.sum(-1).double().cumsum(-1)
    target_B1 = u_B[:, None] * cdf_BC[:, -1:]
    block_B1 = _first_above(cdf_BC, target_B1)
    rest_B1 = target_B1 - F.pad(cdf_BC[:, :-1], (1, 0)).gather(-1, block_B1)
    p_BK = p_BCK.gather(1, block_B1[:, :, None].expand(-1, -1, CDF_BLOCK))[:, 0].double()
    cdf_BK = p_BK.cumsum(-1)
    # the fp32 mass of the block may exceed the sum of its ids by a rounding: then the last possible id is meant
    inside_B1 = torch.minimum(_first_above(cdf_BK, rest_B1), _last_positive(p_BK))
    return (block_B1 * CDF_BLOCK + inside_B1)[:, 0]


def _first_above(cdf_BN: Tensor, target_B1: Tensor) -> Tensor:
    return (cdf_BN <= target_B1).sum(-1, keepdim=True).clamp(max=cdf_BN.shape[-1] - 1)


def _last_positive(p_BK: Tensor) -> Tensor:
    return ((p_BK > 0) * torch.arange(p_BK.shape[-1], device=p_BK.device)).amax(-1, keepdim=True)
