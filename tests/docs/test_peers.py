"""The pages for people who come from other tools, and the page on data: what stands there for
lowroll runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

import lowroll
from lowroll.config import RunConfig, load
from lowroll.envs import make
from lowroll.runs import demo
from tests.fixtures.runs import TINY

ROOT = Path(__file__).parents[2]
SMALL = {
    "batch_size": 8,
    "rollouts_per_example": 4,
    "rollout.max_tokens": 4,
    "train.max_steps": 1,
    "score.workers": 1,
    "eval.num_examples": 1,
}
CHAT = [
    {"prompt": [{"role": "user", "content": f"{i} + {i}?"}], "answer": str(2 * i)}
    for i in range(12)
]
VERL = [
    {
        "data_source": "sums",
        "prompt": row["prompt"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": i},
    }
    for i, row in enumerate(CHAT)
]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture()
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where somebody works who has the demo's model and these data."""
    demo.build_model(tmp_path / "outputs/demo/model", 0, TINY)
    for name, rows in (("gsm8k", CHAT), ("sums", CHAT), ("train", VERL), ("test", VERL[:2])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    return tmp_path


def of_yaml(text: str) -> dict[str, Any]:
    Path("run.yaml").write_text(text)
    chosen = load("run.yaml")
    eval_too = {} if chosen.eval.interval is None else {"eval.interval": 1}
    return lowroll.run("run.yaml", SMALL | eval_too, overwrite=True).metrics


def of_python(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a block, with the call's numbers made small."""
    whole = lowroll.train
    flat = {key.rpartition(".")[2]: SMALL[key] for key in SMALL if "num_examples" not in key}
    more = {k: v for k, v in flat.items() if k != "workers"} | {"score": {"workers": 1}}
    monkeypatch.setattr(
        lowroll, "train", lambda *a, **k: whole(*a, **{**k, **more, "overwrite": True})
    )
    script = Path("block.py")
    script.write_text(text)
    known: dict[str, Any] = {"__name__": "block"}
    exec(compile(text, str(script), "exec"), known)  # noqa: S102
    return known["result"].metrics


@pytest.mark.slow
def test_the_page_for_trl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards, here = blocks("from_trl.md", "python")
    (folder / "rewards.py").write_text(rewards)
    assert len(here.replace("\n    ", " ").replace("\n)", ")").strip().splitlines()) <= 5
    record = of_python(here, monkeypatch)
    assert 0 < record["reward/data/brief"] <= 1 and "reward/data/right" in record
    assert record["reward/data/tokens"] > 0
    (there,) = blocks("from_trl.md", "python there")
    compile(there, "there", "exec")


@pytest.mark.slow
def test_the_page_for_verl(folder: Path) -> None:
    (rewards,), (here,) = blocks("from_verl.md", "python"), blocks("from_verl.md", "yaml")
    (folder / "rewards.py").write_text(rewards)
    assert len(here.splitlines()) <= 10
    record = of_yaml(here)
    assert "reward/data/compute_score" in record and "eval/data/reward" in record


@pytest.mark.slow
def test_the_page_for_prime_rl(folder: Path) -> None:
    (here,) = blocks("from_prime_rl.md", "yaml")
    assert "reward/reverse-text/mean" in of_yaml(here)


@pytest.mark.slow
def test_the_page_on_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, rewards = blocks("data.md", "python")
    (folder / "rewards.py").write_text(rewards)
    file, mixed = blocks("data.md", "yaml")
    assert of_yaml(file)["reward/data/brief"] > 0
    assert "reward/data/right" in of_python(here, monkeypatch)
    assert [env.name for env in load_text(mixed).env] == ["sums", "reverse-text"]
    row = folder / "rows.jsonl"
    row.write_text("\n\n" + json.dumps({"prompt": "x", "answer": "y"}))
    said = re.search(
        r"^    rows\.jsonl:3: (.*)$", (ROOT / "docs/data.md").read_text(), re.MULTILINE
    )
    with pytest.raises(ValueError, match=re.escape(said[1] if said else "?")):
        make("data", args={"path": str(row), "answer": "anwser"})


@pytest.mark.slow
def test_the_readme(folder: Path) -> None:
    """As a script: its function has no other home than that."""
    (here,) = blocks("../README.md", "python")
    rows = "".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8))
    (folder / "rows.jsonl").write_text(rows)
    small = "max_steps=1, batch_size=8, rollouts_per_example=4, max_tokens=4, score={'workers': 1}"
    here = here.replace("max_steps=40", small).replace("Qwen/Qwen3-0.6B", "outputs/demo/model")
    (folder / "script.py").write_text(here)
    subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        check=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    record = json.loads((folder / "outputs/run/metrics.jsonl").read_text())
    assert 0 < record["reward/data/brief"] <= 1


def load_text(text: str) -> RunConfig:
    Path("mixed.yaml").write_text(text)
    return load("mixed.yaml")
