"""What the project holds itself to on one H200, as data: `must` is the promise, `aim` the hope.

A target names rows of one file in bench/baselines/. The commands put its numbers into their rows,
and `docs/tables.py` prints a line for each target, with the reasons of the rows that miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from bench.harness import Goal, Row
from bench.work import APART, FILTERS, MACHETE, SAMPLINGS, Work

Bounds = tuple[float | None, float | None]  # must and aim
NONE: Bounds = (None, None)


@dataclass(frozen=True)
class Target:
    """rows: by the name of each row in `file`, what it must reach and what is hoped for, None where
    nothing is promised."""

    quantity: str
    file: str
    rows: Mapping[str, Bounds]
    goal: Goal = "ratio at least"


def named(model: str, format: str, work: str, codes: bool = False) -> str:
    """Return the beginning of the names of rows of a work (`Work.title`). codes: of a 4-bit format
    at default settings, without dense copies."""
    return " ".join(filter(None, (model, format, "from codes" if codes else "", work)))


def batch_of(model: str, format: str, batch: int, codes: bool = False) -> str:
    return named(model, format, Work(batch).title, codes)


def rollout(work: str) -> str:
    """Return the name of the row of whole calls of a work, in tokens/s."""
    return f"{work}: rollout"


def decoding(work: str) -> str:
    """Return the name of the row of ms a decode step."""
    return f"{work}: decode step"


def prefill(work: str) -> str:
    """Return the name of the row of calls for one token, in prompt tokens/s."""
    return f"{work}: prefill"


def roof(work: str) -> str:
    return f"{work}: fraction of the bandwidth roofline"


def over_plain(work: str) -> str:
    return f"{work}: over plain sampling"


def over_family(format: str) -> str:
    """Return what is added to a row's name that is held against vLLM in another format."""
    return f" over {'int4 by Machete' if format == MACHETE else format}"


def first_answer(work: str) -> str:
    return f"{work}: first token of a prompt of 256"


def memory(engine: str) -> str:
    return f"{engine}: memory in all"


def first_token(model: str, format: str) -> str:
    return f"{model} {format}: first token after Engine(folder)"


def adaptive(model: str, workload: str) -> str:
    return f"{model} nvfp4 with fp8 bulk over own bf16: {workload} lengths"


def publishing(model: str, format: str) -> str:
    return f"{model} publish bf16 to {format} in place"


def thousands(context: int) -> str:
    """Return 4k for 4096."""
    return f"{context >> 10}k" if context >= 1024 else str(context)


def case(model: str, weights: str, cache: str, batch: int, context: int | None = None) -> str:
    """Name a cache at a batch, and at a mean context where that matters (`bench.kv`)."""
    where = "" if context is None else f"{thousands(context)} "
    return f"{model} {weights} {cache} {where}B={batch}"


def over_dense(model: str, weights: str, cache: str, batch: int, context: int) -> str:
    return f"{case(model, weights, cache, batch, context)}: decode step over dense"


def over_vllm(model: str, weights: str, cache: str, batch: int, context: int) -> str:
    return f"{case(model, weights, cache, batch, context)}: decode step over vLLM"


def compacting(model: str, weights: str, cache: str, batch: int) -> str:
    return f"{case(model, weights, cache, batch)}: compactions' share of decoding"


def fullest(model: str, weights: str, cache: str, context: int) -> str:
    return f"{model} {weights} {cache} {thousands(context)}, largest batch: tokens/s"


def over_vllm_server(model: str, format: str, concurrency: int, what: str) -> str:
    return f"{model} {format} C={concurrency} over vllm serve: {what}"


def through_server(model: str, format: str, batch: int, group: int) -> str:
    return f"{model} {format} B={batch} n={group}: rollouts over the server"


