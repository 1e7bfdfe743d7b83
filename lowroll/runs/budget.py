"""`rollout.weights: {max_kl: ...}`: from a budget to a format for each layer, once a run.

    rollout_weights.json    in the run folder: the budget, the format of each layer, the measurements,
                            and what was chosen again during the run (`again`)

The search (`weights.budget`) measures on the dense model's responses to the run's first prompts,
else to PROMPTS. A resumed run reads its file; checkpoints hold later choices (`trainer.guard`).
Settings then name a mixed format (`quant.mixed`); config.yaml keeps what the user wrote.
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
            _read_file(path)  # of an earlier run, to be replaced
            path.unlink()
        if cfg.rollout.weights == STORED and not cfg.train.lora:
            tell(
                "rollout.weights: stored: all weights learn, and each publication rounds them to nearest; "
                "train.lora: true keeps the folder's codes"
            )
        return with_weights(cfg, named(cfg.rollout.weights, cfg, compute, chat))
    if not (resume and (path.is_file() or home.has_steps())):
        if path.exists():
            _read_file(path)  # refuses to overwrite other files
        allocation = search(cfg, compute, dense_model(cfg, compute), chat)
        text = _file_text(cfg.rollout.weights, allocation)
        home.space.write(path, lambda: write_file(path, text.encode()))
        tell(*report(cfg.rollout.weights, allocation), f"rollout.weights: kept in {path}")
    return settled(cfg, home.path, compute)


def settled(cfg: RunConfig, folder: Path, compute: Compute) -> RunConfig:
    """Return the settings of a begun run with the formats of its file. ValueError when it is
    missing, damaged or of another budget."""
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
    """Raise ValueError for saved formats of another model."""
    model = models.outline("model", cfg.model, compute)
    sizes = {name: prod(linear.weight.shape) for name, linear in model.linears()}
    saved_sizes: dict[str, object] = {}
    for layers in weights.values() if isinstance(weights, dict) else ():
        saved_sizes |= layers if isinstance(layers, dict) else {}
    for name in sizes.keys() | saved_sizes.keys():
        if sizes.get(name) != saved_sizes.get(name):
            raise ValueError(
                f"{name} has {sizes.get(name, 'no')} weights in {cfg.model}, and "
                f"{saved_sizes.get(name, 'none')} here"
            )


def named(weights: str, cfg: RunConfig, compute: Compute, chat: ChatTokenizer) -> str:
    """Return the format of `weights`; a budget is searched on responses to the settings' prompts."""
    if not is_budget(weights):
        return stored(cfg, compute.dtype) if weights == STORED else weights
    cfg = with_weights(cfg, weights)
    allocation = search(cfg, compute, dense_model(cfg, compute), chat)
    tell(*report(weights, allocation))
    return mixed.register(allocation.assignment, allocation.sizes, compute.dtype)


def of_model(
    source: str | Path,
    weights: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    text: Path | None = None,
) -> str:
    """Return the format of `weights` for a model without a run. text: what is measured on
    (`calibration_sequences`); by default responses to PROMPTS."""
    if not is_budget(weights):
        return weights
    cfg = from_mapping({"model": str(source), "rollout": {"weights": weights}})
    compute = Compute(device, dtype or dtype_on(device))
    chat = models.chat_of(cfg)
    calibration = None
    if text is not None:
        sequences = calibration_sequences(text, chat.tokenizer, NUM_PROMPTS, TEXT_TOKENS)
        calibration = Calibration(sequences, [0] * len(sequences))
    model = dense_model(cfg, compute)
    calibration = calibration or draw(cfg, compute, model, chat, PROMPTS)
    allocation = search(cfg, compute, model, chat, calibration)
    tell(*report(weights, allocation))
    name = mixed.register(allocation.assignment, allocation.sizes, compute.dtype)
    return compute.format(name)


