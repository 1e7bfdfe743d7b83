"""Environments: prompts, the scorer that judges a response, and `validate()` that judges the
scorer. No torch here."""

from __future__ import annotations

from lowroll.envs.base import Environment, GeneratedEnvironment, Validation
from lowroll.envs.table import ids, make
from lowroll.envs.tools import ToolEnvironment

__all__ = ["Environment", "GeneratedEnvironment", "ToolEnvironment", "Validation", "ids", "make"]
