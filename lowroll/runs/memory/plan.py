"""The memory of a run by phase, planned before anything is loaded.

    load        the learner's weights, and a matrix before it is quantized
    generate    permanent bytes, the KV cache, a step's prompts and logits
    learn       permanent bytes, the cache unless released, gradients, activations, and the largest
                of logits, a block's gradients and the update
    publish     permanent bytes, the cache unless released, and measuring `weights/*`

The KV cache gets what the run can use and its phases leave free, apart from MARGIN. Bytes are those
that torch allocates on one GPU (`Share`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowroll.config import RunConfig
from lowroll.kv.capacity import SHARE, UNKNOWN_FREE, Workload
from lowroll.kv.policy.recorder import policy_bytes
from lowroll.kv.storage import storage
from lowroll.model.device import free_memory, total_memory
from lowroll.model.shards import AHEAD
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.assembly import caches
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory import weights
from lowroll.runs.memory.activations import FLOAT, Learning, generating, graphs, logits, replay

MARGIN = 0.1  # of the free memory: the error of a plan
# Bytes of CUDA kernels and graph nodes, 0.23 GB on an H200, and of small state (docs/log/runs.md).
KERNELS = 400_000_000
CACHE = "KV cache"
PHASES = {"load": "loads", "generate": "generates", "learn": "learns", "publish": "publishes"}


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes by phase and part. usable_tokens: of a cache with which no sample waits for a page;
    usable_by describes those samples."""

    phases: Mapping[str, Mapping[str, int]]
    free: int | None
    device: str
    cache_tokens: int = 0
    usable_tokens: int = 0
    usable_by: str = ""

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def largest(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.largest)

    @property
    def missing(self) -> int:
        return 0 if self.free is None else max(0, self.peak - self.free)

    @property
    def problem(self) -> str:
        """Describe by how much the run does not fit, or return ""."""
        if not self.missing or self.free is None:
            return ""
        return (
            f"memory: the run needs {shown(self.peak)} while it {PHASES[self.largest]}, "
            f"{shown(self.missing)} more than the {shown(self.free)} that are free on {self.device}"
        )

    def lines(self) -> list[str]:
        """Return the table: a row for each part, a column for each phase."""
        free_text = "" if self.free is None else f" of {shown(self.free)} that are free"
        text_lines = [
            f"memory on {self.device}: {shown(self.peak)}{free_text}, while it {PHASES[self.largest]}"
        ]
        all_parts = self.phases.values()
        names = dict.fromkeys(name for parts in all_parts for name, size in parts.items() if size)
        rows = [["", *self.phases]]
        for name in names:
            sizes = (parts.get(name, 0) for parts in all_parts)
            rows.append([name, *(shown(size) if size else "" for size in sizes)])
        rows.append(["all", *(shown(self.total(phase)) for phase in self.phases)])
        name_width = max(len(name) for name, *_ in rows)
        for name, *cells in rows:
            row_text = f"  {name:<{name_width}}" + "".join(f"{cell:>10}" for cell in cells)
            text_lines.append(row_text.rstrip())
        if self.usable_by:
            text_lines.append(self.usable_by)
        if self.cache_tokens:
            cache_text = f"the KV cache holds {self.cache_tokens:,} tokens"
            if self.usable_tokens > self.cache_tokens:
                cache_text += f" of {self.usable_tokens:,} that the run could use"
            text_lines.append(cache_text)
        return text_lines


