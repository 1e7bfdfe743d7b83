"""`lowroll demo`: a small language model learns a task by GRPO with INT8 rollouts, in minutes on two
cores.

A Qwen3-shaped model of random weights is warm-started by SFT on reverse-text demonstrations, and
trained by GRPO with ACR. It is evaluated as sampled in training, at T = 0.5 and greedily, since a
sharper policy gains in the first alone. The exit code is 1 unless the held-out reward rose by
`MIN_GAIN` as sampled and by `MIN_GREEDY_GAIN` greedily. At the end the speeds of INT8 and dense
engines are measured, also on larger layers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lowroll.checkpoint.folder_swap import foreign_in, remove_published
from lowroll.config import RunConfig, from_mapping
from lowroll.engine.base import Engine
from lowroll.engine.native import NativeEngine
from lowroll.metrics.progress import phases
from lowroll.metrics.report import write_report
from lowroll.model import hf, initialize
from lowroll.model.spec import spec_from_config
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.orchestrator.evaluate import evaluate
from lowroll.runs.assembly import engines, environments, models, orchestrator
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.folder import RunFolder
from lowroll.runs.grpo import run
from lowroll.runs.session import RunResult
from lowroll.runs.sft import warm_start
from lowroll.types import Request

MARK = ".lowroll-demo"  # in a demo folder, which may be replaced
MIN_GAIN = 0.15
MIN_GREEDY_GAIN = 0.03
HELD_OUT = 256
SHARPER = 0.5  # a temperature at which the warm start gains as much as by some training

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 160,
    "intermediate_size": 480,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
}

# Six layers of Qwen2.5-0.5B, where low precision is faster on a laptop.
LARGER: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 6,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
}

SETTINGS: dict[str, Any] = {
    "env": [
        {
            "id": "reverse-text",
            "args": {
                "template": "{text}",
                "min_words": 1,
                "max_words": 1,
                "min_len": 4,
                "max_len": 10,
            },
        }
    ],
    "batch_size": 512,
    "rollouts_per_example": 8,
    "algorithm": "grpo",
    "correction": "acr",
    "loss": {"reduce": "token-mean"},
    "rollout": {"weights": "int8", "max_tokens": 14, "max_batch": 512, "cache_tokens": 32768},
    "train": {
        "max_steps": 80,
        "learning_rate": 5e-4,
        "warmup_steps": 4,
        "minibatches": 1,
        "weight_decay": 0.0,
        "tokens_per_microbatch": 4096,
    },
    "eval": {"num_examples": HELD_OUT, "interval": 20},
    "ckpt": {"interval": 40, "keep_last": 2},
    "sft": {
        "steps": 50,
        "batch_size": 64,
        "learning_rate": 2e-3,
        "warmup_steps": 20,
        "num_examples": 8192,
    },
}


def build_tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast_tokenizer.chat_template = CHAT_TEMPLATE
    return fast_tokenizer


def build_model(folder: Path, seed: int, config: Mapping[str, Any]) -> Path:
    """Write an untrained model and its tokenizer as a Hugging Face folder."""
    tokenizer = build_tokenizer()
    spec = spec_from_config(
        {
            **config,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
    )
    with tempfile.TemporaryDirectory() as parts:
        tokenizer.save_pretrained(parts)
        return hf.save(initialize(Transformer(spec), seed), folder, tokenizer_from=parts)


def settings(
    base: Mapping[str, Any], model: str | Path, folder: Path, seed: int, device: str
) -> RunConfig:
    """Return a demo's settings, for a run in `folder`."""
    return from_mapping(
        {
            **base,
            "model": str(model),
            "output_dir": str(folder / "run"),
            "seed": seed,
            "device": device,
            "dtype": "float32",
        }
    )


def reward_of(
    cfg: RunConfig, model: Path, weights: str, temperature: float = 1.0, count: int = HELD_OUT
) -> float:
    return metrics_of(cfg, model, weights, temperature, count)["reward"]


def metrics_of(
    cfg: RunConfig, model: Path, weights: str, temperature: float, count: int, samples: int = 1
) -> dict[str, float]:
    compute, chat = Compute.of(cfg), models.tokenizer(model)
    master = hf.load(model, compute.device, compute.dtype)
    with closing(engines.make(cfg, compute, master, chat, weights)) as engine:
        return held_out_metrics(cfg, engine, chat, temperature, count, samples)


def held_out_metrics(
    cfg: RunConfig,
    engine: Engine,
    chat: ChatTokenizer,
    temperature: float,
    count: int | None = None,
    samples: int = 1,
) -> dict[str, float]:
    """Return the metrics of held-out prompts, without `eval/<env>/`."""
    (env,) = environments.make(cfg.env, cfg.seed).values()
    sampling = replace(orchestrator.eval_sampling(cfg), temperature=temperature)
    with environments.scorer(cfg, cfg.env) as scorer, phases() as on_phase:
        metrics = evaluate(
            env,
            engine,
            scorer,
            chat,
            num_examples=count or cfg.eval.num_examples or HELD_OUT,
            rollouts_per_example=samples,
            sampling=sampling,
            seed=cfg.seed,
            on_phase=on_phase,
        )
    return {name.removeprefix(f"eval/{env.name}/"): value for name, value in metrics.items()}


