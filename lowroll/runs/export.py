"""The export of a dense model as a quantized folder, and of a run's checkpoint.

    quantize_folder    dense folder -> low-bit folder in a rollout format
    export_run         run folder -> merged   one dense model with the learner's logits
                                     adapter  the LoRA adapter, in PEFT's format
                                     rollout  what the engine samples from, bit for bit, without noise

`rollout` of a LoRA run is the adapter, with its quantized base in the folder `base`. An adapter
folder (`model.adapter_base`) may replace the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowroll.checkpoint.atomic_folders import publish_folder
from lowroll.checkpoint.store import Checkpoint, Store
from lowroll.config import RunConfig, load
from lowroll.model import adapter_base, adapter_card, hf, lora, stacked
from lowroll.model.adapter_base import base_of
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format, read_folder_layout
from lowroll.model.spec import read_config
from lowroll.model.tokenizer import tokenizer_home
from lowroll.model.transformer import Transformer
from lowroll.quant import dense, mixed
from lowroll.quant.format_budget import is_budget
from lowroll.quant.formats import get_format
from lowroll.quant.layouts import unread_by_transformers
from lowroll.runs import chosen_formats, sft
from lowroll.runs.assembly import engines, models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.monitor import fallen_to
from lowroll.runs.policy_gap import PolicyGap, gap_between, newest_batch, publish_adapter, scores
from lowroll.trainer.state import restore_weights
from lowroll.types import Batch
from lowroll.weights.publish import dequantize_base, digest, quantize_base, rollout_copy

KINDS = ("merged", "adapter", "rollout")
_STORED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """A written folder."""

    folder: Path
    format: str  # of the linear weights
    bytes: int
    bytes_before: int
    step: int | None = None  # of the run
    # of the merged model, or of the adapter on its model
    gap: PolicyGap | None = None
    note: str | None = None  # limits for other tools


def quantize_folder(
    model: str | Path,
    out: str | Path,
    format: str,
    transform: Callable[[Transformer], object] | None = None,
    device: torch.device | str = "cpu",
) -> Exported:
    """Quantize a dense model's linear weights into the new folder `out`.

    transform: changes the loaded model in place first (calibration). Other tensors keep their
    dtype. ValueError, before any writing, for an unfit format, model or size; FileExistsError for
    `out`.
    """
    if get_format(format).dense:
        raise ValueError(f"format: {format} is dense; choose a low-bit format")
    out = absent(out)
    folder = resolve(model)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"model: {model} is an adapter folder; merge it into its base first")
    if read_folder_layout(folder) is not None:
        name = low_bit_format(folder)
        stored_format = "quantized" if name is None else mixed.title(name)
        raise ValueError(
            f"model: {model} holds {stored_format} weights already; quantize the dense model"
        )
    dense_model = hf.load(folder, device, stored_dtype(folder))
    if transform is not None:
        transform(dense_model)
    hf.save(quantize_base(dense_model, format), out, tokenizer_from=folder)
    return Exported(
        out,
        format,
        _weight_bytes(out),
        _weight_bytes(folder),
        note=_compatibility_note(dense_model),
    )


def export_run(run: str | Path, out: str | Path, kind: str, step: int | None = None) -> Exported:
    """Write a run's newest checkpoint, or that of `step`, as the new folder `out`; `kind` is one of
    KINDS.

    ValueError, before any writing, for a folder without a run, an unknown kind, an adapter of a run
    without one, or another base model. FileNotFoundError for a missing checkpoint, FileExistsError
    for `out`.
    """
    if kind not in KINDS:
        raise ValueError(f"--as: {kind!r} is not one of {', '.join(KINDS)}")
    out = absent(out)
    run = Path(run)
    if (run / "adapter_config.json").is_file():
        return _export_adapter(run, out, kind, step)
    cfg = _settings_of(run)
    if kind == "adapter" and not cfg.train.lora:
        raise ValueError(
            f"--as: {run} trains all weights and has no adapter; export it as merged or rollout"
        )
    checkpoint = Store(run / "checkpoints").load(step)
    is_sft = checkpoint.meta.get("command") == "sft"
    if is_sft and kind == "rollout" and is_budget(cfg.rollout.weights):
        raise ValueError(
            f"--as: {run} is a run of lowroll sft, which searches for no formats; export it as merged"
        )
    if is_sft:
        cfg = sft.plain(cfg)
    model, compute = _load_learner(cfg, checkpoint, run)
    source = resolve(cfg.model)
    gap = note = None
    if kind == "rollout":
        settled_cfg = chosen_formats.settled(cfg, run, compute)
        weight_format = compute.format(fallen_to(checkpoint.state) or settled_cfg.rollout.weights)
        dtype = get_format(weight_format).dtype or compute.dtype
        note = _save_rollout(rollout_copy(model, weight_format, dtype), out, source)
    else:
        batch = newest_batch(run, checkpoint.step) if cfg.train.lora else None
        if kind == "adapter":
            gap = publish_adapter(cfg, model, out, batch, checkpoint.step)
        else:
            gap = _save_merged(model, out, source, batch)
        weight_format = _format_of(model)
    return Exported(
        out, weight_format, _weight_bytes(out), _weight_bytes(source), checkpoint.step, gap, note
    )


def _settings_of(run: Path) -> RunConfig:
    """Return a run's settings without `rollout.exact`: any machine may export."""
    if not (run / "config.yaml").is_file():
        raise ValueError(
            f"{run}: not a run folder (no config.yaml), nor an adapter's (no adapter_config.json)"
        )
    return engines.with_rollout(load(run / "config.yaml").resolved(), exact=False)


