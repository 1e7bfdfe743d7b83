"""Environments: prompts, a scorer of responses, and `validate()` for the scorer. Without torch."""

from __future__ import annotations

from lowroll.envs.base import Environment, GeneratedEnvironment, Validation
from lowroll.envs.table import ids, make
from lowroll.envs.tools import ToolEnvironment

__all__ = ["Environment", "GeneratedEnvironment", "ToolEnvironment", "Validation", "ids", "make"]
