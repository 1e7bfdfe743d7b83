"""A sandbox for programs that a model wrote: they run in namespaces and see inputs alone; outputs
are compared outside.

    verdict = run_cases(source, [Case("3 4\\n", "7\\n")])
    verdict = run_cases(source, [Case([3, 4], 7, fn_name="add")])

`walls` proves that the namespaces isolate here, or refuses; `jail` builds them; `inside` is their
first process and runs the program once a case; `run` is the other end of its pipes. `jail` and
`inside` import the standard library alone.
"""

from __future__ import annotations

from lowroll.envs.sandbox.cases import Case, CaseResults, Result, SandboxLimits
from lowroll.envs.sandbox.run import SandboxError, run_cases
from lowroll.envs.sandbox.shapes import PRELUDE, cases_of, last_block
from lowroll.envs.sandbox.walls import SandboxMissing

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
