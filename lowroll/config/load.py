"""The sources of settings: a file, or a tree written in Python.

A file with a section `orch:` or `infer:` holds Surogate's three files (`surogate/read.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from pkgutil import resolve_name

from lowroll.config.build import Overrides, build, read
from lowroll.config.document import ConfigError, Document, plain
from lowroll.config.resolve import RunConfig

SECTIONS = "lowroll.config.surogate.read:load_sections"  # imported only when needed


def load(path: str | FilePath, overrides: Overrides = ()) -> RunConfig:
    """Read a run's YAML file, apply overrides, check all, and fill in dependent defaults.

    overrides: {"train.max_steps": 20} or ["train.max_steps=20"] (values are YAML; list items by
    index: env.0.id=...). ConfigError, a ValueError, has one line for each problem.
    """
    document = read(path)
    if {"orch", "infer"} & document.value.keys():
        cfg: RunConfig = resolve_name(SECTIONS)(document, overrides)
        return cfg
    return build(document, overrides)


def from_mapping(values: Mapping[str, object], overrides: Overrides = ()) -> RunConfig:
    """Load a tree written in Python."""
    return build(Document(plain(dict(values), "config"), name="config"), overrides)


def as_config(
    given: str | FilePath | RunConfig | Mapping[str, object], overrides: Overrides = ()
) -> RunConfig:
    """Return the settings of a file, a tree of the same keys, or a RunConfig."""
    if isinstance(given, (str, FilePath)):
        return load(given, overrides)
    if isinstance(given, RunConfig):
        if overrides:
            return from_mapping(given.model_dump(mode="json", exclude_unset=True), overrides)
        return given
    if isinstance(given, Mapping):
        return from_mapping(given, overrides)
    raise ConfigError(
        f"config: expected a path, a mapping or a RunConfig, got {type(given).__name__}"
    )
