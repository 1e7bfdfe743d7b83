"""Roles whose files say different things are refused, by file and key, before anything is drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lowroll.config import RunConfig, load
from lowroll.engine.base import Capabilities
from lowroll.runs.roles.agreement import check_engines, check_trainer
from lowroll.types import Request

TREE: dict[str, Any] = {
    "batch_size": 8,
    "rollouts_per_example": 4,
    "train": {"max_steps": 4, "lora": True, "lora_rank": 4},
}


def read(folder: Path, name: str, **changes: Any) -> RunConfig:
    """A file of settings over those of the test, read."""
    folder.mkdir(exist_ok=True)
    tree = TREE | {"model": str(folder / "model")} | changes
    (folder / name).write_text(yaml.safe_dump(tree))
    return load(folder / name)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": "/elsewhere"}, "model: '/elsewhere' here"),
        ({"train": TREE["train"] | {"max_steps": 5}}, "train.max_steps: 5 here, and 4"),
        ({"train": TREE["train"] | {"lora_rank": 8}}, "train.lora_rank: 8 here, and 4"),
        ({"rollouts_per_example": 2}, "rollouts_per_example: 2 here, and 4"),
        ({"rollout": {"max_tokens": 65}}, "rollout.max_tokens: 65 here, and 64"),
        ({"noise": {"num_stages": 3}}, "noise: "),
        ({"asynchrony": {"max_async_level": 1}}, "asynchrony.max_async_level: 1 here, and 0"),
        ({"rollout_transport": {"type": "zmq"}}, "rollout_transport.type: 'zmq' here"),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else "",
)
def test_another_run_than_the_trainers_is_refused(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    read(tmp_path, "config.yaml")
    mine = read(tmp_path, "mine.yaml", **changes)
    with pytest.raises(ValueError) as told:
        check_trainer(mine, tmp_path, "trainer (process 7 on host)")
    (line,) = str(told.value).splitlines()
    assert line.startswith(f"{tmp_path / 'mine.yaml'}: {key}"), line
    assert str(tmp_path / "config.yaml") in line and "process 7" in line


def test_what_is_a_roles_own_may_differ(tmp_path: Path) -> None:
    theirs = read(tmp_path, "config.yaml", train=TREE["train"] | {"learning_rate": 0.5})
    mine = read(tmp_path, "mine.yaml", serve={"port": 7}, client={"timeout": 5.0}, device="cpu")
    assert check_trainer(mine, tmp_path, "trainer") == theirs


def test_orch_yaml_is_held_to_what_it_can_say(tmp_path: Path) -> None:
    """Its learner has the defaults of keys that are train.yaml's."""
    read(tmp_path, "config.yaml")
    mine = read(tmp_path, "mine.yaml", train={"max_steps": 4}).with_origin(given="orch: {}")
    check_trainer(mine, tmp_path, "trainer")


def pool(model: str, weights: str = "int8", **able: Any) -> Any:
    """What is asked of engines that were met."""
    said: dict[str, Any] = {"lora_rank": 4} | able
    return SimpleNamespace(
        capabilities=Capabilities(
            256,
            frozenset(),
            True,
            True,
            True,
            True,
            frozenset(Request.__dataclass_fields__),
            **said,
        ),
        behavior=SimpleNamespace(weights=weights),
        server=SimpleNamespace(model=model),
    )


@pytest.mark.parametrize(
    ("engines", "said"),
    [
        (
            {"model": "other"},
            r"^model: .*/model is the run's, and the engines serve other \(client",
        ),
        ({"lora_rank": 2}, "^train.lora_rank: 4 is learned, and the engines take adapters up to"),
        ({"lora_rank": 0}, "^train.lora_rank: 4 is learned, and the engines take no adapters"),
        ({"weights": "fp8"}, "^rollout.weights: int8 is asked for, and the engines have fp8"),
        (
            {"weights": "int8+fp8"},
            "^rollout.weights: int8 is asked for, and the engines have int8.f",
        ),
    ],
)
def test_engines_of_another_run_are_refused(
    tmp_path: Path, engines: dict[str, Any], said: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    cfg = read(tmp_path, "run.yaml")
    check_engines(cfg, pool("model"))
    check_engines(cfg, pool("model", lora_rank=16))
    check_engines(cfg, pool("policy", "dense", lora_rank=None))
    with pytest.raises(ValueError, match=said):
        check_engines(cfg, pool(**{"model": "model"} | engines))
    given = read(tmp_path, "whole.yaml", train={"max_steps": 4})
    with pytest.raises(ValueError, match="all weights learn, and the engines take adapters"):
        check_engines(given, pool("model"))
    taken = read(tmp_path, "taken.yaml", client={"skip_model_check": True})
    check_engines(taken, pool("other"))


def test_engines_with_a_second_format_are_those_of_a_run_that_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    cfg = read(tmp_path, "run.yaml", rollout={"weights": "int4", "large_batch_weights": "fp8"})
    check_engines(cfg, pool("model", "int4+fp8"))
    for held in ("int4", "fp8", "int4+int8", "fp8+fp8"):
        with pytest.raises(ValueError, match="large_batch_weights: int4.fp8 is asked for, and"):
            check_engines(cfg, pool("model", held))
    dense = read(tmp_path, "run.yaml", rollout={"weights": "int4", "large_batch_weights": "bf16"})
    check_engines(dense, pool("model", "int4+bf16"))
