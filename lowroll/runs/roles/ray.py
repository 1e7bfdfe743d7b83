"""`launcher: ray`: the roles of a run on a Ray cluster.

A placement group has a bundle for each role. Ray finds another node for a lost bundle, where the
role is restarted.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig
from lowroll.runs.roles.ray_actor import THREADS, WORD, ActorProcess, Bundle
from lowroll.runs.roles.run_paths import (
    ENGINE_ROLE,
    ORCHESTRATOR,
    TRAINER,
    RunPaths,
    engine_roles,
    new_tokens,
)
from lowroll.runs.session import tell
from lowroll.transport.base import wait_until
from lowroll.types import RunFailed, printable

MODE, RAYS_TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
PASSED = ("LOWROLL_", "HF_", "WANDB_", "MLFLOW_", "TRACKIO_", "NCCL_", "GLOO_")
POLL_S = 0.1
# Ray reads its token settings at import, so this is a separate program. It exits with 0 when the
# cluster answers a client without a token.
AUTH_PROBE = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10.0)
"""
AUTH_PROBE_S = 120.0  # importing Ray takes long on a busy machine
OWN = {  # of our own cluster
    "prestart_worker_first_driver": False,  # unused
    "worker_niceness": 0,  # Ray's 15 would slow the roles
}
QUIET = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "lowroll"}
STORE = 80 << 20  # bytes of our own cluster's unused object store


def processes(cfg: RunConfig, paths: RunPaths, stack: ExitStack) -> dict[str, ActorProcess]:
    """Return the roles' processes, placed and not started. Closing `stack` ends and frees them.

    ValueError names a node that does not see the run folder, RunFailed a role without a node.
    """
    stack.enter_context(_connect_cluster(cfg))
    variables_path, word = stack.enter_context(role_variables(cfg, paths))
    meeting_arguments = (os.getcwd(), variables_path, word)
    demand_by_role = demands(cfg, _cluster_gpus())
    deadline_s = cfg.ray.node_deadline
    group = stack.enter_context(_reserve_group(demand_by_role, deadline_s))
    actor_processes = {}
    for index, (role, (cpus, gpus)) in enumerate(demand_by_role.items()):
        bundle = Bundle(group, index, cpus, gpus)
        process = ActorProcess(
            role, bundle, meeting_arguments, deadline_s, paths.log(role), paths.lock(role)
        )
        stack.callback(process.leave)
        actor_processes[role] = process
    timeout_s = deadline_s + POLL_S  # a process reports a missing node earlier
    wait_until(
        # a list: asking creates a missing actor, so all are asked each time
        lambda: all([process.is_placed() for process in actor_processes.values()]),
        "the actors of Ray",
        timeout_s,
    )
    for role, process in actor_processes.items():
        tell(f"{role} on {process.address} ({printable(process.node['host'])})")
    return actor_processes


def demands(cfg: RunConfig, gpus: float) -> dict[str, tuple[float, float]]:
    """Return the (CPUs, GPUs) of each role. gpus: of the cluster."""
    ray, rollout = cfg.ray, cfg.rollout
    gpus_per_engine = 1 if rollout.engine == "native" else rollout.vllm.tensor_parallel_size
    uses_gpus = bool(gpus) and cfg.device != "cpu"
    trainer_gpus, engine_gpus = ray.trainer_gpus, ray.engine_gpus
    if trainer_gpus is None:
        trainer_gpus = float(cfg.train.gpus if uses_gpus else 0)
    if engine_gpus is None:
        engine_gpus = float(gpus_per_engine if uses_gpus else 0)
    demand_by_role: dict[str, tuple[float, float]] = {
        TRAINER: (ray.trainer_cpus, trainer_gpus),
        ORCHESTRATOR: (ray.orchestrator_cpus, 0.0),
    }
    return demand_by_role | {role: (ray.engine_cpus, engine_gpus) for role in engine_roles(cfg)}


