"""The settings that roles, or one process, do not support."""

from __future__ import annotations

from collections.abc import Iterator

from lowroll.config.processes import RayConfig
from lowroll.config.schema import RunSettings
from lowroll.config.section import Problem


def role_problems(cfg: RunSettings) -> Iterator[Problem]:
    asynchrony = cfg.asynchrony
    if asynchrony.max_off_policy_steps < asynchrony.max_async_level:
        yield (
            (("asynchrony", "max_off_policy_steps"), ("asynchrony", "max_async_level")),
            f"max_off_policy_steps ({asynchrony.max_off_policy_steps}) is less than max_async_level "
            f"({asynchrony.max_async_level}): rollouts would be dropped that the level allows",
        )
    if cfg.client.base_url and cfg.client.elastic.hostname is not None:
        yield (
            (("client", "elastic", "hostname"), ("client", "base_url")),
            "set either client.base_url or client.elastic.hostname, not both",
        )
    if len(set(cfg.client.base_url)) != len(cfg.client.base_url):
        yield (("client", "base_url"),), "the same address stands twice"
    named_engines = cfg.client.base_url or cfg.client.elastic.hostname
    if cfg.rollout.engines > 1 and named_engines:
        key = "base_url" if cfg.client.base_url else "elastic"
        yield (
            (("rollout", "engines"), ("client", key)),
            f"{cfg.rollout.engines} are asked for, and client.{key} says which there are; leave "
            "rollout.engines out",
        )
    if asynchrony.partial == "keep" and cfg.rollout.release_cache:
        yield (
            (("asynchrony", "partial"), ("rollout", "release_cache")),
            "keep has responses in the cache over an update, and rollout.release_cache gives the "
            "cache away; write replay",
        )
    if cfg.train.sharding == "full" and cfg.train.gpus == 1:
        yield (
            (("train", "sharding"), ("train", "gpus")),
            "full shares the model between several GPUs, and train.gpus is 1",
        )
    if cfg.weight_broadcast.type == "nccl" and cfg.train.lora:
        yield (
            (("weight_broadcast", "type"), ("train", "lora")),
            "nccl is for all weights; an adapter travels by files",
        )
    yield from _ray_problems(cfg)


def _ray_problems(cfg: RunSettings) -> Iterator[Problem]:
    if cfg.launcher != "ray" or cfg.ray.address is None:
        return
    if cfg.weight_broadcast.type == "cuda_ipc":
        yield (
            (("weight_broadcast", "type"), ("ray", "address")),
            "cuda_ipc needs the trainer and the engines on one machine, and Ray may place them "
            "elsewhere; write nccl or filesystem",
        )
    if cfg.rollout.engine == "vllm" and not cfg.client.base_url:
        yield (
            (("rollout", "engine"), ("ray", "address")),
            "a vLLM that a role starts is reached on its own machine alone; start it by itself "
            "(docs/vllm.md), and name it in client.base_url",
        )


def one_process_problems(cfg: RunSettings) -> list[str]:
    """List the settings that need roles (launcher: none), a line each."""
    asynchrony, client = cfg.asynchrony, cfg.client
    elsewhere = (
        "a run in one process has an engine of its own; engines elsewhere are for launcher: local, "
        "or `lowroll orchestrate`"
    )
    rows = (
        (
            cfg.rollout.engines > 1,
            f"rollout.engines: {cfg.rollout.engines}: one process has one engine; several are for "
            "launcher: local",
        ),
        (
            cfg.train.gpus > 1,
            f"train.gpus: {cfg.train.gpus}: one process learns on one GPU; several are for launcher: "
            "local, or `lowroll train`",
        ),
        (
            asynchrony.strict_async_level and asynchrony.max_async_level,
            f"asynchrony.strict_async_level: rollouts {asynchrony.max_async_level} steps behind need "
            "launcher: local; one process has the newest weights",
        ),
        (client.base_url, f"client.base_url: {elsewhere}"),
        (client.elastic.hostname is not None, f"client.elastic.hostname: {elsewhere}"),
    )
    return [message for is_set, message in rows if is_set]


def one_process_notes(cfg: RunSettings) -> list[str]:
    """List what one process does otherwise than requested, a line each."""
    max_async_level = cfg.asynchrony.max_async_level
    if max_async_level == 0:
        return []
    return [
        f"asynchrony.max_async_level: {max_async_level} has no effect: one process rolls out with the newest "
        "weights (level 0); launcher=local has processes that do not wait for each other"
    ]


def role_notes(cfg: RunSettings) -> Iterator[str]:
    """Yield settings that have no effect, or deserve a second look."""
    asynchrony = cfg.asynchrony
    if asynchrony.strict_async_level and asynchrony.max_async_level == 0:
        yield "asynchrony.strict_async_level: no effect at max_async_level 0, which is strict"
    if cfg.client.skip_model_check:
        yield (
            "warning: client.skip_model_check: engines that serve another model are taken as they "
            "are; what they draw is not of this run's model"
        )
    if cfg.launcher != "ray" and cfg.ray != RayConfig():
        yield f"ray: no effect, launcher is {cfg.launcher}"
