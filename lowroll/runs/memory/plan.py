"""The memory of a run, phase by phase, before anything is loaded.

    load        the learner's weights, and what a matrix is before it is quantized
    generate    all that stays, the KV cache, a step's prompts and logits
    learn       all that stays, the cache unless it is released, gradients, activations, and the
                larger of logits, a block's gradients, and what the update takes
    publish     all that stays, the cache unless it is released, and what measuring `weights/*` takes

A checkpoint is written in place and takes no more. The peak is the largest phase. The KV cache gets
what the run can use, or what its phases leave of the free memory (MARGIN apart), whichever is less.

Of several learner ranks and engines the plan is that of one rank's GPU (`Share`): parts of the
learner, and the engines there, if any.

Bytes are those that torch allocates; its allocator returns reserved memory when short. On CUDA
`free` is what is left beside the process' context.
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

MARGIN = 0.1  # of the free memory, left by a cache without a given size: the error of a plan
# bytes on CUDA of the kernels' code and the graphs' nodes (0.23 GB on an H200), and of workspaces
# and small state (0.17 GB): docs/log/runs.md
KERNELS = 400_000_000
CACHE = "KV cache"
PHASES = {"load": "loads", "generate": "generates", "learn": "learns", "publish": "publishes"}


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes by phase and part, and the free bytes, if known. cache_tokens: of the KV cache;
    usable_tokens: with which no sample waits for a page; usable_by: the samples that these are for,
    in words."""

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
        """The bytes that the run needs and the device lacks; 0 when it fits or that is unknown."""
        return 0 if self.free is None else max(0, self.peak - self.free)

    @property
    def problem(self) -> str:
        """Say by how much the run does not fit; "" when it does."""
        if not self.missing or self.free is None:
            return ""
        return (
            f"memory: the run needs {shown(self.peak)} while it {PHASES[self.largest]}, "
            f"{shown(self.missing)} more than the {shown(self.free)} that are free on {self.device}"
        )

    def lines(self) -> list[str]:
        """Return the table as text: a row a part, a column a phase."""
        free = "" if self.free is None else f" of {shown(self.free)} that are free"
        told = [
            f"memory on {self.device}: {shown(self.peak)}{free}, while it {PHASES[self.largest]}"
        ]
        names = dict.fromkeys(
            name for parts in self.phases.values() for name, size in parts.items() if size
        )
        rows = [["", *self.phases]]
        rows += [[name, *(_cell(parts, name) for parts in self.phases.values())] for name in names]
        rows.append(["all", *(shown(self.total(phase)) for phase in self.phases)])
        first = max(len(row[0]) for row in rows)
        told += [
            (f"  {row[0]:<{first}}" + "".join(f"{cell:>10}" for cell in row[1:])).rstrip()
            for row in rows
        ]
        if self.cache_tokens:
            less = self.usable_tokens > self.cache_tokens
            wanted = f" of {self.usable_tokens:,} that the run could use" if less else ""
            told += [self.usable_by] if self.usable_by else []
            told.append(f"the KV cache holds {self.cache_tokens:,} tokens{wanted}")
        return told


