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

The peer runs in the settings of PEER_SETTINGS: all rows at once with gradient checkpointing or
without, and half of them twice without. Those that do not fit are left out; the fastest is what
ours is held against, in speed and in memory. A row beside them has its least memory with the 16,384
tokens at once. Ours has one setting for all rows; a row of its own is ours with forward and input
gradients in fp8 (`train.forward` and `train.backward`), beside ours. A side is built anew for each
of its turns, so the memory of the other is never in its peak, and runs one step that is not timed.

    python -m bench.train [--models qwen2.5-1.5b,qwen2.5-7b] [--rounds 3] [--no-peer] [--out FOLDER]
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.harness import Row, finish, parser_of, settle, speed_row
from bench.samples import batch_of
from bench.shapes import SHAPES, random_model
from lowroll.model import lora
from lowroll.objectives.objective import select
from lowroll.trainer import recompute
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, learn
from lowroll.types import Batch
from lowroll.weights import aligned

RANK, ALPHA, RATE = 16, 32.0, 1e-5
STEPS = 3  # timed steps of a turn


@dataclass(frozen=True)
class Job:
    """What is trained: a model's config, with an adapter or in full, on `rows` sequences of
    `length` tokens."""

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

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def title(self) -> str:
        what = f"{'LoRA r16' if self.lora else 'full'}{' in fp8' if self.fp8 else ''}"
        return f"{self.name} {what}, {self.tokens} tokens"


JOBS = {
    "qwen2.5-1.5b": Job("qwen2.5-1.5b", SHAPES["qwen2.5-1.5b"], lora=False, logprob_chunk=4096),
    "qwen2.5-7b": Job("qwen2.5-7b", SHAPES["qwen2.5-7b"], lora=True, checkpointing=0.15),
}
MUST = {"qwen2.5-1.5b": (1.3, 1.6), "qwen2.5-7b": (1.4, 2.0)}  # (must, aim) of the speed
MUST_MEMORY = (0.6, 0.4)
MUST_FP8 = {"qwen2.5-1.5b": (56e3, 60e3), "qwen2.5-7b": (21e3, 24e3)}  # tokens/s


@dataclass(frozen=True)
class PeerSetting:
    """How the peer gets through its rows: in how many pieces, and with checkpointing or not."""

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
    """Groups of 4 responses of `length` tokens to prompts of one, with advantages of both signs."""
    generator = torch.Generator().manual_seed(1)
    vocab, size = job.config["vocab_size"], (job.length + 1,)
    rows = [torch.randint(0, vocab, size, generator=generator).tolist() for _ in range(job.rows)]
    return batch_of(rows, prompt=1, weights="bf16", group=4)


def ours(job: Job) -> Callable[[], object]:
    """A call that makes one step with the trainer."""
    model = random_model(job.config, job.device, job.dtype).train()
    if job.lora:
        lora.attach(model, RANK, ALPHA)
    else:
        model.requires_grad_(True)
    if job.fp8:
        aligned.transpose(aligned.align(model, "fp8"))
    recompute.apply(model, job.checkpointing)
    optimizer = Optimizer(model.trainable_parameters(), OptimSettings(learning_rate=RATE))
    settings = LearnSettings(
        select("grpo"), tokens_per_microbatch=job.tokens, logprob_chunk=job.logprob_chunk
    )
    steps = batch(job)
    return lambda: learn(model, steps, optimizer, settings)


