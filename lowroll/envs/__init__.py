"""Environments: prompts, the scorer that judges a response, and `validate()` that judges the
scorer. No torch here."""

from __future__ import annotations

from lowroll.envs.base import Environment, GeneratedEnvironment, Validation
from lowroll.envs.table import ids, make

__all__ = ["Environment", "GeneratedEnvironment", "Validation", "ids", "make"]
