"""Peak memory of a learner step with chunked log-probs, against the same step with materialised
logits.

One policy-gradient step (forward, log-probs and entropy of every token, backward, AdamW) of a small
decoder on 8k packed tokens with a vocabulary of 150k: there the logits, not the model, decide the
memory. Both sides share model, attention, optimiser and objective; they differ in one call:

    ours    lowroll.model.logprobs.token_log_probs: 1024 rows of logits at a time, made again in the backward pass
    peer    logits [T, V] in float32, torch.log_softmax, gather: what a textbook trainer does. It computes no entropy,
            which would cost it another [T, V].

Each side runs in a process of its own. Its peak is the process's high-water mark of resident memory
in the step (VmHWM, reset before it) minus what was resident before the step: model, optimiser state
and libraries are in neither.

    python -m bench.learner [--tokens 8192] [--vocab 150000] [--hidden 128] [--out FOLDER]
    python -m bench.learner --model FOLDER                    a real model's update (`bench.laptop`)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench import laptop
from bench.harness import BASELINES, Row, finish, in_new_process, parser_of, resident, write
from lowroll.model import initialize
from lowroll.model.attention import varlen
from lowroll.model.logprobs import token_log_probs
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.runs.demo import CONFIG as DEMO
from lowroll.trainer import recompute
from lowroll.trainer.optim import Optimizer, OptimSettings

LogProbs = Callable[[Tensor, Tensor, Tensor], Tensor]
DEADLINE = 900  # seconds that one side may take


def chunked(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return token_log_probs(hidden_TD, weight_VD, targets_T)[0]


def materialised(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    logp_TV = torch.log_softmax(torch.nn.functional.linear(hidden_TD, weight_VD).float(), dim=-1)
    return logp_TV.gather(1, targets_T[:, None])[:, 0]


SIDES: dict[str, LogProbs] = {"ours": chunked, "peer": materialised}


def measure(side: str, tokens: int, vocab: int, hidden: int) -> dict[str, float]:
    """Peak bytes, seconds and the objective of one step, in this process."""
    spec = spec_from_config(
        {
            **DEMO,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": hidden // 2,
            "vocab_size": vocab,
        }
    )
    model = recompute.apply(initialize(Transformer(spec), seed=0))
    optimizer = Optimizer(dict(model.named_parameters()), OptimSettings())
    step(
        model, optimizer, SIDES[side], tokens=64
    )  # moments, gradients and libraries are resident from now on
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    began = time.perf_counter()
    objective = step(model, optimizer, SIDES[side], tokens)
    return {
        "bytes": resident("VmHWM") - before,
        "seconds": time.perf_counter() - began,
        "objective": objective,
    }


def step(model: Transformer, optimizer: Optimizer, log_probs: LogProbs, tokens: int) -> float:
    """One update on random packed sequences of 64 tokens; returns its objective."""
    generator = torch.Generator().manual_seed(1)
    ids_T, targets_T = (
        torch.randint(0, model.spec.vocab_size, (tokens,), generator=generator) for _ in range(2)
    )
    advantages_T = torch.randn(tokens, generator=generator)
    hidden_TD = model(ids_T, torch.arange(tokens) % 64, varlen([64] * (tokens // 64)))
    objective = (log_probs(hidden_TD, model.lm_head_weight, targets_T) * advantages_T).mean()
    optimizer.begin_step()
    (-objective).backward()
    optimizer.update()
    return objective.item()


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, out=BASELINES, tokens=8192, vocab=150_000, hidden=128, threads=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    real = parser.add_argument_group("a real model, against PEFT")
    real.add_argument("--model", type=Path, help="its folder")
    real.add_argument("--rows", type=int, default=32)
    real.add_argument("--length", type=int, default=270)
    real.add_argument("--prompt", type=int, default=70)
    real.add_argument("--rounds", type=int, default=2)
    real.add_argument("--warm", type=int, default=1, help="rounds that are not counted")
    real.add_argument("--bound", type=float, default=4.0, help="GB that the peer may take")
    real.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    real.add_argument("--weights", default="int8", help="the base's format, ours")
    real.add_argument("--sizes", type=json.loads, default={}, help="of `train:`, as JSON")
    real.add_argument("--setting", help="the peer's, as JSON: [rows, checkpointing, attention]")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.model:
        return laptop.measure(args)
    if args.side:
        print(json.dumps(measure(args.side, args.tokens, args.vocab, args.hidden)))
        return 0
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocab", "hidden", "threads")]
    sides = {
        side: in_new_process("bench.learner", ["--side", side, *sizes], DEADLINE) for side in SIDES
    }
    ours, peer = sides["ours"], sides["peer"]
    if abs(ours["objective"] - peer["objective"]) > 1e-4 * abs(peer["objective"]) + 1e-7:
        raise RuntimeError(
            f"the sides computed different objectives: {ours['objective']} and {peer['objective']}"
        )
    name = f"learner step, {args.tokens} tokens x {args.vocab} vocabulary"
    memory, seconds = peer["bytes"] / ours["bytes"], peer["seconds"] / ours["seconds"]
    rows = [
        Row(
            f"{name}: peak memory, materialised / chunked",
            "MB",
            ours["bytes"] / 1e6,
            peer["bytes"] / 1e6,
            memory,
            (memory, memory),
            must=3.0,
        ),
        Row(
            f"{name}: time, materialised / chunked",
            "tokens/s",
            args.tokens / ours["seconds"],
            args.tokens / peer["seconds"],
            seconds,
            (seconds, seconds),
        ),
    ]
    settings = {name: getattr(args, name) for name in ("tokens", "vocab", "hidden")}
    return finish("Learner", "learner", rows, args.out, write, **settings, rounds=1)


if __name__ == "__main__":
    raise SystemExit(main())