def peer(job: Job, setting: PeerSetting) -> Callable[[], object]:
    """A call that makes one step with transformers, and PEFT for an adapter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        **{key: value for key, value in job.config.items() if key != "torch_dtype"}
    )
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=job.dtype, attn_implementation="sdpa"
        )
    model.train()
    if setting.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job.lora:
        from peft import LoraConfig, get_peft_model

        if setting.checkpointing:
            model.enable_input_require_grads()
        model = get_peft_model(
            model,
            LoraConfig(
                r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=list(lora.TARGETS)
            ),
        )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE, fused=True
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        0, job.config["vocab_size"], (job.rows, job.length), generator=generator
    ).to(job.device)

    def step() -> None:
        for piece in ids.chunk(setting.pieces):
            (model(input_ids=piece, labels=piece, use_cache=False).loss / setting.pieces).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def turn(build: Callable[[], Callable[[], object]], steps: int, on_cuda: bool) -> Turn:
    """Build a side, warm it up, time its steps, and forget it."""
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(build(), steps, on_cuda)
    return Turn(seconds, torch.cuda.max_memory_allocated() if on_cuda else 0)


def timed(step: Callable[[], object], steps: int, on_cuda: bool) -> float:
    """Median seconds of a step; the first is not counted."""
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    seconds = []
    for _ in range(1 + steps):
        wait()
        began = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def fitting(job: Job) -> dict[PeerSetting, Turn]:
    """A turn of the peer in every setting that fits."""
    found = {}
    for setting in PEER_SETTINGS:
        try:
            found[setting] = turn(lambda s=setting: peer(job, s), 1, job.device == "cuda")  # type: ignore[misc]
            print(
                f"{job.title}: peer, {setting}: {job.tokens / found[setting].seconds:,.0f} tokens/s, "
                f"{found[setting].bytes / 2**30:.1f} GiB",
                file=sys.stderr,
            )
        except torch.OutOfMemoryError:
            print(f"{job.title}: peer, {setting}: does not fit", file=sys.stderr)
    return found


def compare(
    job: Job,
    rounds: int,
    must: tuple[float, float],
    steps: int = STEPS,
    must_fp8: tuple[float | None, float | None] = (None, None),
) -> list[Row]:
    """All sides in turns; the rows of speed and, on CUDA, of memory."""
    on_cuda, tried = job.device == "cuda", fitting(job)
    fastest = min(tried, key=lambda s: tried[s].seconds)
    builds: dict[str, Callable[[], Callable[[], object]]] = {
        "ours": lambda: ours(job),
        "fp8": lambda: ours(replace(job, fp8=True)),
        "peer": lambda: peer(job, fastest),
    }
    sides: dict[str, list[Turn]] = {side: [] for side in builds}
    for number in range(rounds):
        for side, build in builds.items():
            sides[side].append(turn(build, steps, on_cuda))
        told = ", ".join(
            f"{side} {job.tokens / turns[-1].seconds:,.0f} tokens/s"
            for side, turns in sides.items()
        )
        print(f"{job.title}: round {number + 1} of {rounds}: {told}", file=sys.stderr)
    seconds = {side: [t.seconds for t in turns] for side, turns in sides.items()}
    ratios = [theirs / mine for mine, theirs in zip(seconds["ours"], seconds["peer"], strict=True)]
    speed = Row(
        f"{job.title}: transformers{' + PEFT' if job.lora else ''} ({fastest})",
        "tokens/s",
        job.tokens / statistics.median(seconds["ours"]),
        job.tokens / statistics.median(seconds["peer"]),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        *must,
    )
    rows = [speed, low_bit(job, seconds["fp8"], seconds["ours"], must_fp8)]
    if not on_cuda:
        return rows
    peak = max(t.bytes for t in sides["ours"])

    def memory(setting: PeerSetting, what: str, must: tuple[float | None, float | None]) -> Row:
        theirs = tried[setting].bytes
        return Row(
            f"{job.title}: peak memory, ours / the peer's {what}",
            "GiB",
            peak / 2**30,
            theirs / 2**30,
            peak / theirs,
            None,
            *must,
            goal="ratio at most",
            note=f"the peer: {setting}",
        )

    whole = [setting for setting in tried if setting.pieces == 1]
    return [
        *rows,
        memory(fastest, "at that speed", MUST_MEMORY),
        *(
            [memory(min(whole, key=lambda s: tried[s].bytes), "least", (None, None))]
            if whole
            else []
        ),
    ]


def ours_alone(
    job: Job, rounds: int, steps: int, must: tuple[float | None, float | None]
) -> list[Row]:
    """Ours in fp8 and dense in turns."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for fp8 in seconds:
            one = replace(job, fp8=fp8)
            made = turn(partial(ours, one), steps, job.device == "cuda")
            seconds[fp8].append(made.seconds)
            told = f"{job.tokens / made.seconds:,.0f} tokens/s, {made.bytes / 2**30:.1f} GiB"
            print(f"{job.title}: {'fp8' if fp8 else job.dtype}: {told}", file=sys.stderr)
    return [low_bit(job, seconds[True], seconds[False], must)]


def low_bit(
    job: Job,
    fp8: list[float],
    dense: list[float],
    must: tuple[float | None, float | None],
) -> Row:
    """The row of the learner in fp8 over the dense one, of seconds a step."""
    row = speed_row(
        f"{job.title}: forward and input gradients in fp8 / {str(job.dtype)[6:]}",
        job.tokens,
        "tokens/s",
        fp8,
        dense,
        must[0],
    )
    return replace(row, aim=must[1], goal="ours at least")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--no-peer", action="store_true", help="ours in fp8 and dense alone")
    parser.add_argument("--models", default=",".join(JOBS), help=f"out of {', '.join(JOBS)}")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a turn")
    parser.add_argument(
        "--checkpointing", help="ours, in the place of the default: all, or a share of the layers"
    )
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for name in args.models.split(","):
        if name not in JOBS:
            parser.error(f"--models: unknown {name!r}; expected some of {', '.join(JOBS)}")
        job = JOBS[name]
        _, args.out = settle(parser, job.device, args.out)
        if args.checkpointing:
            job = replace(
                job, checkpointing=args.checkpointing == "all" or float(args.checkpointing)
            )
        if args.no_peer:
            rows += ours_alone(job, args.rounds, args.steps, MUST_FP8[name])
        else:
            rows += compare(job, args.rounds, MUST[name], args.steps, MUST_FP8[name])
    settings = {"rounds": args.rounds, "steps": args.steps, "length": 2048}
    return finish("Training", "train", rows, args.out, **settings)


if __name__ == "__main__":
    raise SystemExit(main())
