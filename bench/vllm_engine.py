"""A vLLM as the rollout engine, on GPUs: does it start, draw, take weights, and hold what it was
given?

    python -m bench.vllm_engine [--model qwen2.5-7b] [--parts full adapter]
                                [--vllm-python PYTHON] [--vllm-path FOLDER]

Random bfloat16 weights of the model's shapes. The learner is on the first GPU; vLLM on the second,
where there is one, and takes whole models over NCCL; else it shares the first, and takes them as
folders in /dev/shm.

    full       vLLM starts with the weights as they are; then two whole models are sent. After each,
               its log-probs are held against the learner's
    adapter    vLLM starts with the learner's weights; then three adapters of rank 16
    rollout    256 samples of 128 tokens, in groups of 8, under each

Prints a line a measurement; ends with an error when a log-prob is away.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.peer import vllm_path
from bench.shapes import SHAPES, random_model
from lowroll.engine.remote import VllmEngine
from lowroll.model import hf, lora
from lowroll.model.scoring import score
from lowroll.model.transformer import Transformer
from lowroll.types import Request
from lowroll.weights.update import WeightUpdate

SHM = Path("/dev/shm")
BOUND = 0.1  # nats a token, between two implementations in bfloat16
PROMPTS, SAMPLES, LENGTH, RESPONSE = 32, 8, 128, 128
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-7b", choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=["full", "adapter"])
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-path")
    args = parser.parse_args()
    with timed("in all"):
        model = random_model(SHAPES[args.model], "cuda:0")
        torch.cuda.synchronize()
        for part in args.parts:
            with tempfile.TemporaryDirectory(dir=SHM) as work:
                {"full": full, "adapter": adapter}[part](args, model, Path(work))


def full(args: argparse.Namespace, model: Transformer, work: Path) -> None:
    """Whole models into a vLLM that began with others."""
    folder = base(model, work)
    way = "nccl" if torch.cuda.device_count() > 1 else "folder"
    with started(args, folder, work, [], way=way) as engine:
        for version in (1, 2):
            moved(model, version)
            with timed(f"full update {version} by {way}"):
                engine.update_weights(WeightUpdate.local(model, version))
            compare(engine, model, f"full update {version} by {way}")
        rollout(engine, model)


def adapter(args: argparse.Namespace, model: Transformer, work: Path) -> None:
    """Adapters on the learner's base."""
    folder = base(model, work)
    with started(args, folder, work, [], lora_rank=RANK) as engine:
        learner = lora.attach(model, RANK, 2.0 * RANK)
        for version in (1, 2, 3):
            moved(learner, version)
            with timed(f"adapter {version}"):
                engine.update_weights(WeightUpdate.local(learner, version))
            compare(engine, learner, f"adapter {version}")
        rollout(engine, learner)


def base(model: Transformer, work: Path) -> Path:
    """The model as it is now, as a folder: vLLM does not reload what began as dummy weights."""
    folder = work / "base"
    with timed("base folder"):
        folder.mkdir()
        hf.write(hf.contents(model), folder, None)
    return folder


@contextmanager
def started(
    args: argparse.Namespace, folder: Path, work: Path, arguments: list[str], **options: object
) -> Iterator[VllmEngine]:
    alone = torch.cuda.device_count() > 1
    with timed("vLLM is ready"):
        engine = VllmEngine.start(
            folder,
            log=Path(tempfile.gettempdir()) / "vllm.log",
            python=args.vllm_python,
            site=vllm_path(args.vllm_path),
            devices="1" if alone else "0",
            gpu_memory=0.8 if alone else 0.4,
            context_length=1024,
            arguments=[*arguments, "--enforce-eager"],
            exchange=work,
            bound=BOUND,
            **options,  # type: ignore[arg-type]
        )
    say(f"{engine.found.shown}, processed log-probs {engine.found.processed}")
    with engine:
        yield engine


@torch.no_grad()
def moved(model: Transformer, seed: int) -> None:
    """Every weight that is sent, moved enough for bfloat16 to see it."""
    sent = model.trainable_parameters() or dict(model.named_parameters())
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for p in sent.values():
        if p.ndim > 1:
            noise = torch.empty_like(p).normal_(0.0, 0.004, generator=generator)
            p.add_(noise)


def compare(engine: VllmEngine, model: Transformer, what: str) -> None:
    """Of drawn tokens: vLLM's log-probs when it drew them against the learner's."""
    request = Request(list(range(100, 164)), n=4, max_tokens=64, ignore_eos=True, seed=1)
    (group,) = engine.generate([request])
    ids = [request.prompt_ids + rollout.token_ids for rollout in group.rollouts]
    ours = torch.cat([one.cpu() for one in score(model, ids, [64] * 4)])
    theirs = torch.cat([torch.tensor(rollout.logprobs) for rollout in group.rollouts])
    apart = (ours - theirs).abs()
    say(f"{what}: median {apart.median():.2g}, largest {apart.max():.2g} nats from the learner")
    assert apart.median() < BOUND, what


def rollout(engine: VllmEngine, model: Transformer) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1000, model.spec.vocab_size - 1000, (PROMPTS, LENGTH), generator=generator)
    requests = [
        Request(row.tolist(), n=SAMPLES, max_tokens=RESPONSE, ignore_eos=True, seed=i)
        for i, row in enumerate(rows)
    ]
    begun = time.perf_counter()
    groups = engine.generate(requests)
    seconds = time.perf_counter() - begun
    tokens = sum(len(r.token_ids) for group in groups for r in group.rollouts)
    say(f"rollout: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s")
    say(f"rollout: {engine.stats()}")


@contextmanager
def timed(what: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    say(f"{what}: {time.perf_counter() - begun:.1f} s")


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
