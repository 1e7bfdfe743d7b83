"""`rollout.weights: {max_kl: ...}`: from a budget to a format for each layer, once a run.

    rollout_weights.json    in the run folder: the budget, the format of each layer, the measurements,
                            and what was chosen again during the run (`again`)

The search (`weights.budget`) measures on the dense model's responses to the first prompts of the
run's environments, else to PROMPTS. A resumed run reads its file; checkpoints hold later choices
(`trainer.guard`). Settings then name a mixed format (`quant.mixed`); config.yaml keeps what the
user wrote.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from math import prod
from pathlib import Path

import torch

import lowroll
from lowroll.checkpoint.files import write_file
from lowroll.config import RunConfig, from_mapping
from lowroll.metrics.progress import phases
from lowroll.model import hf, scaling
from lowroll.model.device import dtype_on
from lowroll.model.files import read_json
from lowroll.model.folder import resolve
from lowroll.model.headers import exact_format, low_bit_format
from lowroll.model.spec import read_spec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed
from lowroll.quant.budget import is_budget, parse
from lowroll.quant.table import OWN, STORED
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.attempt import tell
from lowroll.runs.calibration import calibration_sequences, first_requests
from lowroll.runs.folder import WEIGHTS as FILE
from lowroll.runs.folder import RunFolder
from lowroll.types import Request, Sample, printable
from lowroll.weights import noise
from lowroll.weights.budget import Allocation, Calibration, allocate

log = logging.getLogger(__name__)

NUM_PROMPTS = 8
RESPONSE_TOKENS = 48  # most tokens of each
SAMPLES, LONG_TOKENS = 8, 128  # responses to each prompt and their tokens, for calibrated rounding
TEXT_TOKENS = 128  # of each piece of a text
PROMPT_TOKENS = 1024  # most tokens of each prompt before a response
NAMED = 8  # layers named in a report
PROMPTS = (
    "Write a short story about a lighthouse.",
    "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
    "Explain to a child why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Name three causes of the French Revolution.",
    "Translate into French: Where is the nearest railway station?",
    "What are the steps to bake bread?",
    "Summarize how vaccines work in two sentences.",
)


def settle(home: RunFolder, compute: Compute, chat: ChatTokenizer, resume: bool) -> RunConfig:
    """Return a run's settings with a format in place of a budget, from the run's file or a new
    search. ValueError for a file of another budget."""
    cfg, path = home.cfg, home.path / FILE
    if not is_budget(cfg.rollout.weights):
        if path.is_file() and not resume:
            _read(path)  # of an earlier run, to be replaced
            path.unlink()
        if cfg.rollout.weights == STORED and not cfg.train.lora:
            tell(
                "rollout.weights: stored: all weights learn, and each publication rounds them to nearest; "
                "train.lora: true keeps the folder's codes"
            )
        return with_weights(cfg, named(cfg.rollout.weights, cfg, compute, chat))
    if not (resume and (path.is_file() or home.has_steps())):
        if path.exists():
            _read(path)  # refuses to overwrite other files
        found = search(cfg, compute, dense_model(cfg, compute), chat)
        text = _text(cfg.rollout.weights, found)
        home.space.write(path, lambda: write_file(path, text.encode()))
        tell(*report(cfg.rollout.weights, found), f"rollout.weights: kept in {path}")
    return settled(cfg, home.path, compute)


def settled(cfg: RunConfig, folder: Path, compute: Compute) -> RunConfig:
    """Return the settings of a begun run with the formats of its file. ValueError when it is
    missing, damaged or of another budget."""
    budget = cfg.rollout.weights
    if not is_budget(budget):
        return with_weights(cfg, stored(cfg, compute.dtype) if budget == STORED else budget)
    path = folder / FILE
    kept = _read(path)
    if kept["budget"] != budget:
        raise ValueError(f"rollout.weights: {budget}, and {path} is of {printable(kept['budget'])}")
    try:
        _refuse_others(kept["weights"], cfg, compute)
        return with_weights(cfg, mixed.read(kept["weights"], compute.dtype))
    except ValueError as error:
        raise ValueError(f"{path}: weights: {printable(error)}") from None


def _refuse_others(weights: object, cfg: RunConfig, compute: Compute) -> None:
    model = models.outline("model", cfg.model, compute)
    sizes = {name: prod(linear.weight.shape) for name, linear in model.linears()}
    found: dict[str, object] = {}
    for layers in weights.values() if isinstance(weights, dict) else ():
        found |= layers if isinstance(layers, dict) else {}
    for name in sizes.keys() | found.keys():
        if sizes.get(name) != found.get(name):
            raise ValueError(
                f"{name} has {sizes.get(name, 'no')} weights in {cfg.model}, and "
                f"{found.get(name, 'none')} here"
            )


def named(weights: str, cfg: RunConfig, compute: Compute, chat: ChatTokenizer) -> str:
    """Return the format of `weights`; a budget is searched on responses to the settings' prompts."""
    if not is_budget(weights):
        return stored(cfg, compute.dtype) if weights == STORED else weights
    cfg = with_weights(cfg, weights)
    found = search(cfg, compute, dense_model(cfg, compute), chat)
    tell(*report(weights, found))
    return mixed.register(found.assignment, found.sizes, compute.dtype)


