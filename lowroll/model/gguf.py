"""A GGUF file as a model folder: transformers reads it, and its weights become dense.

The folder is made once, in float32, which holds the file's numbers exactly, and lies in the hub's
cache; a file that changed gets another one. Where all linear layers of the file have one kind of
block that is a format here (`quant.blocks`), and that format makes the file's codes of the dense
weights again, bit for bit, the folder notes it in `gguf.json`: then it is the format of rollouts
for which none is asked. Files of several kinds are dense.
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

from lowroll.checkpoint.publish import publish_folder
from lowroll.model.files import read_json
from lowroll.quant.blocks import keeps
from lowroll.types import printable

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
# what transformers leaves out of the config it makes of a file: the model would be another one
UNREAD = (".rope.scaling.", ".attention.sliding_window")
FREQUENCIES = "rope_freqs.weight"
NOTE = "gguf.json"  # beside the weights that a file became: {"format": the one that holds them exactly}
KINDS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q8_0": "q8_0"}

log = logging.getLogger(__name__)


def home() -> Path:
    """The folder of the hub's cache in which folders of GGUF files lie."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME, "lowroll")


def require(name: str | Path) -> None:
    """ValueError says what to install when GGUF files cannot be read."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{printable(name)}: GGUF files need a package: pip install 'lowroll[gguf]'"
        )


def folder_of(path: Path) -> Path:
    """The folder with the config, the dense weights and the tokenizer of a GGUF file. ValueError
    names the file when it cannot be read, and what to install for it."""
    require(path)
    file = path.resolve()
    status = file.stat()
    named = f"{file} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    folder = home() / f"{file.stem}-{digest}"
    if not folder.is_dir():
        make(file, folder)
    return folder


def make(file: Path, folder: Path) -> None:
    """Make the folder of a GGUF file, whole or not at all. One that another process makes meanwhile
    stays. ValueError names the file when it cannot be read."""
    log.warning("%s: its weights become dense float32, in %s", file.name, folder)
    try:
        publish_folder(folder, lambda target: _write(file, target), {"kind": "model"})
    except FileExistsError:  # another process was quicker
        pass
    except OSError:
        raise
    except Exception as error:  # the readers raise many kinds; the user needs one line
        raise ValueError(
            f"{printable(file)}: cannot be read as a GGUF model ({type(error).__name__}: "
            f"{printable((str(error).splitlines() or [''])[0])})"
        ) from error


def format_of(folder: Path) -> str | None:
    """Return the format in which the folder's dense weights are exactly the codes of a GGUF file;
    None where it notes none. ValueError names a note that is damaged."""
    if not (folder / NOTE).is_file():
        return None
    found = read_json(folder / NOTE)
    name = found.get("format") if isinstance(found, dict) else None
    if name not in KINDS.values():
        raise ValueError(f"{printable(folder / NOTE)}: format: {printable(repr(name))} is unknown")
    return str(name)


def _check(reader: Any) -> None:
    """ValueError names what of the file would be lost."""
    field = reader.fields.get("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture: {architecture!r} is not one of {', '.join(ARCHITECTURES)}"
        )
    lost = [name for name in reader.fields if any(key in name for key in UNREAD)]
    lost += [tensor.name for tensor in reader.tensors if tensor.name == FREQUENCIES]
    if lost:
        raise ValueError(
            f"{', '.join(lost)}: scaled positions and windows are not read; take the model's "
            "safetensors"
        )


def _write(file: Path, target: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reader = GGUFReader(file)
    _check(reader)
    kind = _kind(reader)
    home, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    # the weights are dense by now, and are to be saved so
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(home, gguf_file=name).save_pretrained(target)
    if kind is not None and all(keeps(kind, w_NK) for w_NK in _linears(model)):
        log.warning(
            "%s: its weights are exactly %s, the format where none is asked for", name, kind
        )
        (target / NOTE).write_text(json.dumps({"format": kind}) + "\n")


def _kind(reader: Any) -> str | None:
    """The format of every linear layer; None where they have several kinds of blocks, or another
    one."""
    kinds = {
        tensor.tensor_type.name
        for tensor in reader.tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    }
    return KINDS.get(kinds.pop()) if len(kinds) == 1 else None


def _linears(model: Any) -> Iterator[Tensor]:
    """The matrices of the layers."""
    for name, tensor in model.named_parameters():
        if ".layers." in name and tensor.ndim == 2:
            yield tensor.detach()
