"""The generated parts of the documentation: `python docs/tables.py` writes them, a test keeps them
true.

A part stands between `<!-- table: NAME -->` and `<!-- end -->` in README.md or a page of docs/, and
comes from the code, or from the numbers that `make bench` stored. Edit the source, then run this.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from bench.harness import Row
    from lowroll.model.spec import ModelSpec

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
    """Return the files that may hold generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return `text` with every generated part made anew. ValueError for an unknown part."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in PARTS:
            raise ValueError(f"unknown table {match[2]!r}; known: {', '.join(PARTS)}")
        return match[1] + PARTS[match[2]]().strip("\n") + "\n" + match[3]

    return BLOCK.sub(fill, text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def metrics() -> str:
    from lowroll.metrics import names

    return names.table()


def own_keys() -> str:
    from docs import keys

    return table(("key", "type", "default", "meaning"), keys.own())


def _document_keys(file: str) -> str:
    from docs import keys

    head = ("key", "default", "acts on", "what differs from the document")
    return table(head, keys.of_file(file))


def objectives() -> str:
    from lowroll.objectives.objective import named
    from lowroll.objectives.table import ALGORITHMS, CORRECTIONS

    rows = []
    for name in (*ALGORITHMS, *CORRECTIONS):
        objective = named(name)
        row = objective.row
        options = ", ".join(
            f"{key} {value}" for key, value in objective.options.items() if value is not None
        )
        needs = ", ".join(("learner", *row.log_probs))
        rows.append((f"`{name}`", f"`{row.formula}`", needs, options, row.source))
    return table(("name", "token term, to maximise", "log-probs", "options", "source"), rows)


def algorithms() -> str:
    from lowroll.objectives.table import ALGORITHMS

    return table(
        ("algorithm", "advantage", "clip", "reduce", "dynamic sampling"),
        [
            (
                f"`{name}`",
                f"`{a.advantage}`",
                f"{a.options['eps_low']:g} / {a.options['eps_high']:g}",
                f"`{a.options['reduce']}`",
                "yes" if a.dynamic_sampling else "no",
            )
            for name, a in ALGORITHMS.items()
        ],
    )


# the stored arms that a row of `correction: auto` rests on, by its rollouts and forward
SEEN = {
    ("a bounded cache (rollout.kv.policy)", "any"): ("sparse", ("rkv capped", "rkv naive")),
    ("dense, an 8-bit cache (rollout.kv.dtype)", "any"): ("sparse", ("fp8 cache",)),
    ("dense or with the learner's bits, of earlier weights (asynchrony)", "any"): (
        "curves",
        ("bf16 stale 4 tis, later seeds", "bf16 stale 4 none, later seeds"),
    ),
    ("dense", "any"): ("curves", ("bf16", "bf16 lora")),
    ("low-bit", "aligned"): ("curves", ("int4 aligned tbpo", "int4 naive")),
    ("low-bit", "dense, LoRA on the same base"): ("curves", ("nvfp4 lora",)),
    ("low-bit", "dense"): (
        "curves",
        ("int8 acr", "int8 naive", "fp8 acr", "fp8 naive", "nvfp4 acr"),
    ),
}


def _result(name: str) -> dict[str, Any]:
    """Return what a command stored in bench/results/."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def _learning_curves() -> list[dict[str, Any]]:
    """Return the stored runs of `bench.curves`, by what they started from."""
    from bench.curves import by_start

    return by_start(_result("curves")["runs"])


def _seen(file: str, arms: tuple[str, ...]) -> str:
    """Return the reward of some arms' rollouts, of the first and last ten steps, means over seeds."""
    runs = _learning_curves() if file == "curves" else _result(file)["runs"]

    def mean(arm: str, steps: slice) -> float:
        curves = [run["curves"]["reward/mean"] for run in runs if run["variant"] == arm]
        return statistics.fmean(value for curve in curves for value in curve[steps])

    first, last = slice(10), slice(-10, None)
    return ", ".join(f"`{arm}` {mean(arm, first):.2f} to {mean(arm, last):.2f}" for arm in arms)


def auto() -> str:
    from lowroll.config import from_mapping
    from lowroll.config.auto import AUTO

    rows = []
    for row in AUTO:
        options = from_mapping({"model": "m", **row.example}).objective_options
        shown = ", ".join(
            f"{name} {options[name]:g}"
            for name in ("eps_low", "eps_high", "eps_negative", "cap", "xi_cap", "veto")
            if options.get(name) is not None
        )
        under = "" if row.gspo == row.correction else f" (`{row.gspo}` under gspo)"
        seen = SEEN.get((row.price, row.forward))
        evidence = _seen(*seen) if seen else "-"
        correction = f"`{row.correction}`{under}"
        rows.append((row.price, row.forward, correction, shown, row.source, evidence))
    return table(
        (
            "rollouts",
            "learner's forward",
            "correction",
            "thresholds (grpo)",
            "source",
            "reward of rollouts",
        ),
        rows,
    )


def formats() -> str:
    from lowroll.quant.formats import formats as known

    return table(("format", "what it is"), [(f"`{name}`", text) for name, text in known().items()])


def caches() -> str:
    from lowroll.kv.policy.table import POLICIES, make

    rows = []
    for name, row in POLICIES.items():
        doc = sys.modules[type(make(name)).__module__].__doc__ or ""
        first = " ".join(doc.split("\n\n")[0].split()).split(". ")[0]
        options = ", ".join(
            f"{key} {str(option.default).lower()}" for key, option in row.options.items()
        )
        rows.append((f"`{name}`", first.partition(": ")[2].rstrip("."), options))
    return table(("policy", "which keys stay", "options, with their defaults"), rows)


# a configuration in which every family has what sets it apart: windows, experts, scales
SHOWN_CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "max_window_layers": 0,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "residual_multiplier": 0.5,
}

