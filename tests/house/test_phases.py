"""The model knows no phase: nothing in its room asks whether gradients are recorded."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[2] / "lowroll" / "model"
QUESTIONS = {"is_grad_enabled", "is_inference_mode_enabled", "is_inference", "training"}


def questions(source: str) -> list[str]:
    """Names by which code asks what it is run for, with their lines."""
    nodes = ast.walk(ast.parse(source))
    names = [(n.lineno, n.attr) for n in nodes if isinstance(n, ast.Attribute)]
    nodes = ast.walk(ast.parse(source))
    names += [(n.lineno, n.id) for n in nodes if isinstance(n, ast.Name)]
    return [f"line {line}: {name}" for line, name in names if name in QUESTIONS]


def test_no_layer_asks_for_its_phase() -> None:
    found = {path.name: questions(path.read_text()) for path in ROOM.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ["torch.is_grad_enabled()", "is_grad_enabled()", "if self.training: pass"]
)
def test_the_question_is_found(line: str) -> None:
    assert questions(line)
