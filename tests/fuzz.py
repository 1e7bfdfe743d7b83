"""Random mixes of requests through the engine, against a plain forward pass over each sequence
alone.

    python -m tests.fuzz --mixes 20000 --seed 1
    python -m tests.fuzz --mixes 2000 --device cuda
    python -m tests.fuzz --mixes 2000 --family gemma3      all blocks of one family of models

A block is one engine with random settings (format, LoRA, pages, batch and prefill limits, chunks,
steps between two looks, and for half of them a cache policy that drops keys) and MIXES mixes after
one another, so that its prefix cache, slots and graphs are never fresh. A mix is a few requests (n,
shared stems, stops, samplers, likeliest tokens) with steps, looks at what has been drawn so far,
aborts, updates of the weights, under which what is in flight goes on or is replayed, and scoring in
between.

The oracle takes each sample alone and knows no batch, no page and no cache of ours. It is told
which weights computed each position, runs the sequence piece by piece under those weights
(transformers for dense float32, else our model with attention written out), and redoes filters,
draw and stops in float64. Of every token that the engine returned it asks: is the log-prob right,
does the noise of (seed, id, sample, position) draw this very token, are those the likeliest, and
should the sample have ended? Where rounding can turn the answer (two scores within TOLERANCE of each
other; a code of an activation that one part in ten million turns), the neighbour is accepted and
counted.

A difference names its block: `python -m tests.fuzz --mixes 1 --seed <block>` runs it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lowroll import Engine, Request
from lowroll.engine.base import PartialSample
from lowroll.engine.request import noise_key
from lowroll.engine.sequence import StepPlan
from lowroll.kv.policy.base import footprint
from lowroll.model import hf, lora
from lowroll.model.transformer import Transformer
from lowroll.types import Group, Rollout
from lowroll.weights.exploration_noise import Noise
from lowroll.weights.publish import publish, rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.gumbel import short_of_best
from tests.fixtures.policies import (
    Bounded,
    ChosenH2O,
    ChosenRKV,
    ChosenSnapKV,
    ChosenStreaming,
    Liked,
    Parity,
    Recent,
    Recorder,
    Replayed,
    Seen,
    Undecided,
)
from tests.fixtures.tiny import FAMILIES, hf_model

MIXES = 20  # of a block
LONGEST = 34  # prompt and response of a request
EOS = 1
# whose products on float32 rows round alike
EXACT = ("fp32", "nvfp4", "mxfp4", "mxfp4_floor", "int4", "int4_asym", "nf4", "nf4_dq")
ACTIVATIONS = ("int8", "fp8", "fp8_block", "w4a8")  # are rounded
# nats of a log-prob; of a cumulative probability a quarter. Codes of an activation may round the
# other way, and do so often where activations are bfloat16: an H100 showed 0.13 in bf16, 0.31 in
# int8 and 0.84 in fp8
TOLERANCE = {"exact": 2e-4, "int8": 0.15, "fp8": 0.15, "fp8_block": 0.15, "w4a8": 0.15}
TOLERANCE_BF16 = {"int8": 0.6, "fp8": 1.2, "fp8_block": 1.2, "w4a8": 0.6}
NOISES = {3: Noise(5, 0.05)}  # by version
VERSIONS = (0, 1, 2, 3)


# -- the models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """The weights of a block."""

    name: str
    weights: str
    adapted: bool
    large_batch: str | None
    dtype: torch.dtype
    device: str

    @property
    def is_exact(self) -> bool:
        return self.dtype == torch.float32 and self.weights in EXACT

    @property
    def tolerance(self) -> float:
        if self.is_exact:
            return TOLERANCE["exact"] * (10 if self.device == "cuda" else 1)
        return (
            TOLERANCE_BF16.get(self.weights, 0.3)
            if self.dtype == torch.bfloat16
            else TOLERANCE[self.weights]
        )


def sizes(name: str, device: str) -> dict[str, Any]:
    """Kernels on the device ask for rows of 128."""
    layers = FAMILIES[name][1].get("num_hidden_layers", 2)
    small = dict(num_hidden_layers=layers, max_position_embeddings=64)
    return (
        small
        if device == "cpu"
        else {
            **small,
            "hidden_size": 256,
            "intermediate_size": 512,
            "head_dim": 64,
            "vocab_size": 515,
            "moe_intermediate_size": 128,
        }
    )


@cache
def theirs(name: str, version: int, device: str) -> Any:
    """transformers' model; version 3 is version 0 under noise. Wider matrices are smaller, so that
    logits are alike."""
    model = hf_model(name, seed=version % 3, **sizes(name, device))
    with torch.no_grad():
        for p in model.parameters() if device == "cuda" else ():
            p.mul_(8**-0.5 if p.ndim > 1 else 1)
    return model.to(device)


@cache
def master(family: Family, version: int) -> Transformer:
    source = theirs(family.name, 0 if family.adapted else version, family.device)
    model = hf.load(folder_of(source), family.device, family.dtype)
    if family.adapted:
        targets = (
            lora.attention_targets(model.spec) if model.spec.mixture.num_experts else lora.TARGETS
        )
        lora.attach(model, rank=3, alpha=6, targets=targets)
        generator = torch.Generator().manual_seed(version % 3)
        for _, linear in model.linears():
            if linear.adapter is not None:
                for p in linear.adapter.parameters():
                    p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@cache
def folder_of(source: Any) -> Path:
    import atexit
    import tempfile

    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    source.save_pretrained(made.name)
    return Path(made.name)


@cache
def policy(family: Family, version: int, large_batch: bool) -> Transformer:
    """The weights of a version as the engine should have them."""
    weights = family.large_batch if large_batch and family.large_batch else family.weights
    model = rollout_copy(master(family, version), weights, family.dtype, noisy=True)
    publish(master(family, version), model, noise_of(family, version))
    return model


def noise_of(family: Family, version: int) -> Noise | None:
    """The noise of a version, where the model has norms that take it."""
    has_norms = any(name == "input_norm" for name, _ in master(family, 0).spec.norms)
    return NOISES.get(version) if has_norms else None


# -- the oracle ------------------------------------------------------------------------------------

Made = tuple[int, bool]  # the version, and whether the second format, computed a position


@torch.no_grad()
def replay(
    family: Family, ids: list[int], made: list[Made], kv: Bounded | None = None, prompt: int = 0
) -> Tensor:
    """Logits [T, V], float32 on the CPU: position t under the weights made[t], over what the
    earlier ones stored, and the policy has kept, of the first `prompt` and the later tokens."""
    starts = [t for t in range(len(ids)) if t == 0 or made[t] != made[t - 1]]
    ids_T = torch.tensor(ids, device=family.device)
    foreign = (
        family.weights == "fp32"
        and not (family.adapted or family.large_batch or kv)
        and not any(noise_of(family, v) for v, _ in made)
    )
    windows = master(family, 0).spec.windows
    kept, attend, pieces = DynamicCache(), Seen(kv, prompt, windows=windows), []
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        if foreign:
            model = theirs(family.name, made[start][0], family.device)
            pieces.append(
                model(ids_T[None, start:stop], past_key_values=kept, use_cache=True).logits[0]
            )
            continue
        pos_T = torch.arange(start, stop, device=family.device)
        hidden_TD = policy(family, *made[start])(ids_T[start:stop], pos_T, attend)
        pieces.append(policy(family, made[start][0], False).logits(hidden_TD))
    return torch.cat(pieces).float().cpu()


@contextmanager
def nudged(family: Family, made: list[Made], seed: int) -> Iterator[None]:
    """Embeddings that are a rounding away: where a code of an activation lies on an edge, it falls
    on either side."""
    generator = torch.Generator().manual_seed(seed)
    models = {id(model): model for model in (policy(family, *key) for key in set(made))}.values()
    kept = [model.embedding.data.clone() for model in models]
    try:
        for model in models:
            noise = torch.randn(model.embedding.shape, generator=generator).to(family.device)
            model.embedding.data *= 1 + 3e-7 * noise
        yield
    finally:
        for model, embedding in zip(models, kept, strict=True):
            model.embedding.data.copy_(embedding)


def filtered(
    logits_V: Tensor, request: Request, before: list[int], banned: Many[int], slack: float
) -> Tensor:
    """Log-probs [V] that the next token is drawn from; `slack` moves the edges of top-p and
    min-p."""
    logits_V = logits_V.clone()
    if request.repetition_penalty != 1:
        for token in set(before):
            x = logits_V[token]
            logits_V[token] = (
                x / request.repetition_penalty if x > 0 else x * request.repetition_penalty
            )
    logits_V[list(banned)] = -torch.inf
    if not request.temperature:
        return logits_V.log_softmax(0)
    logits_V = logits_V / request.temperature
    if not request.top_k and request.top_p == 1 and not request.min_p:
        return logits_V.log_softmax(0)
    order = sorted(range(len(logits_V)), key=lambda i: (-logits_V[i].item(), i))
    kept = order[: request.top_k] if request.top_k else order
    if request.top_p < 1:
        p = logits_V[kept].softmax(0).tolist()
        mass, most = 0.0, 0
        while most < len(kept) and (most == 0 or mass < request.top_p + slack):
            mass, most = mass + p[most], most + 1
        kept = kept[:most]
    if request.min_p:
        top = logits_V.max()
        kept = [i for i in kept if (logits_V[i] - top).exp() >= request.min_p * (1 + slack)]
    out_V = torch.full_like(logits_V, -torch.inf)
    out_V[kept] = logits_V[kept]
    return out_V.log_softmax(0)


def text_of(ids: list[int]) -> str:
    return "".join("" if i % 11 == 0 else "abcde"[i % 5] * (1 + i % 2) for i in ids)


class Tokenizer:
    eos_token_id = EOS

    def decode(self, ids: list[int]) -> str:
        return text_of(ids)


def ending(request: Request, ids: list[int]) -> tuple[str, int | str | None] | None:
    """How the sample ends with the last of these tokens."""
    stops = {*request.stop_ids, *(() if request.ignore_eos else (EOS,))}
    if len(ids) > request.min_tokens:
        if ids[-1] in stops:
            return "stop", ids[-1]
        text = text_of(ids[request.min_tokens :])
        for string in request.stop_strings:
            if string in text:
                return "stop", string
    return ("length", None) if len(ids) == request.max_tokens else None


@dataclass
class Verdict:
    """The result of the comparisons."""

    tokens: int = 0
    borderline: int = 0
    compactions: int = 0
    worst: float = 0.0  # nats, of the log-probs that are not borderline
    total: float = 0.0  # their sum
    differences: list[str] = field(default_factory=list)

    def add(self, other: Verdict) -> None:
        self.tokens, self.borderline = (
            self.tokens + other.tokens,
            self.borderline + other.borderline,
        )
        self.compactions += other.compactions
        self.worst, self.total = max(self.worst, other.worst), self.total + other.total
        self.differences += other.differences

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens, {self.compactions} compactions, {self.borderline} borderline, "
            f"{len(self.differences)} differences; log-probs are "
            f"{self.total / max(self.tokens, 1):.2g} nats apart on average, {self.worst:.2g} at most"
        )


def compare(
    verdict: Verdict,
    where: str,
    family: Family,
    request: Request,
    sample: int,
    rollout: Rollout,
    made: list[Made],
    kv: Bounded | None = None,
) -> None:
    """Ask the oracle about every token of a rollout."""
    ids = rollout.token_ids
    for t in range(1, len(ids) + 1):
        end = ending(request, ids[:t])
        says = (rollout.finish_reason, rollout.stop_reason) if t == len(ids) else None
        if end != says and not (t == len(ids) and end is None and rollout.finish_reason == "abort"):
            verdict.differences.append(
                f"{where}: after {t} tokens expected the end {end}, got {says}"
            )
            return
    if not ids:
        return
    whole = request.prompt_ids + ids
    made = made[: len(whole) - 1]

    def logits_TV() -> Tensor:
        return replay(family, whole[:-1], made, kv, len(request.prompt_ids))

    try:
        wrong = check_tokens(verdict, family, request, sample, rollout, logits_TV())
    except Undecided:
        verdict.borderline += 1
        return
    for seed in range(8 if wrong and not family.is_exact and family.dtype == torch.float32 else 0):
        with nudged(family, made, seed):
            if check_tokens(Verdict(), family, request, sample, rollout, logits_TV()) is None:
                verdict.borderline += 1
                return
    if wrong:
        verdict.differences.append(f"{where}: {wrong}")


def check_tokens(
    verdict: Verdict,
    family: Family,
    request: Request,
    sample: int,
    rollout: Rollout,
    logits_TV: Tensor,
) -> str | None:
    """The first token of a rollout that is not what these logits and the sample's noise give, in
    words."""
    ids, near, first = rollout.token_ids, family.tolerance, len(request.prompt_ids)
    whole, logits_TV = request.prompt_ids + ids, logits_TV[first - 1 :].double()
    stops = {*request.stop_ids, *(() if request.ignore_eos else (EOS,))}
    key = noise_key(request, sample)
    tops = rollout.top_logprobs
    if (tops is None) != (not request.top_logprobs) or len(ids if tops is None else tops) != len(
        ids
    ):
        return (
            f"{request.top_logprobs} likeliest tokens were asked for at {len(ids)} places: {tops}"
        )
    for t, (token, logprob) in enumerate(zip(ids, rollout.logprobs, strict=True)):
        before, banned = whole[: first + t], tuple(stops) if t < request.min_tokens else ()

        def gap(slack: float) -> float | None:
            logp_V = filtered(logits_TV[t], request, before, banned, slack)
            if tops is not None and not ranks_agree(logp_V, tops[t], request.top_logprobs, near):
                return None
            return agrees(logp_V, request, token, logprob, (key, first + t), near)

        verdict.tokens += 1
        found = gap(0.0)
        if found is not None:
            verdict.worst, verdict.total = max(verdict.worst, found), verdict.total + found
        elif gap(near) is not None or gap(-near) is not None or _tied(logits_TV[t], request, near):
            verdict.borderline += 1
        else:
            says = filtered(logits_TV[t], request, before, banned, 0.0)[token]
            return f"token {t} is {token} at {logprob:.5f}; the oracle says {says:.5f}"
    return None


def ranks_agree(logp_V: Tensor, pairs: list[tuple[int, float]], most: int, near: float) -> bool:
    """Return whether these are the likeliest tokens that can be drawn, as near as the log-probs are."""
    best = logp_V[logp_V > -torch.inf].sort(descending=True).values[:most].tolist()
    return len(pairs) == len(best) == len(dict(pairs)) and all(
        abs(logp_V[i].item() - logp) < near and logp > least_logp - near
        for (i, logp), least_logp in zip(pairs, best, strict=True)
    )


def agrees(
    logp_V: Tensor,
    request: Request,
    token: int,
    logprob: float,
    place: tuple[int, int],
    near: float,
) -> float | None:
    """How far the log-prob is from the oracle's, None where it or the token is wrong. place: the key
    and the position of the token's noise."""
    gap = abs(logp_V[token].item() - logprob)
    if not gap < near:
        return None
    if not request.temperature:
        return gap if logp_V.max() - logp_V[token] < near else None
    return gap if short_of_best(logp_V, *place, token) < near else None