def again(
    home: RunFolder, budget: str, model: Transformer, samples: Sequence[Sample], step: int
) -> tuple[str, dict[str, dict[str, int]]] | None:
    """Search again with the learner's weights, on its responses to a step, and record the result.
    Return the format's name and the layers of each format; None without samples, or when nothing
    meets the budget."""
    calibration = _calibration_of_samples(samples)
    if not calibration.sequences:
        log.warning("guard: step %d: no response to measure on; the formats stay", step)
        return None
    try:
        saved = _read_file(home.path / FILE)
        with phases() as on_phase, noise.muted(model):
            allocation = allocate(
                model,
                parse(budget),
                calibration,
                lambda done, total: on_phase("budget: layers", done, total),
            )
    except ValueError as error:
        log.warning("guard: step %d: the formats stay: %s", step, error)
        return None
    saved["again"] = [*_choices_up_to(saved, step - 1), {"step": step, **_as_json(allocation)}]
    _write_file(home, saved)
    for line in report(budget, allocation):
        log.info("%s", line)
    assignment = mixed.in_dtype(allocation.assignment, model.dtype)
    name = mixed.register(allocation.assignment, allocation.sizes, model.dtype)
    return name, mixed.stated(assignment, allocation.sizes)


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
    entries = (
        choice
        for choice in choices
        if isinstance(choice, dict) and isinstance(choice.get("step"), int)
    )
    return [choice for choice in entries if choice["step"] <= step]


def _write_file(home: RunFolder, kept: Mapping[str, object]) -> None:
    path, text = home.path / FILE, json.dumps(kept, indent=1) + "\n"
    home.space.write(path, lambda: write_file(path, text.encode()))


def _calibration_of_samples(samples: Sequence[Sample]) -> Calibration:
    """Return the beginnings of responses after the ends of their prompts, alternating between
    groups."""
    answered = [sample for sample in samples if sample.group >= 0 and sample.rollout.token_ids]
    answered.sort(key=lambda sample: sample.rollout.behavior.sample)
    pairs = [
        (sample.prompt_ids[-PROMPT_TOKENS:], sample.rollout.token_ids[:RESPONSE_TOKENS])
        for sample in answered[:NUM_PROMPTS]
    ]
    return Calibration(
        [prompt + response for prompt, response in pairs], [len(prompt) for prompt, _ in pairs]
    )


def stored(cfg: RunConfig, dtype: torch.dtype) -> str:
    """Return the low-bit format of the run's model folder, whose dense layers have `dtype`.
    ValueError for a dense one."""
    stored_format = exact_format(resolve(cfg.model, weights=False), dtype)
    if stored_format is None and exact_format(resolve(cfg.model, weights=False), torch.float32):
        raise ValueError(
            f"rollout.weights: {STORED}: the codes of {cfg.model} are exact in float32 alone; write "
            "dtype: float32"
        )
    if stored_format is None:
        raise ValueError(
            f"rollout.weights: {STORED}, and {cfg.model} holds dense weights; write {OWN}, a format or "
            "a budget"
        )
    return stored_format


def with_weights(cfg: RunConfig, weights: str) -> RunConfig:
    if weights == cfg.rollout.weights:
        return cfg
    rollout = cfg.rollout.model_copy(update={"weights": weights})
    return cfg.model_copy(update={"rollout": rollout})


def refuse_model(cfg: RunConfig) -> None:
    """Raise ValueError for a model that takes no chosen formats."""
    models.refuse_adapter("model", cfg.model)
    folder = resolve(cfg.model, weights=False)
    if (spec := read_spec(folder)).num_experts:
        raise ValueError(
            f"rollout.weights: {spec.architecture} has experts, whose matrices are not chosen for one "
            "by one; write a format"
        )
    stored_format = low_bit_format(folder)
    if stored_format is not None:
        raise ValueError(
            f"rollout.weights: {cfg.model} holds {mixed.title(stored_format)} weights, and a budget "
            f"needs the dense model; write {STORED}, which keeps them"
        )


