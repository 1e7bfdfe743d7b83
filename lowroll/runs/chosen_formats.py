"""`rollout.weights: {max_kl: ...}`: a format for each layer by a budget, once a run.

rollout_weights.json in the run folder has the budget, the format of each layer, the measurements,
and later choices (`again`), which checkpoints also hold (`trainer.guard`). The settings then name a
mixed format (`quant.mixed`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from lowroll.checkpoint.atomic_files import write_file
from lowroll.config import RunConfig
from lowroll.model.files import read_json
from lowroll.model.folder import resolve
from lowroll.model.headers import exact_format
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed
from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import OWN, STORED
from lowroll.runs.assembly import engines, models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.folder import WEIGHTS as FILE
from lowroll.runs.folder import RunFolder
from lowroll.runs.session import tell
from lowroll.types import Sample, printable
from lowroll.weights import exploration_noise

log = logging.getLogger(__name__)


def settle(home: RunFolder, compute: Compute, chat: ChatTokenizer, resume: bool) -> RunConfig:
    """Return the settings with a format for a budget, from the run's file or a new search.
    ValueError for a file of another budget."""
    cfg, path = home.cfg, home.path / FILE
    if not is_budget(cfg.rollout.weights):
        if path.is_file() and not resume:
            _read_file(path)  # refuses to remove another kind of file
            path.unlink()
        if cfg.rollout.weights == STORED and not cfg.train.lora:
            tell(
                "rollout.weights: stored: all weights learn, and each publication rounds them to "
                "nearest; train.lora: true keeps the folder's codes"
            )
        return with_weights(cfg, named(cfg.rollout.weights, cfg, compute, chat))
    # `settled` refuses a run that has made a step and lost its file.
    if not (resume and (path.is_file() or home.has_steps())):
        _search_formats(home, compute, chat)
    return settled(cfg, home.path, compute)


def _search_formats(home: RunFolder, compute: Compute, chat: ChatTokenizer) -> None:
    from lowroll.runs import format_search

    budget, path = home.cfg.rollout.weights, home.path / FILE
    if path.exists():
        _read_file(path)  # refuses to overwrite another kind of file
    found = format_search.search(home.cfg, compute, chat)
    _write_file(home, {"budget": budget, **format_search.as_json(found)})
    tell(*format_search.report(budget, found), f"rollout.weights: kept in {path}")


def settled(cfg: RunConfig, folder: Path, compute: Compute) -> RunConfig:
    """Return the settings with the formats of the run's file. ValueError when it is missing,
    damaged or of another budget."""
    budget = cfg.rollout.weights
    if not is_budget(budget):
        return with_weights(cfg, stored(cfg, compute.dtype) if budget == STORED else budget)
    path = folder / FILE
    saved = _read_file(path)
    if saved["budget"] != budget:
        raise ValueError(
            f"rollout.weights: {budget}, and {path} is of {printable(saved['budget'])}"
        )
    try:
        _check_layer_sizes(saved["weights"], cfg, compute)
        return with_weights(cfg, mixed.read(saved["weights"], compute.dtype))
    except ValueError as error:
        raise ValueError(f"{path}: weights: {printable(error)}") from None


def _check_layer_sizes(weights: object, cfg: RunConfig, compute: Compute) -> None:
    model = models.outline("model", cfg.model, compute)
    sizes = {name: prod(linear.weight.shape) for name, linear in model.linears()}
    saved_sizes: dict[str, object] = {}
    if isinstance(weights, dict):
        for sizes_in_format in weights.values():
            if isinstance(sizes_in_format, dict):
                saved_sizes |= sizes_in_format
    for name in sizes.keys() | saved_sizes.keys():
        if sizes.get(name) != saved_sizes.get(name):
            raise ValueError(
                f"{name} has {sizes.get(name, 'no')} weights in {cfg.model}, and "
                f"{saved_sizes.get(name, 'none')} here"
            )


def named(weights: str, cfg: RunConfig, compute: Compute, chat: ChatTokenizer) -> str:
    """Return the format of `weights`; a budget is searched on responses to the settings'
    prompts."""
    if not is_budget(weights):
        return stored(cfg, compute.dtype) if weights == STORED else weights
    from lowroll.runs import format_search

    found = format_search.search(with_weights(cfg, weights), compute, chat)
    return format_search.register(weights, found, compute.dtype)


def again(
    home: RunFolder, budget: str, model: Transformer, samples: Sequence[Sample], step: int
) -> tuple[str, dict[str, dict[str, int]]] | None:
    """Search again on the learner's responses to a step, and record the result. Return the format's
    name, and layer sizes by format and layer, or None."""
    from lowroll.runs import format_search

    calibration = format_search.calibration_of(samples)
    if not calibration.sequences:
        log.warning("guard: step %d: no response to measure on; the formats stay", step)
        return None
    try:
        saved = _read_file(home.path / FILE)
        with exploration_noise.muted(model):
            found = format_search.allocate_under(model, budget, calibration)
    except ValueError as error:
        log.warning("guard: step %d: the formats stay: %s", step, error)
        return None
    choice = {"step": step, **format_search.as_json(found)}
    saved["again"] = [*_choices_up_to(saved, step - 1), choice]
    _write_file(home, saved)
    for line in format_search.report(budget, found):
        log.info("%s", line)
    assignment = mixed.in_dtype(found.assignment, model.dtype)
    name = mixed.register(found.assignment, found.sizes, model.dtype)
    return name, mixed.stated(assignment, found.sizes)


def cut(home: RunFolder, step: int) -> None:
    """Drop choices after the step from which the run continues."""
    path = home.path / FILE
    if not (is_budget(home.cfg.rollout.weights) and path.is_file()):
        return
    saved = _read_file(path)
    earlier_choices = _choices_up_to(saved, step)
    if earlier_choices != saved.get("again", []):
        _write_file(home, {**saved, "again": earlier_choices})


def _choices_up_to(kept: Mapping[str, object], step: int) -> list[dict[str, object]]:
    choices = kept.get("again", [])
    if not isinstance(choices, list):
        return []
    well_formed = [
        choice
        for choice in choices
        if isinstance(choice, dict) and isinstance(choice.get("step"), int)
    ]
    return [choice for choice in well_formed if choice["step"] <= step]


def stored(cfg: RunConfig, dtype: torch.dtype) -> str:
    """Return the low-bit format of the model's folder. ValueError for a dense model."""
    folder = resolve(cfg.model, weights=False)
    stored_format = exact_format(folder, dtype)
    if stored_format is not None:
        return stored_format
    if exact_format(folder, torch.float32):
        raise ValueError(
            f"rollout.weights: {STORED}: the codes of {cfg.model} are exact in float32 alone; write "
            "dtype: float32"
        )
    raise ValueError(
        f"rollout.weights: {STORED}, and {cfg.model} holds dense weights; write {OWN}, a format or "
        "a budget"
    )


def with_weights(cfg: RunConfig, weights: str) -> RunConfig:
    if weights == cfg.rollout.weights:
        return cfg
    return engines.with_rollout(cfg, weights=weights)


def _write_file(home: RunFolder, kept: Mapping[str, object]) -> None:
    path, text = home.path / FILE, json.dumps(kept, indent=1) + "\n"
    home.space.write(path, lambda: write_file(path, text.encode()))


def _read_file(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ValueError(
            f"{path}: missing; the run cannot go on with the formats that it began with"
        )
    content = read_json(path)
    if not isinstance(content, dict) or not {"budget", "weights"} <= content.keys():
        raise ValueError(f"{path}: no budget and no weights in it")
    return content
