"""The size of an engine's KV cache: the given one, or what workloads can use of the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lowroll.kv.cache import KVCache
from lowroll.kv.capacity import UNKNOWN_FREE, NoRoom, Workload, capacity
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.recorder import policy_bytes
from lowroll.model.device import free_memory, total_memory
from lowroll.model.transformer import Transformer


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache, and what bounds it. context: the most tokens of a sequence. share: of the
    device's memory, for weights and cache."""

    model: Transformer
    storage: type[KVCache]
    kv: CachePolicy
    max_batch: int
    context: int
    records_evictions: bool
    share: float | None

    @property
    def bytes_per_token(self) -> int:
        return self.storage.bytes_per_token(self.model.spec, self.model.dtype)

    @property
    def policy_bytes(self) -> int:
        """The bytes of the cache policy's state."""
        return policy_bytes(
            self.kv, self.model.spec, self.max_batch, self.model.dtype, self.records_evictions
        )

    def num_pages(
        self, cache_tokens: int | None, workloads: Sequence[Workload], page_size: int
    ) -> int:
        """Return the number of pages. cache_tokens: None for what the workloads can use. ValueError
        for less than a page, NoRoom for more than the free memory."""
        num_tokens = (
            self._default(workloads, page_size)
            if cache_tokens is None
            else self._checked(cache_tokens)
        )
        if num_tokens < page_size:
            hint = ", which is all that the free memory allows" if cache_tokens is None else ""
            raise ValueError(
                f"cache_tokens: {num_tokens} is less than one page of {page_size} tokens{hint}"
            )
        return num_tokens // page_size

    def _default(self, workloads: Sequence[Workload], page_size: int) -> int:
        free_bytes = free_memory(self.model.device)
        assumed_free = UNKNOWN_FREE if free_bytes is None else free_bytes
        return capacity(
            workloads,
            page_size=page_size,
            max_batch=self.max_batch,
            context=self.context,
            bytes_per_token=self.bytes_per_token,
            free=max(0, assumed_free - self.policy_bytes),
            kv=self.kv,
            most=self._budget(free_bytes),
        )

    def _checked(self, cache_tokens: int) -> int:
        free_bytes = free_memory(self.model.device)
        cache_bytes = cache_tokens * self.bytes_per_token
        if free_bytes is None or cache_bytes + self.policy_bytes <= free_bytes:
            return cache_tokens
        policy_note = ""
        if self.policy_bytes:
            policy_note = f" and the state of {self.kv.name} {self.policy_bytes / 1e9:.3g} GB"
        raise NoRoom(
            f"cache_tokens: a KV cache of {cache_tokens:,} tokens takes "
            f"{cache_bytes / 1e9:.3g} GB{policy_note}, and {free_bytes / 1e9:.3g} GB are free"
        )

    def _budget(self, free_bytes: int | None) -> int | None:
        """Return the bytes that the share leaves for the cache; None without a share."""
        device = self.model.device
        total_bytes = total_memory(device)
        if self.share is None or total_bytes is None:
            return None
        allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        budget = round(self.share * total_bytes) - allocated - self.policy_bytes
        return max(0, budget if free_bytes is None else min(budget, free_bytes - self.policy_bytes))
