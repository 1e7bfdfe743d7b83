"""Names, records on disk, the live view: what is written can be explained, survives a crash and
reads back."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lowroll.metrics import record as records
from lowroll.metrics.live import LiveView, Terminal, duration, kv_words, sparkline
from lowroll.metrics.names import METRICS, find, table
from lowroll.metrics.progress import phases
from lowroll.metrics.record import Recorder, read, reproducible, write_about

ROOT = Path(__file__).resolve().parents[2]
GROUPS = {
    "reward",
    "rollout",
    "mismatch",
    "policy",
    "correction",
    "critic",
    "guard",
    "kv",
    "spread",
    "optim",
    "weights",
    "sft",
    "eval",
    "perf",
    "time",
    "record",
}


def test_every_name_is_explained_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert {name.split("/")[0] for name in names} == GROUPS
    assert all(metric.meaning for metric in METRICS)
    text = table()
    assert all(f"| `{name}` |" in text for name in names)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(names) and all(len(re.findall(r"(?<!\\)\|", row)) == 6 for row in rows)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mismatch/kl_k1", "mismatch/kl_k1"),
        ("reward/mean", "reward/mean"),
        ("reward/reverse-text/mean", "reward/<env>/<metric>"),
        ("reward/gsm8k/format_ok", "reward/<env>/<metric>"),
        ("reward/my env/parts/first line", "reward/<env>/<metric>"),
        ("eval/chain_sum.v2/pass_at_k", "eval/<env>/pass_at_k"),
        ("eval/reasoning-gym/chain_sum/reward", "eval/<env>/reward"),
        ("eval/my/env.py/sampled_reward_before", "eval/<env>/sampled_reward_before"),
        ("rollout/flagged_gibberish_fraction", "rollout/flagged_<filter>_fraction"),
    ],
)
def test_names_that_a_run_brings_along_are_found(name: str, row: str) -> None:
    assert find(name).name == row


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("reward/meen", "reward/mean"),
        ("kl_k1", "mismatch/kl_k1"),
        ("policy/clip_fraction", "policy/clip_fraction_"),
        ("reward/<env>/<metric>", "reward/"),
        ("eval//reward", "eval/<env>/reward"),
        ("reward//mean", "reward/mean"),
        ("eval/x/pass_at_7", "eval/<env>/pass_at_"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(name)}.*nearest name is '{re.escape(near)}"):
        find(name)


def test_the_names_that_other_rooms_write_are_in_the_table() -> None:
    """Literal metric names in the package's source, so that a new one cannot be forgotten here."""
    groups = "|".join(GROUPS - {"eval"})
    literal = re.compile(rf"""["']((?:{groups})/[a-z0-9_]+(?:/[a-z0-9_]+)?)["']""")
    found = {
        name
        for path in (ROOT / "lowroll").rglob("*.py")
        for name in literal.findall(path.read_text())
    }
    assert len(found) > 40
    for name in sorted(found):
        find(name)


def test_records_read_back_as_they_were_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    values = [0.1, 1 / 3, -0.0, 5e-324, 1.7976931348623157e308, 7]
    for step, value in enumerate(values):
        recorder.write(step, {"reward/mean": value, "time/step": step})
    records = read(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(6))
    assert [record["reward/mean"].hex() for record in records] == [
        float(value).hex() for value in values
    ]
    assert all(type(record["time/step"]) is float for record in records)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6


def test_non_finite_values_are_null_and_counted(tmp_path: Path) -> None:
    record = Recorder(tmp_path).write(
        1, {"policy/ratio_max": math.inf, "mismatch/pearson": math.nan, "optim/lr": 0.5}
    )
    assert record == {
        "step": 1,
        "policy/ratio_max": None,
        "mismatch/pearson": None,
        "optim/lr": 0.5,
        "record/nonfinite": 2.0,
    }
    assert read(tmp_path) == [record]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