@dataclass(frozen=True)
class Share:
    """The part of a run on the device. parts: ranks that share the learner, its optimiser and the
    other models."""

    parts: int = 1
    engines: int = 1

    def of(self, size: int) -> int:
        return -(-size // self.parts)


@dataclass(frozen=True)
class Planner:
    """A planner of `lowroll grpo` on one device. model, beside: shapes of the learner and of the
    other models. free: bytes before anything is loaded."""

    compute: Compute
    model: Transformer
    workloads: Sequence[Workload]
    beside: Mapping[str, Transformer]
    free: int | None
    total: int | None = None
    share: Share = Share()

    @classmethod
    def now(
        cls,
        compute: Compute,
        model: Transformer,
        workloads: Sequence[Workload],
        beside: Mapping[str, Transformer],
        share: Share = Share(),
    ) -> Planner:
        device = compute.device
        free, total = free_memory(device), total_memory(device)
        return cls(compute, model, workloads, beside, free, total, share)

    def plan(self, cfg: RunConfig) -> MemoryPlan:
        """Return the bytes of every phase, with a cache of the set size or of one that fits."""
        device = str(self.compute.device)
        has_engines = self.share.engines > 0
        permanent = self._learner(cfg)
        permanent |= self._engines(cfg) if has_engines else {"kernels": _kernels(self.compute)}
        phases = {"load": _loading_bytes(cfg, self.compute, self.model)}
        if has_engines:
            phases["generate"] = permanent | self._generating(cfg)
        phases["learn"] = permanent | self._learning(cfg)
        phases["publish"] = permanent | {"measuring weights/*": weights.watching(cfg, self.model)}
        if not has_engines or cfg.rollout.engine != "native":
            return MemoryPlan(phases, self.free, device)

        cached_phases = ["generate"]
        if not cfg.rollout.release_cache:
            cached_phases += ["learn", "publish"]
        usable_tokens, usable_by = self._usable(cfg)
        cache_tokens = cfg.rollout.cache_tokens
        if cache_tokens is None:
            taken_bytes = max(sum(phases[name].values()) for name in cached_phases)
            cache_tokens = self._fitting_tokens(cfg, taken_bytes, usable_tokens)
        else:
            usable_by = ""
        for name in cached_phases:
            phases[name][CACHE] = cache_tokens * self._bytes_per_token(cfg)
        return MemoryPlan(phases, self.free, device, cache_tokens, usable_tokens, usable_by)

    def _usable(self, cfg: RunConfig) -> tuple[int, str]:
        page_size, max_batch, kv = cfg.rollout.page_size, cfg.rollout.max_batch, caches.policy(cfg)
        sizes = [(work.tokens(page_size, max_batch, kv), work) for work in self.workloads]
        if not sizes:
            return 0, ""
        tokens, largest = max(sizes, key=lambda size: size[0])
        lengths_text = f"{largest.prompt:,} + {largest.response:,} tokens"
        rows = f"{largest.rows(max_batch):,}"
        return tokens, f"at most {rows} samples of {lengths_text} are drawn together"

    def _learner(self, cfg: RunConfig) -> dict[str, int]:
        compute, model = self.compute, self.model
        all_bytes = weights.learner(cfg, compute, model)
        code_bytes = weights.codes(cfg, compute, model)
        parts = {
            "learner's weights": self.share.of(all_bytes - code_bytes) + code_bytes,
            "optimiser": self.share.of(weights.optimizer(cfg, compute, model)),
        }
        for name, other_model in self.beside.items():
            count_bytes = weights.critic if name == "critic" else weights.frozen
            parts[name] = self.share.of(count_bytes(compute, other_model))
        if self.share.parts > 1:
            parts["blocks, put together"] = 2 * weights.largest_unit(model) * compute.dtype.itemsize
        parts["before, for weights/*"] = weights.watch(cfg, compute, model)
        return parts

    def _engines(self, cfg: RunConfig) -> dict[str, int]:
        if cfg.rollout.engine != "native":
            return self._vllm(cfg)
        return {name: self.share.engines * size for name, size in self._engine(cfg).items()}

    def _engine(self, cfg: RunConfig) -> dict[str, int]:
        compute, model, rollout = self.compute, self.model, cfg.rollout
        state = policy_bytes(
            caches.policy(cfg),
            model.spec,
            rollout.max_batch,
            _rollout_dtype(cfg, compute),
            cfg.train.replay_kv,
        )
        return {
            "rollouts' weights": weights.engine(cfg, compute, model),
            "second format": weights.large_batch(cfg, model),
            "dense copies": weights.dense_copies(cfg, compute, model),
            "compact head": weights.compact_head(cfg, compute, model),
            "policy's state": state,
            "graphs, kernels": graphs(cfg, compute, model, self._samples(cfg)) + _kernels(compute),
        }

    def _vllm(self, cfg: RunConfig) -> dict[str, int]:
        vllm, on_cuda = cfg.rollout.vllm, self.compute.device.type == "cuda"
        parts = {"kernels": _kernels(self.compute)}
        if on_cuda and vllm.url is None and vllm.devices is None:
            memory = round(vllm.gpu_memory_utilization * (self.total or 0))
            parts["vLLM"] = self.share.engines * memory
        return parts

    def _samples(self, cfg: RunConfig) -> int:
        max_samples = max((work.groups * work.n for work in self.workloads), default=1 << 62)
        return min(cfg.rollout.max_batch, max_samples)

    def _learning(self, cfg: RunConfig) -> dict[str, int]:
        """Return the bytes of the policy, or the critic's if larger: they learn in turns."""
        compute, minibatches = self.compute, cfg.train.minibatches
        tokens = max(_batch_tokens(stage_cfg, self.workloads) for stage_cfg in cfg.each_stage())
        candidates = [learning(cfg, compute, self.model, tokens, minibatches)]
        critic = self.beside.get("critic")
        if critic is not None:
            dense_settings = {"lora": False, "forward": "dense", "backward": "dense"}
            critic_train = cfg.train.model_copy(update=dense_settings)
            critic_cfg = cfg.model_copy(update={"train": critic_train})
            candidates.append(learning(critic_cfg, compute, critic, tokens, minibatches, False))
        largest = max(candidates, key=lambda parts: sum(parts.values()))
        return largest | {"gradients": self.share.of(largest["gradients"])}

    def _generating(self, cfg: RunConfig) -> dict[str, int]:
        if cfg.rollout.engine != "native":
            return {}
        prompts = max((work.groups * work.prompt for work in self.workloads), default=0)
        size = generating(cfg, self.compute, self.model, prompts, self._samples(cfg))
        return {CACHE: 0, "prompts and logits": size}

    def _bytes_per_token(self, cfg: RunConfig) -> int:
        layout = storage(cfg.rollout.cache.kv_dtype)
        dtype = _rollout_dtype(cfg, self.compute)
        return self.share.engines * layout.bytes_per_token(self.model.spec, dtype)

    def _fitting_tokens(self, cfg: RunConfig, taken_bytes: int, usable_tokens: int) -> int:
        """Return the cache tokens that fit, at most `usable_tokens`, and at least the longest
        sample's."""
        page_size, kv = cfg.rollout.page_size, caches.policy(cfg)
        lone_samples = [replace(work, groups=1, n=1, longest=0) for work in self.workloads]
        least_tokens = max((work.tokens(page_size, 1, kv) for work in lone_samples), default=0)
        if self.free is None:
            cache_bytes = UNKNOWN_FREE // SHARE
        else:
            cache_bytes = round((1 - MARGIN) * self.free) - taken_bytes
        engine_share = cfg.rollout.gpu_memory_utilization  # of the device, if it is bounded
        if engine_share is not None and self.total is not None:
            engine_bytes = round(engine_share * self.total)
            cache_bytes = min(cache_bytes, engine_bytes - sum(self._engines(cfg).values()))
        fitting_tokens = max(least_tokens, cache_bytes // self._bytes_per_token(cfg))
        return min(usable_tokens, fitting_tokens) // page_size * page_size


def plan_sft(cfg: RunConfig, compute: Compute, model: Transformer, longest: int) -> MemoryPlan:
    """Plan the memory of `lowroll sft`. longest: tokens of a batch."""
    permanent = {
        "learner's weights": weights.learner(cfg, compute, model),
        "optimiser": weights.optimizer(cfg, compute, model),
        "graphs, kernels": _kernels(compute),
    }
    phases = {
        "load": _loading_bytes(cfg, compute, model),
        "learn": permanent | learning(cfg, compute, model, longest, 1),
    }
    return MemoryPlan(phases, free_memory(compute.device), str(compute.device))


def learning(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    tokens: int,
    minibatches: int,
    has_head: bool = True,
) -> dict[str, int]:
    """Return a learning model's bytes by part, at the fullest of three moments of a minibatch's
    last backward pass: the logits, the last block's gradients, the update.

    tokens: of a whole batch. has_head: False for a critic, which makes no log-probs.
    """
    minibatch_tokens = -(-tokens // minibatches)
    pass_tokens = min(cfg.train.together, minibatch_tokens)
    num_passes = -(-minibatch_tokens // cfg.train.together)
    spec = model.spec
    estimator = Learning.of(cfg, compute, model)
    bytes_before, bytes_after = weights.gradient(cfg, compute, num_passes)  # of a parameter
    learning_sizes = weights.learning_sizes(cfg, model)
    gradients_before = bytes_before * sum(learning_sizes)  # the last pass
    gradients_after = bytes_after * sum(learning_sizes)
    head_gradient = 0
    if has_head and not cfg.train.lora:
        head_gradient = compute.dtype.itemsize * spec.vocab_size * spec.hidden_size
    held_parts = {"activations": estimator.kept(pass_tokens)}
    if has_head:
        held_parts["replayed caches"] = replay(cfg, compute, spec, pass_tokens)
    update_bytes = head_gradient
    if compute.device.type != "cuda":
        update_bytes = 4 * FLOAT * max(learning_sizes, default=0)
    at_block = {
        "gradients": gradients_before + head_gradient,
        **held_parts,
        "a block's gradients": estimator.backward(pass_tokens),
    }
    moments = [at_block, {"gradients": gradients_after, "update": update_bytes}]
    if has_head:
        logits_bytes = logits(cfg, compute, spec, pass_tokens, learns=not cfg.train.lora)
        moments.append({"gradients": gradients_before, **held_parts, "logits": logits_bytes})
    return max(moments, key=lambda parts: sum(parts.values()))


def _loading_bytes(cfg: RunConfig, compute: Compute, model: Transformer) -> dict[str, int]:
    """Return the bytes of loading. An adapter's base is quantized as it arrives, or at the end if
    it is scaled first."""
    learner = weights.learner(cfg, compute, model)
    if not cfg.train.lora:
        return {"learner's weights": learner, "arriving": 0}
    item = compute.dtype.itemsize
    dense_bytes = weights.linear_size(model) * item
    format = compute.format(cfg.rollout.weights)
    code_bytes = weights.linear_bytes(model, format)  # checks the shapes too
    if cfg.train.uaq_scale is not None and not get_format(format).dense:
        return {"learner's weights": learner, "before quantizing": max(0, dense_bytes - code_bytes)}
    arriving_bytes = min(AHEAD + weights.largest(model) * item, dense_bytes)
    return {"learner's weights": learner, "arriving": arriving_bytes}


def _batch_tokens(cfg: RunConfig, workloads: Sequence[Workload]) -> int:
    batch_size = (cfg.num_groups, cfg.rollouts_per_example)
    sequence_tokens = [
        work.prompt + work.response for work in workloads if (work.groups, work.n) == batch_size
    ]
    return cfg.batch_size * max(sequence_tokens, default=cfg.train.together)


def _rollout_dtype(cfg: RunConfig, compute: Compute) -> torch.dtype:
    return get_format(compute.format(cfg.rollout.weights)).dtype or compute.dtype


def _kernels(compute: Compute) -> int:
    return KERNELS if compute.device.type == "cuda" else 0


def shown(size: int) -> str:
    """Format bytes to three digits."""
    unit, scale = "kB", 1e3
    if size >= 1e9:
        unit, scale = "GB", 1e9
    elif size >= 1e6:
        unit, scale = "MB", 1e6
    number = size / scale
    return f"{number:,.0f} {unit}" if size >= 100 * scale else f"{number:.3g} {unit}"
