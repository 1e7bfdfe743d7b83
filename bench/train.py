"""The learner against transformers (and PEFT for an adapter): tokens a second and peak memory of a
training step.

Work: 16,384 tokens a step in 8 sequences of 2,048, random weights of the exact Qwen2.5 shapes in
bfloat16, one AdamW update a step. Every token but the first of a sequence carries loss.

    ours    `trainer.step.learn` on a batch of such sequences, all of it: packing, forward, log-probs and entropies of
            the drawn tokens, the clipped objective, backward, the statistics of the step, AdamW on
            float32 masters.
    peer    AutoModelForCausalLM with SDPA attention, its own loss (cross entropy of its logits), fused AdamW on its
            parameters as they are: bfloat16 when all learn, PEFT's float32 adapter otherwise. Rank
            16, all linears.

Ours is held against the fastest of PEER_SETTINGS that fits, in speed and in memory. A row beside them
has the peer's least memory with the 16,384 tokens at once; another is ours with forward and input
gradients in fp8 (`train.forward` and `train.backward`), beside ours. A side is built anew for each
of its turns, so the memory of the other is never in its peak, and runs one step that is not timed.

    python -m bench.train [--models qwen2.5-1.5b,qwen2.5-7b] [--rounds 3] [--no-peer] [--out FOLDER]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.harness import (
    Row,
    SomeOf,
    finish,
    in_turns,
    parser_of,
    release,
    say,
    seconds_of,
    settle,
    speed_row,
)
from bench.samples import batch_of, random_ids
from bench.shapes import SHAPES, random_model
from lowroll.model import lora
from lowroll.model.transformer import Transformer
from lowroll.objectives.objective import select
from lowroll.parallel.ranks import ALONE, Ranks
from lowroll.trainer import recompute
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, learn
from lowroll.types import Batch
from lowroll.weights import aligned_forward

RANK, ALPHA, RATE = 16, 32, 1e-5
STEPS = 3  # timed steps of a turn
Bounds = tuple[float | None, float | None]  # must and aim
NONE: Bounds = (None, None)
Build = Callable[[], Callable[[], object]]  # a side's step


@dataclass(frozen=True)
class Job:
    """A model that is trained, with an adapter or in full, on `rows` sequences of `length`
    tokens."""

    name: str
    config: dict[str, Any]
    lora: bool
    rows: int = 8
    length: int = 2048
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool | float = False  # ours: `trainer.recompute.apply`
    logprob_chunk: int = 1024
    fp8: bool = False  # ours: forward and input gradients by products of e4m3 codes
    must: Bounds = NONE  # of the speed over the peer's
    must_fp8: Bounds = NONE  # tokens/s

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def title(self) -> str:
        what = f"{'LoRA r16' if self.lora else 'full'}{' in fp8' if self.fp8 else ''}"
        return f"{self.name} {what}, {self.tokens} tokens"


JOBS = {
    "qwen2.5-1.5b": Job(
        "qwen2.5-1.5b",
        SHAPES["qwen2.5-1.5b"],
        lora=False,
        logprob_chunk=4096,
        must=(1.3, 1.6),
        must_fp8=(56e3, 60e3),
    ),
    "qwen2.5-7b": Job(
        "qwen2.5-7b",
        SHAPES["qwen2.5-7b"],
        lora=True,
        checkpointing=0.15,
        must=(1.4, 2.0),
        must_fp8=(21e3, 24e3),
    ),
}
MUST_MEMORY = (0.6, 0.4)


@dataclass(frozen=True)
class PeerSetting:
    """The number of pieces of the peer's rows, and its gradient checkpointing."""

    pieces: int
    checkpointing: bool

    def __str__(self) -> str:
        return f"{self.pieces} x rows/{self.pieces}, {'with' if self.checkpointing else 'no'} checkpointing"


PEER_SETTINGS = (PeerSetting(1, True), PeerSetting(1, False), PeerSetting(2, False))


@dataclass(frozen=True)
class Turn:
    """Seconds of a step (the median of a turn's) and the peak of allocated bytes."""

    seconds: float
    bytes: int


def batch(job: Job) -> Batch:
    """Return groups of 4 responses of `length` tokens to prompts of one."""
    ids = random_ids(job.config["vocab_size"], job.rows, job.length + 1)
    return batch_of(ids.tolist(), prompt=1, weights="bf16", group=4)


def learner(job: Job) -> Transformer:
    model = random_model(job.config, job.device, job.dtype).train()
    if job.lora:
        lora.attach(model, RANK, ALPHA)
    else:
        model.requires_grad_(True)
    if job.fp8:
        aligned_forward.transpose(aligned_forward.align(model, "fp8"))
    return model


def peer_model(job: Job, dtype: torch.dtype, checkpointing: bool, device: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in job.config.items() if key != "torch_dtype"}
    config = AutoConfig.for_model(**plain)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return adapted(model.train(), job.lora, checkpointing)