def _tied(logits_V: Tensor, request: Request, near: float) -> bool:
    """Return whether rounding decides which id is the k-th largest."""
    best = logits_V.sort(descending=True).values
    k = request.top_k
    return bool(
        request.temperature
        and 0 < k < len(best)
        and best[k - 1] - best[k] < near * request.temperature
    )


# -- the mixes -------------------------------------------------------------------------------------


class Block:
    """One engine, and who computed which position of what is in flight."""

    def __init__(
        self, seed: int, device: str, family: Family | None = None, kv: Bounded | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.seed, self.verdict = seed, Verdict()
        drawn = random_family(rng, device)
        self.family = family = family or drawn
        self.page_size = rng.choice([1, 2, 3, 4, 8, 16]) if device == "cpu" else 16
        options = {
            "page_size": self.page_size,
            "cache_tokens": rng.choice([48, 64, 128, 1024]),
            "max_batch": rng.randint(9 if family.large_batch else 1, 14),
            "max_prefill_tokens": rng.choice([1, 8, 24, 8192]),
            "prefill_chunk": rng.choice([None, None, 1, 3, 7, 16]),
        }
        has_windows = bool(master(family, 0).spec.windows)  # which bounded caches do not take
        self.kv = (
            kv or random_policy(random.Random(f"kv {seed}"), family) if not has_windows else None
        )
        if self.kv is not None:
            options["cache_tokens"] = max(options["cache_tokens"], least(self.kv, self.page_size))
        side = random.Random(f"prompts {seed}")  # what may not change the mixes
        self.about = f"block {seed}: {family} {options} {self.kv and vars(self.kv)}"
        self.engine = Engine(
            master(family, 0),
            family.weights,
            dtype=family.dtype,
            device=device,
            large_batch_weights=family.large_batch,
            kv=self.kv,
            tokenizer=Tokenizer(),
            noisy=True,
            lookahead=rng.choice([1, 1, 3, 16]) if device == "cpu" else None,
            gather=side.choice([None, 0, 5]),
            one_pass=side.random() < 0.5,
            **options,
        )
        self.engine.scheduler.passes = random.Random(f"passes {seed}").choice([1, 2, 16])
        self.side = random.Random(f"looks {seed}")
        self.looks: list[tuple[int, int, PartialSample]] = []  # by handle and sample
        self.recorder = Recorder(self.engine) if self.kv else None
        self.version = 0
        self.vocabulary = self.engine.spec.vocab_size
        self.stems = [self.ids(rng.randint(1, 20)) for _ in range(3)]
        self.asked: dict[int, Request] = {}
        self.made: dict[int, dict[int, Made]] = {}  # by handle: prompt positions
        self.drawn: dict[
            tuple[int, int], dict[int, Made]
        ] = {}  # by handle and sample: positions of the response
        run = self.engine.runner.run

        def watched(plan: StepPlan, meanwhile: Any) -> Any:
            self.watch(plan)
            return run(plan, meanwhile)

        self.engine.runner.run = watched

    def ids(self, length: int) -> list[int]:
        return [self.rng.randrange(2, self.vocabulary) for _ in range(length)]

    def watch(self, plan: StepPlan) -> None:
        decoder, now = (
            self.engine.runner.decoder,
            (self.version, self.family.large_batch is not None),
        )
        hits = {
            c.sequence.group.handle: c.start for c in reversed(plan.prefills)
        }  # the first one's
        hits |= {group.handle: group.num_prefilled for group in self.engine.scheduler._prefilling}
        for handle in (
            hits.keys() - self.made.keys()
        ):  # admitted now, with pages of these very weights
            self.made[handle] = dict.fromkeys(range(hits[handle]), now)
        for chunk in plan.prefills:
            self.made[chunk.sequence.group.handle] |= dict.fromkeys(
                range(chunk.start, chunk.stop), now
            )
        many = decoder.runs_large_batch(decoder.size(len(plan.decodes)))
        for row, limit in zip(plan.decodes, plan.limits, strict=True):
            drawn = self.drawn.setdefault((row.group.handle, row.sample), {})
            drawn |= {t: (self.version, many) for t in range(row.position, row.position + limit)}
        for check in plan.checks:
            row, limit = check.sequence, len(check.ids)
            drawn = self.drawn.setdefault((row.group.handle, row.sample), {})
            drawn |= {t: now for t in range(row.position, row.position + limit)}

    def request(self) -> Request:
        rng = self.rng
        prompt = rng.choice([[], *self.stems])
        prompt = (prompt + self.ids(rng.choice([0, 1, 2, 5])))[:22] or self.ids(1)
        max_tokens = rng.choice([1, 1, 2, 4, 12])
        odd = rng.random() < 0.4  # filters: on exact numbers alone
        exact = odd and self.family.is_exact
        return Request(
            prompt,
            n=rng.choice([1, 1, 1, 2, 3, 8]),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 0, min(2, max_tokens)]),
            temperature=rng.choice([0.0, 0.7, 1.0, 1.0, 1.3]),
            top_k=rng.choice([0, 1, 5, 40]) if exact else 0,
            top_p=rng.choice([1.0, 0.9, 0.3]) if exact else 1.0,
            min_p=rng.choice([0.0, 0.05]) if exact else 0.0,
            repetition_penalty=rng.choice([1.0, 1.3, 0.8]) if odd else 1.0,
            stop_ids=tuple(self.ids(rng.choice([0, 0, 3]))),
            stop_strings=rng.choice([(), (), (), ("ab", "ddc"), ("eb",)]),
            ignore_eos=rng.random() < 0.5,
            seed=rng.randrange(100),
            id=rng.choice(["", "", "a"]),
            top_logprobs=self.side.choice([0, 0, 0, 1, 4, 20]),
        )

    def mix(self) -> None:
        """A few requests and what happens on the way; at its end the engine is empty."""
        rng, engine = self.rng, self.engine
        for _ in range(rng.randint(1, 6)):
            self.take(*[engine.add(self.request()) for _ in range(rng.choice([1, 1, 2, 5]))])
            for _ in range(rng.randint(0, 6)):
                verb = rng.choices(
                    ["step", "abort", "update_weights", "score", "generate"], [12, 1, 1, 1, 1]
                )[0]
                getattr(self, verb)()
        while engine.has_work:
            self.step()
        if engine.pool.num_used or engine.scheduler.reserved_pages or self.asked:
            self.verdict.differences.append(
                f"{self.about}: {engine.pool.num_used} pages and {len(self.asked)} "
                "requests are left in an empty engine"
            )
        if rng.random() < 0.2:
            engine.release()

    def take(self, *handles: int) -> None:
        self.asked |= {
            handle: self.engine.scheduler.in_flight[handle].request for handle in handles
        }

    def look(self) -> None:
        """Note what a request has drawn so far: its end has to begin so."""
        handle = self.side.choice(list(self.asked))
        for sample, drawn in enumerate(self.engine.so_far(handle)):
            tops = None if drawn.top_logprobs is None else list(drawn.top_logprobs)
            ids, logprobs = list(drawn.token_ids), list(drawn.logprobs)
            look = replace(drawn, token_ids=ids, logprobs=logprobs, top_logprobs=tops)
            self.looks.append((handle, sample, look))

    def check_looks(self, handle: int, group: Group) -> None:
        for _, sample, look in [one for one in self.looks if one[0] == handle]:
            rollout, length = group.rollouts[sample], len(look.token_ids)
            same = look.token_ids == rollout.token_ids[:length]
            same &= look.logprobs == rollout.logprobs[:length]
            same &= (look.top_logprobs or []) == (rollout.top_logprobs or [])[:length]
            if look.finish_reason is not None:
                same &= look.stop_reason == rollout.stop_reason
                same &= look.finish_reason == rollout.finish_reason
                same &= length == len(rollout.token_ids)
            if not same:
                self.verdict.differences.append(f"{self.about}: {look} became {rollout}")
        self.looks = [one for one in self.looks if one[0] != handle]

    def step(self) -> None:
        if self.asked and self.side.random() < 0.3:
            self.look()
        for handle, group in self.engine.step():
            self.check(handle, group)

    def abort(self) -> None:
        if self.asked:
            self.engine.abort(self.rng.choice(list(self.asked)))

    def update_weights(self) -> None:
        """Requests in flight go on, or are replayed: then the new weights made all of them, and what was
        seen of them may be taken back."""
        self.version = self.rng.choice(VERSIONS)
        learner = master(self.family, self.version)
        update = WeightUpdate.local(learner, self.version, noise_of(self.family, self.version))
        if self.kv is not None or self.side.random() < 0.4:
            self.engine.update_weights(update)
            return
        if self.side.random() < 0.3:
            self.engine.release(in_flight="replay")
        self.engine.update_weights(update, in_flight="replay")
        in_flight = self.engine.scheduler.in_flight.keys()
        self.made = {h: made for h, made in self.made.items() if h not in in_flight}
        self.drawn = {k: drawn for k, drawn in self.drawn.items() if k[0] not in in_flight}
        self.looks = [look for look in self.looks if look[0] not in in_flight]

    def generate(self) -> None:
        """Requests that are waited for, while those in flight go on and one of them may be aborted
        between two."""
        requests = [self.request() for _ in range(self.rng.randint(1, 4))]
        first = self.engine.scheduler._next_handle
        groups = self.engine.generate(requests, lambda *_: self.rng.random() < 0.1 and self.abort())
        for i, group in enumerate(groups):
            self.asked[first + i] = requests[i]
            self.check(first + i, group)

    def score(self) -> None:
        """Scoring beside what is in flight."""
        ids, prompt = self.ids(self.rng.randint(2, LONGEST)), 1
        got = self.engine.score([ids], [prompt], 0.7)[0]
        logits_TV = (
            replay(self.family, ids[:-1], [(self.version, False)] * (len(ids) - 1)).double() / 0.7
        )
        want = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        gap = (got.double() - want).abs().max().item()
        if not gap < 2 * self.family.tolerance:
            self.verdict.differences.append(f"{self.about}: score is {gap:.2g} nats off")

    def check(self, handle: int, group: Group) -> None:
        request = self.asked.pop(handle)
        self.check_looks(handle, group)
        if request is not group.request:
            self.verdict.differences.append(
                f"{self.about}: handle {handle} came back with another request"
            )
        prompt = self.made.pop(handle, {})
        for sample, rollout in enumerate(group.rollouts):
            made = prompt | self.drawn.pop((handle, sample), {})
            spans = [made[len(request.prompt_ids) + t - 1] for t in range(len(rollout.token_ids))]
            said = [
                next(s.version for s in reversed(rollout.behavior.policy) if s.start <= t)
                for t in range(len(rollout.token_ids))
            ]
            where = f"{self.about} {request} sample {sample}"
            if said != [version for version, _ in spans]:
                self.verdict.differences.append(f"{where}: drawn under {spans}, tagged {said}")
            compare(
                self.verdict,
                where,
                self.family,
                request,
                sample,
                rollout,
                [made[t] for t in range(len(request.prompt_ids) + len(rollout.token_ids) - 1)]
                if rollout.token_ids
                else [],
                self.keeps(handle, sample),
            )

    def keeps(self, handle: int, sample: int) -> Bounded | None:
        """The policy as the oracle has it. Where numbers are not exact and decide, it takes the
        engine's choice."""
        if self.recorder is None:
            return self.kv
        kept = self.recorder.take(handle, sample)
        self.verdict.compactions = self.recorder.num_compactions
        is_scored = isinstance(self.kv, (Liked, ChosenH2O, ChosenSnapKV))
        exact = self.family.is_exact and self.family.device == "cpu"
        return Replayed(self.kv, kept) if is_scored and not exact else self.kv