TESTED_WITH_VLLM = ("Qwen3ForCausalLM",)  # the models of tests/parity/foreign


def families() -> str:
    """Return what each row of the table of families supports, as the refusals say."""
    from lowroll.model.families.table import FAMILIES
    from lowroll.model.spec import spec_from_config

    rows = []
    for name, family in FAMILIES.items():
        spec = spec_from_config(
            {**SHOWN_CONFIG, "model_type": name, "architectures": [family.architecture]}
        )
        lora = "attention" if spec.mixture.num_experts else "yes"
        features = (_supported(spec, name) for name in ("exact", "calibration", "uaq_scale"))
        more = (_supported(spec, name) for name in ("noise", "bounded and 8-bit caches"))
        rows.append((f"`{name}`", "yes", "yes", lora, "all", *features, *more, _vllm(spec)))
    head = ("family", "engine", "learner", "LoRA", "formats", "exact", "GPTQ, AWQ", "UAQ", "noise")
    return table((*head, "bounded caches", "vLLM"), rows)


def _supported(spec: ModelSpec, feature: str) -> str:
    """Return whether a feature takes a model, or its like without windows."""
    from lowroll.cli.supported import refusals

    if feature not in refusals(spec):
        return "yes"
    without = replace(spec, layers=tuple(replace(layer, window=0) for layer in spec.layers))
    return "no" if feature in refusals(without) else "without windows"


def _vllm(spec: ModelSpec) -> str:
    """Return whether tests here run a family against a real vLLM."""
    return "tested" if spec.architecture in TESTED_WITH_VLLM else "not tested"


# arguments that an id implies, or that every environment takes
IMPLIED = ("name", "seed", "system", "template", "set", "env_id", "generator", "options", "args")


def environments() -> str:
    import importlib

    from lowroll.envs.sets.table import PREFIX
    from lowroll.envs.table import REASONING_GYM, TABLE, VERIFIERS

    rows = []
    for name, place in {
        **TABLE,
        f"{REASONING_GYM}<generator>": "lowroll.envs.reasoning_gym:ReasoningGym",
        f"{VERIFIERS}<name>": "lowroll.envs.verifiers:Verifiers",
        f"{PREFIX}<name>": "lowroll.envs.sets.held_out:HeldOut",
    }.items():
        module, _, class_name = place.partition(":")
        home = importlib.import_module(module)
        arguments = [
            key
            for key in inspect.signature(getattr(home, class_name)).parameters
            if key not in IMPLIED
        ]
        first = " ".join((home.__doc__ or "").partition("\n\n")[0].split())
        summary = first.removeprefix(f"{name}: ").rstrip(".")
        summary = summary[:1].lower() + summary[1:]
        rows.append((f"`{name}`", summary, ", ".join(f"`{key}`" for key in arguments)))
    return table(("id", "task", "args"), rows)