def adapted(model: Any, is_lora: bool, checkpointing: bool) -> Any:
    """Return transformers' model with gradient checkpointing and PEFT's adapter, where asked for."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    if checkpointing:
        model.enable_input_require_grads()
    targets = list(lora.TARGETS)
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=targets)
    return get_peft_model(model, adapter)


def ours(job: Job) -> Callable[[], object]:
    model = recompute.apply(learner(job), job.checkpointing)
    return step_of(job, model, job.tokens)


def step_of(
    job: Job, model: Transformer, microbatch: int, ranks: Ranks = ALONE
) -> Callable[[], object]:
    """Return a call that makes one update of a model in micro-batches of so many tokens."""
    optim = OptimSettings(learning_rate=RATE)
    optimizer = Optimizer(model.trainable_parameters(), optim, ranks=ranks)
    settings = LearnSettings(
        select("grpo"), tokens_per_microbatch=microbatch, logprob_chunk=job.logprob_chunk
    )
    work = batch(job)
    return lambda: learn(model, work, optimizer, settings)


def peer(job: Job, setting: PeerSetting) -> Callable[[], object]:
    model = peer_model(job, job.dtype, setting.checkpointing, job.device)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, fused=True)
    ids = random_ids(job.config["vocab_size"], job.rows, job.length).to(job.device)

    def step() -> None:
        for piece in ids.chunk(setting.pieces):
            (model(input_ids=piece, labels=piece, use_cache=False).loss / setting.pieces).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def turn(build: Build, steps: int, on_cuda: bool) -> Turn:
    """Build a side, warm it up, time its steps, and forget it."""
    release()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(build(), steps, on_cuda)
    return Turn(seconds, torch.cuda.max_memory_allocated() if on_cuda else 0)


def timed(step: Callable[[], object], steps: int, on_cuda: bool) -> float:
    """Return the median seconds of a step; the first is not counted."""
    device = torch.device("cuda" if on_cuda else "cpu")
    return statistics.median([seconds_of(step, device) for _ in range(1 + steps)][1:])


def fitting(job: Job) -> dict[PeerSetting, Turn]:
    """Return a turn of the peer in every setting that fits."""
    found = {}
    for setting in PEER_SETTINGS:
        try:
            found[setting] = turn(partial(peer, job, setting), 1, job.device == "cuda")
            told = f"{job.tokens / found[setting].seconds:,.0f} tokens/s"
            say(f"{job.title}: peer, {setting}: {told}, {found[setting].bytes / 2**30:.1f} GiB")
        except torch.OutOfMemoryError:
            say(f"{job.title}: peer, {setting}: does not fit")
    return found


def compare(job: Job, rounds: int, steps: int = STEPS, with_peer: bool = True) -> list[Row]:
    """Run all sides in turns, or ours alone; return the rows of speed and, on CUDA, of memory."""
    tried = fitting(job) if with_peer else {}
    builds = {"ours": partial(ours, job), "fp8": partial(ours, replace(job, fp8=True))}
    if with_peer:
        fastest = min(tried, key=lambda s: tried[s].seconds)
        builds["peer"] = partial(peer, job, fastest)
    on_cuda = job.device == "cuda"
    turns = {side: partial(turn, build, steps, on_cuda) for side, build in builds.items()}
    sides = in_turns(turns, rounds, title=f"{job.title}, ")
    seconds = {side: [t.seconds for t in found] for side, found in sides.items()}
    rows = [low_bit(job, seconds)]
    if not with_peer:
        return rows
    name = f"{job.title}: transformers{' + PEFT' if job.lora else ''} ({fastest})"
    speeds = seconds["ours"], seconds["peer"]
    rows.insert(0, speed_row(name, job.tokens, "tokens/s", *speeds, *job.must))
    if on_cuda:
        peak = max(t.bytes for t in sides["ours"])
        rows.append(memory(job, peak, "at that speed", fastest, tried, MUST_MEMORY))
        if whole := [setting for setting in tried if setting.pieces == 1]:
            least = min(whole, key=lambda s: tried[s].bytes)
            rows.append(memory(job, peak, "least", least, tried, NONE))
    return rows


def memory(
    job: Job,
    peak: int,
    what: str,
    setting: PeerSetting,
    tried: Mapping[PeerSetting, Turn],
    bounds: Bounds,
) -> Row:
    """Return the row of our peak of memory beside the peer's in a setting."""
    theirs = tried[setting].bytes
    return Row(
        f"{job.title}: peak memory, ours / the peer's {what}",
        "GiB",
        peak / 2**30,
        theirs / 2**30,
        peak / theirs,
        None,
        *bounds,
        goal="ratio at most",
        note=f"the peer: {setting}",
    )


def low_bit(job: Job, seconds: Mapping[str, list[float]]) -> Row:
    row = speed_row(
        f"{job.title}: forward and input gradients in fp8 / {str(job.dtype)[6:]}",
        job.tokens,
        "tokens/s",
        seconds["fp8"],
        seconds["ours"],
        *job.must_fp8,
    )
    return replace(row, goal="ours at least")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, models=SomeOf(JOBS), rounds=3, steps=STEPS, no_peer=False)
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for name in args.models:
        job = JOBS[name]
        _, args.out = settle(parser, job.device, args.out)
        rows += compare(job, args.rounds, args.steps, with_peer=not args.no_peer)
    settings = {"rounds": args.rounds, "steps": args.steps, "length": 2048}
    return finish("Training", "train", rows, args.out, **settings)


if __name__ == "__main__":
    raise SystemExit(main())
