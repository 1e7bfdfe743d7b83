"""The gradient of a learner that multiplies in low precision, beside a dense one's, on a real model.

SmolLM2-135M-Instruct by default, all weights. The dense model answers the questions of `bench.fidelity` at
temperature 1; each answer has an advantage of +1 or -1, and J is the sum of advantage x log-prob (on policy: the
gradient of GRPO). For each learner of `LEARNERS`:

    cosine    of the angle between its gradient and the dense learner's, all weights as one vector
    error     |difference| / |dense gradient|
    worst     the smallest cosine of a linear matrix
    KL        k3, nats a token: the dense learner's log-probs of the answers to its own

    python -m bench.gradients [--model smollm2] [--device cpu] [--learners NAME ...] [--samples 4] [--out FOLDER]

The dense learner computes in float32 on both devices. Rows are added to `gradients.json` or
`gradients-gpu.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.fidelity import work
from bench.harness import (
    BASELINES,
    OneOf,
    Results,
    Row,
    SomeOf,
    columns_of,
    parser_of,
    print_table,
    released,
    say,
)
from bench.samples import sample_of
from lowroll import Engine, Request
from lowroll.model import hf
from lowroll.model.device import pick_device
from lowroll.model.folder import resolve
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant.table import low_bit
from lowroll.trainer.packing import PackedBatch
from lowroll.trainer.step import PackedForward
from lowroll.types import Sample, Score
from lowroll.weights.aligned_forward import align, transpose

CAPACITY = 2048  # tokens of a pass
CHUNK = 256  # tokens whose logits exist at a time
LENGTH = 64  # tokens of an answer, at most


@dataclass(frozen=True)
class Learner:
    """forward: the format of its products; none: dense. backward: input gradients in fp8."""

    forward: str = ""
    backward: bool = False
    dtype: torch.dtype = torch.float32

    def load(self, folder: Path, device: torch.device) -> Transformer:
        model = hf.load(folder, device, self.dtype).requires_grad_(True)
        if self.forward:
            align(model, self.forward)
        return transpose(model) if self.backward else model


DENSE = Learner()
LEARNERS = {
    "bf16": Learner(dtype=torch.bfloat16),
    "fp8 backward": Learner(backward=True),
    "fp8 forward and backward": Learner("fp8", backward=True),
    **{f"{name} forward": Learner(name) for name in low_bit()},
}
DEFAULT = [
    *("bf16", "fp8 backward", "fp8 forward", "fp8 forward and backward", "fp8_block forward"),
    *("int8 forward", "int8_rotated forward", "nvfp4 forward", "int4 forward"),
]
COLUMNS = {"cosine": ".4f", "error": ".3f", "worst": ".3f", "KL": ".1e"}
HEAD = (
    "learner",
    "cosine to dense",
    "relative error",
    "a matrix's smallest cosine",
    "KL, nats a token",
)


@dataclass(frozen=True)
class Gradient:
    """A gradient by the names of the parameters, in float64 on the CPU, and the log-probs."""

    parts: Mapping[str, Tensor]
    log_probs_N: Tensor

    def beside(self, dense: Gradient) -> dict[str, float]:
        """Return the values of `COLUMNS`."""
        dots = {name: float((g * dense.parts[name]).sum()) for name, g in self.parts.items()}
        sizes = {name: float(g.norm()) for name, g in self.parts.items()}
        truths = {name: float(g.norm()) for name, g in dense.parts.items()}
        size, truth = (sum(n**2 for n in norms.values()) ** 0.5 for norms in (sizes, truths))
        dot = sum(dots.values())
        matrices = [
            name for name, g in self.parts.items() if g.ndim == 2 and ".blocks." in f".{name}"
        ]
        gap_N = self.log_probs_N - dense.log_probs_N
        return {
            "cosine": dot / (size * truth),
            "error": max(0.0, size**2 - 2 * dot + truth**2) ** 0.5 / truth,
            "worst": min(dots[name] / (sizes[name] * truths[name]) for name in matrices),
            "KL": float((gap_N.exp() - 1 - gap_N).mean()),
        }


def gradient(model: Transformer, samples: Sequence[Sample]) -> Gradient:
    """Return the gradient of J."""
    forward = PackedForward(model, samples, CAPACITY, CHUNK, share_prompts=True)

    def objective(packed: PackedBatch, learner_N: Tensor) -> Tensor:
        return (packed.advantages_N * learner_N).sum()

    trace = forward.run([range(len(samples))], objective)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    log_probs_N = torch.cat([trace.log_probs[i] for i in range(len(samples))])
    return Gradient({name: g.double().cpu() for name, g in found.items()}, log_probs_N.double())


def drawn(folder: Path, device: torch.device, count: int) -> list[Sample]:
    """Return the dense model's answers with advantages of both signs in each group."""
    _, prompts = work(ChatTokenizer(load_tokenizer(folder)))
    with released():
        engine = Engine(hf.load(folder, device, torch.float32), weights="fp32", cache_tokens=16384)
        groups = engine.generate(
            [Request(ids, n=count, max_tokens=LENGTH, seed=i) for i, ids in enumerate(prompts)]
        )
        del engine
    return [
        sample_of(list(group.request.prompt_ids), rollout, (-1.0) ** j, i, Score(1.0))
        for i, group in enumerate(groups)
        for j, rollout in enumerate(group.rollouts)
    ]


def read_table(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the stored rows as lines of `HEAD`, in the order of `LEARNERS`."""
    found = {name.split(" ", 1)[1]: values for name, values in columns_of(record).items()}
    return [
        (name, *(format(found[name][column], form) for column, form in COLUMNS.items()))
        for name in LEARNERS
        if name in found
    ]


def main(argv: Sequence[str] | None = None) -> int:
    device = OneOf(("cpu", "cuda"), "cpu")
    learners = SomeOf(LEARNERS, DEFAULT)
    parser = parser_of(
        __doc__, out=BASELINES, model="smollm2", device=device, learners=learners, samples=4
    )
    args = parser.parse_args(argv)
    place, folder, model = pick_device(args.device), resolve(args.model), Path(args.model).name
    samples = drawn(folder, place, args.samples)
    dense = gradient(DENSE.load(folder, place), samples)
    results = Results(
        "gradients" if place.type == "cpu" else "gradients-gpu", args.out, samples=len(samples)
    )
    for name in args.learners:
        with released():
            values = gradient(LEARNERS[name].load(folder, place), samples).beside(dense)
        results.add(Row(f"{model} {name}: {column}", "", values[column]) for column in COLUMNS)
        say(f"{name}: {values}")
    path = args.out / f"{results.name}.json"
    print_table(HEAD, read_table(json.loads(path.read_text())))
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
