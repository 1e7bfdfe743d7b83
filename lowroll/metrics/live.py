"""The live view of a run: a panel redrawn in place, or one plain line a step without a terminal.

The panel fits the terminal's width by dropping columns and cutting text, never by wrapping.
"""

from __future__ import annotations

import logging
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleRenderable, Group, RenderHook
from rich.control import Control
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_PHASES = ("generate", "score", "learn", "publish")
_ETA_STEPS = 20  # last steps of which the remaining time is estimated
_CELL_COLUMNS = 25  # columns of a number with its label
_MAX_HELD_OUT = 4  # environments shown with an evaluation
_EVAL_METRIC = re.compile(r"eval/(.+)/(reward|sampled_reward)(_before)?")


class Terminal(Console):
    """The standard output. A file is never a terminal, whatever FORCE_COLOR and
    TTY_COMPATIBLE say."""

    def __init__(self) -> None:
        super().__init__(force_terminal=None if sys.stdout.isatty() else False)

    def on_broken_pipe(self) -> None:
        """Raise an ordinary error, where rich would exit."""
        raise


class Narrower(RenderHook):
    """A hook that clears the screen before the first drawing on a narrower terminal, which has
    wrapped the old panel to an unknown number of rows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = console.width

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        previous_width, self._width = self._width, self._console.width
        if self._width >= previous_width:
            return renderables
        return [Control(ControlType.CLEAR, ControlType.HOME), *renderables]


class LiveView:
    """A live view: `with LiveView(total_steps, title) as view:`, then `view.phase(...)` inside a
    step and `view.step(record)` after it.

    Without a terminal each `every`th step and the last print a line. Set `asked_to_stop` to an
    object that becomes true when the run is asked to stop.
    """

    def __init__(
        self, total_steps: int, title: str, console: Console | None = None, every: int = 1
    ) -> None:
        self.total_steps = total_steps
        self.every = every
        self.title = title
        self._console = console or Terminal()
        self._record: Mapping[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=32)
        self._seconds: deque[float] = deque(maxlen=_ETA_STEPS)
        self._held_out: dict[str, str] = {}
        self._phase: tuple[str, int, int] = ("start", 0, 0)
        self.asked_to_stop: object = ()
        self._began = self._stepped = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=4, get_renderable=self.__rich__
            )

    def __enter__(self) -> LiveView:
        self._began = self._stepped = time.monotonic()
        if self._live:
            original_stderr = sys.stderr
            self._live.start()
            self._console.push_render_hook(Narrower(self._console))
            # puts warnings above the panel
            _redirect_logging(original_stderr, sys.stderr)
        else:
            self._console.print(self.title, markup=False, highlight=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            live_stderr = sys.stderr
            self._live.refresh()
            self._console.pop_render_hook()
            self._live.stop()
            _redirect_logging(live_stderr, sys.stderr)

    def phase(self, name: str, done: int, total: int) -> None:
        """Record the progress of the step's phase `name`."""
        self._phase = (name, done, total)

    def note(self, text: str) -> None:
        """Print a message above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, record: Mapping[str, Any]) -> None:
        self._record = record
        if (reward := record.get("reward/mean")) is not None:
            self._rewards.append(reward)
        self._held_out |= held_out_words(record)
        now = time.monotonic()
        self._seconds.append(record.get("time/step") or now - self._stepped)
        self._stepped = now
        self._phase = ("", 0, 0)
        step = record.get("step", 0)
        if not self._live and (step % self.every == 0 or step == self.total_steps):
            self._console.print(self.line(), markup=False, highlight=False, soft_wrap=True)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """Show an evaluation that came without its step's record."""
        self._held_out |= held_out_words(record)
        if not self._live:
            words = [f"step {record.get('step', 0):>4}/{self.total_steps}", *_evals(record)]
            self._console.print("  ".join(words), markup=False, highlight=False, soft_wrap=True)

    def show(self, record: Mapping[str, Any]) -> str:
        """Show a finished step, and return its line."""
        self.step(record)
        return self.line()

    def line(self) -> str:
        record = self._record
        words = [
            f"step {record.get('step', 0):>4}/{self.total_steps}",
            f"reward {_number(record.get('reward/mean'), '.3f')} {sparkline(self._rewards, 8)}".rstrip(),
            f"kl {_number(record.get('mismatch/kl_k3'), '.1e')}",
            f"entropy {_number(_entropy(record), '.3f')}",
            f"len {_number(record.get('rollout/length_mean'), '.1f')}",
            f"gen {_number(record.get('perf/generate_tokens_per_second'), '.0f')} tok/s",
            f"learn {_number(record.get('perf/learn_tokens_per_second'), '.0f')} tok/s",
        ]
        words += [f"{name} {_number(record.get(f'time/{name}'), '.2f')}s" for name in _PHASES]
        if "critic/loss" in record:
            words.append(f"critic {_number(record.get('critic/explained_variance'), '.2f')}")
        words += [*kv_words(record), *_evals(record), *guard_words(record)]
        return "  ".join([*words, f"eta {self._eta()}"])

    def _eta(self) -> str:
        if not self._seconds:
            return "-"
        steps_left = max(0, self.total_steps - int(self._record.get("step", 0)))
        return duration(steps_left * statistics.fmean(self._seconds))

    def __rich__(self) -> Panel:
        record = self._record
        step, inner_width = int(record.get("step", 0)), max(1, self._console.width - 4)
        name, done, total = self._phase
        progress = Table.grid(padding=(0, 2), expand=True)
        progress.add_column(
            width=max(1, min(28, inner_width // 2)), no_wrap=True, overflow="ellipsis"
        )
        progress.add_column(ratio=1)
        progress.add_row(
            f"step {step}/{self.total_steps}",
            ProgressBar(self.total_steps, step, complete_style="cyan"),
        )
        progress.add_row(
            f"{name} {done}/{total}" if total else name,
            ProgressBar(max(total, 1), done, complete_style="cyan"),
        )
        columns = max(1, min(4, inner_width // _CELL_COLUMNS))
        grid = Table.grid(padding=(0, 2), expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        cells = self._cells(record, max(4, inner_width // columns - 16))
        for start in range(0, len(cells), columns):
            grid.add_row(*cells[start : start + columns])
        elapsed = duration(time.monotonic() - self._began)
        return Panel(
            Group(progress, Text(), grid, *self._lines(record)),
            title=Text(self.title, style="bold", overflow="ellipsis"),
            subtitle=Text(f"elapsed {elapsed}  eta {self._eta()}"),
        )

    def _lines(self, record: Mapping[str, Any]) -> list[Text]:
        times = ", ".join(
            f"{phase} {_number(record.get(f'time/{phase}'), '.2f')}s" for phase in _PHASES
        )
        lines = [Text(times, "dim")]
        lines += [
            Text.assemble(("held out ", "dim"), (words, "bold"), (f"  {env}", "dim"))
            for env, words in list(self._held_out.items())[:_MAX_HELD_OUT]
        ]
        if words := kv_words(record):
            lines.append(Text(", ".join(words)))
        if words := guard_words(record):
            lines.append(Text(", ".join(words), "yellow"))
        if self.asked_to_stop:
            lines.append(Text("stopping after this step; once more: at once", "bold yellow"))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return lines

    def _cells(self, record: Mapping[str, Any], bars: int) -> list[Text]:

        def cell(label: str, value: object, spec: str, unit: str = "") -> Text:
            return Text.assemble(
                (f"{label} ", "dim"), (_number(value, spec), "bold"), (unit, "dim")
            )

        reward = cell("reward", record.get("reward/mean"), ".3f")
        reward.append(f" {sparkline(self._rewards, min(bars, 16))}", "green")
        critic = []
        if "critic/loss" in record:
            critic = [
                cell("value", record.get("critic/value_mean"), ".3f"),
                cell("return", record.get("critic/return_mean"), ".3f"),
                cell("explained", record.get("critic/explained_variance"), ".2f"),
                cell("critic loss", record.get("critic/loss"), ".3g"),
            ]
        return [
            reward,
            cell("kl to behaviour", record.get("mismatch/kl_k3"), ".1e"),
            cell("entropy", _entropy(record), ".3f"),
            cell("grad norm", record.get("optim/grad_norm"), ".3g"),
            cell("length", record.get("rollout/length_mean"), ".1f", " tokens"),
            cell("truncated", _percent(record.get("rollout/truncated_fraction")), ".0f", " %"),
            cell("no signal", _percent(record.get("reward/zero_std_fraction")), ".0f", " %"),
            cell("ess", record.get("mismatch/ess"), ".3f"),
            *critic,
            cell("generate", record.get("perf/generate_tokens_per_second"), ".0f", " tok/s"),
            cell("learn", record.get("perf/learn_tokens_per_second"), ".0f", " tok/s"),
            cell("step", record.get("time/step"), ".2f", " s"),
        ]


def held_out_words(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a step's evaluations by environment."""
    decoding = drawn_at(record.get("eval/temperature"))
    words: dict[str, str] = {}
    for wanted_suffix, when in (("_before", "before step"), (None, "step")):
        for name, value in record.items():
            match = _EVAL_METRIC.fullmatch(name)
            if match is None:
                continue
            env, kind, suffix = match.groups()
            if kind == "reward" and suffix == wanted_suffix:
                words[env] = f"{_number(value, '.3f')} ({decoding}, {when} {record['step']})"
    return words


def _evals(record: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {_number(value, '.3f')}"
        for name, value in record.items()
        if _EVAL_METRIC.fullmatch(name)
    ]


def drawn_at(temperature: object) -> str:
    """Describe an evaluation's sampling."""
    if not isinstance(temperature, (int, float)):
        return "sampled"
    return f"sampled, T = {temperature:g}" if temperature else "greedy"


def _redirect_logging(old: object, new: Any) -> None:
    for handler in logging.getLogger("lowroll").handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:
            handler.setStream(new)


def kv_words(record: Mapping[str, Any]) -> list[str]:
    """Describe a bounded cache's saving, and the rejected or repaired share."""
    if "kv/saving_peak" not in record:
        return []
    words = [f"kv {_number(_percent(record['kv/saving_peak']), '.0f')} % saved"]
    for kind in ("rejected", "repaired"):
        if (share := record.get(f"correction/{kind}_sequence_fraction")) is not None:
            words.append(f"{kind} {_number(_percent(share), '.1f')} %")
    return words


def guard_words(record: Mapping[str, Any]) -> list[str]:
    """Return a step's alarms and the guard's actions so far."""
    action_words = {
        "guard/tightened": "tightened",
        "guard/fallbacks": "fell back",
        "guard/choices": "chose formats again",
    }
    return [
        f"{action_words[name]} {value:.0f}x" if name in action_words else name.replace("/", ": ")
        for name, value in record.items()
        if name.startswith("guard/") and value
    ]


def sparkline(values: deque[float] | list[float], width: int) -> str:
    """Return the last `width` values as block characters, from their minimum to their maximum."""
    shown = list(values)[-width:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    if low == high:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in shown)


def duration(seconds: float) -> str:
    """Return a duration in words: 5s, 2m10s, 3h05m."""
    total_seconds = int(round(seconds))
    if total_seconds < 60:
        return f"{total_seconds}s"
    if total_seconds < 3600:
        return f"{total_seconds // 60}m{total_seconds % 60:02d}s"
    return f"{total_seconds // 3600}h{total_seconds % 3600 // 60:02d}m"


def _entropy(record: Mapping[str, Any]) -> object:
    return record.get("policy/entropy", record.get("rollout/entropy_estimate"))


def _percent(value: object) -> float | None:
    return 100 * value if isinstance(value, float) else None


def _number(value: object, spec: str) -> str:
    return format(value, spec) if isinstance(value, (int, float)) else "-"
