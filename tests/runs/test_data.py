"""Whole runs of data and reward functions that people bring: from a file, a call, a notebook, in
roles, and resumed."""

from __future__ import annotations

import functools
import importlib
import json
import linecache
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

import lowroll
from lowroll.cli.main import main
from lowroll.config import from_mapping, load
from lowroll.config.document import ConfigError
from lowroll.envs import make
from lowroll.envs.notebook_files import named
from lowroll.metrics.record import read
from lowroll.types import Score

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{i} + {i}?"}],
        "answer": f"twice {i}\n#### {2 * i}",
        "level": i % 3,
    }
    for i in range(12)
]
REWARDS = '''
def right(completions, answer, **columns):
    """Does the response hold the number?"""
    return [float(a.split()[-1] in m[-1]["content"]) for m, a in zip(completions, answer)]

def brief(text, level):
    return 1 / (1 + len(text)) if level < 2 else None
'''
SMALL = {
    "device": "cpu",
    "batch_size": 8,
    "rollouts_per_example": 4,
    "max_tokens": 6,
    "cache_tokens": 1024,
    "max_steps": 2,
    "score": {"workers": 1},
    "ckpt": {"interval": 1},
}


@pytest.fixture()
def cell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs a cell as a notebook does, in the main module, with its text kept."""
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))

    def run(text: str) -> dict[str, Any]:
        name = f"<cell {len(linecache.cache)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec", dont_inherit=True), vars(notebook))  # noqa: S102
        return vars(notebook)

    return run


@pytest.mark.slow
def test_ten_lines_of_yaml_on_chat_shaped_parquet(model: Path, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.yaml").write_text(
        f"model: {model}\n"
        f"output_dir: {tmp_path / 'run'}\n"
        "data: {path: train.parquet, answer: answer}\n"
        "reward_funcs: [rewards.py:right, rewards.py:brief]\n"
        "reward_weights: [1, 0.2]\n"
        "batch_size: 8\n"
        "rollouts_per_example: 4\n"
        "rollout: {weights: int8, max_tokens: 6, cache_tokens: 1024}\n"
        "train: {max_steps: 2}\n"
        "eval: {interval: 2, num_examples: 1}\n"
    )
    result = lowroll.run(tmp_path / "run.yaml", {"score.workers": 1})
    record = result.metrics
    assert record["step"] == 2 and result.model.is_dir() and record["eval/data/reward"] >= 0
    assert 0 < record["reward/data/brief"] <= 1 and record["reward/data/right"] >= 0
    kept = load(result.folder / "config.yaml")
    assert kept.data is None and kept.env[0].args["reward_weights"] == [1.0, 0.2]
    again = lowroll.run(result.folder / "config.yaml", {"train.max_steps": 3}, resume=True)
    assert len(again.records) == 3


@pytest.mark.slow
def test_errors_that_are_too_few_to_stop_a_run_are_told_at_its_end(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rewards.py").write_text(
        "asked = []\ndef right(text):\n    asked.append(text)\n    if len(asked) == 2:\n"
        "        raise ValueError('the second')\n    return 1 / (1 + len(text))\n"
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    lowroll.train(
        model=str(model),
        data=str(tmp_path / "rows.jsonl"),
        reward_funcs=f"{tmp_path / 'rewards.py'}:right",
        output_dir=str(tmp_path / "run"),
        **SMALL,
    )
    (told,) = [line for line in caplog.messages if "score.max_error_rate" in line]
    assert "1 of all 16 scores are errors" in told and "from 50 scores on" in told


TRL = """
def right(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, level, **rest):
    assert trainer_state.max_steps == 2 and all(isinstance(i, int) for ids in completion_ids for i in ids)
    log_extra("length", [len(ids) for ids in completion_ids])
    log_metric("done", trainer_state.global_step)
    return [SAYS for ids in completion_ids]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "share"), [("None", 1.0), ("len(ids) / 7 if len(ids) % 2 else None", None)]
)
@pytest.mark.parametrize("level", [0, 1])
def test_what_does_not_apply_is_left_out_and_the_run_goes_on(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    says: str,
    share: float | None,
    level: int,
) -> None:
    (tmp_path / "rewards.py").write_text(TRL.replace("SAYS", says))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    result = lowroll.train(
        model=str(model),
        data=str(tmp_path / "rows.jsonl"),
        reward_funcs=f"{tmp_path / 'rewards.py'}:right",
        output_dir=str(tmp_path / "run"),
        eval={"interval": 1, "num_examples": 1},
        asynchrony={"max_async_level": level},
        **{**SMALL, "score": {"workers": 1, "max_error_rate": 0.0}},
    )
    first, second = result.records
    assert second["step"] == 2 and "reward/data/done" in second and second["reward/error_rate"] == 0
    assert level or (first["reward/data/done"], second["reward/data/done"]) == (0, 1)
    if share is not None:
        assert (
            first["reward/inapplicable_fraction"] == second["reward/inapplicable_fraction"] == share
        )
        assert "reward/mean" not in first and "eval/data/reward" not in second
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert any("no reward function says anything" in line for line in warned)
        assert not any("flagged by filters" in line for line in warned), "one warning, a true one"
        assert second["eval/data/length_mean"] > 0
    lines = (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()
    samples = [found for line in lines if (found := json.loads(line)).get("kind") != "batch"]
    assert len(samples) == 8
    for sample in samples:
        assert sample["score"]["extra"] == {"length": len(sample["rollout"]["token_ids"])}
        scored = sample["score"]["type"] == "Score"
        assert scored or not (any(sample["loss_mask"]) or sample["advantage"])


@pytest.mark.slow
def test_five_lines_of_a_notebook_train_and_resume(
    model: Path, tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    cell("import lowroll\nLEVELS = {'easy': 0}\n" + REWARDS)
    cell("def easy(rollout):\n    return float(rollout.columns['level'] == LEVELS['easy'])\n")
    out = tmp_path / "run"
    call = (
        f"result = lowroll.train(model={str(model)!r}, data=ROWS, reward_funcs=[right, easy],\n"
        f"    reward_weights=[1, 0.2], weights='int8', output_dir={str(out)!r}, **more)\n"
    )
    known = cell("")
    known |= {"ROWS": ROWS, "more": SMALL}
    result = cell(call)["result"]
    assert [record["step"] for record in result.records] == [1, 2] and result.model == out / "final"
    files = sorted(path.name for path in (out / "environments").iterdir() if path.is_file())
    assert [name.partition("_")[0] for name in files] == ["data", "easy", "right"]
    assert "LEVELS = {'easy': 0}" in (out / "environments" / files[1]).read_text()
    first = (out / "metrics.jsonl").read_text().splitlines()
    known["more"] = SMALL | {"max_steps": 3, "resume": True}
    assert len(cell(call)["result"].records) == 3
    assert (out / "metrics.jsonl").read_text().splitlines()[:2] == first
    words = [str(out / "config.yaml"), "train.max_steps=4", "--resume"]
    assert main(["grpo", *words]) == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.long
def test_roles_see_the_functions_of_a_cell_too(
    model: Path, tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    right = cell(REWARDS)["right"]
    more = SMALL | {"output_dir": str(tmp_path / "run"), "launcher": "local", "max_steps": 1}
    result = lowroll.train(model, ROWS, right, **more)
    assert len(result.records) == 1 and "reward/data/right" in result.metrics


def test_what_workers_could_not_find_is_refused_with_the_fix(
    tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    def outer(gold: str) -> Callable[..., float]:
        def inner(text: str) -> float:
            return float(text == gold)

        return inner

    cells = cell(
        REWARDS + "client = open(__import__('os').devnull)\ndef asks(text): return client\n"
        "class Judge:\n    def one(text): return 1.0\n"
    )
    for function, says in (
        (lambda text: 1.0, "a lambda has no name .* write it with def"),
        (
            outer("5"),
            r"inner stands inside another function .*: move it to the top level; .*\(gold\)",
        ),
        (cells["Judge"].one, "Judge.one stands inside a class, .*: move it to the top level"),
        (int, r"reward_funcs\[0\]: must be a function or file.py:function, got <class 'int'>"),
        ([5], r"reward_funcs\[0\]: must be a function or file.py:function, got 5"),
        (5, "reward_funcs: must be a function or a list of some, got 5"),
        (len, "is no function of its own.*write one with def that calls it"),
        (cells["asks"], "asks uses client, a TextIOWrapper .*of a function: inside it"),
    ):
        with pytest.raises(ValueError, match=says):
            lowroll.train("m", ROWS, function, output_dir=str(tmp_path / "run"))  # type: ignore[arg-type]
    for data, says in (
        ([], "data: it has no rows"),
        (5, "data: must be a path, a mapping or rows, got 5"),
        ([{"prompt": "x"}, 3], r"data\[1\]: expected a mapping, got int"),
    ):
        with pytest.raises(ValueError, match=says):
            lowroll.train("m", data, cells["right"], output_dir=str(tmp_path / "run"))  # type: ignore[arg-type]
    for weights in (2, "1"):
        with pytest.raises(ConfigError, match="reward_weights: must be a list of numbers, got"):
            lowroll.train("m", ROWS, cells["right"], weights)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


OBJECTS = """
from functools import partial

WORDS = {"many": 3}

def scaled(completions, factor, **columns):
    return [factor * len(m[-1]["content"]) for m in completions]

class Judge:
    def __init__(self, bonus):
        self.bonus = bonus
    def __call__(self, completions, **columns):
        return [self.bonus + WORDS["many"] for m in completions]

judge = Judge(0.5)
tripled = partial(scaled, factor=WORDS["many"])
"""


def rewards_of(settings: dict[str, Any], text: str) -> dict[str, float]:
    """What the functions of a data environment say of a response, each by its name."""
    env = make("data", args=settings)
    score = env.score(env.prompt(0), text)
    assert isinstance(score, Score)
    return score.metrics


def test_callable_objects_of_a_notebook_or_file_are_found_again(
    tmp_path: Path, cell: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = cell(OBJECTS)
    (tmp_path / "objects_of_a_file.py").write_text(OBJECTS)
    monkeypatch.syspath_prepend(tmp_path)
    file = importlib.import_module("objects_of_a_file")
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    for home in (cells, vars(file)):
        given = [home["judge"], home["tripled"], functools.partial(home["scaled"], factor=2)]
        ids = []
        for value in given:
            found = named(value, tmp_path / "environments")
            if found.file is not None:
                found.file.parent.mkdir(exist_ok=True)
                found.file.write_text(found.text)
            ids.append(found.id)
        told = rewards_of({"path": str(data), "held_out": 0, "reward_funcs": ids}, "four")
        assert told == {"judge": 3.5, "tripled": 12.0, "scaled": 8.0}
    assert ids[:2] == [f"{tmp_path}/objects_of_a_file.py:{name}" for name in ("judge", "tripled")]


def test_objects_that_nobody_could_find_again_are_refused(
    tmp_path: Path, cell: Callable[[str], dict[str, Any]]
) -> None:
    cells = cell(OBJECTS)
    for value, says in (
        (cells["Judge"](1.0), r"has no name .*: give it one at the top level, as in judge = Judge"),
        (functools.partial(cells["scaled"], factor=object()), "scaled is given <object object at"),
        (functools.partial(len), "has no name by which"),
    ):
        with pytest.raises(ValueError, match=says):
            lowroll.train("m", ROWS, value, output_dir=str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_settings_of_the_call_go_to_their_sections() -> None:
    from lowroll.config.rollout import RolloutConfig
    from lowroll.config.train import TrainConfig
    from lowroll.runs.python_api import _placed

    assert not set(RolloutConfig.model_fields) & set(TrainConfig.model_fields)
    tree = _placed(
        {"weights": "nf4", "max_steps": 3, "train": {"lora": True}, "batch_size": 8, "seed": 1}
    )
    assert tree == {
        "train": {"lora": True, "max_steps": 3},
        "batch_size": 8,
        "seed": 1,
        "rollout": {"weights": "nf4"},
    }
    for name, says in (
        ("max_step", r"^max_step: unknown setting \(did you mean max_steps\?\)"),
        ("num_generations", r"^num_generations: unknown setting \(here it is rollouts_per_example"),
    ):
        with pytest.raises(ConfigError, match=says):
            _placed({name: 1})
    with pytest.raises(ConfigError, match="max_steps: it is given twice, also as train.max_steps"):
        _placed({"max_steps": 3, "train": {"max_steps": 4}})


def test_the_short_form_and_the_long_one_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    (tmp_path / "rewards.py").write_text(REWARDS)
    short = "model: m\ndata: {path: rows.jsonl, prompt: q}\nreward_funcs: rewards.py:right\n"
    long = (
        "model: m\nenv: {id: data, args: {path: rows.jsonl, prompt: q, "
        "reward_funcs: [rewards.py:right]}}\n"
    )
    found = []
    for text in (short, long):
        (tmp_path / "run.yaml").write_text(text)
        found.append(load(tmp_path / "run.yaml").dump())
    assert found[0] == found[1] and f"{tmp_path / 'rewards.py'}:right" in found[0]
    (tmp_path / "run.yaml").write_text("model: m\ndata: rows.jsonl\n")
    cfg = load(tmp_path / "run.yaml", ["data.path=" + str(tmp_path / "rows.jsonl")])
    assert cfg.env[0].args == {"path": str(tmp_path / "rows.jsonl")}


@pytest.mark.parametrize(
    "tree, says",
    [
        (
            {"data": {"path": "a", "promt": "q"}},
            r"data.promt: unknown key \(did you mean prompt\?\)",
        ),
        ({"data": {"split": "x"}}, "data.path: .*required"),
        ({"data": "a", "env": [{"id": "gsm8k"}]}, "data: is an environment of its own; to mix"),
        ({"reward_funcs": ["a.py:f"]}, "reward_funcs: needs data beside it"),
        ({"data": "a", "reward_weights": [1, 2]}, "reward_weights: 2 weights for 1 functions"),
        ({"push_to_hub": "a b"}, "push_to_hub: must be ORG/NAME, got 'a b'"),
        ({"dataset_name": "a"}, "dataset_name: unknown key; here it is data.path"),
        ({"reward_func": "a"}, r"reward_func: unknown key \(did you mean reward_funcs\?\)"),
    ],
)
def test_mistakes_in_the_settings(tree: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_mapping({"model": "m", **tree})


@pytest.mark.slow
def test_prompts_that_are_too_long_are_said_and_counted(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"prompt": "x" * (90 if i % 3 == 0 else 5)} for i in range(12)]
    (tmp_path / "rewards.py").write_text("def short(text): return 1 / (1 + len(text))\n")
    tree = {
        "model": str(model),
        "output_dir": str(tmp_path / "run"),
        "data": {"path": rows, "held_out": 0},
        "reward_funcs": [str(tmp_path / "rewards.py") + ":short"],
        "device": "cpu",
        "batch_size": 16,
        "rollouts_per_example": 2,
        "rollout": {"max_tokens": 4, "max_model_len": 64},
        "train": {"max_steps": 1},
        "score": {"workers": 1},
    }
    record = lowroll.run(tree).metrics
    said = "4 of the first 12 prompts have more than 60 tokens and are passed over"
    assert caplog.text.count(said) == 1 and "(rollout.max_model_len: 64, of which" in caplog.text
    assert record["rollout/passed_over_prompts"] >= 1
    words = [str(tmp_path / "run" / "config.yaml"), "--dry-run", "--overwrite"]
    assert main(["grpo", *words]) == 0 and said in capsys.readouterr().err


@pytest.mark.slow
def test_demonstrations_are_learnt_from_the_same_section(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}?", "completion": f"{i}!"} for i in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "run.yaml").write_text(
        f"model: {model}\noutput_dir: {tmp_path / 'run'}\ndevice: cpu\ndata: rows.json\n"
        "sft: {steps: 1, batch_size: 4, num_examples: 7}\n"
    )
    assert main(["sft", str(tmp_path / "run.yaml")]) == 0
    (record,) = read(tmp_path / "run")
    assert record["sft/tokens"] == 4 * 3
