"""Own environments from the command line: paths beside the YAML file, passed variables, and errors
of one line."""

from __future__ import annotations

import http.server
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowroll.cli.main import main
from lowroll.config import ConfigError, from_mapping, load
from lowroll.metrics.record import read
from lowroll.runs import demo, identity
from tests.fixtures.runs import TINY

SECRET = "sk-a-key-of-the-judge"
FILES = {
    "tables.py": "SIGN = 1.0\n",
    "mine.py": '''
import asyncio, json, os, urllib.request
from tables import SIGN
from lowroll.envs import Environment, GeneratedEnvironment
from lowroll.types import Score

class Plain(GeneratedEnvironment):
    """A plain function of the text."""
    def task(self, rng):
        return "".join(rng.choice("abcdefgh") for _ in range(5)), {}
    def score(self, prompt, text): return SIGN * len(text) / 100
    def gold(self, prompt): raise NotImplementedError
    def perturbed(self, prompt): raise NotImplementedError

class Judged(Plain):
    """A judge behind HTTP, as of a language model."""
    def __init__(self, *, name, seed=0, url, system=None, template="{text}"):
        super().__init__(name=name, seed=seed)
        self.url, self.key = url, os.environ["JUDGE_KEY"]
        if not self.key.startswith("sk-"): raise OSError("no key: " + self.key)
    def post(self, text):
        ask = urllib.request.Request(self.url, json.dumps(text).encode(), {"Authorization": self.key})
        with urllib.request.urlopen(ask, timeout=5) as reply:
            return json.load(reply)
    async def score(self, prompt, text):
        print("asking with", self.key)
        return Score(*await asyncio.to_thread(self.post, text))

class Rows(Environment):
    """A file of rows."""
    def __init__(self, *, name, seed=0, path):
        super().__init__(name=name, seed=seed)
        self.rows = [json.loads(line) for line in open(path)]
    def size(self, split="train"): return len(self.rows)
    def prompt(self, index, split="train"):
        row = self.rows[index % len(self.rows)]
        return self.ask(row["question"], index, split, row)
    def score(self, prompt, text): return prompt.info["answer"] in text
    def gold(self, prompt): return prompt.info["answer"]
    def perturbed(self, prompt): return ""
''',
    "rows.jsonl": '{"question": "abc", "answer": "a"}\n{"question": "bcd", "answer": "b"}\n',
    "bad.jsonl": '{"question": "abc \\ud83d", "answer": "a"}\n',
    "other.jsonl": '{"q": "abc", "answer": "a"}\n',
}


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores the length of a text, for those who have the key."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers["Authorization"] == SECRET
        body = json.dumps(
            [len(text) / 100 if allowed else None, {"judged <by> http": 1.0}]
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def judge() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, environments and rows, that is not the working directory."""
    folder = tmp_path_factory.mktemp("own")
    demo.build_model(folder / "model", 0, TINY)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def write(folder: Path, out: Path, env: Any, **changes: Any) -> str:
    tree = {
        "model": "model",
        "output_dir": str(out),
        "device": "cpu",
        "env": env,
        "batch_size": 6,
        "rollouts_per_example": 2,
        "rollout": {"max_tokens": 6, "cache_tokens": 1024},
        "train": {"max_steps": 2},
        "eval": {"interval": 2, "num_examples": 2},
        "score": {"workers": 1},
        **changes,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "run.yaml")


@pytest.mark.slow
def test_three_environments_of_a_stranger_train_from_another_folder(
    folder: Path, judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    envs = [
        {"id": "mine.py:Plain"},
        {
            "id": "mine.py:Judged",
            "name": "a/judge",
            "args": {"url": judge},
            "pass_env": ["JUDGE_KEY"],
        },
        {"id": "mine.py:Rows", "args": {"path": "rows.jsonl"}},
    ]
    file = write(folder, Path("out"), envs)
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert main(["grpo", file]) == 2
    assert (
        "error: env 'a/judge': pass_env: the environment variable JUDGE_KEY is not set\n"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    assert main(["grpo", file]) == 0
    last = read(tmp_path / "out")[-1]
    assert {
        "eval/a/judge/reward",
        "eval/mine.py:Plain/reward",
        "eval/mine.py:Rows/reward",
    } <= last.keys()
    assert any(
        key == "reward/a/judge/judged <by> http"
        for record in read(tmp_path / "out")
        for key in record
    )
    written = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert written["model"] == str(folder / "model") and written["output_dir"] == "out"
    assert [env["id"] for env in written["env"]] == [
        f"{folder}/mine.py:{name}" for name in ("Plain", "Judged", "Rows")
    ]
    assert written["env"][2]["args"] == {"path": str(folder / "rows.jsonl")}
    texts = [path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in text for text in texts)
    assert any(b"a scorer printed: asking with $JUDGE_KEY" in text for text in texts)
    monkeypatch.setenv("JUDGE_KEY", "not-a-key")
    assert main(["grpo", file, "output_dir=third"]) == 2
    assert "env 'a/judge': OSError: no key: $JUDGE_KEY\n" in capsys.readouterr().err
    log = (tmp_path / "third" / "logs" / "attempt_1.log").read_text()
    assert "no key: $JUDGE_KEY" in log and "not-a-key" not in log
    monkeypatch.setenv("JUDGE_KEY", "sk-of-somebody-else")
    assert main(["grpo", file, "output_dir=other"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"error: .* scores .* are errors.* invalid: env 'a/judge', (train|test)/\d: the reward is "
        r"None; it must be a number",
        error,
    ), error


@pytest.mark.parametrize(
    ("env", "more", "error"),
    [
        (
            {"id": "mine.py:Rows", "args": {"path": "other.jsonl"}},
            [],
            r"^error: .+/mine\.py:37: env 'mine\.py:Rows': prompt\(0, 'train'\): KeyError: "
            "'question'$",
        ),
        (
            {"id": "mine.py:Rows", "args": {"path": "bad.jsonl"}},
            [],
            r"^error: env 'mine\.py:Rows': prompt 'train/0': a lone surrogate \(\\ud83d\) is no "
            "text$",
        ),
        ({"id": "gone.py"}, [], r"^error: environment file .+/own0/gone\.py does not exist$"),
        (
            {"id": "mine.py:Plain"},
            ["rollout.cache_tokens=16", "rollout.max_tokens=15"],
            r"^error: rollout\.cache_tokens: 16 tokens are too few: the shortest of the first 128 "
            "prompts of env "
            r"'mine\.py:Plain' has \d+ and rollout\.max_tokens is 15, which makes \d+$",
        ),
        (
            {"id": "mine.py:Plain"},
            ["score.workers=100000"],
            r"^error: score\.workers: 100000 is more than the \d+ ",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, tmp_path: Path, capsys: Any, env: Any, more: list[str], error: str
) -> None:
    assert main(["grpo", write(folder, tmp_path / "out", env), *more]) == 2
    assert re.search(error, capsys.readouterr().err, re.MULTILINE)
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_what_a_path_is_relative_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "here.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    more = [{"a": "here.jsonl"}, 3, "model", "./model", "gone.jsonl"]
    args = {"path": "rows.jsonl", "more": more, "text": "x" * 9999}
    file = write(
        folder, Path("out"), {"id": "mine.py:Rows", "args": args}, sft={"data": "rows.jsonl"}
    )
    cfg = load(file)
    assert (cfg.model, cfg.sft.data, cfg.output_dir) == (
        f"{folder}/model",
        f"{folder}/rows.jsonl",
        "out",
    )
    assert cfg.env[0].args == {
        "path": f"{folder}/rows.jsonl",
        "text": "x" * 9999,
        "more": [{"a": f"{tmp_path}/here.jsonl"}, 3, "model", f"{folder}/model", "gone.jsonl"],
    }
    changed = load(file, ["env.0.args.path=rows.jsonl", "model=model"])  # of the command line
    assert (changed.env[0].args["path"], changed.model) == (
        f"{tmp_path}/rows.jsonl",
        f"{tmp_path}/model",
    )
    mapping = from_mapping(
        {"model": "Qwen/Qwen3-0.6B", "env": {"id": "math", "args": {"path": "rows.jsonl"}}}
    )
    assert (mapping.model, mapping.env[0].args["path"]) == (
        "Qwen/Qwen3-0.6B",
        f"{tmp_path}/rows.jsonl",
    )
    assert load_again(cfg.dump(), tmp_path / "elsewhere").dump() == cfg.dump()
    with pytest.raises(
        ConfigError, match=r"env\.pass_env\[0\]: must be the name of an environment variable"
    ):
        from_mapping({"model": "m", "env": {"id": "gsm8k", "pass_env": ["sk-123"]}})


def load_again(text: str, folder: Path) -> Any:
    folder.mkdir()
    (folder / "config.yaml").write_text(text)
    return load(folder / "config.yaml")


def test_a_run_may_move_with_its_files(tmp_path: Path) -> None:
    """Where files lie is no setting; digests hold what is in them."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "env.py").write_text("")
    before, after = (
        from_mapping({"model": "m", "env": {"id": str(tmp_path / name / "env.py")}})
        for name in ("old", "new")
    )
    identity.refuse_other_settings(yaml.safe_load(before.dump()), after)
    os.rename(tmp_path / "new" / "env.py", tmp_path / "new" / "other.py")
    other = from_mapping(
        {"model": "m", "env": {"id": str(tmp_path / "new" / "other.py"), "name": "env.py"}}
    )
    with pytest.raises(ValueError, match=r"env\[0\]\.id was .*env\.py.* and is .*other\.py"):
        identity.refuse_other_settings(yaml.safe_load(before.dump()), other)
