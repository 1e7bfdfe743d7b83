"""A GGUF file as a model folder: transformers reads it, and its weights become dense.

No format here has the grids of GGUF (groups of 32 in several formats, often beside each other in one
file), so no codes are kept. The folder is made once, in float32, which holds the file's numbers
exactly, and lies in the hub's cache; a file that changed gets another one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path

import torch

from lowroll.checkpoint.publish import publish_folder
from lowroll.types import printable

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
# what transformers leaves out of the config it makes of a file: the model would be another one
UNREAD = (".rope.scaling.", ".attention.sliding_window")
FREQUENCIES = "rope_freqs.weight"

log = logging.getLogger(__name__)


def folder_of(path: Path) -> Path:
    """The folder with the config, the dense weights and the tokenizer of a GGUF file. ValueError
    names the file when it cannot be read, and what to install for it."""
    from huggingface_hub import constants

    if importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{printable(path)}: GGUF files need a package: pip install 'lowroll[gguf]'"
        )
    file = path.resolve()
    status = file.stat()
    named = f"{file} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(named.encode()).hexdigest()[:16]
    folder = Path(constants.HF_HOME, "lowroll", f"{file.stem}-{digest}")
    if folder.is_dir():
        return folder
    log.warning("%s: its weights become dense float32, in %s", path, folder)
    try:
        publish_folder(folder, lambda target: _write(file, target), {"kind": "model"})
    except FileExistsError:  # another process was quicker
        pass
    except OSError:
        raise
    except Exception as error:  # the readers raise many kinds; the user needs one line
        raise ValueError(
            f"{printable(path)}: cannot be read as a GGUF model ({type(error).__name__}: "
            f"{printable((str(error).splitlines() or [''])[0])})"
        ) from error
    return folder


def _check(file: Path) -> None:
    """ValueError names what of the file would be lost."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
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
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check(file)
    home, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.float32)
    model.config.architectures = [type(model).__name__]
    # the weights are dense by now, and are to be saved so
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(home, gguf_file=name).save_pretrained(target)