def held_out_sets() -> str:
    from lowroll.envs.sets.table import RULES, SETS, TEMPLATES

    rows = []
    first_with: dict[str, str] = {}
    for name, one in SETS.items():
        place = ", ".join(f"`{part}`" for part in (one.path, one.subset, one.split) if part)
        columns = "; ".join(
            f"{role}: {' or '.join(f'`{key}`' for key in keys)}"
            for role, keys in one.columns.items()
        )
        like = first_with.setdefault(columns, name)
        if like != name:
            columns = f"as `{like}`"
        rule = f"{one.rule}, options shuffled" if one.shuffled else one.rule
        count = f"{one.count:,}" if one.count else "by release"
        about = (one.source, one.licence, one.checked)
        rows.append((f"`{name}`", one.title, place, count, rule, columns, *about))
    head = ("set", "name", "hub id, subset, split", "rows", "rule", "columns")
    sets = table((*head, "source", "licence note", "checked"), rows)
    rules = table(
        ("rule", "what counts", "prompt"),
        [(f"`{rule}`", RULES[rule], f"`{json.dumps(TEMPLATES[rule])}`") for rule in RULES],
    )
    return f"{sets}\n\n{rules}"


def presets() -> str:
    from lowroll.runs.presets import PRESETS

    rows = []
    for name, one in PRESETS.items():
        drawn = (
            f"temperature {one.temperature:g}, top-p {one.top_p:g}" if one.temperature else "greedy"
        )
        length = f"{one.max_tokens:,}" if one.max_tokens else "the run's"
        each = "".join(f", {count} of `{key}`" for key, count in one.each.items())
        sets = ", ".join(f"`{word}`" for word in one.sets.split(","))
        rows.append((f"`{name}`", sets, drawn, length, f"{one.n}{each}", one.source, one.chosen))
    head = (
        "preset",
        "sets",
        "sampler",
        "tokens",
        "responses",
        "source",
        "not said there, chosen here",
    )
    return table(head, rows)


def commands() -> str:
    from lowroll.cli.main import COMMANDS

    return table(
        ("command", "what it does"),
        [(f"`lowroll {name}`", text) for name, text in COMMANDS.items()],
    )


ON_GPUS = ("learners", "replicas", "roles")
ON_REAL = ("fidelity", "fidelity-gpu")  # a table of their own
OF_GRADIENTS = ("gradients", "gradients-gpu")  # likewise
ON_GPU = ("decode", "kv", "train", "step", "memory", "server")


def measured() -> str:
    """Return the stored results of `make bench`, file by file."""
    paths = [
        path
        for path in sorted((ROOT / "bench" / "baselines").glob("*.json"))
        if path.stem not in (*ON_GPU, *ON_GPUS, "scale", *ON_REAL, *OF_GRADIENTS)
    ]
    return (
        "\n".join(_file(path.stem) for path in paths)
        or "Nothing is stored in bench/baselines/: run `make bench`.\n"
    )


def gpu() -> str:
    """Return every row of `make bench-gpu`, file by file."""
    return "\n".join(_file(name) for name in ON_GPU if _stored(name)) or NOT_RUN


def gpus() -> str:
    """Return what the commands for two and more GPUs stored, with the rows' notes."""
    from bench.harness import Row
    from bench.learners import promised

    found = [(name, _stored(name)) for name in ON_GPUS]
    lines = []
    for name, record in found:
        if record:
            stored = {row["name"] for row in record["rows"]}
            wanted = promised() if name == "learners" else []
            lacking = [Row(n, "s", None, note="not run") for n in wanted if n not in stored]
            rows = [*_rows(record), *lacking]
            lines += [_file(name, lacking), *(f"- {r.name}: {r.note}" for r in rows if r.note), ""]
    return "\n".join(lines) or NOT_RUN


def scale() -> str:
    """Return what `bench.scale` stored: a table a kind of engine, a line a number of engines."""
    record = _stored("scale")
    if not record:
        return "Nothing of this is stored in bench/baselines/: run `python -m bench.scale`.\n"
    from bench.scale import SHOWN, WORKS

    found = {row["name"]: row["ours"] for row in record["rows"]}
    lines = [f"{_machine(record)}; a load of {record['machine']['load']:.0f}."]
    for work in WORKS:
        counts = [n for n in SIZES if f"{work} E={n}: batches" in found]
        rows = [
            (str(n), *(_number(found[f"{work} E={n}: {what}"]) for what in SHOWN)) for n in counts
        ]
        lines += ["", f"`{work}`:", "", table(("engines", *SHOWN.values()), rows)]
    return "\n".join(lines)


