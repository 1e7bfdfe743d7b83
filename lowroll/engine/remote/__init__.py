"""Engines at the end of a wire: lowroll's own server, or a vLLM. Importable without torch."""

from lowroll.engine.remote.client import EngineLost, ServerError
from lowroll.engine.remote.engine import RemoteEngine
from lowroll.engine.remote.verify import NotArrived
from lowroll.engine.remote.vllm import VllmEngine

__all__ = ["EngineLost", "NotArrived", "RemoteEngine", "ServerError", "VllmEngine"]
