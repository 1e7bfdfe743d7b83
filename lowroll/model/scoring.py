"""`lowroll.score`: the learner's log-probs of given responses.

Legend: `model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowroll.model import hf
from lowroll.model.evicted_attention import check_evictions, replayed
from lowroll.model.logprobs import token_log_probs
from lowroll.model.transformer import Transformer
from lowroll.types import Evictions


@torch.no_grad()
def score(
    model: Transformer | str | Path,
    sequences: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    temperature: float = 1.0,
    tokens_per_batch: int = 8192,
    evictions: Sequence[Evictions | None] | None = None,
) -> list[Tensor]:
    """Return the log-probs of each response's tokens, a float32 tensor a sequence.

    `sequences[i]` is prompt and response as token ids, `prompt_lens[i]` (at least 1) the prompt's
    length. evictions: the keys that each sampler's cache dropped (`Rollout.evictions`), without
    which the response is scored. ValueError names the faulty sequence.
    """
    model = model if isinstance(model, Transformer) else hf.load(model)
    if len(sequences) != len(prompt_lens):
        raise ValueError(f"prompt_lens: {len(prompt_lens)} lengths for {len(sequences)} sequences")
    for i, (ids, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True)):
        if not 1 <= prompt_len <= len(ids):
            raise ValueError(
                f"prompt_lens[{i}]: {prompt_len} is not within 1..{len(ids)}, the sequence's length"
            )
        if min(ids) < 0 or max(ids) >= model.spec.vocab_size:
            raise ValueError(
                f"sequences[{i}]: an id is outside the vocabulary of {model.spec.vocab_size}"
            )
    spec = model.spec
    evictions_by_sequence = [None] * len(sequences) if evictions is None else list(evictions)
    if len(evictions_by_sequence) != len(sequences):
        raise ValueError(
            f"evictions: {len(evictions_by_sequence)} of them for {len(sequences)} sequences"
        )
    for i, record in enumerate(evictions_by_sequence):
        if record is None:
            continue
        try:
            check_evictions(
                record, spec.num_layers, spec.num_kv_heads, spec.max_position, spec.windows
            )
        except ValueError as error:
            raise ValueError(f"evictions[{i}].{error}") from None
    scores: list[Tensor] = []
    for batch in _batches([len(ids) for ids in sequences], tokens_per_batch):
        scores += _score_packed(
            model, sequences[batch], prompt_lens[batch], temperature, evictions_by_sequence[batch]
        )
    return scores


def _batches(lengths: list[int], tokens_per_batch: int) -> Iterator[slice]:
    first = num_tokens = 0
    for i, length in enumerate(lengths):
        if i > first and num_tokens + length > tokens_per_batch:
            yield slice(first, i)
            first, num_tokens = i, 0
        num_tokens += length
    if lengths:
        yield slice(first, len(lengths))


def _score_packed(
    model: Transformer,
    sequences: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    temperature: float,
    evictions: Sequence[Evictions | None],
) -> list[Tensor]:
    lengths = [len(ids) for ids in sequences]
    ids_T = torch.tensor([token for ids in sequences for token in ids], device=model.device)
    pos_T = torch.tensor([pos for length in lengths for pos in range(length)], device=model.device)
    if any(evictions):
        attend = replayed(lengths, evictions, model.device, model.spec.windows)
    else:
        attend = model.causal(lengths)
    hidden_TD = model(ids_T, pos_T, attend)
    logp_T, _ = token_log_probs(
        hidden_TD, model.lm_head_weight, ids_T.roll(-1), temperature, exact=model.exact
    )
    sequence_logps = logp_T.split(lengths)
    # a token's log-prob stands at the token before it
    return [
        logp[prompt_len - 1 : -1].clone()
        for logp, prompt_len in zip(sequence_logps, prompt_lens, strict=True)
    ]
