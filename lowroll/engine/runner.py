"""The execution of a step's plan on the model.

A step uploads from pinned memory, since other copies wait for all work of the device.

Legend: T tokens of the step, D hidden size, V vocabulary, P prompts that have ended, B rows that
draw a token, C rows of a piece, G key-value heads, K keys that stay or likeliest tokens,
S steps, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.engine.decoder import MOST_STEPS, Decoder, PendingSteps
from lowroll.engine.prefill_graphs import ShortPasses
from lowroll.engine.sampler import (
    SamplingBatch,
    TopLogprobs,
    likeliest,
    require_finite,
    sample,
    shaped,
)
from lowroll.engine.sequence import (
    Check,
    DrawnPosition,
    PrefillChunk,
    Sequence,
    StepPlan,
    places_of,
)
from lowroll.kernels.sampling import token_logprobs
from lowroll.kv.attention import MixedAttention, PagedAttention, PagedDecode
from lowroll.kv.batch import DecodeRows, PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.base import CachePolicy, Compaction, num_slots
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.policy.recorder import CompactionRecorder, most_held
from lowroll.kv.recurrent import RecurrentStates
from lowroll.model.attention import upload
from lowroll.model.logprobs import log_probs
from lowroll.model.transformer import Transformer

SCORE_ROWS = 256  # rows whose logits exist at a time
MOST_COMPACTED = 64  # samples whose keys are scored and moved at a time


@dataclass(frozen=True)
class StepResult:
    """The tokens that a step drew for one sequence."""

    sequence: Sequence
    token_ids: list[int]
    logprobs: list[float]
    large_batch: bool  # the model for large batches drew them
    # (id, log-prob) of the likeliest tokens at each position, if requested
    tops: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class PrefillTokens:
    """The drawn tokens of a pass over prompts, one of each sequence, on the device."""

    sequences: list[Sequence]
    tokens_B: Tensor
    logprobs_B: Tensor
    ranks: TopLogprobs

    def read(self, large_batch: bool) -> list[StepResult]:
        """Return the results on the host. ValueError when a sequence had no distribution."""
        logprobs = self.logprobs_B.tolist()
        require_finite(logprobs)
        tokens_B1 = [[token] for token in self.tokens_B.tolist()]
        logprobs_B1 = [[logprob] for logprob in logprobs]
        top_lists = self.ranks.told(tokens_B1, logprobs_B1)
        return [
            StepResult(sequence, ids, logps, large_batch, tops)
            for sequence, ids, logps, tops in zip(
                self.sequences, tokens_B1, logprobs_B1, top_lists, strict=True
            )
        ]


class Runner:
    """The KV cache and the device side of a step. one_pass: decode rows take their step in the pass
    over prompts, so that the weights are read once; for a dense cache, a single model and no
    checks."""

    def __init__(
        self,
        model: Transformer,
        large_batch_model: Transformer | None,
        num_pages: int,
        page_size: int,
        max_batch: int,
        kv: CachePolicy = DENSE,
        storage: type[KVCache] = KVCache,
        record_evictions: bool = False,
        cuda_graphs: bool = True,
        one_pass: bool = False,
    ) -> None:
        self.model = model
        self.large_batch_model = large_batch_model
        self.cache = storage(model.spec, num_pages, page_size, model.dtype, model.device)
        self.cache.exact = model.exact
        slots = num_slots(max_batch)
        if model.spec.delta is not None:
            self.cache.recurrent = RecurrentStates(model.spec, slots, model.dtype, model.device)
        self.cache.adapt(model)
        max_pages = min(num_pages, -(-model.spec.max_position // page_size))
        self.selector = kv.selector(model.spec, self.cache, max_batch)
        self.recorder: CompactionRecorder | None = None
        if record_evictions and self.selector is not None:
            spec = model.spec
            self.recorder = CompactionRecorder(
                spec.num_layers, slots, spec.num_kv_heads, most_held(kv, spec), model.device
            )
        states = (self.selector, self.recorder, self.cache.recurrent)
        self.states = [state for state in states if state is not None]
        self.one_pass = one_pass and large_batch_model is None and not self.states
        self.decoder = Decoder(
            model, large_batch_model, self.cache, max_batch, max_pages, self.selector, cuda_graphs
        )
        self.short: ShortPasses | None = None
        if self.decoder.watcher is None and ShortPasses.supports(model, self.cache):
            self.short = ShortPasses(large_batch_model or model, self.cache, cuda_graphs)

    @property
    def lookahead(self) -> int:
        """The most decode steps without the host, and passes over prompts."""
        return MOST_STEPS if self.model.device.type == "cuda" else 1

    def release(self) -> None:
        if self.cache.virtual_memory is None:
            self.decoder.forget()
            if self.short is not None:
                self.short.forget()
        self.cache.release()

    @torch.inference_mode()
    def run(self, plan: StepPlan, meanwhile: Callable[[], None] = lambda: None) -> list[StepResult]:
        """Run a plan. Return the tokens of every decode row, of every sample whose prompt has
        ended, and those behind each token of a check.

        meanwhile: called once the device has all of its work; on a CPU, before the work. ValueError
        for a row without a distribution.
        """
        if self.model.device.type != "cuda":
            meanwhile()
        self.cache.restore()
        self._compact(plan.compactions)
        if plan.forks:
            for state in self.states:
                state.copy(plan.forks)
        self.cache.copy_pages(plan.copies)
        is_one_pass = self.one_pass and bool(plan.passes) and not plan.checks
        pending = None
        if plan.decodes and not is_one_pass:
            pending = self.decoder.start(plan.decodes, plan.steps)
        if plan.begun:
            for state in self.states:
                state.begin(plan.begun)
        first_tokens, checked_TD = self._run_passes(plan, plan.decodes if is_one_pass else [])
        # nothing above waits for the device
        if self.model.device.type == "cuda":
            meanwhile()
        results = [] if pending is None else self._read(plan, pending)
        for pass_tokens in first_tokens:
            results += pass_tokens.read(self.large_batch_model is not None)
        if checked_TD is not None:
            results += self._follow(checked_TD, plan.checks)
        if self.recorder is not None:
            self.recorder.settle()
        return results

    def _run_passes(
        self, plan: StepPlan, beside: list[Sequence]
    ) -> tuple[list[PrefillTokens], Tensor | None]:
        first_tokens: list[PrefillTokens] = []
        checked_TD = None
        for number, prefills in enumerate(plan.passes):
            if number == 0:
                pass_tokens, checked_TD = self._prefill(prefills, plan.checks, beside)
            else:
                pass_tokens, _ = self._prefill(prefills, [], [])
            if pass_tokens is not None:
                first_tokens.append(pass_tokens)
        return first_tokens, checked_TD

    def _read(self, plan: StepPlan, steps: PendingSteps) -> list[StepResult]:
        tokens_BS, logprobs_BS, top_lists = self.decoder.read(steps)
        large_batch = self.decoder.runs_large_batch(self.decoder.size(len(plan.decodes)))
        return [
            StepResult(
                sequence, tokens[:limit], logprobs[:limit], large_batch, tops and tops[:limit]
            )
            for sequence, tokens, logprobs, limit, tops in zip(
                plan.decodes, tokens_BS, logprobs_BS, plan.limits, top_lists, strict=True
            )
        ]

    def _compact(self, compactions: list[Compaction]) -> None:
        by_kept: dict[int, list[Compaction]] = {}
        for compaction in compactions:
            by_kept.setdefault(compaction.kept, []).append(compaction)
        for num_kept, batch in by_kept.items():
            for start in range(0, len(batch), MOST_COMPACTED):
                self._compact_together(batch[start : start + MOST_COMPACTED], num_kept)

    def _compact_together(self, compactions: list[Compaction], kept: int) -> None:
        assert self.selector is not None, "a policy without a selector compacts nothing"
        device = self.model.device
        page_size = self.cache.page_size
        rows = DecodeRows(
            slots_B=torch.tensor([c.slot for c in compactions], device=device),
            table_BP=_page_table([c.pages for c in compactions]).to(device),
            lengths_B=torch.tensor([c.cached for c in compactions], dtype=torch.int32).to(device),
            positions_B=torch.tensor([c.position for c in compactions], device=device),
        )
        targets_BP = _page_table([c.targets for c in compactions]).long()
        target_slots = (targets_BP[..., None] * page_size + torch.arange(page_size)).flatten(1)
        target_slots_BK = target_slots[:, :kept].to(device)
        kept_LBGK = self.selector.compact(rows, kept)
        self.cache.keep(rows.table_BP, kept_LBGK, target_slots_BK)
        if self.recorder is not None:
            self.recorder.compacted(compactions, kept_LBGK)

    def _prefill(
        self, prefills: list[PrefillChunk], checks: list[Check], beside: list[Sequence]
    ) -> tuple[PrefillTokens | None, Tensor | None]:
        """Run one pass. Return a token of each row `beside` and of each sample whose prompt has
        ended, and the hidden states [T, D] of the checks, if any."""
        hidden_TD = self._forward(prefills, checks, beside)
        samples_by_row: list[tuple[Sequence, ...]] = [(sequence,) for sequence in beside]
        samples_by_row += [chunk.samples for chunk in prefills if chunk.samples]
        num_drawing = len(samples_by_row)
        first_tokens = checked_TD = None
        if num_drawing:
            first_tokens = self._begin(hidden_TD[:num_drawing], samples_by_row)
        if checks:
            checked_TD = hidden_TD[num_drawing:]
        return first_tokens, checked_TD

    def _begin(
        self, hidden_PD: Tensor, samples_by_row: list[tuple[Sequence, ...]]
    ) -> PrefillTokens:
        sequences = [sequence for samples in samples_by_row for sequence in samples]
        logits_BV = self.model.logits(hidden_PD)
        if len(sequences) > len(samples_by_row):
            num_samples = torch.tensor([len(samples) for samples in samples_by_row])
            num_samples_P = upload(num_samples, hidden_PD.device)
            logits_BV = logits_BV.repeat_interleave(
                num_samples_P, dim=0, output_size=len(sequences)
            )
        tokens_B, logprobs_B, ranks = self._draw(logits_BV, sequences)
        return PrefillTokens(sequences, tokens_B, logprobs_B, ranks)

    def _follow(self, hidden_TD: Tensor, checks: list[Check]) -> list[StepResult]:
        positions = [position for check in checks for position in places_of(check)]
        ids, logprobs, tops = self._draw_behind(hidden_TD, positions)
        require_finite(logprobs)
        large_batch = self.large_batch_model is not None
        results = []
        start = 0
        for check in checks:
            own = slice(start, start + len(check.ids))
            start = own.stop
            own_tops = [row_tops for row_tops in tops[own] if row_tops is not None]
            results.append(
                StepResult(check.sequence, ids[own], logprobs[own], large_batch, own_tops or None)
            )
        return results

    def _draw_behind(
        self, hidden_TD: Tensor, positions: list[DrawnPosition]
    ) -> tuple[list[int], list[float], list[list[tuple[int, float]] | None]]:
        ids: list[Tensor] = []
        logprobs: list[Tensor] = []
        tops: list[list[tuple[int, float]] | None] = []
        for start in range(0, len(positions), SCORE_ROWS):
            piece = positions[start : start + SCORE_ROWS]
            logits_CV = self.model.logits(hidden_TD[start : start + SCORE_ROWS])
            ids_C, logprobs_C, ranks = self._draw(logits_CV, piece)
            ids.append(ids_C)
            logprobs.append(logprobs_C)
            if not ranks.asking:  # `told` would wait for the device
                tops += [None] * len(piece)
                continue
            told = ranks.told(ids_C[:, None].tolist(), logprobs_C[:, None].tolist())
            tops += [None if steps is None else steps[0] for steps in told]
        return torch.cat(ids).tolist(), torch.cat(logprobs).tolist(), tops

    def _draw(
        self, logits_BV: Tensor, sequences: Many[Sequence | DrawnPosition]
    ) -> tuple[Tensor, Tensor, TopLogprobs]:
        device = self.model.device
        logits_BV = shaped(logits_BV, sequences)
        params = SamplingBatch.of(sequences, self.model.spec.vocab_size, device)
        lengths_B = upload(torch.tensor([s.length for s in sequences]), device)
        tokens_B, logprobs_B = sample(logits_BV, params, lengths_B)
        ranks = TopLogprobs(sequences)
        ranks.see(logits_BV)
        return tokens_B, logprobs_B, ranks

    @torch.inference_mode()
    def score(
        self, ids: list[int], prompt_len: int, temperature: float, top: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score a sequence without the cache. Return the log-probs [T], float32, of its T response
        tokens, and the ids and log-probs [T, K] of the `top` likeliest tokens."""
        attend = self.model.causal([len(ids)])
        ids_T = torch.tensor(ids, device=self.model.device)
        hidden_TD = self.model(ids_T, torch.arange(len(ids), device=self.model.device), attend)
        # the hidden state of a token predicts the next one
        predicting_TD = hidden_TD[prompt_len - 1 : -1]
        response_T = ids_T[prompt_len:]
        pieces = []
        for hidden_CD, targets_C in zip(
            predicting_TD.split(SCORE_ROWS), response_T.split(SCORE_ROWS), strict=True
        ):
            logits_CV = self.model.logits(hidden_CD)
            logp_CV = log_probs(logits_CV, temperature)
            if self.model.exact:
                logp_C = token_logprobs.log_probs(logits_CV, targets_C, temperature)
            else:
                logp_C = logp_CV.gather(1, targets_C[:, None])[:, 0]
            pieces.append((logp_C, *likeliest(logp_CV, top)))
        logp_T, ids_TK, top_TK = (torch.cat(piece) for piece in zip(*pieces, strict=True))
        return logp_T, ids_TK, top_TK

    def _forward(
        self, prefills: list[PrefillChunk], checks: list[Check], beside: list[Sequence]
    ) -> Tensor:
        """Run the chunks, and the rows `beside` them. Return the hidden states of these rows, of
        the last token of each chunk that ends its prompt, in the order of `prefills`, and of all
        tokens of the checks."""
        chunks = [PromptChunk(c.start, c.stop, c.sequence.pages, c.sequence.slot) for c in prefills]
        pieces = [c.sequence.prompt_ids[c.start : c.stop] for c in prefills]
        for check in checks:
            s, start = check.sequence, check.sequence.position
            chunks.append(PromptChunk(start, start + len(check.ids), s.pages, s.slot))
            pieces.append(check.ids)
        # attention takes fresh prompts first; a check is never fresh, so checks stay last, in their
        # order
        fresh = [i for i, chunk in enumerate(chunks) if chunk.start == 0]
        later = [i for i, chunk in enumerate(chunks) if chunk.start > 0]
        ids: list[int] = []
        last_rows = [0] * len(pieces)
        for i in (*fresh, *later):
            ids += pieces[i]
            last_rows[i] = len(ids) - 1
        ended = [i for i, chunk in enumerate(prefills) if chunk.samples]
        only_ended_prompts = len(ended) == len(chunks) and not beside
        if self.short is not None and only_ended_prompts and self.short.takes(chunks):
            return self.short.run(ids, chunks)
        num_checked = sum(len(check.ids) for check in checks)
        output_rows = [last_rows[i] for i in ended]
        output_rows += range(len(ids) - num_checked, len(ids))
        prompts = PagedAttention(
            self.cache,
            [chunks[i] for i in fresh],
            [chunks[i] for i in later],
            self.decoder.watcher,
        )
        model = self.large_batch_model or self.model
        ids_T = upload(torch.tensor(ids), model.device)
        positions = torch.cat([torch.arange(c.start, c.stop) for c in prompts.chunks])
        pos_T = upload(positions, model.device)
        if not beside:
            # the kernels need at least one row
            output_rows_P = upload(torch.tensor(output_rows or [0]), model.device)
            return model(ids_T, pos_T, prompts, output_rows_P)
        ids_B, rows = self.decoder.place(beside)
        output_rows = [*range(len(beside)), *(len(ids_B) + row for row in output_rows)]
        return model(
            torch.cat([ids_B, ids_T]),
            torch.cat([rows.positions_B, pos_T]),
            MixedAttention(PagedDecode(self.cache, rows), prompts),
            upload(torch.tensor(output_rows), model.device),
        )


def _page_table(pages: list[list[int]]) -> Tensor:
    max_pages = max(len(row_pages) for row_pages in pages)
    return torch.tensor(
        [row_pages + [0] * (max_pages - len(row_pages)) for row_pages in pages], dtype=torch.int32
    )
