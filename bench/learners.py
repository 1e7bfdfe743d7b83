"""The learner on n GPUs over one: tokens a second, peak memory of a GPU, and what publishing costs.

    python -m bench.learners                                  two GPUs of one host
    python -m bench.learners --jobs qwen2.5-7b-lora --ranks 1,2,4
    python -m bench.learners --jobs tiny,tiny-lora --cpu --no-peer

Work: 65,536 tokens a step in 32 sequences of 2,048, whatever the number of ranks, random weights in
bfloat16, one AdamW update a step on float32 masters.

    ours    `trainer.step.learn`, all of it; on several ranks FSDP2 (`parallel.sharding`), or the whole base and
            gradients that are added where an adapter learns (`parallel.ranks`)
    peer    transformers with SDPA attention and its own loss, FSDP2 by accelerate (DDP and PEFT for an adapter),
            bfloat16 passes over float32 weights, gradient checkpointing, rows in as many pieces as fit ours

Every side runs in processes of its own, both at once where each has GPUs of its own.

Publishing goes to two engines at once, bf16 ones and then fp8 ones, on the ranks' own GPUs. Seconds:
gathering the weights on rank 0, `FolderPublisher.publish` into a folder in memory, and until both engines
hold them. Engines quantize what they read, so the bytes of a version are the learner's, whatever their
format. A learner in fp8 (`train.forward: fp8`, the jobs that end with fp8) has their codes, and sends
fp8 engines what an update has changed in them. Of an adapter no engine is asked.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.harness import Results, Row, SomeOf, parser_of, say, settle
from bench.peer import Peer, PeerFailed
from bench.reader import WAIT_S, reader
from bench.shapes import SHAPES, TINY
from bench.train import RATE, Job, learner, peer_model, step_of, timed
from bench.worker import Answer, serve
from lowroll.model import hf
from lowroll.model.transformer import Transformer
from lowroll.parallel.ranks import ALONE, RankGroup, Ranks
from lowroll.parallel.sharding import Sharded
from lowroll.runs.roles.local import reserve_port
from lowroll.trainer import recompute
from lowroll.weights.sync.changes import Shadow
from lowroll.weights.sync.folder import FolderPublisher

ROWS, LENGTH, MICRO = 32, 2048, 16384
DEADLINE_S = 1500.0  # of a side
RANK = "rank"  # the word that starts one
SMALL: dict[str, Any] = {"rows": 8, "length": 32, "dtype": torch.float32}
JOBS = {
    "qwen2.5-1.5b-full": Job("qwen2.5-1.5b", SHAPES["qwen2.5-1.5b"], False, ROWS, LENGTH),
    "qwen2.5-7b-lora": Job(
        "qwen2.5-7b", SHAPES["qwen2.5-7b"], True, ROWS, LENGTH, checkpointing=0.15
    ),
    "qwen2.5-7b-full": Job(
        "qwen2.5-7b", SHAPES["qwen2.5-7b"], False, ROWS, LENGTH, checkpointing=True
    ),
    "qwen2.5-7b-full-fp8": Job(
        "qwen2.5-7b", SHAPES["qwen2.5-7b"], False, ROWS, LENGTH, checkpointing=True, fp8=True
    ),
    "tiny": Job("tiny", TINY, False, **SMALL),
    "tiny-fp8": Job("tiny", TINY, False, **SMALL, fp8=True),
    "tiny-lora": Job("tiny", TINY, True, **SMALL),
}
MEASURED = tuple(name for name in JOBS if not name.startswith("tiny"))
ENGINES = 2  # that a version goes to
FORMATS = ("bf16", "fp8")  # of these
MUST, AIM = 1.85, 1.95  # of two ranks over one
Found = dict[str, Any]


# -- one rank --------------------------------------------------------------------------------------


@contextmanager
def seated(job: Job, rank: int, size: int, port: int) -> Iterator[Ranks]:
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    if size == 1:
        yield ALONE
        return
    kind = RankGroup if job.lora else Sharded
    ranks = kind(rank, size, "127.0.0.1", port, device, DEADLINE_S)
    try:
        yield ranks
    finally:
        ranks.close()


def ours(job: Job, rank: int, size: int, port: int, steps: int) -> Found:
    with seated(job, rank, size, port) as ranks:
        device = f"cuda:{rank}" if job.device == "cuda" else "cpu"
        model = learner(replace(job, device=device))
        ranks.shard(recompute.apply(model, job.checkpointing))
        step = step_of(job, model, micro(job), ranks)
        found = {"seconds": timed(step, steps, job.device == "cuda"), "bytes": peak(job)}
        whole = ranks.mirror(model, device if job.fp8 else "cpu")
        published = {
            format: publication(job, ranks, model, whole, format, step) for format in formats(job)
        }
        return found | {"published": published}


def formats(job: Job) -> tuple[str, ...]:
    return FORMATS[1:] if job.fp8 else FORMATS[:1] if job.lora else FORMATS


def publication(
    job: Job,
    ranks: Ranks,
    model: Transformer,
    whole: Transformer | None,
    format: str,
    step: Callable[[], object],
) -> Found:
    """Publish two versions; return seconds and bytes of the second, as memory is new at the
    first."""
    if job.device == "cuda":
        torch.cuda.empty_cache()  # engines start on these GPUs
    with ExitStack() as stack:
        send: Callable[[int], Found] = lambda version: {}  # noqa: E731
        if whole is not None and ranks.leads:
            send = stack.enter_context(sending(job, whole, format))
        for version in (1, 2):
            step()
            ranks.meet("a publication")
            began = time.perf_counter()
            ranks.refill(whole, model)
            gathered = time.perf_counter()
            sent = send(version)
            ranks.meet("the end of a publication")
    return {"gather_s": gathered - began, **sent}


def engine_place(job: Job, number: int) -> str:
    """Return the device of an engine: engines go round the GPUs of the ranks."""
    return f"cuda:{number % torch.cuda.device_count()}" if job.device == "cuda" else "cpu"


@contextmanager
def sending(job: Job, whole: Transformer, format: str) -> Iterator[Callable[[int], Found]]:
    """Start engines; yield a call that publishes a version and waits until they hold it.

    The call raises RuntimeError where they do not hold the same.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as stack:
        shelf, readers = Path(name) / "w", []
        shadow = Shadow(whole, format, whole.dtype) if job.fp8 else None
        broadcaster = FolderPublisher(shelf, whole, attempt=1, keep=1, shadow=shadow)
        if not job.lora:
            hf.save(whole, Path(name) / "model")
            for number in range(ENGINES):
                engine = reader(Path(name) / "model", shelf, format, engine_place(job, number))
                readers.append(stack.enter_context(engine))

        def send(version: int) -> Found:
            began = time.perf_counter()
            metrics = broadcaster.publish(version)
            written = time.perf_counter()
            for engine in readers:
                engine.send({"version": version}, "a version")
            held = {engine.next("a version", WAIT_S)["digest"] for engine in readers}
            if len(held) > 1:
                raise RuntimeError(f"{format} engines hold different weights of version {version}")
            taken = {"engines_s": time.perf_counter() - written} if readers else {}
            size = metrics["perf/broadcast_bytes"]
            return {"write_s": written - began, "published_bytes": size, **taken}

        yield send


