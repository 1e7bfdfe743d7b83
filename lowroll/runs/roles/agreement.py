"""The check that the roles of a run agree on shared settings. No torch.

The trainer's are in RUN/config.yaml; engines report theirs on connection.
"""

from __future__ import annotations

from functools import reduce
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig, load
from lowroll.engine.remote.pool import EnginePool
from lowroll.model.folder import resolve
from lowroll.quant.table import is_dense
from lowroll.runs.assembly import capabilities
from lowroll.runs.folder import CONFIG
from lowroll.types import printable

# The keys of every orchestrator's file. A run.yaml also has those of OF_RUN.
ALWAYS = (
    "model",
    "batch_size",
    "rollouts_per_example",
    "train.max_steps",
    "asynchrony.max_async_level",
    "rollout_transport.type",
)
OF_RUN = (
    "seed",
    "env",
    "stages",
    "algorithm",
    "advantage",
    "noise",
    "rollout.weights",
    "rollout.kv",
    "rollout.max_tokens",
    "rollout.temperature",
    "train.lora",
    "train.lora_rank",
    "train.lora_alpha",
    "train.tokens_per_microbatch",
)
OURS = "policy"  # the model's name in a vLLM that lowroll started


def check_trainer(cfg: RunConfig, run: Path, trainer: str) -> RunConfig:
    """Return the trainer's settings. ValueError names the file and the differing key."""
    trainer_cfg = load(run / CONFIG)
    for key in ALWAYS if cfg.given else (*ALWAYS, *OF_RUN):
        own_value, trainer_value = _setting(cfg, key), _setting(trainer_cfg, key)
        if own_value != trainer_value:
            raise ValueError(
                f"{cfg.source}: {key}: {_format_value(own_value)} here, and "
                f"{_format_value(trainer_value)} in {run / CONFIG}, which the {trainer} "
                "was given; the roles of a run share one value"
            )
    return trainer_cfg


def check_engines(cfg: RunConfig, pool: EnginePool) -> None:
    """Raise ValueError for engines that do not match the trainer's settings."""
    offered, behavior, served_model = pool.capabilities, pool.behavior, pool.server.model
    capabilities.check(cfg, offered)
    folder = resolve(cfg.model, weights=False)
    accepted_names = (
        cfg.model,
        folder.name,
        folder.resolve().name,
        str(folder),
        str(folder.resolve()),
    )
    if served_model not in (*accepted_names, OURS) and not cfg.client.skip_model_check:
        raise ValueError(
            f"model: {cfg.model} is the run's, and the engines serve {printable(served_model)} "
            "(client.skip_model_check: true takes them)"
        )
    if offered.lora_rank is None:
        return  # a vLLM rejects unsupported requests itself
    _check_formats(cfg, behavior.weights)
    _check_adapters(cfg, offered.lora_rank)


def _check_formats(cfg: RunConfig, held: str) -> None:
    key, required = "rollout.weights", cfg.rollout.weights
    if (second := cfg.rollout.large_batch_weights) is not None:
        key, required = "rollout.large_batch_weights", f"{required}+{second}"
    if not _same_formats(required, held):
        raise ValueError(f"{key}: {required} is asked for, and the engines have {printable(held)}")


def _check_adapters(cfg: RunConfig, max_rank: int) -> None:
    if cfg.train.lora and max_rank < cfg.train.lora_rank:
        support = f"adapters up to rank {max_rank}" if max_rank else "no adapters"
        raise ValueError(
            f"train.lora_rank: {cfg.train.lora_rank} is learned, and the engines take {support} "
            "(train.lora_rank of run.yaml, max_lora_rank of infer.yaml, --lora-rank)"
        )
    if not cfg.train.lora and max_rank:
        raise ValueError("train.lora: all weights learn, and the engines take adapters alone")


def _same_formats(wanted: str, held: str) -> bool:
    """Compare formats for few rows, and for many after a "+"."""
    pairs = list(zip_longest(wanted.split("+"), held.split("+"), fillvalue=""))
    return all(a == b or (is_dense(a) and is_dense(b)) for a, b in pairs)


def _setting(cfg: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), cfg.sized())


def _format_value(value: Any) -> str:
    return printable(repr(value) if isinstance(value, str | tuple) else value, 200)