SEVEN = "qwen2.5-7b"
CONCURRENCY = (1, 16, 64, 256)
SERVED = tuple((batch, group) for group in (1, 8) for batch in (64, 256))
FILTERED = [named(SEVEN, "bf16", Work(64, sampling=one).title) for one in list(SAMPLINGS)[1:]]
FILTERED_256 = named(SEVEN, "bf16", Work(256, sampling=FILTERS).title)
SHORT, LONG = (named(SEVEN, "fp8", work.title) for work in APART["fp8"])
(FOUR,) = (named(SEVEN, "nvfp4", work.title, codes=True) for work in APART["nvfp4"])


def _rollouts(model: str, format: str, bounds: Mapping[int, Bounds]) -> Target:
    """Return the target of rollouts over vLLM's. bounds: by the batch."""
    rows = {rollout(batch_of(model, format, batch)): own for batch, own in bounds.items()}
    sizes = " / ".join(map(str, bounds))
    what = f"{model} {format} rollout over vLLM with log-probs, B = {sizes}"
    return Target(what, "decode", rows)


def _codes(model: str, family: str, bounds: Mapping[int, Bounds]) -> Target:
    other = "" if family == "nvfp4" else over_family(family)
    rows = {
        rollout(batch_of(model, "nvfp4", batch, codes=True)) + other: own
        for batch, own in bounds.items()
    }
    theirs = other.removeprefix(" over ") or family
    what = f"{model} nvfp4 rollout from codes over vLLM's {theirs}, B = 64 / 256"
    return Target(what, "decode", rows)


def _caches(weights: str) -> tuple[Target, ...]:
    what = (SEVEN, weights)
    return (
        Target(
            f"qwen2.5-7b {weights}, ms a decode step with rkv (512 + 128) over dense, 4k B = 64 / "
            f"256, 16k B = 64",
            "kv",
            {
                over_dense(*what, "rkv", 64, 4096): (1.25, 1.6),
                over_dense(*what, "rkv", 256, 4096): (1.25, 1.6),
                over_dense(*what, "rkv", 64, 16384): (3.0, 4.5),
            },
        ),
        Target(
            f"qwen2.5-7b {weights}, rkv's compactions, share of decoding, B = 64 / 256",
            "kv",
            {compacting(*what, "rkv", batch): (0.05, None) for batch in (64, 256)},
            "ours at most",
        ),
        Target(
            f"qwen2.5-7b {weights}, ms a decode step with an fp8 cache over bf16, 16k B = 64",
            "kv",
            {over_dense(*what, "fp8", 64, 16384): (1.4, 1.7)},
        ),
        Target(
            f"qwen2.5-7b {weights}, tokens/s at the largest batch with rkv over dense, 16k",
            "kv",
            {fullest(*what, "rkv", 16384): (4.0, None)},
        ),
    )


def _beside_vllm(what: str) -> Target:
    at = " / ".join(map(str, CONCURRENCY))
    rows: dict[str, Bounds] = {
        over_vllm_server(SEVEN, "bf16", c, what): (1.0, None) for c in CONCURRENCY
    }
    name = f"qwen2.5-7b bf16, {what}, over vLLM's server, {at} requests at a time"
    return Target(name, "server", rows)


