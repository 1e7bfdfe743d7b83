"""What the papers claim, and what the stored runs say of it: `python -m bench.claims`.

A claim compares two arms of `bench.curves`. The unit is the run: of each seed that both arms have, from
the same warm start, the difference is taken, and the interval is Student's t at 95 % over the seeds.
`seen`: the interval lies above 0; `contradicted`: below; `not seen`: it has 0 inside. A claim that two
arms are the same is seen when the interval lies within `within` of 0, contradicted when it lies
outside, and else open. Each interval stands alone: nothing is corrected for the number of claims.
Seeds that share one warm start say nothing of another one.

Two differences are judged: of a held-out score of the final models, which each claim names, and of
the rollouts' reward over the last ten steps that both runs of a pair have. The prompts of a step are
the same in both. Rollouts are drawn in the arm's own format: where formats differ, so does the start.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness import RESULTS, print_table

# quantiles 0.975 of Student's t by degrees of freedom (NIST/SEMATECH handbook, 1.3.6.7.2)
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Claim:
    """A paper's statement that an arm is better than another, or, with `within`, as good.

    score: of the final model (`bench.curves.scores`). reports: the paper's own numbers.
    """

    source: str
    says: str
    better: str
    worse: str
    reports: str = ""
    score: str = "greedy"
    within: float | None = None


CLAIMS = (
    Claim(
        "QuRL, Table 1",
        "one clipped ratio to INT8 rollouts falls behind",
        "bf16",
        "int8 naive",
        "55.4 / 48.8",
    ),
    Claim("QuRL, Table 1", "the same of FP8 collapses", "bf16", "fp8 naive", "55.4 / 0.0"),
    Claim("QaRL, Table 1", "uncorrected 4-bit rollouts fall behind", "bf16", "int4 naive"),
    Claim("QuRL, Table 1", "ACR mends INT8", "int8 acr", "int8 naive", "53.6 / 48.8"),
    Claim("QuRL, Table 1", "ACR mends FP8", "fp8 acr", "fp8 naive"),
    Claim("QuRL, Eq. 9", "ACR mends INT4", "int4 acr", "int4 naive"),
    Claim("FlashRL; QuRL, Table 1", "TIS mends INT8", "int8 tis", "int8 naive", "51.4 / 48.8"),
    Claim("FlashRL", "TIS mends INT4", "int4 tis", "int4 naive"),
    Claim("QuRL, Table 1", "ACR is better than TIS, INT8", "int8 acr", "int8 tis", "53.6 / 51.4"),
    Claim("QuRL, Eq. 9", "ACR is better than TIS, INT4", "int4 acr", "int4 tis"),
    Claim("QuRL, Eq. 5", "TIS is better than uncapped weights, INT8", "int8 tis", "int8 decoupled"),
    Claim("QuRL, Table 2", "UAQ is better than none", "int8 acr uaq", "int8 acr", "31.3 / 30.6"),
    Claim(
        "QaRL, Table 1",
        "an aligned forward with TBPO is better than INT4 rollouts",
        "int4 aligned tbpo",
        "int4 acr",
        "48.9 / 43.9",
        score="own",
    ),
    Claim(
        "QaRL, sec. 3.2",
        "bounds as published are too narrow for these steps",
        "int4 aligned tbpo",
        "int4 aligned tbpo narrow",
        score="own",
    ),
    Claim(
        "lowroll",
        "an aligned forward needs no equal bits",
        "int8_rotated aligned tbpo exact",
        "int8_rotated aligned tbpo",
        within=0.03,
    ),
    Claim("QaRL, Table 1", "uncorrected NVFP4 rollouts fall behind", "bf16", "nvfp4 naive"),
    Claim(
        "QeRL, Table 1",
        "NVFP4 with LoRA beats BF16 with LoRA",
        "nvfp4 lora",
        "bf16 lora",
        "88.5 / 88.1",
    ),
    Claim("QeRL, Table 1", "noise gains on NVFP4", "nvfp4 lora noise", "nvfp4 lora", "90.8 / 88.5"),
    Claim("lowroll", "LoRA learns more from NVFP4 than all weights", "nvfp4 lora", "nvfp4 acr"),
    Claim("lowroll", "INT8 with ACR costs nothing", "bf16", "int8 acr", within=0.03),
    Claim("lowroll", "rotated INT8 costs nothing", "bf16", "int8_rotated acr", within=0.03),
    Claim("lowroll", "an FP8 learner costs nothing", "bf16", "fp8 learner tis", within=0.03),
    Claim(
        "lowroll",
        "rollouts 4 steps old need weights",
        "bf16 stale 4 tis",
        "bf16 stale 4 none",
    ),
    Claim("lowroll", "1 step of lag costs nothing", "bf16", "bf16 stale 1 tis", within=0.03),
    Claim("lowroll", "4 steps with TIS cost nothing", "bf16", "bf16 stale 4 tis", within=0.03),
    Claim("DAPO, Table 1", "DAPO is better than GRPO", "bf16 dapo", "bf16", "50 / 30"),
    Claim("DeepSeekMath", "GRPO needs no critic", "bf16", "bf16 ppo", within=0.03),
    Claim("Surogate", "a teacher's pull helps AIPO", "int8 aipo teacher", "int8 aipo"),
    Claim("Liu et al. 2025 (Muon)", "Muon learns more than AdamW at its rate", "bf16 muon", "bf16"),
)
LAST = 10  # steps
HEAD = (
    "source",
    "claim",
    "paper",
    "arms",
    "pairs",
    "reward of rollouts (95 %)",
    "verdict",
    "held-out score",
    "difference (95 %)",
    "verdict on it",
)
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]


def pairs(claim: Claim, runs: Sequence[Mapping[str, Any]]) -> list[Pair]:
    """Return the runs of the better and of the worse arm that share a seed and a warm start."""
    found = {(one["variant"], one["seed"], one["warm_start"]["sha256"]): one for one in runs}
    return [
        (one, found[claim.worse, *start])
        for (arm, *start), one in found.items()
        if arm == claim.better and (claim.worse, *start) in found
    ]


def held_out(claim: Claim, pair: Pair) -> float | None:
    """Return the difference of the claim's held-out score; None where a run has no scores."""
    better, worse = (one["after"].get(claim.score) for one in pair)
    return None if better is None or worse is None else better - worse


