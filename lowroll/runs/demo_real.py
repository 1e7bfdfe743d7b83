"""`lowroll demo --real`: a pretrained model learns to answer in plain JSON, by GRPO with INT8
rollouts and LoRA, in minutes on two cores.

SmolLM2-135M-Instruct knows JSON, and mostly writes something around it. It is evaluated before and
after on 48 held-out sentences of the environment `records`. The exit code is as of `lowroll demo`.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowroll.config import RunConfig
from lowroll.metrics.report import write_report
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.runs import demo
from lowroll.runs.assembly import engines, environments, models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.grpo import run
from lowroll.types import Request

MODEL = "smollm2"
ROLLOUTS = "int8_rotated"
MIN_GAIN = 0.2
MIN_GREEDY_GAIN = 0.1
SHOWN = 4  # held-out answers

SETTINGS: dict[str, Any] = {
    "env": [{"id": "records", "args": {"system": "Answer in JSON."}}],
    "batch_size": 32,
    "rollouts_per_example": 8,
    "algorithm": "grpo",
    "correction": "tis",
    "rollout": {"weights": ROLLOUTS, "max_tokens": 36, "max_batch": 48, "cache_tokens": 6144},
    "train": {
        "max_steps": 16,
        "learning_rate": 5e-4,
        "warmup_steps": 3,
        "lora": True,
        "lora_rank": 16,
        "tokens_per_microbatch": 1024,
    },
    "eval": {"num_examples": 48, "interval": None},
    "ckpt": {"interval": 6, "keep_last": 1},
}


def answers(cfg: RunConfig, model: Path) -> list[tuple[str, str]]:
    """Return some held-out prompts and the model's answers."""
    compute, chat = Compute.of(cfg), models.tokenizer(model)
    (env,) = environments.make(cfg.env, cfg.seed).values()
    prompts = [env.prompt(i, "test").messages for i in range(SHOWN)]
    master = hf.load(model, compute.device, compute.dtype)
    requests = [
        Request(chat.encode_chat(prompt), max_tokens=cfg.rollout.max_tokens, seed=cfg.seed + i)
        for i, prompt in enumerate(prompts)
    ]
    with closing(engines.make(cfg, compute, master, chat, cfg.rollout.weights)) as engine:
        groups = engine.generate(requests)
    return [
        (str(prompt[-1]["content"]), chat.decode(group.rollouts[0].token_ids))
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def main(output_dir: str = "outputs/demo-real", seed: int = 0, device: str = "auto") -> int:
    """Run the demo and return the exit code. ValueError when the folder holds anything but a demo,
    or the model was not fetched."""
    console = Console()
    began = time.monotonic()
    model, folder = resolve(MODEL), Path(output_dir)
    cfg = demo.settings(SETTINGS, MODEL, folder, seed, device)
    demo.clear(folder, cfg)
    rewards_before, answers_before = demo.rewards(cfg, model), answers(cfg, model)
    console.print(
        f"[bold]1[/] {MODEL}: held-out reward before {rewards_before['sampled']:.3f} as sampled, "
        f"{rewards_before['greedy']:.3f} greedily; {cfg.train.max_steps} steps of GRPO with "
        f"{ROLLOUTS.upper()} rollouts and LoRA",
        soft_wrap=True,
    )
    result = run(cfg, overwrite=True)
    if result.signal:
        return demo.interrupted(console, result, "lowroll demo --real")
    console.print("[bold]2[/] the same prompts again")
    rewards_after, answers_after = (
        demo.rewards(cfg, result.folder / "final"),
        answers(cfg, result.folder / "final"),
    )
    _print_answers(console, answers_before, answers_after)
    demo.summary(console, cfg, result.records, rewards_before, rewards_after)
    generate_speed, learn_speed = (
        statistics.median(record[f"perf/{name}_tokens_per_second"] for record in result.records)
        for name in ("generate", "learn")
    )
    console.print(
        f"{generate_speed:,.0f} tokens/s generated and {learn_speed:,.0f} learnt from (medians)"
    )
    console.print(f"report: {write_report(result.folder)}", soft_wrap=True)
    return demo.verdict(console, rewards_before, rewards_after, MIN_GAIN, MIN_GREEDY_GAIN, began)


def _print_answers(
    console: Console, before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    title = "Answers to held-out prompts, sampled at T = 1"
    table = Table("prompt", "before", "after", title=title, show_lines=True)
    for (prompt, answer_before), (_, answer_after) in zip(before, after, strict=True):
        table.add_row(*(escape(text) for text in (prompt, answer_before, answer_after)))
    console.print(table)
