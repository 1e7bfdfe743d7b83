"""The report: self-contained, safe against what a model writes, honest about what is missing."""
from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowroll.metrics.plots import PLOTS, Plot, draw, present, reward_plot, series
from lowroll.metrics.record import Recorder, write_about
from lowroll.metrics.report import write_report
from lowroll.transport import write_rollouts
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
    rollout = Rollout(list(range(len(logprobs))), logprobs, "stop", BehaviorTag((PolicySpan(4, "d"),), "int8"))
    return Sample(Prompt("p", "arith", [{"role": "user", "content": f"ask {HOSTILE}"}]), [1], rollout, text, score)


def make_run(folder: Path, steps: int = 6) -> Path:
    write_about(folder, {"title": f"demo {HOSTILE}", "model": "tiny", "rollout": "int8", "correction": "acr"})
    (folder / "config.yaml").write_text(f"model: tiny # {HOSTILE}\n")
    recorder = Recorder(folder)
    for step in range(1, steps + 1):
        recorder.write(step, {
            "reward/mean": step / 10, "reward/std": 0.1, "mismatch/kl_k3": 10.0 ** -step, "mismatch/kl_k1": -1e-3,
            "mismatch/ess": 0.99, "time/generate": 1.0, "time/learn": 0.5, "time/step": 1.5, "rollout/tokens": 100,
            "rollout/length_mean": 9.0, "rollout/truncated_fraction": 0.1, "optim/grad_norm": float("nan"),
            **({"eval/arith/reward": step / 20} if step in (1, steps) else {})})
        samples = [sample_of(0.25, "middling", [-1.0]), sample_of(0.875, f"best of {step} {HOSTILE}", [-0.5, -1.0]),
                   sample_of(0.125, "worst " + "x" * 5000, [-2.0]), sample_of(None, "unscored", [-3.0])]
        write_rollouts(folder / "rollouts", Batch(step, samples, 1.0))
    return folder


def test_a_full_run_becomes_one_self_contained_page(tmp_path: Path) -> None:
    out = write_report(make_run(tmp_path))
    assert out == tmp_path / "report.html"
    source = out.read_text()
    page = Page(source)
    assert not {"script", "img", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
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


def test_the_page_shows_the_numbers_and_the_extremes(tmp_path: Path) -> None:
    page = Page(write_report(make_run(tmp_path), tmp_path / "elsewhere" / "page.html").read_text())
    assert "0.100 → 0.600" in page.text                    # reward, first and last step
    assert "0.050 → 0.300" in page.text                    # held out
    assert "5.5e-04" in page.text                          # the median of 1e-1 ... 1e-6, (1e-3 + 1e-4) / 2
    assert "600" in page.text and "9s" in page.text        # tokens and seconds in all
    for step in (1, 4, 6):
        assert f"best of {step} <script>" in page.text
    for step in (2, 3, 5):
        assert f"best of {step} " not in page.text
    assert page.text.count("worst xxx") == 3 and "middling" not in page.text
    assert "more characters" in page.text and "x" * 1300 not in page.text
    assert "log-prob -0.750" in page.text and "int8 v4" in page.text
    assert "timeout: 10 s" in page.text and "unscored" in page.text
    assert "\\x07" in page.text and "\x07" not in page.text and "\u202e" not in page.text
    assert "KL between the policy" in page.text and "null" in page.text     # the grad norm was never finite
    assert "Gradient and learning rate" in page.text.split("not plotted")[1]


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
    assert ("0.100 → 0.200" in text) == (missing != "metrics.jsonl")


def test_an_empty_folder_and_unreadable_files_still_give_a_page(tmp_path: Path) -> None:
    assert "no metrics yet" in Page(write_report(tmp_path).read_text()).text
    make_run(tmp_path, steps=1)
    (tmp_path / "about.json").write_text("{")
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text('{}\n{"score": 3}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "bonus": 2.0}\n')
    text = Page(write_report(tmp_path).read_text()).text
    assert "about.json is unreadable" in text and "step_000001.jsonl is unreadable" in text and "'bonus'" in text
    with pytest.raises(FileNotFoundError, match="absent"):
        write_report(tmp_path / "absent")
    (tmp_path / "metrics.jsonl").write_text('oops\n{"step": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:1"):
        write_report(tmp_path)


def test_series_and_the_choice_of_lines() -> None:
    records = [{"step": 1, "policy/clip_fraction_high": 0.0, "policy/clip_fraction_low": 0.5},
               {"step": 2, "policy/clip_fraction_high": 0.0, "policy/clip_fraction_low": None}, {"step": 3}]
    assert series(records, "policy/clip_fraction_low") == ([1.0], [0.5])
    clipping = next(plot for plot in PLOTS if plot.title.startswith("Clipping"))
    assert [line.metric for line in present(records, clipping)] == ["policy/clip_fraction_low"]
    assert [line.metric for line in present(records[1:], clipping)] == ["policy/clip_fraction_high"]
    two = [{"step": 1, "reward/mean": 1, "reward/a/mean": 1, "reward/b/mean": 1, "eval/a/reward": 1, "reward/a/x": 1}]
    assert [line.metric for line in reward_plot(two).lines] == ["reward/mean", "reward/a/mean", "reward/b/mean",
                                                                "eval/a/reward"]


def test_every_metric_that_is_plotted_is_in_the_table() -> None:
    from lowroll.metrics import find
    for plot in PLOTS:
        for line in plot.lines:
            find(line.metric)


def curve(svg: str, colour: str) -> list[tuple[float, float]]:
    path = re.search(rf'<path d="([^"]*)"[^>]*style="fill: none; stroke: {colour}', svg)
    assert path
    numbers = [float(x) for x in re.findall(r"-?\d+\.?\d*", path[1])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_the_drawn_curve_has_the_shape_of_the_data() -> None:
    """Read the polyline back from the SVG: equal steps in x, heights in proportion (log heights on a log axis)."""
    records = [{"step": step, "policy/kl_reference": value} for step, value in ((1, 1.0), (2, 3.0), (3, 2.0))]
    plot = next(plot for plot in PLOTS if plot.title == "KL to the reference")
    (x1, y1), (x2, y2), (x3, y3) = curve(draw(records, plot), "#3b7dd8")
    assert x2 - x1 == pytest.approx(x3 - x2)
    assert y1 - y2 == pytest.approx(2 * (y1 - y3), rel=1e-4)      # SVG's y grows downwards
    log_plot = dataclasses.replace(plot, log=True)
    records = [{"step": step, "policy/kl_reference": value} for step, value in ((1, 1e-4), (2, 1e-2), (3, -1e-3))]
    (_, y1), (_, y2), (_, y3) = curve(draw(records, log_plot), "#3b7dd8")
    assert y1 - y2 == pytest.approx(2 * (y1 - y3), rel=1e-4)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
@pytest.mark.parametrize("steps", [2, 60])
def test_every_plot_draws_with_zeros_and_gaps(plot: Plot, steps: int) -> None:
    records = [{"step": step, **{line.metric: 0.0 if step % 2 else None for line in plot.lines}}
               for step in range(1, steps + 1)]
    svg = draw(records, plot)
    assert svg.startswith("<svg") and "nan" not in svg.lower().replace("nano", "")
    assert "currentColor" in svg and "#0a0b0c" not in svg


def test_an_environment_name_is_not_mathematics() -> None:
    records = [{"step": 1, "reward/mean": 1.0, "reward/a$x_1$/mean": 1.0, "reward/$/mean": 0.5}]
    svg = draw(records, reward_plot(records))
    assert ">a$x_1$</text>" in svg and ">$</text>" in svg


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
