"""The configuration of a run that Python code starts: an environment may be a class of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from lowroll.config import RunConfig, as_config
from lowroll.envs import Environment, cells
from lowroll.runs.folder import ENVIRONMENTS


def read(
    config: str | Path | RunConfig | Mapping[str, object], overrides: Mapping[str, object]
) -> tuple[RunConfig, dict[Path, str]]:
    """The settings of a YAML file, a mapping or a RunConfig. An `env` may be, or have as its `id`,
    an Environment class; one of a notebook or script needs a file in `output_dir/environments`.
    Beside the settings the texts of these files, which are not written here."""
    classes: list[type[Environment]] = []
    texts: dict[Path, str] = {}

    def made(write: Callable[[type[Environment]], str]) -> RunConfig:
        return as_config(cells.replaced(config, write), cells.replaced(overrides, write))

    def look(cls: type[Environment]) -> str:
        classes.append(cls)
        return "reverse-text"

    def name(cls: type[Environment]) -> str:
        path, text = cells.as_file(cls, Path(cfg.output_dir) / ENVIRONMENTS)
        if text is not None:
            texts[path] = text
        return f"{path}:{cls.__qualname__}"

    cfg = made(look)
    return made(name) if classes else cfg, texts