def drawn(pair: Pair) -> float:
    """Return the difference of the rollouts' reward over the last LAST steps that both runs have."""
    curves = [one["curves"]["reward/mean"] for one in pair]
    steps = min(map(len, curves))
    better, worse = (statistics.fmean(curve[max(0, steps - LAST) : steps]) for curve in curves)
    return better - worse


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean; unbounded for one value. ValueError for more values than
    STUDENT has quantiles for."""
    if len(values) > len(STUDENT):
        raise ValueError(f"pairs: {len(values)} of a claim, and STUDENT has {len(STUDENT)} at most")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return -math.inf, math.inf
    half = STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def verdict(claim: Claim, low: float, high: float) -> str:
    """Return what an interval of the difference says of a claim."""
    if claim.within is not None:
        if max(-low, high) <= claim.within:
            return "seen"
        return "contradicted" if low > claim.within or high < -claim.within else "open"
    return "seen" if low > 0 else "contradicted" if high < 0 else "not seen"


def judged(claim: Claim, differences: Sequence[float]) -> tuple[str, str]:
    """Return the mean difference with its interval, and the verdict; `not run` without any."""
    if not differences:
        return "-", "not run"
    low, high = interval(differences)
    size = f"{statistics.fmean(differences):+.3f} ({low:+.3f} to {high:+.3f})"
    return size, verdict(claim, low, high)


def table(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row of HEAD for each claim."""
    rows: list[tuple[str, ...]] = []
    for claim in CLAIMS:
        found = pairs(claim, runs)
        scored = [size for pair in found if (size := held_out(claim, pair)) is not None]
        without_score = len(found) - len(scored)
        rows.append(
            (
                claim.source,
                claim.says,
                claim.reports or "-",
                f"{claim.better} - {claim.worse}",
                f"{len(found)}, {len(scored)} scored" if without_score else str(len(found)),
                *judged(claim, [drawn(pair) for pair in found]),
                claim.score,
                *judged(claim, scored),
            )
        )
    return rows


def main() -> None:
    """Print what the stored runs say of each claim."""
    runs = json.loads((RESULTS / "curves.json").read_text())["runs"]
    print_table(HEAD, table(runs), "the papers' claims")


if __name__ == "__main__":
    main()
