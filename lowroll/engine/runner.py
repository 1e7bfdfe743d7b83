"""Runs a plan on the model: page copies, the prompts of the step in one packed pass, and the rows
that decode.

`score` prefills a sequence for its log-probs alone.

Legend: T tokens of the step, D hidden size, V vocabulary, P prompts that are through, B rows that
draw a token, C rows of a piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.engine.decoder import MOST_STEPS, Decoder, plain
from lowroll.engine.sampler import SamplingBatch, require_finite, sample, signed
from lowroll.engine.sequence import Plan, PrefillChunk, Sequence
from lowroll.kernels.sampling.draw import draw
from lowroll.kv.cache import Chunk, KVCache, PagedAttention
from lowroll.model.logprobs import log_probs
from lowroll.model.transformer import Transformer

SCORE_ROWS = 256  # rows whose logits exist at a time while a sequence is scored


@dataclass(frozen=True)
class Drawn:
    """What a step drew for one sequence, in order, and whether the second model did."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[float]
    large_batch: bool


class Runner:
    """Owns the KV cache and the device side of a step. large_batch_model: the model for many rows
    at once (`engine.decoder`)."""

    def __init__(
        self,
        model: Transformer,
        large_batch_model: Transformer | None,
        num_pages: int,
        page_size: int,
        max_batch: int,
    ) -> None:
        self.model, self.large_batch_model = model, large_batch_model
        self.cache = KVCache(model.spec, num_pages, page_size, model.dtype, model.device)
        longest = min(num_pages, -(-model.spec.max_position // page_size))
        self.decoder = Decoder(model, large_batch_model, self.cache, max_batch, longest)

    @property
    def lookahead(self) -> int:
        """Steps that decoding rows may take without the host: more than one where starting a step
        is what costs."""
        return MOST_STEPS if self.model.device.type == "cuda" else 1

    def release(self) -> None:
        """Give the cache's memory away until the next step."""
        if self.cache.virtual_memory is None:
            self.decoder.forget()
        self.cache.release()

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        """The tokens of every decode row, then of every sample of a prompt that is through.

        ValueError when the model gives a row no distribution (NaN or infinite logits).
        """
        self.cache.restore()
        self.cache.copy_pages(plan.copies)
        drawn: list[Drawn] = []
        if plan.decodes:
            tokens_BS, logprobs_BS = self.decoder.run(plan.decodes, plan.steps)
            large_batch_model = self.decoder.runs_large_batch(self.decoder.size(len(plan.decodes)))
            drawn = [
                Drawn(*row, large_batch_model)
                for row in zip(plan.decodes, tokens_BS, logprobs_BS, strict=True)
            ]
        if plan.prefills:
            drawn += self._prefill(plan.prefills)
        return drawn

    def _prefill(self, prefills: list[PrefillChunk]) -> list[Drawn]:
        """Run chunks of prompts; the first token of each sample whose prompt is through."""
        hidden_TD, last_rows = self._forward(prefills)
        through = [
            (chunk, row) for chunk, row in zip(prefills, last_rows, strict=True) if chunk.samples
        ]
        if not through:
            return []
        sequences = [sequence for chunk, _ in through for sequence in chunk.samples]
        rows_P = torch.tensor([row for _, row in through], device=hidden_TD.device)
        logits_BV = self.model.logits(hidden_TD[rows_P])
        if len(sequences) > len(through):
            num_samples_P = torch.tensor(
                [len(chunk.samples) for chunk, _ in through], device=hidden_TD.device
            )
            logits_BV = logits_BV.repeat_interleave(
                num_samples_P, dim=0, output_size=len(sequences)
            )
        tokens_B, logprobs_B = self._draw(logits_BV, sequences)
        logprobs = logprobs_B.tolist()
        require_finite(logprobs)
        return [
            Drawn(sequence, [token], [logprob], self.large_batch_model is not None)
            for sequence, token, logprob in zip(sequences, tokens_B.tolist(), logprobs, strict=True)
        ]

    def _draw(self, logits_BV: Tensor, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
        device = self.model.device
        lengths_B = torch.tensor([s.length for s in sequences], device=device)
        if not plain(sequences):
            return sample(
                logits_BV,
                SamplingBatch.of(sequences, self.model.spec.vocab_size, device),
                lengths_B,
            )
        keys_B = torch.tensor([signed(s.noise_key) for s in sequences], device=device)
        temperature_B = torch.tensor(
            [s.request.temperature or 1.0 for s in sequences], device=device
        )
        greedy_B = torch.tensor([s.request.temperature == 0 for s in sequences], device=device)
        return draw(logits_BV, keys_B, lengths_B, temperature_B, greedy_B)

    @torch.inference_mode()
    def score(
        self, ids: list[int], prompt_len: int, pages: list[int], temperature: float
    ) -> Tensor:
        """Log-probs [response tokens], float32, of a sequence that is prefilled in one piece into
        `pages`."""
        self.cache.restore()
        attend = PagedAttention(self.cache, [Chunk(0, len(ids), pages)], [])
        ids_T = torch.tensor(ids, device=self.model.device)
        hidden_TD = self.model(ids_T, torch.arange(len(ids), device=self.model.device), attend)
        rows = [
            log_probs(self.model.logits(hidden_CD), temperature).gather(1, targets_C[:, None])[:, 0]
            for hidden_CD, targets_C in zip(
                hidden_TD[prompt_len - 1 : -1].split(SCORE_ROWS),
                ids_T[prompt_len:].split(SCORE_ROWS),
                strict=True,
            )
        ]
        return torch.cat(rows)

    def _forward(self, prefills: list[PrefillChunk]) -> tuple[Tensor, list[int]]:
        """Hidden states of the chunks' tokens, and for each chunk the row of its last token."""
        chunks = [Chunk(c.start, c.stop, c.sequence.pages) for c in prefills]
        fresh = [i for i, chunk in enumerate(chunks) if chunk.start == 0]
        later = [i for i, chunk in enumerate(chunks) if chunk.start > 0]
        ids, positions, last_rows = list[int](), list[int](), [0] * len(chunks)
        for i in (*fresh, *later):
            chunk = chunks[i]
            ids += prefills[i].sequence.prompt_ids[chunk.start : chunk.stop]
            positions += range(chunk.start, chunk.stop)
            last_rows[i] = len(ids) - 1
        attend = PagedAttention(self.cache, [chunks[i] for i in fresh], [chunks[i] for i in later])
        model, device = self.large_batch_model or self.model, self.model.device
        return model(
            torch.tensor(ids, device=device), torch.tensor(positions, device=device), attend
        ), last_rows
