"""The report: self-contained, safe against what a model writes, honest about what is missing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lowroll.checkpoint.fault_injection import VARIABLE
from lowroll.checkpoint.line_checksum import seal
from lowroll.metrics import samples
from lowroll.metrics.page import SCRIPT
from lowroll.metrics.plots import (
    NOISE_NATS,
    PLOTS,
    Curve,
    Plot,
    draw,
    present,
    reward_plot,
    series,
    silent,
    with_gaps,
)
from lowroll.metrics.record import Recorder, read, write_about
from lowroll.metrics.report import write_report
from lowroll.transport.rollout_log import write_rollouts
from lowroll.types import Batch, BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score, ScoreError

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&\x07\u202e"


class Page(HTMLParser):
    """Tags with their attributes, and the text of table cells, as a browser would see them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def sample_of(reward: float | None, text: str, logprobs: list[float]) -> Sample:
    score = Score(reward) if reward is not None else ScoreError("timeout", f"10 s {HOSTILE}")
    rollout = Rollout(
        list(range(len(logprobs))), logprobs, "stop", BehaviorTag((PolicySpan(4, "d"),), "int8")
    )
    prompt = Prompt(
        "p", "arith", [{"role": "user", "content": f"ask {HOSTILE}"}], {"answer": f"gold {HOSTILE}"}
    )
    return Sample(prompt, [1], rollout, text, score)


def make_run(folder: Path, steps: int = 6) -> Path:
    write_about(
        folder,
        {
            "title": f"demo {HOSTILE}",
            "command": "grpo",
            "algorithm": "grpo",
            "model": "a/tiny (Qwen3)",
            "env": "arith",
            "rollout": "int8 weights, 4 samples",
            "correction": "acr",
        },
    )
    (folder / "config.yaml").write_text(f"model: tiny # {HOSTILE}\n")
    recorder = Recorder(folder)
    for step in range(1, steps + 1):
        early = (
            {
                "eval/arith/reward_before": 0.01,
                "eval/arith/pass_at_1_before": 0.5,
                "eval/arith/sampled_reward_before": 0.02,
            }
            if step == 1
            else {}
        )
        late = (
            {
                "eval/arith/reward": step / 20,
                "eval/arith/pass_at_1": 0.75,
                "eval/arith/sampled_reward": 0.03,
                "eval/temperature": 0.0,
            }
            if step == steps
            else {}
        )
        recorder.write(
            step,
            {
                "reward/mean": step / 10,
                "reward/std": 0.1,
                "mismatch/kl_k3": 10.0**-step,
                "mismatch/kl_k1": -1e-3,
                "mismatch/ess": 0.99,
                "time/generate": 1.0,
                "time/learn": 0.5,
                "time/step": 1.5,
                "rollout/tokens": 100,
                "rollout/length_mean": 9.0,
                "rollout/truncated_fraction": 0.1,
                "optim/grad_norm": float("nan"),
                "rollout/temperature": 0.7,
                "policy/kl_reference": 0.0,
                **early,
                **late,
            },
        )
        samples = [
            sample_of(0.25, "middling", [-1.0]),
            sample_of(0.875, f"best of {step} {HOSTILE}", [-0.5, -1.0]),
            sample_of(0.125, "worst " + "x" * 9000, [-2.0]),
            sample_of(None, "unscored", [-3.0]),
        ]
        write_rollouts(folder / "rollouts", Batch(step, samples, 1.0))
    return folder


