"""Faults of a set-up that show in a run's first batch, named before the first update.

With l the learner's log-prob of a sampled token, b the recorded one, w = exp(l - b) and H the
entropy of the learner's distribution there:

    coverage    E[w] is 1 when the sampler can draw every token. If top-p, top-k or min-p is hidden
                behind renormalized log-probs, it is the share of the mass that was kept.
    surprise    E[-l - H] is 0 for tokens drawn from l's distribution, negative when the sampler was
                narrower than recorded, positive when it was wider. A mismatch of KL k can move it by
                up to sqrt(2 k) standard deviations of -l - H; a rare token that was not drawn by
                Bernstein's bound.
    distance    Rounding explains mean |l - b|, with the learner in the rollouts' arithmetic. For a
                larger one variants of the learner score an excerpt: other temperatures, rotary
                bases and scalings. A close one is named.
    prompts     Foreign tokens are as unlikely as random text, and a foreign template's marks are
                several tokens.

Each needs SIGMAS standard errors, and a finding is a warning. Cuts, evictions and noise of the
rollouts' own settings are no fault.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lowroll.config import RunConfig
from lowroll.config.auto import Rollouts, rollouts_of
from lowroll.model.families.base import Rope, yarn_magnitude
from lowroll.model.rope import inverse_frequencies, magnitudes
from lowroll.model.scoring import score
from lowroll.model.spec import ModelSpec
from lowroll.model.tokenizer import ChatTokenizer
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import get_format
from lowroll.quant.table import is_dense
from lowroll.runs.policy_gap import excerpt, token_scores
from lowroll.trainer.mismatch_probe import Probe
from lowroll.types import Batch
from lowroll.weights import aligned_forward

log = logging.getLogger(__name__)

SIGMAS = 6.0
LEAST_TOKENS = 200  # for the statistics of a sampler
LARGEST_KL = 0.2  # above it E[w] depends on unseen tokens
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.08}  # mean |l - b|, nats
ROUNDED_TWICE = 1.35  # rounding activations on both sides, over one side
UNEXPLAINED = 1.5  # times rounding: larger distances are reported even without a cause
CLEARLY = 0.8  # most of the distance that a variant has
NEAR = 4.0  # times smaller: a distance that a variant explains
BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # rotary bases of published models
TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5)
EXCERPT = 512  # tokens that variants score, or one longer sample
PROMPTS = 8
PROMPT_TOKENS = 256  # of each
AS_RANDOM = 0.8  # of ln(vocabulary), nats a prompt token
MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|<(?:start|end)_of_turn>")


def suspects(
    cfg: RunConfig,
    model: Transformer,
    batch: Batch,
    first: Probe,
    chat: ChatTokenizer,
    weights: str,
) -> list[str]:
    """Return a sentence for each fault that the batch shows. weights: the rollouts' format."""
    rollouts = rollouts_of(cfg)
    found = [] if rollouts.truncated else sampler_suspects(first, model.spec.vocab_size)
    if not found and not _differs_by_design(rollouts):
        found += distance_suspects(model, batch, first, weights)
    return found + prompt_suspects(model, batch, chat)


def _differs_by_design(rollouts: Rollouts) -> bool:
    return bool(
        rollouts.truncated or rollouts.noisy or rollouts.forgets or rollouts.low_bit_cache
    ) or (rollouts.low_bit and "+" in rollouts.weights)


# -- the sampler ----------------------------------------------------------------------------------


