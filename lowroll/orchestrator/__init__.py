"""The orchestrator: from prompts to scored batches with advantages. Plain Python, no torch."""

from __future__ import annotations

from lowroll.orchestrator.client import EngineClient, Scorer, Tokenizer
from lowroll.orchestrator.errors import InvalidRollout, NoSignal, ScoringFailed
from lowroll.orchestrator.estimates import pass_at_k
from lowroll.orchestrator.evaluate import evaluate
from lowroll.orchestrator.filters import Gibberish, Repetition
from lowroll.orchestrator.loop import Orchestrator
from lowroll.orchestrator.schedule import TemperatureSchedule
from lowroll.orchestrator.settings import Sampling, Settings

__all__ = [
    "EngineClient",
    "Gibberish",
    "InvalidRollout",
    "NoSignal",
    "Orchestrator",
    "Repetition",
    "Sampling",
    "Scorer",
    "ScoringFailed",
    "Settings",
    "TemperatureSchedule",
    "Tokenizer",
    "evaluate",
    "pass_at_k",
]
