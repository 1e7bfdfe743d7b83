"""A sandbox for programs that a model wrote: they run behind namespaces, see inputs alone, and what
they print is compared outside.

    verdict = run_cases(source, [Case("3 4\\n", "7\\n")])
    verdict = run_cases(source, [Case([3, 4], 7, fn_name="add")])

`walls` proves that the namespaces isolate here, and refuses to run where they do not; `jail` builds
them; `inside` is the first process in them, which runs the program once for each case; `run` is the
other end of its pipes. `jail` and `inside` import the
standard library alone.
"""

from __future__ import annotations

from lowroll.envs.sandbox.cases import Case, CaseResults, Result, SandboxLimits
from lowroll.envs.sandbox.run import SandboxError
from lowroll.envs.sandbox.shapes import PRELUDE, cases_of, last_block
from lowroll.envs.sandbox.walls import SandboxMissing, run_cases

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
