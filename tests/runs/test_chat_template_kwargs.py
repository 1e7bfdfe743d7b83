"""`chat_template_kwargs`: variables of the model's chat template, in every command that renders a
prompt. The template here ends any that does not set them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lowroll
from lowroll.cli.main import main
from lowroll.config import ConfigError, load
from lowroll.model.tokenizer import load_tokenizer
from lowroll.runs import demo
from tests.fixtures.runs import TINY, settings

ASKS = (
    "{%- if enable_thinking is not defined %}{{ raise_exception('is it to think?') }}{% endif -%}"
)
QUIET = {"enable_thinking": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo.build_model(tmp_path_factory.mktemp("asks") / "model", 0, TINY)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = ASKS + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def written(model: Path, out: Path, **changes: object) -> str:
    """A file of a run of two steps."""
    tree = settings(model, out, **changes)
    tree["train"] |= {"max_steps": 2, "lr_scheduler_type": "constant", "warmup_steps": 0}
    tree["score"] = {"workers": 1}
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(tree))
    return str(path)


@pytest.mark.slow
def test_a_run_renders_with_them_and_they_are_part_of_what_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = written(model, tmp_path / "plain")
    for words in (["--dry-run"], []):
        assert main(["grpo", plain, *words]) == 2
        assert "is it to think?" in capsys.readouterr().err
    run = written(
        model, tmp_path / "run", chat_template_kwargs=QUIET, eval={"interval": 1, "num_examples": 2}
    )
    assert main(["grpo", run, "--dry-run"]) == 0
    assert "chat_template_kwargs: {enable_thinking: false}" in capsys.readouterr().out
    assert main(["grpo", run, "train.max_steps=1"]) == 0
    assert main(["grpo", run, "--resume", "chat_template_kwargs.enable_thinking=true"]) == 2
    assert "chat_template_kwargs.enable_thinking was False and is True" in capsys.readouterr().err
    assert main(["grpo", run, "--resume"]) == 0
    assert main(["diagnose", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_evaluation_demonstrations_and_a_prompt_render_with_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sft = {"steps": 1, "batch_size": 2, "num_examples": 4}
    run = written(model, tmp_path / "run", sft=sft)
    generate = ["generate", "--model", str(model), "--prompt", "abc", "--max-tokens", "2"]
    ask = ["eval", run, "--n", "2", "--weights", "int8", "--out"]
    given = "chat_template_kwargs.enable_thinking=false"
    for number, (plain, quiet) in enumerate(
        (
            (["sft", run, "--dry-run"], [given]),
            (["sft", run], [given]),
            ([*ask, str(tmp_path / "asked")], [given]),
            (generate, ["--chat-template-kwargs", json.dumps(QUIET)]),
        )
    ):
        assert main(plain) == 2, number
        assert "is it to think?" in capsys.readouterr().err
        assert main([*plain, *quiet]) == 0, number
    for wrong, told in (("[1]", "expected a JSON object"), ("{", "expected a JSON object")):
        assert main([*generate, "--chat-template-kwargs", wrong]) == 2
        assert f"--chat-template-kwargs: {told}" in capsys.readouterr().err


def test_what_the_template_gets_from_elsewhere_is_refused_before_anything_runs(
    model: Path, tmp_path: Path
) -> None:
    tree = settings(model, tmp_path / "run", chat_template_kwargs={"messages": []})
    with pytest.raises(ValueError, match="chat_template_kwargs: messages is set from"):
        lowroll.run(tree)
    path = written(model, tmp_path / "other", chat_template_kwargs=[1])
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        load(path)
