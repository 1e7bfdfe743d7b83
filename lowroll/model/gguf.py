"""GGUF files as model folders: transformers reads them, and their weights become dense float32,
which holds the numbers exactly.

The folder is made once, in the hub's cache. If a format here (`quant.blocks`) reproduces the codes
of all linear layers bit for bit, `gguf.json` names it as the default format of rollouts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowroll.checkpoint.atomic_folders import publish_folder
from lowroll.model.files import read_json
from lowroll.quant.blocks import keeps
from lowroll.types import printable

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
# transformers ignores these keys, which change the model
UNREAD = (".rope.scaling.", ".attention.sliding_window")
FREQUENCIES = "rope_freqs.weight"
NOTE = "gguf.json"
KINDS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}

log = logging.getLogger(__name__)


def home() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME, "lowroll")


def require(name: str | Path) -> None:
    """Raise ValueError with what to install, if GGUF files cannot be read."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{printable(name)}: GGUF files need a package: pip install 'lowroll[gguf]'"
        )


def folder_of(path: Path) -> Path:
    """Return the folder of a GGUF file. ValueError for an unreadable file, or an absent package."""
    require(path)
    file = path.resolve()
    status = file.stat()
    identity = f"{file} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = home() / f"{file.stem}-{digest}"
    if not folder.is_dir():
        make(file, folder)
    return folder


def make(file: Path, folder: Path) -> None:
    """Make the folder of a GGUF file atomically, unless another process has. ValueError for an
    unreadable file."""
    log.warning("%s: its weights become dense float32, in %s", file.name, folder)
    try:
        publish_folder(folder, lambda target: _write(file, target), {"kind": "model"})
    except FileExistsError:
        pass
    except OSError:
        raise
    except Exception as error:  # the readers raise many kinds
        raise ValueError(
            f"{printable(file)}: cannot be read as a GGUF model ({type(error).__name__}: "
            f"{printable((str(error).splitlines() or [''])[0])})"
        ) from error


def format_of(folder: Path) -> str | None:
    """Return the format whose codes are the dense weights, or None. ValueError for a damaged
    gguf.json."""
    if not (folder / NOTE).is_file():
        return None
    note = read_json(folder / NOTE)
    name = note.get("format") if isinstance(note, dict) else None
    if name not in KINDS.values():
        raise ValueError(f"{printable(folder / NOTE)}: format: {printable(repr(name))} is unknown")
    return str(name)


def _check_readable(reader: Any) -> None:
    field = reader.fields.get("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture: {architecture!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    unread_names = [name for name in reader.fields if any(key in name for key in UNREAD)]
    unread_names += [tensor.name for tensor in reader.tensors if tensor.name == FREQUENCIES]
    if unread_names:
        raise ValueError(
            f"{', '.join(unread_names)}: scaled positions and windows are not read; take the model's "
            "safetensors"
        )


def _write(file: Path, target: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = GGUFReader(file)
    _check_readable(reader)
    kind = _block_format(reader)
    home, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(home, gguf_file=name).save_pretrained(target)
    if kind is not None and all(keeps(kind, w_NK) for w_NK in _linear_weights(model)):
        log.warning(
            "%s: its weights are exactly %s, the format where none is asked for", name, kind
        )
        (target / NOTE).write_text(json.dumps({"format": kind}) + "\n")


def _block_format(reader: Any) -> str | None:
    block_types = {
        tensor.tensor_type.name
        for tensor in reader.tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    }
    return KINDS.get(block_types.pop()) if len(block_types) == 1 else None


def _linear_weights(model: Any) -> Iterator[Tensor]:
    for name, tensor in model.named_parameters():
        if ".layers." in name and tensor.ndim == 2:
            yield tensor.detach()
