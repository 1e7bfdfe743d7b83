"""One GRPO update of a real model with LoRA on a CPU, beside transformers and PEFT in equal memory.

    python -m bench.learner --model FOLDER [--rows 32] [--length 270] [--prompt 70] [--bound 4]
                            [--rounds 2] [--out FOLDER]

    ours    `trainer.step.learn` on an int8 base, with the sizes that a run chooses for itself on a CPU
            (`runs.memory.sizes`)
    peer    transformers and PEFT: the same rank, targets, sequences, objective and dtype (float32), AdamW; logits
            of the responses alone. Every setting of PEER_SETTINGS is tried on a few sequences, and
            the fastest whose process stays within --bound (in GB) is taken

Both sides are processes that live at the same time and make a step in turns; a step's seconds are
taken inside. On a machine that is not alone the seconds of the processor (all threads) say more than
those of the clock: the rows have both. The peak is the process's high-water mark of resident memory
(VmHWM), interpreter, libraries and weights included. Rows are added to `laptop.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench.harness import BASELINES, Row, clock_rows, finish, in_turns, parser_of, say
from bench.peer import Peer
from bench.samples import batch_of, random_ids
from bench.worker import Answer, resident, serve, timed
from lowroll.model import lora

BOUND = 4.0  # GB that the run may take
RANK, ALPHA, GROUP, WEIGHTS = 16, 32, 4, "int8"
STEP_S = 3600.0  # of one step, or of the start
TRIED_ROWS = 4  # of a trial of the peer's settings
WARM = 1  # rounds that are not counted
MUST = 1.5  # tokens a second over the peer's
# (sequences of a micro-batch, gradient checkpointing, attention)
PEER_SETTINGS = tuple(
    (n, again, attention)
    for n in (1, 2, 4)
    for again in (False, True)
    for attention in ("sdpa", "eager")
)
Step = Callable[[], object]


def ours(args: argparse.Namespace) -> tuple[Step, str]:
    """Return a call that makes one update as `lowroll grpo` would, and its sizes in words."""
    from lowroll.config import RunConfig
    from lowroll.kv.capacity import Workload
    from lowroll.runs.assembly import models, trainer
    from lowroll.runs.assembly.compute import Compute
    from lowroll.runs.memory import sizes
    from lowroll.runs.memory.plan import Planner
    from lowroll.trainer.optim import Optimizer
    from lowroll.trainer.step import learn

    response = args.length - args.prompt
    cfg = RunConfig.model_validate(
        {
            "model": args.model,
            "device": "cpu",
            "dtype": "float32",
            "batch_size": args.rows,
            "rollouts_per_example": GROUP,
            "rollout": {"weights": WEIGHTS, "max_tokens": response},
            "train": {"lora": True, "lora_rank": RANK, "lora_alpha": ALPHA},
        }
    ).resolved()
    compute = Compute.of(cfg)
    outline = models.outline("model", cfg.model, compute)
    work = Workload(args.rows // GROUP, GROUP, args.prompt, response)
    cfg = sizes.chosen(Planner.now(compute, outline, [work], {}), cfg)
    model = models.learner(cfg, compute)
    optimizer = Optimizer(model.trainable_parameters(), trainer.optim(cfg))
    ids = random_ids(model.spec.vocab_size, args.rows, args.length)
    settings, batch = trainer.learn(cfg), batch_of(ids.tolist(), args.prompt, WEIGHTS, GROUP)
    told = (
        f"micro-batches of {settings.tokens_per_microbatch} tokens, chunks of "
        f"{settings.logprob_chunk}, checkpointing {cfg.train.activation_checkpointing}"
    )
    return lambda: learn(model, batch, optimizer, settings), told


def peer(args: argparse.Namespace) -> tuple[Step, str]:
    """Return the same update by transformers and PEFT, and its setting in words."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    number, again, attention = args.setting
    model: Any = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation=attention
    )
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    targets = list(lora.TARGETS)
    adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", target_modules=targets)
    model = get_peft_model(model, adapter).train()
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-5)
    ids = random_ids(model.config.vocab_size, args.rows, args.length)
    advantages = torch.tensor([1.0 if i % 2 else -1.0 for i in range(args.rows)])
    response = args.length - args.prompt

    def step() -> None:
        for first in range(0, args.rows, number):
            rows = slice(first, first + number)
            made = model(input_ids=ids[rows], use_cache=False, logits_to_keep=response + 1)
            logits = made.logits[:, :-1]
            picked = logits.gather(-1, ids[rows, args.prompt :, None])[..., 0]
            # row by row, as TRL does: [n, L, V] of float32 is not made once more
            lse = torch.stack([one.float().logsumexp(-1) for one in logits])
            log_probs = picked.float() - lse
            ratio = (log_probs - log_probs.detach()).exp()
            loss = -(ratio * advantages[rows, None]).sum() / (args.rows * response)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    told = f"{number} sequences at a time, checkpointing {again}, {attention}"
    return step, told.lower()


