"""The report's plots: inline SVG in the page's text colour."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from lowroll.metrics.live import drawn_at
from lowroll.metrics.record import LOST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
_INK = "#0a0b0c"  # replaced by currentColor
_COLOURS = ("#3b7dd8", "#e07b39", "#2f9e73", "#c04f8a", "#8a6fd1", "#b08d1e", "#5aa7b8", "#9a9a9a")
_SMOOTH_FROM = 40  # steps from which the plain curve fades behind its running mean
_SAME_HEIGHT = 0.01  # share of the axis below which two curves look the same
_WIDTH_INCHES = 4.6  # inches, so that 9-point text is readable on a phone
_EVAL_METRIC = re.compile(r"eval/(.+)/(reward|sampled_reward)")


@dataclass(frozen=True)
class Curve:
    """A metric's curve."""

    metric: str
    label: str
    right: bool = False
    points: bool = False  # sparse: markers joined by a line


@dataclass(frozen=True)
class Plot:
    """A figure."""

    title: str
    caption: str
    lines: tuple[Curve, ...]
    unit: str = ""
    right_unit: str = ""
    log: bool = False
    floor: float = 0.0  # of a log axis; smaller values are rounding noise
    stacked: bool = False
    bottom: float | None = 0.0  # lower end of the axis; None: automatic
    only_with: str = ""  # a required metric


NOISE_NATS = 1e-8  # smaller KLs are float32 rounding

PLOTS: tuple[Plot, ...] = (
    Plot(
        "Entropy",
        "from the learner's logits, and as estimated from the drawn tokens",
        (Curve("policy/entropy", "learner"), Curve("rollout/entropy_estimate", "rollouts")),
        "nats",
    ),
    Plot(
        "Mismatch",
        "KL between the policy that drew the tokens and the learner",
        (Curve("mismatch/kl_k3", "k3"), Curve("mismatch/kl_k1", "|k1|")),
        "nats",
        log=True,
        floor=NOISE_NATS,
    ),
    Plot(
        "Effective sample size",
        "of the importance weights; 1 is no mismatch",
        (Curve("mismatch/ess", "tokens"), Curve("mismatch/ess_sequence", "sequences")),
    ),
    Plot(
        "Response length",
        "and the share of responses cut by the token limit",
        (
            Curve("rollout/length_mean", "mean"),
            Curve("rollout/length_p50", "median"),
            Curve("rollout/length_p95", "95th percentile"),
            Curve("rollout/max_tokens", "limit"),
            Curve("rollout/truncated_fraction", "cut", right=True),
        ),
        "tokens",
        "fraction cut",
    ),
    Plot(
        "Groups without signal",
        "scores all equal, and groups that solved all or none",
        (
            Curve("reward/zero_std_fraction", "all equal"),
            Curve("reward/solved_all_fraction", "all right"),
            Curve("reward/solved_none_fraction", "none right"),
            Curve("reward/error_rate", "score errors"),
        ),
        "fraction",
    ),
    Plot(
        "Clipping and correction",
        "tokens that the trust region or the cap on the weight touched",
        (
            Curve("policy/clip_fraction_high", "clipped above"),
            Curve("policy/clip_fraction_low", "clipped below"),
            Curve("policy/dual_clip_fraction", "dual clip"),
            Curve("correction/truncated_fraction", "weight over the cap"),
            Curve("correction/acr_extended_fraction", "ACR extended"),
        ),
        "fraction",
    ),
    Plot(
        "KV tokens saved",
        "by a bounded cache, of what the same responses hold in a dense one, and compactions a "
        "response",
        (
            Curve("kv/saving_peak", "at the peak"),
            Curve("kv/saving_final", "in the end"),
            Curve("kv/saving_mean", "over time"),
            Curve("kv/evictions", "compactions", right=True),
        ),
        "fraction",
        "compactions",
        only_with="kv/evictions",
    ),
    Plot(
        "Importance weights",
        "w, or xi, where the cache forgets or rounds",
        (
            Curve("mismatch/weight_mean", "mean"),
            Curve("mismatch/weight_max", "largest"),
            Curve("mismatch/weight_min", "smallest"),
        ),
        "w",
        log=True,
        floor=1e-9,
        only_with="mismatch/weight_mean",
    ),
    Plot(
        "Rejection",
        "what the mismatch rejects, and how long those responses are beside all",
        (
            Curve("correction/rejected_sequence_fraction", "responses"),
            Curve("correction/repaired_sequence_fraction", "responses repaired"),
            Curve("correction/rejected_fraction", "tokens"),
            Curve("correction/vetoed_fraction", "below the veto"),
            Curve("correction/rejected_length_ratio", "length over all", right=True),
        ),
        "fraction",
        "length ratio",
    ),
    Plot(
        "Critic",
        "mean value and mean return, and how much of the returns' variance the values explain",
        (
            Curve("critic/value_mean", "value"),
            Curve("critic/return_mean", "return"),
            Curve("critic/explained_variance", "explained variance", right=True),
        ),
        "reward",
        "explained",
        bottom=None,
    ),
    Plot(
        "Critic's loss",
        "squared error to the returns, and the share of tokens that its clip holds",
        (Curve("critic/loss", "loss"), Curve("critic/clip_fraction", "clipped", right=True)),
        "loss",
        "fraction",
    ),
    Plot(
        "Weights",
        "the step's update beside the rounding of the rollout's format, and the codes that it "
        "flipped",
        (
            Curve("weights/normalized_update", "update"),
            Curve("weights/normalized_quant_error", "rounding"),
            Curve("weights/codes_flipped_fraction", "codes flipped"),
        ),
        "share",
        log=True,
        floor=1e-12,
    ),
    Plot(
        "Gradient and learning rate",
        "norm before clipping",
        (Curve("optim/grad_norm", "gradient norm"), Curve("optim/lr", "learning rate", right=True)),
        "norm",
        "learning rate",
    ),
    Plot(
        "Time",
        "where each step's seconds went",
        tuple(
            Curve(f"time/{name}", name)
            for name in ("generate", "score", "learn", "publish", "checkpoint", "eval", "other")
        ),
        "seconds",
        stacked=True,
    ),
    Plot(
        "Waiting",
        "seconds of a step in which the orchestrator waits for engines, weights or the trainer, and "
        "the trainer for its batch",
        (
            Curve("time/generate", "for engines"),
            Curve("time/wait_weights", "for weights"),
            Curve("time/wait_trainer", "for the trainer"),
            Curve("time/wait_batch", "for the batch"),
        ),
        "seconds",
        only_with="time/wait_batch",
    ),
    Plot(
        "Staleness",
        "share of a batch's tokens by how many versions before the learner's they were drawn",
        tuple(Curve(f"rollout/staleness_{n}", str(n)) for n in range(9)),
        "fraction",
        only_with="rollout/mixed_fraction",
    ),
    Plot(
        "Log-probs by staleness",
        "mean |ln pi_old - ln b| of the tokens, by versions",
        tuple(Curve(f"mismatch/staleness_{n}/logp_diff_mean", str(n)) for n in range(9)),
        "nats",
        only_with="rollout/mixed_fraction",
    ),
    Plot(
        "Throughput",
        "tokens a second while generating and while learning",
        (
            Curve("perf/generate_tokens_per_second", "generate"),
            Curve("perf/learn_tokens_per_second", "learn"),
        ),
        "tokens/s",
    ),
    Plot(
        "KL to the reference",
        "the frozen model that training started from",
        (Curve("policy/kl_reference", "k3"),),
        "nats",
    ),
    Plot("Loss", "supervised warm start", (Curve("sft/loss", "negative log-prob"),), "nats"),
)