def package(address: str | None) -> Any:
    """Import Ray with token authentication. ValueError when it is missing or in use."""
    if sys.modules.get("ray") and os.environ.get(MODE) != "token":
        raise ValueError(
            f"launcher: ray: ray was imported before, without {MODE}=token in the environment: it reads "
            "that when it is imported"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is not None:
        os.environ.setdefault(MODE, "token")
    else:
        os.environ[MODE], os.environ[RAYS_TOKEN] = "token", secrets.token_hex(32)
    try:
        import ray
    except ImportError:
        raise ValueError(
            "launcher: ray needs the package 'ray': pip install 'lowroll[ray]'"
        ) from None
    if ray.is_initialized():
        raise ValueError("launcher: ray: this process is connected to a Ray cluster already")
    return ray


@contextmanager
def _connect_cluster(cfg: RunConfig) -> Iterator[None]:
    ray, address = package(cfg.ray.address), cfg.ray.address
    try:
        if address is None:
            with _own_cluster(cfg, ray):
                yield
        else:
            _join_cluster(ray, address)
            yield
    finally:
        ray.shutdown()


def _join_cluster(ray: Any, address: str) -> None:
    try:
        if is_loopback(address.rpartition(":")[0]):
            _keep_loopback()
        ray.init(address=address, **QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ValueError(_describe_failure(address, error)) from None
    if os.environ[MODE] == "token":
        refuse_open(address, ray.get_runtime_context().gcs_address)
    else:
        tell(
            f"warning: {MODE} is {printable(os.environ[MODE])}: whoever reaches the Ray cluster "
            "can run programs on it (docs/ray.md)"
        )


@contextmanager
def _own_cluster(cfg: RunConfig, ray: Any) -> Iterator[None]:
    min_cpus = sum(int(cpus) for cpus, _ in demands(cfg, 0).values())
    # private, which Ray does not ensure, and short, as socket names must be
    folder = tempfile.mkdtemp(prefix="lowroll-ray-", dir="/tmp")
    _keep_loopback()
    try:
        try:
            context = ray.init(
                num_cpus=max(min_cpus, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=STORE,
                _node_ip_address="127.0.0.1",
                _temp_dir=f"{folder}/ray",
                _system_config=OWN,
                **QUIET,
            )
        except Exception as error:
            raise RunFailed(
                f"launcher: ray: Ray does not start here: {printable(error, 300)} On a machine that is "
                "busy its parts miss deadlines of their own, of 15 and 30 s"
            ) from error
        host = context.address_info["node_ip_address"]
        if not is_loopback(host):
            raise RunFailed(f"Ray listens at {host}, and was asked to at 127.0.0.1")
        yield
    finally:
        ray.shutdown()
        os.environ.pop(RAYS_TOKEN, None)
        shutil.rmtree(folder, ignore_errors=True)


def _keep_loopback() -> None:
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = False


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_open(named: str, address: str) -> None:
    """Raise ValueError for a cluster that accepts clients without a token."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | {MODE: "disabled"}
    probe = subprocess.Popen(
        [sys.executable, "-P", "-c", AUTH_PROBE, address],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, error_output = probe.communicate(timeout=AUTH_PROBE_S)
    except subprocess.TimeoutExpired:
        probe.kill()
        _, error_output = probe.communicate(timeout=AUTH_PROBE_S)
    if probe.returncode == 0:
        raise ValueError(
            f"ray.address: {named}: this cluster asks nobody for a token: whoever reaches it can run "
            f"programs on it. Start it with {MODE}=token (docs/ray.md), or, where nobody else reaches "
            f"it, write {MODE}=disabled before this command"
        )
    if "token" not in error_output.lower():
        last_line = printable((error_output.strip().splitlines() or ["no answer"])[-1], 200)
        tell(
            f"warning: whether the Ray cluster asks for a token was not to be found out: {last_line}"
        )


def _describe_failure(address: str, error: Exception) -> str:
    causes = [
        str(exception)
        for exception in (error, error.__cause__, error.__context__)
        if exception is not None
    ]
    if any("token" in cause.lower() for cause in causes):
        return (
            f"ray.address: {address}: no token, or not the cluster's, which is RAY_AUTH_TOKEN, or in "
            "the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token (docs/ray.md)"
        )
    return f"ray.address: {address}: {printable(causes[0].strip().partition(chr(10))[0], 300)}"


def _cluster_gpus() -> float:
    import ray

    return float(ray.cluster_resources().get("GPU", 0))


@contextmanager
def _reserve_group(wanted: dict[str, tuple[float, float]], deadline_s: float) -> Iterator[Any]:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    bundles = [{"CPU": cpus} | ({"GPU": gpus} if gpus else {}) for cpus, gpus in wanted.values()]
    group = placement_group(bundles, strategy="SPREAD")
    try:
        if not group.wait(deadline_s):
            resources = ray.cluster_resources()
            demands_text = ", ".join(
                f"{role} {cpus:g} CPUs and {gpus:g} GPUs" for role, (cpus, gpus) in wanted.items()
            )
            raise RunFailed(
                f"the Ray cluster has had no room within {deadline_s:.0f} s (ray.node_deadline) for "
                f"{demands_text}, each on one node: it has {resources.get('CPU', 0):g} CPUs and "
                f"{resources.get('GPU', 0):g} GPUs in all"
            )
        yield group
    finally:
        remove_placement_group(group)


@contextmanager
def role_variables(cfg: RunConfig, paths: RunPaths) -> Iterator[tuple[str, str]]:
    """Write the roles' environment variables into a private file, because secrets do not go through
    Ray. Yield its path and a word that identifies it."""
    names = {THREADS, cfg.client.api_key_var, *cfg.ray.pass_env}
    names.update(name for env in (*cfg.env, *(cfg.eval.env or ())) for name in env.pass_env)
    inherited = {k: v for k, v in os.environ.items() if k in names or k.startswith(PASSED)}
    roles = engine_roles(cfg)
    if roles:
        inherited |= new_tokens()
    word = secrets.token_hex(16)
    content: dict[str, Any] = {WORD: word, "all": inherited} | {
        role: {ENGINE_ROLE: role} for role in roles
    }
    path = (paths.roles / "variables.json").absolute()
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        yield str(path), word
    finally:
        Path(path).unlink(missing_ok=True)
