"""The pictures of docs/results.md, docs/scale.md and the README, drawn from `results/curves.json`,
`results/sparse.json`, `baselines/decode.json` and `baselines/scale.json`: `python -m bench.pictures`.

Lines are means over the seeds, smoothed over ten steps; bands reach from the lowest seed to the
highest. Prompts differ from step to step and are the same in every variant, so what the curves
share is the prompts and what parts them is the variant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import sparse
from bench.curves import by_start
from bench.harness import BASELINES, RESULTS
from bench.targets import batch_of, rollout

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"
WINDOW = 10
EIGHT_BITS = (
    "bf16",
    "int8_rotated acr",
    "int8 acr",
    "int8 tis",
    "int8 naive",
    "fp8 acr",
    "fp8 naive",
)
FOUR_BITS = (
    "bf16",
    "bf16 lora",
    "nvfp4 lora",
    "nvfp4 acr",
    "int4 aligned tbpo",
    "int4 acr",
    "int4 naive",
)
LEARNT = ("bf16", "int8_rotated acr", "int8 acr", "int8 naive", "fp8 naive")
FORMATS = ("bf16", "fp8", "int8", "nvfp4")
MOST_INSIDE = 6  # names of a legend that stands among the curves
BATCHES = (1, 64, 256)
SIZES = tuple(2**i for i in range(10))  # engines
COST = "orchestrator: processor for a rollout"
FULL = 50.0  # rollouts/s of an engine with 64 rows: 13,200 tokens/s at 265 a response
ALIGNED = 1e-9  # a KL below this is rounding; it would stretch the axis


def smooth(values: list[float | None]) -> list[float]:
    """Return the running mean over the last WINDOW known values."""
    return [
        sum(known) / len(known)
        for i in range(len(values))
        if (known := [v for v in values[max(0, i - WINDOW + 1) : i + 1] if v is not None])
    ]


@contextmanager
def pair(path: Path, height: float) -> Iterator[tuple[Figure, Axes, Axes]]:
    """Yield a picture of ten by `height` inches and its two halves; save it at the end."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(10, height), layout="constrained", dpi=120)
        left, right = figure.subplots(1, 2)
        yield figure, left, right
        figure.savefig(path, metadata={"Software": None})


def draw(
    axes: Axes, runs: list[dict[str, Any]], variants: tuple[str, ...], metric: str, label: str
) -> None:
    """Draw one line with its band for each variant."""
    for i, variant in enumerate(variants):
        curves = [smooth(run["curves"][metric]) for run in runs if run["variant"] == variant]
        if not curves or max(map(max, curves)) < ALIGNED:
            continue
        columns = list(zip(*curves, strict=False))  # the steps that all runs have
        steps = range(1, len(columns) + 1)
        axes.plot(
            steps, [sum(c) / len(c) for c in columns], label=variant, color=f"C{i}", linewidth=1.3
        )
        axes.fill_between(
            steps, list(map(min, columns)), list(map(max, columns)), color=f"C{i}", alpha=0.15, lw=0
        )
    axes.set(xlabel="step", ylabel=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def picture(path: Path, runs: list[dict[str, Any]], variants: tuple[str, ...]) -> None:
    """Draw the reward on the left, and the mismatch on the right."""
    with pair(path, 4) as (figure, left, right):
        draw(left, runs, variants, "reward/mean", "reward of the rollouts")
        kl = "KL of the rollouts to the learner, nats"
        draw(right, runs, variants, "mismatch/kl_k3", kl)
        right.set_yscale("log")
        if len(variants) > MOST_INSIDE:
            lines, names = left.get_legend_handles_labels()
            figure.legend(
                lines,
                names,
                frameon=False,
                fontsize=8,
                loc="outside lower center",
                ncols=MOST_INSIDE,
            )
        else:
            left.legend(frameon=False, fontsize=8, loc="lower left")


def gains(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw rollouts of 7B over vLLM's in the same format: a group of bars a format, a bar a
    batch."""
    ratio = {row["name"]: row["ratio"] for row in rows}
    width = 0.8 / len(BATCHES)
    for i, batch in enumerate(BATCHES):
        places = [place + (i - 1) * width for place in range(len(FORMATS))]
        heights = [ratio[rollout(batch_of("qwen2.5-7b", format, batch))] for format in FORMATS]
        label = "1 row" if batch == 1 else f"{batch} rows"
        bars = axes.bar(places, heights, width, label=label, color=f"C{i}", alpha=0.85)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(FORMATS)), FORMATS)
    axes.set(ylabel="tokens/s over vLLM's", ylim=(0, 2.3))
    axes.set_title("Qwen2.5-7B rollouts with log-probs, one H200", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=len(BATCHES))


def front(path: Path, runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Draw the README's picture: what rollouts gain on the left, what a correction saves on the
    right."""
    with pair(path, 3.4) as (_, left, right):
        gains(left, rows)
        draw(right, runs, LEARNT, "reward/mean", "reward of the rollouts")
        right.set_title("GRPO of SmolLM2-135M with 8-bit rollouts, 3 seeds", fontsize=9)
        right.legend(frameon=False, fontsize=8, loc="lower left")


def orchestrated(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw what a rollout costs the orchestrator on the left, and on the right how many a core
    makes beside what the engines would draw, by the number of engines."""
    found = {row["name"]: row["ours"] for row in rows}
    with pair(path, 3.4) as (_, left, right):
        for work, mark in (("full", "o"), ("light", "s")):
            counts = [n for n in SIZES if f"{work} E={n}: {COST}" in found]
            costs = [found[f"{work} E={n}: {COST}"] for n in counts]
            left.plot(counts, costs, marker=mark, label=work)
            right.plot(counts, [1e3 / cost for cost in costs], marker=mark, label=f"{work}, a core")
        right.plot(SIZES, [n * FULL for n in SIZES], "k--", linewidth=1, label="full, the engines")
        left.set(ylabel="processor ms a rollout", ylim=(0, None))
        right.set(ylabel="rollouts/s", yscale="log")
        for axes in (left, right):
            axes.set(xlabel="engines", xscale="log")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=8)


def main() -> None:
    def stored(path: Path, key: str) -> list[dict[str, Any]]:
        return list(json.loads(path.read_text())[key])

    runs = by_start(stored(RESULTS / "curves.json", "runs"))
    orchestrated(FOLDER / "scale.png", stored(BASELINES / "scale.json", "rows"))
    picture(FOLDER / "eight_bits.png", runs, EIGHT_BITS)
    picture(FOLDER / "four_bits.png", runs, FOUR_BITS)
    picture(FOLDER / "caches.png", stored(RESULTS / "sparse.json", "runs"), tuple(sparse.ARMS))
    front(FOLDER / "front.png", runs, stored(BASELINES / "decode.json", "rows"))


if __name__ == "__main__":
    main()