def sampler_suspects(first: Probe, vocab_size: int) -> list[str]:
    """Return the faults that coverage and surprise show."""
    mask_N = first.packed.mask_N & first.packed.behavior_N.isfinite()
    l_n = first.learner_N[mask_N].double()
    b_n = first.packed.behavior_N[mask_N].double()
    if len(l_n) < LEAST_TOKENS:
        return []
    weight_n = (l_n - b_n).clamp(-20, 20).exp()
    kl = (weight_n - (l_n - b_n) - 1).mean().item()
    missing, missing_error = _mean(1 - weight_n)
    if kl < LARGEST_KL and missing > SIGMAS * missing_error + 2 * kl:
        return [
            f"sampler: the recorded log-probs leave out {missing:.1%} of the learner's distribution: the "
            "rollouts were cut (top_p, top_k or min_p of the engine's own defaults?), and no setting of "
            "this run says so"
        ]
    surprise_n = -l_n - first.entropy_N[mask_N].double()
    surprise, surprise_error = _mean(surprise_n)
    by_mismatch = math.sqrt(2 * max(kl, 0.0)) * surprise_n.std().item()
    largest = math.log(vocab_size)
    by_rare_tokens = SIGMAS**2 * largest / (6 * len(l_n))
    if abs(surprise) < SIGMAS * surprise_error + by_mismatch + by_rare_tokens:
        return []
    narrower = surprise < 0
    return [
        f"sampler: the drawn tokens are {abs(surprise):.2g} nats {'likelier' if narrower else 'less likely'} "
        f"than draws from the recorded distribution are: the engine samples from a "
        f"{'narrower' if narrower else 'wider'} one (a hidden top_p or top_k, or another temperature) "
        "than the one whose log-probs it returns"
    ]


def _mean(x_n: Tensor) -> tuple[float, float]:
    return x_n.mean().item(), x_n.std().item() / math.sqrt(len(x_n))


# -- the distance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Another learner: its description, a context that makes the model one, and its temperature."""

    words: str
    within: Callable[[], AbstractContextManager[object]]
    temperature: float


def distance_suspects(model: Transformer, batch: Batch, first: Probe, weights: str) -> list[str]:
    """Return the cause of a distance of log-probs above rounding. Samples with their own
    temperature are excluded."""
    mask_N = first.packed.mask_N
    dtypes = (model.dtype, get_format(weights).dtype or model.dtype)
    rounding = max(ROUNDING.get(dtype, ROUNDING[torch.bfloat16]) for dtype in dtypes)
    if _distance(first.learner_N[mask_N], first.packed.behavior_N[mask_N]) <= rounding:
        return []
    plain = [sample for sample in batch.samples if sample.temperature is None]
    lengths = (len(sample.prompt_ids) + len(sample.rollout.token_ids) for sample in plain)
    shortest = min(lengths, default=0)
    chosen = excerpt(replace(batch, samples=plain), max(EXCERPT, shortest))
    if chosen is None:
        return []
    try:
        return _explained(model, chosen, weights, rounding)
    except (torch.OutOfMemoryError, MemoryError, ValueError) as error:
        log.info("first batch: the distance of the rollouts was not looked into: %s", error)
        return []


def _explained(model: Transformer, chosen: Batch, weights: str, rounding: float) -> list[str]:
    mask_N = torch.tensor([bit for sample in chosen.samples for bit in sample.loss_mask]).bool()
    if not bool(mask_N.any()):
        return []
    recorded_N = torch.tensor(
        [logprob for sample in chosen.samples for logprob in sample.rollout.logprobs]
    )[mask_N]
    rounds_activations = get_format(weights).rounds_activations

    def scored(temperature: float) -> Tensor:
        return token_scores(model, chosen, temperature)[mask_N]

    learner_N = scored(chosen.temperature)
    with _in_format(model, weights):
        format_N = scored(chosen.temperature)
        distance = _distance(format_N, recorded_N)
        if rounds_activations:  # engine and learner round them independently
            rounding = max(rounding, ROUNDED_TWICE * _distance(format_N, learner_N))
        if distance <= rounding:
            return []
        head = (
            f"distance: the engine's log-probs are {distance:.2g} nats a token from the learner's "
            f"(mean |l - b|), and rounding explains {rounding:.2g}: "
        )
        tried: dict[str, float] = {}
        for variant in variants(model, chosen.temperature):
            with variant.within():
                tried[variant.words] = _distance(scored(variant.temperature), recorded_N)
    words = min(tried, key=tried.__getitem__)
    if tried[words] < max(rounding, distance / NEAR) and tried[words] < CLEARLY * distance:
        return [f"{head}they are those of {words} ({tried[words]:.2g} nats)"]
    if rounds_activations and distance < UNEXPLAINED * rounding:
        return []
    if distance < ROUNDING[torch.bfloat16]:
        return [f"{head}it is of the size of half precision, and the learner has {model.dtype}"]
    return [
        f"{head}no other rotary base or temperature explains the rest, so these are other weights, or "
        "the same ones read in another way; `lowroll diagnose` measures each side"
    ]


