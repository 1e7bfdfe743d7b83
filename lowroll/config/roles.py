"""The sections of a run whose engine, orchestrator and trainer are processes of their own, and of
its asynchrony. A run in one process has level 0 and reads none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Strict

from lowroll.config.env import Variable
from lowroll.config.ray import ray_notes, ray_problems
from lowroll.config.section import Count, Positive, Problem, Section, Text
from lowroll.config.vllm import Url

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig

Launcher = Literal["none", "local", "ray"]
Port = Annotated[int, Field(ge=1, le=65535)]
FreePort = Annotated[int, Field(ge=0, le=65535)]  # 0: one that is free
Whole = Annotated[int, Field(ge=0)]


class AsynchronyConfig(Section):
    """The lag of the rollouts behind the learner, in steps. Version v of the weights is that after
    step v; batch n is drawn from version n - 1 - max_async_level on."""

    max_async_level: Whole = 0  # steps that the rollouts may lag behind the learner
    # exactly that version: no newer one is taken before its turn
    strict_async_level: bool = False
    # a rollout in flight survives so many updates of its engine's weights
    max_off_policy_steps: Whole = 8
    # requests in flight, over those of a batch
    oversampling_factor: Annotated[float, Field(ge=1, le=64)] = 1.0
    # responses that an update finds unfinished: none are there, since a batch waits for all; they
    # go on on what they have (keep); or their cache is made anew under the new weights (replay)
    partial: Literal["none", "keep", "replay"] = "none"


class ElasticConfig(Section):
    """Engines found by the addresses of a DNS name; asked for again every `sync_interval`
    seconds."""

    hostname: Text | None = None  # null: the engines are those of client.base_url
    port: Port = 8000  # of every engine
    sync_interval: Positive = 5.0  # seconds between two looks


class ClientConfig(Section):
    """The connection of the orchestrator to its engines."""

    base_url: Annotated[tuple[Url, ...], Strict(False)] = ()  # []: the launcher's own
    timeout: Positive = 1200.0  # seconds that one request may take
    api_key_var: Variable = "VLLM_API_KEY"  # environment variable with their token; absent: none
    skip_model_check: bool = False  # take engines that serve a model of another name
    elastic: ElasticConfig = ElasticConfig()


class RolloutTransportConfig(Section):
    """The transport of batches from the orchestrator to the trainer."""

    # by files of the run's folder, or by a socket
    type: Literal["filesystem", "zmq"] = "filesystem"
    host: Text = "localhost"  # zmq: where the orchestrator listens, and the trainer asks
    port: FreePort = 5555  # zmq; 0: one that is free
    hwm: Count = 10  # batches that may wait for the trainer


class WeightBroadcastConfig(Section):
    """The transport of weights from the trainer to the engines."""

    type: Literal["filesystem", "nccl", "cuda_ipc"] = "filesystem"  # by files, or from GPU to GPU
    host: Text = "localhost"  # nccl: where the ranks meet
    port: FreePort = 29501  # nccl; 0: one that is free
    timeout: Positive = 1200.0  # seconds until every engine has them


class ServeConfig(Section):
    """The address at which the engine listens, for the role `serve`."""

    host: Text = "127.0.0.1"  # address to listen at; one that others reach takes a token
    port: FreePort = 8000  # 0: one that is free


def role_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Settings of the roles that cannot work together."""
    level = cfg.asynchrony
    if level.max_off_policy_steps < level.max_async_level:
        yield (
            (("asynchrony", "max_off_policy_steps"), ("asynchrony", "max_async_level")),
            f"max_off_policy_steps ({level.max_off_policy_steps}) is less than max_async_level "
            f"({level.max_async_level}): rollouts would be dropped that the level allows",
        )
    if cfg.client.base_url and cfg.client.elastic.hostname is not None:
        yield (
            (("client", "elastic", "hostname"), ("client", "base_url")),
            "set either client.base_url or client.elastic.hostname, not both",
        )
    if len(set(cfg.client.base_url)) != len(cfg.client.base_url):
        yield (("client", "base_url"),), "the same address stands twice"
    named = cfg.client.base_url or cfg.client.elastic.hostname
    if cfg.rollout.engines > 1 and named:
        key = "base_url" if cfg.client.base_url else "elastic"
        yield (
            (("rollout", "engines"), ("client", key)),
            f"{cfg.rollout.engines} are asked for, and client.{key} says which there are; leave "
            "rollout.engines out",
        )
    if level.partial == "keep" and cfg.rollout.release_cache:
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
    yield from ray_problems(cfg)


def one_process_problems(cfg: RunConfig) -> list[str]:
    """List the requested settings that a run in one process (launcher: none) cannot have, a line
    each."""
    level, client = cfg.asynchrony, cfg.client
    told = []
    if cfg.rollout.engines > 1:
        told.append(
            f"rollout.engines: {cfg.rollout.engines}: one process has one engine; several are for "
            "launcher: local"
        )
    if cfg.train.gpus > 1:
        told.append(
            f"train.gpus: {cfg.train.gpus}: one process learns on one GPU; several are for launcher: "
            "local, or `lowroll train`"
        )
    if level.strict_async_level and level.max_async_level:
        told.append(
            f"asynchrony.strict_async_level: rollouts {level.max_async_level} steps behind need "
            "launcher: local; one process has the newest weights"
        )
    for key, given in (
        ("client.base_url", bool(client.base_url)),
        ("client.elastic.hostname", client.elastic.hostname is not None),
    ):
        if given:
            told.append(
                f"{key}: a run in one process has an engine of its own; engines elsewhere are for "
                "launcher: local, or `lowroll orchestrate`"
            )
    return told


def one_process_notes(cfg: RunConfig) -> list[str]:
    """List what a run in one process does otherwise than requested, a line each."""
    level = cfg.asynchrony.max_async_level
    if level == 0:
        return []
    return [
        f"asynchrony.max_async_level: {level} has no effect: one process rolls out with the newest "
        "weights (level 0); launcher=local has processes that do not wait for each other"
    ]


def role_notes(cfg: RunConfig) -> Iterator[str]:
    """Yield the settings that have no effect, or that deserve a second look."""
    level = cfg.asynchrony
    if level.strict_async_level and level.max_async_level == 0:
        yield "asynchrony.strict_async_level: no effect at max_async_level 0, which is strict"
    if cfg.client.skip_model_check:
        yield (
            "warning: client.skip_model_check: engines that serve another model are taken as they "
            "are; what they draw is not of this run's model"
        )
    yield from ray_notes(cfg)