TARGETS: tuple[Target, ...] = (
    _rollouts("qwen2.5-7b", "bf16", {1: (1.15, 1.3), 64: (1.1, 1.3), 256: (1.25, 1.4)}),
    _rollouts("qwen2.5-7b", "fp8", {1: (1.1, 1.4), 64: (1.1, 1.4), 256: (1.3, 1.5)}),
    _rollouts("qwen2.5-7b", "int8", {1: (1.1, 1.4), 64: (1.1, 1.4), 256: (1.3, 1.8)}),
    _rollouts("qwen2.5-7b", "nvfp4", {1: (1.2, 2.0), 64: (1.2, 1.5), 256: (1.4, 2.2)}),
    _rollouts("qwen2.5-32b", "nvfp4", {1: (1.2, 2.0), 64: (1.2, 1.5), 256: (1.4, 2.2)}),
    _rollouts("qwen2.5-1.5b", "bf16", {64: (1.3, 1.8)}),
    _rollouts("smollm2-135m", "bf16", {1: NONE, 64: NONE, 512: (1.5, 2.0)}),
    _rollouts("qwen3-30b-a3b", "bf16", {1: NONE, 64: NONE}),
    _rollouts("qwen3-30b-a3b", "fp8", {1: NONE, 64: NONE, 256: NONE}),
    _rollouts("qwen3-30b-a3b", "nvfp4", {1: NONE, 64: NONE, 256: NONE}),
    Target(
        "qwen2.5-7b bf16 rollout with top-p 0.95 and top-k 50 over vLLM, B = 64 / 256",
        "decode",
        {rollout(FILTERED[0]): (1.1, 1.15), rollout(FILTERED_256): (1.2, 1.3)},
    ),
    Target(
        "qwen2.5-7b bf16 rollout over our own plain sampling, B = 64: with top-p and top-k, and "
        "with these and min-p / repetition penalty / min_tokens / stop ids",
        "decode",
        {over_plain(work): (0.95, 0.98) for work in FILTERED},
    ),
    Target(
        "qwen2.5-7b fp8, 128 different prompts of 1,024, 128 new tokens, over vLLM",
        "decode",
        {rollout(SHORT): (1.1, 1.25)},
    ),
    Target(
        "qwen2.5-7b fp8, 32 different prompts of 4,096, 256 new tokens, over vLLM: prefill / a "
        "decode step",
        "decode",
        {prefill(LONG): (1.05, 1.15), decoding(LONG): (1.25, 1.4)},
    ),
    Target(
        "qwen2.5-7b nvfp4, 64 different prompts of 4,096, 256 new tokens, over vLLM: a decode step",
        "decode",
        {decoding(FOUR): (1.25, 1.5)},
    ),
    _codes("qwen2.5-7b", "nvfp4", {64: (1.25, 1.4), 256: (1.5, 1.8)}),
    _codes("qwen2.5-7b", MACHETE, {64: (1.1, None), 256: (1.1, None)}),
    _codes("qwen2.5-32b", "nvfp4", {64: (1.2, 1.4), 256: (1.4, 1.8)}),
    Target(
        "qwen2.5-32b nvfp4 from codes, memory in all with the cache of 256 rows, GB",
        "decode",
        {memory(named("qwen2.5-32b", "nvfp4", "", codes=True)): (80.0, None)},
        "ours at most",
    ),
    Target(
        "qwen2.5-7b, ms to the first token of one prompt of 256 tokens, bf16 / fp8 / nvfp4",
        "decode",
        {
            first_answer(named(SEVEN, format, "B=1", codes=format == "nvfp4")): (12.0, 8.0)
            for format in ("bf16", "fp8", "nvfp4")
        },
        "ours at most",
    ),
    Target(
        "qwen2.5-7b bf16 decode, fraction of the measured bandwidth roofline, B = 1 / 64 / 256",
        "decode",
        {
            roof(batch_of(SEVEN, "bf16", 1)): (0.7, 0.82),
            roof(batch_of(SEVEN, "bf16", 64)): (0.6, 0.8),
            roof(batch_of(SEVEN, "bf16", 256)): (0.6, 0.8),
        },
        "ours at least",
    ),
    Target(
        "qwen2.5-7b bf16, seconds from Engine(folder) to the first token",
        "decode",
        {first_token(SEVEN, "bf16"): (20.0, 8.0)},
        "ours at most",
    ),
    Target(
        "qwen2.5-7b nvfp4 with fp8 bulk over own bf16, log-normal lengths, GSM8K- / MATH-like",
        "decode",
        {adaptive(SEVEN, "gsm8k-like"): (1.4, 1.6), adaptive(SEVEN, "math-like"): (1.4, 1.6)},
    ),
    Target(
        "qwen2.5-7b publish bf16 to fp8 in place, ms",
        "step",
        {publishing(SEVEN, "fp8"): (30.0, 8.0)},
        "ours at most",
    ),
    Target(
        "qwen2.5-7b LoRA r16, fp8 rollouts: a whole RL step of 256 x (256 + 256) tokens, s",
        "step",
        {"qwen2.5-7b LoRA r16, fp8 rollouts: whole step": (8.5, 7.0)},
        "ours at most",
    ),
    *_caches("bf16"),
    *_caches("nvfp4"),
    Target(
        "qwen2.5-7b bf16, rollouts over the server over those in process, n = 1: B = 64 / 256, "
        "n = 8: B = 64 / 256",
        "server",
        {through_server(SEVEN, "bf16", *case): (0.9, 1.0) for case in SERVED},
    ),
    _beside_vllm("requests a second"),
    _beside_vllm("time to first token"),
    _beside_vllm("time of a token"),
)


