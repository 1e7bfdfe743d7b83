"""An engine whose samples stand far behind their beginning, though no prompt ran.

Decoding at a context of 16,384 tokens is measured without a prefill of a million: the runner's
prefill is replaced by one that writes noise, N(0, 1) and never zeros, as the prompt's keys and
values, shows the cache policy noise as the prompt's last queries, and draws a first token. All else
is the engine's own: admission, reservation, pages, compactions, and every decode step.

A step is counted by its tokens: seconds * rows / tokens, so a row that waits for its compaction
while others go on makes the step longer.

Legend: T tokens, H query heads, G key-value heads, d head size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from bench.harness import synchronize
from lowroll import Engine, Request
from lowroll.engine.runner import PrefillTokens
from lowroll.engine.sampler import TopLogprobs
from lowroll.engine.sequence import Check, PrefillChunk
from lowroll.engine.sequence import Sequence as Sample
from lowroll.kv.batch import PromptChunk
from lowroll.kv.policy.base import Compaction

PIECE = 8192  # tokens whose noise exists at once
MOST_TURNS = 1000  # in which all samples must have been admitted


@dataclass(frozen=True)
class Compacting:
    """The compactions of one round, timed with the device waited for: how many samples' caches were
    compacted, in how many turns between steps, and in how many of the round's seconds."""

    samples: int
    calls: int
    seconds: float
    whole: float

    @property
    def ms(self) -> float:
        """Return the milliseconds of one sample's cache."""
        return self.seconds / max(1, self.samples) * 1e3

    @property
    def share(self) -> float:
        return self.seconds / self.whole


class Placed:
    """An engine in which samples can be placed. Its prefill is gone for good."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.device = engine.model.device
        self.dice = torch.Generator().manual_seed(0)
        self.handles: list[int] = []
        engine.runner._prefill = self._prefill  # type: ignore[method-assign]

    def stand(self, contexts: Sequence[int], new_tokens: int) -> None:
        """Place a sample behind each of these numbers of tokens, with room for `new_tokens` more.

        RuntimeError when they are not all admitted.
        """
        vocab_size = self.engine.spec.vocab_size
        size = (max(contexts),)
        noise = torch.randint(vocab_size, size, generator=self.dice).tolist()
        for i, length in enumerate(contexts):
            ids = [i, *noise[1:length]]  # no two prompts share a page
            request = Request(ids, max_tokens=new_tokens, ignore_eos=True, seed=7, id=f"{i}")
            self.handles.append(self.engine.scheduler.add(request))
        for _ in range(MOST_TURNS):
            self.engine.step()
            if not self.engine.scheduler.num_waiting:
                break
        self._all_run()

    def step_ms(self, steps: int) -> float:
        """Return the milliseconds of a step, over as many steps of all rows as these."""
        seconds, tokens = self._timed(steps)
        return seconds * len(self.handles) / tokens * 1e3

    def compacting(self, steps: int) -> Compacting:
        """Return what the compactions of so many steps cost."""
        runner = self.engine.runner
        compact = runner._compact
        calls: list[tuple[int, float]] = []  # samples and seconds

        def timed(compactions: list[Compaction]) -> None:
            if not compactions:
                return
            synchronize(self.device)
            began = time.perf_counter()
            compact(compactions)
            synchronize(self.device)
            calls.append((len(compactions), time.perf_counter() - began))

        with patch.object(runner, "_compact", timed):
            whole, _ = self._timed(steps)
        samples, seconds = sum(n for n, _ in calls), sum(s for _, s in calls)
        return Compacting(samples, len(calls), seconds, whole)

    def cached(self) -> float:
        """Return the keys of a row's cache, the mean over the rows now."""
        rows = self.engine.scheduler._running
        return sum(row.cached_len for row in rows) / len(rows)

    def clear(self) -> None:
        """End all samples, and forget their prompts."""
        for handle in self.handles:
            self.engine.abort(handle)
        self.engine.scheduler.finished()
        self.engine.reset_prefix_cache()
        self.handles = []

    def _timed(self, steps: int) -> tuple[float, int]:
        """Return seconds and tokens."""
        before, wanted = self.engine.stats().tokens, steps * len(self.handles)
        synchronize(self.device)
        began = time.perf_counter()
        while self.engine.stats().tokens - before < wanted:
            self.engine.step()
        synchronize(self.device)
        seconds = time.perf_counter() - began
        self._all_run()
        return seconds, self.engine.stats().tokens - before

    def _all_run(self) -> None:
        running = self.engine.scheduler.num_running
        if running != len(self.handles):
            raise RuntimeError(f"{running} rows decode instead of {len(self.handles)}")

    # -- in the place of the runner's prefill ------------------------------------------------------

    def _prefill(
        self, prefills: list[PrefillChunk], checks: list[Check], beside: list[Sample]
    ) -> tuple[PrefillTokens, None]:
        runner = self.engine.runner
        page_size, spec = runner.cache.page_size, self.engine.spec
        slots_T = torch.cat([_slots(chunk, page_size) for chunk in prefills]).to(self.device)
        piece = min(PIECE, len(slots_T))
        k_TGd, v_TGd = (self._noise(piece, spec.num_kv_heads) for _ in range(2))
        for some_T in slots_T.split(piece):
            for layer in range(spec.num_layers):
                runner.cache.write(layer, some_T, k_TGd[: len(some_T)], v_TGd[: len(some_T)])
        self._show_queries(prefills)
        tokens_P = torch.randint(spec.vocab_size, (len(prefills),), generator=self.dice)
        samples = [len(chunk.samples) for chunk in prefills]
        tokens_B = tokens_P.repeat_interleave(torch.tensor(samples))
        sequences = [sequence for chunk in prefills for sequence in chunk.samples]
        logprobs_B = torch.full((len(sequences),), -1.0)
        return PrefillTokens(sequences, tokens_B, logprobs_B, TopLogprobs(sequences)), None

    def _show_queries(self, prefills: list[PrefillChunk]) -> None:
        """Show queries as if the prefix cache had served all but the last tokens, which a policy
        must see."""
        watcher = self.engine.runner.decoder.watcher
        if watcher is None:
            return
        window = self.engine.kv.window
        chunks = [
            PromptChunk(max(c.start, c.stop - window), c.stop, c.sequence.pages, c.sequence.slot)
            for c in prefills
        ]
        count = sum(chunk.num_tokens for chunk in chunks)
        for layer in range(self.engine.spec.num_layers):
            watcher.prefilled(layer, self._noise(count, self.engine.spec.num_heads), chunks)

    def _noise(self, tokens: int, heads: int) -> Tensor:
        shape, dtype = (tokens, heads, self.engine.spec.head_dim), self.engine.model.dtype
        return torch.randn(shape, dtype=dtype, device=self.device)


def _slots(chunk: PrefillChunk, page_size: int) -> Tensor:
    """Return where the chunk's tokens lie in the cache."""
    pages = torch.tensor(chunk.sequence.pages)
    slots_PS = pages[:, None] * page_size + torch.arange(page_size)
    return slots_PS.flatten()[chunk.start : chunk.stop]
