"""The export of models: a quantized folder of a dense model, and a run's checkpoint as a folder.

    quantize_folder    dense folder -> low-bit folder in a rollout format
    export_run         run folder -> merged   one dense model with the learner's logits
                                     adapter  the LoRA adapter, in PEFT's format
                                     rollout  what the engine samples from, bit for bit (rung P10)

`rollout` holds the codes that the engine used after that step, without noise; of a LoRA run it is
the adapter, with its quantized base in the folder `base`. `merged` adds the adapter to the
dequantized base it was trained on; the original dense model gives another policy. `PolicyGap`
measures a policy's distance from the learner on the run's logged rollouts.

An adapter folder may take the place of the run: it states its base (`model.base`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lowroll.checkpoint.publish import publish_folder
from lowroll.checkpoint.store import Checkpoint, Store
from lowroll.config import RunConfig, load
from lowroll.model import base, card, hf, lora
from lowroll.model.base import base_of
from lowroll.model.device import free_memory
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format, read_folder_layout
from lowroll.model.scoring import score
from lowroll.model.spec import read_config
from lowroll.model.tokenizer import tokenizer_home
from lowroll.model.transformer import Transformer
from lowroll.objectives.mismatch import mismatch
from lowroll.quant import dense
from lowroll.quant.budget import is_budget
from lowroll.quant.formats import get_format, stored_format
from lowroll.quant.layouts import unread_by_transformers
from lowroll.runs import budget, sft
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.monitor import fallen_to
from lowroll.trainer.state import restore_weights
from lowroll.transport.codec import CodecError
from lowroll.transport.rollout_log import read_rollouts, rollout_files
from lowroll.types import Batch, Sample
from lowroll.weights import aligned, noise
from lowroll.weights.publish import dequantize_base, digest, quantize_base, rollout_copy

log = logging.getLogger(__name__)

KINDS = ("merged", "adapter", "rollout")
_STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class PolicyGap:
    """The distance of a policy from the learner, in nats a token, over `tokens` drawn tokens."""

    tokens: int
    logp_diff: float  # mean |difference of log-probs|
    kl: float  # of the learner to the policy, estimated by k3

    def __str__(self) -> str:
        return (
            f"{self.logp_diff:.3g} nats a token (mean |difference of log-probs|; KL {self.kl:.3g}) "
            f"over {self.tokens} tokens of the run's rollouts"
        )


@dataclass(frozen=True)
class Exported:
    """A written folder; bytes are those of its weight files."""

    folder: Path
    format: str  # of the linear weights
    bytes: int
    bytes_before: int
    step: int | None = None  # of the run
    # merged: of the written model; adapter: of the adapter on the model that it names
    gap: PolicyGap | None = None
    note: str | None = None  # what another tool cannot do with the folder


def quantize_folder(
    model: str | Path,
    out: str | Path,
    format: str,
    transform: Callable[[Transformer], object] | None = None,
    device: torch.device | str = "cpu",
) -> Exported:
    """Quantize a dense model's linear weights (a folder or hub id) into the new folder `out`.

    transform: changes the loaded model in place first (calibration). Other tensors keep their
    dtype. ValueError, before any writing, for an unknown or dense format, a quantized model or
    adapter, and unfit sizes; FileExistsError for `out`.
    """
    if get_format(format).dense:
        raise ValueError(f"format: {format} is dense; choose a low-bit format")
    out = absent(out)
    folder = resolve(model)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"model: {model} is an adapter folder; merge it into its base first")
    if read_folder_layout(folder) is not None:
        held = low_bit_format(folder) or "quantized"
        raise ValueError(f"model: {model} holds {held} weights already; quantize the dense model")
    dense = hf.load(folder, device, stored_dtype(folder))
    if transform is not None:
        transform(dense)
    hf.save(quantize_base(dense, format), out, tokenizer_from=folder)
    return Exported(out, format, _weight_bytes(out), _weight_bytes(folder), note=_note(dense))


def export_run(run: str | Path, out: str | Path, kind: str, step: int | None = None) -> Exported:
    """Write a run's newest checkpoint, or that of `step`, as the new folder `out`; `kind` is one of
    KINDS.

    ValueError, before any writing, for a folder without a run, an unknown kind, an adapter of a run
    that trains all weights, or another model than the run began with. FileNotFoundError when there
    is no such checkpoint, FileExistsError for `out`.
    """
    if kind not in KINDS:
        raise ValueError(f"--as: {kind!r} is not one of {', '.join(KINDS)}")
    out = absent(out)
    run = Path(run)
    if (run / "adapter_config.json").is_file():
        return _export_adapter(run, out, kind, step)
    if not (run / "config.yaml").is_file():
        raise ValueError(
            f"{run}: not a run folder (no config.yaml), nor an adapter's (no adapter_config.json)"
        )
    cfg = load(run / "config.yaml").resolved()
    inexact = cfg.rollout.model_copy(update={"exact": False})  # any machine may export
    cfg = cfg.model_copy(update={"rollout": inexact})
    if kind == "adapter" and not cfg.train.lora:
        raise ValueError(
            f"--as: {run} trains all weights and has no adapter; export it as merged or rollout"
        )
    saved = Store(run / "checkpoints").load(step)
    supervised = saved.meta.get("command") == "sft"
    if supervised and kind == "rollout" and is_budget(cfg.rollout.weights):
        raise ValueError(
            f"--as: {run} is a run of lowroll sft, which searches for no formats; export it as merged"
        )
    if supervised:
        cfg = sft.plain(cfg)
    model, compute = _learner(cfg, saved, run)
    source = resolve(cfg.model)
    gap = note = None
    if kind == "adapter":
        gap = publish_adapter(cfg, model, out, newest_batch(run, saved.step), saved.step)
        form = _format_of(model)
    elif kind == "merged":
        batch = newest_batch(run, saved.step) if cfg.train.lora else None
        gap = _save_merged(model, out, source, batch)
        form = _format_of(model)
    else:
        settled = budget.settled(cfg, run, compute)
        form = compute.format(fallen_to(saved.state) or settled.rollout.weights)
        dtype = get_format(form).dtype or compute.dtype
        note = _save_rollout(rollout_copy(model, form, dtype), out, source)
    return Exported(out, form, _weight_bytes(out), _weight_bytes(source), saved.step, gap, note)


def publish_adapter(
    cfg: RunConfig, model: Transformer, out: Path, batch: Batch | None, step: int
) -> PolicyGap | None:
    """Publish a learner's adapter after `step` as the new folder `out`, with its gap on the named
    model in the card.

    batch: what the gap is measured on. None without a batch, for an unchanged base, or without
    device memory for a second model.
    """
    scale = cfg.train.uaq_scale or 1.0
    source = resolve(cfg.model)
    gap = None
    stands_on = base.of(model, scale)
    holds = low_bit_format(source)
    revision = source.name if source.parent.name == "snapshots" else None  # of the hub's cache

    def write(target: Path) -> None:
        nonlocal gap
        lora.write(model, target, cfg.model, source, scale, revision)
        if batch and stands_on.rounds and stored_format(str(stands_on.weights)) != holds:
            gap = _gap_on(source, target, model, batch)
        measured = "" if gap is None else f"Measured: {gap}."
        card.write(target, cfg.model, stands_on, holds, measured)

    publish_folder(out, write, {"kind": "adapter", "step": step})
    return gap


def _gap_on(source: Path, adapter: Path, model: Transformer, batch: Batch) -> PolicyGap | None:
    """Measure the gap of an adapter folder on a model folder; None, with a log line, without memory
    for a second model."""
    needs = 1.25 * model.spec.num_parameters * model.dtype.itemsize + (2 << 30)
    free = free_memory(model.device)
    try:
        if free is None or free > needs:
            plain = lora.load(hf.load(source, model.device, model.dtype), adapter)
            return _gap(_scores(model, batch), _scores(plain, batch))
    except (torch.OutOfMemoryError, MemoryError):
        pass
    log.warning(
        "how far the adapter is from the learner on %s was not measured: too little memory is free "
        "for a second model",
        source,
    )
    return None


def _export_adapter(folder: Path, out: Path, kind: str, step: int | None) -> Exported:
    """Export an adapter folder merged into its base, or with the base beside it."""
    if kind == "adapter" or step is not None:
        raise ValueError(
            f"{folder} is an adapter folder: it has no checkpoints, and is exported as merged or "
            f"rollout"
        )
    stated = base.read(folder)
    source = resolve(base_of(folder))
    dtype = stored_dtype(source) if stated is None else _STORED[stated.dtype]
    model = hf.load(folder, dtype=dtype)
    note = None
    if kind == "merged":
        _save_merged(model, out, tokenizer_home(folder))
    else:
        policy = rollout_copy(model, _format_of(model), model.dtype)
        note = _save_rollout(policy, out, tokenizer_home(folder))
    return Exported(out, _format_of(model), _weight_bytes(out), _weight_bytes(source), note=note)


def _learner(cfg: RunConfig, saved: Checkpoint, run: Path) -> tuple[Transformer, Compute]:
    """Load the learner after the checkpoint's step, on the CPU in the run's dtype."""
    cfg = cfg.model_copy(update={"device": "cpu"})
    supervised = saved.meta.get("command") == "sft"
    first = Compute.of(cfg)
    dtypes = [first.dtype] if cfg.dtype != "auto" else [torch.float32, torch.bfloat16]
    for compute in (replace(first, dtype=dtype) for dtype in dtypes):
        model = models.learner(budget.settled(cfg, run, compute), compute)
        if digest(model) == saved.meta["base"]:
            held = saved.state if supervised else saved.state["trainer"]
            restore_weights(model, saved.tensors["model"], held)
            return model, compute
    raise ValueError(f"model: the weights of {cfg.model} are not those that the run began with")


def newest_batch(run: Path, step: int, most: int = 4096) -> Batch | None:
    """Return the newest logged rollouts up to a step, of each group in turn, at most `most` tokens;
    None without any. An unreadable file is logged, and an earlier one is used."""
    batch = None
    paths = [path for made, path in rollout_files(run / "rollouts") if made <= step]
    for path in reversed(paths):
        try:
            batch = read_rollouts(path)
            break
        except (CodecError, OSError) as error:
            log.warning("%s; older rollouts take its place in the measurement", error)
    return None if batch is None else excerpt(batch, most)


def excerpt(batch: Batch, most: int = 4096) -> Batch | None:
    """Return a batch's rollouts of up to `most` tokens, of each group in turn, without dropped
    ones; None without any."""
    kept: list[Sample] = []
    left = most
    learned = [sample for sample in batch.samples if sample.group >= 0]
    for sample in sorted(learned, key=lambda sample: sample.rollout.behavior.sample):
        tokens = len(sample.prompt_ids) + len(sample.rollout.token_ids)
        if sample.rollout.token_ids and tokens <= left:
            kept.append(sample)
            left -= tokens
    return replace(batch, samples=kept) if kept else None


def _scores(model: Transformer, batch: Batch) -> Tensor:
    sequences = [sample.prompt_ids + sample.rollout.token_ids for sample in batch.samples]
    prompt_lens = [len(sample.prompt_ids) for sample in batch.samples]
    with aligned.suspended(model), noise.muted(model):
        return torch.cat(score(model, sequences, prompt_lens, batch.temperature)).cpu()


def _gap(learner: Tensor, policy: Tensor) -> PolicyGap:
    found = mismatch(
        learner=policy[None], behavior=learner[None], mask=torch.ones_like(learner[None])
    )
    return PolicyGap(len(learner), found["mismatch/logp_diff_mean"], found["mismatch/kl_k3"])


def _save_merged(
    model: Transformer, out: Path, source: Path, batch: Batch | None = None
) -> PolicyGap | None:
    """Save the learner as one dense model; return its gap, due to rounded sums."""
    if batch is None:
        hf.save(lora.merge(dequantize_base(model)), out, tokenizer_from=source)
        return None
    before = _scores(model, batch)
    hf.save(lora.merge(dequantize_base(model)), out, tokenizer_from=source)
    return _gap(before, _scores(model, batch))


def _save_rollout(rollout: Transformer, out: Path, source: Path) -> str | None:
    """Save the engine's model; an adapter's base goes to the folder `base` inside. Return what
    another tool cannot do with it."""
    adapters = {name: linear.adapter for name, linear in rollout.linears()}
    if all(adapter is None for adapter in adapters.values()):
        hf.save(rollout, out, tokenizer_from=source)
        return _note(rollout)
    for _, linear in rollout.linears():
        linear.adapter = None
    files = hf.contents(rollout)
    for name, linear in rollout.linears():
        linear.adapter = adapters[name]

    def write(target: Path) -> None:
        (target / "base").mkdir()
        hf.write(files, target / "base", source)
        named = str(out.absolute() / "base")
        lora.write(rollout, target, base=named, tokenizer_from=source)
        card.write(target, named, base.of(rollout, 1.0))

    publish_folder(out, write, {"kind": "adapter"})
    return _note(rollout)


def _note(model: Transformer) -> str | None:
    if model.weight_format is None or get_format(model.weight_format).dense:
        return None
    return unread_by_transformers(
        model.weight_format,
        {linear.in_features for _, linear in model.linears()},
        bool(model.spec.num_experts),
    )


def _format_of(model: Transformer) -> str:
    return model.weight_format or dense.of(model.dtype) or str(model.dtype)


def absent(out: str | Path) -> Path:
    """Return the path of a folder to write; FileExistsError if it exists."""
    out = Path(out)
    if out.is_symlink() or out.exists():
        raise FileExistsError(f"{out}: exists already; name a new folder")
    return out


def stored_dtype(folder: Path) -> torch.dtype:
    config = read_config(folder)
    name = str(config.get("dtype") or config.get("torch_dtype"))
    return _STORED.get(name.removeprefix("torch."), torch.float32)


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
