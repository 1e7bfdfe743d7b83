"""The search of formats for a budget (`weights.format_search`), on the dense model's responses."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import torch

import lowroll
from lowroll.config import RunConfig, from_mapping
from lowroll.metrics.progress import phases
from lowroll.model import hf, scaling
from lowroll.model.device import dtype_on
from lowroll.model.folder import resolve
from lowroll.model.headers import low_bit_format
from lowroll.model.spec import read_spec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant import mixed
from lowroll.quant.format_budget import is_budget, parse
from lowroll.quant.table import OWN, STORED
from lowroll.runs.assembly import models
from lowroll.runs.assembly.compute import Compute
from lowroll.runs.calibration import calibration_sequences, first_requests
from lowroll.runs.session import tell
from lowroll.types import Request, Sample
from lowroll.weights.format_search import Allocation, Calibration, allocate

NUM_PROMPTS = 8
RESPONSE_TOKENS = 48  # at most, for each response
SAMPLES, LONG_TOKENS = 8, 128  # responses to each prompt and their tokens, for calibrated rounding
TEXT_TOKENS = 128  # of each piece
PROMPT_TOKENS = 1024  # at most, before a response
NAMED = 8  # layers in a report
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


def of_model(
    source: str | Path,
    weights: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    text: Path | None = None,
) -> str:
    """Return the format of `weights` for a model without a run. text: by default responses to
    PROMPTS."""
    if not is_budget(weights):
        return weights
    cfg = from_mapping({"model": str(source), "rollout": {"weights": weights}})
    compute = Compute(device, dtype or dtype_on(device))
    chat = models.chat_of(cfg)
    if text is None:
        model = _dense_model(cfg, compute)
        calibration = _draw(cfg, compute, model, chat, PROMPTS)
    else:  # a wrong text is refused before the model is loaded
        sequences = calibration_sequences(text, chat.tokenizer, NUM_PROMPTS, TEXT_TOKENS)
        calibration = Calibration(sequences, [0] * len(sequences))
        model = _dense_model(cfg, compute)
    return compute.format(
        register(weights, allocate_under(model, weights, calibration), model.dtype)
    )


def search(cfg: RunConfig, compute: Compute, chat: ChatTokenizer) -> Allocation:
    """Search formats on the dense model's responses to the run's prompts."""
    model = _dense_model(cfg, compute)
    with phases() as on_phase:
        on_phase("budget: draw", 0, 1)
        calibration = _draw(cfg, compute, model, chat)
    return allocate_under(model, cfg.rollout.weights, calibration)


def allocate_under(model: Transformer, budget: str, calibration: Calibration) -> Allocation:
    with phases() as on_phase:
        return allocate(
            model,
            parse(budget),
            calibration,
            on_progress=lambda done, total: on_phase("budget: layers", done, total),
        )


def refuse_model(cfg: RunConfig) -> None:
    """Raise ValueError for a model that takes no chosen formats."""
    models.refuse_adapter("model", cfg.model)
    folder = resolve(cfg.model, weights=False)
    if (spec := read_spec(folder)).mixture.num_experts:
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


def _dense_model(cfg: RunConfig, compute: Compute) -> Transformer:
    refuse_model(cfg)
    model = hf.load(cfg.model, compute.device, compute.dtype).requires_grad_(False)
    if cfg.train.uaq_scale is not None:
        scaling.scale(model, cfg.train.uaq_scale)
    return model


def answers(source: str | Path, model: Transformer, device: torch.device) -> list[list[int]]:
    """Return several responses of a dense model to each of PROMPTS."""
    cfg = from_mapping(
        {"model": str(source), "rollout": {"weights": OWN, "max_tokens": LONG_TOKENS}}
    )
    compute = Compute(device, model.dtype)
    try:
        with phases() as on_phase:
            on_phase("calibration: draw", 0, 1)
            calibration = _draw(
                cfg, compute, model, models.chat_of(cfg), PROMPTS, SAMPLES, LONG_TOKENS
            )
    except ValueError as error:
        raise ValueError(f"{error}; name a text to look at: --calibration FILE") from None
    return [list(ids) for ids in calibration.sequences]


def _draw(
    cfg: RunConfig,
    compute: Compute,
    model: Transformer,
    chat: ChatTokenizer,
    texts: Sequence[str] = (),
    n: int = 1,
    most: int = RESPONSE_TOKENS,
) -> Calibration:
    prompt_requests = first_requests(cfg, model.spec, chat, texts, NUM_PROMPTS, n)
    longest = max(len(request.prompt_ids) for request in prompt_requests)
    space = model.spec.max_position - longest
    max_tokens = max(1, min(most, cfg.rollout.max_tokens, space))
    requests = [replace(request, max_tokens=max_tokens) for request in prompt_requests]
    page_size = cfg.rollout.page_size
    cache_tokens = n * sum(_pages_in_tokens(request, page_size) for request in requests)
    engine = lowroll.Engine(
        model,
        weights=compute.format(OWN),
        tokenizer=chat.tokenizer,
        cache_tokens=cache_tokens,
        page_size=page_size,
        max_batch=n * len(requests),
    )
    with closing(engine):
        groups = engine.generate(requests)
    del engine
    gc.collect()  # engine and scheduler reference each other
    answered = [
        (group.request.prompt_ids, rollout.token_ids)
        for group in groups
        for rollout in group.rollouts
        if rollout.token_ids
    ]
    if not answered:
        raise ValueError("rollout.weights: the model says nothing that a KL could be measured on")
    return _calibration(answered)


def _pages_in_tokens(request: Request, page_size: int) -> int:
    tokens = len(request.prompt_ids) + request.max_tokens
    return (-(-tokens // page_size) + 1) * page_size


def calibration_of(samples: Sequence[Sample]) -> Calibration:
    """Return the starts of responses after the ends of their prompts, alternating between
    groups."""
    answered = [sample for sample in samples if sample.group >= 0 and sample.rollout.token_ids]
    answered.sort(key=lambda sample: sample.rollout.behavior.sample)
    pairs = [
        (sample.prompt_ids[-PROMPT_TOKENS:], sample.rollout.token_ids[:RESPONSE_TOKENS])
        for sample in answered[:NUM_PROMPTS]
    ]
    return _calibration(pairs)


def _calibration(pairs: Sequence[tuple[list[int], list[int]]]) -> Calibration:
    return Calibration(
        [prompt + response for prompt, response in pairs], [len(prompt) for prompt, _ in pairs]
    )


def register(budget: str, found: Allocation, dtype: torch.dtype) -> str:
    tell(*report(budget, found))
    return mixed.register(found.assignment, found.sizes, dtype)


def report(budget: str, found: Allocation) -> list[str]:
    total = sum(found.sizes.values())
    shares = Counter[str]()
    for layer, name in found.assignment.items():
        shares[name] += found.sizes[layer]
    shares_text = ", ".join(f"{name} {size / total:.0%}" for name, size in shares.most_common())
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


def as_json(found: Allocation) -> dict[str, object]:
    return {
        "kl": found.kl,
        "bits": found.bits,
        "bytes": found.nbytes,
        "tokens": found.tokens,
        "weights": mixed.stated(found.assignment, found.sizes),
        "measured": [asdict(point) for point in found.measured],
    }
