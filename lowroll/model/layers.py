"""The layers of learner and engine, behind the same calls."""

from __future__ import annotations

from typing import NamedTuple

from lowroll.model.engine_linear import EngineLinear
from lowroll.model.experts import EngineExperts, Experts, LearnerExperts
from lowroll.model.learner_linear import LearnerLinear
from lowroll.model.linear import Linear


class Layers(NamedTuple):
    linear: type[Linear]
    experts: type[Experts]


LEARNER = Layers(LearnerLinear, LearnerExperts)
ENGINE = Layers(EngineLinear, EngineExperts)
