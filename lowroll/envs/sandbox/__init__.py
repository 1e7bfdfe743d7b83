r"""A sandbox for a model's programs: namespaces isolate them, they see inputs alone, and outputs
are compared outside.

    verdict = run_cases(source, [Case("3 4\n", "7\n")])
    verdict = run_cases(source, [Case([3, 4], 7, fn_name="add")])

`isolation` checks the isolation, `jail` creates it, `inside` runs in it, and `run` outside.
"""

from __future__ import annotations

from lowroll.envs.sandbox.cases import Case, CaseResults, Result, SandboxLimits
from lowroll.envs.sandbox.isolation import SandboxMissing, run_cases
from lowroll.envs.sandbox.run import SandboxError
from lowroll.envs.sandbox.shapes import PRELUDE, cases_of, last_block

__all__ = [
    "PRELUDE",
    "Case",
    "SandboxLimits",
    "Result",
    "SandboxError",
    "SandboxMissing",
    "CaseResults",
    "cases_of",
    "last_block",
    "run_cases",
]