def reward_plot(records: Sequence[Record]) -> Plot:
    """Return the plot of the rollouts' reward and every environment's evaluation."""
    envs = {name for record in records for name in record if re.fullmatch(r"reward/.+/mean", name)}
    evals = evaluated(records)
    lines = [Curve("reward/mean", "rollouts")]
    lines += [
        Curve(name, name.removeprefix("reward/").removesuffix("/mean"))
        for name in sorted(envs)
        if len(envs) > 1
    ]
    lines += [
        Curve(name, f"held out, {sampling}" + (f": {env}" if len(evals) > 2 else ""), points=True)
        for name, env, sampling in evals
    ]
    return Plot(
        "Reward",
        "mean raw score of the rollouts, with one standard deviation, and on held-out prompts",
        tuple(lines),
        "reward",
        bottom=None,
    )


def evaluated(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Return the run's evaluation rewards by name: the metric, its environment, and how it was
    sampled."""
    names = {name.removesuffix("_before") for record in records for name in record}
    sampling_by_kind = {
        kind: drawn_at(next((record[name] for record in records if name in record), None))
        for kind, name in (
            ("reward", "eval/temperature"),
            ("sampled_reward", "rollout/temperature"),
        )
    }
    matches = filter(None, map(_EVAL_METRIC.fullmatch, sorted(names)))
    return [(match[0], match[1], sampling_by_kind[match[2]]) for match in matches]


def length_plot(records: Sequence[Record]) -> Plot:
    """Return the mismatch by response length: the longest eight classes."""
    lengths = sorted(
        {
            int(match[1])
            for record in records
            for name in record
            if (match := re.fullmatch(r"mismatch/length_([0-9]+)/kl_k3", name))
        }
    )
    return Plot(
        "Mismatch by length",
        "KL of the responses of at most so many tokens, and more than half of that",
        tuple(Curve(f"mismatch/length_{length}/kl_k3", f"{length}") for length in lengths[-8:]),
        "nats",
        log=True,
    )


def series(records: Sequence[Record], metric: str) -> tuple[list[float], list[float]]:
    """Return steps and values of `metric`. A measurement before a step belongs to the previous
    step."""
    pairs = [
        (record["step"] - is_before, record[name])
        for name, is_before in ((f"{metric}_before", True), (metric, False))
        for record in records
        if record.get(name) is not None
    ]
    return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def with_gaps(
    records: Sequence[Record], steps: list[float], values: list[float]
) -> tuple[list[float], list[float]]:
    """Return the curve with gaps at lost records."""
    lost_steps = {float(record["step"]) for record in records if record.get(LOST)} - set(steps)
    pairs = sorted([*zip(steps, values, strict=True), *((step, math.nan) for step in lost_steps)])
    return [step for step, _ in pairs], [value for _, value in pairs]


def _isolated_indices(values: Sequence[float]) -> list[int]:
    gaps = [True, *map(math.isnan, values), True]
    return [i for i in range(len(values)) if gaps[i] and not gaps[i + 1] and gaps[i + 2]]


def present(records: Sequence[Record], plot: Plot) -> list[Curve]:
    """Return the lines of `plot` with data; an all-zero line is dropped beside others."""
    recorded_lines = [line for line in plot.lines if series(records, line.metric)[0]]
    nonzero_lines = [line for line in recorded_lines if any(series(records, line.metric)[1])]
    return nonzero_lines or recorded_lines


def silent(records: Sequence[Record], plot: Plot) -> str | None:
    """Return why `plot` would be empty, or None."""
    values = [abs(value) for line in plot.lines for value in series(records, line.metric)[1]]
    if not values or (plot.only_with and not series(records, plot.only_with)[0]):
        return "not recorded in this run"
    if not any(values):
        return "0 in every step"
    if plot.log and max(values) <= plot.floor:
        return f"at most {_power_label(plot.floor, 0)} in every step, which is rounding"
    return None


def draw(records: Sequence[Record], plot: Plot) -> str:
    """Return `plot` as an `<svg>` element."""
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": plot.title,
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_WIDTH_INCHES, 2.7), layout="constrained")
        axes = figure.add_subplot()
        lines = present(records, plot)
        if plot.stacked:
            _draw_stack(axes, records, lines)
        else:
            _draw_lines(axes, records, plot, lines)
        _style_axes(figure, axes, plot)
        return _to_svg(figure)


def _draw_lines(axes: Axes, records: Sequence[Record], plot: Plot, lines: Sequence[Curve]) -> None:
    right_axes = axes.twinx() if any(line.right for line in lines) else None
    series_by_line = {line: series(records, line.metric) for line in lines}
    if plot.log:
        series_by_line = {
            line: (steps, [max(abs(value), plot.floor) for value in values])
            for line, (steps, values) in series_by_line.items()
        }
    covered_by_covering = _covering_lines(series_by_line, plot)
    for line, colour in zip(lines, cycle(_COLOURS), strict=False):
        steps, values = series_by_line[line]
        line_axes = right_axes if line.right and right_axes else axes
        style: Any = {"color": colour, "label": _label(line), "linewidth": 1.6}
        if line.points:
            style |= {"linewidth": 1.4, "marker": "o", "markersize": 4.5, "zorder": 4}
            line_axes.plot(steps, values, **style)
            continue
        style["linestyle"] = "--" if line.right else "-"
        if line in covered_by_covering:
            style["linestyle"] = (0, (2.5, 2.5))
        elif line in covered_by_covering.values():
            style["linewidth"] = 3.2
        _draw_curve(line_axes, records, line, values, style)
        if line.metric == "reward/mean":
            _draw_band(axes, records, colour)
    if plot.log and any(value for _, values in series_by_line.values() for value in values):
        _log_scale(axes)
    elif plot.bottom is not None:
        _set_bottom(axes, plot.bottom)
    if right_axes:
        _finish_right_axis(axes, right_axes, plot.right_unit)


def _draw_curve(
    axes: Axes, records: Sequence[Record], line: Curve, values: list[float], style: dict[str, Any]
) -> None:
    steps = series(records, line.metric)[0]
    if len(steps) >= _SMOOTH_FROM and not line.right:
        gapped = with_gaps(records, steps, values)
        axes.plot(*gapped, color=style["color"], linewidth=0.8, alpha=0.35)
        values = _running_mean(values, max(5, len(values) // 25))
    xs, ys = with_gaps(records, steps, values)
    if isolated := _isolated_indices(ys):
        style |= {"marker": "o", "markersize": 4, "markevery": isolated}
    axes.plot(xs, ys, **style)


def _finish_right_axis(axes: Axes, right_axes: Axes, unit: str) -> None:
    _set_bottom(right_axes, 0.0)
    right_axes.set_ylabel(unit)
    right_axes.spines[["top"]].set_visible(False)
    for curve in right_axes.get_lines():
        if not str(curve.get_label()).startswith("_"):
            axes.plot([], [], "--", color=curve.get_color(), label=f"{curve.get_label()} (right)")


def _set_bottom(axes: Axes, bottom: float) -> None:
    top_limit = axes.get_ylim()[1]
    margin = 0.04 * ((top_limit - bottom) or 1.0)
    axes.set_ylim(bottom - margin, top_limit + margin)


def _covering_lines(
    data: Mapping[Curve, tuple[list[float], list[float]]], plot: Plot
) -> dict[Curve, Curve]:
    """Return the lines that would hide an earlier line of the same axis, with that line."""
    covered: dict[Curve, Curve] = {}
    for right in (False, True):
        lines = [line for line in data if line.right == right and not line.points and data[line][1]]
        heights = {
            line: [math.log(value) if plot.log and value > 0 else value for value in data[line][1]]
            for line in lines
        }
        extremes = [height for line in lines for height in heights[line]]
        if not extremes:
            continue
        if not plot.log and plot.bottom is not None:
            extremes.append(plot.bottom)
        resolution = _SAME_HEIGHT * (max(extremes) - min(extremes) or 1.0)
        for position, line in enumerate(lines):
            for earlier in lines[:position]:
                if data[earlier][0] != data[line][0]:
                    continue
                pairs = zip(heights[line], heights[earlier], strict=True)
                if max(abs(a - b) for a, b in pairs) <= resolution:
                    covered[line] = covered.get(earlier, earlier)
                    break
    return covered


def _log_scale(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # powers of ten alone would give a narrow range a single tick
    subs: tuple[float, ...] = (1.0,)
    if high / low < 10:
        subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    elif high / low < 100:
        subs = (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(_power_label))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _power_label(value: float, _: object) -> str:
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")


def _draw_band(axes: Axes, records: Sequence[Record], colour: str) -> None:
    rows = [
        (r["step"], r["reward/mean"] - r["reward/std"], r["reward/mean"] + r["reward/std"])
        for r in records
        if r.get("reward/mean") is not None and r.get("reward/std") is not None
    ]
    if len(rows) > 1:
        steps, lows, highs = (list(column) for column in zip(*rows, strict=True))
        xs, low_ys = with_gaps(records, steps, lows)
        _, high_ys = with_gaps(records, steps, highs)
        axes.fill_between(xs, low_ys, high_ys, color=colour, alpha=0.13, linewidth=0)


def _draw_stack(axes: Axes, records: Sequence[Record], lines: Sequence[Curve]) -> None:
    steps = [record["step"] for record in records]
    bottoms = [0.0] * len(steps)
    width = 0.85 * min((b - a for a, b in zip(steps, steps[1:], strict=False)), default=1)
    for line, colour in zip(lines, cycle(_COLOURS), strict=False):
        values = [float(record.get(line.metric) or 0.0) for record in records]
        tops = [low + value for low, value in zip(bottoms, values, strict=True)]
        if len(steps) >= _SMOOTH_FROM:
            axes.fill_between(
                steps, bottoms, tops, color=colour, label=_label(line), linewidth=0, step="mid"
            )
        else:
            axes.bar(steps, values, width, bottom=bottoms, color=colour, label=_label(line))
        bottoms = tops
    axes.set_ylim(bottom=0)


def _style_axes(figure: Figure, axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_INK, alpha=0.13, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.set_ylabel(plot.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    axes.tick_params(length=3)
    handles, labels = axes.get_legend_handles_labels()
    if len(plot.lines) > 1:
        longest = max(map(len, labels), default=0)
        # points: 4.2 a letter, 32 a sample
        columns = max(1, min(4, int(72 * _WIDTH_INCHES / (4.2 * longest + 32))))
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            fontsize=8,
            handlelength=2.0,
            columnspacing=1.1,
        )


def _to_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r'\1 role="img"', text, count=1)
    # figures number elements from 1, but ids are global to the page
    return re.sub(r' id="(?![a-z]+[0-9a-f]{10}")[^"]*"', "", text)


def _label(line: Curve) -> str:
    return line.label.replace("$", r"\$")


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    windows = (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))
    return [sum(recent) / len(recent) for recent in windows]
