"""What goes to the hub, its card to the letter, and that a push that fails loses nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

import lowroll
from lowroll.cli.main import main
from lowroll.metrics import trackers
from lowroll.runs import demo, hub
from lowroll.types import RunFailed
from tests.fixtures.runs import TINY, settings, train

CARD = """\
---
library_name: peft
pipeline_tag: text-generation
tags:
- lowroll
- grpo
- lora
---

# first

{said}

## Training

| setting | |
| --- | --- |
| base | model |
| algorithm | grpo |
| correction | {correction} |
| rollouts | int8 weights, dense cache |
| data | reverse-text |
| batch | 8 rollouts, 4 a prompt |
| learning rate | 0.01 |
| LoRA | rank 16, alpha 32 |
| made with | lowroll {version} |

## Last numbers

| metric | |
| --- | --- |
{numbers}

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model")
model = PeftModel.from_pretrained(model, "me/first")
```
"""


class Hub:
    """The hub's client, which keeps what it is given, or fails."""

    pushed: dict[str, bytes]
    made: list[Any]
    error: Exception | None = None

    def __init__(self, **who: Any) -> None:
        assert "token" not in who

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
        if self.error is not None:
            raise self.error
        type(self).made.append((name, private, exist_ok))

    def create_commit(self, name: str, files: list[Any], commit_message: str) -> Any:
        for file in files:
            with file.as_file() as stream:
                self.pushed[file.path_in_repo] = stream.read()
        return SimpleNamespace(repo_url=f"https://hub/{name}")


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    Hub.pushed, Hub.made, Hub.error = {}, [], None


class Told:
    """A tracker that remembers."""

    rows: list[Any] = []

    def __init__(self, run: trackers.Tracked) -> None:
        self.rows.append(("begin", run.step, run.settings["algorithm"]))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, "reward/mean" in metrics))

    def close(self) -> None:
        self.rows.append("close")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, gone on with after the first, with a tracker and a push that fails."""
    folder = tmp_path_factory.mktemp("hub")
    demo.build_model(folder / "model", 0, TINY)
    more = {"track": ["wandb"], "push_to_hub": "me/first"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "HfApi", Hub)
        patch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
        patch.setattr(trackers, "check", lambda names: None)
        told = SimpleNamespace(begin=Told)
        patch.setitem(sys.modules, "lowroll.metrics.trackers.wandb", told)
        Hub.error = OSError("no network")
        tree = settings(
            folder / "model",
            folder / "run",
            **more,
            rollout={"weights": "int8"},
            train={
                "lora": True,
                "max_steps": 2,
                "warmup_steps": 0,
                "lr_scheduler_type": "constant",
            },
        )
        train(tree)
        train({**tree, "ckpt": {**tree["ckpt"], "resume_step": 1}}, resume=True)
        Hub.error = None
    return folder / "run"


def test_a_push_that_fails_loses_nothing_and_says_what_to_type(run: Path) -> None:
    assert (run / "final" / "adapter_model.safetensors").is_file()
    logs = "".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))
    command = f"lowroll export {run} OUT --as adapter --push-to-hub me/first"
    assert logs.count("push_to_hub: me/first: no network") == 2 and logs.count(command) == 2
    assert "hf_secret" not in logs
    assert "hf_secret" not in (run / "config.yaml").read_text()


def test_trackers_follow_a_run_and_its_resumption(run: Path) -> None:
    assert Told.rows == [
        ("begin", 0, "grpo"), (1, True), (2, True), "close", ("begin", 1, "grpo"), (2, True), "close",
    ]  # fmt: skip


def test_an_export_is_pushed_with_its_card(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "out"
    given = ["export", str(run), str(out), "--as", "adapter", "--push-to-hub", "me/first"]
    assert main(given) == 0
    assert "pushed: https://hub/me/first" in capsys.readouterr().out
    assert Hub.made == [("me/first", True, True)]
    names = {"README.md", "adapter_config.json", "adapter_model.safetensors", "adapter_base.json"}
    assert names <= Hub.pushed.keys() and "MANIFEST.json" not in Hub.pushed
    for name in names - {"README.md"}:
        assert Hub.pushed[name] == (out / name).read_bytes()
    card = Hub.pushed["README.md"].decode()
    said = (out / "README.md").read_text().partition("# LoRA adapter\n\n")[2].strip()
    numbers = re.findall(r"^\| step \|[^#]*(?=\n\n## Use)", card, re.MULTILINE)[0]
    assert "| step | 2 |" in numbers and "| reward/mean | " in numbers
    correction = lowroll.config.load(run / "config.yaml").correction
    version = lowroll.__version__
    assert card == CARD.format(said=said, numbers=numbers, correction=correction, version=version)
    assert str(run.parent) not in card.replace(said, "")


def test_a_low_bit_base_beside_an_adapter_is_not_pushed(run: Path) -> None:
    out = run.parent / "rollout"
    given = ["export", str(run), str(out), "--as", "rollout", "--push-to-hub", "me/first"]
    assert main(given) != 0
    assert not Hub.pushed


def test_who_may_not_push_is_told_before_anything(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="is no repository: write ORG/NAME"):
        hub.check("name")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ValueError, match="hf auth login"):
        train(settings(run.parent / "model", tmp_path / "run", push_to_hub="me/first"))
    assert not (tmp_path / "run").exists()
    Hub.error = OSError("full")
    with pytest.raises(RunFailed, match="push_to_hub: me/first: full"):
        hub.push(run / "final", "me/first", run, "adapter")
