"""An environment class that stands in a notebook's cell trains like one of a file."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import lowroll
from lowroll.envs import make
from lowroll.envs.notebook_files import as_file
from lowroll.runs import demo
from tests.fixtures.runs import TINY, settings

TOOLS = '''
import json
import re as regular
import string
from dataclasses import dataclass
from random import Random
from typing import Any
from lowroll.envs import GeneratedEnvironment
from lowroll.types import Prompt, Score
LETTERS, WORD = {"vowels": ("a", "e")}, regular.compile("[a-e]+", regular.I)
client = open(__import__("os").devnull)
prompt = client                    # a global that the class only has as a local name

@dataclass
class Task:
    """One task."""
    word: str

def turned(word: str) -> str:
    return word[::-1] if WORD.match(word) else turned_again(word)

def turned_again(word):
    return turned("a" + word)[1:]
'''
CELL = '''
class Turn(GeneratedEnvironment):
    """Write it backwards."""
    length = 3

    def __init__(self, *, name: str, seed: int = 0, more: int = 0) -> None:
        super().__init__(name=name, seed=seed, template="{text}")
        self.length += more

    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        task = Task("".join(rng.choice("abcde") for _ in range(self.length)))
        return task.word, {"answer": turned(task.word), "vowels": len(LETTERS["vowels"])}

    def score(self, prompt: Prompt, text: str) -> float:
        return text.startswith(prompt.info["answer"][0])

    def gold(self, prompt: Prompt) -> str:
        return prompt.info["answer"]

    def perturbed(self, prompt: Prompt) -> str:
        return "x" + json.dumps(prompt.info["answer"])
'''


@pytest.fixture()
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the text of cells as IPython does: in the main module, with the text kept for
    tracebacks."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))

    def run(*cells: str, keep: bool = True) -> dict[str, Any]:
        for number, text in enumerate(cells):
            name = f"<cell {number}>"
            if keep:
                linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
            exec(compile(text, name, "exec", dont_inherit=True), vars(main))  # noqa: S102
        return vars(main)

    return run


@pytest.mark.slow
def test_a_class_of_a_cell_trains_and_its_text_is_in_the_run_folder(
    notebook: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Turn = notebook(TOOLS, CELL)["Turn"]
    model = demo.build_model(tmp_path / "model", 0, TINY)
    tree = settings(
        model, tmp_path / "run", train={"max_steps": 2, "warmup_steps": 0}, env=[{"id": Turn}]
    )
    result = lowroll.run(tree, {"env.0.args.more": 1})
    assert [record["step"] for record in result.records] == [
        1,
        2,
    ] and "reward/Turn/mean" in result.records[0]
    (file,) = (tmp_path / "run" / "environments").glob("*.py")
    assert f"id: {file}:Turn\n" in (tmp_path / "run" / "config.yaml").read_text()
    env = make(f"{file}:Turn", name="Turn", args={"more": 1})
    assert env.validate(8).ok and env.prompt(0) == Turn(name="Turn", more=1).prompt(0)
    again = lowroll.run(tmp_path / "run" / "config.yaml", {"train.max_steps": 2}, resume=True)
    assert len(again.records) == 2
    assert as_file(Turn, tmp_path / "run" / "environments") == (file, file.read_text())
    kept = sorted(tmp_path.rglob("*"))
    Later = notebook(TOOLS, CELL.replace("length = 3", "length = 4"))["Turn"]
    with pytest.raises(ValueError, match="already holds a run"):
        lowroll.run({**tree, "env": [{"id": Later}]})
    assert sorted(tmp_path.rglob("*")) == kept  # a run that is refused has written nothing
    assert (
        len(lowroll.run(tree, {"env.0.args.more": 1, "train.max_steps": 1}, overwrite=True).records)
        == 1
    )
    assert "no run made them" not in caplog.text and file.exists()  # it is the new run's too
    cell = "from __future__ import annotations\n" + CELL.replace("-> float", "-> NotYetKnown")
    later = notebook(TOOLS, cell)["Turn"]
    path, text = as_file(later, tmp_path)
    path.write_text(text)
    assert make(f"{path}:Turn", name="Turn").validate(2).ok


def test_what_has_no_text_is_refused_by_name(notebook: Any, tmp_path: Path) -> None:
    known = notebook(
        TOOLS, CELL.replace("def gold", "def asks(self): return client.read()\n\n    def gold")
    )
    with pytest.raises(
        ValueError,
        match=r"^Turn uses client, a TextIOWrapper of the notebook, which has no text to "
        r"copy: make it in __init__",
    ):
        as_file(known["Turn"], tmp_path)
    linecache.cache.clear()
    with pytest.raises(ValueError, match="^the text of Other cannot be found"):
        as_file(
            notebook(TOOLS, CELL.replace("class Turn", "class Other"), keep=False)["Other"],
            tmp_path,
        )
    assert not list(tmp_path.iterdir())
    path, text = as_file(type(make("reverse-text")), tmp_path)
    assert path.match("lowroll/envs/reverse_text.py") and text is None
