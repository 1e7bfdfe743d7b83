"""What somebody meets first: the README's commands one after the other, the notebook, and the files
with which a repository says how it is built, tested and written to."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import lowroll
from tests.fixtures.pages import DOCS, README, ROOT, after_make_demo, blocks, name
from tests.fixtures.roles import forked

TREES = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
]


def tree(path: Path) -> dict[str, Any]:
    loaded = yaml.safe_load(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture()
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder after `make demo`, with a tiny model."""
    monkeypatch.chdir(tmp_path)
    return after_make_demo(tmp_path, batch_size=16)


# -- the README ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_readmes_second_block_runs_after_the_first(clone: Path) -> None:
    """Its commands in their order, on the model that the first block makes; with fewer and shorter
    steps."""
    (run,) = blocks(README, "yaml")
    small = {"max_steps: 40": "max_steps: 2", "batch_size: 64": "batch_size: 16", "64}": "4}"}
    for whole, less in small.items():
        assert whole in run
        run = run.replace(whole, less)
    (clone / "run.yaml").write_text(run + "score: {workers: 1}\n")
    after = README.read_text().partition(run[:5])[2].partition("```\n")[2].partition("SmolLM2")[0]
    commands = re.findall(r"^    (lowroll .*?)(?:\s+#.*)?$", after, re.MULTILINE)
    assert [command.split()[1] for command in commands] == [
        *["grpo"] * 3,
        "report",
        "diagnose",
    ]
    for command in commands:
        words = shlex.split(command.replace("train.max_steps=20", "train.max_steps=1"))[1:]
        log = clone / "log"
        with forked(log, *words, PYTHONPATH=str(ROOT)) as child:
            assert child.wait(timeout=300) == 0, log.read_text()
    steps = (clone / "outputs/first/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2]


# -- the notebook ----------------------------------------------------------------------------------


def cells() -> list[str]:
    """The code of the notebook."""
    book = json.loads((ROOT / "examples/tour.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    return ["".join(cell["source"]) for cell in code]


def test_the_notebook_is_the_tour() -> None:
    (tour,) = blocks(DOCS / "python.md", "python")
    assert "\n\n".join(cells()[1:]) + "\n" == tour


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder in which it lies, as a notebook starts there."""
    (clone / "examples").mkdir()
    monkeypatch.chdir(clone / "examples")
    left: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        exec(compile(cell, f"cell {number}", "exec"), left)  # noqa: S102
    assert left["first"].behavior.weights == "int8" and left["gap"]["mismatch/kl_k3"] > 0
    assert "RunResult('outputs/tour', step 5, finished)" in capsys.readouterr().out


# -- files of the repository -----------------------------------------------------------------------


@pytest.mark.parametrize("path", TREES, ids=name)
def test_the_yaml_files_of_the_repository_can_be_read(path: Path) -> None:
    assert tree(path)


def test_the_workflow_runs_what_a_change_must_pass() -> None:
    """Nothing but `.ci/run`, on the machine as it is and with fewer instructions."""
    job = tree(ROOT / ".github/workflows/tests.yml")["jobs"]["tests"]
    steps = [step["run"] for step in job["steps"] if "run" in step]
    assert steps[-1] == "env ${{ matrix.cpu }} .ci/run"
    assert [step.split()[:2] for step in steps[:-1]] == [["sudo", "sysctl"]]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert (ROOT / ".ci/run").read_text().splitlines()[-2:] == ["make test", "make lint"]
    cpus = job["strategy"]["matrix"]["cpu"]
    assert cpus[0] == ""
    for cpu in cpus[1:]:
        assert [word.partition("=")[0] for word in cpu.split()] == [
            "ATEN_CPU_CAPABILITY",
            "ONEDNN_MAX_CPU_ISA",
        ]
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "setup" in str(step))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={python}"


def test_the_hooks_before_a_commit_are_the_lint() -> None:
    """The programs of .venv, which have the versions of constraints.txt."""
    (repo,) = tree(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    hooks = [re.sub(r" --force-exclude$", "", hook["entry"]) for hook in repo["hooks"]]
    lint = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint and hooks == [line.strip().removesuffix(" .") for line in lint[1].splitlines()]
    pins = (ROOT / "constraints.txt").read_text()
    assert all(f"\n{program}==" in pins for program in ("ruff", "mypy"))


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=name)
def test_a_form_of_an_issue_has_what_a_form_needs(path: Path) -> None:
    form = tree(path)
    if path.stem == "config":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_image_is_built_from_files_that_are_there() -> None:
    """Every copied file exists and passes .dockerignore, and the build finds what it reads."""
    text = (ROOT / "Dockerfile").read_text()
    copied = [
        source
        for words in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for source in words.split()[:-1]
    ]
    let = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert sorted(copied) == sorted(let) and all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml"} <= set(copied)
    oldest = project["requires-python"].removeprefix(">=")
    assert f"FROM python:{oldest}-slim" in text and "RUN lowroll doctor" in text


# -- a release -------------------------------------------------------------------------------------


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    """In three places alike; `## Unreleased` may stand before it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heads = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [head for head in heads if head != "Unreleased"]
    assert "Unreleased" not in heads[1:]
    version, date = released[0].split(", ")
    assert version == project["version"] == lowroll.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