def variants(model: Transformer, temperature: float) -> Iterator[Variant]:
    """Yield the variants of a learner that are tried."""
    for other in TEMPERATURES:
        if other != temperature:
            words = f"temperature {other:g} (here: {temperature:g})"
            yield Variant(words, nullcontext, other)
    for words, ropes in _other_ropes(model.spec.ropes):
        spec = replace(model.spec, ropes=ropes)
        yield Variant(words, partial(_with_ropes, model, spec), temperature)


def _other_ropes(ropes: tuple[Rope, ...]) -> Iterator[tuple[str, tuple[Rope, ...]]]:
    bases = {rope.theta for rope in ropes}
    own = " and ".join(f"{base:g}" for base in sorted(bases))
    for theta in BASES:
        if bases != {theta}:
            words = f"a model whose rotary base is {theta:g} (here: {own})"
            yield words, tuple(replace(rope, theta=theta) for rope in ropes)
    if any(rope.scaling for rope in ropes):
        words = "a model whose rotary positions are not scaled (rope_scaling)"
        yield words, tuple(replace(rope, scaling=None) for rope in ropes)
    for size in {yarn_magnitude(rope.scaling.factor) for rope in ropes if rope.scaling} | {1.0}:
        other = tuple(_of_magnitude(rope, size) for rope in ropes)
        if other != ropes:
            words = (
                f"a model whose cos and sin are multiplied by {size:.3g} (YaRN's attention_factor)"
            )
            yield words, other


def _of_magnitude(rope: Rope, size: float) -> Rope:
    if rope.scaling is None or rope.scaling.kind != "yarn":
        return rope
    return replace(rope, scaling=replace(rope.scaling, magnitude=size))


@contextmanager
def _with_ropes(model: Transformer, spec: ModelSpec) -> Iterator[None]:
    saved = model.freqs, model.magnitudes
    model.freqs, model.magnitudes = inverse_frequencies(spec).to(model.device), magnitudes(spec)
    try:
        yield
    finally:
        model.freqs, model.magnitudes = saved


@contextmanager
def _in_format(model: Transformer, weights: str) -> Iterator[None]:
    with aligned_forward.suspended(model):
        if not is_dense(weights):
            aligned_forward.align(model, weights)
        yield


def _distance(a_N: Tensor, b_N: Tensor) -> float:
    difference_N = (a_N - b_N).double().abs()
    return difference_N[difference_N.isfinite()].mean().item()


# -- the prompts ----------------------------------------------------------------------------------


def prompt_suspects(model: Transformer, batch: Batch, chat: ChatTokenizer) -> list[str]:
    """Return the faults of the tokenizer and the chat template."""
    distinct = {tuple(sample.prompt_ids): None for sample in batch.samples}
    prompts = [list(ids) for ids in distinct if len(ids) > 1][:PROMPTS]
    if not prompts:
        return []
    found = [
        f"chat template: it writes {mark}, which this tokenizer cuts into {count} tokens: the template "
        "may be of another model"
        for mark, count in foreign_marks(prompts, chat).items()
    ]
    beginnings = [ids[:PROMPT_TOKENS] for ids in prompts]
    nats = -torch.cat(score(model, beginnings, [1] * len(prompts))).mean().item()
    random = math.log(model.spec.vocab_size)
    if nats > AS_RANDOM * random:
        found.append(
            f"tokenizer: the model finds the prompts as unlikely as random tokens ({nats:.1f} nats a token; "
            f"of {random:.1f}): it is untrained, or this is not its tokenizer"
        )
    return found


def foreign_marks(prompts: list[list[int]], chat: ChatTokenizer) -> dict[str, int]:
    """Return the marks like <|user|> of all prompts that are several tokens, and the numbers of
    tokens."""
    texts = [chat.tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
    common = set.intersection(*(set(MARK.findall(text)) for text in texts))
    sizes = {
        mark: len(chat.tokenizer.encode(mark, add_special_tokens=False)) for mark in sorted(common)
    }
    return {mark: size for mark, size in sizes.items() if size > 1}