def engine_speed(cfg: RunConfig, model: Path, formats: tuple[str, ...]) -> dict[str, float]:
    """Return each format's median tokens a second on the run's kind of batch."""
    compute = Compute.of(cfg)
    chat = models.tokenizer(model)
    master = hf.load(model, compute.device, compute.dtype)
    (env,) = environments.make(cfg.env, cfg.seed).values()
    engine_by_format = {name: engines.make(cfg, compute, master, chat, name) for name in formats}

    def requests(turn: int) -> list[Request]:
        return [
            Request(
                chat.encode_chat(env.prompt(i, "test").messages),
                n=cfg.rollouts_per_example,
                max_tokens=cfg.rollout.max_tokens,
                seed=turn,
            )
            for i in range(cfg.num_groups)
        ]

    return _measure_in_turns(engine_by_format, requests, rounds=5)


def larger_speed(cfg: RunConfig, formats: tuple[str, ...]) -> tuple[float, dict[str, float]]:
    """Return the millions of parameters of larger layers, and each format's median tokens a second
    on 64 sequences."""
    compute, prompts, length, new_tokens = Compute.of(cfg), 8, 16, 8
    master = initialize(Transformer(spec_from_config(LARGER)), cfg.seed).to(compute.device)
    engines = {
        name: NativeEngine(
            master,
            name,
            device=compute.device,
            cache_tokens=prompts * 8 * (length + new_tokens + 16),
        )
        for name in formats
    }

    def requests(turn: int) -> list[Request]:
        return [
            Request(
                [2 + i + prompts * turn] * length,
                n=8,
                max_tokens=new_tokens,
                ignore_eos=True,
                seed=turn,
            )
            for i in range(prompts)
        ]

    return master.spec.num_parameters / 1e6, _measure_in_turns(engines, requests, rounds=3)


def _measure_in_turns(
    engines: Mapping[str, Engine], requests: Callable[[int], list[Request]], rounds: int
) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds + 1):
        batch = requests(turn)
        for name, engine in engines.items():
            rate = _tokens_per_second(engine, batch)
            if turn:  # the first turn packs weights and warms caches
                rates[name].append(rate)
    return {name: statistics.median(values) for name, values in rates.items()}


def _tokens_per_second(engine: Engine, requests: list[Request]) -> float:
    began = time.perf_counter()
    groups = engine.generate(requests)
    seconds = time.perf_counter() - began
    return sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts) / seconds


def main(output_dir: str = "outputs/demo", seed: int = 0, device: str = "auto") -> int:
    """Run the demo and return the exit code. ValueError when the folder holds anything but a
    demo."""
    # A second thread gains a third, and loses much on a busy machine (docs/LOG.md).
    torch.set_num_threads(1)
    console = Console()
    began = time.monotonic()
    folder = Path(output_dir)
    cfg = settings(SETTINGS, folder / "model", folder, seed, device)
    clear(folder, cfg)
    untrained = build_model(folder / "untrained", seed, CONFIG)
    console.print(
        f"[bold]1[/] built {untrained}: {hf.load(untrained).spec.num_parameters / 1e6:.2f} M "
        f"parameters, {CONFIG['architectures'][0]}, byte-level tokenizer"
    )
    loss = warm_start(cfg, untrained, folder / "model")["sft/loss"]
    console.print(f"[bold]2[/] warm start: {cfg.sft.steps} SFT steps, loss {loss:.3f} nats a token")
    rewards_before = rewards(cfg, folder / "model")
    console.print(
        f"[bold]3[/] held-out reward before: {rewards_before['sampled']:.3f}; {cfg.train.max_steps} steps "
        "of GRPO with INT8 rollouts and ACR"
    )
    result = run(cfg, overwrite=True)
    if result.signal:
        return interrupted(console, result, "lowroll demo")
    rewards_after = rewards(cfg, result.folder / "final")
    console.print("[bold]4[/] measuring the engines")
    speeds = engine_speed(cfg, result.folder / "final", ("int8", "fp32"))
    size, larger_speeds = larger_speed(cfg, ("int8", "fp32", "bf16"))
    summary(console, cfg, result.records, rewards_before, rewards_after)
    _print_speeds(
        console,
        f"this model of {hf.load(untrained).spec.num_parameters / 1e6:.1f} M parameters",
        speeds,
    )
    _print_speeds(
        console,
        f"{LARGER['num_hidden_layers']} layers of Qwen2.5-0.5B's shape ({size:.0f} M parameters, "
        "random weights), 64 sequences",
        larger_speeds,
    )
    console.print(f"report: {write_report(result.folder)}", soft_wrap=True)
    return verdict(console, rewards_before, rewards_after, MIN_GAIN, MIN_GREEDY_GAIN, began)