@pytest.mark.parametrize(
    ("step", "metrics", "message"),
    [
        (3, {}, "step: 3 .* above the last recorded step 3"),
        (2, {}, "step: 2"),
        (True, {}, "step: True"),
        (4, {"reward/meen": 1.0}, "reward/mean"),
        (4, {"reward/mean": "0.5"}, "reward/mean.*str"),
        (4, {"reward/mean": None}, "NoneType"),
        (4, {"reward/mean": True}, "bool"),
    ],
)
def test_bad_records_are_refused_and_nothing_is_written(
    tmp_path: Path, step: int, metrics: dict, message: str
) -> None:
    recorder = Recorder(tmp_path)
    recorder.write(3, {"reward/mean": 1.0})
    before = recorder.path.read_bytes()
    with pytest.raises(ValueError, match=message):
        recorder.write(step, metrics)
    assert recorder.path.read_bytes() == before


def test_a_torn_last_line_is_dropped_wherever_it_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path)
    for step in (1, 2):
        recorder.write(step, {"reward/mean": step / 3})
    whole = recorder.path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole)):
        recorder.path.write_bytes(whole[:cut])
        with caplog.at_level(logging.WARNING):
            assert [record["step"] for record in read(tmp_path)] == [1]
        resumed = Recorder(tmp_path)
        assert resumed.last_step == 1
        resumed.write(2, {"reward/mean": 2 / 3})
        assert (
            recorder.path.read_bytes() == whole
        )  # exactly the file of the run that was not interrupted
    assert "torn last line" in caplog.text