def _export_adapter(folder: Path, out: Path, kind: str, step: int | None) -> Exported:
    if kind == "adapter" or step is not None:
        raise ValueError(
            f"{folder} is an adapter folder: it has no checkpoints, and is exported as merged or "
            f"rollout"
        )
    base_record = adapter_base.read(folder)
    source = resolve(base_of(folder))
    dtype = stored_dtype(source) if base_record is None else _STORED_DTYPES[base_record.dtype]
    model = hf.load(folder, dtype=dtype)
    note = None
    if kind == "merged":
        _save_merged(model, out, tokenizer_home(folder))
    else:
        policy = rollout_copy(model, _format_of(model), model.dtype)
        note = _save_rollout(policy, out, tokenizer_home(folder))
    return Exported(out, _format_of(model), _weight_bytes(out), _weight_bytes(source), note=note)


def _load_learner(cfg: RunConfig, saved: Checkpoint, run: Path) -> tuple[Transformer, Compute]:
    cfg = cfg.model_copy(update={"device": "cpu"})
    cpu_compute = Compute.of(cfg)
    dtypes = [cpu_compute.dtype]
    if cfg.dtype == "auto":  # it depended on the run's device; the weights' digest decides
        dtypes = [torch.float32, torch.bfloat16]
    for dtype in dtypes:
        compute = replace(cpu_compute, dtype=dtype)
        model = models.learner(chosen_formats.settled(cfg, run, compute), compute)
        if digest(model) == saved.meta["base"]:
            is_sft = saved.meta.get("command") == "sft"
            trainer_state = saved.state if is_sft else saved.state["trainer"]
            restore_weights(model, saved.tensors["model"], trainer_state)
            return model, compute
    raise ValueError(f"model: the weights of {cfg.model} are not those that the run began with")


def _save_merged(
    model: Transformer, out: Path, source: Path, batch: Batch | None = None
) -> PolicyGap | None:
    scores_before = None if batch is None else scores(model, batch)
    hf.save(lora.merge(dequantize_base(model)), out, tokenizer_from=source)
    if batch is None or scores_before is None:
        return None
    return gap_between(scores_before, scores(model, batch))


def _save_rollout(rollout: Transformer, out: Path, source: Path) -> str | None:
    """Save the engine's model, with an adapter's base in `base`. Return limits for other tools."""
    adapters = {name: linear.adapter for name, linear in rollout.linears()}
    if all(adapter is None for adapter in adapters.values()):
        hf.save(rollout, out, tokenizer_from=source)
        return _compatibility_note(rollout)
    for _, linear in rollout.linears():
        linear.adapter = None
    base_files = hf.contents(rollout)
    for name, linear in rollout.linears():
        linear.adapter = adapters[name]

    def write(target: Path) -> None:
        (target / "base").mkdir()
        hf.write(base_files, target / "base", source)
        base_path = str(out.absolute() / "base")
        lora.write(rollout, target, base=base_path, tokenizer_from=source)
        adapter_card.write(target, base_path, adapter_base.of(rollout, 1.0))

    publish_folder(out, write, {"kind": "adapter"})
    return _compatibility_note(rollout)


def _compatibility_note(model: Transformer) -> str | None:
    if model.weight_format is None or get_format(model.weight_format).dense:
        return None
    if model.spec.mixture.stacked:
        if stacked.is_native(model.spec, get_format(model.weight_format)):
            return None
        return (
            f"transformers cannot use this folder: it reads experts of {model.spec.architecture} "
            "dense or in MXFP4 beside dense layers"
        )
    return unread_by_transformers(
        model.weight_format,
        {linear.in_features for _, linear in model.linears()},
        bool(model.spec.mixture.num_experts),
    )


def _format_of(model: Transformer) -> str:
    return model.weight_format or dense.of(model.dtype) or str(model.dtype)


def absent(out: str | Path) -> Path:
    out = Path(out)
    if out.is_symlink() or out.exists():
        raise FileExistsError(f"{out}: exists already; name a new folder")
    return out


def stored_dtype(folder: Path) -> torch.dtype:
    config = read_config(folder)
    name = str(config.get("dtype") or config.get("torch_dtype"))
    return _STORED_DTYPES.get(name.removeprefix("torch."), torch.float32)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
