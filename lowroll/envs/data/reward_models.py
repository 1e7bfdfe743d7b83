"""Reward models: one-output sequence classifiers of transformers, as in TRL (docs/data.md).

Weights are safetensors; a model's code never runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lowroll.types import HUB_NAME, Message, printable

AUTO = "AutoModelForSequenceClassification"
FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]


class AnsweredPrompt(Protocol):
    """A prompt and its responses."""

    @property
    def prompt(self) -> str | list[Message]: ...

    @property
    def said(self) -> Sequence[list[Message]]: ...

    @property
    def texts(self) -> list[str]: ...


def is_model(id: str) -> bool:
    """Return whether an id may be a reward model: a folder, or a hub id `owner/name`."""
    return Path(id).expanduser().is_dir() or re.fullmatch(HUB_NAME, id) is not None


class RewardModel:
    """A reward function that is a model; ValueError when it cannot be loaded."""

    file: str | None = None
    columns: frozenset[str] | None = frozenset()
    takes: tuple[str, ...] = ()
    is_of_several = True

    def __init__(self, id: str) -> None:
        self.id = id
        self.folder = _model_folder(id)
        self.name = Path(id).name
        self._loaded: tuple[Any, Any] | None = None
        _check_model(id, self.folder)

    @property
    def where(self) -> str:
        return f"reward model {self.id!r}"

    def check(self, columns: Sequence[str]) -> None:
        """Do nothing: a reward model takes no columns."""

    def prepare(self) -> None:
        """Load the model; ValueError without a head of one output."""
        if self._loaded is None:
            self._loaded = self._load()

    def rewards(self, asked: AnsweredPrompt) -> list[float | None]:
        self.prepare()
        assert self._loaded is not None
        model, tokenizer = self._loaded
        if isinstance(asked.prompt, str):
            texts = [asked.prompt + response for response in asked.texts]
        else:
            texts = [
                tokenizer.apply_chat_template([*asked.prompt, *response], tokenize=False)
                for response in asked.said
            ]
        inputs = tokenizer(
            text=texts,
            return_tensors="pt",
            padding=True,
            padding_side="right",
            add_special_tokens=False,
        )
        return [float(logit) for logit in model(**inputs).logits[:, 0]]

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        model, loading_info = AutoModelForSequenceClassification.from_pretrained(
            self.folder,
            num_labels=1,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        if missing := sorted(loading_info["missing_keys"]):
            raise ValueError(f"{self.where}: its weights lack {missing[0]}")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        # the logit is the last non-padding token's
        model.config.pad_token_id = tokenizer.pad_token_id
        return model.eval().requires_grad_(False), tokenizer


def _model_folder(id: str) -> Path:
    folder = Path(id).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            path = snapshot_download(id, allow_patterns=FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            path = snapshot_download(id, allow_patterns=FILES)
    except Exception as error:
        first_line = printable((str(error).splitlines() or [""])[0])
        raise ValueError(
            f"reward_funcs: {id!r} is no folder, and the hub could not deliver it "
            f"({type(error).__name__}: {first_line})"
        ) from error
    return Path(path)


def _check_model(id: str, folder: Path) -> None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"reward_funcs: the folder {id!r} has no config.json") from None
    except ValueError as error:
        raise ValueError(f"reward_funcs: {folder / 'config.json'} is no JSON: {error}") from None
    if AUTO in config.get("auto_map", {}):
        raise ValueError(f"reward_funcs: {id!r} brings code of its own, which is not run")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"reward_funcs: {id!r} has no weights as safetensors")
    labels = config.get("id2label")
    if labels is not None and len(labels) != 1:
        raise ValueError(
            f"reward_funcs: {id!r} has {len(labels)} labels, and a reward model has one"
        )
