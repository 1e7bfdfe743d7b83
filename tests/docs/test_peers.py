"""The pages for people who come from other tools, and the page on data: what stands there for
lowroll runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

import lowroll
from lowroll.config import RunConfig, load
from lowroll.envs import make
from lowroll.runs import demo
from tests.fixtures.pages import DOCS, README, ROOT, blocks
from tests.fixtures.roles import forked
from tests.fixtures.runs import TINY

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
    rewards, here = blocks(DOCS / "from_trl.md", "python")
    (folder / "rewards.py").write_text(rewards)
    assert len(here.replace("\n    ", " ").replace("\n)", ")").strip().splitlines()) <= 5
    record = of_python(here, monkeypatch)
    assert 0 < record["reward/data/brief"] <= 1 and "reward/data/right" in record
    assert record["reward/data/tokens"] > 0
    (there,) = blocks(DOCS / "from_trl.md", "python there")
    compile(there, "there", "exec")


@pytest.mark.slow
def test_the_page_for_verl(folder: Path) -> None:
    (rewards,), (here,) = (
        blocks(DOCS / "from_verl.md", "python"),
        blocks(DOCS / "from_verl.md", "yaml"),
    )
    (folder / "rewards.py").write_text(rewards)
    assert len(here.splitlines()) <= 10
    record = of_yaml(here)
    assert "reward/data/compute_score" in record and "eval/data/reward" in record


def test_the_page_for_prime_rl_asks_both_sides_the_same(folder: Path) -> None:
    (here,), (there,) = (
        blocks(DOCS / "from_prime_rl.md", "yaml"),
        blocks(DOCS / "from_prime_rl.md", "toml"),
    )
    ours, theirs = load_text(here), tomllib.loads(there)
    orchestrator = theirs["orchestrator"]
    assert ours.model == str(folder / theirs["model"]["name"])
    assert Path(ours.output_dir) in (Path(theirs["output_dir"]), folder / theirs["output_dir"])
    assert [env.id for env in ours.env] == [env["id"] for env in orchestrator["env"]]
    for key in ("batch_size", "rollouts_per_example"):
        assert getattr(ours, key) == orchestrator[key]
    assert ours.rollout.max_tokens == orchestrator["sampling"]["max_tokens"]
    assert ours.train.max_steps == theirs["max_steps"]
    assert ours.train.tokens_per_microbatch == theirs["seq_len"]
    assert ours.train.learning_rate == theirs["trainer"]["optim"]["lr"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", "local"])
def test_the_page_for_prime_rl(folder: Path, launcher: str) -> None:
    """By the page's own command: in one process, and in three."""
    (here,) = blocks(DOCS / "from_prime_rl.md", "yaml")
    Path("run.yaml").write_text(here)
    small = [f"{key}={value}" for key, value in SMALL.items()]
    words = ["grpo", "run.yaml", *small, f"launcher={launcher}", "device=cpu"]
    with forked(folder / "log", *words, PYTHONPATH=str(ROOT)) as child:
        assert child.wait(timeout=300) == 0, (folder / "log").read_text()
    (record,) = (folder / "outputs/reverse/metrics.jsonl").read_text().splitlines()
    assert "reward/reverse-text/mean" in json.loads(record)


@pytest.mark.slow
def test_the_page_on_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, rewards = blocks(DOCS / "data.md", "python")
    (folder / "rewards.py").write_text(rewards)
    file, mixed = blocks(DOCS / "data.md", "yaml")
    assert of_yaml(file)["reward/data/brief"] > 0
    assert "reward/data/right" in of_python(here, monkeypatch)
    assert [env.name for env in load_text(mixed).env] == ["sums", "reverse-text"]
    row = folder / "rows.jsonl"
    row.write_text("\n\n" + json.dumps({"prompt": "x", "answer": "y"}))
    said = re.search(r"^    rows\.jsonl:3: (.*)$", (DOCS / "data.md").read_text(), re.MULTILINE)
    with pytest.raises(ValueError, match=re.escape(said[1] if said else "?")):
        make("data", args={"path": str(row), "answer": "anwser"})


@pytest.mark.slow
def test_the_readme(folder: Path) -> None:
    """As a script: its function has no other home than that."""
    (here,) = blocks(README, "python")
    small = "max_steps=1, batch_size=8, rollouts_per_example=4, max_tokens=4, score={'workers': 1}"
    here = here.replace("max_steps=40", small)
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
