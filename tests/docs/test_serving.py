"""The commands of docs/server.md on starting and control, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowroll.model import hf
from lowroll.server.app import CONTROL, PUBLIC, WEIGHTS
from lowroll.server.limits import ServerLimits
from lowroll.server.metrics import Metrics
from tests.fixtures.pages import DOCS, ROOT, blocks, curls, run_curl

PAGE = (DOCS / "server.md").read_text()
TOKEN = "a-token-that-is-long-enough"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_control_of_the_page_runs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWROLL_ADMIN", TOKEN)
    shutil.copytree(model, "outputs/demo/model")
    hf.save(hf.load(model), Path("outputs/versions/step_7"))
    first, *rest = blocks(DOCS / "server.md", "sh")
    _, *words = shlex.split(first)
    child = subprocess.Popen(
        [sys.executable, "-m", "lowroll", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().split()[-1].removesuffix("/v1")
        answers = [run_curl(command, url) for command in curls("".join(rest))]
    finally:
        child.kill()
        child.wait(timeout=60)
    update, held, *others = answers
    assert update["policy"][0]["version"] == 7 and held["available"] == ["step_7"]
    assert others == [
        {"status": "paused", "mode": "keep"},
        {"is_paused": True},
        {"status": "resumed"},
        {"aborted": 0},
        {"success": True},
    ]


def test_the_page_names_every_route_and_metric() -> None:
    for _, path in {**PUBLIC, **CONTROL, **WEIGHTS}:
        assert path in PAGE, path
    counted = {metric.name for metric in Metrics().registry.collect()}
    named = set(re.findall(r"`(lowroll_\w+)[{`]", PAGE))
    assert {name.removesuffix("_total").removesuffix("_info") for name in named} == counted


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    limits = ServerLimits()
    table = PAGE.partition("## Limits")[2].partition("\n\nA body")[0]
    for said in (
        f"{limits.body >> 20} MB",
        f"{limits.depth} lists and objects",
        f"{limits.headers >> 10} KB",
        f"{limits.n} (`--max-n`), {limits.prompts} (`--max-prompts`)",
        f"{limits.requests:,} (`--max-requests`)",
        f"{limits.connections:,}",
        f"{limits.head_s:g} s, {limits.body_s:g} s",
        f"| {limits.write_s:g} s |",
    ):
        assert said in table, said
