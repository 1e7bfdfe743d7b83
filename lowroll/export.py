"""Models out of the house: a dense model quantised into a folder, and a run's checkpoint as a folder.

    quantize_folder    dense folder -> low-bit folder in a rollout format
    export_run         run folder -> merged   one dense model with the learner's logits
                                     adapter  the LoRA adapter, in PEFT's format
                                     rollout  what the engine samples from, bit for bit (rung P10)

`rollout` holds the very codes that the engine multiplied with after that step, without noise. Of a LoRA run it is the
adapter, with the quantised base that it rides on in the folder `base` inside. `merged` adds the adapter to the base
that it was trained on, which are the dequantised weights: adding it to the dense model of before gives another policy.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lowroll import assemble
from lowroll.checkpoint.publish import publish_folder
from lowroll.checkpoint.store import Checkpoint, Store
from lowroll.config import RunConfig, load
from lowroll.model import hf, lora
from lowroll.model.spec import read_config
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.trainer.state import restore_weights
from lowroll.weights.publish import dequantize_base, digest, quantize_base, rollout_copy

KINDS = ("merged", "adapter", "rollout")
_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """A folder that was written. Bytes are those of the weight files."""

    folder: Path
    format: str               # of the linear weights
    bytes: int
    bytes_before: int
    step: int | None = None   # of the run


def quantize_folder(model: str | Path, out: str | Path, format: str,
                    transform: Callable[[Transformer], object] | None = None,
                    device: torch.device | str = "cpu") -> Exported:
    """Quantise the linear weights of a dense model (a folder or hub id) into the new folder `out`.

    transform: changes the loaded dense model in place before it is quantised (calibration). Everything else keeps the
    dtype of the folder. ValueError, before anything is written, for an unknown or dense format, a model that is
    quantised or an adapter already, and sizes that the format's blocks do not fit; FileExistsError for `out`.
    """
    if get_format(format).dense:
        raise ValueError(f"format: {format} is dense; choose a low-bit format")
    out = _absent(out)
    folder = hf.resolve(model)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"model: {model} is an adapter folder; merge it into its base first")
    layout = hf.read_folder_layout(folder)
    if layout is not None:
        raise ValueError(f"model: {model} holds {layout.format} weights already; quantise the dense model")
    dense = hf.load(folder, device, _stored_dtype(folder))
    if transform is not None:
        transform(dense)
    hf.save(quantize_base(dense, format), out, tokenizer_from=folder)
    return Exported(out, format, _weight_bytes(out), _weight_bytes(folder))


def export_run(run: str | Path, out: str | Path, kind: str, step: int | None = None) -> Exported:
    """Write the newest checkpoint of a run folder (or that of `step`) as the new folder `out`; `kind` is one of KINDS.

    ValueError, before anything is written, for a folder that holds no run, another kind, an adapter of a run that
    trains all weights, or a model that is not the one that the run began with. FileNotFoundError when there is no such
    checkpoint, FileExistsError for `out`.
    """
    if kind not in KINDS:
        raise ValueError(f"--as: {kind!r} is not one of {', '.join(KINDS)}")
    out, run = _absent(out), Path(run)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run}: not a run folder (no config.yaml)")
    cfg = load(run / "config.yaml").resolved()
    if kind == "adapter" and not cfg.train.lora:
        raise ValueError(f"--as: {run} trains all weights and has no adapter; export it as merged or rollout")
    saved = Store(run / "checkpoints").load(step)
    model, where = _learner(cfg, saved)
    source = hf.resolve(cfg.model)
    if kind == "adapter":
        lora.save(model, out, cfg.model, source, input_scale=cfg.train.uaq_scale or 1.0)
        form = _format_of(model)
    elif kind == "merged":
        form = _format_of(_save_merged(model, out, source))
    else:
        fallen_to = (saved.state.get("guard") or {}).get("weights")       # by the guard, else the run's own format
        form = assemble.rollout_format(cfg, where, fallen_to)
        dtype = getattr(get_format(form), "dtype", where.dtype)
        _save_rollout(rollout_copy(model, form, dtype), out, source)
    return Exported(out, form, _weight_bytes(out), _weight_bytes(source), saved.step)


def _learner(cfg: RunConfig, saved: Checkpoint) -> tuple[Transformer, assemble.Place]:
    """The learner as it was after the checkpoint's step, on the CPU in the dtype that the run had."""
    cfg = cfg.model_copy(update={"device": "cpu"})
    first = assemble.place(cfg)
    dtypes = [first.dtype] if cfg.dtype != "auto" else [torch.float32, torch.bfloat16]
    for where in (replace(first, dtype=dtype) for dtype in dtypes):
        model = assemble.learner(cfg, where)
        if digest(model) == saved.meta["base"]:
            restore_weights(model, saved.tensors["model"], saved.state["trainer"])
            return model, where
    raise ValueError(f"model: the weights of {cfg.model} are not those that the run began with")


def _save_merged(model: Transformer, out: Path, source: Path) -> Transformer:
    dequantize_base(model)
    hf.save(lora.merge(model), out, tokenizer_from=source)
    return model


def _save_rollout(rollout: Transformer, out: Path, source: Path) -> None:
    """The engine's model; an adapter lies outside and its base in the folder `base` inside."""
    adapters = {name: linear.adapter for name, linear in rollout.linears()}
    if all(adapter is None for adapter in adapters.values()):
        hf.save(rollout, out, tokenizer_from=source)
        return
    for _, linear in rollout.linears():
        linear.adapter = None
    files = hf.contents(rollout)
    for name, linear in rollout.linears():
        linear.adapter = adapters[name]

    def write(target: Path) -> None:
        (target / "base").mkdir()
        hf.write(files, target / "base", source)
        lora.write(rollout, target, base=str(out.absolute() / "base"), tokenizer_from=source)

    publish_folder(out, write, {"kind": "adapter"})


def _format_of(model: Transformer) -> str:
    return model.weight_format or {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(model.dtype, str(model.dtype))


def _absent(out: str | Path) -> Path:
    out = Path(out)
    if out.is_symlink() or out.exists():
        raise FileExistsError(f"{out}: exists already; name a new folder")
    return out


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype that a folder's config.json names, else float32."""
    config = read_config(folder)
    return _STORED.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), torch.float32)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
