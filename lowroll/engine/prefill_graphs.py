"""Short passes over prompts as CUDA graphs.

A GPU runs a pass over a few hundred tokens faster than the host starts its kernels. So a pass over
at most MOST_PROMPTS fresh prompts and SIZES[-1] tokens is padded to the next size. The first pass
of a size compiles its kernels; the second is captured, later ones replay it.

The padding is a sequence behind the prompts, whose keys are not stored. A prompt's bits depend on
the size of the pass, and on no other prompt.

Legend: T tokens, D hidden size, P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lowroll.kernels.launch import captured, overlapping
from lowroll.kv.attention import PackedPrompts
from lowroll.kv.batch import PromptChunk
from lowroll.kv.cache import KVCache
from lowroll.model.attention import upload
from lowroll.model.flash import flashes
from lowroll.model.transformer import Transformer

SIZES = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
MOST_PROMPTS = 8
NO_SLOT = -1


class ShortPasses:
    """The graphs of short passes. captures: False starts kernels one by one."""

    def __init__(self, model: Transformer, cache: KVCache, captures: bool) -> None:
        self.model, self.cache, self._captures = model, cache, captures
        device = model.device
        # ids, positions, slots
        self._tokens_3T = torch.zeros(3, SIZES[-1], dtype=torch.int64, device=device)
        self._bounds = torch.zeros(MOST_PROMPTS + 2, dtype=torch.int32, device=device)
        self._last_P = torch.zeros(MOST_PROMPTS, dtype=torch.int64, device=device)
        self._hidden_PD = torch.empty(
            MOST_PROMPTS, model.spec.hidden_size, dtype=model.dtype, device=device
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}  # None: it ran once, uncaptured
        self._pool: Any = None
        self.replays = 0

    @staticmethod
    def supports(model: Transformer, cache: KVCache) -> bool:
        """Return whether passes can run without the host."""
        return (
            model.device.type == "cuda"
            and flashes(model.dtype, model.spec.head_dim)
            and cache.skips_negative_slots
            and cache.recurrent is None
        )

    def takes(self, chunks: Sequence[PromptChunk]) -> bool:
        return (
            0 < len(chunks) <= MOST_PROMPTS
            and all(chunk.start == 0 for chunk in chunks)
            and sum(chunk.num_tokens for chunk in chunks) <= SIZES[-1]
        )

    def run(self, ids: list[int], chunks: Sequence[PromptChunk]) -> Tensor:
        """Return the final hidden states [P, D] of the chunks' last tokens, which the next pass
        overwrites. ids: concatenated."""
        num_tokens, num_chunks = len(ids), len(chunks)
        size = next(size for size in SIZES if size >= num_tokens)
        tokens_3T = torch.zeros(3, size, dtype=torch.int64)
        ids_T, positions_T, slots_T = tokens_3T.unbind()
        ids_T[:num_tokens] = torch.tensor(ids)
        positions_T[:num_tokens] = torch.cat([torch.arange(chunk.stop) for chunk in chunks])
        slots_T.fill_(NO_SLOT)
        slots_T[:num_tokens] = torch.cat([c.slots(self.cache.page_size) for c in chunks])
        ends_P = torch.tensor(list(accumulate(chunk.num_tokens for chunk in chunks)))
        # the padding is a sequence up to `size`; later ones are empty
        bounds = torch.full(self._bounds.shape, size, dtype=torch.int32)
        bounds[0] = 0
        bounds[1 : num_chunks + 1] = ends_P
        last_P = torch.zeros_like(self._last_P, device="cpu")
        last_P[:num_chunks] = ends_P - 1
        self._tokens_3T[:, :size] = upload(tokens_3T, self.model.device)
        self._bounds.copy_(upload(bounds, self.model.device))
        self._last_P.copy_(upload(last_P, self.model.device))
        self._start(size)
        return self._hidden_PD[:num_chunks]

    @torch.inference_mode()
    def warm_up(self) -> None:
        self._last_P.zero_()
        self._tokens_3T[:2] = 0
        self._tokens_3T[2] = NO_SLOT
        for size in SIZES if self._captures else ():
            self._bounds.fill_(size)
            self._bounds[0] = 0
            while self._graphs.get(size) is None:
                self._start(size)

    def forget(self) -> None:
        """Drop the graphs before the storages behind them move."""
        self._graphs.clear()
        self._pool = None

    def _start(self, size: int) -> None:
        if not self._captures or size not in self._graphs:
            self._pass(size)
            # a failed pass has not compiled the kernels
            self._graphs[size] = None
            return
        graph = self._graphs[size]
        if graph is None:
            graph = self._graphs[size] = captured(lambda: self._pass(size), self._pool)
            self._pool = self._pool or graph.pool()
        graph.replay()
        self.replays += 1

    def _pass(self, size: int) -> None:
        ids_T, positions_T, slots_T = self._tokens_3T[:, :size].unbind()
        attend = PackedPrompts(self.cache, slots_T, self._bounds, size)
        with overlapping(self.model.device):
            self._hidden_PD.copy_(self.model(ids_T, positions_T, attend, self._last_P))
