"""The rollout engine of this process (`lowroll.Engine`; docs/python.md).

`add`, `step` and `abort` are the continuous-batching interface under `generate`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowroll.engine.base import Capabilities, EngineStats, InFlight, PartialSample, Ranked
from lowroll.engine.cache_size import CacheSize
from lowroll.engine.decoder import MOST_STEPS
from lowroll.engine.grammar import Grammars
from lowroll.engine.loading import load_models
from lowroll.engine.prompts import EngineTokenizer
from lowroll.engine.request import check_sequences, validate
from lowroll.engine.runner import Runner
from lowroll.engine.scheduler import Scheduler
from lowroll.kv import support
from lowroll.kv.cache import KVCache
from lowroll.kv.capacity import Workload
from lowroll.kv.pages import PagePool
from lowroll.kv.policy.base import CachePolicy
from lowroll.kv.policy.dense import DENSE
from lowroll.kv.storage import storage
from lowroll.model import exact as exactness
from lowroll.model.experts import StackedLinear
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import QTensor, get_format
from lowroll.types import MAX_TOP_LOGPROBS, BehaviorTag, Group, PolicySpan, Request, Rollout
from lowroll.weights.publish import (
    digest,
    first_difference,
)
from lowroll.weights.sync.update import UpdateReceiver, WeightUpdate

log = logging.getLogger(__name__)


class NativeEngine:
    """Continuous batching over a paged KV cache, with linear weights in any format.

    Used by one thread. ValueError names the wrong argument. Tokens do not depend on the scheduling
    arguments.

        The model
            model               folder, hub id, or a loaded Transformer, which the engine copies, or
                                shares where it has the format
            weights             of `lowroll.formats()`; default the model's low-bit format, or int8
            large_batch_weights     second format, for prompts and large batches
                                (`engine.decoder`)
            dtype               of activations, norms and KV cache; default that of a dense format,
                                float32 on CPU, bfloat16 on CUDA
            keep_dense          keep dequantized copies of 4-bit weights (2 bytes a weight in
                                bfloat16): faster for large batches on CUDA
            noisy               `update_weights` may put noise on the norms
            exact               a request has the same bits in any batch; None: as a loaded model
        The KV cache
            kv                  policy (`kv.policy`); None is dense
            kv_dtype            "fp8" for 8 bits (`kv.fp8`); None for `dtype`
            cache_tokens        capacity; default what concurrent `workloads` can use, at most a
                                quarter of the free memory (`kv.capacity`)
            memory_share        of the device, for weights and a cache of default size
            max_model_len       most tokens of a prompt with its response; default the model's
            prefix_caching      prompts share the pages of equal beginnings
            turn_caching        later turns also reuse the pages of drawn tokens, whose last bits
                                differ from a prompt's; dense cache, unrounded, one format
            record_evictions    rollouts name the dropped keys (`types.Evictions`)
        Scheduling
            max_batch           samples decoded at once
            max_prefill_tokens  prompt tokens of a pass
            prefill_chunk       longest chunk of a prompt; None: no limit
            lookahead           decode steps between two reads of tokens and admissions, if requests
                                arrive one by one; None if they arrive together: on CUDA 16, and as
                                many passes over prompts
            gather              decode steps before other prompts run; default `lookahead` - 1
            one_pass            decode rows and prompts share a pass (dense cache, no
                                large_batch_weights)
            cuda_graphs         False starts kernels one by one, for debugging
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        weights: str | None = None,
        kv: CachePolicy | None = None,
        device: str | torch.device = "auto",
        dtype: torch.dtype | None = None,
        *,
        tokenizer: Any = None,
        page_size: int = 16,
        cache_tokens: int | None = None,
        workloads: Sequence[Workload] = (),
        max_batch: int = 256,
        max_prefill_tokens: int = 8192,
        prefill_chunk: int | None = None,
        noisy: bool = False,
        large_batch_weights: str | None = None,
        keep_dense: bool = False,
        kv_dtype: str | None = None,
        record_evictions: bool = False,
        lookahead: int | None = None,
        gather: int | None = None,
        one_pass: bool = False,
        max_model_len: int | None = None,
        memory_share: float | None = None,
        prefix_caching: bool = True,
        turn_caching: bool = False,
        cuda_graphs: bool = True,
        exact: bool | None = None,
    ) -> None:
        if lookahead is not None and not 1 <= lookahead <= MOST_STEPS:
            raise ValueError(f"lookahead: expected 1..{MOST_STEPS} steps, got {lookahead}")
        self.kv = _policy_or_dense(kv, turn_caching, kv_dtype, large_batch_weights)
        self.storage = storage(kv_dtype)
        loaded = load_models(model, weights, large_batch_weights, device, dtype, noisy)
        self.model, self.large_batch_model, weights, self.folder = loaded
        self.format = get_format(weights)
        self.spec = self.model.spec
        support.refuse(self.spec, self.kv, kv_dtype)
        if getattr(model, "exact", False) if exact is None else exact:
            self._be_exact()
        self.context = min(self.spec.max_position, max_model_len or self.spec.max_position)
        self.receiver = UpdateReceiver(self.model, self.large_batch_model)
        if keep_dense:
            self.keep_dense()
        self.cache_size = CacheSize(
            self.model,
            self.storage,
            self.kv,
            max_batch,
            self.context,
            record_evictions,
            memory_share,
        )
        num_pages = self.cache_size.num_pages(cache_tokens, workloads, page_size)
        self.runner = Runner(
            self.model,
            self.large_batch_model,
            num_pages,
            page_size,
            max_batch,
            self.kv,
            self.storage,
            record_evictions,
            cuda_graphs,
            one_pass,
        )
        # a recurrent layer's state covers all tokens: pages of a prefix do not suffice
        has_pages_alone = self.spec.delta is None
        self.pool = PagePool(
            num_pages,
            page_size,
            prefix_caching and has_pages_alone,
            turn_caching and has_pages_alone,
        )
        if large_batch_weights is not None:
            weights = f"{weights}+{large_batch_weights}"
        self.behavior = BehaviorTag(
            self._policy(0),
            weights=weights,
            kv_policy=self.kv.name,
            kv_budget=self.kv.budget,
            kv_dtype=kv_dtype,
        )
        self._texts = EngineTokenizer(tokenizer, self.folder)
        self._tokens = 0  # includes tokens that a replay drew again
        self.scheduler = self._schedule(
            max_batch, max_prefill_tokens, prefill_chunk, lookahead, gather
        )

    def _be_exact(self) -> None:
        is_bounded_or_rounded = self.storage is not KVCache or self.kv.budget is not None
        if is_bounded_or_rounded or self.large_batch_model is not None:
            raise ValueError("exact: needs the dense cache, unrounded, and one format")
        exactness.make(self.model, key="exact")

    # -- requests ----------------------------------------------------------------------------------

    def generate(
        self,
        requests: str | Request | Sequence[Request | str],
        on_progress: Callable[[int, int], None] | None = None,
        *,
        chat: bool = True,
        **sampling: Any,
    ) -> list[Group]:
        """Return the groups of all requests, in their order, as `Engine.generate`. All requests are
        checked first.

        A text becomes a user's message in the chat template, or with chat=False the beginning of a
        text; `sampling` are its fields of `Request`. Requests that `add` queued advance too, and
        their groups wait for `step`. ValueError also for a missing tokenizer.
        """
        requests = self._texts.requests(requests, chat, sampling)
        for i, request in enumerate(requests):
            self._validate(request, f"requests[{i}].")
        handles = [self.scheduler.add(request) for request in requests]
        own_handles = frozenset(handles)
        groups: dict[int, Group] = {}
        try:
            while len(groups) < len(handles):
                self._advance()
                groups |= self.scheduler.finished(own_handles)
                if on_progress is not None:
                    on_progress(len(groups), len(handles))
        except BaseException:
            for handle in handles:
                self.abort(handle)
            self.scheduler.finished(own_handles)
            raise
        return [groups[handle] for handle in handles]

    def text(self, rollout: Rollout) -> str:
        """Return a rollout's text without special tokens. ValueError without a tokenizer."""
        return str(
            self.tokenizer.decode(
                rollout.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def add(self, request: Request) -> int:
        self._validate(request, "")
        return self.scheduler.add(request)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[int, Group]]:
        self._advance(meanwhile)
        return self.scheduler.finished()

    def _advance(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        plan = self.scheduler.plan()
        try:
            results = self.runner.run(plan, meanwhile)
        except BaseException:
            self._give_up()
            raise
        for result in results:
            self.scheduler.policy = self.behavior.policy[-1 if result.large_batch else 0]
            num_before = len(result.sequence.token_ids)
            self.scheduler.commit_run(
                result.sequence, result.token_ids, result.logprobs, result.tops
            )
            self._tokens += len(result.sequence.token_ids) - num_before

    def score(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        temperature: float = 1.0,
    ) -> list[Tensor]:
        return [
            scored.logprobs_T for scored in self.score_top(sequences, prompt_lens, 0, temperature)
        ]

    def score_top(
        self,
        sequences: Sequence[list[int]],
        prompt_lens: Sequence[int],
        top: int,
        temperature: float = 1.0,
    ) -> list[Ranked]:
        if type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top: expected an integer in 0..{MAX_TOP_LOGPROBS}, got {top!r}")
        check_sequences(sequences, prompt_lens, self.context, self.spec.vocab_size)
        scores = []
        for ids, prompt_len in zip(sequences, prompt_lens, strict=True):
            tensors = self.runner.score(ids, prompt_len, temperature, top)
            scores.append(Ranked(*(tensor.cpu() for tensor in tensors)))
        return scores

    def keep_dense(self) -> None:
        """Keep dense copies of weights below 8 bits on a GPU, except for stacked experts, whose
        product reads the codes. Call it before decoding."""
        if self.model.device.type != "cuda":
            return
        for name, linear in self.model.linears():
            is_low_bit = self.format.of(name).bits < 8
            if (
                is_low_bit
                and isinstance(linear.weight, QTensor)
                and not isinstance(linear, StackedLinear)
            ):
                linear.weight.keep_dense(self.model.dtype)

    def warm_up(self) -> None:
        self.runner.cache.restore()
        self.runner.decoder.warm_up()
        if self.runner.short is not None:
            self.runner.short.warm_up()

    def so_far(self, handle: int) -> list[PartialSample]:
        return self.scheduler.so_far(handle)

    def abort(self, handle: int) -> bool:
        return self.scheduler.abort(handle)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            context_length=self.context,
            updates=self.receiver.kinds,
            updates_in_flight=True,
            noise=self.receiver.takes_noise,
            scores=True,
            exact_logprobs=True,
            sampler=frozenset(field.name for field in fields(Request)),
            kv=self.kv,
            kv_dtype=self.behavior.kv_dtype,
            records_evictions=self.runner.recorder is not None,
            # a recurrent state cannot be rolled back to the token before a difference
            replays=self.kv.budget is None and self.spec.delta is None,
            vocab_size=self.spec.vocab_size,
            lora_rank=self.receiver.max_rank,
        )

    def stats(self) -> EngineStats:
        cache_tokens = self.pool.num_pages * self.pool.page_size
        replays = self.scheduler.replays
        return EngineStats(
            weights=self.format.name,
            weight_bits=float(self.format.bits),
            cache_tokens=cache_tokens,
            cache_bytes=cache_tokens * self.cache_size.bytes_per_token,
            policy_bytes=self.cache_size.policy_bytes,
            virtual_memory_bytes=self.runner.cache.virtual_memory_bytes,
            pages_peak=self.pool.peak_used,
            prefix_hits=self.pool.hits,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            tokens=self._tokens - replays.kept,
            cache_used=self.pool.num_used * self.pool.page_size,
            replays=replays.samples,
            replayed_tokens=replays.tokens,
            kept_tokens=replays.kept,
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.scheduler.has_finished

    def release(self, in_flight: InFlight = "keep") -> None:
        """Free the memory of the KV cache until the next step.

        It returns at its old address where possible (`kv.virtual_memory`); elsewhere decode graphs
        are captured again. ValueError when this engine cannot replay.
        """
        if in_flight == "replay":
            self._check_replays()
            self.scheduler.rewind()
        elif self.scheduler.has_work:
            raise RuntimeError(
                "release: requests are in flight; finish, abort or replay them first"
            )
        self.reset_prefix_cache()
        self.runner.release()

    def reset_prefix_cache(self) -> None:
        """Forget the pages of shared prompts. Prompts behind them run in other chunks, which round
        differently."""
        self.pool.clear_prefixes()

    def close(self) -> None:
        """Do nothing: the engine's memory is freed with it."""

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, update: WeightUpdate, in_flight: InFlight = "keep") -> BehaviorTag:
        """Take new weights as policy `update.version`, in place, and return the new tag.

        A stream is checked before any write. ValueError names what does not fit, or that this
        engine cannot replay.
        """
        if in_flight == "replay":
            self._check_replays()
        self.receiver.take(update)
        if in_flight == "replay":
            self.scheduler.rewind()
        if not self.pool.num_used and self.runner.cache.adapt(self.model):
            self.reset_prefix_cache()
        noise = update.noise if update.noise is not None and update.noise.sigma != 0 else None
        self.behavior = replace(
            self.behavior,
            policy=self._policy(update.version),
            noise_seed=None if noise is None else noise.seed,
            noise_sigma=0.0 if noise is None else noise.sigma,
        )
        self.scheduler.set_behavior(self.behavior)
        return self.behavior

    def _check_replays(self) -> None:
        if not self.capabilities.replays:
            lacking = (
                f"cache policy is {self.kv.name!r}"
                if self.spec.delta is None
                else f"model, a {self.spec.architecture}, has states in place of keys"
            )
            raise ValueError(
                f"in_flight: replay needs every key of a sample; this engine's {lacking}; write "
                "keep (asynchrony.partial: keep)"
            )

    def linear_weights(self) -> Mapping[str, QTensor]:
        return {
            name: linear.weight
            for name, linear in self.model.linears()
            if isinstance(linear.weight, QTensor)
        }

    def first_difference(self, master: Transformer, block: int) -> str | None:
        return first_difference(master, self.model, block, self.behavior.noise_sigma > 0)

    def _policy(self, version: int) -> tuple[PolicySpan, ...]:
        models = [self.model]
        if self.large_batch_model is not None:
            models.append(self.large_batch_model)
        return tuple(PolicySpan(version, digest(model)) for model in models)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """The given tokenizer, or that of the model's folder. ValueError for none."""
        return self._texts.tokenizer

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of grammars, which is thread-safe. ValueError where there is none."""
        return Grammars(self.tokenizer, self.spec.vocab_size, self.scheduler.eos_ids)

    def _give_up(self) -> None:
        self.scheduler.abort_all()
        self.pool.clear_prefixes()
        self.runner.cache.clear()

    def _validate(self, request: Request, where: str) -> None:
        try:
            validate(
                request,
                vocab_size=self.spec.vocab_size,
                context_length=self.context,
                cache_tokens=self.pool.num_pages * self.pool.page_size,
                has_tokenizer=self._texts.exists,
                kv=self.kv,
                page_size=self.pool.page_size,
                eos_ids=self.scheduler.eos_ids,
            )
            if request.grammar is not None:
                self.grammars.compile(request.grammar)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None

    def _schedule(
        self,
        max_batch: int,
        max_prefill_tokens: int,
        prefill_chunk: int | None,
        lookahead: int | None,
        gather: int | None,
    ) -> Scheduler:
        decode = (lambda ids: self.tokenizer.decode(ids)) if self._texts.exists else None
        return Scheduler(
            self.pool,
            behavior=self.behavior,
            kv=self.kv,
            max_batch=max_batch,
            max_prefill_tokens=max_prefill_tokens,
            prefill_chunk=prefill_chunk,
            lookahead=lookahead or self.runner.lookahead,
            passes=1 if lookahead else self.runner.lookahead,
            gather=(lookahead or 1) - 1 if gather is None else gather,
            eos_ids=self._texts.eos_ids(self.spec),
            decode=decode,
            evictions=None if self.runner.recorder is None else self.runner.recorder.evictions,
            compile_grammar=lambda text: self.grammars.compile(text),
        )


def _policy_or_dense(
    kv: CachePolicy | None,
    turn_caching: bool,
    kv_dtype: str | None,
    large_batch_weights: str | None,
) -> CachePolicy:
    if kv is not None and not isinstance(kv, CachePolicy):
        raise ValueError(
            "kv: expected a CachePolicy, as lowroll.kv.policy.table.make gives, or None, the dense "
            f"cache, got {type(kv).__name__}"
        )
    conflicts = {
        "a cache policy that drops keys": kv is not None and kv.budget is not None,
        f"a cache in {kv_dtype}": kv_dtype is not None,
        "large_batch_weights": large_batch_weights is not None,
    }
    for feature, is_present in conflicts.items():
        if turn_caching and is_present:
            raise ValueError(f"turn_caching: it does not go with {feature}")
    return DENSE if kv is None else kv
