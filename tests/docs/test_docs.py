"""The documentation is true: its code runs, its commands exist, its YAML loads, its tables and
links are up to date."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lowroll
from lowroll.cli.main import COMMANDS, main
from lowroll.config import load
from lowroll.config.surogate.read import load_surogate
from lowroll.metrics.record import read
from lowroll.model import hf, lora
from tests.fixtures.pages import ROOT, after_make_demo, blocks, name

PAGES = [
    *(
        ROOT / f"{name}.md"
        for name in ("README", "AGENTS", "CONTRIBUTING", "CHANGELOG", "SECURITY")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "recipes" / "README.md",
]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone after `make demo`: the examples, the demo's model (a tiny one) and its
    run's settings."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    return after_make_demo(folder, batch_size=32)


def run_block(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Run a block of a page as a script in `folder`; its variables."""
    script = folder / "block.py"
    script.write_text(code)
    monkeypatch.chdir(folder)
    return runpy.run_path(str(script))


@pytest.mark.slow
def test_the_tour_of_the_python_page_runs(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tour,) = blocks(ROOT / "docs/python.md", "python")
    assert sum(bool(line.strip()) and not line.startswith("#") for line in tour.splitlines()) <= 40
    left = run_block(tour, clone, monkeypatch)
    assert left["first"].behavior.weights == "int8"
    assert left["proximal"].shape == left["behavior"].shape == left["learner"].grad.shape
    assert (
        0 < float((left["proximal"] - left["behavior"]).abs().max()) < 0.5
    )  # INT8 differs, and not by much
    assert left["learner"].grad.abs().sum() > 0
    assert left["q"].nbytes == 64 * 128 + 64 * 4
    assert [record["step"] for record in left["result"].records] == [1, 2, 3, 4, 5]
    assert "KL a token:" in capsys.readouterr().out


