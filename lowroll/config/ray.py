"""`launcher: ray` and its section: on which cluster the roles run, and what each of them gets there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Strict
from pydantic_core import PydanticCustomError

from lowroll.config.env import Variable
from lowroll.config.section import Count, NotNegative, Positive, Problem, Section, Text, unique

if TYPE_CHECKING:
    from lowroll.config.schema import RunConfig


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text == "auto" or (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return text
    raise PydanticCustomError(
        "address", "{text}", {"text": "must be auto, or host:port of the cluster's head node"}
    )


class RayConfig(Section):
    """Read by launcher: ray alone. A GPU that several roles share is a fraction, such as 0.5."""

    # of a cluster that runs already: auto, or host:port; null: one of this command's own, here
    address: Annotated[Text, AfterValidator(_address)] | None = None
    trainer_cpus: Count = 1  # on one node
    # on the same node; null: train.gpus, where the cluster has GPUs
    trainer_gpus: NotNegative | None = None
    orchestrator_cpus: Count = 1  # it needs no GPU
    engine_cpus: Count = 1  # of each
    # of each; null: what one engine needs, where the cluster has GPUs
    engine_gpus: NotNegative | None = None
    node_deadline: Positive = 600.0  # seconds until the cluster has room for a role
    # further variables of the command's environment that the roles get
    pass_env: Annotated[tuple[Variable, ...], Strict(False), AfterValidator(unique)] = ()


def ray_problems(cfg: RunConfig) -> Iterator[Problem]:
    """Yield the settings that roles on several machines cannot have."""
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


def ray_notes(cfg: RunConfig) -> Iterator[str]:
    """Warn of a changed section that has no effect."""
    if cfg.launcher != "ray" and cfg.ray != RayConfig():
        yield f"ray: no effect, launcher is {cfg.launcher}"