def random_family(rng: random.Random, device: str) -> Family:
    dense = rng.random() < 0.4
    weights = (
        rng.choice(["fp32"]) if dense else rng.choice([*ACTIVATIONS, *EXACT[1:], "bf16", "bf16"])
    )
    dtype = (
        torch.bfloat16 if weights == "bf16" or (device == "cuda" and not dense) else torch.float32
    )
    adapted = rng.random() < 0.2
    exact = dtype == torch.float32 and weights in EXACT
    large_batch = "nf4" if exact and rng.random() < 0.15 else None
    experts = exact and not adapted and weights != "nf4_dq"  # whose blocks do not fit
    name = rng.choice(["qwen3", "qwen2-tied", "llama3-rope", *(["qwen3-moe"] if experts else [])])
    if device == "cuda" and name == "llama3-rope":
        name = "qwen3"
    return Family(
        name, weights, adapted, None if name == "qwen3-moe" else large_batch, dtype, device
    )


def random_policy(rng: random.Random, family: Family) -> Bounded | None:
    if rng.random() < 0.5:
        return None
    budget, buffer = rng.choice([rng.randint(5, 9), rng.randint(5, 24)]), rng.choice([1, 2, 5])
    window, kernel = rng.randint(1, 4), rng.choice([1, 3, 7])
    plain = [Recent(budget, buffer), Parity(budget, buffer), ChosenStreaming(budget, buffer, 3)]
    scored = [
        Liked(budget, buffer),
        ChosenH2O(budget, buffer),
        ChosenSnapKV(budget, buffer, window, kernel),
        ChosenRKV(budget, buffer, window, kernel, rng.random(), rng.random() < 0.5),
    ]
    return rng.choice(plain + scored)


