"""vLLM as a run's rollout engine.

A started server loads the run's folder if it holds the rollouts' weights, else a written one. Later
versions travel as streams (`weights.sync.update`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig
from lowroll.config.vllm import VllmConfig
from lowroll.engine.base import Engine
from lowroll.engine.remote.vllm.engine import VllmEngine
from lowroll.kv.capacity import Workload
from lowroll.model import hf, lora
from lowroll.model.device import pick_device
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format
from lowroll.model.scoring import score
from lowroll.model.spec import ModelSpec, read_spec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format, stored_format
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.folder import LOGS
from lowroll.runs.session import tell
from lowroll.weights.publish import rollout_copy
from lowroll.weights.sync.base import Kind
from lowroll.weights.sync.update import WeightUpdate

PYTHON = "LOWROLL_VLLM_PYTHON"
_VLLM_PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def interpreter(vllm: VllmConfig) -> str:
    """Return the interpreter that has vLLM. ValueError for none."""
    requested = vllm.python or os.environ.get(PYTHON)
    executable = shutil.which(Path(requested or sys.executable).expanduser())
    if executable is None:
        raise ValueError(f"{_interpreter_key(vllm)}: {requested} is no program that can be run")
    try:
        probe = subprocess.run(
            [executable, "-c", _VLLM_PROBE],
            capture_output=True,
            timeout=60,
            check=False,
            env=_probe_environment(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(
            f"{_interpreter_key(vllm)}: {executable} is no Python that answers ({error})"
        ) from None
    if probe.returncode:
        raise ValueError(
            f"{_interpreter_key(vllm)}: {executable} has no vLLM; install it into an environment of its own "
            f"(docs/vllm.md), and name its interpreter here or in {PYTHON}"
        )
    return executable


def _probe_environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    vllm_path = os.environ.get("LOWROLL_VLLM_PATH")
    return variables if vllm_path is None else variables | {"PYTHONPATH": vllm_path}


def _interpreter_key(vllm: VllmConfig) -> str:
    return PYTHON if vllm.python is None and PYTHON in os.environ else "rollout.vllm.python"


def token(vllm: VllmConfig) -> str | None:
    if vllm.token_env is None:
        return None
    value = os.environ.get(vllm.token_env)
    if not value:
        raise ValueError(f"rollout.vllm.token_env: {vllm.token_env} is not set")
    return value


def check(cfg: RunConfig) -> None:
    """Raise ValueError when vLLM cannot be started or reached."""
    vllm = cfg.rollout.vllm
    if vllm.folder is not None and not Path(vllm.folder).is_dir():
        raise ValueError(f"rollout.vllm.folder: {vllm.folder} is no folder")
    if vllm.transfer == "nccl" and pick_device(cfg.device).type != "cuda":
        raise ValueError(
            "rollout.vllm.transfer: nccl moves weights between GPUs, and device is cpu"
        )
    if vllm.url is None:
        interpreter(vllm)
    else:
        token(vllm)


def refuse(cfg: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError for an adapter that vLLM would not apply."""
    if (
        cfg.train.lora
        and spec.latent is not None
        and lora.NOT_IN_VLLM in cfg.train.lora_target_modules
    ):
        raise ValueError(
            f"train.lora_target_modules: vLLM loads an adapter of {lora.NOT_IN_VLLM} and applies it "
            "nowhere; leave it out, or take rollout.engine: native"
        )


def context(cfg: RunConfig, spec: ModelSpec) -> int:
    max_model_len = cfg.rollout.max_model_len or spec.max_position
    return min(spec.max_position, max_model_len, cfg.train.longest)


def make(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    weights: str,
    workloads: Sequence[Workload],
) -> VllmEngine:
    """Attach to the vLLM at rollout.vllm.url, which outlives `close`, or start one. Its log-probs
    are compared with `model`'s after every update."""
    if cfg.rollout.vllm.url is not None:
        return _attach(cfg, model, weights)
    logs = Path(cfg.output_dir) / LOGS
    log = logs / "vllm.log" if logs.is_dir() else None
    return _start(cfg, compute, lambda: model, weights, log, **_verification(model))