def dense_model(cfg: RunConfig, compute: Compute) -> Transformer:
    """Return the run's model before rounding. ValueError as by `refuse_model`."""
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
    """Search formats of a dense model's layers for the settings' budget, on its own responses."""
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
    """Return several responses of a dense model to each of PROMPTS."""
    cfg = from_mapping(
        {"model": str(source), "rollout": {"weights": OWN, "max_tokens": LONG_TOKENS}}
    )
    compute = Compute(device, model.dtype)
    try:
        with phases() as on_phase:
            on_phase("calibration: draw", 0, 1)
            calibration = draw(
                cfg, compute, model, models.chat_of(cfg), PROMPTS, SAMPLES, LONG_TOKENS
            )
    except ValueError as error:
        raise ValueError(f"{error}; name a text to look at: --calibration FILE") from None
    return [list(ids) for ids in calibration.sequences]


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
    prompt_requests = first_requests(cfg, model.spec, chat, texts, NUM_PROMPTS, n)
    longest = max(len(request.prompt_ids) for request in prompt_requests)
    most = max(1, min(most, cfg.rollout.max_tokens, model.spec.max_position - longest))
    requests = [replace(request, max_tokens=most) for request in prompt_requests]
    engine = lowroll.Engine(
        model,
        weights=compute.format(OWN),
        tokenizer=chat.tokenizer,
        cache_tokens=n
        * sum(_pages_in_tokens(request, cfg.rollout.page_size) for request in requests),
        page_size=cfg.rollout.page_size,
        max_batch=n * len(requests),
    )
    with closing(engine):
        groups = engine.generate(requests)
    del engine
    gc.collect()  # engine and scheduler reference each other
    pairs = [
        (group.request.prompt_ids, rollout.token_ids)
        for group in groups
        for rollout in group.rollouts
    ]
    if not any(response for _, response in pairs):
        raise ValueError("rollout.weights: the model says nothing that a KL could be measured on")
    answered = [(prompt, response) for prompt, response in pairs if response]
    return Calibration(
        [prompt + response for prompt, response in answered],
        [len(prompt) for prompt, _ in answered],
    )


def _pages_in_tokens(request: Request, page_size: int) -> int:
    """Return the cache tokens that a response reserves: whole pages, and one more."""
    tokens = len(request.prompt_ids) + request.max_tokens
    return (-(-tokens // page_size) + 1) * page_size


def report(budget: str, found: Allocation) -> list[str]:
    total = sum(found.sizes.values())
    shares: dict[str, int] = {}
    for layer, name in found.assignment.items():
        shares[name] = shares.get(name, 0) + found.sizes[layer]
    shares_text = ", ".join(
        f"{name} {size / total:.0%}" for name, size in sorted(shares.items(), key=lambda s: -s[1])
    )
    dense_layers = [layer for layer, name in found.assignment.items() if name == OWN]
    lines = [
        f"rollout.weights: {budget}: {found.bits:.3g} bits a weight, {found.nbytes / 1e6:.1f} MB of "
        f"linear weights, a KL of {found.kl:.2g} to the dense model on {found.tokens} tokens "
        f"({found.seconds:.0f} s); of the weights {shares_text}"
    ]
    if dense_layers:
        rest = f" and {len(dense_layers) - NAMED} more" if len(dense_layers) > NAMED else ""
        lines.append(f"rollout.weights: dense stay {', '.join(dense_layers[:NAMED])}{rest}")
    return lines


def _file_text(budget: str, found: Allocation) -> str:
    return json.dumps({"budget": budget, **_as_json(found)}, indent=1) + "\n"


def _as_json(found: Allocation) -> dict[str, object]:
    return {
        "kl": found.kl,
        "bits": found.bits,
        "bytes": found.nbytes,
        "tokens": found.tokens,
        "weights": mixed.stated(found.assignment, found.sizes),
        "measured": [asdict(point) for point in found.measured],
    }


def _read_file(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise ValueError(
            f"{path}: missing; the run cannot go on with the formats that it began with"
        )
    content = read_json(path)
    if not isinstance(content, dict) or not {"budget", "weights"} <= content.keys():
        raise ValueError(f"{path}: no budget and no weights in it")
    return content
