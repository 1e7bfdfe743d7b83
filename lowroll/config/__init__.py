"""The run's settings: a strict schema, loading, and Surogate's three files."""

from lowroll.config.data import EnvConfig
from lowroll.config.document import ConfigError
from lowroll.config.load import as_config, from_mapping, load
from lowroll.config.resolve import RunConfig

__all__ = [
    "ConfigError",
    "EnvConfig",
    "RunConfig",
    "as_config",
    "from_mapping",
    "load",
]