def peer(job: Job, rank: int, size: int, port: int, steps: int) -> Found:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

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
    dtype = job.dtype if job.lora else torch.float32
    model = peer_model(job, dtype, True, accelerator.device)
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
    """Return the tokens of a micro-batch: a quarter of a step's at most."""
    return min(MICRO, job.tokens // 4)


def peak(job: Job) -> int:
    """Return the bytes that torch had at most on this rank's device; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if job.device == "cuda" else 0


# -- a side ----------------------------------------------------------------------------------------


def beside(name: str, size: int, args: argparse.Namespace) -> dict[str, Found]:
    """Run both sides on so many ranks, at once where each has GPUs of its own; return what they
    found."""
    sides = ("ours",) if args.no_peer or JOBS[name].fp8 else ("ours", "peer")
    apart = not args.cpu and torch.cuda.device_count() >= size * len(sides)
    with ThreadPoolExecutor(len(sides) if apart else 1) as running:
        found = {
            which: running.submit(side, name, which, size, i * size * apart, args)
            for i, which in enumerate(sides)
        }
        return {which: future.result() for which, future in found.items()}


def side(name: str, which: str, size: int, first: int, args: argparse.Namespace) -> Found:
    """Run a side on the GPUs from `first` on; return what its rank 0 found, or {"failed": what the
    rank that ended first said}."""
    settings = {"job": name, "side": which, "size": size, "steps": args.steps, "cpu": args.cpu}
    gpus = ",".join(str(first + rank) for rank in range(size))
    env = {"OMP_NUM_THREADS": "1"} if args.cpu else {"CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, "-m", "bench.learners", RANK]
    # nobody else gets the port before rank 0 listens there; ranks end before they are waited for
    with (
        reserve_port("127.0.0.1") as meeting,
        ThreadPoolExecutor(size) as waiting,
        ExitStack() as stack,
    ):
        settings["port"] = meeting.getsockname()[1]
        try:
            ranks = [
                stack.enter_context(Peer(settings | {"rank": rank}, command, env))
                for rank in range(size)
            ]
            found = [
                waiting.submit(rank.ask, {}, f"what rank {number} found", DEADLINE_S)
                for number, rank in enumerate(ranks)
            ]
            for ended in as_completed(found):
                ended.result()
            return found[0].result()
        except PeerFailed as error:
            return {"failed": str(error)}


def rank_of(settings: dict[str, Any]) -> tuple[Found, Answer]:
    if settings["cpu"]:
        torch.set_num_threads(1)
    job = replace(JOBS[settings["job"]], device="cpu" if settings["cpu"] else "cuda")
    given = [settings[name] for name in ("rank", "size", "port", "steps")]
    return {"ready": True}, lambda order: SIDES[settings["side"]](job, *given)


# -- rows ------------------------------------------------------------------------------------------


def rows_of(job: Job, mine: dict[int, Found], theirs: dict[int, Found]) -> list[Row]:
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
        rows += publishing(title, found["published"])
    return rows


def publishing(title: str, found: dict[str, Found]) -> list[Row]:
    first, *_ = found.values()
    rows = [
        Row(f"{title}: gathering the weights", "s", first["gather_s"]),
        Row(f"{title}: writing a version", "s", first["write_s"]),
        Row(f"{title}: a version", "bytes", first["published_bytes"]),
    ]
    for format, one in found.items():
        if "engines_s" in one:
            seconds = one["gather_s"] + one["write_s"] + one["engines_s"]
            rows.append(Row(f"{title}: {until_held(format)}", "s", seconds))
    return rows


def until_held(format: str) -> str:
    return f"until {ENGINES} {format} engines hold a version"


def promised() -> list[str]:
    """Return the names of rows that the two-GPU table has, measured or not: publications of a 7B
    model."""
    jobs = [JOBS["qwen2.5-7b-full"], JOBS["qwen2.5-7b-full-fp8"]]
    return [f"{job.title}, 2 GPUs: {until_held(f)}" for job in jobs for f in formats(job)]


def main() -> int:
    parser = parser_of(
        __doc__, jobs=SomeOf(JOBS, MEASURED), ranks=[1, 2], steps=4, cpu=False, no_peer=False
    )
    args = parser.parse_args()
    jobs = {name: replace(JOBS[name], device="cpu" if args.cpu else "cuda") for name in args.jobs}
    _, args.out = settle(parser, "cpu" if args.cpu else "cuda", args.out)
    if not args.cpu and torch.cuda.device_count() < max(args.ranks):
        parser.error(f"--ranks: {max(args.ranks)} GPUs are asked for, and there are fewer")
    results = Results("learners", args.out, steps=args.steps, length=LENGTH)
    for name, job in jobs.items():
        by_size = {size: beside(name, size, args) for size in args.ranks}
        say(f"{name}: {by_size}")
        mine, theirs = ({n: by.get(which, {}) for n, by in by_size.items()} for which in SIDES)
        results.add(rows_of(job, mine, theirs))
    return results.finish("Learner ranks")


if __name__ == "__main__":
    if sys.argv[1:] == [RANK]:
        serve(rank_of)
    else:
        raise SystemExit(main())
