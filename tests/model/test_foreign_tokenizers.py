"""A tokenizer.json of strangers is tried where its time and its memory are bounded."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lowroll.model import tokenizer_trial
from lowroll.model.tokenizer import load_tokenizer
from lowroll.model.tokens import FileTokenizer
from lowroll.runs.demo import build_tokenizer
from tests.fixtures.json_files import edit_json

PANIC = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}
GROWTH = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "ab" * 100_000}] * 2,
}
READERS: list[Callable[[Path], Any]] = [load_tokenizer, FileTokenizer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, **keys: Any) -> None:
    edit_json(folder / "tokenizer.json", **keys)


@pytest.mark.parametrize("read", READERS)
def test_a_regex_that_panics_is_one_line_that_names_the_file(
    folder: Path, read: Callable[[Path], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder, pre_tokenizer=PANIC)
    with pytest.raises(ValueError, match=r"tokenizer\.json: .*retry-limit") as refused:
        read(folder)
    assert "\n" not in str(refused.value)
    assert "panicked" not in capfd.readouterr().err


@pytest.mark.parametrize("read", ["load_tokenizer", "FileTokenizer"])
def test_a_normalizer_that_grows_without_end_is_refused_within_the_limit(
    folder: Path, read: str
) -> None:
    """In a process of its own that may hold 8 GiB: what it asks for would end it, not the limit."""
    change(folder, normalizer=GROWTH)
    home = {"load_tokenizer": "tokenizer", "FileTokenizer": "tokens"}[read]
    code = (
        f"import resource; from lowroll.model.{home} import {read}\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        f"try:\n    {read}({str(folder)!r})\nexcept ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip()
    assert "tokenizer.json: " in said and "2,048 MB of memory" in said


def test_time_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "SECONDS", 0)
    change(folder, version="1.0")
    with pytest.raises(ValueError, match=r"tokenizer\.json: .* more than 0 s"):
        tokenizer_trial.attempt(folder / "tokenizer.json")


def test_the_same_bytes_are_tried_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda *words, **more: started.append(words) or run(*words, **more)
    )
    change(folder, added_tokens=json.loads((folder / "tokenizer.json").read_text())["added_tokens"])
    twin = folder / "twin"
    twin.mkdir()
    shutil.copy(folder / "tokenizer.json", twin)
    for path in (folder, twin, folder):
        tokenizer_trial.attempt(path / "tokenizer.json")
    assert len(started) <= 1
    change(folder, normalizer=GROWTH)
    for count in (1, 2):
        with pytest.raises(ValueError):
            tokenizer_trial.attempt(folder / "tokenizer.json")
        assert len(started) >= count


def test_a_vocabulary_as_large_as_published_ones_passes(tmp_path: Path) -> None:
    """150,000 tokens and as many merges, more than 10 MB; resident memory stays far below the limit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: number for number, token in enumerate(alphabet)}
    merges = []
    for one in alphabet:
        for two in alphabet:
            merges.append((one, two))
            tokens[one + two] = len(tokens)
    for pair in list(tokens)[256:700]:
        for other in list(tokens)[256:476]:
            if pair + other not in tokens:
                merges.append((pair, other))
                tokens[pair + other] = len(tokens)
    large = Tokenizer(models.BPE(tokens, merges))
    large.pre_tokenizer = pre_tokenizers.ByteLevel()
    large.decoder = decoders.ByteLevel()
    path = tmp_path / "tokenizer.json"
    large.save(str(path))
    assert len(tokens) > 150_000 and path.stat().st_size > 10 << 20
    tokenizer_trial.attempt(path)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    assert used < tokenizer_trial.MEMORY_MB << 20