@dataclass(frozen=True)
class Share:
    """The part of a run on the device. parts: ranks that share the learner, its optimiser and the
    models beside it, which are gathered block by block. engines: the number of the run's engines
    there."""

    parts: int = 1
    engines: int = 1

    def of(self, size: int) -> int:
        """Return the bytes of one part."""
        return -(-size // self.parts)


@dataclass(frozen=True)
class Planner:
    """A planner of `lowroll grpo` with one model on one device. model: its shapes, on the meta
    device. workloads: in the engine together. beside: the shapes of the frozen models and the
    critic, by name. free: bytes, before anything is loaded; total: bytes of the device. share: of a
    run on several."""

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
        """Return a planner with the currently free memory."""
        device = compute.device
        free, total = free_memory(device), total_memory(device)
        return cls(compute, model, workloads, beside, free, total, share)

    def plan(self, cfg: RunConfig) -> MemoryPlan:
        here = self.share.engines > 0
        own = here and cfg.rollout.engine == "native"
        stays = self._learner(cfg) | (self._engines(cfg) if here else self._kernels())
        step, cache = {}, {}
        if own:
            size = generating(cfg, self.compute, self.model, self._prompts, self._samples(cfg))
            step = {CACHE: 0, "prompts and logits": size}
            cache = {} if cfg.rollout.release_cache else {CACHE: 0}
        phases = {
            "load": _loading(cfg, self.compute, self.model),
            **({"generate": stays | step} if here else {}),
            "learn": stays | cache | self._learning(cfg),
            "publish": stays | cache | {"measuring weights/*": weights.watching(cfg, self.model)},
        }
        usable, tokens, each = self._cache(cfg, phases) if own else (0, 0, 0)
        held = {
            name: {part: tokens * each if part == CACHE else size for part, size in parts.items()}
            for name, parts in phases.items()
        }
        samples = self._together(cfg) if own and cfg.rollout.cache_tokens is None else ""
        return MemoryPlan(held, self.free, str(self.compute.device), tokens, usable, samples)

    def _together(self, cfg: RunConfig) -> str:
        size, rows, kv = cfg.rollout.page_size, cfg.rollout.max_batch, caches.policy(cfg)
        if not self.workloads:
            return ""
        most = max(self.workloads, key=lambda work: work.tokens(size, rows, kv))
        each = f"{most.prompt:,} + {most.response:,} tokens"
        return f"at most {most.rows(rows):,} samples of {each} are drawn together"

    def _learner(self, cfg: RunConfig) -> dict[str, int]:
        compute, model = self.compute, self.model
        whole, codes = weights.learner(cfg, compute, model), weights.codes(cfg, compute, model)
        parts = {
            "learner's weights": self.share.of(whole - codes) + codes,
            "optimiser": self.share.of(weights.optimizer(cfg, compute, model)),
        }
        for name, other in self.beside.items():
            count = weights.critic if name == "critic" else weights.frozen
            parts[name] = self.share.of(count(compute, other))
        if self.share.parts > 1:
            parts["blocks, put together"] = 2 * weights.largest_unit(model) * compute.dtype.itemsize
        parts["before, for weights/*"] = weights.watch(cfg, compute, model)
        return parts

    def _kernels(self) -> dict[str, int]:
        return {"kernels": KERNELS if self.compute.device.type == "cuda" else 0}

    def _engines(self, cfg: RunConfig) -> dict[str, int]:
        """Return the permanent bytes by part of all engines of this device, without their caches."""
        if cfg.rollout.engine != "native":
            return self._vllm(cfg)
        return {name: self.share.engines * size for name, size in self._engine(cfg).items()}

    def _engine(self, cfg: RunConfig) -> dict[str, int]:
        """Return the permanent bytes by part of one engine, without its cache."""
        compute, model, rollout = self.compute, self.model, cfg.rollout
        kernels = KERNELS if compute.device.type == "cuda" else 0
        state = policy_bytes(
            caches.policy(cfg),
            model.spec,
            rollout.max_batch,
            _dtype(cfg, compute),
            cfg.train.replay_kv,
        )
        return {
            "rollouts' weights": weights.engine(cfg, compute, model),
            "second format": weights.large_batch(cfg, model),
            "dense copies": weights.dense_copies(cfg, compute, model),
            "policy's state": state,
            "graphs, kernels": graphs(cfg, compute, model, self._samples(cfg)) + kernels,
        }

    def _vllm(self, cfg: RunConfig) -> dict[str, int]:
        """Return the bytes by part of a vLLM that the run starts on its own GPU."""
        vllm, on_cuda = cfg.rollout.vllm, self.compute.device.type == "cuda"
        parts = self._kernels()
        if on_cuda and vllm.url is None and vllm.devices is None:
            parts["vLLM"] = self.share.engines * round(
                vllm.gpu_memory_utilization * (self.total or 0)
            )
        return parts

    @property
    def _prompts(self) -> int:
        return max((work.groups * work.prompt for work in self.workloads), default=0)

    def _samples(self, cfg: RunConfig) -> int:
        most = max((work.groups * work.n for work in self.workloads), default=1 << 62)
        return min(cfg.rollout.max_batch, most)

    def _learning(self, cfg: RunConfig) -> dict[str, int]:
        """Return the bytes by part of the learning policy, or of the critic if that is more: they
        learn one after the other."""
        tokens = max(
            (_batch_tokens(now, self.workloads) for now in cfg.each_stage()), default=1 << 62
        )
        found = [learning(cfg, self.compute, self.model, tokens, cfg.train.minibatches)]
        if "critic" in self.beside:
            dense = {"lora": False, "forward": "dense", "backward": "dense"}
            full = cfg.train.model_copy(update=dense)
            alone = cfg.model_copy(update={"train": full})
            found.append(
                learning(
                    alone, self.compute, self.beside["critic"], tokens, cfg.train.minibatches, False
                )
            )
        most = max(found, key=lambda parts: sum(parts.values()))
        return most | {"gradients": self.share.of(most["gradients"])}

    def _cache(
        self, cfg: RunConfig, phases: Mapping[str, Mapping[str, int]]
    ) -> tuple[int, int, int]:
        """Return (tokens that the run can use, tokens of the cache, bytes of each)."""
        size, kv = cfg.rollout.page_size, caches.policy(cfg)
        each = self.share.engines * storage(cfg.rollout.cache.kv_dtype).bytes_per_token(
            self.model.spec, _dtype(cfg, self.compute)
        )
        usable = max((w.tokens(size, cfg.rollout.max_batch, kv) for w in self.workloads), default=0)
        if cfg.rollout.cache_tokens is not None:
            return usable, cfg.rollout.cache_tokens, each
        least = max(
            (replace(w, groups=1, n=1, longest=0).tokens(size, 1, kv) for w in self.workloads),
            default=0,
        )
        if self.free is None:
            room = UNKNOWN_FREE // SHARE
        else:
            held = max(sum(parts.values()) for parts in phases.values() if CACHE in parts)
            room = round((1 - MARGIN) * self.free) - held
        share = cfg.rollout.gpu_memory_utilization
        if share is not None and self.total is not None:
            room = min(room, round(share * self.total) - sum(self._engines(cfg).values()))
        tokens = min(usable, max(least, room // each))
        return usable, tokens // size * size, each


def plan_sft(cfg: RunConfig, compute: Compute, model: Transformer, longest: int) -> MemoryPlan:
    """Plan the memory of `lowroll sft`. longest: tokens of a whole batch."""
    stays = {
        "learner's weights": weights.learner(cfg, compute, model),
        "optimiser": weights.optimizer(cfg, compute, model),
        "graphs, kernels": KERNELS if compute.device.type == "cuda" else 0,
    }
    phases = {
        "load": _loading(cfg, compute, model),
        "learn": stays | learning(cfg, compute, model, longest, 1),
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
    """Return the bytes by part of a model while it learns, at the fullest of three moments of a
    minibatch's last backward pass: its beginning, at the logits; the last block's gradients; its
    end, at the update.

    tokens: of a whole batch. has_head: whether log-probs are made; a critic has none.
    """
    share = -(-tokens // minibatches)
    together = min(cfg.train.together, share)
    passes = -(-share // cfg.train.together)
    spec, item = model.spec, compute.dtype.itemsize
    form = Learning.of(cfg, compute, model)
    size = weights.learning_size(cfg, model)
    first, last = (each * size for each in weights.gradient(cfg, compute, passes))
    kept = {"activations": form.kept(together)}
    if has_head:
        kept["replayed caches"] = replay(cfg, compute, spec, together)
    head = item * spec.vocab_size * spec.hidden_size if has_head and not cfg.train.lora else 0
    update = 4 * FLOAT * weights.largest_learning(cfg, model)
    moments = [
        {"gradients": first + head} | kept | {"a block's gradients": form.backward(together)},
        {"gradients": last} | {"update": head if compute.device.type == "cuda" else update},
    ]
    if has_head:
        chunk = logits(cfg, compute, spec, together, not cfg.train.lora)
        moments.append({"gradients": first} | kept | {"logits": chunk})
    return max(moments, key=lambda parts: sum(parts.values()))


def _loading(cfg: RunConfig, compute: Compute, model: Transformer) -> dict[str, int]:
    """Return the bytes of loading: dense weights that are quantized when they arrive, or after all
    have. Trainable weights stay dense."""
    item, lora = compute.dtype.itemsize, cfg.train.lora
    learner = weights.learner(cfg, compute, model)
    format = compute.format(cfg.rollout.weights)
    codes = weights.linear_bytes(model, format) if lora else 0
    if lora and cfg.train.uaq_scale is not None and not get_format(format).dense:
        before = weights.linear_size(model) * item - codes
        return {"learner's weights": learner, "before quantizing": max(0, before)}
    ahead = min(AHEAD + weights.largest(model) * item, weights.linear_size(model) * item)
    return {"learner's weights": learner, "arriving": ahead if lora else 0}


def _batch_tokens(cfg: RunConfig, workloads: Sequence[Workload]) -> int:
    """Return the most tokens that a batch feeds to the learner. The training workload is recognised
    by its size; evaluations do not count."""
    mine = [
        work.prompt + work.response
        for work in workloads
        if (work.groups, work.n) == (cfg.num_groups, cfg.rollouts_per_example)
    ]
    return cfg.batch_size * max(mine, default=cfg.train.together)


def _dtype(cfg: RunConfig, compute: Compute) -> torch.dtype:
    return get_format(compute.format(cfg.rollout.weights)).dtype or compute.dtype


def _cell(parts: Mapping[str, int], name: str) -> str:
    return shown(parts[name]) if parts.get(name) else ""


def shown(size: int) -> str:
    """Format bytes to three digits."""
    unit, scale = next(
        ((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6)) if size >= scale), ("kB", 1e3)
    )
    return f"{size / scale:,.0f} {unit}" if size >= 100 * scale else f"{size / scale:.3g} {unit}"
