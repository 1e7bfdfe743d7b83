"""The generated parts of the documentation: `python docs/tables.py` writes them, a test keeps them true.

A part stands between `<!-- table: NAME -->` and `<!-- end -->` in README.md or docs/*.md and comes from the code, or
from the numbers that `make bench` stored. Edit the source, then run this.
"""
from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Write every generated part, and say which files changed."""
    for path in pages():
        before = path.read_text()
        if (after := filled(before)) != before:
            path.write_text(after)
            print(path.relative_to(ROOT))


def pages() -> list[Path]:
    """The files that may hold generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """`text` with every generated part made anew. ValueError for a part that nobody makes."""
    def fill(match: re.Match[str]) -> str:
        if match[2] not in PARTS:
            raise ValueError(f"unknown table {match[2]!r}; known: {', '.join(PARTS)}")
        return match[1] + PARTS[match[2]]().strip("\n") + "\n" + match[3]
    return BLOCK.sub(fill, text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def metrics() -> str:
    from lowroll.metrics import names
    return names.table()


def objectives() -> str:
    from lowroll.objectives import TABLE
    rows = []
    for name, objective in TABLE.items():
        needs = ["learner", *["proximal"] * objective.needs_proximal, *["behavior"] * objective.needs_behavior]
        options = ", ".join(f"{key} {value}" for key, value in objective.options.items() if value is not None)
        rows.append((f"`{name}`", f"`{objective.formula}`", ", ".join(needs), options, objective.source))
    return table(("name", "token term, to maximise", "log-probs", "options", "source"), rows)


def algorithms() -> str:
    from lowroll.config.algorithms import ALGORITHMS
    return table(("algorithm", "advantage", "clip", "reduce", "dynamic sampling"),
                 [(f"`{name}`", f"`{a.advantage}`", f"{a.eps_low:g} / {a.eps_high:g}", f"`{a.reduce}`",
                   "yes" if a.dynamic_sampling else "no") for name, a in ALGORITHMS.items()])


def auto() -> str:
    from lowroll.config import from_mapping
    from lowroll.config.auto import AUTO
    rows = []
    for row in AUTO:
        options = from_mapping({"model": "m", **row.example}).objective_options
        shown = ", ".join(f"{name} {options[name]:g}" for name in ("eps_low", "eps_high", "eps_negative", "cap", "veto")
                          if options.get(name) is not None)
        under = "" if row.gspo == row.correction else f" (`{row.gspo}` under gspo)"
        rows.append((row.price, row.forward, f"`{row.correction}`{under}", shown, row.source))
    return table(("rollouts", "learner's forward", "correction", "thresholds (grpo)", "source"), rows)


def formats() -> str:
    from lowroll.quant.formats import formats as known
    return table(("format", "what it is"), [(f"`{name}`", text) for name, text in known().items()])


def environments() -> str:
    import importlib

    from lowroll.envs.table import REASONING_GYM, TABLE
    rows = []
    for name, place in {**TABLE, f"{REASONING_GYM}<generator>": "lowroll.envs.reasoning_gym:ReasoningGym"}.items():
        module, _, class_name = place.partition(":")
        home = importlib.import_module(module)
        arguments = [key for key in inspect.signature(getattr(home, class_name)).parameters
                     if key not in ("name", "seed", "generator", "options")]
        summary = (home.__doc__ or "").split("\n")[0].partition(": ")[2] or (home.__doc__ or "").split("\n")[0]
        rows.append((f"`{name}`", summary.rstrip("."), ", ".join(f"`{key}`" for key in arguments)))
    return table(("id", "task", "args"), rows)


def commands() -> str:
    from lowroll.cli.main import COMMANDS
    return table(("command", "what it does"), [(f"`lowroll {name}`", text) for name, text in COMMANDS.items()])


def measured() -> str:
    """The stored results of `make bench`, a table a file."""
    parts = []
    for path in sorted((ROOT / "bench" / "baselines").glob("*.json")):
        record = json.loads(path.read_text())
        machine = record["machine"]
        parts += [f"`{path.stem}`, {record['date']}: {machine['cpu']}, {machine['threads']} threads, "
                  f"torch {machine['torch']}, transformers {machine['transformers']}.", "",
                  table(("ours / the other", "unit", "ours", "the other", "ratio (spread)", "must be"),
                        [_comparison(row) for row in record["rows"]]), ""]
    return "\n".join(parts) or "Nothing is stored in bench/baselines/: run `make bench`.\n"


def curves() -> str:
    """What `python -m bench.curves` stored: a line a variant, means over the seeds with their range."""
    from bench.curves import HEAD, summary
    record = json.loads((RESULTS / "curves.json").read_text())
    machine = record["machine"]
    seeds = len({run["seed"] for run in record["runs"]})
    head = (f"{record['date']}, {machine['device']}, torch {machine['torch']}, {record['steps']} steps, {seeds} seeds, "
            f"{record['seconds']} s for all runs. Held-out reward of the warm-started model: "
            f"{record['before']['sampled']:.3f}.")
    return head + "\n\n" + table(HEAD, summary(record["runs"]))


def prices() -> str:
    """What `python -m bench.formats` stored."""
    from bench.formats import HEAD, cells
    record = json.loads((RESULTS / "formats.json").read_text())
    machine = record["machine"]
    head = f"{record['date']}, {machine['cpu']}, {machine['threads']} thread, torch {machine['torch']}."
    return head + "\n\n" + table(HEAD, [(f"`{name}`", *rest) for name, *rest in cells(record["rows"])])


def _comparison(row: dict[str, object]) -> tuple[str, ...]:
    ours, peer, ratio = (float(str(row[key])) for key in ("ours", "peer", "ratio"))
    spread = row.get("spread")
    extent = f" ({spread[0]:.2f} to {spread[1]:.2f})" if isinstance(spread, list) and spread[0] != spread[1] else ""
    must = "" if row.get("must") is None else f"{float(str(row['must'])):g}x"
    return str(row["name"]), str(row["unit"]), _number(ours), _number(peer), f"{ratio:.2f}x{extent}", must


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


PARTS: dict[str, Callable[[], str]] = {part.__name__: part for part in (
    metrics, objectives, algorithms, auto, formats, environments, commands, measured, curves, prices)}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))       # for bench, which is not installed
    main()