SIDES = {"ours": ours, "peer": peer}


def worker_of(settings: dict[str, Any]) -> tuple[dict[str, str], Answer]:
    args = argparse.Namespace(**settings)
    torch.set_num_threads(args.threads)
    step, told = SIDES[args.side](args)
    return {"told": told}, lambda order: {**timed(step), "peak": resident("VmHWM")}


class Side(Peer):
    """A process that makes steps when it is asked to."""

    def __init__(self, args: argparse.Namespace, side: str, **more: Any) -> None:
        sizes = {key: getattr(args, key) for key in ("rows", "length", "prompt", "threads")}
        settings = {"model": str(args.model), "side": side, **sizes, **more}
        super().__init__(settings, [sys.executable, "-m", "bench.learner", "serve"], start_s=STEP_S)
        self.told: str = self.ready["told"]

    def step(self) -> dict[str, float]:
        """Make a step; return seconds of the clock and the processor, and the peak of memory."""
        return self.ask({}, "a step", STEP_S)


def best_setting(args: argparse.Namespace) -> tuple[int, bool, str]:
    """Return the peer's fastest setting within `--bound`, by seconds of the processor."""
    found = {}
    for setting in PEER_SETTINGS:
        with Side(args, "peer", setting=setting, rows=TRIED_ROWS) as side:
            side.step()
            found[setting] = side.step()
            say(f"peer, {side.told}: {found[setting]}")
    within = {s: one["cpu"] for s, one in found.items() if one["peak"] <= args.bound * 1e9}
    return min(within, key=within.__getitem__)


def measure(args: argparse.Namespace) -> list[Row]:
    tokens = args.rows * args.length
    with ExitStack() as stack:
        sides = {
            "ours": stack.enter_context(Side(args, "ours")),
            "peer": stack.enter_context(Side(args, "peer", setting=best_setting(args))),
        }
        taken = in_turns({name: side.step for name, side in sides.items()}, args.rounds, WARM)
        note = "; ".join(f"{name}: {side.told}" for name, side in sides.items())
    title = (
        f"{args.model.name} LoRA r{RANK}, {args.rows} x {args.length} tokens, float32, "
        f"peer within {args.bound:g} GB"
    )
    peaks = {name: max(one["peak"] for one in steps) / 1e9 for name, steps in taken.items()}
    memory = Row(
        f"{title}: peak resident memory",
        "GB",
        peaks["ours"],
        peaks["peer"],
        peaks["peer"] / peaks["ours"],
        must=BOUND,
        goal="ours at most",
        note=note,
    )
    return [memory, *clock_rows(title, tokens, taken, must=MUST)]


def main() -> int:
    parser = parser_of(
        __doc__, out=BASELINES, rows=32, length=270, prompt=70, bound=BOUND, rounds=2, threads=2
    )
    parser.add_argument("--model", type=Path, required=True, help="its folder")
    args = parser.parse_args()
    settings = {"threads": args.threads, "rounds": args.rounds}
    return finish("A laptop's learner", "laptop", measure(args), args.out, **settings)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve(worker_of)
    else:
        raise SystemExit(main())
