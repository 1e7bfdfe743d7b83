"""The rows that decode, resident on the device: several steps run without the host
(docs/architecture.md).

A sample has a slot from its admission to its end; the rows of a batch are in any slots. Each step
replaces a row's state, which is its last token and position, the position at which it must stop,
its noise key, temperature, page table, and number of cached keys:

    hidden = model(last token, position)      K/V go to the row's page, attention reads the pages
    token, log-prob = draw(logits)            written behind those of the steps before

Padding rows are dead and write nothing, as is a row that reaches its end or fills its cache. A row
that draws a stop id runs to the last step, and the scheduler drops its later tokens.

Batches of LARGE_BATCH_FROM rows run on `large_batch_model` if there is one: 4-bit weights are the
fewest bytes, 8-bit ones the cheaper product (docs/benchmarks.md).

Every tensor that a graph reads is allocated once, and new weights are written in place. Graphs
exist with and without filters, penalties and bans (`engine.sampling_state`), with the same bits. If
a row requests the likeliest tokens or a logit bias, the step of all rows continues outside the
graph at the logits.

Legend: B rows, P pages of a row, S steps, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowroll.engine.logit_bias import needs_host
from lowroll.engine.sampler import TopLogprobs, by_host, require_finite, signed
from lowroll.engine.sampling_state import DrawMode, SamplingState, draw_of
from lowroll.engine.sequence import Sequence
from lowroll.kernels.launch import captured, overlapping
from lowroll.kernels.sampling.advance import advance
from lowroll.kernels.sampling.draw import draw
from lowroll.kernels.sampling.penalties import shape
from lowroll.kv.attention import PagedDecode
from lowroll.kv.batch import DecodeRows
from lowroll.kv.cache import KVCache
from lowroll.kv.policy.base import Selector, dead_slot
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import all_finite

MOST_STEPS = 16
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LARGE_BATCH_FROM = 9  # rows

# rows of `Decoder.state`, int64
LAST_TOKEN = 0
POSITION = 1  # of the last token
NEXT_POSITION = 2  # of the token to draw: the noise counter
UNTIL = 3  # where the row stops
NOISE_KEY = 4
SETTINGS = 5  # bits 0-31: the float32 temperature; bit 32: greedy
SLOT = 6
NUM_KEYS = 7  # with the new token's


def bucket(num_rows: int) -> int:
    """Return the padded batch size, which alone decides a row's bits."""
    return next((size for size in BUCKETS if size >= num_rows), -(-num_rows // 128) * 128)


@dataclass(frozen=True)
class PendingSteps:
    rows: int
    steps: int
    ranks: TopLogprobs


class _UploadedPages(NamedTuple):
    sequence: Sequence | None
    num_compactions: int  # each one replaces the table
    num_pages: int


NO_PAGES = _UploadedPages(None, 0, 0)


class Decoder:
    """The device side of decoding. selector: of the cache policy, if any."""

    def __init__(
        self,
        model: Transformer,
        large_batch_model: Transformer | None,
        cache: KVCache,
        max_batch: int,
        max_pages: int,
        selector: Selector | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        self.watcher = selector if selector is not None and selector.watches else None
        self.dead_slot = dead_slot(max_batch)
        self.model = model
        self.large_batch_model = large_batch_model
        self.cache = cache
        self.device = model.device
        self._captures = cuda_graphs and self.device.type == "cuda"
        max_rows = bucket(max_batch) if self.device.type == "cuda" else max_batch
        self._rows: list[Sequence] = []
        self._last: list[int] = []  # last token that the device drew, by row
        self._until: list[int] = []  # where the device stops each row
        self._paged: list[Sequence] = []
        self._known = [NO_PAGES] * max_batch  # by slot, of `_pages_of_slot`
        self._widest = 0
        self._sampling = SamplingState(max_rows, max_batch, model.spec.vocab_size, self.device)
        is_pinned = self.device.type == "cuda"
        self._state = torch.zeros(8, max_rows, dtype=torch.int64, pin_memory=is_pinned)
        self._pages_of_slot = torch.zeros(max_batch, max_pages, dtype=torch.int32)
        self._table = torch.zeros(max_rows, max_pages, dtype=torch.int32, pin_memory=is_pinned)
        self.state = torch.zeros_like(self._state, device=self.device)
        self.table_BP = torch.zeros_like(self._table, device=self.device)
        # keys of each row, with the new token's; 0 is dead
        self.lengths_B = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self.temperature_B = torch.ones(max_rows, device=self.device)
        self.greedy_B = torch.zeros(max_rows, dtype=torch.bool, device=self.device)
        self.step_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.tokens_SB = torch.zeros(MOST_STEPS, max_rows, dtype=torch.int64, device=self.device)
        self.logprobs_SB = torch.zeros(
            MOST_STEPS, max_rows, dtype=torch.float32, device=self.device
        )
        # logits of all batch sizes, for rows drawn outside the graph
        self.logits: Tensor | None = None
        self._graphs: dict[tuple[int, DrawMode | None], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self.replays = 0

    def start(self, sequences: list[Sequence], steps: int) -> PendingSteps:
        """Start `steps` tokens of each sequence, whose pages are allocated. `read` the result
        before the next start."""
        size = self.size(len(sequences))
        self.upload(sequences, size)
        mode = draw_of(sequences)
        if mode:
            self._sampling.upload(sequences, size, mode)
        num_rows = len(sequences)
        ranks = TopLogprobs(sequences)
        needs_logits_on_host = any(map(needs_host, sequences))
        if needs_logits_on_host and steps > 1:
            raise ValueError(f"steps: {steps}, where the host needs the token before")
        for _ in range(steps):
            if not ranks.asking and not needs_logits_on_host:
                self._step(size, mode)
                continue
            self._step(size, None)
            assert self.logits is not None
            logits_BV = by_host(self._shaped(num_rows, self.logits[:num_rows], mode), sequences)
            ranks.see(logits_BV)
            self._draw(num_rows, logits_BV, mode)
        if mode is DrawMode.MARKED:
            self._sampling.drew(sequences, steps)
        return PendingSteps(num_rows, steps, ranks)

    def read(
        self, begun: PendingSteps
    ) -> tuple[list[list[int]], list[list[float]], list[list[list[tuple[int, float]]] | None]]:
        """Wait for the started steps. Return (ids, log-probs), both [B, S], and each row's
        likeliest tokens. ValueError for a row without a distribution."""
        tokens_SB = self.tokens_SB[: begun.steps, : begun.rows].cpu()
        logprobs_SB = self.logprobs_SB[: begun.steps, : begun.rows].cpu()
        if not all_finite(logprobs_SB):
            self._rows = []
            require_finite(logprobs_SB.t().amin(1).tolist())
        self._last = tokens_SB[-1].tolist()
        tokens_BS, logprobs_BS = tokens_SB.t().tolist(), logprobs_SB.t().tolist()
        return tokens_BS, logprobs_BS, begun.ranks.told(tokens_BS, logprobs_BS)

    def place(self, sequences: list[Sequence]) -> tuple[Tensor, DecodeRows]:
        """Return the last tokens [B] and the padded rows of these sequences, for a pass outside the
        decoder."""
        size = self.size(len(sequences))
        self.upload(sequences, size)
        self._rows = []
        return self.state[LAST_TOKEN, :size], self._live(size)

    def _live(self, size: int) -> DecodeRows:
        lengths_B = self.lengths_B[:size]
        slots_B = self.state[SLOT, :size]
        if self.watcher is not None or self.cache.recurrent is not None:
            slots_B = slots_B.masked_fill(lengths_B == 0, self.dead_slot)
        pages = self.table_BP.shape[1] if self.device.type == "cuda" else self._widest
        positions_B = self.state[POSITION, :size]
        return DecodeRows(slots_B, self.table_BP[:size, :pages], lengths_B, positions_B)

    def size(self, num_rows: int) -> int:
        return bucket(num_rows) if self.device.type == "cuda" else num_rows

    def runs_large_batch(self, num_rows: int) -> bool:
        return self.large_batch_model is not None and num_rows >= LARGE_BATCH_FROM

    @torch.inference_mode()
    def warm_up(self) -> None:
        if not self._captures:
            return
        max_rows = self.state.shape[1]
        sizes = {bucket(num_rows) for num_rows in range(1, max_rows + 1)}
        for size in sorted(sizes, reverse=True):  # smaller graphs reuse the memory of larger ones
            if (size, DrawMode.PLAIN) not in self._graphs:
                self._capture(size, DrawMode.PLAIN)

    def forget(self) -> None:
        """Drop the captured graphs before the storages behind them move."""
        self._graphs.clear()
        self.logits = None
        self._rows = []
        self._paged = []
        self._pool = None
        self._known = [NO_PAGES] * len(self._known)

    def upload(self, sequences: list[Sequence], size: int) -> None:
        """Update the state and page tables of these rows, padded to `size`. Steps advance the state
        on the device, so only other rows, last tokens or ends are uploaded."""
        self.step_1.zero_()
        last_tokens = [s.last_token for s in sequences]
        until = [s.until for s in sequences]
        if sequences != self._rows or last_tokens != self._last or until != self._until:
            self._upload_state(sequences, size)
            self._rows = list(sequences)
            self._until = until
        self._upload_pages(sequences, size)

    def _upload_state(self, sequences: list[Sequence], size: int) -> None:
        temperatures = [s.request.temperature or 1 for s in sequences]
        temperature_B = torch.tensor(temperatures, dtype=torch.float32)
        is_greedy = torch.tensor([s.request.temperature == 0 for s in sequences])
        settings = temperature_B.view(torch.int32).long() | is_greedy.long() << 32
        lines = {
            LAST_TOKEN: [s.last_token for s in sequences],
            POSITION: [s.position for s in sequences],
            NEXT_POSITION: [s.length for s in sequences],
            UNTIL: [s.until for s in sequences],
            NOISE_KEY: [signed(s.noise_key) for s in sequences],
            SETTINGS: settings.tolist(),
            SLOT: [s.slot for s in sequences],
            NUM_KEYS: [s.cached_len + 1 for s in sequences],
        }
        self._state[:, :size] = 0
        self._state[:, : len(sequences)] = torch.tensor([lines[i] for i in range(len(lines))])
        self.state[:, :size].copy_(self._state[:, :size], non_blocking=True)
        settings_B = self.state[SETTINGS, :size]
        self.lengths_B[:size] = self.state[NUM_KEYS, :size]
        self.temperature_B[:size] = settings_B.int().view(torch.float32)
        self.greedy_B[:size] = settings_B >> 32 > 0

    def _upload_pages(self, sequences: list[Sequence], size: int) -> None:
        has_changed = self._copy_new_pages(sequences)
        if not has_changed and sequences == self._paged:
            return
        self._paged = list(sequences)
        self._widest = max(len(s.pages) for s in sequences)
        row_slots = [s.slot for s in sequences]
        self._table[: len(row_slots), : self._widest] = self._pages_of_slot[
            row_slots, : self._widest
        ]
        # whole rows are contiguous
        self.table_BP[:size].copy_(self._table[:size], non_blocking=True)

    def _copy_new_pages(self, sequences: list[Sequence]) -> bool:
        slots, columns, pages = list[int](), list[int](), list[int]()
        for sequence in sequences:
            known = self._known[sequence.slot]
            is_same_table = (
                known.sequence is sequence and known.num_compactions == sequence.num_compactions
            )
            num_known = known.num_pages if is_same_table else 0
            num_pages = len(sequence.pages)
            if num_known == num_pages:
                continue
            slots += [sequence.slot] * (num_pages - num_known)
            columns += range(num_known, num_pages)
            pages += sequence.pages[num_known:]
            self._known[sequence.slot] = _UploadedPages(
                sequence, sequence.num_compactions, num_pages
            )
        if pages:
            self._pages_of_slot[slots, columns] = torch.tensor(pages, dtype=torch.int32)
        return bool(pages)

    def _step(self, size: int, drawing: DrawMode | None) -> None:
        if not self._captures:
            self._advance(size, drawing)
            return
        if (size, drawing) not in self._graphs:
            self._capture(size, drawing)
        self._graphs[size, drawing].replay()
        self.replays += 1

    def _capture(self, size: int, drawing: DrawMode | None) -> None:
        """Capture one step. Its rows are dead, since the warm-up steps, which compile, must change
        nothing."""
        saved_state = self.state[:, :size].clone()
        saved_lengths_B = self.lengths_B[:size].clone()
        self.state[:, :size] = 0
        self.lengths_B[:size] = 0
        if self._side is None:  # the allocator keeps memory by stream
            self._side = torch.cuda.Stream(self.device)
        stream = self._side
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._advance(size, drawing)
                self.step_1.zero_()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = captured(lambda: self._advance(size, drawing), self._pool)
        self._pool = self._pool or graph.pool()
        self._graphs[size, drawing] = graph
        self.state[:, :size] = saved_state
        self.lengths_B[:size] = saved_lengths_B
        self.step_1.zero_()

    def _advance(self, size: int, drawing: DrawMode | None) -> None:
        ids_B, decode_rows = self.state[LAST_TOKEN, :size], self._live(size)
        attend = PagedDecode(self.cache, decode_rows, self.watcher)
        if self.large_batch_model is not None and self.runs_large_batch(size):
            model = self.large_batch_model
        else:
            model = self.model
        with overlapping(self.device):
            logits_BV = model.logits(model(ids_B, decode_rows.positions_B, attend))
            if drawing is None:
                if self.logits is None:
                    self.logits = logits_BV.new_empty(self.state.shape[1], logits_BV.shape[1])
                self.logits[:size] = logits_BV
                return
            self._draw(size, self._shaped(size, logits_BV, drawing), drawing)

    def _shaped(self, rows: int, logits_BV: Tensor, drawing: DrawMode) -> Tensor:
        if drawing is not DrawMode.MARKED:
            return logits_BV
        marked = self._sampling.marked(self.state[SLOT, :rows])
        return shape(logits_BV, marked, self.state[NEXT_POSITION, :rows])

    def _draw(self, rows: int, logits_BV: Tensor, drawing: DrawMode) -> None:
        ids_B, pos_B, next_B, until_B, keys_B, _, slots_B, _ = self.state[:, :rows].unbind()
        tokens_B, logprobs_B = draw(
            logits_BV,
            keys_B,
            next_B,
            self.temperature_B[:rows],
            self.greedy_B[:rows],
            self._sampling.filters(rows) if drawing else None,
        )
        advance(
            tokens_B,
            logprobs_B,
            self.step_1,
            self.tokens_SB,
            self.logprobs_SB,
            ids_B,
            pos_B,
            next_B,
            until_B,
            self.lengths_B[:rows],
            self._sampling.marked(slots_B) if drawing is DrawMode.MARKED else None,
        )
