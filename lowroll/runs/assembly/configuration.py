"""The configuration of a run started from Python, where environments may be classes, reward
functions functions, and data rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowroll.config import RunConfig, as_config
from lowroll.envs import cells
from lowroll.runs.folder import ENVIRONMENTS


def read(
    config: str | Path | RunConfig | Mapping[str, object], overrides: Mapping[str, object]
) -> tuple[RunConfig, dict[Path, str]]:
    """Return the settings, and the texts of files that they need: environments, reward functions
    and data of a notebook or script need one in `output_dir/environments`, which is not written
    here."""
    python_objects: list[Any] = []
    texts: dict[Path, str] = {}

    def made(write: Callable[[Any], str]) -> RunConfig:
        return as_config(cells.replaced(config, write), cells.replaced(overrides, write))

    def look(value: Any) -> str:
        python_objects.append(value)
        return "reverse-text"

    def name(value: Any) -> str:
        env_file = cells.named(value, Path(cfg.output_dir) / ENVIRONMENTS)
        if env_file.file is not None:
            texts[env_file.file] = env_file.text
        return env_file.id

    cfg = made(look)
    return made(name) if python_objects else cfg, texts