def of_model(
    source: str | Path,
    weights: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    text: Path | None = None,
) -> str:
    """Return the format of `weights` for a model without a run. text: measured on
    (`calibration_sequences`); default: responses to PROMPTS."""
    if not is_budget(weights):
        return weights
    cfg = from_mapping({"model": str(source), "rollout": {"weights": weights}})
    compute = Compute(device, dtype or dtype_on(device))
    chat = models.chat_of(cfg)
    given = None
    if text is not None:
        rows = calibration_sequences(text, chat.tokenizer, NUM_PROMPTS, TEXT_TOKENS)
        given = Calibration(rows, [0] * len(rows))
    model = dense_model(cfg, compute)
    given = given or draw(cfg, compute, model, chat, PROMPTS)
    found = search(cfg, compute, model, chat, given)
    tell(*report(weights, found))
    name = mixed.register(found.assignment, found.sizes, compute.dtype)
    return compute.format(name)


def again(
    home: RunFolder, budget: str, model: Transformer, samples: Sequence[Sample], step: int
) -> tuple[str, dict[str, dict[str, int]]] | None:
    """Search again with the learner's weights after a step, on its responses, and record the result
    in the run's file. Return the format's name and the layers of each format; None without samples,
    or when nothing meets the budget."""
    seen = _calibration(samples)
    if not seen.sequences:
        log.warning("guard: step %d: no response to measure on; the formats stay", step)
        return None
    try:
        kept = _read(home.path / FILE)
        with phases() as on_phase, noise.muted(model):
            found = allocate(
                model,
                parse(budget),
                seen,
                lambda done, total: on_phase("budget: layers", done, total),
            )
    except ValueError as error:
        log.warning("guard: step %d: the formats stay: %s", step, error)
        return None
    kept["again"] = [*_up_to(kept, step - 1), {"step": step, **_found(found)}]
    _write(home, kept)
    for line in report(budget, found):
        log.info("%s", line)
    assignment = mixed.in_dtype(found.assignment, model.dtype)
    name = mixed.register(found.assignment, found.sizes, model.dtype)
    return name, mixed.stated(assignment, found.sizes)


def cut(home: RunFolder, step: int) -> None:
    """Drop choices after the step from which the run continues."""
    path = home.path / FILE
    if not (is_budget(home.cfg.rollout.weights) and path.is_file()):
        return
    kept = _read(path)
    before = _up_to(kept, step)
    if before != kept.get("again", []):
        _write(home, {**kept, "again": before})


def _up_to(kept: Mapping[str, object], step: int) -> list[dict[str, object]]:
    found = kept.get("again", [])
    if not isinstance(found, list):
        return []
    rows = (one for one in found if isinstance(one, dict) and isinstance(one.get("step"), int))
    return [one for one in rows if one["step"] <= step]


def _write(home: RunFolder, kept: Mapping[str, object]) -> None:
    path, text = home.path / FILE, json.dumps(kept, indent=1) + "\n"
    home.space.write(path, lambda: write_file(path, text.encode()))


def _calibration(samples: Sequence[Sample]) -> Calibration:
    """Return the first tokens of responses after the last tokens of their prompts, alternating
    between groups."""
    said = [sample for sample in samples if sample.group >= 0 and sample.rollout.token_ids]
    said.sort(key=lambda sample: sample.rollout.behavior.sample)
    pairs = [
        (s.prompt_ids[-PROMPT_TOKENS:], s.rollout.token_ids[:RESPONSE_TOKENS])
        for s in said[:NUM_PROMPTS]
    ]
    return Calibration([p + r for p, r in pairs], [len(p) for p, _ in pairs])


def stored(cfg: RunConfig, dtype: torch.dtype) -> str:
    """Return the low-bit format of the run's model folder, whose dense layers have `dtype`;
    ValueError for a dense one."""
    held = exact_format(resolve(cfg.model, weights=False), dtype)
    if held is None and exact_format(resolve(cfg.model, weights=False), torch.float32):
        raise ValueError(
            f"rollout.weights: {STORED}: the codes of {cfg.model} are exact in float32 alone; write "
            "dtype: float32"
        )
    if held is None:
        raise ValueError(
            f"rollout.weights: {STORED}, and {cfg.model} holds dense weights; write {OWN}, a format or "
            "a budget"
        )
    return held


def with_weights(cfg: RunConfig, weights: str) -> RunConfig:
    if weights == cfg.rollout.weights:
        return cfg
    rollout = cfg.rollout.model_copy(update={"weights": weights})
    return cfg.model_copy(update={"rollout": rollout})


def refuse_model(cfg: RunConfig) -> None:
    """Raise ValueError for a model that takes no chosen formats, without reading weights."""
    models.refuse_adapter("model", cfg.model)
    folder = resolve(cfg.model, weights=False)
    if (spec := read_spec(folder)).num_experts:
        raise ValueError(
            f"rollout.weights: {spec.architecture} has experts, whose matrices are not chosen for one "
            "by one; write a format"
        )
    held = low_bit_format(folder)
    if held is not None:
        raise ValueError(
            f"rollout.weights: {cfg.model} holds {held} weights, and a budget needs the dense model; "
            f"write {STORED}, which keeps them"
        )