def test_the_python_of_the_usage_pages_runs(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    price, merge = blocks(ROOT / "docs/usage.md", "python")
    run_block(price, clone, monkeypatch)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(lines) == set(lowroll.formats())
    assert lines["int8"].startswith("8.12 bits") and lines["nvfp4"].startswith("4.50 bits")
    assert float(lines["int8"].split()[-1]) < float(lines["nvfp4"].split()[-1]) < 0.2
    run_block(blocks(ROOT / "docs/environments.md", "python")[0], clone, monkeypatch)
    assert "Validation(env='examples/my_env.py'" in capsys.readouterr().out

    base = clone / "outputs/demo/model"
    adapted = lora.attach(hf.load(base), 4, 8.0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.trainable_parameters().values():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    lora.save(adapted, clone / "outputs/lora/final", base=str(base))
    run_block(merge, clone, monkeypatch)
    ids = [[5, 80, 81, 82, 83, 84]]
    (merged,) = lowroll.score(clone / "outputs/lora/merged", ids, [1])
    torch.testing.assert_close(merged, lowroll.score(adapted, ids, [1])[0], atol=1e-5, rtol=0)
    assert not torch.allclose(merged, lowroll.score(base, ids, [1])[0], atol=1e-3)


@pytest.mark.slow
def test_the_python_of_the_tools_page_runs(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, levels = blocks(ROOT / "docs/tools.md", "python")
    run_block(tool, clone, monkeypatch)
    shown, answer = capsys.readouterr().out.splitlines()
    assert shown == "calculate ['a', 'operation', 'b']"
    assert "'content': '42'" in answer
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    run_block(levels, clone, monkeypatch)
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["0", "1", "2"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_yaml_of_the_pages_loads(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "yaml"):
        (tmp_path / "run.yaml").write_text(block)
        assert load(tmp_path / "run.yaml").model


def commands_of(text: str) -> list[list[str]]:
    """The command lines of a page or a file's comments: indented or after a # mark, remarks cut
    off."""
    lines = re.sub(r"\\\n#?", " ", text).splitlines()
    found = (
        re.fullmatch(r"(?:#\s+|\s{4})((?:lowroll|make) .*?)(?:\s+#.*)?", line) for line in lines
    )
    inline = re.findall(r"`((?:lowroll|make) [^`<\n]*)`", text)
    return [shlex.split(line) for line in [*(match[1] for match in found if match), *inline]]


def targets() -> set[str]:
    """Return the targets of `make`."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "page", [*PAGES, *RECIPES, *EXAMPLES, ROOT / "examples/three_files/train.yaml"], ids=name
)
def test_the_commands_exist_and_take_these_arguments(page: Path) -> None:
    for program, command, *arguments in commands_of(page.read_text()):
        if program == "make":
            assert command in targets(), f"make {command}"
        else:
            assert command in COMMANDS, f"lowroll {command}"
            parser = importlib.import_module(f"lowroll.cli.{command}").parser()
            if arguments and "..." not in arguments:
                parser.parse_intermixed_args(arguments)


@pytest.mark.slow
def test_the_commands_on_cheap_rollouts_run(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the usage page that need the demo's model alone, with few rollouts and two steps."""
    page = ROOT / "docs/usage.md"
    monkeypatch.chdir(clone)
    Path("cheap.yaml").write_text(
        next(text for text in blocks(page, "yaml") if text.startswith("# cheap.yaml"))
    )
    small = {
        "grpo": [
            "train.max_steps=2",
            "batch_size=32",
            "dapo.max_rounds=32",
            "rollout.cache_tokens=4096",
            "score.workers=1",
        ],
        "eval": ["--n", "4"],
        "quantize": [],
        "diagnose": ["--n", "4", "rollout.cache_tokens=4096"],
    }
    ran, mismatch = set(), {}
    for _, command, *words in commands_of(page.read_text()):
        if words[:1] == ["cheap.yaml"] or words[:1] == ["outputs/demo/model"]:
            assert main([command, *words, *small[command]]) == 0
            ran.add(command)
            for folder in (
                Path(word.removeprefix("output_dir="))
                for word in words
                if word.startswith("output_dir=")
            ):
                mismatch[folder.name] = read(folder)[0]["mismatch/kl_k3"]
    assert ran == set(small)
    rounded = {"dapo", "ppo", "auto", "tis", "int4", "aligned", "scaled", "noise", "fp8", "budget"}
    assert mismatch.pop("exact") == 0
    assert set(mismatch) == rounded | {"forgetful", "naive"}
    assert mismatch["forgetful"] == mismatch["naive"] > mismatch["auto"]
    assert mismatch["aligned"] < mismatch["int4"] / 100
    assert mismatch["auto"] == mismatch["tis"]


def test_the_reader_of_commands_sees_the_commands() -> None:
    found = {" ".join(words[:2]) for words in commands_of((ROOT / "README.md").read_text())}
    assert {"make demo", "make test", "lowroll grpo", "lowroll report"} <= found
    assert commands_of("    lowroll grpo a.yaml b.c=1   # why\n") == [
        ["lowroll", "grpo", "a.yaml", "b.c=1"]
    ]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        assert not target.startswith("http"), f"{target}: the pages are read offline"
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", goal.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads
            }, target


def test_the_tests_that_hold_the_numbers_exist() -> None:
    named = re.findall(r"`(\w+/test_\w+)::(test_\w+)`", (ROOT / "docs/algorithms.md").read_text())
    assert len(named) > 30
    for module, function in named:
        assert f"def {function}(" in (ROOT / "tests" / f"{module}.py").read_text(), (
            f"{module}::{function}"
        )


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_tables", ROOT / "docs/tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_tables_are_up_to_date() -> None:
    made = tables()
    used: set[str] = set()
    for page in made.pages():
        text = page.read_text()
        assert made.filled(text) == text, (
            f"{name(page)} is out of date: run `python docs/tables.py`"
        )
        used |= {match[2] for match in made.BLOCK.finditer(text)}
    assert used == set(made.PARTS)


def test_a_changed_number_would_be_noticed() -> None:
    made, text = tables(), (ROOT / "docs/algorithms.md").read_text()
    wrong = text.replace("0.2 / 0.28", "0.2 / 0.30")
    assert wrong != text and made.filled(wrong) == text
    with pytest.raises(ValueError, match="unknown table 'nothing'"):
        made.filled("<!-- table: nothing -->\n<!-- end -->")


def test_the_benchmark_table_shows_what_was_stored(tmp_path: Path) -> None:
    made = tables()
    made.ROOT = tmp_path
    assert "make bench" in made.measured()
    (tmp_path / "bench/baselines").mkdir(parents=True)
    (tmp_path / "bench/baselines/engine.json").write_text(
        '{"date": "2026-01-02", "machine": {"cpu": "X", "threads": 2, "torch": "2.13", "transformers": "5.23"}, '
        '"rows": [{"name": "demo: rollout", "unit": "tokens/s", "ours": 3000.4, "peer": 1000, "ratio": 3.0, '
        '"spread": [2.9, 3.1], "must": 2.0}]}'
    )
    assert "2026-01-02: X, 2 threads" in made.measured()
    assert "|  | rollout, tokens/s |" in made.measured()
    assert "| demo | 3,000 / 1,000, 3.00× (2.90–3.10) [≥ 2×] |" in made.measured()


def test_types_travel_with_the_package() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    assert packed["lowroll"] == ["py.typed"] and (ROOT / "lowroll/py.typed").is_file()


def test_every_upper_bound_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    bounded = {entry.partition(";")[0].strip() for entry in wanted if "<" in entry}
    section = (
        (ROOT / "docs/dependencies.md")
        .read_text()
        .partition("## Versions")[2]
        .partition("\n## ")[0]
    )
    stated = set(re.findall(r"`([\w-]+<[\d.]+)`", section))
    assert {re.sub(r">=[\d.]+,", "", entry) for entry in bounded} == stated
    assert "<" not in project["requires-python"]


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [
        entry for extra in project["project"]["optional-dependencies"].values() for entry in extra
    ]
    names = {re.match(r"[\w.-]+", entry)[0].lower() for entry in wanted}
    rows = {
        row[1].lower(): row
        for row in re.findall(
            r"^(\| `([\w.-]+)` \|.*)$", (ROOT / "docs/dependencies.md").read_text(), re.MULTILINE
        )
    }
    assert names == set(rows)
    for row, _ in rows.values():
        assert all(cell.strip() for cell in row.split("|")[2:4]), row


# -- examples (the recipes have a file of their own) -----------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_files_load_and_plan(path: Path, unseen: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grpo", str(path), "--dry-run"]) == 0
    assert "\n# model " in capsys.readouterr().out


@pytest.mark.parametrize("path", [*EXAMPLES, *RECIPES], ids=name)
def test_the_command_in_a_files_head_plans(
    path: Path, unseen: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for program, *arguments in commands_of(path.read_text()):
        if program == "lowroll" and arguments[1:] and name(path) in arguments:
            assert main([*arguments, "--dry-run"]) == 0
            assert "\n# model " in capsys.readouterr().out


def test_the_three_files_load() -> None:
    folder = ROOT / "examples/three_files"
    cfg = load_surogate(
        *(folder / f"{part}.yaml" for part in ("train", "infer", "orch")),
        overrides=["rollout.weights=int8"],
    )
    assert (cfg.batch_size, cfg.rollouts_per_example, cfg.rollout.weights) == (128, 16, "int8")
