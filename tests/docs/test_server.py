"""The requests of docs/server.md and of the README, as they stand there."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowroll import Engine
from tests.fixtures.http import serving
from tests.fixtures.pages import ADDRESS, DOCS, README, blocks, curls, run_curl

PAGE = DOCS / "server.md"


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    engine = Engine(model, weights="nvfp4", device="cpu", cache_tokens=8192)
    with serving(engine, tokenizer=engine.tokenizer, name="demo") as found:
        yield found


@pytest.mark.slow
def test_the_python_of_the_page_runs(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for code in blocks(PAGE, "python"):
        assert ADDRESS in code
        (tmp_path / "block.py").write_text(code.replace(ADDRESS, url))
        runpy.run_path(str(tmp_path / "block.py"))
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("[0, 1, 2, 3] ")


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@needs_curl
def test_the_curls_of_the_page_run(url: str) -> None:
    commands = [command for block in blocks(PAGE, "bash") for command in curls(block)]
    assert len(commands) >= 9
    answers = [run_curl(command, url) for command in commands]
    *right, wrong = answers
    assert all("error" not in answer for answer in right)
    assert json.dumps(wrong) in PAGE.read_text()


@needs_curl
def test_the_request_of_the_readme_runs(url: str) -> None:
    (command,) = re.findall(
        r"^    (curl .*?)(?:\n\n|\Z)", README.read_text(), re.DOTALL | re.MULTILINE
    )
    (choice,) = run_curl(command, url)["choices"]
    assert choice["message"]["role"] == "assistant"
