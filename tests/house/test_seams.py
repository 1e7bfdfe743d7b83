"""The seam in front of the engine: outside its room nobody reads what lies behind the protocol."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "lowroll"
FILES = {
    name: path.read_text()
    for path in sorted(ROOT.rglob("*.py"))
    if not (name := path.relative_to(ROOT).as_posix()).startswith("engine/")
}
INSIDE = {"format", "runner", "pool", "model", "scheduler", "spec", "large_batch_model", "receiver"}
DOORS = {"base", "native", "remote"}  # files of the room that others may import


def reads(source: str) -> Iterator[str]:
    """`engine.model`, `self.engine._x` and the like."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
        if name.lstrip("_") == "engine" and (node.attr in INSIDE or node.attr.startswith("_")):
            yield f"line {node.lineno}: engine.{node.attr}"


def imported(source: str) -> set[str]:
    """The files of the engine's room that a file imports, and the names from `lowroll.engine`."""
    lines = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    rooms = [(node.module or "").split(".") for node in lines]
    files = {room[2] for room in rooms if room[:2] == ["lowroll", "engine"] and len(room) > 2}
    names = {n.name for node in lines if node.module == "lowroll.engine" for n in node.names}
    return files | names


def test_nobody_reads_the_inside_of_an_engine() -> None:
    found = [f"{file}, {read}" for file, source in FILES.items() for read in reads(source)]
    assert found == []
    inside = {file: imported(source) - DOORS for file, source in FILES.items()}
    assert {file: names for file, names in inside.items() if names} == {}


def test_a_look_inside_is_seen() -> None:
    source = "engine.stats(); self.engine.model.device; engine._tokens; engines.model; made.pool"
    assert set(reads(source)) == {"line 1: engine.model", "line 1: engine._tokens"}
    assert imported("from lowroll.engine.runner import Runner") == {"runner"}
    assert imported("from lowroll.engine import decoder, native") == {"decoder", "native"}