def test_truncate_cuts_back_to_the_checkpoint(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for step in range(1, 6):
        recorder.write(step, {"reward/mean": float(step)})
    whole = recorder.path.read_bytes()
    recorder.truncate(5)
    assert recorder.path.read_bytes() == whole
    recorder.truncate(3)
    assert [record["step"] for record in read(tmp_path)] == [1, 2, 3] and recorder.last_step == 3
    for step in (4, 5):
        recorder.write(step, {"reward/mean": float(step)})
    assert recorder.path.read_bytes() == whole
    recorder.truncate(0)
    assert read(tmp_path) == [] and recorder.last_step == -1
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.slow
def test_no_damage_to_a_record_is_silent_or_ends_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Flips, cuts, zeroed tails, and lines that are gone, doubled or exchanged: a reader gets what
    was written or is told which steps are lost, and a run that goes on marks them in the file."""
    recorder = Recorder(tmp_path / "whole")
    for step in range(1, 8):
        recorder.write(step, {"reward/mean": step / 3, "time/step": 0.25})
    whole, before, rng = recorder.path.read_bytes(), read(tmp_path / "whole"), random.Random(0)
    (tmp_path / "checkpoints" / "step_000007").mkdir(parents=True)  # seven steps were made
    path, seen = tmp_path / "metrics.jsonl", set[str]()
    for trial in range(300):
        kind = ("flip", "cut", "zeroed", "gone", "twice", "exchanged")[trial % 6]
        data, lines, at = (
            bytearray(whole),
            whole.splitlines(keepends=True),
            rng.randrange(len(whole)),
        )
        if kind == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[at:]
        elif kind == "zeroed":
            data[at:] = bytes(len(data) - at)
        else:
            i, j = rng.sample(range(7), 2)
            if kind == "exchanged":
                lines[i], lines[j] = lines[j], lines[i]
            else:
                lines[i : i + 1] = lines[i : i + 1] * 2 if kind == "twice" else []
            data = bytearray(b"".join(lines))
        path.write_bytes(data)
        caplog.clear()
        found = read(tmp_path)
        lost = [record["step"] for record in found if record.get("record/lost")]
        assert [record["step"] for record in found] == list(range(1, 8))
        assert all(
            record == before[i] for i, record in enumerate(found) if record["step"] not in lost
        )
        assert not lost or "metrics.jsonl: the records of step" in caplog.text
        seen.add(f"{kind}: {'lost' if lost else 'kept'}")
        resumed = Recorder(tmp_path)
        resumed.truncate(5)
        resumed.write(6, {"reward/mean": 2.0, "time/step": 0.25})
        resumed.write(7, {"reward/mean": 7 / 3, "time/step": 0.25})
        if not [step for step in lost if step < 6]:
            assert path.read_bytes() == whole, kind
        assert read(tmp_path)[5:] == before[5:]
    assert seen == {
        "flip: lost",
        "cut: lost",
        "zeroed: lost",
        "gone: lost",
        "twice: kept",
        "exchanged: kept",
    }


@pytest.mark.parametrize(
    ("content", "steps", "lost"),
    [
        (b'{"step": 1}\n{"step": 2, "optim/lr": null}\n', [1, 2], []),
        (b'{"step": 1}\ngarbage\n{"step": 3}\n', [1, 2, 3], [2]),
        (b'{"step": 2}\n{"step": 2}\n', [1, 2], [1]),
        (b'[1]\n{"step": 2}\n', [1, 2], [1]),
        (b'{"step": 1}\n{"step": 900000}\n{"step": 3}\n', [1, 2, 3], [2]),
        (b'{"step": 1.5}\n{"step": -1}\n{"optim/lr": 1.0}\n' + b"[" * 9999 + b"\n", [], []),
        (b'{"step": 1, "optim/lr": "high"}\n{"step": 1}\n', [1], []),
    ],
)
def test_records_of_older_files_have_no_checksum(
    tmp_path: Path, content: bytes, steps: list[int], lost: list[int]
) -> None:
    """What is not plainly a record is none, and no number may say how many steps there are."""
    (tmp_path / "metrics.jsonl").write_bytes(content)
    records = read(tmp_path)
    assert [record["step"] for record in records] == steps
    assert [record["step"] for record in records if record.get("record/lost")] == lost
    assert Recorder(tmp_path).last_step == (steps[-1] if steps else -1)


def test_reproducible_leaves_out_the_clock_and_nothing_else() -> None:
    record = {
        "step": 3,
        "reward/mean": 0.5,
        "time/step": 1.25,
        "perf/learn_tokens_per_second": 9.0,
        "optim/lr": None,
        "eval/a/reward": 0.25,
    }
    assert reproducible(record) == {
        "step": 3,
        "reward/mean": 0.5,
        "optim/lr": None,
        "eval/a/reward": 0.25,
    }
    assert {metric.name.split("/")[0] for metric in METRICS if not metric.reproducible} == {
        "time",
        "perf",
    }


def test_about_says_what_ran_where(tmp_path: Path) -> None:
    written = write_about(tmp_path, {"title": "t", "model": "m"})
    assert json.loads((tmp_path / "about.json").read_text()) == written
    assert (
        f"Python {sys.version.split()[0]}" in written["versions"]
        and "torch " in written["versions"]
    )
    assert f"{os.cpu_count()} cores" in written["machine"]


def test_sparkline_and_duration() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 0.0, 1.0, 0.5], 3) == "▁█▅"  # the last three, on their own scale
    assert sparkline([2.0, 2.0], 8) == "▁▁" and sparkline([1.0], 8) == ""
    assert [duration(s) for s in (0, 59.4, 59.6, 130, 3599.6, 11100)] == [
        "0s",
        "59s",
        "1m00s",
        "2m10s",
        "1h00m",
        "3h05m",
    ]


RECORD = {
    "step": 12,
    "reward/mean": 0.4123,
    "mismatch/kl_k3": 0.00123,
    "policy/entropy": 0.8,
    "time/step": 2.0,
    "rollout/length_mean": 31.25,
    "perf/generate_tokens_per_second": 912.4,
    "time/generate": 1.5,
    "perf/learn_tokens_per_second": 4000.0,
    "time/score": 0.1,
    "time/learn": 0.3,
    "time/publish": 0.05,
    "rollout/truncated_fraction": 0.25,
    "eval/arith/reward": 0.5,
    "eval/temperature": 0.0,
}


def test_a_bounded_cache_has_two_words_in_the_live_view() -> None:
    record = {"step": 3, "kv/saving_peak": 0.521, "correction/rejected_sequence_fraction": 0.0625}
    assert kv_words(record | {"correction/repaired_sequence_fraction": 0.5})[2:] == [
        "repaired 50.0 %"
    ]
    out = io.StringIO()
    with LiveView(9, "run", Console(file=out, width=40)) as view:
        view.step(record)
        view.step({"step": 4, "kv/saving_peak": 0.0})
        view.step({"step": 5, "correction/rejected_sequence_fraction": 0.5})
    _, bounded, ample, dense = out.getvalue().splitlines()
    assert "kv 52 % saved  rejected 6.2 %  eta" in bounded
    assert "kv 0 % saved  eta" in ample and "rejected" not in dense and "kv" not in dense[30:]
    terminal = Console(file=io.StringIO(), width=100, force_terminal=True)
    view = LiveView(9, "run", terminal)
    view.step(record)
    with terminal.capture() as shown:
        terminal.print(view)
    assert "kv 52 % saved, rejected 6.2 %" in shown.get()


def test_without_a_terminal_a_step_is_one_plain_line() -> None:
    out = io.StringIO()
    with LiveView(100, "[demo] run", Console(file=out, width=40)) as view:
        view.phase("generate", 1, 8)
        view.step({**RECORD, "step": 11, "reward/mean": 0.2})
        view.step(RECORD)
        view.step({"step": 13, "reward/mean": None})
    title, _, line, sparse = out.getvalue().splitlines()
    assert title == "[demo] run"
    assert line == (
        "step   12/100  reward 0.412 ▁█  kl 1.2e-03  entropy 0.800  len 31.2  gen 912 tok/s  "
        "learn 4000 tok/s  generate 1.50s  score 0.10s  learn 0.30s  publish 0.05s  "
        "eval/arith/reward 0.500  eta 2m56s"
    )
    assert "reward -" in sparse and "\x1b" not in out.getvalue()


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_colours_that_are_forced_make_no_terminal_of_a_file(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    with LiveView(100, "run") as view, phases() as on_phase:
        view.step(RECORD)
        on_phase("generate", 1, 8)
    out, err = capsys.readouterr()
    assert err == "" and "\x1b" not in out
    assert [line.split()[0] for line in out.splitlines()] == ["run", "step"]


def test_a_terminal_that_cannot_be_redrawn_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert Terminal().is_terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "0")
    assert not Terminal().is_terminal


def test_on_a_terminal_the_panel_shows_the_step() -> None:
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=110,
        height=30,
        record=True,
        color_system=None,
    )
    view = LiveView(100, "demo", console)
    with view:
        view.step(RECORD)
        view.phase("learn", 3, 8)
        console.print(view)
    text = console.export_text()
    for part in (
        "demo",
        "step 12/100",
        "learn 3/8",
        "reward 0.412",
        "kl to behaviour 1.2e-03",
        "entropy 0.800",
        "length 31.2 tokens",
        "truncated 25 %",
        "generate 912 tok/s",
        "learn 4000 tok/s",
        "eta 2m56s",
        "held out 0.500 (greedy, step 12)  arith",
    ):
        assert part in text, part
    assert "stopping" not in text


@pytest.mark.parametrize(("width", "height"), [(110, 13), (80, 14), (40, 21)])
def test_the_panel_keeps_to_the_terminal(width: int, height: int) -> None:
    """Long names are cut, nothing wraps, and what was asked stays in sight until the end."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=24, color_system=None
    )
    view = LiveView(
        100, "outputs/experiments/2026-11/a-model-with-a-long-name/run-17: grpo, acr", console
    )
    for step in (11, 12):
        view.step(
            {
                **RECORD,
                "step": step,
                "reward/mean": 0.01 * step,
                "eval/a/b-environment-of-a-long-name/reward": 1,
                "guard/tightened": 1.0,
            }
        )
    view.phase("evaluate: a phase of a long name", 128, 256)
    asked: list[int] = []
    view.asked_to_stop = asked
    asked.append(2)
    with console.capture() as shown:
        console.print(view)
    lines = shown.get().splitlines()
    assert {len(line) for line in lines} == {width} and len(lines) == height
    text = "\n".join(lines)
    for part in (
        "step 12/100",
        "evaluate: a phas",
        "reward 0.120 ▁█",
        "kl to behaviour 1.2e-03",
        "length 31.2 tokens",
        "step 2.00 s",
        "held out 0.500 (greedy, step 12)",
        "tightened 1x",
        "stopping after this step; once",
    ):
        assert part in text, part
    with console.capture() as after, view:
        pass
    assert (
        "stopping after this step" in after.get()
    )  # the last picture is the one that is left standing


