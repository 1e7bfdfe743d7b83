"""`lowroll generate` and `lowroll eval` with an address in the place of a folder. Here the engine at
the other end is one that stands for it; a real server's is in tests/engine/remote."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lowroll
from lowroll.cli.main import main
from lowroll.engine.native import NativeEngine
from lowroll.runs import evaluate, remote_model
from tests.fixtures.foreign import Foreign

URL = "http://127.0.0.1:8000"
ENV = ["--env", "reverse-text", "--n", "3", "--k", "2", "--max-tokens", "6"]


@dataclass
class Asked:
    """What `connect` was called with, the engines that it gave, and the model's names."""

    calls: list[tuple[str, str | None, str | None]]
    made: list[Foreign]
    name: str
    root: str
    refuses: str = ""


@pytest.fixture
def there(model: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked([], [], "policy", str(model))

    class Served(Foreign):
        server: Any

    def connect(url: str, *, model: str | None, token: str | None, folder: Path | None) -> Foreign:
        asked.calls.append((url, model, token))
        if asked.refuses:
            raise ValueError(asked.refuses)
        near = NativeEngine(held, weights="fp32", device="cpu", cache_tokens=1024)
        far = Served(near)
        far.server = types.SimpleNamespace(model=model or asked.name, root=asked.root)
        asked.made.append(far)
        return far

    held = model
    fake = types.ModuleType("lowroll.engine.remote")
    fake.connect = connect  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lowroll.engine.remote", fake)
    return asked


@pytest.mark.slow
def test_generate_asks_a_server(
    there: Asked,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn = ["--prompt", "abc", "--n", "2", "--max-tokens", "5", "--seed", "3"]
    assert main(["generate", "--server", URL, *drawn]) == 0
    far, err = capsys.readouterr()
    assert f"policy at {URL}]" in err and there.calls == [(URL, None, None)]
    assert there.made[0].closed == 1
    assert main(["generate", "--model", str(model), "--weights", "fp32", *drawn]) == 0
    assert capsys.readouterr().out == far
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    there.root = "elsewhere"
    words = ["--model", "other", "--tokenizer", str(model), "--token-env", "TOKEN_OF_MINE"]
    assert main(["generate", "--server", URL, *words, *drawn]) == 0
    assert there.calls[-1] == (URL, "other", "secret")
    out, err = capsys.readouterr()
    assert out == far and "other at" in err and "secret" not in err


@pytest.mark.slow
def test_eval_of_a_server_is_that_of_the_model_behind_it(
    there: Asked, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "lowroll.cli.eval.show", lambda rows, title, out: shown.append((rows, title))
    )
    assert main(["eval", "--server", URL, *ENV]) == 0
    assert main(["eval", "--model", str(model), "--weights", "fp32", *ENV, "device=cpu"]) == 0
    (path := tmp_path / "run.yaml").write_text("model: nowhere\neval: {num_examples: 3}\n")
    assert main(["eval", str(path), "--server", URL, *ENV]) == 0
    (((far,), title), ((near,), _), ((file,), _)) = shown
    assert title.startswith(f"{URL}: greedy, at most 3 held-out prompts, 2 responses each")
    assert (far["server"], far["model"]) == (URL, "policy") and "weights" not in far
    for name in ("reward", "pass_at_1", "length_mean"):
        assert far[name] == near[name] == file[name]
    assert all(engine.closed == 1 for engine in there.made)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["generate"], "give --model, a folder or a hub id, or --server, an address"),
        (["generate", "--model", "m", "--tokenizer", "t"], "--tokenizer: is for --server"),
        (["generate", "--model", "m", "--token-env", "T"], "--token-env: is for --server"),
        (["eval", "--server", URL, "--token-env", "NOT_SET", *ENV], "--token-env: NOT_SET is not"),
        (["generate", "--server", URL, "--weights", "int8"], "--weights: the model at --server is"),
        (["generate", "--server", URL, "--device", "cpu"], "--device: the model at --server is"),
        (["eval", "--server", URL], "give a run's YAML file, or a model and what to ask"),
        (["eval", "--server", URL, "--weights", "int8", *ENV], "--weights: the model at --server"),
        (["eval", "--server", URL, "--kv", "rkv", *ENV], "--kv: the model at --server is loaded"),
        (["generate", "--server", URL, "--tokenizer", "./no"], "--tokenizer: './no' is neither a"),
    ],
)
def test_what_does_not_go_with_a_server(
    words: list[str], told: str, there: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")
    assert there.made == []  # nothing was asked


def test_a_server_whose_model_is_not_here_needs_a_tokenizer(
    there: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    there.name, there.root = "policy", "/models/\x1b[2J"
    assert main(["generate", "--server", URL, "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: --tokenizer: {URL} serves '/models/") and "\x1b" not in err
    assert "'policy', which is neither a model folder" in err and there.made[0].closed == 1


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        ("model: it serves a, and not b", "--model: it serves a, and not b"),
        ("folder: /x is not readable here", "--tokenizer: /x is not readable here"),
        ("url: expected http://host:port", "--server: expected http://host:port"),
        ("version: vLLM 0.1 is older than 0.20", f"{URL}: version: vLLM 0.1 is older than 0.20"),
    ],
)
def test_what_a_server_is_refused_for_names_the_option(
    refusal: str, told: str, there: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    there.refuses = refusal
    assert main(["generate", "--server", URL, "--prompt", "x"]) == 2
    assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.slow
def test_responses_must_fit_the_servers_context(there: Asked, model: Path) -> None:
    found = remote_model.reach(URL)
    found.engine.able["context_length"] = 40  # type: ignore[attr-defined]
    cfg = lowroll.config.from_mapping({"model": "m", "rollout": {"max_tokens": 40}})
    with pytest.raises(ValueError, match="40 leaves no room for a prompt in the context of http"):
        evaluate.evaluate_server(cfg, found)