def serve(cfg: RunConfig, log: Path, socket: Path) -> VllmEngine:
    """Start a vLLM for a learner in another process. socket: the folder of its socket."""
    check(cfg)
    refuse(cfg, read_spec(resolve(cfg.model, weights=False)))
    compute = Compute.of(cfg)
    weights = compute.format(cfg.rollout.weights)
    return _start(cfg, compute, lambda: models.learner(cfg, compute), weights, log, socket=socket)


def _start(
    cfg: RunConfig,
    compute: Compute,
    learner: Callable[[], Transformer],
    weights: str,
    log: Path | None,
    **more: Any,
) -> VllmEngine:
    vllm = cfg.rollout.vllm
    temporary_folder = tempfile.TemporaryDirectory(prefix="lowroll-vllm-", dir=vllm.folder)
    base = base_folder(cfg, compute, learner, weights, Path(temporary_folder.name))
    engine = _with_setting_names(
        VllmEngine.start,
        base,
        log=log,
        python=interpreter(vllm),
        devices=vllm.devices,
        dtype=vllm.dtype or str(compute.dtype).removeprefix("torch."),
        tensor_parallel=vllm.tensor_parallel_size,
        gpu_memory=vllm.gpu_memory_utilization if compute.device.type == "cuda" else None,
        context_length=context(cfg, read_spec(base)),
        max_batch=cfg.rollout.max_batch,
        arguments=vllm.serve_args,
        tell=tell,
        **_common_options(cfg),
        **more,
    )
    weakref.finalize(engine, temporary_folder.cleanup)
    return engine


def begin(cfg: RunConfig, model: Transformer, engine: Engine) -> None:
    """Send the learner's weights. ValueError names what this vLLM lacks."""
    capabilities, needed_tokens = engine.capabilities, context(cfg, model.spec)
    if capabilities.context_length < needed_tokens:
        raise ValueError(
            f"train.tokens_per_microbatch: prompts and responses of up to {needed_tokens} tokens are "
            f"asked for, and this vLLM's context is {capabilities.context_length} (--max-model-len)"
        )
    kind: Kind = "adapter" if cfg.train.lora else "full"
    if kind not in capabilities.updates:
        supported = " and ".join(sorted(capabilities.updates)) or "none"
        raise ValueError(
            f"train.lora: updates of kind {kind!r} are needed, and this vLLM takes {supported}"
        )
    engine.update_weights(WeightUpdate.local(model, 0).as_stream())


def _attach(cfg: RunConfig, model: Transformer, weights: str) -> VllmEngine:
    vllm = cfg.rollout.vllm
    source = resolve(cfg.model)
    folder = source if _is_stored_in(source, weights) else None
    return _with_setting_names(
        VllmEngine.attach,
        vllm.url,
        folder,
        token=token(vllm),
        **_common_options(cfg),
        **_verification(model),
    )


def _with_setting_names(make: Callable[..., VllmEngine], *args: Any, **options: Any) -> VllmEngine:
    try:
        return make(*args, **options)
    except ValueError as error:
        raise ValueError(f"rollout.vllm: {error}") from None


def _verification(model: Transformer) -> dict[str, Any]:
    return {"verify": lambda ids: score(model, [ids], [1])[0].tolist()}


def _common_options(cfg: RunConfig) -> dict[str, Any]:
    vllm, train = cfg.rollout.vllm, cfg.train
    return {
        "lora_rank": (vllm.max_lora_rank or train.lora_rank) if train.lora else None,
        "way": vllm.transfer,
        "exchange": None if vllm.folder is None else Path(vllm.folder),
        "request_s": cfg.client.timeout,
    }


def base_folder(
    cfg: RunConfig,
    compute: Compute,
    learner: Callable[[], Transformer],
    weights: str,
    room: Path,
) -> Path:
    """Return the run's model if it holds the rollouts' weights, else a folder written into
    `room`."""
    source = resolve(cfg.model)
    if _is_stored_in(source, weights):
        return source
    rollout = rollout_copy(learner(), weights, get_format(weights).dtype or compute.dtype)
    for _, linear in rollout.linears():
        linear.adapter = None
    return hf.save(rollout, room / "base", tokenizer_from=source)


def _is_stored_in(folder: Path, weights: str) -> bool:
    stored_name = None if get_format(weights).dense else stored_format(weights)
    return low_bit_format(folder) == stored_name