def test_a_warning_stands_above_the_panel(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that went straight to the terminal would be written over by the next picture."""
    console, logger = (
        Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None),
        logging.getLogger("lowroll"),
    )
    terminal = logging.StreamHandler()
    logger.addHandler(terminal)
    try:
        with LiveView(100, "run", console):
            logger.warning("SIGINT: finishing this step")
            assert terminal.stream is not sys.__stderr__ and capsys.readouterr().err == ""
        logger.warning("after the run")
    finally:
        logger.removeHandler(terminal)
    assert "SIGINT: finishing this step\n" in console.file.getvalue()
    assert capsys.readouterr().err == "after the run\n"


def test_the_room_opens_without_torch_or_matplotlib() -> None:
    code = (
        "import sys, lowroll.metrics, lowroll.metrics.live, lowroll.metrics.report\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_a_reader_who_goes_away_is_an_error_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would end the program without a word: `lowroll grpo run.yaml | head` has exit code
    141."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError), LiveView(2, "run") as view:
        view.note("a word")


def test_a_step_that_ends_while_records_are_read_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that goes on writes the record of a step, then its checkpoint."""
    recorder = Recorder(tmp_path)
    recorder.write(1, {"reward/mean": 1.0})
    scan = records._scan

    def scan_before_the_next_step(path: Path) -> object:
        found = scan(path)
        recorder.write(2, {"reward/mean": 2.0})
        (tmp_path / "checkpoints" / "step_000002").mkdir(parents=True)
        return found

    monkeypatch.setattr(records, "_scan", scan_before_the_next_step)
    assert [one["step"] for one in read(tmp_path)] == [1]
    assert "are lost" not in caplog.text


class Wrapping(io.StringIO):
    """A terminal that wraps the lines it shows when it becomes narrower, as most do. It knows what
    rich sends: text, line ends, one row up, clearing a row or all. `rows`: what it shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows = [""]
        self.row = 0

    def isatty(self) -> bool:
        return True

    def resize(self, width: int) -> None:
        """With the cursor in the last row, where it is between two drawings."""
        assert self.row == len(self.rows) - 1
        self.width = width
        self.rows = [
            row[first : first + width]
            for row in self.rows
            for first in range(0, max(len(row), 1), width)
        ]
        self.row = len(self.rows) - 1

    def write(self, text: str) -> int:
        for token in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if token == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif token == "\x1b[1A":
                self.row = max(0, self.row - 1)
            elif token == "\x1b[2J":
                self.rows = [""] * len(self.rows)
            elif token == "\x1b[H":
                self.row = 0
            elif token == "\x1b[2K":
                self.rows[self.row] = ""
            elif token[0] not in "\x1b\r":
                self.rows[self.row] += token
        while len(self.rows) > self.row + 1 and not self.rows[-1]:
            self.rows.pop()
        return len(text)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("narrow", [79, 60, 40, 25])
def test_a_terminal_that_becomes_narrower_shows_one_panel(narrow: int, late: bool) -> None:
    """late: it is narrow for a few drawings before it says so."""
    terminal = Wrapping(80)
    console = Console(
        file=terminal, force_terminal=True, width=80, height=60, color_system=None, _environ={}
    )
    with LiveView(100, "demo", console) as view:
        view.step(RECORD)
        view.note("said before")
        terminal.resize(narrow)
        if late:
            view.note("said while it was late")
        console.width = narrow
        view.note("said after")
        view.phase("learn", 3, 8)
        view.note("said later")
        shown = list(terminal.rows)
    assert shown[:2] == ["said after", "said later"]
    assert "".join(shown).count("╭") == "".join(shown).count("╰") == 1, "\n".join(shown)
    assert shown[2].startswith("╭") and shown[-1].startswith("╰")
    assert {len(row) for row in shown[2:]} == {narrow}