def interrupted(console: Console, result: RunResult, command: str) -> int:
    console.print(
        f"interrupted: nothing is measured; `{command}` begins anew, `lowroll grpo "
        f"{result.folder / 'config.yaml'} --resume` goes on with the run alone"
    )
    return 128 + result.signal


def verdict(
    console: Console,
    before: Mapping[str, float],
    after: Mapping[str, float],
    gain: float,
    greedy: float,
    began: float,
) -> int:
    """Print the gains of the held-out reward; return the exit code."""
    sampled_gain, greedy_gain = (after[name] - before[name] for name in ("sampled", "greedy"))
    console.print(
        f"the held-out reward rose by {sampled_gain:.3f} as sampled and by {greedy_gain:.3f} greedily (at least "
        f"{gain} and {greedy} are required) in {time.monotonic() - began:.0f} s",
        soft_wrap=True,
    )
    return 0 if sampled_gain >= gain and greedy_gain >= greedy else 1


def clear(folder: Path, cfg: RunConfig) -> None:
    """Mark a folder as the demo's, and remove an earlier demo's models."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise ValueError(
            f"output_dir: {folder} is not empty and holds no earlier demo; remove it, or name "
            "another folder"
        )
    RunFolder(cfg, "grpo").check(overwrite=True)
    models = [path for path in (folder / "untrained", folder / "model") if path.exists()]
    if foreign := next(filter(None, map(foreign_in, models)), None):
        raise ValueError(
            f"output_dir: {foreign}. The demo would write there: move it, or name another folder"
        )
    for path in models:
        remove_published(path, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def rewards(cfg: RunConfig, model: Path) -> dict[str, float]:
    compute, chat = Compute.of(cfg), models.tokenizer(model)
    master = hf.load(model, compute.device, compute.dtype)
    dense_engine = engines.make(cfg, compute, master, chat, "fp32")
    rollout_engine = engines.make(cfg, compute, master, chat, cfg.rollout.weights)

    def reward(engine: Engine, temperature: float) -> float:
        return held_out_metrics(cfg, engine, chat, temperature)["reward"]

    return {
        "sampled": reward(rollout_engine, 1.0),
        "fp32": reward(dense_engine, 1.0),
        "sharper": reward(rollout_engine, SHARPER),
        "greedy": reward(rollout_engine, 0.0),
    }


def summary(
    console: Console,
    cfg: RunConfig,
    records: list[dict[str, Any]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> None:
    """Print the run's changes. before, after: by `rewards`."""
    rollout_format = cfg.rollout.weights.upper()
    table = Table("", "before", "after", title="What was measured in this run")
    for name, label in (
        ("sampled", f"held-out reward, {cfg.eval.num_examples} prompts, sampled at T = 1"),
        ("fp32", "the same, fp32 engine"),
        ("sharper", f"the same, {rollout_format}, sampled at T = {SHARPER}"),
        ("greedy", f"the same, {rollout_format}, greedy"),
    ):
        table.add_row(label, f"{before[name]:.3f}", f"{after[name]:.3f}")
    mean_rewards, median_kls = [], []
    for steps in (records[:5], records[-5:]):
        mean_rewards.append(statistics.mean(record["reward/mean"] for record in steps))
        median_kls.append(statistics.median(record["mismatch/kl_k3"] for record in steps))
    table.add_row(
        "training reward, first and last 5 steps", *(f"{reward:.3f}" for reward in mean_rewards)
    )
    table.add_row(
        "KL of the rollouts to the learner, nats a token", *(f"{kl:.1e}" for kl in median_kls)
    )
    console.print(table)
    console.print(
        f"Sharpness alone would give {before['sharper'] - before['sampled']:.3f} of the rise at T = "
        f"1: the model before, sampled at T = {SHARPER}, scores {before['sharper']:.3f}. Learnt "
        f"beside it is what rose at T = {SHARPER}, {after['sharper'] - before['sharper']:+.3f}, "
        f"and greedily, {after['greedy'] - before['greedy']:+.3f}.",
        soft_wrap=True,
    )


def _print_speeds(console: Console, what: str, speed: Mapping[str, float]) -> None:
    fastest_dense = max(rate for name, rate in speed.items() if name != "int8")
    rates_text = ", ".join(f"{name} {rate:,.0f}" for name, rate in speed.items())
    console.print(
        f"{what}: {rates_text} tokens/s; INT8 is {speed['int8'] / fastest_dense:.2f} times as fast as the "
        "fastest dense format",
        soft_wrap=True,
        highlight=False,
    )