@pytest.mark.slow
def test_a_full_run_becomes_one_self_contained_page(tmp_path: Path) -> None:
    out = write_report(make_run(tmp_path))
    assert out == tmp_path / "report.html"
    source = out.read_text()
    page = Page(source)
    assert not {"img", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    # its own script alone may run, and it is inside the page
    assert page.count("script") == 1 and f"<script>{SCRIPT}</script>" in source
    assert (
        f"script-src 'sha256-{base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()}'"
        in source
    )
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href"):
                assert value and value.startswith("#")
    assert "default-src 'none'" in source
    # reward, mismatch, ess, length, time, in one svg each
    assert page.count("svg") == page.count("figure") == 5
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', source))
    assert references and references <= set(ids)


@pytest.mark.slow
def test_the_page_says_what_run_it_is_and_what_it_changed(tmp_path: Path) -> None:
    source = write_report(make_run(tmp_path), tmp_path / "elsewhere" / "page.html").read_text()
    page = Page(source)
    assert "<title>GRPO of a/tiny on arith, int8 rollouts</title>" in source
    assert "demo <script>alert(1)</script>" in page.text and "steps 1 to 6" in page.text
    rows = [" ".join(Page(row).text.split()) for row in re.findall(r"<tr>(<th>.*?)</tr>", source)]
    for row in (
        "arith: held out, greedymean reward 0.010before step 1 0.300after step 6",
        "arith: held out, greedyshare of right responses 0.500before step 1 0.750after step 6",
        "arith: held out, sampled, T = 0.7mean reward 0.020before step 1 0.030after step 6",
        "training prompts, sampledmean reward 0.200steps 1 to 3 0.500steps 4 to 6",
    ):
        assert row.replace(" ", "") in [found.replace(" ", "") for found in rows], row
    assert "5.5e-04" in page.text  # the median of 1e-1 ... 1e-6, (1e-3 + 1e-4) / 2
    assert "600" in page.text and "9s" in page.text  # tokens and seconds in all
    assert (
        "KL between the policy" in page.text and "null" in page.text
    )  # the grad norm was never finite
    absent = page.text.split("not plotted")
    assert (
        "Gradient and learning rate" in absent[1] + absent[2]
        and "0 in every step: KL to the ref" in page.text
    )
    # the configuration stands open, the glossary is folded
    assert (
        "<details open><summary>Configuration" in source
        and "<details><summary>What the metrics mean" in source
    )


@pytest.mark.slow
def test_samples_have_their_gold_answer_and_open_one_by_one(tmp_path: Path) -> None:
    """Several of several steps, each whole behind its line; what a model wrote is text wherever it
    stands."""
    page = Page(write_report(make_run(tmp_path, steps=12)).read_text())
    for step in (1, 4, 7, 9, 12):
        assert page.text.count(f"best of {step} <script>") == 2  # in its line and in full
    for step in (2, 3, 5, 6, 8, 10, 11):
        assert f"best of {step} " not in page.text
    samples = [
        attributes
        for tag, attributes in page.tags
        if tag == "details" and attributes.get("class") == "sample"
    ]
    assert len(samples) == 5 * 4 and page.text.count("middling") == 10
    assert page.text.count("gold <script>alert(1)</script>") == 20 and "gold answer" in page.text
    assert (
        "more characters" in page.text and "x" * 7000 in page.text and "x" * 8001 not in page.text
    )
    assert "mean log-prob -0.750" in page.text and "int8 v4" in page.text
    assert "timeout: 10 s" in page.text and "unscored" in page.text
    assert "\\x07" in page.text and "\x07" not in page.text and "\u202e" not in page.text
    assert any(attributes.get("id") == "search" for _, attributes in page.tags)


@pytest.mark.parametrize("command", [{"command": "sft"}, {}], ids=["named", "known by its metrics"])
def test_a_supervised_run_is_reported_as_one(tmp_path: Path, command: dict[str, str]) -> None:
    write_about(
        tmp_path,
        {
            "title": "warm",
            **command,
            "model": "a/tiny (Qwen3)",
            "rollout": "int8 weights",
            "correction": "acr",
            "data": "64 demonstrations",
        },
    )
    recorder = Recorder(tmp_path)
    for step in (1, 2, 3):
        recorder.write(
            step,
            {"sft/loss": 4.0 / step, "sft/tokens": 100.0, "optim/lr": 1e-3, "optim/grad_norm": 1.0},
        )
    page = Page(source := write_report(tmp_path).read_text())
    assert "<title>Supervised warm start of a/tiny</title>" in source
    assert page.count("figure") == 2 and "Loss" in page.text and "64 demonstrations" in page.text
    assert "loss on demonstrations" in page.text and "4.000" in page.text and "1.333" in page.text
    body = source.split("<main>")[1].split("What the metrics mean")[0]
    for word in ("rollout", "acr", "reward", "not plotted", "held out"):
        assert word not in body, word


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["about.json", "config.yaml", "metrics.jsonl", "rollouts"])
def test_missing_parts_are_noted_and_the_rest_is_shown(tmp_path: Path, missing: str) -> None:
    make_run(tmp_path, steps=2)
    target = tmp_path / missing
    if target.is_dir():
        for file in target.iterdir():
            file.unlink()
    else:
        target.unlink()
    text = Page(write_report(tmp_path).read_text()).text
    assert missing in text
    assert ("Sample rollouts" in text) == (missing != "rollouts")
    assert ("Before and after" in text) == (missing != "metrics.jsonl")