SIZES = [2**i for i in range(10)]  # engines


def targets() -> str:
    """Return the targets on one GPU, what was measured, and the reason for what was missed."""
    from bench.targets import TARGETS

    records = {name: _stored(name) for name in ON_GPU}
    found = {name: {row.name: row for row in _rows(record)} for name, record in records.items()}
    lines = [
        _target(
            t.quantity,
            [found[t.file].get(name) for name in t.rows],
            *zip(*t.rows.values(), strict=True),
        )
        for t in TARGETS
    ]
    named = {name for target in TARGETS for name in target.rows}
    lines += [
        _target(f"{row.name}, {row.unit}", [row], (row.must,), (row.aim,))
        for name in ("train", "step", "memory")
        for row in found[name].values()
        if row.must is not None and row.name not in named
    ]
    head = ("target", "ours", "the other", "ratio", "must", "aim", "result", "measured")
    return table(head, lines) if any(records.values()) else NOT_RUN


NOT_RUN = "Nothing of this is stored in bench/baselines/ yet: run `make bench-gpu` on a machine with a GPU."


def _target(
    quantity: str,
    rows: Sequence[Row | None],
    must: Sequence[float | None],
    aim: Sequence[float | None],
) -> tuple[str, ...]:
    """Return a line: the rows' values side by side, one verdict where they agree, and why a row was
    missed or not run."""
    from bench.targets import reason

    def beside(values: Iterable[float | None]) -> str:
        shown = [_number(value) for value in values]
        return " / ".join(shown) if set(shown) - {"-"} else "-"

    verdicts = ["not run" if row is None else row.verdict or "no target" for row in rows]
    said = verdicts[0] if len(set(verdicts)) == 1 else " / ".join(verdicts)
    found = [row for row in rows if row is not None]
    notes = [reason(row) or (row.note if row.verdict == "not run" else "") for row in found]
    peers = dict.fromkeys(_setting(row.against) for row in found if row.against)
    other = beside(row and row.peer for row in rows)
    return (
        quantity,
        beside(row and row.ours for row in rows),
        f"{other} ({' / '.join(peers)})" if peers else other,
        beside(row and row.ratio for row in rows),
        beside(must),
        beside(aim),
        ": ".join([said, "; ".join(filter(None, dict.fromkeys(notes)))]) if any(notes) else said,
        " / ".join(sorted({row.date for row in found if row.date})),
    )


def _stored(name: str) -> dict[str, Any]:
    path = ROOT / "bench" / "baselines" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _rows(record: Mapping[str, Any]) -> list[Row]:
    """Return the stored rows with today's bounds."""
    from bench.harness import read_row
    from bench.targets import aimed

    return aimed(map(read_row, record.get("rows", ())))


def _machine(record: Mapping[str, Any]) -> str:
    """Return the place of a record, and the days of its rows."""
    dates = sorted({row.get("date") or record["date"] for row in record.get("rows", [])})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else record["date"]
    machine, beside = record["machine"], record.get("settings", {}).get("vllm")
    place = (
        f"{machine['gpu']}, driver {machine['driver']}"
        if "gpu" in machine
        else f"{machine['cpu']}, {machine['threads']} threads"
    )
    return f"{days}: {place}, torch {machine['torch']}, transformers {machine['transformers']}" + (
        f", vLLM {beside}" if beside else ""
    )


def _file(name: str, more: Sequence[Row] = ()) -> str:
    """Return one file's rows and `more`, a table for each set of quantities that share subjects."""
    record = _stored(name)
    tables = "\n\n".join(_grids([*_rows(record), *more]))
    return f"`{name}`, {_machine(record)}.\n\n{tables}\n"


