"""A short README, an index of every page, a log whose index is whole, paths that exist, and versions
that fit."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.fixtures.pages import README, ROOT, blocks, name

INDEX = ROOT / "docs/index.md"
AT_THE_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [
    *(ROOT / name for name in ("README.md", *AT_THE_ROOT)),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LOGS = sorted((ROOT / "docs/log").glob("*.md"))
MOST_WORDS = 1200


# -- the README ------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS
    (run,) = blocks(README, "yaml")
    assert len(run.splitlines()) <= 10


# -- the index -------------------------------------------------------------------------------------


def listed() -> list[Path]:
    """The pages of the index's tables, in order."""
    rows = re.findall(r"^\| \[[^\]]+\]\(([^)]+)\) \| (.+) \|$", INDEX.read_text(), re.MULTILINE)
    assert all(text.strip() for _, text in rows)
    return [(INDEX.parent / target).resolve() for target, _ in rows]


def test_every_page_stands_once_in_the_index() -> None:
    wanted = [path for path in PAGES if path not in (INDEX, ROOT / "README.md")]
    named = [*listed(), ROOT / "SECURITY.md"]  # beside docs/security.md
    assert "](../SECURITY.md)" in INDEX.read_text()
    assert sorted(set(named) - {ROOT / "recipes/README.md"}) == sorted(wanted)
    assert len(named) == len(set(named))


# -- the log ---------------------------------------------------------------------------------------


def entries(text: str) -> list[tuple[str, str]]:
    """(date, title) of a page's entries."""
    return re.findall(r"^## (\d{4}-\d\d-\d\d): (.+)$", text, re.MULTILINE)


def test_every_page_stands_once_in_the_site() -> None:
    def pages(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for inner in node.values() if isinstance(node, dict) else node:
                yield from pages(inner)

    told = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    named = ["README", "CHANGELOG", "CONTRIBUTING", "SECURITY", "recipes/README"]
    there = [f"{name}.md" for name in named]
    there += [str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(told) == sorted(there)


def test_the_index_of_the_log_has_every_entry_in_its_order() -> None:
    index = (ROOT / "docs/LOG.md").read_text()
    rows = re.findall(r"^\| ([\d-]{10}) \| \[(.+)\]\(log/(\w+)\.md#(\S+)\) \|", index, re.MULTILINE)
    for log in LOGS:
        dated = entries(log.read_text())
        heads = re.findall(r"^## .*$", log.read_text(), re.MULTILINE)
        assert 0 < len(heads) == len(dated), f"{name(log)}: an entry begins with its date"
        assert dated == sorted(dated, key=lambda entry: entry[0]), f"{name(log)}: newest last"
        assert dated == [(date, title) for date, title, file, _ in rows if file == log.stem]
    assert {file for _, _, file, _ in rows} == {log.stem for log in LOGS}


# -- paths and versions ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "log"], ids=name)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    named = set(
        re.findall(r"`((?:lowroll|tests|bench|docs|recipes|examples)/[\w./-]+)`", page.read_text())
    )
    missing = {path for path in named if not (ROOT / path).exists()}
    assert not missing, f"{name(page)} names {sorted(missing)}"


@pytest.mark.parametrize(
    "page",
    [ROOT / "CONTRIBUTING.md", *(page for page in PAGES[4:] if page.parent.name != "log")],
    ids=name,
)
def test_the_modules_that_a_page_runs_exist(page: Path) -> None:
    for module in re.findall(r"python -m ((?:tests|bench)\.\w+)", page.read_text()):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"{name(page)}: {module}"


def pinned() -> dict[str, str]:
    """The versions of constraints.txt, by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    assert all(version for _, _, version in pins), "a line is name==version"
    return {canonicalize_name(package): version for package, _, version in pins}


def test_the_versions_of_the_constraints_fit_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["envs"], *extras["test"]]
    for requirement in map(Requirement, wanted):
        if requirement.name == "triton":  # CUDA builds of torch bring their own
            assert "triton" not in pinned()
            continue
        version = pinned()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version}"


def test_setup_takes_these_versions() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "VERSIONS := -c constraints.txt\n" in makefile
    assert (
        len(re.findall(r"^\t\.venv/bin/pip install .*\$\(VERSIONS\)", makefile, re.MULTILINE)) == 3
    )
