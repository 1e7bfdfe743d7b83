"""The configuration of a run started from Python, with classes, functions and rows as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig, as_config
from lowroll.envs import notebook_files
from lowroll.runs.folder import ENVIRONMENTS


def read(
    config: str | Path | RunConfig | Mapping[str, object], overrides: Mapping[str, object]
) -> tuple[RunConfig, dict[Path, str]]:
    """Return the settings, and the texts of their files in `output_dir/environments`.

    With Python objects the settings are built twice, first for `output_dir`.
    """
    python_objects: list[Any] = []
    texts: dict[Path, str] = {}

    def build(id_of: Callable[[Any], str]) -> RunConfig:
        return as_config(
            notebook_files.replaced(config, id_of), notebook_files.replaced(overrides, id_of)
        )

    def placeholder(value: Any) -> str:
        python_objects.append(value)
        return "reverse-text"

    def id_in_file(value: Any) -> str:
        env_file = notebook_files.named(value, folder)
        if env_file.file is not None:
            texts[env_file.file] = env_file.text
        return env_file.id

    cfg = build(placeholder)
    folder = Path(cfg.output_dir) / ENVIRONMENTS
    if python_objects:
        cfg = build(id_in_file)
    return cfg, texts