def least(kv: Bounded, page_size: int) -> int:
    """Tokens of the smallest cache that takes every request of a mix."""
    lengths = [(prompt, response) for prompt in range(1, 23) for response in (1, 2, 4, 12)]
    return page_size * max(footprint(kv, *length, page_size).alone for length in lengths)


def run_block(seed: int, mixes: int = MIXES, device: str = "cpu", family: str = "") -> Verdict:
    """Run the mixes of one block, of a named family of models or a random one; what the engine
    raises names the block."""
    drawn = random_family(random.Random(seed), device)
    block = Block(seed, device, replace(drawn, name=family) if family else drawn)
    try:
        for _ in range(mixes):
            block.mix()
    except Exception as error:
        raise RuntimeError(block.about) from error
    return block.verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first block")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--family", default="", choices=["", *FAMILIES], help="of all blocks")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    blocks, began = -(-args.mixes // MIXES), time.monotonic()
    by_format: dict[str, Verdict] = {}
    for done in range(1, blocks + 1):
        seed = args.seed + done - 1
        verdict = run_block(seed, device=args.device, family=args.family)
        for difference in verdict.differences:
            print(difference, flush=True)
        family = random_family(random.Random(seed), args.device)
        by_format.setdefault(family.weights, Verdict()).add(verdict)
        minutes = (time.monotonic() - began) / 60
        last = done == blocks or minutes > args.minutes
        if last or done % 50 == 0:
            print(
                f"{done * MIXES} mixes, {minutes:.1f} minutes",
                *(f"  {name}: {sums}" for name, sums in by_format.items()),
                sep="\n",
                flush=True,
            )
        if last:
            break
    bad = sum(len(verdict.differences) for verdict in by_format.values())
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
