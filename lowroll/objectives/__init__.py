"""Policy objectives: pure functions of log-probs, advantages and masks.

Each takes keywords only, [B, T] tensors with a mask or packed [N] tensors with `segments`, and
returns the objective J to maximise (a differentiable scalar; only `learner` carries gradient) and a
dict of statistics. `TABLE` lists them by name, `select(algorithm, correction)` combines two names.
`penalty` is the KL to a reference, `mismatch` the distance between sampler and learner (`by_length`
of each class of lengths, `spread` its distribution), `count` the denominators that make
micro-batches add up. `value_loss` is the critic's, to minimise.
"""

from lowroll.objectives.acr import acr
from lowroll.objectives.aipo import aipo
from lowroll.objectives.correction import Verdict, reweight
from lowroll.objectives.dapo import dapo
from lowroll.objectives.decoupled import decoupled
from lowroll.objectives.dr_grpo import dr_grpo
from lowroll.objectives.grpo import grpo
from lowroll.objectives.gspo import gspo
from lowroll.objectives.ipo import ipo
from lowroll.objectives.kl import penalty
from lowroll.objectives.mismatch import by_length, mismatch, spread
from lowroll.objectives.naive_is import naive_is
from lowroll.objectives.ppo import ppo
from lowroll.objectives.reduce import Counts, count
from lowroll.objectives.rloo import rloo
from lowroll.objectives.sparse import sparse
from lowroll.objectives.table import ALGORITHMS, CORRECTIONS, TABLE, Objective, select
from lowroll.objectives.tbpo import tbpo
from lowroll.objectives.tis import tis
from lowroll.objectives.value import value_loss

__all__ = [
    "ALGORITHMS",
    "CORRECTIONS",
    "TABLE",
    "Counts",
    "Objective",
    "Verdict",
    "acr",
    "aipo",
    "by_length",
    "count",
    "dapo",
    "decoupled",
    "dr_grpo",
    "grpo",
    "gspo",
    "ipo",
    "mismatch",
    "naive_is",
    "penalty",
    "ppo",
    "reweight",
    "rloo",
    "select",
    "sparse",
    "spread",
    "tbpo",
    "tis",
    "value_loss",
]