def dense_model(cfg: RunConfig, compute: Compute) -> Transformer:
    """Return the run's model before rounding; ValueError as `refuse_model`."""
    refuse_model(cfg)
    model = hf.load(cfg.model, compute.device, compute.dtype).requires_grad_(False)
    if cfg.train.uaq_scale is not None:
        scaling.scale(model, cfg.train.uaq_scale)
    return model


def search(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    calibration: Calibration | None = None,
) -> Allocation:
    """Search formats of a dense model's layers for the settings' budget. calibration: given text."""
    with phases() as on_phase:
        if calibration is None:
            on_phase("budget: draw", 0, 1)
            calibration = draw(cfg, compute, model, chat)
        return allocate(
            model,
            parse(cfg.rollout.weights),
            calibration,
            on_progress=lambda done, total: on_phase("budget: layers", done, total),
        )


def answers(source: str | Path, model: Transformer, device: torch.device) -> list[list[int]]:
    """Return several responses of a dense model to each of PROMPTS, as calibration text."""
    cfg = from_mapping(
        {"model": str(source), "rollout": {"weights": OWN, "max_tokens": LONG_TOKENS}}
    )
    compute = Compute(device, model.dtype)
    try:
        with phases() as on_phase:
            on_phase("calibration: draw", 0, 1)
            drawn = draw(cfg, compute, model, models.chat_of(cfg), PROMPTS, SAMPLES, LONG_TOKENS)
    except ValueError as error:
        raise ValueError(f"{error}; name a text to look at: --calibration FILE") from None
    return [list(ids) for ids in drawn.sequences]


def draw(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    texts: Sequence[str] = (),
    n: int = 1,
    most: int = RESPONSE_TOKENS,
) -> Calibration:
    """Return `n` responses of the dense model to each prompt of `texts`, or of the run's
    environments. most: tokens of a response."""
    asked = first_requests(cfg, model.spec, chat, texts, NUM_PROMPTS, n)
    longest = max(len(one.prompt_ids) for one in asked)
    most = max(1, min(most, cfg.rollout.max_tokens, model.spec.max_position - longest))
    requests = [replace(one, max_tokens=most) for one in asked]
    engine = lowroll.Engine(
        model,
        weights=compute.format(OWN),
        tokenizer=chat.tokenizer,
        cache_tokens=n * sum(_room(one, cfg.rollout.page_size) for one in requests),
        page_size=cfg.rollout.page_size,
        max_batch=n * len(requests),
    )
    with closing(engine):
        groups = engine.generate(requests)
    del engine
    gc.collect()  # engine and scheduler reference each other
    rows = [(one.request.prompt_ids, drawn.token_ids) for one in groups for drawn in one.rollouts]
    if not any(response for _, response in rows):
        raise ValueError("rollout.weights: the model says nothing that a KL could be measured on")
    kept = [(prompt, response) for prompt, response in rows if response]
    return Calibration([p + r for p, r in kept], [len(p) for p, _ in kept])


def _room(request: Request, page_size: int) -> int:
    tokens = len(request.prompt_ids) + request.max_tokens
    return (-(-tokens // page_size) + 1) * page_size


def report(budget: str, found: Allocation) -> list[str]:
    total = sum(found.sizes.values())
    shares: dict[str, int] = {}
    for layer, name in found.assignment.items():
        shares[name] = shares.get(name, 0) + found.sizes[layer]
    parts = ", ".join(
        f"{name} {size / total:.0%}" for name, size in sorted(shares.items(), key=lambda s: -s[1])
    )
    wide = [layer for layer, name in found.assignment.items() if name == OWN]
    lines = [
        f"rollout.weights: {budget}: {found.bits:.3g} bits a weight, {found.nbytes / 1e6:.1f} MB of "
        f"linear weights, a KL of {found.kl:.2g} to the dense model on {found.tokens} tokens "
        f"({found.seconds:.0f} s); of the weights {parts}"
    ]
    if wide:
        more = f" and {len(wide) - NAMED} more" if len(wide) > NAMED else ""
        lines.append(f"rollout.weights: dense stay {', '.join(wide[:NAMED])}{more}")
    return lines


def _text(budget: str, found: Allocation) -> str:
    return json.dumps({"budget": budget, **_found(found)}, indent=1) + "\n"


def _found(found: Allocation) -> dict[str, object]:
    return {
        "kl": found.kl,
        "bits": found.bits,
        "bytes": found.nbytes,
        "tokens": found.tokens,
        "weights": mixed.stated(found.assignment, found.sizes),
        "measured": [asdict(point) for point in found.measured],
    }


def _read(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ValueError(
            f"{path}: missing; the run cannot go on with the formats that it began with"
        )
    found = read_json(path)
    if not isinstance(found, dict) or not {"budget", "weights"} <= found.keys():
        raise ValueError(f"{path}: no budget and no weights in it")
    return found
