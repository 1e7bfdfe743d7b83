"""The learner on n GPUs over one: tokens a second, peak memory of a GPU, and what publishing costs.

    python -m bench.learners                                  two GPUs of one host
    python -m bench.learners --jobs qwen2.5-7b-lora --ranks 1,2,4
    python -m bench.learners --jobs tiny,tiny-lora --cpu --no-peer

Work: 65,536 tokens a step in 32 sequences of 2,048, the same whatever the number of ranks, random
weights of the exact Qwen2.5 shapes in bfloat16, one AdamW update a step on float32 masters.

    ours    `trainer.step.learn`, all of it; on several ranks FSDP2 (`parallel.sharding`), or the whole base and
            gradients that are added where an adapter learns (`parallel.ranks`)
    peer    transformers with SDPA attention and its own loss, FSDP2 by accelerate (DDP and PEFT for an adapter),
            bfloat16 passes over float32 weights, gradient checkpointing, rows in as many pieces as fit ours

Every side runs in processes of its own, both at once where each has GPUs of its own; a row says what
did not fit, by the last line of who ended first. Seconds of publishing: gathering the weights on rank
0, and `Broadcaster.publish` into a folder in memory, with the bytes that engines then read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.broadcast import TINY
from bench.record import Row, merge, settle, show
from bench.shapes import SHAPES, random_model
from bench.train import ALPHA, RANK, RATE, Job, batch, timed
from lowroll.model import lora
from lowroll.objectives.objective import select
from lowroll.parallel.ranks import ALONE, Group, Ranks
from lowroll.parallel.sharding import Sharded
from lowroll.runs.launch.process import reserved
from lowroll.trainer import recompute
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, learn
from lowroll.weights.broadcast import Broadcaster

ROWS, LENGTH, MICRO = 32, 2048, 16384
DEADLINE_S = 1500.0  # of a side
SMALL = {"rows": 8, "length": 32, "dtype": torch.float32}
JOBS = {
    "qwen2.5-1.5b-full": Job("qwen2.5-1.5b", SHAPES["qwen2.5-1.5b"], False, ROWS, LENGTH),
    "qwen2.5-7b-lora": Job(
        "qwen2.5-7b", SHAPES["qwen2.5-7b"], True, ROWS, LENGTH, checkpointing=0.15
    ),
    "qwen2.5-7b-full": Job(
        "qwen2.5-7b", SHAPES["qwen2.5-7b"], False, ROWS, LENGTH, checkpointing=True
    ),
    "tiny": Job("tiny", TINY, False, **SMALL),
    "tiny-lora": Job("tiny", TINY, True, **SMALL),
}
MEASURED = tuple(name for name in JOBS if not name.startswith("tiny"))
MUST, AIM = 1.85, 1.95  # of two ranks over one
Found = dict[str, Any]


# -- one rank --------------------------------------------------------------------------------------


@contextmanager
def seated(job: Job, rank: int, size: int, port: int) -> Iterator[Ranks]:
    """This process among those of its side."""
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    if size == 1:
        yield ALONE
        return
    kind = Group if job.lora else Sharded
    ranks = kind(rank, size, "127.0.0.1", port, device, DEADLINE_S)
    try:
        yield ranks
    finally:
        ranks.close()


def ours(job: Job, rank: int, size: int, port: int, steps: int) -> Found:
    """Seconds of a step, and of publishing."""
    with seated(job, rank, size, port) as ranks:
        device = f"cuda:{rank}" if job.device == "cuda" else "cpu"
        model = random_model(job.config, device, job.dtype).train()
        if job.lora:
            lora.attach(model, RANK, ALPHA)
        else:
            model.requires_grad_(True)
        ranks.shard(recompute.apply(model, job.checkpointing))
        optim = OptimSettings(learning_rate=RATE)
        optimizer = Optimizer(model.trainable_parameters(), optim, ranks=ranks)
        settings = LearnSettings(
            select("grpo"), tokens_per_microbatch=micro(job), logprob_chunk=job.logprob_chunk
        )
        work = batch(job)
        seconds = timed(
            lambda: learn(model, work, optimizer, settings), steps, job.device == "cuda"
        )
        found = {"seconds": seconds, "bytes": peak(job)}
        return found | published(job, ranks, model)


def published(job: Job, ranks: Ranks, model: Any) -> Found:
    """Seconds of a second publication: of the first one memory is new."""
    whole = ranks.mirror(model)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        broadcaster = None
        if ranks.leads:
            assert whole is not None
            broadcaster = Broadcaster(Path(folder) / "w", whole, attempt=1, keep=1)
        for version in (1, 2):
            ranks.meet("a publication")
            began = time.perf_counter()
            ranks.refill(whole, model)
            gathered = time.perf_counter()
            metrics = {} if broadcaster is None else broadcaster.publish(version)
            ended = time.perf_counter()
            ranks.meet("the end of a publication")
    return {
        "gather_s": gathered - began,
        "write_s": ended - gathered,
        "published_bytes": metrics.get("perf/broadcast_bytes"),
    }


def peer(job: Job, rank: int, size: int, port: int, steps: int) -> Found:
    """Seconds of a step of transformers and accelerate."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from transformers import AutoConfig, AutoModelForCausalLM

    plugin = None
    if size > 1 and not job.lora:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
            reshard_after_forward=True,
        )
    low = "bf16" if job.dtype == torch.bfloat16 else "no"
    accelerator = Accelerator(cpu=job.device == "cpu", mixed_precision=low, fsdp_plugin=plugin)
    plain = {key: value for key, value in job.config.items() if key != "torch_dtype"}
    config = AutoConfig.for_model(**plain)
    dtype = job.dtype if job.lora else torch.float32
    with accelerator.device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        targets = list(lora.TARGETS)
        model = get_peft_model(
            model,
            LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=targets),
        )
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATE, fused=job.device == "cuda")
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = job.rows // size
    ids = torch.randint(0, job.config["vocab_size"], (rows, job.length)).to(accelerator.device)
    pieces = ids.split(max(1, micro(job) // job.length))

    def step() -> None:
        for piece in pieces:
            loss = model(input_ids=piece, labels=piece, use_cache=False).loss / len(pieces)
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = timed(step, steps, job.device == "cuda")
    accelerator.end_training()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {"seconds": seconds, "bytes": peak(job)}


SIDES = {"ours": ours, "peer": peer}


def micro(job: Job) -> int:
    """Tokens of a micro-batch: a quarter of a step's at most."""
    return min(MICRO, job.tokens // 4)


def peak(job: Job) -> int:
    """Bytes that torch had at most on this rank's device; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if job.device == "cuda" else 0


# -- a side ----------------------------------------------------------------------------------------


def beside(name: str, size: int, args: argparse.Namespace, scratch: Path) -> dict[str, Found]:
    """What each side found on so many ranks: both at once where each has GPUs of its own."""
    sides = ("ours",) if args.no_peer else ("ours", "peer")
    apart = not args.cpu and torch.cuda.device_count() >= size * len(sides)
    with ThreadPoolExecutor(len(sides) if apart else 1) as running:
        found = {
            which: running.submit(side, name, which, size, i * size * apart, args, scratch)
            for i, which in enumerate(sides)
        }
        return {which: future.result() for which, future in found.items()}


def side(
    name: str, which: str, size: int, first: int, args: argparse.Namespace, scratch: Path
) -> Found:
    """What rank 0 of a side found on the GPUs from `first` on, or {"failed": the last line of who
    ended first}."""
    meeting = reserved("127.0.0.1")  # nobody else gets the port before rank 0 listens there
    port = meeting.getsockname()[1]
    where = scratch / f"{name}-{which}-{size}"
    words = [sys.executable, "-m", "bench.learners", "--jobs", name, "--side", which]
    words += ["--steps", str(args.steps), "--port", str(port), "--found", str(where)]
    words += ["--cpu"] if args.cpu else []
    gpus = ",".join(str(first + rank) for rank in range(size))
    env = os.environ | ({"OMP_NUM_THREADS": "1"} if args.cpu else {"CUDA_VISIBLE_DEVICES": gpus})
    logs = [where.with_suffix(f".{rank}.log") for rank in range(size)]
    started = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            place = ["--rank", str(rank), "--ranks", str(size)]
            started.append(subprocess.Popen([*words, *place], env=env, stdout=out, stderr=out))
    try:
        return awaited(started, logs, where)
    finally:
        meeting.close()
        for process in started:
            process.kill()
            process.wait(30)


def awaited(started: list[subprocess.Popen[bytes]], logs: list[Path], where: Path) -> Found:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        codes = [process.poll() for process in started]
        if all(code == 0 for code in codes):
            found: Found = json.loads(where.read_text())
            return found
        lost = next((i for i, code in enumerate(codes) if code), None)
        if lost is not None:
            lines = logs[lost].read_text(errors="replace").strip().splitlines() or ["no word"]
            return {"failed": f"rank {lost}: {lines[-1][:200]}"}
        time.sleep(0.2)
    return {"failed": f"not over in {DEADLINE_S:g} s"}


# -- rows ------------------------------------------------------------------------------------------


def rows_of(job: Job, mine: dict[int, Found], theirs: dict[int, Found]) -> list[Row]:
    """Of a job on each number of ranks."""
    rows = []
    one = mine.get(1, {})
    for size, found in mine.items():
        title = f"{job.title}, {size} GPU{'s' if size > 1 else ''}"
        if "failed" in found:
            rows.append(Row(title, "tokens/s", None, note=f"does not run: {found['failed']}"))
            continue
        speed, other = job.tokens / found["seconds"], theirs.get(size, {})
        their = job.tokens / other["seconds"] if "seconds" in other else None
        note = f"the peer does not run: {other['failed']}" if "failed" in other else ""
        ratio = None if their is None else speed / their
        rows.append(Row(f"{title}: accelerate", "tokens/s", speed, their, ratio, note=note))
        if size > 1 and "seconds" in one:
            gain = one["seconds"] / found["seconds"]
            alone = job.tokens / one["seconds"]
            bounds = (MUST, AIM) if size == 2 and job.device == "cuda" else (None, None)
            rows.append(
                Row(f"{title}: over one GPU", "tokens/s", speed, alone, gain, None, *bounds)
            )
        if found["bytes"]:
            theirs_gb = other["bytes"] / 2**30 if "bytes" in other else None
            rows.append(Row(f"{title}: peak memory", "GiB", found["bytes"] / 2**30, theirs_gb))
        for what, key, unit in (
            ("gathering the weights", "gather_s", "s"),
            ("writing a version", "write_s", "s"),
            ("a version", "published_bytes", "bytes"),
        ):
            rows.append(Row(f"{title}: {what}", unit, found[key]))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", default=",".join(MEASURED), help=f"out of {', '.join(JOBS)}")
    parser.add_argument("--ranks", default="1,2", help="numbers of GPUs")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a side")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path)
    for hidden, kind in (("side", str), ("rank", int), ("port", int), ("found", Path)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.jobs.split(",")
    if unknown := [name for name in names if name not in JOBS]:
        parser.error(f"--jobs: unknown {unknown[0]!r}; expected some of {', '.join(JOBS)}")
    jobs = {name: replace(JOBS[name], device="cpu" if args.cpu else "cuda") for name in names}
    if args.side:
        torch.set_num_threads(1 if args.cpu else torch.get_num_threads())
        found = SIDES[args.side](jobs[names[0]], args.rank, int(args.ranks), args.port, args.steps)
        if args.rank == 0:
            args.found.write_text(json.dumps(found))
        return 0
    sizes = [int(size) for size in args.ranks.split(",")]
    _, args.out = settle(parser, "cpu" if args.cpu else "cuda", args.out)
    if not args.cpu and torch.cuda.device_count() < max(sizes):
        parser.error(f"--ranks: {max(sizes)} GPUs are asked for, and there are fewer")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, job in jobs.items():
            by_size = {size: beside(name, size, args, Path(scratch)) for size in sizes}
            print(f"{name}: {by_size}", file=sys.stderr)
            mine, theirs = ({n: by.get(which, {}) for n, by in by_size.items()} for which in SIDES)
            rows += rows_of(job, mine, theirs)
            merge("learners", rows, args.out, steps=args.steps, length=LENGTH)
    met = show("Learner ranks", rows)
    print(args.out / "learners.json")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
