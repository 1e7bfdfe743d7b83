"""The planned memory of a run beside what a GPU really holds, phase by phase and part by part.

A case is a run's configuration with random weights of a real model's shapes. `runs.memory.plan`
says what it will take; then the run's own parts make two steps of generate, learn, publish. Responses
are short, since the cache is there whether anyone fills it or not, and the learner's batch is made
up: full micro-batches of the longest samples that the configuration allows.

    measured    torch's peak of allocated bytes, the cache's own memory (`kv.virtual_memory`), the pools of
                the graphs, and what lies outside of torch (modules, graphs' nodes) beside the context:
                without it the run ends
    used        what the driver says beside the context, with what torch's allocator keeps for later and
                gives back when it is short

The weights are random and made on the device, so the phase in which a folder is read is planned and
not measured. A mark is a moment of a phase, with the peak since the one before. Every case runs in a process of
its own, which prints every mark.

    python -m bench.memory [--cases NAME ...] [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from bench.harness import (
    Row,
    SomeOf,
    finish,
    parser_of,
    say,
    settle,
    synchronize,
)
from bench.samples import batch_of, random_ids
from bench.shapes import SHAPES
from lowroll import Request
from lowroll.config import RunConfig, from_mapping
from lowroll.kv.capacity import Workload
from lowroll.model import lora
from lowroll.model.linear import Linear
from lowroll.model.logprobs import token_log_probs
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.runs.assembly import trainer
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.memory import sizes
from lowroll.runs.memory.plan import MemoryPlan, Planner
from lowroll.runs.rollouts import RolloutEngine
from lowroll.trainer import recompute, step
from lowroll.trainer.loop import Trainer
from lowroll.trainer.muon import hidden_matrices
from lowroll.trainer.optim import Optimizer
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.types import Batch
from lowroll.weights.publish import set_parameter

CLOSE = 10.0  # per cent that a plan may be off
STEPS = 2
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


TINY = {
    **SHAPES["qwen2.5-1.5b"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Case:
    """A model's config and the settings of a run.

    prompt: tokens of a prompt; length: tokens that a sample fills; new: tokens that are generated.
    """

    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    prompt: int = 256
    length: int = 2048
    new: int = 32

    def cfg(self, device: str) -> RunConfig:
        rollout = {"max_tokens": self.length - self.prompt + 1, **self.settings["rollout"]}
        tree = {"model": ".", "device": device, "batch_size": 128, "rollouts_per_example": 8}
        return from_mapping({**tree, **self.settings, "rollout": rollout}).resolved()


def _lora(checkpointing: float = 0.0, **rollout: Any) -> dict[str, Any]:
    return {
        "rollout": {"weights": "nvfp4", **rollout},
        "train": {
            "lora": True,
            "tokens_per_microbatch": 16384,
            "activation_checkpointing": checkpointing,
        },
    }


CASES = {
    "qwen2.5-1.5b, all weights, fp8 rollouts": Case(
        SHAPES["qwen2.5-1.5b"],
        {"rollout": {"weights": "fp8"}, "train": {"tokens_per_microbatch": 16384}},
    ),
    "qwen2.5-7b, LoRA r16 on nvfp4": Case(SHAPES["qwen2.5-7b"], _lora()),
    "qwen2.5-7b, LoRA r16 on nvfp4, keep_dense": Case(
        SHAPES["qwen2.5-7b"], _lora(0.25, keep_dense=True)
    ),
    "qwen3-30b-a3b, LoRA r16 on nvfp4": Case(
        SHAPES["qwen3-30b-a3b"],
        {
            "rollout": {"weights": "nvfp4"},
            "train": {
                "lora": True,
                "lora_target_modules": ATTENTION,
                "tokens_per_microbatch": 8192,
            },
        },
    ),
    "tiny": Case(
        TINY,
        {
            "batch_size": 16,
            "rollouts_per_example": 4,
            "rollout": {"weights": "nvfp4", "max_batch": 16},
            "train": {"lora": True, "tokens_per_microbatch": 256},
        },
        prompt=16,
        length=64,
        new=8,
    ),
}
MEASURED = tuple(name for name in CASES if name != "tiny")


@dataclass(frozen=True)
class Mark:
    """Bytes at a moment: the peak of what torch allocated since the mark before, what it has now
    allocated and reserved, the cache's own memory, and what the driver says is used beside the
    context."""

    phase: str
    name: str
    peak: int
    allocated: int
    reserved: int
    virtual: int
    used: int

    @property
    def outside(self) -> int:
        """Return the bytes that neither torch nor the cache has."""
        return max(0, self.used - self.reserved - self.virtual)


@dataclass
class Meter:
    """A recorder of marks. On a CPU there is nothing to read, and all is 0."""

    device: torch.device
    marks: list[Mark] = field(default_factory=list)
    phase: str = "load"
    virtual: Callable[[], int] = lambda: 0
    before: int = 0  # used beside this process, and by its context

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            torch.zeros(1, device=self.device)
            torch.cuda.empty_cache()
            self.before = self._used() - torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()

    def mark(self, name: str) -> Mark:
        synchronize(self.device)
        numbers = (0,) * 5
        if self.device.type == "cuda":
            numbers = (
                torch.cuda.max_memory_allocated(),
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
                self.virtual(),
                self._used() - self.before,
            )
            torch.cuda.reset_peak_memory_stats()
        mark = Mark(self.phase, name, *numbers)
        sizes = {key: size for key, size in vars(mark).items() if isinstance(size, int)}
        told = ", ".join(f"{key} {size / 1e9:.3f}" for key, size in sizes.items())
        say(f"{self.phase}: {name}: GB: {told}")
        self.marks.append(mark)
        return mark

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    @contextmanager
    def within(self) -> Iterator[None]:
        def marked(run: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.mark(before)
                found = run(*args, **kwargs)
                self.mark(after)
                return found

            return call

        log_probs = marked(token_log_probs, "forward", "logits")
        update = marked(Optimizer.update, "backward", "update")
        with (
            patch.object(step, "token_log_probs", log_probs),
            patch.object(Optimizer, "update", update),
        ):
            yield


def random_learner(cfg: RunConfig, compute: Compute, config: Mapping[str, Any]) -> Transformer:
    """Return the model that `runs.assembly.models.learner` would make, with random weights: under
    LoRA a matrix is quantized when it is there, and no two are ever dense."""
    model = Transformer(spec_from_config(dict(config)), "meta", compute.dtype)
    generator = torch.Generator(device=compute.device).manual_seed(0)
    train, format = cfg.train, get_format(compute.format(cfg.rollout.weights))
    owners = {f"{name}.weight": linear for name, linear in model.linears()}
    for name, p in list(model.named_parameters()):
        value = torch.ones(p.shape, dtype=p.dtype, device=compute.device)
        if p.ndim > 1:
            value.normal_(0.0, 0.02, generator=generator)
        owner: Linear | None = owners.get(name)
        if train.lora and owner is not None:
            owner.set_weight(format.quantize(value))
        else:
            set_parameter(model, name, value)
    model.freqs = model.freqs.to(compute.device)
    if train.lora:
        lora.attach(model, train.lora_rank, train.lora_alpha, train.lora_target_modules)
    else:
        model.requires_grad_(True)
    return recompute.apply(model.eval(), train.activation_checkpointing or False)


def batch(case: Case, cfg: RunConfig, vocab_size: int, number: int) -> Batch:
    """Return samples of the greatest length for three micro-batches."""
    tokens = cfg.train.tokens_per_microbatch
    assert tokens is not None  # `runs.memory.sizes` has chosen it
    count = 3 * tokens // case.length
    ids = random_ids(vocab_size, count, case.length + 1, seed=number)
    flat = -math.log(vocab_size)
    return batch_of(ids.tolist(), case.prompt, cfg.rollout.weights, 8, log_prob=flat, step=number)


def planner(case: Case, cfg: RunConfig, compute: Compute) -> Planner:
    model = Transformer(spec_from_config(dict(case.config)), "meta", compute.dtype)
    response = cfg.rollout.max_tokens
    work = Workload(
        cfg.num_groups, cfg.rollouts_per_example, case.prompt, response, case.length + 1
    )
    return Planner.now(compute, model, [work], {})


class Run:
    def __init__(self, case: Case, cfg: RunConfig, meter: Meter, plans: Planner) -> None:
        self.case, self.cfg, self.meter = case, cfg, meter
        compute = Compute.of(cfg)
        self.model = random_learner(cfg, compute, case.config)
        meter.mark("learner")
        meter.phase = "make"
        chat: Any = SimpleNamespace(tokenizer=None)
        self.rollouts = RolloutEngine(cfg, compute, self.model, chat, plans)
        meter.virtual = self._virtual
        meter.mark("engine, cache, watch")
        optimizer = Optimizer(
            self.model.trainable_parameters(), trainer.optim(cfg), hidden_matrices(self.model)
        )
        channel = MemoryRolloutChannel()
        self.trainer = Trainer(self.model, optimizer, trainer.learn(cfg), channel, self._publish)
        meter.mark("made")

    def _virtual(self) -> int:
        cache = self.rollouts.engine.runner.cache  # type: ignore[attr-defined]
        return 0 if cache.released else int(cache.virtual_memory_bytes)

    def _publish(self, version: int) -> Mapping[str, float]:
        self.meter.mark("end of learning")
        self.meter.phase = "publish"
        metrics = self.rollouts.publish(version)
        self.meter.mark("publish")
        return metrics

    def step(self, number: int) -> None:
        vocab, cfg = self.model.spec.vocab_size, self.cfg
        prompts = random_ids(vocab, cfg.num_groups, self.case.prompt, seed=number).tolist()
        samples, new = cfg.rollouts_per_example, self.case.new
        requests = [
            Request(ids, n=samples, max_tokens=new, min_tokens=new, ignore_eos=True, seed=number)
            for ids in prompts
        ]
        self.meter.phase = "generate"
        self.rollouts.generate(requests)
        self.meter.mark("generate")
        if self.meter.device.type == "cuda":
            torch.cuda.empty_cache()  # what is reserved from here on belongs to the graphs
        self.meter.mark("graphs' pools")
        if cfg.rollout.release_cache:
            self.rollouts.engine.release()
        self.meter.phase = "learn"
        with self.meter.within():
            self.trainer.step(batch(self.case, cfg, vocab, number))


def measure(name: str, device: torch.device) -> list[Row]:
    case = CASES[name]
    cfg = case.cfg(device.type)
    meter = Meter(device)
    plans = planner(case, cfg, Compute.of(cfg))
    cfg = sizes.chosen(plans, cfg)
    planned = plans.plan(cfg)
    run = Run(case, cfg, meter, plans)
    for number in range(1, STEPS + 1):
        run.step(number)
    print("\n".join(planned.lines()))
    return compare(name, planned, meter.marks)


def compare(name: str, planned: MemoryPlan, marks: Sequence[Mark]) -> list[Row]:
    more = _pools(marks) + max(mark.outside for mark in marks)
    measured = {
        phase: max(mark.peak + mark.virtual for mark in marks if mark.phase == phase) + more
        for phase in ("generate", "learn", "publish")
    }
    rows = [
        Row(
            f"{name}: {phase}, planned / measured",
            "GB",
            planned.total(phase) / 1e9,
            size / 1e9,
            planned.total(phase) / max(1, size),
        )
        for phase, size in measured.items()
    ]
    if used := max(mark.used for mark in marks):
        rows += [
            _error(name, "measured", planned.peak, max(measured.values())),
            _error(name, "used", planned.peak, used),
        ]
    return rows


def _pools(marks: Sequence[Mark]) -> int:
    """Return the bytes that the first graphs made torch reserve."""
    first = [next(m for m in marks if m.name == name) for name in ("made", "graphs' pools")]
    before, after = (mark.reserved - mark.allocated for mark in first)
    return max(0, after - before)


def _error(name: str, against: str, planned: int, peak: int) -> Row:
    return Row(
        f"{name}: planned peak, off by so much of what is {against}",
        "%",
        100 * abs(planned / peak - 1),
        must=CLOSE,
        goal="ours at most",
        note=f"planned {planned / 1e9:.1f} GB, {against} {peak / 1e9:.1f} GB",
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, cases=SomeOf(CASES, MEASURED), device="auto")
    args = parser.parse_args(argv)
    device, out = settle(parser, args.device, args.out)
    if len(args.cases) > 1:
        told = [sys.executable, "-m", "bench.memory", "--device", str(device), "--out", str(out)]
        return max(
            subprocess.run([*told, "--cases", name], timeout=600).returncode for name in args.cases
        )
    (name,) = args.cases
    return finish("Planned and measured memory", "memory", measure(name, device), out, steps=STEPS)


if __name__ == "__main__":
    raise SystemExit(main())