def test_an_empty_folder_and_unreadable_files_still_give_a_page(tmp_path: Path) -> None:
    assert "no metrics yet" in Page(write_report(tmp_path).read_text()).text
    make_run(tmp_path, steps=1)
    (tmp_path / "about.json").write_text("{")
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text('{}\n{"score": 3}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "bonus": 2.0}\n')
    text = Page(write_report(tmp_path).read_text()).text
    assert (
        "about.json is unreadable" in text
        and "step_000001.jsonl is unreadable" in text
        and "'bonus'" in text
    )
    with pytest.raises(FileNotFoundError, match="absent"):
        write_report(tmp_path / "absent")


@pytest.mark.slow
def test_a_lost_record_is_a_gap_that_the_page_tells_of(tmp_path: Path) -> None:
    make_run(tmp_path, steps=6)
    metrics, rollouts = tmp_path / "metrics.jsonl", tmp_path / "rollouts" / "step_000001.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(
        b"".join([*lines[:2], lines[2].replace(b"reward/mean", b"reward/meen"), *lines[3:]])
    )
    content = rollouts.read_bytes()
    rollouts.write_bytes(content.replace(b'"group":', b'"grouq":', 1))
    text = Page(write_report(tmp_path).read_text()).text
    assert "steps 1 to 6, 1 of their records lost" in text
    assert "the records of step 3 are lost" in text and "step_000001.jsonl: line 2: damaged" in text
    records = read(tmp_path)
    steps, values = with_gaps(records, *series(records, "reward/mean"))
    assert steps == [1, 2, 3, 4, 5, 6] and [math.isnan(value) for value in values] == [
        s == 3 for s in steps
    ]


def test_series_and_the_choice_of_lines() -> None:
    records = [
        {"step": 1, "policy/clip_fraction_high": 0.0, "policy/clip_fraction_low": 0.5},
        {"step": 2, "policy/clip_fraction_high": 0.0, "policy/clip_fraction_low": None},
        {"step": 3},
    ]
    assert series(records, "policy/clip_fraction_low") == ([1.0], [0.5])
    clipping = next(plot for plot in PLOTS if plot.title.startswith("Clipping"))
    assert [line.metric for line in present(records, clipping)] == ["policy/clip_fraction_low"]
    assert [line.metric for line in present(records[1:], clipping)] == ["policy/clip_fraction_high"]
    two = [
        {
            "step": 1,
            "reward/mean": 1,
            "reward/a/c/mean": 1,
            "reward/b/mean": 1,
            "eval/a/c/reward": 1,
            "eval/a/c/reward_before": 0,
            "eval/temperature": 0.0,
            "reward/a/c/x": 1,
        }
    ]
    assert [(line.metric, line.label) for line in reward_plot(two).lines] == [
        ("reward/mean", "rollouts"),
        ("reward/a/c/mean", "a/c"),
        ("reward/b/mean", "b"),
        ("eval/a/c/reward", "held out, greedy"),
    ]
    assert series(two, "eval/a/c/reward") == ([0.0, 1.0], [0.0, 1.0])


