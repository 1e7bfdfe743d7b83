"""Environments of verifiers, as they are: 0.4 and 0.1, each in an environment of its own (`make
test-clients`)."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs import make
from lowroll.envs.verifiers.source import plain, refuse_missing

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "fixtures" / "clients"
PYTHON = os.environ.get("LOWROLL_CLIENTS_PYTHON")
CLASSIC = os.environ.get("LOWROLL_CLASSIC_PYTHON")
NONE = {"tool_calls": 0.0, "failed_tool_calls": 0.0, "ill_formed_tool_calls": 0.0}

new = pytest.mark.skipif(
    PYTHON is None, reason="verifiers 0.4 has an environment of its own: make test-clients"
)
old = pytest.mark.skipif(
    CLASSIC is None, reason="verifiers 0.1 has an environment of its own: make test-clients"
)


def outside(python: str | None, script: str, *args: str) -> Any:
    """What a script prints."""
    assert python is not None
    done = subprocess.run(
        [python, str(CLIENTS / script), *args],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    return outside(PYTHON, "verifiers_environments.py")


@pytest.fixture(scope="module")
def classic() -> Any:
    return outside(CLASSIC, "verifiers_classic.py")


@new
@pytest.mark.slow
def test_tasks_of_a_taskset(found: Any) -> None:
    train, test = found["texts"]["train"], found["texts"]["test"]
    assert found["sizes"] == [len(train), len(test), None]
    assert not set(train) & set(test) and len(train) + len(test) == 40
    assert [said["role"] for said in found["prompts"][0]] == ["system", "user"]
    assert found["same"] is True
    assert sorted(found["epochs"][0]) == train
    assert found["turns"] == [1, 3, 8]


@new
@pytest.mark.slow
def test_one_turn_and_its_weighted_rewards(found: Any) -> None:
    replies, (reward, metrics) = found["right"]
    assert replies == [None]
    assert reward == pytest.approx(metrics["exact"] + 0.5 * metrics["vowels"])
    assert metrics["exact"] == 1.0 and metrics["length"] == 3.0
    assert found["wrong"] == [[None], [0.5, {"exact": 0.0, "vowels": 1.0, "length": 2.0}]]
    assert found["plain"] == 0.5


@new
@pytest.mark.slow
def test_several_turns_of_an_env(found: Any) -> None:
    def user(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    replies, (reward, metrics) = found["guessed"]
    assert replies == [user("Higher."), user("Lower."), None]
    assert (reward, metrics) == (1.0, {"found": 1.0, "turns": 3.0, "finalized": 1.0})
    assert found["at once"] == [[None], [1.0, {"found": 1.0, "turns": 1.0, "finalized": 1.0}]]
    assert found["lost"][1] == [0.0, {"found": 0.0, "turns": 3.0, "finalized": 1.0}]


@new
@pytest.mark.slow
def test_tools_of_a_toolset(found: Any) -> None:
    (tool,) = found["tools"]
    assert tool["function"]["name"] == "calc_add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    replies, (reward, metrics) = found["added"]
    assert replies[0][0]["content"] == str(found["number"] + 2) and replies[1] is None
    assert (reward, metrics) == (1.0, {**NONE, "tool_calls": 1.0, "right": 1.0})
    replies, (reward, metrics) = found["failed"]
    contents = [reply[0]["content"] for reply in replies]
    assert "too large" in contents[0] and "no tool 'no'" in contents[1]
    assert "cannot be read" in contents[2]
    assert metrics == {
        "tool_calls": 2.0,
        "failed_tool_calls": 2.0,
        "ill_formed_tool_calls": 1.0,
        "right": 0.0,
    }
    assert found["stopped"][0] == [None]  # a @stop of the task


@new
@pytest.mark.slow
def test_what_cannot_be_played_is_named(found: Any) -> None:
    refused = found["refused"]
    assert "no environment 'vf-none' is installed (prime env install vf-none" in refused["missing"]
    assert "vf-words: cuont: Extra inputs are not permitted" in refused["argument"]
    assert "setup needs a runtime of verifiers" in refused["runtime"]
    assert "max_turns: expected a number of at least 1, got 0" in refused["turns"]
    assert "no train task" in refused["empty"]


@old
@pytest.mark.slow
def test_the_older_interface(classic: Any) -> None:
    assert [said["role"] for said in classic["prompt"]] == ["system", "user"]
    assert sum(classic["sizes"]) == 20 and min(classic["sizes"]) > 0
    assert classic["own"] == [20, "9 + 9?"]
    assert classic["own turns"] == 2
    assert classic["turns"] == [1, 3, 4]
    assert classic["right"][1][1]["exact"] == 1.0 and classic["wrong"][1][0] == pytest.approx(0.1)
    replies, (_, metrics) = classic["guessed"]
    assert replies == [[{"role": "user", "content": "No (1)."}], None]
    assert metrics["num_turns"] == 2.0
    replies, (_, metrics) = classic["lost"]
    assert replies[1:] == [[{"role": "user", "content": "No (2)."}], None]  # setup_state each time
    assert metrics["num_turns"] == 3.0


@old
@pytest.mark.slow
def test_tools_of_the_older_interface(classic: Any) -> None:
    assert classic["tools"][0]["function"]["name"] == "add"
    replies, (reward, metrics) = classic["added"]
    assert replies[0][0]["role"] == "tool" and replies[1] is None
    assert metrics["exact"] == 1.0 and metrics["add_calls"] == metrics["tool_calls"] == 1.0
    replies, (_, metrics) = classic["failed"]
    assert [reply[0]["content"] for reply in replies][0] == "too large"
    assert replies[1][0]["tool_call_id"] == "malformed"
    assert metrics["ill_formed_tool_calls"] == 1.0
    assert "unexpected keyword argument 'rwos'" in classic["refused"]
    assert "Error calling reward function fails" in classic["fails"]  # an error, and no 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "id", "args", "metric"),
    [
        pytest.param(PYTHON, "verifiers/vf-guess", {}, "turns", marks=new),
        pytest.param(CLASSIC, "verifiers/vf-classic", {"kind": "guess"}, "num_turns", marks=old),
    ],
)
def test_two_steps_of_grpo(
    python: str | None, id: str, args: dict[str, Any], metric: str, tmp_path: Path
) -> None:
    packages = sysconfig.get_paths()["purelib"]
    given = (packages, str(tmp_path), id, json.dumps(args))
    steps = outside(python, "verifiers_run.py", *given)
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert record[f"reward/theirs/{metric}"] > 1 and record["reward/error_rate"] == 0.0
    assert "eval/theirs/reward" in steps[-1]


def test_without_the_package_the_line_that_installs_it_is_said() -> None:
    try:
        import verifiers  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install 'lowroll\[verifiers\]'.*'me/some-env'"):
            make("verifiers/me/some-env")
    missing = refuse_missing("me/some-env@1", ModuleNotFoundError("no", name="some_env"))
    assert "no environment 'me/some-env@1' is installed" in str(missing)
    other = refuse_missing("some-env", ModuleNotFoundError("no", name="nltk"))
    assert "needs the module 'nltk' (pip install nltk)" in str(other)


def test_messages_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain({"role": "user", "content": parts}) == {"role": "user", "content": "a\nb"}
    with pytest.raises(ValueError, match="more than text"):
        plain({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})