def _grids(rows: Iterable[Row]) -> Iterator[str]:
    """Yield tables of subjects by quantities. A row's name is `subject: quantity`; a name without a
    quantity is a subject of its unit alone."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        subject, colon, quantity = row.name.rpartition(": ")
        named = [quantity] * bool(colon) + [row.unit] * (row.unit not in quantity)
        head = ", ".join(named)
        cells.setdefault(subject or row.name, {})[head] = _cell(row)
    while cells:
        heads = dict.fromkeys(cells[next(iter(cells))])
        while more := [
            h for own in cells.values() if heads.keys() & own for h in own if h not in heads
        ]:
            heads |= dict.fromkeys(more)
        subjects = [subject for subject, own in cells.items() if heads.keys() & own]
        found = {subject: cells.pop(subject) for subject in subjects}
        shared, own_names = _without_what_they_share(subjects)
        if len(heads) > len(found):
            lines = [(head, *(found[s].get(head, "") for s in found)) for head in heads]
            yield table((shared, *own_names), lines)
        else:
            lines = [
                (name, *(found[s].get(head, "") for head in heads))
                for s, name in zip(subjects, own_names, strict=True)
            ]
            yield table((shared, *heads), lines)


def _without_what_they_share(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the words that all of several names begin with, and the rest of each."""
    words = [name.split(" ") for name in names]
    shared: list[str] = []
    if len(words) > 1:
        columns = zip(*(own[:-1] for own in words), strict=False)  # each keeps its last word
        shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, columns)]
    return " ".join(shared), [" ".join(own[len(shared) :]) for own in words]


BOUNDS = {
    "ratio at least": "≥ {:g}×",
    "ratio at most": "≤ {:g}×",
    "ours at least": "≥ {:g}",
    "ours at most": "≤ {:g}",
}


def _setting(against: str) -> str:
    """Return the model runner of one of vLLM's settings: its version and format stand elsewhere."""
    setting = re.fullmatch(r"vLLM [\d.]+, (\w+), \w+", against)
    return setting[1] if setting else against


def _cell(row: Row) -> str:
    """Return `ours / the other (who, if not always the same), ratio (spread) [bound]`."""
    said = _number(row.ours)
    if row.peer is not None:
        said += f" / {_number(row.peer)}" + (f" ({_setting(row.against)})" if row.against else "")
    if row.ratio is not None:
        said += f", {row.ratio:.2f}×"
        if row.spread and row.spread[0] != row.spread[1]:
            said += f" ({row.spread[0]:.2f}–{row.spread[1]:.2f})"
    return said if row.must is None else f"{said} [{BOUNDS[row.goal].format(row.must)}]"


def curves() -> str:
    """Return what `python -m bench.curves` stored: a line an arm, means over its runs with their range."""
    from bench.curves import HEAD, summary

    record = _result("curves")
    machine = record["machine"]
    before = {run["warm_start"]["sha256"]: run["warm_start"] for run in record["runs"]}
    head = (
        f"{record['date']}, {machine['device']}, torch {machine['torch']}, {record['steps']} steps. Before: "
        + "; ".join(
            f"greedy {warm['greedy']:.3f}, sampled {warm['sampled']:.3f}, pass@8 {warm['pass@8']:.3f} "
            f"(weights `{digest}`)"
            for digest, warm in before.items()
        )
        + "."
    )
    return head + "\n\n" + table(HEAD, summary(_learning_curves()))


def claims() -> str:
    """Return what the stored runs say of the papers' claims."""
    from bench.claims import HEAD
    from bench.claims import table as verdicts

    return table(HEAD, verdicts(_result("curves")["runs"]))


def faults() -> str:
    """Return what `python -m bench.faults` stored: a line a fault, and what was said."""
    from bench.faults import HEAD
    from bench.faults import table as rows_of

    record = _result("faults")
    head = f"{record['date']}, {record['machine']['cpu']}, torch {record['machine']['torch']}."
    return f"{head}\n\n" + table(HEAD, rows_of(record["runs"]))


def race() -> str:
    """Return what `python -m bench.race` stored on each kind of machine: a line a side, means over the
    seeds with their range, and what was tried of TRL."""
    paths = sorted(RESULTS.glob("race*.json"))
    if not paths:
        return "Nothing of this is stored in bench/results/ yet: run `python -m bench.race`.\n"
    return "\n\n".join(_race(json.loads(path.read_text())) for path in paths)


def _race(record: Mapping[str, Any]) -> str:
    """Return the table of a race."""
    from bench.race_table import HEAD

    machine, score = record["machine"], record["score"]
    seeds = len({run["seed"] for run in record["runs"]})
    place = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    began = record.get("warm_start", {})
    subject = f"{began['shape']}, random weights" if "shape" in began else "SmolLM2-135M after SFT"
    head = (
        f"{record['date']}, {subject}, {place}, {machine['threads']} threads, "
        f"torch {machine['torch']}, {record['steps']} steps, {seeds} seeds, {record['seconds']} s in "
        f"all. Greedy score of the model that all sides start from: {record['before']:.3f}."
    )
    lines = [head, "", table([name.format(score=score) for name in HEAD], _raced(record)), ""]
    lines += [f"- TRL with {_trial(trial)}" for trial in record["trials"]]
    return "\n".join(lines)


