"""The commands of docs/roles.md, as they stand there but for the ports and sizes of a test: one
command, by hand, and two machines, which are two names of this one."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from lowroll.metrics.record import read
from lowroll.runs.roles.local import reserve_port
from tests.fixtures.roles import DEADLINE_S, heart, outcome, started, write
from tests.fixtures.runs import settings, train

PAGE = (Path(__file__).parents[2] / "docs/roles.md").read_text()
STEPS = {"max_steps": 2, "learning_rate": 1e-2, "minibatches": 2}
TOKENS = {"LOWROLL_TOKEN": "a" * 32, "LOWROLL_ADMIN_TOKEN": "b" * 32}


def commands(title: str) -> list[str]:
    """The lines of a section that stand apart as commands, in order."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^    (\S.*)$", section, re.MULTILINE)


def follow(folder: Path, lines: list[str], **env: str) -> None:
    """Each command in a terminal of its own, until the orchestrator and the trainer have ended."""
    with ExitStack() as stack:
        ending = []
        for number, line in enumerate(lines):
            name, *words = shlex.split(line)
            assert name == "lowroll"
            log = folder / f"{number}-{words[0]}.log"
            child = stack.enter_context(started(log, *words, **env))
            if words[0] != "serve":
                ending.append((child, log))
        for child, log in ending:
            assert child.wait(timeout=DEADLINE_S) == 0, log.read_text()
    run = folder / "run"
    assert [record["step"] for record in read(run)] == [1, 2]
    assert (run / "final" / "model.safetensors").is_file()


@pytest.fixture
def home(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where run.yaml lies and the commands are given."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for name in TOKENS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with reserve_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        tree = settings(model, tmp_path / "run", train=STEPS) | {"serve": {"port": port}}
        write(tree, tmp_path / "run.yaml")
        yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("title", ["One command", "By hand"])
def test_the_commands_on_one_machine_run(home: Path, title: str) -> None:
    lines = commands(title)
    assert lines
    follow(home, lines)


@pytest.mark.slow
def test_two_machines_by_hand(home: Path) -> None:
    """The engine listens on all addresses; the other machine calls it by another name."""
    exports, *lines = [line for line in commands("Two machines")]
    *lines, shown = [line for line in lines if not line.startswith("export ")]
    assert shown == "lowroll serve run.yaml serve.host=10.0.0.2"
    assert exports.split("#")[0].split() == ["export", *(f"{name}=..." for name in TOKENS)]
    assert [line.split()[1] for line in lines] == ["serve", "orchestrate", "train"]
    port = re.search(r"port: (\d+)", (home / "run.yaml").read_text())
    assert port and "http://gpu-machine:8000" in lines[1]
    lines[1] = lines[1].replace("gpu-machine:8000", f"127.0.0.2:{port[1]}")
    follow(home, lines, **TOKENS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [0, 1])
def test_the_commands_of_several_engines_run(home: Path, number: int) -> None:
    """Both engines draw; exact ones draw what one process does."""
    lines = commands("Several engines")
    assert len(lines) == 2
    follow(home, [lines[number]])
    assert read(home / "run")[-1]["perf/engines_healthy"] == 2
    assert all(heart(home / "run", f"engine-{i}")["phase"] == "ended" for i in range(2))
    if number:
        tree = yaml.safe_load((home / "run.yaml").read_text())
        tree["rollout"]["exact"] = True
        alone = train(tree | {"output_dir": str(home / "alone")}).folder
        assert outcome(alone).items() <= outcome(home / "run").items()