def aimed(rows: Iterable[Row]) -> list[Row]:
    wanted = {
        name: (*bounds, target.goal) for target in TARGETS for name, bounds in target.rows.items()
    }
    found = []
    for row in rows:
        if row.name in wanted:
            must, aim, goal = wanted[row.name]
            row = replace(row, must=must, aim=aim, goal=goal)
        found.append(row)
    return found


# Why a row misses what it must, by the beginning of its name; the profiles are in docs/LOG.md.
REASONS: dict[str, str] = {
    roof(
        batch_of("qwen2.5-7b", "bf16", 256)
    ): "products and head need 4.6 ms at the measured peak of arithmetic, as long as all bytes of "
    "the step, and "
    "attention's bytes come on top (profile: docs/LOG.md)",
    rollout(
        batch_of("qwen2.5-7b", "int8", 256)
    ): "of 6.7 ms a step the products take 3.8 (13 / 11 / 69 / 41 us a layer, fp8's 11 / 10 / 54 / "
    "35): Triton's int8 "
    "product reaches 1,000 TOPS, and a kernel of wgmma in CUDA with K dealt evenly 880 (tables: "
    "docs/LOG.md)",
    "qwen2.5-7b bf16 fp8 16k B=64: decode step over dense": "1.35 and 1.42 in its two turns: "
    "attention alone is 1.73 times faster (330 us a layer for 571), and the "
    "other 4.7 ms of the step, most of them weights, stay as they are",
    "qwen2.5-7b nvfp4 fp8 16k B=64: decode step over dense": "1.36 and 1.41 in its two turns, as "
    "with bf16 weights: attention alone is 1.73 times faster, the rest of the step stays",
    **{
        over_vllm_server("qwen2.5-7b", "bf16", c, what): why
        for c in CONCURRENCY
        for what, why in {
            "requests a second": "a prompt token takes 21 to 24 us (its products 17.3 at 754 "
            "TFLOP/s), the host 25 to 35 ms to launch a pass beside rows that decode, and the device "
            "waits 1.8 ms between two turns (docs/log/engine.md)",
            "time to first token": "a request that comes waits for the turn that runs, a pass of up "
            "to 4,096 prompt tokens or 8 steps of decoding, and then for its own pass "
            "(docs/log/engine.md)",
            "time of a token": "the fewer requests a second, the longer first token or time of a "
            "token: clients = rate x (first token + 127 x time of a token)",
        }.items()
    },
    "qwen2.5-1.5b full, 16384 tokens: transformers": "of 312 ms the products take 217, at 93 % of "
    "the measured peak, attention 28, the gate 18, AdamW 11 to 15, "
    "norms 9, log-probs 7, and 9 the device waits (profile: docs/LOG.md); turns reached 1.24 to "
    "1.29",
}


def reason(row: Row) -> str:
    """Return why the row misses its target; empty for one that does not miss, or that nobody has
    looked into."""
    known = (text for name, text in REASONS.items() if row.name.startswith(name))
    return next(known, "") if row.verdict == "missed" else ""