def test_every_metric_that_is_plotted_is_in_the_table() -> None:
    from lowroll.metrics.names import find

    for plot in PLOTS:
        for line in plot.lines:
            find(line.metric)


def curve(svg: str, colour: str) -> list[tuple[float, float]]:
    path = re.search(rf'<path d="([^"]*)"[^>]*style="fill: none; stroke: {colour}', svg)
    assert path
    numbers = [float(x) for x in re.findall(r"-?\d+\.?\d*", path[1])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_the_drawn_curve_has_the_shape_of_the_data() -> None:
    """Read the polyline back from the SVG: equal steps in x, heights in proportion (log heights on
    a log axis)."""
    records = [
        {"step": step, "policy/kl_reference": value}
        for step, value in ((1, 1.0), (2, 3.0), (3, 2.0))
    ]
    plot = next(plot for plot in PLOTS if plot.title == "KL to the reference")
    (x1, y1), (x2, y2), (x3, y3) = curve(draw(records, plot), "#3b7dd8")
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y1 - y2 == pytest.approx(2 * (y1 - y3), rel=1e-4)  # SVG's y grows downwards
    log_plot = dataclasses.replace(plot, log=True)
    records = [
        {"step": step, "policy/kl_reference": value}
        for step, value in ((1, 1e-4), (2, 1e-2), (3, -1e-3))
    ]
    (_, y1), (_, y2), (_, y3) = curve(draw(records, log_plot), "#3b7dd8")
    assert y1 - y2 == pytest.approx(2 * (y1 - y3), rel=1e-4)


def plot_of(title: str) -> Plot:
    return next(plot for plot in PLOTS if plot.title == title)


def test_a_value_between_two_gaps_is_a_dot() -> None:
    plot = plot_of("KL to the reference")
    records = [{"step": step, "policy/kl_reference": 0.1 * step} for step in range(1, 6)]
    whole = draw(records, plot)
    lost = [
        record if i != 3 else {"step": 4, "record/lost": 1.0} for i, record in enumerate(records)
    ]
    dots = [svg.count("fill: #3b7dd8") for svg in (whole, draw(lost, plot))]
    assert dots[0] == 0 and dots[1] > 0


def test_a_log_axis_ends_where_rounding_begins() -> None:
    """Mismatches of exact rollouts are 1e-14: the axis stops at its floor, and a plot that is all
    noise goes."""
    mismatch = plot_of("Mismatch")
    records = [
        {"step": step, "mismatch/kl_k3": 1e-14, "mismatch/kl_k1": 0.0 if step == 2 else 1e-6}
        for step in (1, 2)
    ]
    svg = draw(records, mismatch)
    labels = [float(text) for text in re.findall(r">(\d[\d.]*e-\d+)</text>", svg)]
    assert labels and min(labels) >= NOISE_NATS
    assert silent(records, mismatch) is None
    quiet = [{**record, "mismatch/kl_k1": 0.0} for record in records]
    assert silent(quiet, mismatch) == "at most 1e-8 in every step, which is rounding"


def test_no_axis_without_a_curve() -> None:
    clipping = plot_of("Clipping and correction")
    assert silent([{"step": 1, "policy/clip_fraction_high": 0.0}], clipping) == "0 in every step"
    assert silent([{"step": 1}], clipping) == "not recorded in this run"
    assert silent([{"step": 1, "policy/clip_fraction_high": 0.1}], clipping) is None


def test_weights_are_drawn_where_the_cache_is_not_exact() -> None:
    """Every run has their extremes."""
    (plot,) = (plot for plot in PLOTS if plot.title == "Importance weights")
    dense = {"step": 1, "mismatch/weight_max": 1.1, "mismatch/weight_min": 0.9}
    assert silent([dense], plot) == "not recorded in this run"
    assert silent([dense | {"mismatch/weight_mean": 1.0}], plot) is None


def test_two_curves_in_one_place_are_told_apart() -> None:
    """The later one is dashed over the wider earlier one; curves that differ are both drawn
    whole."""
    plot = Plot(
        "Two", "", (Curve("mismatch/ess", "tokens"), Curve("mismatch/ess_sequence", "sequences"))
    )
    same = [
        {"step": step, "mismatch/ess": 0.999, "mismatch/ess_sequence": 0.9985} for step in (1, 2, 3)
    ]
    assert draw(same, plot).count("stroke-dasharray: ") == 2  # the curve and its legend
    other = [{**record, "mismatch/ess_sequence": 0.9} for record in same]
    assert "stroke-dasharray" not in draw(other, plot)


@pytest.mark.slow
@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
@pytest.mark.parametrize("steps", [2, 60])
def test_every_plot_draws_with_zeros_and_gaps(plot: Plot, steps: int) -> None:
    records = [
        {"step": step, **{line.metric: 0.0 if step % 2 else None for line in plot.lines}}
        for step in range(1, steps + 1)
    ]
    svg = draw(records, plot)
    assert svg.startswith("<svg") and "nan" not in svg.lower().replace("nano", "")
    assert "currentColor" in svg and "#0a0b0c" not in svg


def test_an_environment_name_is_not_mathematics() -> None:
    records = [{"step": 1, "reward/mean": 1.0, "reward/a$x_1$/mean": 1.0, "reward/$/mean": 0.5}]
    svg = draw(records, reward_plot(records))
    assert ">a$x_1$</text>" in svg and ">$</text>" in svg


@pytest.mark.slow
def test_drawing_is_deterministic(tmp_path: Path) -> None:
    make_run(tmp_path, steps=2)
    first = write_report(tmp_path).read_bytes()
    assert write_report(tmp_path).read_bytes() == first
    assert json.loads((tmp_path / "about.json").read_text())["title"].startswith("demo")


def test_a_page_of_somebody_else_stays(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("<!doctype html><p>mine")
    with pytest.raises(ValueError, match="no report of lowroll; name another file with --out"):
        write_report(tmp_path)
    assert out.read_text() == "<!doctype html><p>mine"
    out.unlink()
    assert write_report(tmp_path).read_bytes() == write_report(tmp_path).read_bytes()


@pytest.mark.slow
def test_a_strangers_run_folder_is_reported(tmp_path: Path) -> None:
    """Who wrote the lines may have made their checksums, and anything else."""
    lines: list[Any] = [{"step": 1, "reward/mean": value} for value in ("x", [1], 10**400)]
    lines += [{"step": 10**400}, {"step": 2, "reward/mean": 0.5}]
    (tmp_path / "metrics.jsonl").write_bytes(
        b"".join(seal(json.dumps(line).encode()) + b"\n" for line in lines)
    )
    (tmp_path / "about.json").write_text("[" * 100_000)
    (tmp_path / "checkpoints" / "step_999999999").mkdir(parents=True)
    (tmp_path / "rollouts").mkdir()
    for name in ("config.yaml", "rollouts/step_000001.jsonl"):
        os.mkfifo(tmp_path / name)
    text = write_report(tmp_path).read_text()
    for told in (
        "steps 1, 3 to ",
        "about.json is unreadable",
        "config.yaml is unreadable",
        "step_000001.jsonl is unreadable",
    ):
        assert told in text


def test_a_full_disk_leaves_the_page_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorder(tmp_path).write(1, {"reward/mean": 0.5})
    before = write_report(tmp_path).read_bytes()
    monkeypatch.setenv(VARIABLE, "file.written/report.html:enospc")
    with pytest.raises(OSError, match="report.html"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.html"]


def test_a_conversation_is_shown_with_what_it_calls() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    text = 'assistant: \n{"name": "add", "arguments": {"a": 1}}\ntool: 2'
    assert samples.response_text({"messages": said}) == ("conversation", text)
