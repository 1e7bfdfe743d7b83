"""Environments of the package `verifiers`, by the id of an installed one: "verifiers/<name>".

Two interfaces are supported: `load_environment` with a rubric (verifiers below 0.4), and tasksets
of 0.4 (`verifiers.v1`). verifiers' own loop is replayed with the turns so far for the next messages
and the score, so it must be deterministic.
"""

from lowroll.envs.verifiers.environment import Verifiers

__all__ = ["Verifiers"]
