"""A role that was started by hand: one file alone gives what it needs, and all three agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lowroll.config import ConfigError, RunConfig
from lowroll.config.process_checks import one_process_notes
from lowroll.config.surogate.read import load_surogate
from lowroll.config.surogate.roles import GIVEN, NotThereYet, load_role
from tests.fixtures.quick_start import INFER, ORCH, TRAIN


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("train", TRAIN), ("infer", INFER), ("orch", ORCH)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def begun(cfg: RunConfig) -> Path:
    """What an orchestrator leaves."""
    assert cfg.given is not None
    place = Path(cfg.output_dir) / GIVEN
    place.parent.mkdir(parents=True)
    place.write_text(cfg.given)
    return Path(cfg.output_dir)


def tree(cfg: RunConfig) -> Any:
    found = yaml.safe_load(cfg.dump())
    found["output_dir"] = str(Path(found["output_dir"]).absolute())
    return found


def test_the_quick_start_by_hand() -> None:
    engine = load_role("serve", "infer.yaml")
    assert (engine.model, engine.train.lora, engine.train.lora_rank) == (
        "Qwen/Qwen3-0.6B",
        True,
        32,
    )
    assert (engine.serve.host, engine.serve.port, engine.rollout.weights) == (
        "127.0.0.1",
        8000,
        "dense",
    )
    orchestrator = load_role("orchestrate", "orch.yaml")
    assert (orchestrator.batch_size, orchestrator.rollout.max_tokens, orchestrator.seed) == (
        128,
        128,
        42,
    )
    assert orchestrator.client.base_url == ("http://localhost:8000/v1",)
    assert (orchestrator.train.lora, orchestrator.asynchrony.max_async_level) == (True, 1)
    with pytest.raises(NotThereYet, match=r"no orchestrator has begun a run in outputs or in"):
        load_role("train", "train.yaml")
    begun(orchestrator)
    trainer = load_role("train", "train.yaml")
    whole = load_surogate("train.yaml", None, "orch.yaml")
    assert tree(trainer) == tree(whole)
    assert trainer.train.forward == "fp8" and Path(trainer.output_dir) == Path(
        "outputs/run_default"
    )


def test_notes_of_one_process_are_not_a_roles() -> None:
    assert not [note for note in load_role("orchestrate", "orch.yaml").notes if "process" in note]
    (note,) = one_process_notes(load_surogate("train.yaml", None, "orch.yaml"))
    assert note.startswith("asynchrony.max_async_level: 1 has no effect: one process")


def test_what_the_orchestrator_was_given_reaches_the_trainer(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "task.py").write_text("")
    (here / "mine" / "orch.yaml").write_text(
        ORCH.replace("id: reverse-text", "id: task.py:Task")
        + "eval: {env: {id: task.py:Task}}\nbuffer: {env_ratios: [2]}\n"
        "advantage: {type: custom, import_path: 'task.py:f'}\n"
    )
    orchestrator = load_role(
        "orchestrate", "mine/orch.yaml", ["batch_size=64", "output_dir=o/run_a"]
    )
    begun(orchestrator)
    trainer = load_role("train", "train.yaml", {"output_dir": "o", "train.learning_rate": 1e-3})
    assert (trainer.batch_size, trainer.train.learning_rate) == (64, 1e-3)
    assert trainer.env == orchestrator.env and trainer.eval == orchestrator.eval
    assert trainer.env[0].id == str(here / "mine/task.py:Task") and trainer.env[0].weight == 2
    assert trainer.advantage_function == orchestrator.advantage_function
    assert load_role("train", "train.yaml", ["output_dir=o/run_a"]).batch_size == 64


def test_several_runs_are_named() -> None:
    for name in ("a", "b"):
        begun(load_role("orchestrate", "orch.yaml", [f"output_dir=outputs/run_{name}"]))
    told = r"^output_dir: outputs holds several runs; name one of outputs/run_a, outputs/run_b$"
    with pytest.raises(ConfigError, match=told):
        load_role("train", "train.yaml")
    found = load_role("train", "train.yaml", ["output_dir=outputs/run_b"])
    assert found.output_dir == "outputs/run_b"


def test_files_that_disagree(here: Path) -> None:
    begun(load_role("orchestrate", "orch.yaml"))
    (here / "train.yaml").write_text(TRAIN.replace("lora_rank: 16", "lora_rank: 8"))
    with pytest.raises(ConfigError) as error:
        load_role("train", "train.yaml")
    (line,) = str(error.value).splitlines()
    assert line.startswith("outputs/run_default/orchestrator/given.yaml:")
    assert line.endswith("model.lora_rank: 16 disagrees with train.yaml:18: lora_rank: 8")


def test_lowrolls_own_file_is_every_roles(here: Path) -> None:
    (here / "run.yaml").write_text("model: m\nenv: [{id: reverse-text}]\nbatch_size: 32\n")
    found = [load_role(role, "run.yaml") for role in ("serve", "orchestrate", "train")]
    assert {cfg.dump() for cfg in found} == {found[0].dump()} and found[1].given is None
    assert found[0].batch_size == 32
    three = {
        name: yaml.safe_load((here / f"{name}.yaml").read_text())
        for name in ("train", "infer", "orch")
    }
    (here / "one.yaml").write_text(yaml.safe_dump(three))
    found = [load_role(role, "one.yaml") for role in ("serve", "orchestrate", "train")]
    assert {cfg.dump() for cfg in found} == {load_surogate(*map("{}.yaml".format, three)).dump()}


@pytest.mark.parametrize(
    ("role", "text", "told"),
    [
        ("serve", "model: m\n", "f.yaml: could be lowroll's run.yaml or the document's infer.yaml"),
        ("train", "model: m\noutput_dir: o\n", "f.yaml: could be lowroll's run.yaml or the docu"),
        ("serve", "port: 8001\n", "f.yaml: model: this key is required"),
        ("serve", "model: m\nprot: 8001\nenable_lora: true\n", "f.yaml:2: prot: unknown key (did"),
        ("orchestrate", "seq_len: 9\nenv: {id: a}\n", "f.yaml: model.name: this key is required"),
        ("orchestrate", "model: {lora_rank: 3}\n", "f.yaml:1: model.name: this key is required"),
        ("train", "lora: true\nmodel: m\noutput_dir: 3\n", "f.yaml:3: output_dir: must be text"),
        ("serve", "model: m\ntp: 2\n", "f.yaml:2: tp: needs vLLM"),
    ],
)
def test_what_a_role_refuses(role: Any, text: str, told: str, here: Path) -> None:
    (here / "f.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_role(role, "f.yaml")
    (line,) = str(error.value).splitlines()
    assert line.startswith(told), line
    assert not isinstance(error.value, NotThereYet)


def test_a_folder_that_no_orchestrator_wrote(here: Path) -> None:
    place = here / "outputs" / "run_x" / GIVEN
    place.parent.mkdir(parents=True)
    place.write_text("orch: {}\n")
    with pytest.raises(ConfigError, match=r"given\.yaml: was not written by an orchestrator"):
        load_role("train", "train.yaml")
