"""Runs a plan on the model: page copies, one forward pass over all of its tokens, one draw for every row that needs it.

`score` prefills a sequence for its log-probs alone.

Legend: T tokens of the step, D hidden size, V vocabulary, B rows that draw a token, C rows of a piece.
"""
from __future__ import annotations

import torch
from torch import Tensor

from lowroll.engine.sampler import SamplingBatch, require_finite, sample
from lowroll.engine.scheduler import Plan, Sequence
from lowroll.kv.cache import Chunk, KVCache, PagedAttention
from lowroll.model.logprobs import log_probs
from lowroll.model.transformer import Transformer

SCORE_ROWS = 256           # rows whose logits exist at a time while a sequence is scored


class Runner:
    """Owns the KV cache and the device side of a step."""

    def __init__(self, model: Transformer, num_pages: int, page_size: int) -> None:
        self.model = model
        self.cache = KVCache(model.spec, num_pages, page_size, model.dtype, model.device)
        self._steady: tuple[list[Sequence], SamplingBatch] | None = None

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[tuple[Sequence, int, float]]:
        """(sequence, token, log-prob) of every decode row, then of every sample of a prompt that is through.

        ValueError when the model gives a row no distribution (NaN or infinite logits).
        """
        self.cache.copy_pages(plan.copies)
        if not plan.decodes and not plan.prefills:
            return []
        hidden_TD, last_rows = self._forward(plan)
        rows, sequences = list(range(len(plan.decodes))), list(plan.decodes)
        for chunk, last_row in zip(plan.prefills, last_rows, strict=True):
            rows += [last_row] * len(chunk.samples)
            sequences += chunk.samples
        if not sequences:
            return []
        unique, which_B = torch.tensor(rows).unique(return_inverse=True)
        logits_BV = self.model.logits(hidden_TD[unique.to(hidden_TD.device)])
        if len(unique) < len(rows):
            logits_BV = logits_BV[which_B.to(hidden_TD.device)]
        tokens_B, logprobs_B = self._sample(logits_BV, sequences)
        logprobs = logprobs_B.tolist()
        require_finite(logprobs)
        return list(zip(sequences, tokens_B.tolist(), logprobs, strict=True))

    @torch.inference_mode()
    def score(self, ids: list[int], prompt_len: int, pages: list[int], temperature: float) -> Tensor:
        """Log-probs [response tokens], float32, of a sequence that is prefilled in one piece into `pages`."""
        attend = PagedAttention(self.cache, [], [Chunk(0, len(ids), pages)], [])
        ids_T = torch.tensor(ids, device=self.model.device)
        hidden_TD = self.model(ids_T, torch.arange(len(ids), device=self.model.device), attend)
        rows = [log_probs(self.model.logits(hidden_CD), temperature).gather(1, targets_C[:, None])[:, 0]
                for hidden_CD, targets_C in zip(hidden_TD[prompt_len - 1:-1].split(SCORE_ROWS),
                                                ids_T[prompt_len:].split(SCORE_ROWS), strict=True)]
        return torch.cat(rows)

    def _forward(self, plan: Plan) -> tuple[Tensor, list[int]]:
        """Hidden states of the step's tokens, and for each prefill chunk the row of its last token."""
        decodes = [Chunk(s.position, s.position + 1, s.pages) for s in plan.decodes]
        chunks = [Chunk(c.start, c.stop, c.sequence.pages) for c in plan.prefills]
        fresh = [i for i, chunk in enumerate(chunks) if chunk.start == 0]
        later = [i for i, chunk in enumerate(chunks) if chunk.start > 0]
        ids = [s.last_token for s in plan.decodes]
        positions = [chunk.start for chunk in decodes]
        last_rows = [0] * len(chunks)
        for i in (*fresh, *later):
            chunk = chunks[i]
            ids += plan.prefills[i].sequence.prompt_ids[chunk.start:chunk.stop]
            positions += range(chunk.start, chunk.stop)
            last_rows[i] = len(ids) - 1
        attend = PagedAttention(self.cache, decodes, [chunks[i] for i in fresh], [chunks[i] for i in later])
        device = self.model.device
        return self.model(torch.tensor(ids, device=device), torch.tensor(positions, device=device), attend), last_rows

    def _sample(self, logits_BV: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        if self._steady is None or self._steady[0] != sequences:
            params = SamplingBatch.of(sequences, self.model.spec.vocab_size, self.model.device)
            self._steady = (sequences, params) if params.steady else None
        else:
            params = self._steady[1]
        positions_B = torch.tensor([s.length for s in sequences], device=self.model.device)
        return sample(logits_BV, params, positions_B)
