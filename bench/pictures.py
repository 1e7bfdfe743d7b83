"""The pictures of docs/results.md, drawn from `results/curves.json`: `python -m bench.pictures`.

Lines are means over the seeds, smoothed over ten steps; bands reach from the lowest seed to the
highest. Prompts differ from step to step and are the same in every variant, so what the curves
share is the prompts and what parts them is the variant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.record import RESULTS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "results"
WINDOW = 10
PRICES = (
    "bf16",
    "fp8 naive",
    "int4 naive",
    "int4 uncorrected",
    "int4 tis",
    "int4 acr",
    "int4 acr uaq",
    "int4 aligned tbpo",
)
NOISE = ("bf16", "bf16 noise", "nvfp4", "nvfp4 noise")
ALIGNED = 1e-9  # a KL below this is rounding; it would stretch the axis


def smooth(values: list[float | None]) -> list[float]:
    """Running mean over the last WINDOW known values."""
    return [
        sum(known) / len(known)
        for i in range(len(values))
        if (known := [v for v in values[max(0, i - WINDOW + 1) : i + 1] if v is not None])
    ]


def draw(
    axes: Axes, runs: list[dict[str, Any]], variants: tuple[str, ...], metric: str, label: str
) -> None:
    """One line with its band for each variant."""
    for i, variant in enumerate(variants):
        curves = [smooth(run["curves"][metric]) for run in runs if run["variant"] == variant]
        if not curves or max(map(max, curves)) < ALIGNED:
            continue
        columns = list(zip(*curves, strict=True))
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


def picture(
    path: Path,
    runs: list[dict[str, Any]],
    variants: tuple[str, ...],
    second: tuple[str, str],
    log: bool,
) -> None:
    """Reward on the left, the `second` (metric, label) on the right."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
        left, right = figure.subplots(1, 2)
        draw(left, runs, variants, "reward/mean", "reward of the rollouts")
        draw(right, runs, variants, *second)
        if log:
            right.set_yscale("log")
        left.legend(frameon=False, fontsize=8, loc="lower left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Software": None})


def main() -> None:
    """Draw both pictures."""
    runs = json.loads((RESULTS / "curves.json").read_text())["runs"]
    picture(
        FOLDER / "prices.png",
        runs,
        PRICES,
        ("mismatch/kl_k3", "KL of the rollouts to the learner, nats"),
        True,
    )
    picture(
        FOLDER / "noise.png", runs, NOISE, ("policy/entropy", "entropy of the learner, nats"), False
    )


if __name__ == "__main__":
    main()
