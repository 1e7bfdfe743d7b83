"""Model folders, and which of their files may be copied."""

from __future__ import annotations

import os
import shutil
import threading
from functools import cache
from pathlib import Path

from lowroll.types import printable

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)

HUB_SECONDS = 3.0


def inside(folder: Path, name: str) -> Path | None:
    """Return a file of the folder, or None. ValueError for a link out of the folder, which could
    publish a file of this machine; the hub's `blobs` next to `snapshots` are allowed."""
    path = folder / name
    real_folder = os.path.realpath(folder)
    if not path.is_file():
        return None
    allowed_folders = [real_folder]
    if Path(real_folder).parent.name == "snapshots":
        allowed_folders.append(os.path.join(real_folder, "..", "..", "blobs"))
    real_path = os.path.realpath(path)
    if not any(
        real_path.startswith(os.path.normpath(allowed) + os.sep) for allowed in allowed_folders
    ):
        raise ValueError(
            f"{printable(path)}: a link that leads out of the folder; put the file itself there"
        )
    return path


def copy_tokenizer(source: str | Path | None, target: Path) -> None:
    """Copy a model folder's tokenizer files. ValueError for a link out of it."""
    for name in TOKENIZER_FILES:
        if source is not None and (path := inside(Path(source), name)) is not None:
            shutil.copyfile(path, target / name)


@cache
def why_hub_is_silent() -> str:
    """Return "" when the hub answers within HUB_SECONDS, else a clause with the reason. Its client
    would retry for minutes where packets are dropped."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and "
    results: list[str] = []  # the error's name, or "" for an answer

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
            results.append("")
        except Exception as error:
            results.append(type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)  # a name lookup may take long
    thread.start()
    thread.join(HUB_SECONDS)
    if results == [""]:
        return ""
    error_note = f" ({results[0]})" if results else ""
    return f"the hub at {constants.ENDPOINT} does not answer within {HUB_SECONDS:g} s{error_note}, and "


def resolve(
    source: str | Path,
    revision: str | None = None,
    weights: bool = True,
    connect: bool = True,
    key: str = "model",
) -> Path:
    """Return a local model folder: a path, which comes first; a short name (`model.short_names`);
    the folder of a GGUF file (`model.gguf`); or a downloaded hub id, at its newest commit or the
    revision.

    weights: download them too. connect: else only this machine's hub cache is searched. key: the
    setting to name. ValueError says what was tried.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf" and folder.is_file():
        from lowroll.model import gguf

        return gguf.folder_of(folder)
    name = str(source)
    if "/" not in name:
        from lowroll.model import short_names

        if name in short_names.KNOWN:
            return short_names.folder_of(name, key)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(
            f"{key}: {name!r} is neither a folder, nor a hub id of the form owner/name, "
            f"nor the name of a model that `lowroll fetch` gets"
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "merges.txt", *(["*.safetensors"] if weights else [])]
    hub_problem = why_hub_is_silent() if connect else ""
    local_only = not connect or bool(hub_problem)
    try:
        return Path(
            snapshot_download(
                name, revision=revision, local_files_only=local_only, allow_patterns=patterns
            )
        )
    except Exception as error:  # the hub raises many kinds
        if local_only:
            reason = f"{hub_problem}it is not in the hub's cache on this machine"
        else:
            reason = "the hub could not deliver it"
        raise ValueError(
            f"{key}: {name!r} is no local folder, and {reason} ({type(error).__name__}: "
            f"{printable((str(error).splitlines() or [''])[0])})"
        ) from error
