"""A model behind an address, for `lowroll generate` and `lowroll eval`.

Token ids travel, so a local tokenizer is needed: `--tokenizer`, or that of the served name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowroll.engine.base import Engine
from lowroll.model.folder import resolve
from lowroll.model.tokenizer import ChatTokenizer, load_tokenizer
from lowroll.types import printable

if TYPE_CHECKING:
    from lowroll.engine.remote import EnginePool


@dataclass(frozen=True)
class Server:
    """An address and the model behind it; `close` its engine at the end."""

    url: str
    model: str  # its served name
    engine: Engine
    chat: ChatTokenizer


def reach(
    url: str,
    model: str | None = None,
    tokenizer: str | Path | None = None,
    token_env: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Server:
    """Connect to the engine at an address. model: by default the first served one. token_env: the
    environment variable with its token.

    ValueError for a missing tokenizer or an unsupported server; RunFailed without an answer.
    """
    tokenizer_folder = given_chat = None
    if tokenizer is not None:
        tokenizer_folder = resolve(tokenizer, weights=False, key="--tokenizer")
        given_chat = ChatTokenizer(load_tokenizer(tokenizer_folder))
    engine = _connect(url, model, _read_token(token_env), tokenizer_folder)
    try:
        server_info = engine.server
        chat = given_chat or _served_tokenizer(
            url, dict.fromkeys((server_info.root, server_info.model))
        )
        chat.template_kwargs = dict(template_kwargs or {})
        return Server(url, server_info.model, engine, chat)
    except BaseException:
        engine.close()
        raise


def _read_token(name: str | None) -> str | None:
    if name is None:
        return None
    token = os.environ.get(name)
    if not token:
        raise ValueError(f"--token-env: {name} is not set")
    return token


def _connect(url: str, model: str | None, token: str | None, folder: Path | None) -> EnginePool:
    """Connect to the engine. A whole model in the tokenizer's folder supplies what a vLLM does not
    report."""
    from lowroll.engine.remote import connect

    is_model = folder is not None and (folder / "config.json").is_file()
    try:
        return connect(url, model=model, token=token, folder=folder if is_model else None)
    except ValueError as error:
        argument, _, detail = str(error).partition(":")
        option = {"url": "--server", "model": "--model", "folder": "--tokenizer"}.get(argument)
        message = f"{url}: {error}" if option is None else f"{option}:{detail}"
        raise ValueError(message) from None


def _served_tokenizer(url: str, names: dict[str, None]) -> ChatTokenizer:
    for name in names:
        try:
            return ChatTokenizer(load_tokenizer(resolve(name, weights=False)))
        except ValueError:
            continue
    names_text = " and ".join(printable(repr(name), 200) for name in names)
    raise ValueError(
        f"--tokenizer: {url} serves {names_text}, which is neither a model folder of this machine nor "
        "a hub id that can be read; name a folder or hub id with its tokenizer"
    )