def _raced(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of a race; a side is named with how it drew and learnt."""
    from bench.race_table import summary

    about = {run["variant"]: run.get("about", {}) for run in record["runs"]}
    rows = []
    for side, *cells in summary(record["runs"], record["score"]):
        words = [f"{key} {value}" for key, value in about[side].items() if key != "threads"]
        rows.append((f"{side} ({', '.join(words)})" if words else side, *cells))
    return rows


def _trial(trial: Mapping[str, Any]) -> str:
    """Return what was found of a setting of TRL."""
    name = f"`{trial['setting']}`, {trial['micro']} rows a pass"
    if trial["seconds"] is None:
        return f"{name}: not run: {trial['failed']}"
    return f"{name}: {_number(trial['seconds'])} s a step"


def cache_runs() -> str:
    """Return what `python -m bench.sparse` stored: a line an arm, means over its runs with their range."""
    from bench.sparse import HEAD, summary

    record = _result("sparse")
    machine = record["machine"]
    began = sorted(
        {(run["warm_start"]["sft_steps"], run["warm_start"]["dense"]) for run in record["runs"]}
    )
    head = (
        f"{record['date']}, {machine['device']}, torch {machine['torch']}, {record['steps']} steps. "
        "Held-out reward of the warm-started models, dense cache: "
        + ", ".join(f"{reward:.3f} after {steps} SFT steps" for steps, reward in began)
        + "."
    )
    return head + "\n\n" + table(HEAD, summary(record["runs"]))


def fidelity() -> str:
    """Return what `python -m bench.fidelity` stored, a table a kind of device."""
    from bench.fidelity import HEAD, read_table

    lines = []
    for record in filter(None, map(_stored, ON_REAL)):
        set_by = record["settings"]
        at = f"{set_by['texts']} tokens of text, at most {set_by['tokens']} drawn"
        cells = [(f"`{name}`", *rest) for name, *rest in read_table(record)]
        lines += [f"{_machine(record)}; {at}; speed over {set_by['reference']}.", ""]
        lines += [table(HEAD, cells), ""]
    return "\n".join(lines) or NOT_RUN_HERE


NOT_RUN_HERE = "Nothing of this is stored in bench/baselines/ yet: run `python -m bench.fidelity`."


def gradients() -> str:
    """Return what `python -m bench.gradients` stored, a table a kind of device."""
    from bench.gradients import HEAD, read_table

    lines = []
    for record in filter(None, map(_stored, OF_GRADIENTS)):
        answers = f"{record['settings']['samples']} answers"
        lines += [f"{_machine(record)}; {answers}.", "", table(HEAD, read_table(record)), ""]
    return "\n".join(lines) or NOT_RUN_HERE.replace("fidelity", "gradients")


def packages() -> str:
    """Return the imports between packages as a drawing, without those that follow from others."""
    arrows = _arrows(ROOT / "lowroll")
    lines = ["```mermaid", "graph TD"]
    for name, below in arrows.items():
        implied = {far for near in below for far in _below(near, arrows)}
        lines += [f"  {name} --> {near}" for near in sorted(below - implied)]
    return "\n".join([*lines, "```"])


def _arrows(package: Path) -> dict[str, set[str]]:
    """Return, for each package, the others that its files import."""
    homes = {path.relative_to(package): path for path in sorted(package.rglob("*.py"))}
    arrows: dict[str, set[str]] = {
        file.parts[0].removesuffix(".py"): set()
        for file in homes
        if not file.name.startswith("__") or len(file.parts) > 1
    }
    for file, path in homes.items():
        home = file.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())) if home in arrows else ():
            arrows[home] |= {name for name in _imported(node) if name in arrows} - {home}
    return arrows


def _imported(node: ast.AST) -> list[str]:
    """Return the packages that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    return [name.split(".")[1] for name in names if name.startswith("lowroll.")]


def _below(name: str, arrows: Mapping[str, set[str]]) -> set[str]:
    """Return every package that a package reaches."""
    return arrows[name] | {far for near in arrows[name] for far in _below(near, arrows)}


class Front(NamedTuple):
    """A row of the README: what was measured, and the stored rows that say it."""

    what: str
    against: str
    file: str
    rows: tuple[str, ...]


FRONT = (
    *(
        Front(
            f"Qwen2.5-7B, {theirs} rollouts, tokens/s with 1 / 64 / 256 rows",
            f"vLLM, {theirs}",
            "decode",
            tuple(f"qwen2.5-7b {format} B={rows}: rollout" for rows in (1, 64, 256)),
        )
        for format, theirs in (("fp8", "FP8"), ("nvfp4", "NVFP4"), ("bf16", "bfloat16"))
    ),
    Front(
        "Qwen2.5-7B, LoRA, a training step of 16,384 tokens, tokens/s",
        "transformers + PEFT, at its fastest",
        "train",
        ("qwen2.5-7b LoRA r16, 16384 tokens: transformers + PEFT (2 x rows/2, no checkpointing)",),
    ),
)


def front() -> str:
    """Return the six rows of the README: four of stored benchmarks, the race and the learning curves."""
    lines = []
    for entry in FRONT:
        stored = {row["name"]: row for row in _stored(entry.file)["rows"]}
        rows = [stored[name] for name in entry.rows]
        ours, other = (" / ".join(_number(row[side]) for row in rows) for side in ("ours", "peer"))
        ratio = " / ".join("-" if row["ratio"] is None else f"{row['ratio']:.2f}x" for row in rows)
        other = entry.against if other == "-" else f"{other} ({entry.against})"
        lines.append((entry.what, ours, other, ratio))
    head = ("measured", "lowroll", "the other", "ratio")
    return f"{table(head, [*lines, _to_a_score(), _learnt()])}\n\n{_machine(_stored('decode'))}."


def _to_a_score() -> tuple[str, ...]:
    """Return the row of the race on a GPU: mean seconds to the score."""
    from bench.experiment import by_arm
    from bench.race_table import reached, records_of

    record = _result("race-gpu")
    score, runs = record["score"], by_arm(record["runs"])
    ran = {
        side: {one["seed"]: one for one in runs[side] if "failed" not in one}
        for side in ("lowroll int8_rotated", "trl")
    }
    seeds = sorted(set.intersection(*map(set, ran.values())))

    def seconds(side: str) -> list[float]:
        found = [reached(records_of(ran[side][seed]), score) for seed in seeds]
        assert found and all(found), f"{side}: there is no mean where a run misses the score"
        return [at.seconds for at in found if at is not None]

    our_seconds, peer_seconds = seconds("lowroll int8_rotated"), seconds("trl")
    ours, peer = statistics.fmean(our_seconds), statistics.fmean(peer_seconds)
    ratios = [b / a for a, b in zip(our_seconds, peer_seconds, strict=True)]
    what = f"SmolLM2-135M, GRPO, seconds to held-out accuracy {score}"
    dates = (ran[side][seed].get("date", record["date"]) for side in ran for seed in seeds)
    return (
        f"{what}, {len(seeds)} seeds ({max(dates)})",
        f"{ours:.0f} (rotated INT8)",
        f"{peer:.0f} (TRL with vLLM)",
        f"{peer / ours:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
    )


def _learnt() -> tuple[str, ...]:
    """Return the row of what SmolLM2 learns with INT8 rollouts, corrected and not."""
    from bench.curves import HEAD, summary

    runs = _learning_curves()
    rows = {arm: dict(zip(HEAD, (arm, *row), strict=True)) for arm, *row in summary(runs)}

    def accuracy(arm: str) -> str:
        return rows[arm]["held out, greedy"].split()[0]

    before = runs[0]["warm_start"]["greedy"]
    return (
        f"SmolLM2-135M, GRPO, held-out accuracy after INT8 rollouts (before: {before:.3f})",
        f"{accuracy('int8 acr')} (`correction: acr`), {accuracy('int8_rotated acr')} (rotated INT8)",
        f"{accuracy('int8 naive')} (one clipped ratio); {accuracy('bf16')} with bfloat16 rollouts",
        "-",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        metrics,
        own_keys,
        objectives,
        algorithms,
        auto,
        formats,
        caches,
        families,
        environments,
        held_out_sets,
        presets,
        commands,
        measured,
        gpu,
        gpus,
        targets,
        scale,
        curves,
        claims,
        faults,
        race,
        cache_runs,
        fidelity,
        gradients,
        front,
        packages,
    )
} | {f"{file}_keys": partial(_document_keys, file) for file in ("train", "infer", "orch")}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # for bench, which is not installed
    main()
