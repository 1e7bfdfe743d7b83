"""The run's settings: a strict schema, loading with file and line in every error, and Surogate's
three files."""

from lowroll.config.data import EnvConfig
from lowroll.config.document import ConfigError
from lowroll.config.load import as_config, from_mapping, load
from lowroll.config.schema import RunConfig
from lowroll.config.surogate.read import load_surogate
from lowroll.config.surogate.roles import NotThereYet, load_role

__all__ = [
    "ConfigError",
    "EnvConfig",
    "NotThereYet",
    "RunConfig",
    "as_config",
    "from_mapping",
    "load",
    "load_role",
    "load_surogate",
]
