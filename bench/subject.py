"""The subject of learning experiments: SmolLM2-135M-Instruct after a short SFT on word problems.

The problems are those of reasoning-gym's `gsm_symbolic`: templates of GSM8K's with other names and
numbers (Mirzadeh et al. 2024, "GSM-Symbolic", arXiv 2410.05229). They are written as GSM8K's rows,
for the environment `gsm8k`. Kept are those with whole numbers up to LARGEST, which a model of this
size can learn to add and multiply, whose worked solution ends in the answer and states no equation
that does not hold. The sets for SFT, for RL and held out have no question in common; they have
templates in common.
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig
from lowroll.model.folder import resolve
from lowroll.runs.sft import warm_start

SEED = 1
SIZES = {"test": 2048, "sft": 4096, "train": 8192}  # written in this order
CHUNK = 4096  # problems that are made at once
LARGEST = 100
NUMBER = re.compile(r"\d+(?:\.\d+)?")
EQUATION = re.compile(r"((?:\d+\s*[-+*/]\s*)+\d+)\s*=\s*\$?(\d+)")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def problems() -> Iterator[dict[str, str]]:
    """Yield different problems as {question, answer}, always the same ones."""
    import reasoning_gym

    seen: set[str] = set()
    for chunk in range(1000):
        for item in reasoning_gym.create_dataset("gsm_symbolic", size=CHUNK, seed=SEED + chunk):
            question, worked = item["question"], item["metadata"]["answer_cot"]
            if (
                question not in seen
                and is_small(question + worked)
                and is_sound(worked, item["answer"])
            ):
                seen.add(question)
                yield {"question": question, "answer": worked}


def is_small(text: str) -> bool:
    """Return whether all numbers of a text are whole and at most LARGEST."""
    return all(number.isdigit() and int(number) <= LARGEST for number in NUMBER.findall(text))


def is_sound(worked: str, answer: str) -> bool:
    """Return whether a worked solution ends in the answer, and each of its equations holds."""
    ends = re.search(r"#### (\S+)\s*$", worked)
    return (
        ends is not None
        and ends[1] == answer
        and all(
            value(ast.parse(left, mode="eval").body) == int(right)
            for left, right in EQUATION.findall(worked)
        )
    )


def value(tree: ast.expr) -> Fraction:
    """Return the value of sums and products of whole numbers; -1, which no solution states, where one
    divides by 0."""
    if isinstance(tree, ast.Constant):
        return Fraction(str(tree.value))
    assert isinstance(tree, ast.BinOp)
    left, right = value(tree.left), value(tree.right)
    if isinstance(tree.op, ast.Div) and right == 0:
        return Fraction(-1)
    return Fraction(OPERATIONS[type(tree.op)](left, right))


def write_problems(folder: Path, sizes: dict[str, int]) -> None:
    """Write the sets as `folder/NAME.jsonl`, unless they are there."""
    paths = {name: folder / f"{name}.jsonl" for name in sizes}
    if not all(path.is_file() for path in paths.values()):
        source = problems()
        for name, path in paths.items():
            rows = map(json.dumps, islice(source, sizes[name]))
            path.write_text("".join(f"{row}\n" for row in rows))


def environment(folder: Path, train: str = "train") -> list[dict[str, Any]]:
    """Return the section `env` of a run on the problems in `folder`."""
    paths = {"path": str(folder / f"{train}.jsonl"), "test_path": str(folder / "test.jsonl")}
    return [{"id": "gsm8k", "args": paths}]


def warm(cfg: RunConfig, source: str, folder: Path) -> dict[str, Any]:
    """Write the model `source`, a folder or a name, after the supervised steps of `cfg`, as `folder/model`; return its
    last loss and its digest. `cfg.env` has the demonstrations."""
    loss = warm_start(cfg, resolve(source), folder / "model")["sft/loss"]
    return {
        "sft_steps": cfg.sft.steps,
        "sft_loss": round(loss, 4),
        "sha256": digest(folder / "model"),
    }


def digest(model: Path) -> str:
    """Return the first 16 hex digits of the SHA-256 of a model folder's safetensors files, in order of
    their names. ValueError without one."""
    found, paths = hashlib.sha256(), sorted(model.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{model}: there is no safetensors file")
    for path in paths:
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
