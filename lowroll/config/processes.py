"""The sections of a run with separate processes, and of its asynchrony. A run in one process uses
none of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.section import (
    Count,
    NotNegative,
    Positive,
    Section,
    Text,
    Variable,
    Whole,
    unique,
)
from lowroll.config.vllm import Url

Launcher = Literal["none", "local", "ray"]
Port = Annotated[int, Field(ge=1, le=65535)]
FreePort = Annotated[int, Field(ge=0, le=65535)]  # 0: a free one


class AsynchronyConfig(Section):
    """The lag of the rollouts behind the learner, in steps. Batch n is drawn from version n - 1 -
    max_async_level on, where version v is that after step v."""

    max_async_level: Whole = 0  # steps that the rollouts may lag behind the learner
    # use exactly that version, and no newer one before its turn
    strict_async_level: bool = False
    # weight updates that a rollout in flight survives
    max_off_policy_steps: Whole = 8
    # requests in flight, as a multiple of a batch
    oversampling_factor: Annotated[float, Field(ge=1, le=64)] = 1.0
    # unfinished responses at an update. none: there are none, since a batch waits for all; keep:
    # they continue with their cache; replay: with a cache rebuilt under the new weights
    partial: Literal["none", "keep", "replay"] = "none"


class ElasticConfig(Section):
    """Engines at the addresses of a DNS name."""

    hostname: Text | None = None  # null: the engines of client.base_url
    port: Port = 8000  # of every engine
    sync_interval: Positive = 5.0  # seconds between look-ups


class ClientConfig(Section):
    """The connection of the orchestrator to its engines."""

    base_url: Annotated[tuple[Url, ...], Strict(False)] = ()  # []: the launcher's own
    timeout: Positive = 1200.0  # seconds for a request
    api_key_var: Variable = "VLLM_API_KEY"  # environment variable with their token; absent: none
    skip_model_check: bool = False  # accept engines that serve another model
    elastic: ElasticConfig = ElasticConfig()


class RolloutTransportConfig(Section):
    """The transport of batches from the orchestrator to the trainer."""

    # by files of the run's folder, or by a socket
    type: Literal["filesystem", "zmq"] = "filesystem"
    host: Text = "localhost"  # zmq: where the orchestrator listens, and the trainer connects
    port: FreePort = 5555  # zmq; 0: a free one
    hwm: Count = 10  # batches that may wait for the trainer


class WeightBroadcastConfig(Section):
    """The transport of weights from the trainer to the engines."""

    type: Literal["filesystem", "nccl", "cuda_ipc"] = "filesystem"  # by files, or from GPU to GPU
    host: Text = "localhost"  # nccl: where the ranks meet
    port: FreePort = 29501  # nccl; 0: a free one
    timeout: Positive = 1200.0  # seconds until every engine has them


class ServeConfig(Section):
    """The address at which the engine listens, for the role `serve`."""

    host: Text = "127.0.0.1"  # address to listen at; one that others reach needs a token
    port: FreePort = 8000  # 0: a free one


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text == "auto" or (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return text
    raise PydanticCustomError(
        "address", "{text}", {"text": "must be auto, or host:port of the cluster's head node"}
    )


class RayConfig(Section):
    """Used only by launcher: ray. A GPU that several roles share is a fraction, such as 0.5."""

    # of a running cluster: auto, or host:port; null: this command starts its own, here
    address: Annotated[Text, AfterValidator(_address)] | None = None
    trainer_cpus: Count = 1  # on one node
    # on the same node; null: train.gpus, if the cluster has GPUs
    trainer_gpus: NotNegative | None = None
    orchestrator_cpus: Count = 1  # it needs no GPU
    engine_cpus: Count = 1  # of each
    # of each; null: what one engine needs, if the cluster has GPUs
    engine_gpus: NotNegative | None = None
    node_deadline: Positive = 600.0  # seconds for the cluster to place a role
    # further variables of the command's environment for the roles
    pass_env: Annotated[tuple[Variable, ...], Strict(False), AfterValidator(unique)] = ()
